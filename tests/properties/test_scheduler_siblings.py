"""n completions of one prompt: its KV is computed once and shared, whatever happens to the one that computes it."""

from __future__ import annotations

import pytest

from pyengine.config import SchedulerConfig
from pyengine.request import Request, RequestState

from .scheduler_world import COMMON_RULE, World


def world(**settings: object) -> World:
    values: dict[str, object] = {"num_blocks": 20, "max_context": 300, "max_num_seqs": 8, "watermark": 0.0}
    return World(SchedulerConfig(**{**COMMON_RULE, **values, **settings}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "num_shared", "copied"), [(40, 2, True), (33, 2, False), (32, 1, True), (2, 0, True)]
)
def test_siblings_share_full_prompt_blocks_and_copy_the_partial_one(length: int, num_shared: int, copied: bool) -> None:
    w = world()
    leader, second, third = w.submit(list(range(length)), max_tokens=5, n=3)
    plan = w.step()
    assert plan.requests == [leader]
    plan = w.issue()
    assert plan.requests == [leader, second, third]
    assert plan.num_new_tokens == [1, 1, 1]
    assert plan.num_computed == [length, length - 1, length - 1]
    assert plan.samples == [True, True, True]
    partial = leader.block_table[(length - 1) // 16]
    assert plan.copies == ([(partial, s.block_table[num_shared]) for s in (second, third)] if copied else [])
    for sibling in (second, third):
        assert sibling.block_table[:num_shared] == leader.block_table[:num_shared]
        assert not set(sibling.block_table[num_shared:]) & set(leader.block_table)
        assert sibling.num_cached_tokens == length - 1
    w.drain()
    assert w.steps == 6


def test_a_prompt_of_one_token_has_nothing_to_share_and_nobody_waits() -> None:
    w = world()
    made = w.submit([1], max_tokens=3, n=3)
    assert w.step().requests == made
    w.drain()


def test_others_start_while_siblings_wait_for_their_prompt() -> None:
    w = world(max_num_batched_tokens=40)
    leader, sibling = w.submit([1] * 30, max_tokens=8, n=2)
    [other] = w.submit([2] * 20, max_tokens=2)
    assert w.step().joined == [leader, other]
    assert sibling.state is RequestState.WAITING
    assert w.step().joined == [sibling]
    w.drain()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_when_the_leader_is_aborted_another_leads(num_steps: int) -> None:
    w = world(max_num_batched_tokens=12)
    leader, second, third = w.submit([1] * 30, max_tokens=4, n=3)
    for _ in range(num_steps):
        w.step()
    w.scheduler.abort(leader)
    w.check_everything()
    w.drain()
    assert second.num_output_tokens == third.num_output_tokens == 4
    assert third.num_cached_tokens == 29


def test_when_the_leader_is_aborted_between_plan_and_result_the_copy_of_its_block_is_still_right() -> None:
    w = world()
    leader, second, third = w.submit([1] * 30, max_tokens=4, n=3)
    w.step()
    w.issue()
    w.scheduler.abort(leader)
    w.check_everything()
    w.finish_step()
    w.drain()
    assert second.num_output_tokens == third.num_output_tokens == 4


def test_when_the_leader_finishes_with_its_first_token_another_leads() -> None:
    w = world()
    leader, second, third = w.submit([1] * 30, max_tokens=4, n=3)
    w.step(ends={leader: "stop"})
    assert leader.num_output_tokens == 1
    w.drain()
    assert second.num_cached_tokens == 0
    assert third.num_cached_tokens == 29
    assert second.num_output_tokens == third.num_output_tokens == 4


def test_a_sibling_that_waits_for_its_prompt_can_be_aborted() -> None:
    w = world()
    leader, sibling = w.submit([1] * 30, max_tokens=2, n=2)
    w.issue()
    assert w.scheduler.abort(sibling)
    w.finish_step()
    w.drain()
    assert (sibling.finish_reason, sibling.num_output_tokens, leader.num_output_tokens) == ("abort", 0, 2)


def test_siblings_that_outgrow_the_pool_are_preempted_and_share_again_when_they_resume() -> None:
    w = world(num_blocks=7, max_num_seqs=4)
    made = w.submit([1] * 40, max_tokens=40, n=4)
    w.drain()
    assert [request.num_output_tokens for request in made] == [40] * 4
    assert sum(request.num_preemptions for request in made) > 0


@pytest.mark.parametrize("index", [0, 1])
def test_a_sibling_that_resumes_beside_another_recomputes_only_what_it_does_not_share(index: int) -> None:
    w = world()
    made = w.submit([1] * 40, max_tokens=20, n=2)
    for _ in range(6):
        w.step()
    num_computed, num_cached = made[index].num_computed_tokens, made[index].num_cached_tokens
    w.scheduler._preempt(made[index], w.now_ns)
    plan = w.step()
    assert plan.joined == [made[index]]
    assert plan.num_computed[plan.requests.index(made[index])] == 39
    assert made[index].num_recomputed_tokens == num_computed - 39
    assert made[index].num_cached_tokens == num_cached == 39 * index
    w.drain()


def test_a_request_that_reports_prompt_logprobs_computes_its_whole_prompt() -> None:
    w = world()
    made = [Request("r", [1] * 20, 2, index=i, needs_all_prompt_logits=True) for i in range(2)]
    w.scheduler.add(made)
    plan = w.scheduler.schedule()
    assert plan.requests == made
    assert plan.num_new_tokens == [20, 20]
    assert plan.copies == []
