"""The event loop: replicas, a router and a workload, event by event in virtual time. The same input, the same run."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

import numpy as np

from pyengine.config import SchedulerConfig
from pyengine.request import Request
from pyengine.scheduler.decision_log import DecisionLog
from pyengine.scheduler.plan import StepPlan
from pyengine.scheduler.step_time import StepFeatures, StepTimeModel, step_features
from pyengine.scheduler.virtual import VirtualEngine
from pyengine.simulate.profiles import DeviceProfile
from pyengine.simulate.results import Recorder, RunResult, curve, quantiles
from pyengine.simulate.routers import Load, Router
from pyengine.simulate.workload import SimRequest, Workload

OnProgress = Callable[[int], None]
_PROGRESS_EVERY = 200  # requests
DEFAULT_MAX_TOKENS = 2048
DEFAULT_LONG_FROM = 4096


@dataclass(frozen=True, slots=True)
class Setup:
    """What is the same for all policies and seeds of a comparison.

    Attributes:
        max_tokens: the limit that a request declares where the workload does not say; a request that will make more
            declares what it makes, so that its length does not depend on this.
        long_from: a prompt of so many tokens or more counts as long.
        jitter: by how much, of its time, a step is longer or shorter than the profile says (standard deviation of a
            lognormal factor of mean 1).
    """

    profile: DeviceProfile
    num_replicas: int = 1
    max_tokens: int = DEFAULT_MAX_TOKENS
    long_from: int = DEFAULT_LONG_FROM
    jitter: float = 0.0


class Device:
    """What a replica's steps run on: takes as long as the model says, times random jitter, and counts."""

    def __init__(self, model: StepTimeModel, jitter: float, seed: int) -> None:
        self.num_seqs = 0
        self._model = model
        self._jitter = jitter
        self._random = np.random.default_rng(seed)
        self._factors: list[float] = []

    def __call__(self, plan: StepPlan) -> int:
        """How long `plan` takes, in ns."""
        self.num_seqs += len(plan.requests)
        duration_ns = self._model.predict(step_features(plan))
        return round(duration_ns * self._next_factor()) if self._jitter else duration_ns

    def _next_factor(self) -> float:
        """Lognormal, of mean 1."""
        if not self._factors:
            self._factors = self._random.lognormal(-(self._jitter**2) / 2, self._jitter, 1024).tolist()
        return self._factors.pop()


class Unlearned(StepTimeModel):
    """A scheduler's model where no limit needs one: to learn would take a tenth of the time, and change nothing."""

    __slots__ = ()

    def observe(self, features: StepFeatures, duration_ns: int) -> None:
        """Do not."""


class Replica:
    """A virtual engine and what runs its steps; `next_ns` is when it is to be called next, None: not by itself."""

    __slots__ = ("device", "engine", "next_ns")

    def __init__(self, config: SchedulerConfig, device: Device, on_finish: Callable[[Request], None]) -> None:
        self.device = device
        # Of the decision log only each request's own account is read, as it ends.
        log = DecisionLog(config, num_steps=1, num_records=1, num_ended=1)
        has_limits = config.itl_limit_ms is not None or config.ttft_limit_ms is not None
        self.engine = VirtualEngine(
            config,
            self.device,
            on_finish=on_finish,
            keep_steps=False,
            scheduler_step_time=StepTimeModel() if has_limits else Unlearned(),
            log=log,
        )
        self.next_ns: int | None = None

    def submit(self, now_ns: int, request: Request, output_tokens: int) -> None:
        """A request arrives."""
        self.engine.run_until(now_ns)
        self.engine.arrive(now_ns, [request], [output_tokens])
        self.engine.run_until(now_ns)

    def run(self, now_ns: int) -> None:
        """End the step that ends now, and begin the next one if there is something to run."""
        self.engine.run_until(now_ns + 1)
        self.engine.finished.clear()

    def wants_call_ns(self) -> int | None:
        """When something is going to happen here, if nobody arrives before."""
        engine = self.engine
        if engine.step_ends_ns is not None:
            return engine.step_ends_ns
        if not engine.scheduler.has_unfinished:
            return None
        wake_ns = engine.scheduler.next_wake_ns()
        return None if wake_ns is None else max(wake_ns, engine.now_ns)


