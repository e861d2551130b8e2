"""VirtualEngine: one Scheduler under a virtual clock, its device a function from a plan to ns. It computes no token.

    engine = VirtualEngine(config, step_time)           # a StepTimeModel, or any function StepPlan -> ns
    engine.arrive(at_ns, [request], [true_length])      # now or later, in any order; max_tokens is clamped here
    engine.run_until(time_ns)                           # all events up to then; a step may remain in flight
    engine.drain()                                      # until nobody is left
    engine.finished, engine.refused, engine.steps       # what came of it; engine.scheduler can be asked at any time

A request ends with "stop" when it has made its true number of output tokens, or with "length" at max_tokens if that
comes first. An arrival that falls into a step is added at its own time while the step is in flight, as a real engine
does. No step begins at `time_ns` itself before time goes on, so that others may still arrive at that moment.

A prompt is only a length, but with prefix caching equal tokens are shared: `[key] * length` with another `key` for
each prompt shares nothing, and `[prefix_key] * prefix_length + [key] * rest` shares the prefix.

Who ends in which step is known when a request samples its first token, for a decode is in every step; so there is
nothing to do for each token but what the scheduler does.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Sequence

from pyengine.config import SchedulerConfig
from pyengine.errors import PyEngineError
from pyengine.request import Request, RequestState
from pyengine.scheduler.decision_log import DecisionLog
from pyengine.scheduler.plan import StepPlan
from pyengine.scheduler.scheduler import Scheduler
from pyengine.scheduler.step_time import StepTimeModel, step_features

StepTime = Callable[[StepPlan], int]


class StepLog:
    """What is kept of each step, in columns: when it began and ended, its decodes and its prefill tokens."""

    __slots__ = ("ended_ns", "num_decodes", "num_prefill_tokens", "started_ns")

    def __init__(self) -> None:
        self.started_ns = array("q")
        self.ended_ns = array("q")
        self.num_decodes = array("l")
        self.num_prefill_tokens = array("l")

    def __len__(self) -> int:
        return len(self.ended_ns)


class VirtualEngine:
    """See the module for how it is used.

    `on_finish(request)` is called at each end and each refusal, with now_ns at that time; it may call `arrive` (a
    closed loop). `scheduler_step_time` is the model that the scheduler itself keeps latency limits by, and learns with;
    by default a new one, which knows nothing of the device. `log` is the scheduler's decision log.

    Attributes:
        now_ns: the virtual time.
        scheduler: the scheduler, whose clock that is; to be asked, not to be driven.
        finished: the requests that ended or were aborted, in that order, with all their times; may be emptied.
        refused: (request, error, time in ns) of those that the scheduler did not accept, or gave up before a start.
        steps: columns, one entry a step; None if not kept.
        num_steps / busy_ns: how many steps ran, and how long they took together.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        step_time: StepTimeModel | StepTime,
        *,
        start_ns: int = 0,
        on_finish: Callable[[Request], None] | None = None,
        keep_steps: bool = True,
        scheduler_step_time: StepTimeModel | None = None,
        log: DecisionLog | None = None,
    ) -> None:
        self.now_ns = start_ns
        self.scheduler = Scheduler(
            config, clock=lambda: self.now_ns, step_time=scheduler_step_time, log=log, records_calls=False
        )
        self.finished: list[Request] = []
        self.refused: list[tuple[Request, PyEngineError, int]] = []
        self.steps = StepLog() if keep_steps else None
        self.num_steps = 0
        self.busy_ns = 0
        self._step_time = device_of(step_time) if isinstance(step_time, StepTimeModel) else step_time
        self._on_finish = on_finish
        self._arrivals: list[tuple[int, int, Sequence[Request], Sequence[int]]] = []
        self._num_arrivals = 0
        self._true_lengths: dict[Request, int] = {}
        # By step: those that end with the token it samples, unless they are preempted or aborted before.
        self._ends: dict[int, list[Request]] = {}
        self._in_flight: StepPlan | None = None
        self._step_started_ns = 0
        self._step_ends_ns = 0
        # Nothing can be planned before this time, or before somebody arrives or leaves; None: it can be tried now.
        self._asleep_until_ns: float | None = None

    # ---- What comes in

    def arrive(self, at_ns: int, requests: Sequence[Request], true_lengths: Sequence[int]) -> None:
        """The sequences of one submit arrive at `at_ns`, and will make that many output tokens (>= 1) each.

        Raises ValueError for a time that has passed, or a length < 1.
        """
        if at_ns < self.now_ns:
            raise ValueError(f"A request arrives at {at_ns} ns, but it is {self.now_ns} ns already.")
        if len(true_lengths) != len(requests) or min(true_lengths, default=1) < 1:
            raise ValueError(f"true_lengths are {true_lengths!r}; there must be one >= 1 for each of the requests.")
        heapq.heappush(self._arrivals, (at_ns, self._num_arrivals, requests, true_lengths))
        self._num_arrivals += 1

    def abort(self, request: Request, reason: str = "abort") -> bool:
        """End `request` now, in whatever state it is; False if it had ended before."""
        if not self.scheduler.abort(request, reason):
            return False
        self._left(request)
        self._asleep_until_ns = None
        return True

    # ---- Time

    def run_until(self, time_ns: float, first_token_of: Request | None = None) -> None:
        """Let everything happen that happens up to `time_ns`, which is then now. A step may remain in flight.

        Given `first_token_of`, stop as soon as that request has its first token or has ended.
        """
        while not (first_token_of is not None and (first_token_of.token_times_ns or first_token_of.is_finished)):
            next_ns = self._prepare(time_ns)
            if next_ns > time_ns or next_ns == math.inf:
                if time_ns < math.inf:
                    self.now_ns = max(self.now_ns, int(time_ns))
                return
            self._advance(int(next_ns))

    def drain(self) -> None:
        """Run until every request that arrives has ended. Raises RuntimeError if some wait and nothing will happen."""
        self.run_until(math.inf)
        if self.scheduler.has_unfinished:
            raise RuntimeError(f"{self.scheduler.num_waiting} requests wait, and nothing is going to happen.")

    def look_again(self) -> None:
        """The scheduler was told something directly (hold, wake, pause): what could not be planned perhaps can now."""
        self._asleep_until_ns = None

    @property
    def step_ends_ns(self) -> int | None:
        """When the step in flight ends; None if there is none."""
        return None if self._in_flight is None else self._step_ends_ns

    def _prepare(self, time_ns: float) -> float:
        """Do what is due now, but begin a step only if time goes on; returns when something happens next."""
        self._deliver_arrivals()
        if self._in_flight is None and self.now_ns < time_ns:
            self._begin_step()
        next_ns = math.inf
        if self._in_flight is not None:
            next_ns = self._step_ends_ns
        elif self._asleep_until_ns is not None:
            next_ns = self._asleep_until_ns
        return min(next_ns, self._arrivals[0][0]) if self._arrivals else next_ns

    def _advance(self, next_ns: int) -> None:
        self.now_ns = max(self.now_ns, next_ns)
        if self._in_flight is not None and self.now_ns >= self._step_ends_ns:
            self._end_step(self._in_flight)
        elif self._asleep_until_ns is not None and self.now_ns >= self._asleep_until_ns:
            self._asleep_until_ns = None

    def _deliver_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now_ns:
            _, _, requests, true_lengths = heapq.heappop(self._arrivals)
            try:
                for request in requests:
                    limit, clamped = self.scheduler.clamp_max_tokens(request.num_prompt_tokens, request.max_tokens)
                    request.max_tokens, request.max_tokens_clamped = limit, clamped or request.max_tokens_clamped
                self.scheduler.add(requests)
            except PyEngineError as error:
                for request in requests:
                    self._refused(request, error)
                continue
            self._true_lengths.update(zip(requests, true_lengths, strict=True))
            self._asleep_until_ns = None

    # ---- Steps

    def _begin_step(self) -> None:
        scheduler = self.scheduler
        if self._asleep_until_ns is not None or not scheduler.has_unfinished:
            return
        plan = scheduler.schedule()
        for request, error in plan.refused:
            self._true_lengths.pop(request, None)
            self._refused(request, error)
        if plan.is_empty:
            wake_ns = scheduler.next_wake_ns()
            self._asleep_until_ns = math.inf if wake_ns is None else max(wake_ns, self.now_ns + 1)
            return
        self._in_flight = plan
        self._step_started_ns = self.now_ns
        self._step_ends_ns = self.now_ns + max(1, self._step_time(plan))

    def _end_step(self, plan: StepPlan) -> None:
        leaving = self._ends.pop(plan.step, [])
        finish_reasons: dict[int, str] = {}
        for request in leaving:
            # It may have been preempted or aborted since it was noted.
            if request.state is RequestState.DECODE and self._makes_last_token(request):
                finish_reasons[plan.requests.index(request)] = "stop"
        for i in range(plan.num_decode_tokens, len(plan.requests)):
            if not plan.samples[i]:
                continue
            request = plan.requests[i]
            left = min(self._true_lengths.get(request, 0), request.max_tokens) - request.num_output_tokens
            if left > 1:
                self._ends.setdefault(plan.step + left - 1, []).append(request)
                continue
            leaving.append(request)
            if self._makes_last_token(request):
                finish_reasons[i] = "stop"
        self._in_flight = None
        self.scheduler.commit(plan, [0] * len(plan.requests), finish_reasons)
        self._log_step(plan)
        for request in leaving:
            if request.is_finished:
                self._left(request)

    def _makes_last_token(self, request: Request) -> bool:
        """Whether the next token of `request` is the last that it makes by itself."""
        return request.num_output_tokens + 1 == self._true_lengths.get(request)

    def _log_step(self, plan: StepPlan) -> None:
        self.num_steps += 1
        self.busy_ns += self._step_ends_ns - self._step_started_ns
        if self.steps is not None:
            self.steps.started_ns.append(self._step_started_ns)
            self.steps.ended_ns.append(self._step_ends_ns)
            self.steps.num_decodes.append(plan.num_decode_tokens)
            self.steps.num_prefill_tokens.append(plan.num_prefill_tokens)

    def _refused(self, request: Request, error: PyEngineError) -> None:
        self.refused.append((request, error, self.now_ns))
        if self._on_finish is not None:
            self._on_finish(request)

    def _left(self, request: Request) -> None:
        if self._true_lengths.pop(request, None) is not None:
            self.finished.append(request)
            if self._on_finish is not None:
                self._on_finish(request)


def device_of(model: StepTimeModel) -> StepTime:
    """A device whose steps take exactly what `model` predicts."""

    def step_time(plan: StepPlan) -> int:
        return model.predict(step_features(plan))

    return step_time
