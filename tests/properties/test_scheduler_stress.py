"""Seeded loads of the kinds that break schedulers; each runs to its end with every invariant checked on the way."""

from __future__ import annotations

import random

import pytest

from pyengine.config import SchedulerConfig
from pyengine.errors import NeverFits, QueueFull

from .scheduler_world import COMMON_RULE, World

Load = list[tuple[int, int | None, int]]


def one_giant_and_many_tiny(rng: random.Random, room: int) -> Load:
    load: Load = [(max(1, room - 5), None, 1)]
    load += [(rng.randint(1, 6), rng.randint(1, 8), 1) for _ in range(15)]
    rng.shuffle(load)
    return load


def all_limits_huge(rng: random.Random, room: int) -> Load:
    return [(rng.randint(1, max(1, room // 3)), None, 1) for _ in range(5)]


def all_one_prompt(rng: random.Random, room: int) -> Load:
    length = rng.randint(1, max(1, room // 2))
    return [(length, rng.randint(1, 20), rng.randint(1, 5)) for _ in range(5)]


def pool_one_block_short(rng: random.Random, room: int) -> Load:
    half = max(1, room // 2)
    return [(half, rng.randint(2, 30), 1) for _ in range(6)]


def mixed(rng: random.Random, room: int) -> Load:
    return [(rng.randint(1, room), rng.choice([None, 1, 5, 30]), rng.choice([1, 1, 1, 3])) for _ in range(8)]


KINDS = (one_giant_and_many_tiny, all_limits_huge, all_one_prompt, pool_one_block_short, mixed)


def run_trial(seed: int) -> World:
    rng = random.Random(seed)
    num_blocks, max_num_seqs = rng.randint(2, 10), rng.choice([1, 2, 3, 5, 8])
    config = SchedulerConfig(
        num_blocks=num_blocks,
        max_context=rng.choice([30, 100, 1000]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 7, 60, 1000]),
        watermark=rng.choice([0.0, 0.01, 0.3]),
        max_queue=rng.choice([None, None, 6]),
        **{**COMMON_RULE, "capacity": rng.choice(["optimistic", "optimistic", "guaranteed"])},
    )
    world = World(config)
    load = KINDS[seed % len(KINDS)](rng, num_blocks * config.block_size)
    abort_rate, end_rate = rng.choice([0.0, 0.02, 0.3]), rng.choice([0.0, 0.05])
    for length, max_tokens, n in load:
        try:
            world.submit([rng.randrange(3)] * length, max_tokens, n)
        except (NeverFits, QueueFull):
            world.check_everything()
        for _ in range(rng.choice([0, 0, 1, 5])):
            busy_step(world, rng, abort_rate, end_rate)
    for _ in range(30):
        busy_step(world, rng, abort_rate, end_rate)
    world.drain()
    return world


def busy_step(world: World, rng: random.Random, abort_rate: float, end_rate: float) -> None:
    world.advance_clock(rng.choice([0, 1, 1000, 10**12]))
    plan = world.issue()
    if plan.is_empty:
        return
    world.advance_clock(rng.randint(0, 50))
    for request in world.requests:
        if rng.random() < abort_rate / len(world.requests):
            world.scheduler.abort(request)
            world.check_everything()
    world.finish_step({request: "stop" for request in plan.requests if rng.random() < end_rate})
    world.check_everything()


def test_every_load_ends_with_the_right_output_for_everyone() -> None:
    worlds = [run_trial(seed) for seed in range(90)]
    assert all(request.is_finished for world in worlds for request in world.requests)
    preempted = sum(any(request.num_preemptions for request in world.requests) for world in worlds)
    assert preempted >= 10, "the loads are too easy to show anything"


@pytest.mark.slow
@pytest.mark.parametrize("block", [pytest.param(0, marks=pytest.mark.sample), *range(1, 20)])
def test_every_load_ends_with_the_right_output_for_everyone_in_a_thousand_trials(block: int) -> None:
    for seed in range(1000 + block * 50, 1050 + block * 50):
        run_trial(seed)
