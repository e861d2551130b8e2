"""What is promised to whoever waits: the head its start, a tenant its share, a class its turn, and a limit its meaning.

The proofs are in docs/scheduling-proofs.md.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from pyengine.config import SchedulerConfig
from pyengine.kv_cache.block_pool import BlockPool
from pyengine.request import Request, RequestState
from pyengine.scheduler import Reason, Scheduler
from pyengine.scheduler.order import OUTPUT_WEIGHT, Fair

from .future import Futures
from .policy_loads import CHUNKED, KINDS, PASSING, Trial, outgrown
from .policy_world import WatchedScheduler, fork

PROMISED: dict[str, Any] = {"capacity": "guaranteed", "max_batch_wait_ms": 0, "ttft_limit_ms": None}
GUARANTEED: tuple[dict[str, Any], ...] = ({**PASSING, **PROMISED}, {**CHUNKED, **PROMISED})


# ---- The head


def futures_of(seed: int) -> tuple[Trial, Futures]:
    trial = Trial(seed, **GUARANTEED[seed % 2])
    trial.has_itl_limits = False
    futures = Futures(trial.world)
    trial.run()
    return trial, futures


def test_with_those_who_pass_a_head_starts_no_later_than_without_them() -> None:
    found = [futures_of(seed)[1] for seed in range(24)]
    assert sum(futures.num_moments for futures in found) > 20
    assert not [late for futures in found for late in futures.late]


@pytest.mark.slow
def test_with_those_who_pass_a_head_starts_no_later_than_without_them_at_a_thousand_moments() -> None:
    found = [futures_of(seed)[1] for seed in range(1000, 1600)]
    number = sum(futures.num_moments for futures in found)
    assert number >= 1000
    assert not [late for futures in found for late in futures.late], f"of {number} moments"


@pytest.mark.slow
def test_of_ten_thousand_blocked_heads_none_is_late(capsys: pytest.CaptureFixture[str]) -> None:
    num_heads = num_late = seed = 0
    while num_heads < 10_000:
        seed += 1
        world = Trial(100_000 + seed, **GUARANTEED[seed % 2]).run().world
        num_heads += world.num_heads
        num_late += world.num_late_heads
    with capsys.disabled():
        print(f"\n{num_heads} blocked heads in {seed} loads, {num_late} late")
    assert num_late == 0


# ---- Tenants: a virtual token counter


def fair_run(seed: int, **settings: Any) -> tuple[list[int], int]:
    """Two tenants that always have something waiting: at each step, how much one had beyond the other and the bound.

    Returns what is left to the bound at each step, and how many starts passed a head of the other tenant.
    """
    rng = random.Random(seed)
    config = SchedulerConfig(
        **{
            "num_blocks": 60,
            "max_context": 400,
            "max_num_seqs": rng.choice([1, 2, 4, 8]),
            "max_num_batched_tokens": rng.choice([64, 1000]),
            "order": "fair",
            "packing": "none",
            "prefix_caching": False,
            **settings,
        }
    )
    scheduler = Scheduler(config, lambda: 0)
    order = scheduler._order
    assert isinstance(order, Fair)
    longest_prompt, longest_output, number = {"flood": 60, "few": 120}, 30, 0
    bound = max(longest_prompt.values()) + OUTPUT_WEIGHT * longest_output * config.max_num_seqs

    def submit(tenant: str) -> None:
        nonlocal number
        length = rng.choice([1, 5, longest_prompt[tenant]])
        request = Request(f"r{number}", [number] * length, rng.randint(1, longest_output), tenant=tenant)
        scheduler.add([request])
        number += 1

    left, num_passed = [], 0
    passed = Counter({"flood": 0, "few": 0})
    for _ in range(400):
        waiting = Counter(request.tenant for request in scheduler._waiting)
        for _ in range(10 - waiting["flood"]):
            submit("flood")
        for _ in range(2 - waiting["few"]):
            submit("few")
        plan = scheduler.schedule()
        head = scheduler._head
        for request in plan.joined:
            if head is not None and request.log.passed.number and request.tenant != head.tenant:
                passed[request.tenant] += request.num_prompt_tokens + OUTPUT_WEIGHT * request.max_tokens
                num_passed += 1
        service = order.service
        for one, other in (("flood", "few"), ("few", "flood")):
            left.append(bound + passed[one] - (service[one] - service[other]))
        scheduler.commit(plan, [0] * len(plan.requests))
    assert all(number > 300 for number in order.service.values()), "one of them got next to nothing"
    return left, num_passed


@pytest.mark.parametrize("seed", range(8))
def test_two_backlogged_tenants_stay_within_the_bound(seed: int) -> None:
    """S(a) - S(b) <= P + w * N * L.

    P is the longest prompt, w the weight of an output token, N max_num_seqs, L the longest output: the proof is in
    docs/scheduling-proofs.md.
    """
    left, num_passed = fair_run(seed)
    assert min(left) >= 0
    assert num_passed == 0


def test_passing_loosens_the_bound_by_what_passed_heads_of_the_other_tenant() -> None:
    num_passed = 0
    for seed in range(6):
        left, number = fair_run(seed, packing="best_fit", num_blocks=16, capacity="guaranteed", max_num_seqs=8)
        assert min(left) >= 0
        num_passed += number
    assert num_passed > 20


def test_a_tenant_that_comes_back_has_no_claim_for_what_it_did_not_use() -> None:
    config = SchedulerConfig(
        num_blocks=60, max_context=200, max_num_seqs=1, order="fair", packing="none", prefix_caching=False
    )
    scheduler = Scheduler(config, lambda: 0)

    def submit(tenant: str, count: int) -> list[Request]:
        made = [Request(tenant, [1] * 20, 4, tenant=tenant) for _ in range(count)]
        for request in made:
            scheduler.add([request])
        return made

    def step() -> None:
        plan = scheduler.schedule()
        scheduler.commit(plan, [0] * len(plan.requests))

    submit("busy", 30)
    for _ in range(60):
        step()
    late, busy = submit("late", 10), [r for r in scheduler._waiting if r.tenant == "busy"]
    while scheduler._order.service["busy"] == 0 or sum(r.started_ns is not None for r in late) < 5:  # type: ignore[attr-defined]
        step()
    # It gets its turn, one for one, and does not catch up with what the other had before.
    assert abs(sum(r.started_ns is not None for r in late) - sum(r.started_ns is not None for r in busy)) <= 2


def test_abort_buys_no_service_and_costs_none() -> None:
    """Who aborts a prompt in the middle pays for what was computed; who is preempted and then aborts, too."""
    for preempted in (False, True):
        config = SchedulerConfig(
            num_blocks=20, max_context=300, max_num_batched_tokens=64, order="fair", capacity="optimistic"
        )
        scheduler = Scheduler(config, lambda: 0)
        request = Request("r", [1] * 200, 4, tenant="a")
        scheduler.add([request])
        plan = scheduler.schedule()
        scheduler.commit(plan, [None])
        assert scheduler._order.service["a"] == 200  # type: ignore[attr-defined]
        if preempted:
            scheduler._preempt(request, 0)
        scheduler.abort(request)
        assert scheduler._order.service["a"] == 64  # type: ignore[attr-defined]


# ---- Classes


@pytest.mark.parametrize("order", ["priority", "fair", "deadline", "shortest"])
@pytest.mark.parametrize("priority", [1, 3, 9])
def test_no_class_starves_under_an_endless_flood_of_the_best(order: str, priority: int) -> None:
    """After `priority` promotion times it is in the best class, and has come before all who arrive later."""
    config = SchedulerConfig(
        num_blocks=40, max_context=200, max_num_seqs=1, order=order, priority_promotion_s=10, prefix_caching=False
    )
    now_ns = 0
    scheduler = Scheduler(config, lambda: now_ns)
    low = Request("low", [1] * 30, 2, priority=priority, tenant="low")
    scheduler.add([low])
    scheduler.add([Request("first", [2] * 3, 2, priority=0)])
    number = 0
    while low.started_ns is None:
        while len(scheduler._waiting) < 4:
            scheduler.add([Request(f"f{number}", [3] * 3, 2, priority=0)])
            number += 1
        now_ns += 10**9
        plan = scheduler.schedule()
        scheduler.commit(plan, [0] * len(plan.requests))
        assert now_ns <= (10 * priority + 100) * 10**9, "it starves"
    assert low.priority_class == 0
    assert low.started_ns >= 10 * priority * 10**9


# ---- Limits mean what they say


def relax(scheduler: WatchedScheduler, reason: Reason) -> None:
    """Take the limit away that `reason` names."""
    config = scheduler.config

    def set_value(name: str, value: Any) -> None:
        object.__setattr__(config, name, value)

    if reason is Reason.MAX_SEQS:
        set_value("max_num_seqs", config.max_num_seqs + 1)
    elif reason is Reason.TOKEN_BUDGET:
        more = config.max_num_batched_tokens + 2000
        set_value("max_num_batched_tokens", more)
        scheduler._latency._max_num_batched_tokens = more  # type: ignore[attr-defined]
    elif reason is Reason.LATENCY_LIMIT:
        scheduler._itl_limits.clear()
    elif reason in (Reason.KV_NOW, Reason.KV_PEAK):
        extra = 400
        set_value("num_blocks", config.num_blocks + extra)
        enlarge(scheduler._cache.pool, extra)
    elif reason is Reason.STATIC_BATCH:
        scheduler._batching._is_forming = True  # type: ignore[attr-defined]
    elif reason is Reason.BATCH_WAIT:
        set_value("max_batch_wait_ms", 0)
    else:
        scheduler.resume()


def enlarge(pool: BlockPool, extra: int) -> None:
    """Put `extra` new blank blocks in front of the free ones."""
    old, free = pool.num_blocks, list(pool.free_blocks())
    pool.num_blocks += extra
    pool.num_free += extra
    pool._refcounts.extend([0] * extra)
    pool._keys.extend([None] * extra)
    ring = [pool.num_blocks, *range(old, pool.num_blocks), *free, pool.num_blocks]
    pool._next = array("q", [0] * (pool.num_blocks + 1))
    pool._previous = array("q", [0] * (pool.num_blocks + 1))
    for before, after in pairwise(ring):
        pool._next[before], pool._previous[after] = after, before


def first_refused(scheduler: WatchedScheduler) -> Reason | None:
    """What the step that was just planned lacked for the first who did not start."""
    seen = scheduler.seen
    return seen.closed_by if seen.closed_by is not None else seen.stopped_by


def test_where_one_limit_alone_bound_a_step_relaxing_it_admits_at_least_one_more() -> None:
    """Without the limit that a step names one more starts, or another limit is met: never the same."""
    relaxed: Counter[Reason] = Counter()
    more: Counter[Reason] = Counter()
    for seed in range(40):
        kind = outgrown if seed % 3 == 0 else None
        trial = Trial(700 + seed, kind=kind or KINDS[seed % len(KINDS)], packing="none", order="fifo")
        world = trial.world
        issue = world.issue

        def watched(world=world, issue=issue):  # type: ignore[no-untyped-def]
            copies = [fork(world.scheduler)[0] for _ in range(2)] if world.steps % 3 == 0 else []
            plan = issue()
            if not copies:
                return plan
            for copy in copies:
                copy._fruitless = None
            same, other = copies
            before = len(same.schedule().joined)
            reason = first_refused(same)
            if reason is None or len(same._waiting) == 0:
                return plan
            relax(other, reason)
            after = len(other.schedule().joined)
            relaxed[reason] += 1
            more[reason] += after > before
            assert after > before or first_refused(other) is not reason, f"{reason} was not what bound the step"
            return plan

        world.issue = watched  # type: ignore[method-assign]
        trial.run()
    assert {reason for reason, number in more.items() if number >= 3} >= {
        Reason.MAX_SEQS,
        Reason.TOKEN_BUDGET,
        Reason.KV_NOW,
        Reason.KV_PEAK,
        Reason.STATIC_BATCH,
    }


# ---- Commutation


@pytest.mark.parametrize("seed", range(15))
def test_an_abort_before_or_after_a_late_result_leads_to_the_same_future(seed: int) -> None:
    """All plans after it are the same, under any setting; the aborted one's last token is all that may differ."""
    shapes = []
    for abort_first in (True, False):
        trial = Trial(seed, max_batch_wait_ms=0, ttft_limit_ms=None)
        world, rng = trial.world, random.Random(seed)
        trial.abort_rate = trial.end_rate = trial.hold_rate = trial.pause_rate = 0.0
        for item in trial.load:
            item.pop("steps", None)
            trial.submit(**item)
        for _ in range(rng.randint(1, 12)):
            trial.busy_step()
        plan = world.issue()
        if plan.is_empty:
            return
        victim = rng.choice([r for r in world.requests if not r.is_finished])
        world.advance_clock(world.device_ns(plan))
        if abort_first:
            world.scheduler.abort(victim)
            world.finish_step()
        else:
            world.finish_step()
            world.scheduler.abort(victim)
        assert victim.state is RequestState.FINISHED
        world.check_everything()
        trial.plans.clear()
        for _ in range(60):
            trial.busy_step()
        shapes.append(trial.plans)
        world.drain()
    assert shapes[0] == shapes[1]