class Cluster:
    """One run. `run` is called once."""

    def __init__(
        self, workload: Workload, config: SchedulerConfig, setup: Setup, router: Router, *, knows_lengths: bool
    ) -> None:
        self.recorder = Recorder(setup.long_from, config.itl_limit_ms)
        model = setup.profile.model()
        self.replicas = [
            Replica(config, Device(model, setup.jitter, place), partial(self._ended, place))
            for place in range(setup.num_replicas)
        ]
        self._workload = workload
        self._setup = setup
        self._router = router
        self._knows_lengths = knows_lengths
        self._load = Load(setup.num_replicas)
        self._num_done = 0
        self._calls: list[tuple[int, int]] = []  # heap of (when, replica); one that its replica forgot is out of date
        self._users: list[deque[SimRequest]] = []
        self._thinking: list[tuple[int, int]] = []  # heap of (when, user), in a closed loop
        if workload.is_closed:
            self._users = [deque() for _ in range(workload.num_users)]
            for asked in workload.requests:
                self._users[asked.user].append(asked)
            for user in range(workload.num_users):
                self._think(user, 0)

    def run(self, on_progress: OnProgress | None = None) -> None:
        """Run until every request has ended or was refused; `on_progress` gets how many have, now and then."""
        arrivals = iter(()) if self._workload.is_closed else iter(self._workload.requests)
        coming = next(arrivals, None)
        calls, thinking = self._calls, self._thinking
        reported = 0
        while True:
            # Whoever arrives at the very time at which a step ends is in time for the next one.
            call_ns = calls[0][0] if calls else None
            if coming is not None and (call_ns is None or coming.arrival_ns <= call_ns):
                self._arrive(coming.arrival_ns, coming)
                coming = next(arrivals, None)
            elif thinking and (call_ns is None or thinking[0][0] <= call_ns):
                now_ns, user = heappop(thinking)
                self._arrive(now_ns, self._users[user].popleft())
            elif call_ns is not None:
                self._call(*heappop(calls))
            else:
                break
            if on_progress is not None and self._num_done - reported >= _PROGRESS_EVERY:
                reported = self._num_done
                on_progress(reported)
        stuck = sum(replica.engine.scheduler.num_waiting for replica in self.replicas)
        if stuck:
            raise RuntimeError(f"{stuck} requests wait for ever: the scheduler had nothing to run and no time to wake.")
        if on_progress is not None:
            on_progress(self._num_done)

    def _arrive(self, now_ns: int, asked: SimRequest) -> None:
        place = self._router.choose(asked, self._load)
        counted = self._load.sent(asked, place)
        replica = self.replicas[place]
        request = Request(
            "",
            asked.prompt(),
            self._declared(asked),
            priority=asked.priority,
            tenant=asked.tenant,
            payload=(asked, counted),
        )
        replica.submit(now_ns, request, asked.output_tokens)
        if replica.engine.step_ends_ns is None and replica.engine.scheduler.has_unfinished:
            self._call_at(place, now_ns)

    def _call(self, now_ns: int, place: int) -> None:
        replica = self.replicas[place]
        if replica.next_ns != now_ns:
            return
        replica.next_ns = None
        replica.run(now_ns)
        wanted_ns = replica.wants_call_ns()
        if wanted_ns is not None:
            self._call_at(place, wanted_ns)

    def _call_at(self, place: int, when_ns: int) -> None:
        replica = self.replicas[place]
        if replica.next_ns != when_ns:
            replica.next_ns = when_ns
            heappush(self._calls, (when_ns, place))

    def _ended(self, place: int, request: Request) -> None:
        """`request` made its last token, or was refused: at once, or later because it was late."""
        engine = self.replicas[place].engine
        asked, counted = request.payload
        if engine.refused:
            _, error, _ = engine.refused.pop()
            self._load.ended(place, counted, None)
            self.recorder.refused(request, error)
        else:
            self._load.ended(place, counted, request.num_output_tokens)
            self.recorder.ended(asked, request)
        self._num_done += 1
        if self._users:
            self._think(asked.user, engine.now_ns)

    def _think(self, user: int, now_ns: int) -> None:
        if self._users[user]:
            # At least 1 ns, so that it arrives after whatever happens now.
            heappush(self._thinking, (now_ns + max(1, self._users[user][0].arrival_ns), user))

    def _declared(self, asked: SimRequest) -> int:
        if self._knows_lengths:
            return asked.output_tokens
        declared = self._setup.max_tokens if asked.max_tokens is None else asked.max_tokens
        return max(declared, asked.output_tokens)


def simulate(
    workload: Workload,
    config: SchedulerConfig,
    setup: Setup,
    router: Router,
    *,
    policy: str,
    seed: int | None = None,
    knows_lengths: bool = False,
    on_progress: OnProgress | None = None,
) -> RunResult:
    """Serve a workload with one policy on `setup.num_replicas` alike replicas, and sum it up."""
    started = time.perf_counter()
    cluster = Cluster(workload, config, setup, router, knows_lengths=knows_lengths)
    with _no_garbage_collection():
        cluster.run(on_progress)
    wall_s = time.perf_counter() - started
    recorder, replicas = cluster.recorder, cluster.replicas
    first_ns = 0 if workload.is_closed or not workload.requests else workload.requests[0].arrival_ns
    makespan_s = max(recorder.last_ns - first_ns, 1) / 1e9
    everyone, short, long = recorder.ttft()
    num_steps = sum(replica.engine.num_steps for replica in replicas)
    return RunResult(
        policy=policy,
        seed=seed,
        device=setup.profile.title,
        workload=workload.name,
        num_replicas=len(replicas),
        router=router.name if len(replicas) > 1 else None,
        long_from=setup.long_from,
        num_requests=len(workload.requests),
        num_finished=recorder.num_finished,
        refusals=recorder.refusals,
        ttft=quantiles(everyone),
        ttft_short=quantiles(short),
        ttft_long=quantiles(long),
        itl=recorder.itl(),
        itl_over_limit=recorder.itl_over_limit(),
        makespan_s=makespan_s,
        requests_per_s=recorder.num_finished / makespan_s,
        output_tokens_per_s=recorder.output_tokens / makespan_s,
        busy=sum(replica.engine.busy_ns for replica in replicas) / 1e9 / makespan_s / len(replicas),
        num_steps=num_steps,
        mean_batch=sum(replica.device.num_seqs for replica in replicas) / max(1, num_steps),
        preemptions=recorder.preemptions,
        recomputed_tokens=recorder.recomputed_tokens,
        cached_tokens=recorder.cached_tokens,
        prompt_tokens=recorder.prompt_tokens,
        output_tokens=recorder.output_tokens,
        blocked_heads=recorder.blocked_heads,
        passed_heads=recorder.passed_heads,
        moved_starts=recorder.moved_starts,
        waiting_s={reason: wait_ns / 1e9 for reason, wait_ns in sorted(recorder.waiting_ns.items())},
        ttft_curve=curve(everyone),
        ttft_short_curve=curve(short),
        ttft_long_curve=curve(long),
        wall_s=wall_s,
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A run makes millions of objects and next to no cycles; to look for them takes up to a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
