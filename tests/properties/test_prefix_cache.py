"""Prefix caching: it changes when requests are computed and never what they make, nor who may see what."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pyengine.config import SchedulerConfig
from pyengine.request import Request, RequestState
from pyengine.scheduler import Reason

from .scheduler_world import CachedWorld

SIZE = 16


def world(**settings: Any) -> CachedWorld:
    values = {
        "num_blocks": 20,
        "max_context": 300,
        "max_num_seqs": 8,
        "watermark": 0.0,
        "capacity": "optimistic",
        "packing": "none",
    }
    return CachedWorld(SchedulerConfig(**{**values, **settings}))


def tokens(count: int, first: int = 0) -> list[int]:
    return [(first + i) % 50 for i in range(count)]


# ---- Loads that share much: conversations, one system prompt, retries, n completions, tenants with the same prompts


def conversations(rng: random.Random, room: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts that continue each other; with some luck the earlier one is still there."""
    system = tokens(rng.choice([0, 7, 16, 32, 40]))
    load: list[tuple[list[int], dict[str, Any]]] = []
    for _ in range(rng.randint(2, 4)):
        prompt = list(system)
        for _ in range(rng.randint(1, 3)):
            prompt = prompt + [rng.randrange(3) for _ in range(rng.choice([1, 5, 16, 17, 30]))]
            fields = {"cache_salt": rng.choice(["", "", "a"]), "needs_all_prompt_logits": rng.random() < 0.1}
            load += [(prompt[: room - 1], fields)] * rng.choice([1, 1, 2])
    rng.shuffle(load)
    return load


POLICIES = (
    {"capacity": "optimistic", "packing": "none"},
    {"capacity": "guaranteed", "packing": "none"},
    {"capacity": "optimistic", "packing": "best_fit"},
    {"capacity": "predicted", "packing": "best_fit"},
)


def run_trial(seed: int, prefix_caching: bool = True, aborts: bool = True) -> CachedWorld:
    rng = random.Random(seed)
    num_blocks, max_num_seqs = rng.randint(3, 14), rng.choice([1, 2, 3, 6])
    w = world(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 7, 40, 1000]),
        **rng.choice(POLICIES),
        prefix_caching=prefix_caching,
    )
    abort_rate = rng.choice([0.0, 0.05, 0.3]) if aborts else 0.0
    limits = [rng.choice([1, 3, 20, 40]) for _ in range(50)]
    groups = [rng.choice([1, 1, 1, 2, 3]) for _ in range(50)]
    pauses = [rng.choice([0, 0, 1, 4, 20]) for _ in range(50)]
    for (prompt, fields), limit, n, pause in zip(
        conversations(rng, num_blocks * SIZE), limits, groups, pauses, strict=False
    ):
        w.submit(prompt, limit, n, **fields)
        if rng.random() < 0.3 and w.requests[0].num_output_tokens and aborts:
            earlier = rng.choice(w.requests)
            if earlier.num_tokens + 1 < num_blocks * SIZE:
                w.submit([*earlier.token_ids, 1], 5, cache_salt=earlier.cache_salt)
        for _ in range(pause):
            busy_step(w, rng, abort_rate)
        if aborts and rng.random() < 0.05:
            w.scheduler._cache.clear()
    w.drain()
    return w


def busy_step(w: CachedWorld, rng: random.Random, abort_rate: float) -> None:
    w.advance_clock(1000)
    if w.issue().is_empty:
        return
    for request in w.requests:
        if abort_rate and rng.random() < abort_rate / len(w.requests):
            w.scheduler.abort(request)
            w.check_structures()
    w.finish_step()


def test_in_loads_that_share_much_every_invariant_holds() -> None:
    trials = [run_trial(seed) for seed in range(80)]
    caches = [w.scheduler._cache for w in trials]
    assert sum(cache.num_hit_tokens for cache in caches) > 5_000
    assert sum(cache.pool.num_evicted for cache in caches) > 150
    assert sum(request.num_preemptions for w in trials for request in w.requests) > 10


@pytest.mark.slow
def test_in_many_loads_that_share_much_every_invariant_holds() -> None:
    for seed in range(1000, 4000):
        run_trial(seed)


