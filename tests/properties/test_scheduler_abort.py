"""Abort: in any state, at any moment, it frees what it holds and changes nobody else."""

from __future__ import annotations

import pytest

from pyengine.config import SchedulerConfig
from pyengine.request import Request, RequestState
from pyengine.scheduler import Scheduler

from .scheduler_world import COMMON_RULE, World


def world(**settings: object) -> World:
    values: dict[str, object] = {"num_blocks": 6, "max_context": 200, "max_num_seqs": 3, "watermark": 0.0}
    return World(SchedulerConfig(**{**COMMON_RULE, **values, **settings}))  # type: ignore[arg-type]


def in_state(state: RequestState) -> tuple[World, Request]:
    """A world in which the last of two requests is in this state."""
    w = world(num_blocks=4, max_num_batched_tokens=20)
    w.submit([1] * 14, max_tokens=40)
    [request] = w.submit([2] * 14, max_tokens=30)
    for _ in range(200):
        if request.state is state:
            return w, request
        w.step()
    raise AssertionError(f"never {state}")


@pytest.mark.parametrize("state", [s for s in RequestState if s not in (RequestState.FINISHED, RequestState.HELD)])
def test_abort_in_any_state_frees_everything_and_leaves_the_others_as_they_were(state: RequestState) -> None:
    w, request = in_state(state)
    assert w.scheduler.abort(request, "error")
    assert (request.state, request.finish_reason) == (RequestState.FINISHED, "error")
    assert request.block_table == []
    w.check_everything()
    w.drain()
    assert w.requests[0].finish_reason == "length"


def test_abort_twice_is_abort_once_and_keeps_the_first_reason() -> None:
    w, request = in_state(RequestState.DECODE)
    assert w.scheduler.abort(request, "error") is True
    finished_ns, free = request.finished_ns, w.scheduler.num_free_blocks
    w.advance_clock(5)
    assert w.scheduler.abort(request, "abort") is False
    assert (request.finish_reason, request.finished_ns) == ("error", finished_ns)
    assert w.scheduler.num_free_blocks == free


def test_abort_of_one_that_was_never_added_is_an_error() -> None:
    with pytest.raises(ValueError, match="never added"):
        world().scheduler.abort(Request("r", [1], 1))


def test_blocks_that_a_step_writes_are_not_free_before_it_returns() -> None:
    w = world()
    [request] = w.submit([1] * 40, max_tokens=5)
    w.issue()
    w.scheduler.abort(request)
    assert w.scheduler.num_free_blocks == 3
    w.check_everything()
    w.finish_step()
    assert w.scheduler.num_free_blocks == 6


def test_only_the_blocks_written_wait_for_the_step() -> None:
    w = world()
    [request] = w.submit([1] * 40, max_tokens=5)
    w.step()
    w.issue()
    w.scheduler.abort(request)
    assert w.scheduler.num_free_blocks == 5
    w.finish_step()


def test_a_late_result_of_an_aborted_request_is_dropped() -> None:
    w = world()
    [request], [other] = w.submit([1, 2], max_tokens=5), w.submit([3, 4], max_tokens=5)
    plan = w.scheduler.schedule()
    w.scheduler.abort(request)
    w.scheduler.commit(plan, [9, 8], {0: "stop"})
    assert (request.output_token_ids, request.finish_reason) == ([], "abort")
    assert (other.output_token_ids, other.finish_reason) == ([8], None)


def test_an_aborted_request_needs_no_outcome() -> None:
    w = world()
    [request], [other] = w.submit([1, 2], max_tokens=5), w.submit([3, 4], max_tokens=5)
    plan = w.scheduler.schedule()
    w.scheduler.abort(request)
    w.scheduler.commit(plan, [None, 8])
    assert other.output_token_ids == [8]


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("victim", range(3))
def test_abort_before_and_after_the_result_leave_the_same_behind(num_steps: int, victim: int) -> None:
    """All but the aborted request's last token and the order of the free list is equal, and so is the future."""

    def run(abort_first: bool) -> World:
        w = world(max_num_batched_tokens=20)
        for i in range(3):
            w.submit([i] * (10 + 9 * i), max_tokens=12)
        for _ in range(num_steps):
            w.step()
        w.issue()
        if abort_first:
            w.scheduler.abort(w.requests[victim])
            w.finish_step()
        else:
            w.finish_step()
            w.scheduler.abort(w.requests[victim])
        return w

    before, after = run(True), run(False)
    assert before.scheduler.num_free_blocks == after.scheduler.num_free_blocks
    for w in (before, after):
        w.check_everything()
    shapes = []
    for w in (before, after):
        shape = []
        while w.scheduler.has_unfinished:
            plan = w.step()
            shape.append((plan.step, [r.request_id for r in plan.requests], plan.num_new_tokens, plan.num_computed))
        shapes.append(shape)
    assert shapes[0] == shapes[1]


def test_a_scheduler_whose_requests_are_all_aborted_in_flight_is_empty_after_the_commit() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=4, max_context=50, **COMMON_RULE))
    requests = [Request(str(i), [1] * 10, 3) for i in range(3)]
    for request in requests:
        scheduler.add([request])
    plan = scheduler.schedule()
    for request in scheduler.unfinished():
        scheduler.abort(request)
    assert not scheduler.has_unfinished
    assert scheduler.num_free_blocks == 1
    scheduler.commit(plan, [None] * 3)
    assert scheduler.num_free_blocks == 4
    assert scheduler.schedule().is_empty
