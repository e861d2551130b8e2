"""Submit, clamping, order and queue time, each on a case small enough to follow by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.config import SchedulerConfig
from pyengine.errors import InvalidRequest, NeverFits, QueueFull
from pyengine.kv_cache.blocks import last_horizon, need
from pyengine.request import LEGAL_MOVES, Request, RequestState, move
from pyengine.scheduler import Scheduler

from .scheduler_world import COMMON_RULE, World


def world(**settings: object) -> World:
    values: dict[str, object] = {"num_blocks": 8, "max_context": 200, "max_num_seqs": 4, "watermark": 0.0}
    return World(SchedulerConfig(**{**COMMON_RULE, **values, **settings}))  # type: ignore[arg-type]


def test_a_prompt_that_nearly_fills_the_pool_is_clamped_says_so_and_ends_by_length() -> None:
    w = world(num_blocks=2)
    [big] = w.submit([1] * 31, max_tokens=20)
    assert (big.max_tokens, big.max_tokens_clamped) == (2, True)
    [small] = w.submit([2] * 3, max_tokens=4)
    w.drain()
    assert (big.finish_reason, big.num_output_tokens) == ("length", 2)
    assert (small.finish_reason, small.num_output_tokens) == ("length", 4)
    assert small.max_tokens_clamped is False


def test_a_prompt_that_fills_the_pool_makes_one_token() -> None:
    w = world(num_blocks=2)
    [request] = w.submit([1] * 32, max_tokens=None)
    assert (request.max_tokens, request.max_tokens_clamped) == (1, False)
    w.drain()
    assert request.num_output_tokens == 1


def test_a_prompt_larger_than_the_pool_never_fits_and_says_by_how_much() -> None:
    scheduler = world(num_blocks=2).scheduler
    with pytest.raises(NeverFits, match=r"33 tokens needs 3 KV blocks.*pool has 2") as caught:
        scheduler.add([Request("r", [1] * 33, 1)])
    assert (caught.value.need, caught.value.usable, caught.value.unit) == (3, 2, "blocks")
    assert not scheduler.has_unfinished


def test_a_prompt_that_fills_the_context_never_fits() -> None:
    scheduler = world(max_context=20).scheduler
    with pytest.raises(NeverFits) as caught:
        scheduler.clamp_max_tokens(20, 1)
    assert (caught.value.need, caught.value.usable, caught.value.unit) == (21, 20, "tokens")
    assert scheduler.clamp_max_tokens(19, 5) == (1, True)
    assert scheduler.clamp_max_tokens(19, 1) == (1, False)


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(1, 90),
    max_tokens=st.one_of(st.none(), st.integers(1, 90)),
    num_blocks=st.integers(1, 5),
    max_context=st.integers(2, 100),
    budget=st.integers(1, 40),
)
def test_submit_accepts_exactly_what_an_empty_engine_runs_to_the_end(
    length: int, max_tokens: int | None, num_blocks: int, max_context: int, budget: int
) -> None:
    w = world(num_blocks=num_blocks, max_context=max_context, max_num_seqs=1, max_num_batched_tokens=budget)
    room = num_blocks * 16
    try:
        [request] = w.submit([1] * length, max_tokens)
    except NeverFits:
        assert length + 1 > max_context or length > room
        return
    wanted = max_tokens if max_tokens is not None else 10**6
    most = min(max_context - length, room - length + 1)
    assert most >= 1
    assert request.max_tokens == min(wanted, most)
    assert request.max_tokens_clamped == (max_tokens is not None and max_tokens > most)
    assert need(request, last_horizon(request), 16) <= num_blocks
    w.drain()
    assert (request.finish_reason, request.num_output_tokens) == ("length", request.max_tokens)
    assert request.num_preemptions == 0


@pytest.mark.parametrize("max_tokens", [0, 99])
def test_a_limit_that_was_not_clamped_is_refused(max_tokens: int) -> None:
    scheduler = world(num_blocks=2).scheduler
    with pytest.raises(InvalidRequest, match="from 1 to 29") as caught:
        scheduler.add([Request("r", [1] * 4, max_tokens)])
    assert caught.value.field == "max_tokens"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        world().scheduler.add([Request("r", [], 1)])


def test_a_request_is_added_once_and_siblings_have_one_prompt() -> None:
    scheduler = world().scheduler
    request = Request("r", [1], 1)
    scheduler.add([request])
    with pytest.raises(ValueError, match="added before"):
        scheduler.add([request])
    with pytest.raises(ValueError, match="another prompt"):
        scheduler.add([Request("s", [1], 1), Request("s", [2], 1, index=1)])
    twice = Request("t", [1], 1)
    with pytest.raises(ValueError, match="twice"):
        scheduler.add([twice, twice])
    assert scheduler.num_waiting == 1


def test_a_full_queue_refuses_all_sequences_of_a_submit_and_keeps_what_it_has() -> None:
    w = world(max_queue=3)
    w.submit([1], 1, n=2)
    with pytest.raises(QueueFull) as caught:
        w.submit([2], 1, n=2)
    assert caught.value.limit == 3
    assert w.scheduler.num_waiting == 2
    w.submit([3], 1)
    w.drain()
    assert len(w.requests) == 3


def test_nobody_passes_a_head_that_does_not_fit_and_its_failed_admission_changes_nothing() -> None:
    w = world(num_blocks=4, max_num_seqs=3)
    [running] = w.submit([1] * 30, max_tokens=30)
    w.step()
    [head] = w.submit([2] * 40, max_tokens=2)
    [small] = w.submit([3], max_tokens=2)
    pool = w.scheduler._cache.pool
    free = list(pool.free_blocks())
    plan = w.step()
    assert plan.requests == [running]
    assert list(pool.free_blocks()) == free
    assert (head.state, head.block_table, head.num_computed_tokens) == (RequestState.WAITING, [], 0)
    while running.finish_reason is None:
        w.step()
    assert small.started_ns is None
    assert w.step().joined == [head, small]


def test_the_watermark_keeps_blocks_free_for_running_requests_but_not_when_nothing_runs() -> None:
    w = world(num_blocks=4, watermark=0.5)
    [whole] = w.submit([1] * 60, max_tokens=1)
    w.step()
    assert whole.finish_reason == "length"
    [first] = w.submit([1] * 16, max_tokens=8)
    [second] = w.submit([2] * 32, max_tokens=1)
    w.step()
    assert first.started_ns is not None
    assert second.started_ns is None
    w.drain()


def test_a_long_prompt_is_computed_in_chunks_beside_decodes_that_never_wait() -> None:
    w = world(max_num_seqs=2, max_num_batched_tokens=8)
    [short] = w.submit([1] * 4, max_tokens=10)
    [long] = w.submit([2] * 20, max_tokens=2)
    sizes = []
    for _ in range(4):
        plan = w.step()
        assert short in plan.requests
        sizes.append(dict(zip(plan.requests, plan.num_new_tokens, strict=True)).get(long))
    assert sizes == [4, 7, 7, 2]
    assert (short.num_output_tokens, long.num_output_tokens) == (4, 1)


def test_queue_time_is_the_time_not_running_to_the_nanosecond() -> None:
    w = world(num_blocks=8, max_num_seqs=1)
    [first] = w.submit([1] * 3, max_tokens=2)
    w.advance_clock(5)
    [second] = w.submit([2] * 3, max_tokens=1)
    w.advance_clock(7)
    w.issue()
    w.advance_clock(11)
    w.finish_step()
    w.advance_clock(13)
    w.step()
    w.step()
    assert (first.arrival_ns, first.started_ns, first.queue_ns) == (0, 12, 12)
    assert (first.first_token_ns, first.token_times_ns, first.finished_ns) == (23, [23, 36], 36)
    assert (second.arrival_ns, second.started_ns, second.queue_ns) == (5, 36, 31)


def test_a_clock_that_goes_backwards_stands_still() -> None:
    times = iter([100, 50, 120, 130])
    scheduler = Scheduler(SchedulerConfig(num_blocks=2, max_context=20, **COMMON_RULE), clock=lambda: next(times))
    request = Request("r", [1], 1)
    scheduler.add([request])
    plan = scheduler.schedule()
    assert (request.arrival_ns, request.started_ns, request.queue_ns) == (100, 100, 0)
    scheduler.commit(plan, [3])
    assert request.finished_ns == 120


def test_only_legal_moves_are_made() -> None:
    for start in RequestState:
        for end in RequestState:
            request = Request("r", [1], 1)
            request.state = start
            if end in LEGAL_MOVES[start]:
                move(request, end, 0)
                assert request.state is end
            else:
                with pytest.raises(RuntimeError, match=f"from {start.value} to {end.value}"):
                    move(request, end, 0)
                assert request.state is start


def test_one_plan_is_in_flight_at_a_time_and_is_committed_once_with_all_its_outcomes() -> None:
    w = world()
    [request] = w.submit([1, 2], max_tokens=3)
    plan = w.scheduler.schedule()
    with pytest.raises(RuntimeError, match="in flight"):
        w.scheduler.schedule()
    with pytest.raises(ValueError, match="1 requests, but 0 tokens"):
        w.scheduler.commit(plan, [])
    with pytest.raises(ValueError, match="no token for"):
        w.scheduler.commit(plan, [None])
    assert request.num_output_tokens == 0
    w.scheduler.commit(plan, [4])
    assert request.output_token_ids == [4]
    with pytest.raises(RuntimeError, match="not in flight"):
        w.scheduler.commit(plan, [4])
    assert request.output_token_ids == [4]


def test_an_empty_plan_says_so_and_needs_no_commit() -> None:
    scheduler = world().scheduler
    plan = scheduler.schedule()
    assert plan.is_empty
    scheduler.commit(plan, [])
    assert scheduler.schedule().is_empty