def test_outputs_are_the_same_with_the_cache_on_and_off() -> None:
    num_saved = 0
    for seed in range(10_000, 10_015):
        on, off = run_trial(seed, True, aborts=False), run_trial(seed, False, aborts=False)
        assert [r.token_ids for r in on.requests] == [r.token_ids for r in off.requests]
        assert [r.finish_reason for r in on.requests] == [r.finish_reason for r in off.requests]
        num_saved += sum(r.num_cached_tokens for r in on.requests) - sum(r.num_cached_tokens for r in off.requests)
        assert off.scheduler._cache.pool.num_idle == 0
    assert num_saved > 1000


# ---- What is found


def test_the_next_turn_of_a_conversation_computes_only_what_is_new() -> None:
    w = world()
    [first] = w.submit(tokens(40), max_tokens=20)
    w.drain()
    [second] = w.submit([*first.token_ids, 1, 2, 3], max_tokens=2)
    w.drain()
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 48  # of 59 that had KV
    assert second.num_output_tokens == 2


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_a_cached_prefix_is_shorter_than_the_prompt(length: int) -> None:
    w = world()
    w.submit(tokens(length), max_tokens=1)
    w.drain()
    [again] = w.submit(tokens(length), max_tokens=1)
    plan = w.step()
    assert plan.requests == [again]
    assert again.num_cached_tokens == (length - 1) // SIZE * SIZE
    w.drain()


