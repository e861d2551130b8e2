"""Any sequence of events under any setting keeps the invariants: what a fixed load does not think of."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyengine.request import RequestState

from .policy_loads import TENANTS, Trial


class PolicyMachine(RuleBasedStateMachine):
    """Events come one by one; what each may do is checked by the world, see policy_world."""

    @initialize(seed=st.integers(0, 10**6))
    def start(self, seed: int) -> None:
        self.trial = Trial(seed)
        self.world = self.trial.world
        self.world.wants_fork = lambda: random.Random(self.world.steps).random() < 0.2

    @precondition(lambda self: len(self.world.requests) < 14)
    @rule(
        length=st.one_of(st.integers(1, 20), st.integers(1, 120), st.sampled_from([15, 16, 17, 31, 32, 33, 48, 49])),
        max_tokens=st.one_of(st.none(), st.integers(1, 5), st.integers(1, 60)),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        kind=st.integers(0, 2),
        tenant=st.sampled_from(TENANTS),
        priority=st.integers(0, 3),
    )
    def submit(self, length: int, max_tokens: int | None, n: int, kind: int, tenant: str, priority: int) -> None:
        self.trial.submit(length, max_tokens, kind, n=n, tenant=tenant, priority=priority)

    @precondition(lambda self: self.world.in_flight is None)
    @rule()
    def schedule(self) -> None:
        self.world.issue()

    @precondition(lambda self: self.world.in_flight is not None)
    @rule(ends=st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["stop", "error"])), max_size=2))
    def commit(self, ends: list[tuple[int, str]]) -> None:
        assert self.world.in_flight is not None
        requests = self.world.in_flight.plan.requests
        self.world.finish_step({requests[i % len(requests)]: reason for i, reason in ends})

    @precondition(lambda self: self.world.in_flight is None)
    @rule(count=st.integers(1, 20))
    def several_steps(self, count: int) -> None:
        for _ in range(count):
            self.trial.busy_step()

    @precondition(lambda self: self.world.requests)
    @rule(place=st.integers(0, 100))
    def abort(self, place: int) -> None:
        self.trial.check_abort(self.world.requests[place % len(self.world.requests)])

    @precondition(lambda self: any(r.state is RequestState.WAITING for r in self.world.requests))
    @rule(place=st.integers(0, 100), nanoseconds=st.sampled_from([1, 5000, 10**9]))
    def hold(self, place: int, nanoseconds: int) -> None:
        waiting = [request for request in self.world.requests if request.state is RequestState.WAITING]
        self.world.hold(waiting[place % len(waiting)], self.world.now_ns + nanoseconds)

    @precondition(lambda self: self.world.scheduler._held)
    @rule()
    def wake(self) -> None:
        self.world.wake(next(iter(self.world.scheduler._held)))

    @rule()
    def pause(self) -> None:
        self.world.scheduler.pause()

    @rule()
    def resume(self) -> None:
        self.world.scheduler.resume()

    @precondition(
        lambda self: (
            self.world.in_flight is None
            and self.world.config.capacity != "guaranteed"
            and self.world.scheduler.num_running
        )
    )
    @rule(place=st.integers(0, 100))
    def preempt(self, place: int) -> None:
        running = list(self.world.scheduler.running())
        self.world.preempt(running[place % len(running)])

    @rule()
    def flush(self) -> None:
        self.world.scheduler.clear_prefix_cache()

    @rule(nanoseconds=st.sampled_from([1, 1000, 10**9, 10**15]))
    def clock_jump(self, nanoseconds: int) -> None:
        self.world.advance_clock(nanoseconds)

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            self.world.check_everything()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            self.world.check_everything()


HEALTH = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = settings(max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=HEALTH)


@pytest.mark.slow
class TestPoliciesLong(PolicyMachine.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(max_examples=600, stateful_step_count=60, deadline=None, suppress_health_check=HEALTH)
