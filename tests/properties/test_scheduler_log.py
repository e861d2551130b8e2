"""The decision log under the real scheduler: waits add up exactly, and to log or not to log changes no plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pyengine.config import SchedulerConfig
from pyengine.errors import NeverFits, PyEngineError
from pyengine.request import QUEUED_STATES, Request, RequestState
from pyengine.scheduler import Scheduler, StepPlan
from pyengine.scheduler.decision_log import DecisionLog
from pyengine.scheduler.trace import chrome_trace


@dataclass
class Run:
    """One scheduler and the requests that were submitted to it; a twin of it is told the same."""

    config: SchedulerConfig
    is_logged: bool = True
    remembers_scans: bool = True
    now_ns: int = 10**9
    requests: list[Request] = field(default_factory=list)
    plans: list[tuple[object, ...]] = field(default_factory=list)
    in_flight: StepPlan | None = None

    def __post_init__(self) -> None:
        log = DecisionLog(self.config, enabled=self.is_logged)
        self.scheduler = Scheduler(self.config, clock=lambda: self.now_ns, log=log)

    def submit(self, length: int, max_tokens: int, n: int, priority: int, tenant: str, first_token: int) -> None:
        prompt = [(first_token + i) % 7 for i in range(length)]
        try:
            limit, _ = self.scheduler.clamp_max_tokens(length, max_tokens)
            name = f"r{len(self.requests)}"
            made = [Request(name, prompt, limit, index=i, priority=priority, tenant=tenant) for i in range(n)]
            self.scheduler.add(made)
        except (NeverFits, PyEngineError):
            return
        self.requests += made

    def schedule(self) -> None:
        if self.in_flight is not None:
            return
        if not self.remembers_scans:
            self.scheduler._fruitless = None
        plan = self.scheduler.schedule()
        names = [self.requests.index(request) for request in plan.requests]
        joined = [self.requests.index(request) for request in plan.joined]
        preempted = [self.requests.index(request) for request in plan.preempted]
        self.plans.append((plan.step, names, plan.num_new_tokens, plan.num_computed, joined, preempted))
        self.in_flight = None if plan.is_empty else plan

    def commit(self, end: int) -> None:
        if self.in_flight is None:
            return
        plan, self.in_flight = self.in_flight, None
        ends = {end: "stop"} if end < len(plan.requests) and plan.samples[end] else {}
        self.scheduler.commit(plan, [i % 5 for i in range(len(plan.requests))], ends)

    def abort(self, place: int) -> None:
        if self.requests:
            self.scheduler.abort(self.requests[place % len(self.requests)])

    def hold(self, place: int) -> None:
        waiting = [request for request in self.requests if request.state is RequestState.WAITING]
        if waiting:
            self.scheduler.hold(waiting[place % len(waiting)], "its grammar", self.now_ns + 10**12)

    def wake(self) -> None:
        for request in self.requests:
            self.scheduler.wake(request)

    def pause(self) -> None:
        self.scheduler.pause()

    def resume(self) -> None:
        self.scheduler.resume()

    def pass_time(self, nanoseconds: int) -> None:
        self.now_ns += nanoseconds


def random_config(rng: random.Random) -> SchedulerConfig:
    max_num_seqs = rng.choice([1, 2, 4, 8])
    return SchedulerConfig(
        num_blocks=rng.randint(3, 14),
        max_context=150,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 3, 20, 200]),
        batching=rng.choice(["continuous", "continuous", "continuous", "static"]),
        order=rng.choice(["fifo", "fifo", "priority", "fair", "deadline", "shortest"]),
        packing=rng.choice(["none", "best_fit", "best_fit"]),
        capacity=rng.choice(["guaranteed", "predicted", "optimistic"]),
        prefix_caching=rng.random() < 0.7,
        max_batch_wait_ms=rng.choice([0, 0, 0, 0.05]),
        aging_barrier_s=rng.choice([0.0005, 10]),
        bypass_budget=rng.choice([0.5, 4]),
        window=rng.choice([2, 64]),
        priority_promotion_s=rng.choice([0.001, 30]),
    )


Call = Callable[[Run], None]


def random_call(rng: random.Random) -> Call:
    kind = rng.choices(
        ["submit", "schedule", "commit", "abort", "hold", "wake", "pause", "resume", "pass_time"],
        [5, 10, 10, 1, 0.5, 1, 0.3, 1, 10],
    )[0]
    if kind == "submit":
        length, max_tokens = rng.choice([3, 16, 17, 40, 100]), rng.choice([1, 5, 40])
        n, priority, tenant = rng.choice([1, 1, 1, 3]), rng.choice([0, 0, 2]), rng.choice("ab")
        first_token = rng.randrange(3)
        return lambda run: run.submit(length, max_tokens, n, priority, tenant, first_token)
    if kind == "commit":
        end = rng.randrange(20)
        return lambda run: run.commit(end)
    if kind in ("abort", "hold"):
        place = rng.randrange(1000)
        return lambda run: getattr(run, kind)(place)
    if kind == "pass_time":
        nanoseconds = rng.choice([1, 999, 10**4, 10**6])
        return lambda run: run.pass_time(nanoseconds)
    return lambda run: getattr(run, kind)()


@pytest.mark.parametrize("seed", range(40))
def test_the_parts_of_each_wait_add_up_and_neither_the_log_nor_a_scan_left_out_changes_a_plan(seed: int) -> None:
    rng = random.Random(seed)
    config = random_config(rng)
    run, unlogged, forgetful = Run(config), Run(config, is_logged=False), Run(config, remembers_scans=False)
    for _ in range(300):
        call = random_call(rng)
        for twin in (run, unlogged, forgetful):
            call(twin)
        for request, other in zip(run.requests, forgetful.requests, strict=True):
            explained = run.scheduler.log.explain(request, run.now_ns)
            assert sum(explained.wait_ns.values()) == explained.queue_ns == request.queue_ns_at(run.now_ns)
            assert (explained.waits_for is not None) == (request.state in QUEUED_STATES)
            told_again = forgetful.scheduler.log.explain(other, forgetful.now_ns)
            assert explained.wait_ns == told_again.wait_ns, "a scan that is known to be fruitless changes no reason"
    assert run.plans == unlogged.plans == forgetful.plans
    assert run.requests, "the trial had something to do"
    stats = run.scheduler.log.stats(run.now_ns)
    assert stats.queue_ns == sum(request.queue_ns_at(run.now_ns) for request in run.requests)
    assert stats.num_steps == sum(1 for plan in run.plans if plan[1])
    assert chrome_trace(run.scheduler.log, run.now_ns)["otherData"]["no longer in the log"]["records"] == 0
