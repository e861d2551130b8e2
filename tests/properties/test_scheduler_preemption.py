"""A pool outgrown by its requests: somebody is preempted, nobody is lost, and no output changes."""

from __future__ import annotations

import pytest

from pyengine.config import SchedulerConfig
from pyengine.request import Request, RequestState
from pyengine.scheduler.victim import Cheapest

from .scheduler_world import COMMON_RULE, World


def world(**settings: object) -> World:
    values: dict[str, object] = {"num_blocks": 4, "max_context": 200, "max_num_seqs": 4, "watermark": 0.0}
    return World(SchedulerConfig(**{**COMMON_RULE, **values, **settings}))  # type: ignore[arg-type]


def test_a_pool_outgrown_by_several_together_loses_nobody_and_the_earliest_is_never_preempted() -> None:
    w = world()
    made = [w.submit([i] * 14, max_tokens=40)[0] for i in range(3)]
    w.drain()
    assert [request.num_output_tokens for request in made] == [40, 40, 40]
    assert made[0].num_preemptions == 0
    assert made[2].num_preemptions > 0
    assert made[2].num_recomputed_tokens > 0


def test_a_preempted_request_keeps_its_tokens_and_resumes_only_when_its_whole_length_fits() -> None:
    w = world(num_blocks=4)
    [first] = w.submit([1] * 30, max_tokens=30)
    [second] = w.submit([2] * 30, max_tokens=10)
    while second.num_preemptions == 0:
        plan = w.step()
    assert plan.preempted == [second]
    assert second.state is RequestState.PREEMPTED
    tokens = list(second.token_ids)
    [later] = w.submit([3], max_tokens=1)
    while not first.is_finished:
        assert second.state is RequestState.PREEMPTED
        assert later.state is RequestState.WAITING
        w.step()
    w.advance_clock(9)
    plan = w.step()
    assert (second.started_ns, later.started_ns) == (0, 9)
    assert plan.joined == [second, later]
    assert second.token_ids[: len(tokens)] == tokens
    assert plan.num_new_tokens[plan.requests.index(second)] == len(tokens)
    assert second.num_recomputed_tokens == len(tokens) - 1
    assert second.queue_ns == w.waited_ns[second]
    w.drain()


def test_the_one_that_needs_a_block_is_itself_preempted_when_it_is_the_latest() -> None:
    w = world(num_blocks=3)
    [first] = w.submit([1] * 20, max_tokens=20)
    [second] = w.submit([2] * 15, max_tokens=20)
    w.step()
    w.step()
    plan = w.step()
    assert plan.preempted == [second]
    assert plan.requests == [first]
    w.drain()


def no_surplus(request: Request) -> float:
    return 0.0


def test_one_preempted_twice_is_spared_while_another_is_left() -> None:
    early, late = Request("a", [1], 1), Request("b", [1], 1)
    early.arrival_seq, late.arrival_seq = 0, 1
    assert Cheapest().choose([early, late], no_surplus) is late
    late.num_preemptions = 2
    assert Cheapest().choose([early, late], no_surplus) is early
    early.num_preemptions = 3
    assert Cheapest().choose([early, late], no_surplus) is late


def test_of_one_submit_the_cheapest_to_compute_again_is_preempted() -> None:
    w = world(num_blocks=8)
    siblings = w.submit([1] * 20, max_tokens=40, n=2)
    for request, computed in zip(siblings, (25, 31), strict=True):
        request.num_computed_tokens = computed
    assert Cheapest().choose(siblings, no_surplus) is siblings[0]


@pytest.mark.parametrize("budget", [3, 7, 16, 1000])
def test_output_does_not_depend_on_chunks_or_preemption(budget: int) -> None:
    roomy = world(num_blocks=60, max_num_batched_tokens=1000)
    tight = world(num_blocks=5, max_num_seqs=3, max_num_batched_tokens=budget)
    for w in (roomy, tight):
        for i in range(4):
            w.submit([i] * (5 + 11 * i), max_tokens=25)
        w.drain()
    assert sum(r.num_preemptions for r in tight.requests) > 0
    assert [r.token_ids for r in tight.requests] == [r.token_ids for r in roomy.requests]
