"""Any sequence of submits, steps, results, aborts and clock jumps keeps the scheduler's invariants."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyengine.config import SchedulerConfig
from pyengine.errors import NeverFits, QueueFull
from pyengine.request import Request

from .scheduler_world import COMMON_RULE, World


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 14),
        max_num_seqs=st.integers(1, 6),
        extra_tokens=st.sampled_from([0, 1, 10, 30, 500]),
        watermark=st.sampled_from([0.0, 0.01, 0.2]),
        max_queue=st.sampled_from([None, 3, 8]),
        max_context=st.sampled_from([40, 150, 1000]),
        capacity=st.sampled_from(["optimistic", "guaranteed"]),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        extra_tokens: int,
        watermark: float,
        max_queue: int | None,
        max_context: int,
        capacity: str,
    ) -> None:
        config = SchedulerConfig(
            num_blocks=num_blocks,
            max_context=max_context,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            watermark=watermark,
            max_queue=max_queue,
            **{**COMMON_RULE, "capacity": capacity},
        )
        self.world = World(config)

    @rule(
        length=st.one_of(st.integers(1, 20), st.integers(1, 120), st.sampled_from([15, 16, 17, 31, 32, 33, 48, 49])),
        max_tokens=st.one_of(st.none(), st.integers(1, 5), st.integers(1, 60)),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        first_token=st.integers(0, 9),
    )
    def submit(self, length: int, max_tokens: int | None, n: int, first_token: int) -> None:
        scheduler, config = self.world.scheduler, self.world.config
        prompt = [(first_token + i) % 10 for i in range(length)]
        num_waiting = scheduler.num_waiting
        fits = length < config.max_context and length <= config.num_blocks * config.block_size
        has_place = config.max_queue is None or num_waiting + n <= config.max_queue
        try:
            self.world.submit(prompt, max_tokens, n)
        except NeverFits:
            assert not fits
        except QueueFull:
            assert not has_place
        else:
            assert fits
            assert has_place
            num_waiting += n
        assert scheduler.num_waiting == num_waiting

    @precondition(lambda self: self.world.in_flight is None)
    @rule()
    def schedule(self) -> None:
        self.world.issue()

    @precondition(lambda self: self.world.in_flight is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        assert self.world.in_flight is not None
        requests = self.world.in_flight.plan.requests
        ends = data.draw(st.dictionaries(st.sampled_from(range(len(requests))), st.sampled_from(["stop", "error"])))
        likely = data.draw(st.integers(0, 3)) == 0
        self.world.finish_step({requests[i]: reason for i, reason in ends.items()} if likely else {})

    @precondition(lambda self: self.world.in_flight is None)
    @rule(count=st.integers(1, 20))
    def several_steps(self, count: int) -> None:
        for _ in range(count):
            self.world.advance_clock(7)
            self.world.step()

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request: Request = data.draw(st.sampled_from(self.world.requests))
        was_finished, reason = request.is_finished, request.finish_reason
        others = [r for r in self.world.requests if r is not request]
        tokens = [list(r.token_ids) for r in others]
        assert self.world.scheduler.abort(request) is not was_finished
        assert request.is_finished
        assert request.finish_reason == (reason if was_finished else "abort")
        assert not request.block_table
        assert [r.token_ids for r in others] == tokens
        free = self.world.scheduler.num_free_blocks
        assert self.world.scheduler.abort(request) is False
        assert self.world.scheduler.num_free_blocks == free

    @rule(nanoseconds=st.sampled_from([1, 1000, 10**9, 10**15]))
    def clock_jump(self, nanoseconds: int) -> None:
        self.world.advance_clock(nanoseconds)

    @invariant()
    def each_request_is_in_one_container_and_blocks_are_conserved(self) -> None:
        if hasattr(self, "world"):
            self.world.check_structures()

    @invariant()
    def block_tables_fit_their_tokens(self) -> None:
        if hasattr(self, "world"):
            self.world.check_tables()

    @invariant()
    def queue_time_is_exact(self) -> None:
        if hasattr(self, "world"):
            self.world.check_waits()

    @invariant()
    def only_legal_moves_happen(self) -> None:
        if hasattr(self, "world"):
            self.world.check_moves()

    @invariant()
    def outputs_do_not_depend_on_company_chunks_or_preemption(self) -> None:
        if hasattr(self, "world"):
            self.world.check_outputs()

    @invariant()
    def no_free_or_shared_block_is_written(self) -> None:
        if hasattr(self, "world"):
            self.world.check_writes()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            self.world.check_everything()


HEALTH = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=HEALTH)


@pytest.mark.slow
class TestSchedulerLong(SchedulerMachine.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(max_examples=600, stateful_step_count=60, deadline=None, suppress_health_check=HEALTH)
