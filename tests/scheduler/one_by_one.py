"""The waiting of requests added up the obvious way, each moment to each of them, beside a DecisionLog."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from pyengine.config import SchedulerConfig
from pyengine.request import QUEUED_STATES, Request, RequestState, move
from pyengine.scheduler.decision_log import DecisionLog
from pyengine.scheduler.explanation import Explanation
from pyengine.scheduler.verdict import Reason, Verdict

CONFIG = SchedulerConfig(num_blocks=64, max_context=256)
VERDICTS = (
    Verdict(Reason.MAX_SEQS, 1, 0),
    Verdict(Reason.TOKEN_BUDGET, 1, 0),
    Verdict(Reason.KV_PEAK, 30, 20),
    Verdict(Reason.SHARED_PREFIX_PENDING),
)
RESTS = (Reason.BEHIND_HEAD, Reason.MAX_SEQS, Reason.MID_STEP, Reason.PAUSED)


class OneByOne:
    """Drives a DecisionLog, and adds each moment to each waiting request by itself."""

    def __init__(self, **sizes: Any) -> None:
        self.log = DecisionLog(CONFIG, **sizes)
        self.now_ns = 1000
        self.requests: list[Request] = []
        self.reasons: dict[Request, Reason] = {}
        self.waited: dict[Request, dict[Reason, int]] = {}
        self.num_steps = 0

    def pass_time(self, nanoseconds: int) -> None:
        self.now_ns += nanoseconds
        for request, reason in self.reasons.items():
            parts = self.waited[request]
            parts[reason] = parts.get(reason, 0) + nanoseconds

    def arrive(self) -> Request:
        request = Request(f"r{len(self.requests)}", [1, 2, 3], 4)
        request.arrival_seq = len(self.requests)
        request.arrival_ns = request.queued_since_ns = self.now_ns
        self.requests.append(request)
        self.waited[request] = {}
        self.reasons[request] = Reason.MID_STEP
        self.log.arrived(request, self.now_ns)
        return request

    def step(self, fates: list[int], rest: Reason) -> None:
        """One schedule(): the fates, one a queued request, say who starts, who is examined, and who is not.

        0 to 3: examined, with that verdict of VERDICTS. 4: starts. More, or no fate: not examined.
        """
        self.log.begin(self.num_steps, self.now_ns)
        self.num_steps += 1
        head: Request | None = None
        queued = [
            request for request in self.requests if request.state in (RequestState.WAITING, RequestState.PREEMPTED)
        ]
        for request, fate in zip(queued, fates, strict=False):
            if fate < len(VERDICTS):
                reason = VERDICTS[fate].reason
                assert reason is not None
                if fate % 2:  # examined twice: the last verdict holds
                    self.log.waits(request, VERDICTS[fate - 1], head)
                self.log.waits(request, VERDICTS[fate], head)
                head = head or request
                if request.state is not RequestState.PREEMPTED:
                    self.reasons[request] = reason
            elif fate == len(VERDICTS):
                move(request, RequestState.PREFILL, self.now_ns)
                self.log.started(request, self.now_ns)
                del self.reasons[request]
            elif request.state is not RequestState.PREEMPTED:
                self.reasons[request] = rest
        for request in queued[len(fates) :]:
            if request.state is not RequestState.PREEMPTED:
                self.reasons[request] = rest
        self.log.rest_waits(rest, head)

    def disturb(self, place: int) -> None:
        """Something happens to a request between two steps, whatever is possible for it."""
        if not self.requests:
            return
        request = self.requests[place % len(self.requests)]
        if request.state is RequestState.PREFILL:
            move(request, RequestState.PREEMPTED, self.now_ns)
            self.log.preempted(request, self.now_ns)
            self.reasons[request] = Reason.PREEMPTED
        elif request.state is RequestState.WAITING and place % 2:
            move(request, RequestState.HELD, self.now_ns)
            self.log.held(request, "a grammar", self.now_ns)
            self.reasons[request] = Reason.HELD
        elif request.state is RequestState.HELD:
            move(request, RequestState.WAITING, self.now_ns)
            self.log.woken(request, self.now_ns)
            self.reasons[request] = Reason.MID_STEP

    def end(self, place: int) -> None:
        live = [request for request in self.requests if not request.is_finished]
        if live:
            request = live[place % len(live)]
            move(request, RequestState.FINISHED, self.now_ns)
            request.finish_reason = "abort"
            self.log.ended(request, self.now_ns)
            self.reasons.pop(request, None)

    def explain(self, place: int) -> Explanation:
        return self.log.explain(self.requests[place], self.now_ns)

    def check(self) -> None:
        for request in self.requests:
            explained = self.log.explain(request, self.now_ns)
            assert {reason: ns for reason, ns in explained.wait_ns.items() if ns} == {
                reason: ns for reason, ns in self.waited[request].items() if ns
            }
            assert sum(explained.wait_ns.values()) == explained.queue_ns == request.queue_ns_at(self.now_ns)
            assert explained.waits_for is self.reasons.get(request)
            assert request.log.is_open == (request.state in QUEUED_STATES)


ACTIONS = st.one_of(
    st.tuples(st.just("pass_time"), st.integers(0, 10**12)),
    st.tuples(st.just("arrive")),
    st.tuples(st.just("step"), st.lists(st.integers(0, 6), max_size=8), st.sampled_from(RESTS)),
    st.tuples(st.just("disturb"), st.integers(0, 50)),
    st.tuples(st.just("end"), st.integers(0, 50)),
)