def test_a_resumed_request_finds_its_prompt_and_outputs_and_computes_at_least_one_token() -> None:
    w = world()
    [request] = w.submit(tokens(20), max_tokens=60)
    for count in range(1, 50):
        w.step()
        w.scheduler._preempt(request, w.now_ns)
        w.check_everything()
        plan = w.step()
        assert plan.joined == [request]
        assert plan.num_computed == [(20 + 2 * count - 2) // SIZE * SIZE]
        assert request.num_cached_tokens == 0
        if request.is_finished:
            break
    w.drain()


def test_the_same_prompt_of_another_tenant_is_computed_again() -> None:
    w = world()
    a = w.submit(tokens(40), max_tokens=2, cache_salt="a")
    b = w.submit(tokens(40), max_tokens=2, cache_salt="b")
    plan = w.step()
    assert plan.joined == [*a, *b]
    w.drain()
    again = w.submit(tokens(40), max_tokens=2, cache_salt="b")
    none = w.submit(tokens(40), max_tokens=2)
    w.drain()
    assert [r.num_cached_tokens for r in (*a, *b, *again, *none)] == [0, 0, 32, 0]


def test_sequences_of_one_submit_have_one_salt() -> None:
    w = world()
    made = w.make(tokens(20), 2, n=2)
    made[1].cache_salt = "b"
    with pytest.raises(ValueError, match="salt"):
        w.scheduler.add(made)


def test_prompt_logits_are_computed_whole_also_after_a_preemption() -> None:
    w = world()
    w.submit(tokens(40), max_tokens=1)
    w.drain()
    [request] = w.submit(tokens(40), max_tokens=9, needs_all_prompt_logits=True)
    assert w.step().num_new_tokens == [40]
    w.scheduler._preempt(request, w.now_ns)
    assert w.step().num_new_tokens == [41]
    w.drain()


# ---- Two that arrive together


def test_the_second_of_two_with_one_prefix_waits_for_the_first_and_computes_only_its_own() -> None:
    w = world(max_num_batched_tokens=40)
    [first] = w.submit(tokens(50), max_tokens=3)
    [second] = w.submit([*tokens(33), 9, 9], max_tokens=3)
    [other] = w.submit(tokens(20, first=7), max_tokens=3)
    plan = w.step()
    assert plan.joined == [first]
    w.advance_clock(1000)
    plan = w.step()  # the first one's second block is complete, and so is what the second shares
    assert plan.joined == [second, other]
    assert second.num_cached_tokens == 32
    parts = {part.reason for part in w.scheduler.log.explain(second).parts}
    assert Reason.SHARED_PREFIX_PENDING not in parts  # nobody examined it: the step had no tokens left
    w.drain()


def test_others_pass_one_that_waits_for_a_prefix_and_the_log_says_why() -> None:
    w = world()
    [first] = w.submit(tokens(50), max_tokens=3)
    [second] = w.submit([*tokens(33), 9, 9], max_tokens=3)
    [other] = w.submit(tokens(20, first=7), max_tokens=3)
    assert w.step().joined == [first, other]
    w.advance_clock(1000)
    assert w.step().joined == [second]
    parts = {part.reason: part.wait_ns for part in w.scheduler.log.explain(second).parts}
    assert parts[Reason.SHARED_PREFIX_PENDING] == 1000
    w.drain()


def test_nobody_waits_for_one_that_does_not_run() -> None:
    w = world(num_blocks=6, max_num_seqs=2)
    [big] = w.submit(tokens(70, first=5), max_tokens=9)
    [first] = w.submit(tokens(40), max_tokens=3)
    [second] = w.submit(tokens(40), max_tokens=3)
    assert w.step().joined == [big]
    assert first.state is second.state is RequestState.WAITING
    assert w.scheduler._cache.waits_for(second) is None
    w.scheduler.abort(first)
    w.drain()
    assert second.num_cached_tokens == 0


@pytest.mark.parametrize("how", ["abort in flight", "abort", "preempt"])
def test_the_wait_ends_when_the_first_is_aborted_or_preempted_in_the_middle(how: str) -> None:
    w = world(max_num_batched_tokens=20)
    [first] = w.submit(tokens(100), max_tokens=3)
    [second] = w.submit(tokens(100), max_tokens=3)
    w.step()
    plan = w.issue()
    assert plan.requests == [first]
    assert w.scheduler._cache.waits_for(second) is first
    if how == "abort in flight":
        w.scheduler.abort(first)
        w.check_structures()
    w.finish_step()
    if how == "abort":
        w.scheduler.abort(first)
    elif how == "preempt":
        w.scheduler._preempt(first, w.now_ns)
        w.scheduler._waiting.remove(first)  # as if it came back later
    assert w.scheduler._cache.waits_for(second) is None
    plan = w.step()
    assert plan.joined == [second]
    assert plan.num_computed == [16 if how == "abort in flight" else 32]
    if how == "preempt":
        w.scheduler._waiting.add(first, w.now_ns)
    w.drain()
    assert second.num_output_tokens == 3


def test_many_with_one_prefix_compute_it_once() -> None:
    w = world(num_blocks=60)
    made = [w.submit([*tokens(64), i, i], max_tokens=3)[0] for i in range(8)]
    w.drain()
    assert [r.num_cached_tokens for r in made] == [0, *[64] * 7]
    assert w.steps == 4


# ---- Eviction


def test_cached_content_is_room_for_others_and_the_least_recently_used_goes_first() -> None:
    w = world(num_blocks=12, max_num_seqs=1)
    for first in (0, 10, 20, 0):
        w.submit(tokens(40, first), max_tokens=1)
        w.drain()
    pool = w.scheduler._cache.pool
    assert (pool.num_idle, pool.num_free) == (6, 12)
    [big] = w.submit(tokens(128, first=33), max_tokens=1)
    w.drain()
    assert big.num_output_tokens == 1
    assert pool.num_evicted == 2
    found = [w.scheduler._cache.find_prefix(Request("q", tokens(40, first), 1)) for first in (10, 20, 0, 33)]
    assert [prefix and prefix.num_tokens for prefix in found] == [0, 32, 32, 32]


def test_a_start_that_needs_more_than_is_free_leaves_everything_as_it_was() -> None:
    w = world(num_blocks=6)
    w.submit(tokens(40), max_tokens=1)
    w.drain()
    [running] = w.submit(tokens(40, first=20), max_tokens=9)
    w.step()
    [big] = w.submit(tokens(70), max_tokens=1)
    pool = w.scheduler._cache.pool
    before = (list(pool.free_blocks()), dict(pool.keys), w.scheduler._cache.num_queried_tokens)
    plan = w.step()
    assert plan.requests == [running]
    assert big.state is RequestState.WAITING
    assert (list(pool.free_blocks()), dict(pool.keys), w.scheduler._cache.num_queried_tokens) == before
    w.drain()
    assert big.num_cached_tokens == 32
