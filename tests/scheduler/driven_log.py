"""A DecisionLog driven by hand, as a scheduler would, with a clock in milliseconds. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyengine.config import SchedulerConfig
from pyengine.request import Request, RequestGroup, RequestState, move
from pyengine.scheduler.decision_log import DecisionLog
from pyengine.scheduler.plan import StepPlan
from pyengine.scheduler.verdict import Reason

MS = 1_000_000


class DrivenLog:
    """The log, a clock, and requests that do what the test says."""

    def __init__(self, config: SchedulerConfig | None = None, **sizes: Any) -> None:
        self.config = config or SchedulerConfig(
            num_blocks=40, max_context=1024, max_num_seqs=16, max_num_batched_tokens=64
        )
        self.log = DecisionLog(self.config, **sizes)
        self.now_ns = 5_000 * MS
        self.step = 0
        self.num_arrived = 0
        self.running: list[Request] = []

    def at(self, ms: float) -> None:
        """It is `ms` milliseconds after the start."""
        self.now_ns = 5_000 * MS + int(ms * MS)

    def arrive(self, request_id: str, *, num_tokens: int = 10, n: int = 1) -> Request:
        requests = [Request(request_id, list(range(num_tokens)), 8, index=i) for i in range(n)]
        group = RequestGroup(requests) if n > 1 else None
        for request in requests:
            request.group = group
            request.arrival_seq = self.num_arrived
            self.num_arrived += 1
            request.arrival_ns = request.queued_since_ns = self.now_ns
            self.log.arrived(request, self.now_ns)
        return requests[0]

    def begin(self) -> None:
        self.log.begin(self.step, self.now_ns)

    def start(self, request: Request, passed: Sequence[Request] = ()) -> None:
        move(request, RequestState.PREFILL, self.now_ns)
        self.log.started(request, self.now_ns, passed)
        self.running.append(request)

    def plan(self, *, free: int = 10, cached: int = 4, reserved: int = 3, waiting: int = 0, **given: Any) -> None:
        """All running requests are in the pass: decodes with one token, prefills with their whole prompt."""
        prefills = [request for request in self.running if request.state is RequestState.PREFILL]
        decodes = [request for request in self.running if request.state is RequestState.DECODE]
        counts = [1] * len(decodes) + [request.num_tokens - request.num_computed_tokens for request in prefills]
        everybody = decodes + prefills
        computed = [request.num_computed_tokens for request in everybody]
        num_prefill_tokens = sum(counts[len(decodes) :])
        samples = [True] * len(everybody)
        self.made = StepPlan(
            self.step, everybody, counts, computed, samples, [], [], [], [], len(decodes), num_prefill_tokens
        )
        for request in prefills:
            request.num_computed_tokens = request.num_tokens
            move(request, RequestState.DECODE, self.now_ns)
        settings: dict[str, Any] = {"budget": 64, "bound_by": None, "predicted_ns": None, "stop_reason": None}
        self.log.planned(
            self.made,
            num_waiting=waiting,
            num_free_blocks=free,
            num_cached_blocks=cached,
            num_reserved_blocks=reserved,
            **{**settings, **given},
        )

    def commit(self) -> None:
        for request in self.made.requests:
            request.token_ids.append(1)
            request.token_times_ns.append(self.now_ns)
        self.log.committed(self.step, self.log.ledger.begun_ns, self.now_ns)
        self.step += not self.made.is_empty

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        move(request, RequestState.PREEMPTED, self.now_ns)
        self.log.preempted(request, self.now_ns)

    def end(self, request: Request, reason: str = "length") -> None:
        if request in self.running:
            self.running.remove(request)
        move(request, RequestState.FINISHED, self.now_ns)
        request.finish_reason = reason
        self.log.ended(request, self.now_ns)


def one_step(driven: DrivenLog, ms: float, **settings: Any) -> None:
    """A step in which nothing new is found."""
    driven.begin()
    driven.plan(**settings)
    driven.now_ns += int(ms * MS)
    driven.commit()


__all__ = ["MS", "DrivenLog", "Reason", "one_step"]
