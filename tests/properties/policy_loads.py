"""Seeded trials over all axes: a random setting, a load of a kind that breaks schedulers, and events at random."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from pyengine.config import SchedulerConfig
from pyengine.errors import NeverFits, QueueFull, TTFTUnreachable
from pyengine.request import RequestState
from pyengine.scheduler.capacity import MIN_LENGTHS, Predicted

from .policy_world import PolicyWorld
from .scheduler_world import MAX_OUTPUTS

Load = list[dict[str, Any]]
TENANTS = ("", "a", "b")


def one_giant_and_many_tiny(rng: random.Random, room: int) -> Load:
    load: Load = [{"length": rng.randint(1, 6), "max_tokens": rng.randint(1, 8)} for _ in range(15)]
    load.insert(rng.randrange(5), {"length": max(1, room - 5), "max_tokens": None})
    return load


def a_hole_behind_the_head(rng: random.Random, room: int) -> Load:
    """Half of the pool runs for long, the head needs more than the other half, and tiny ones come and come."""
    load: Load = [{"length": max(1, rng.randint(room // 4, room // 2)), "max_tokens": rng.randint(10, 60), "steps": 2}]
    load += [
        {"length": rng.randint(1, 12), "max_tokens": rng.randint(1, 40), "kind": None} for _ in range(rng.randrange(3))
    ]
    load.append(
        {"length": max(1, rng.randint(room // 2, room - 5)), "max_tokens": rng.choice([2, 20, None]), "steps": 0}
    )
    load += [{"length": rng.randint(1, 14), "max_tokens": rng.randint(1, 40)} for _ in range(12)]
    return load


def long_ones_behind_the_head(rng: random.Random, room: int) -> Load:
    """The same, but those behind the head have prompts of several steps."""
    load: Load = [{"length": rng.randint(room // 3, room // 2), "max_tokens": rng.randint(20, 80), "steps": 0}]
    load += [{"length": rng.randint(1, 30), "max_tokens": rng.randint(1, 60)} for _ in range(rng.randrange(3))]
    load.append({"length": rng.randint(room // 2, 3 * room // 4), "max_tokens": rng.choice([2, 20]), "steps": 0})
    load += [{"length": rng.randint(10, 70), "max_tokens": rng.randint(1, 30)} for _ in range(8)]
    return load


def outgrown(rng: random.Random, room: int) -> Load:
    return [
        {"length": rng.randint(1, 14), "max_tokens": rng.randint(10, max(11, room // 2)), "steps": 0} for _ in range(8)
    ]


def all_limits_huge(rng: random.Random, room: int) -> Load:
    return [{"length": rng.randint(1, max(1, room // 3)), "max_tokens": None} for _ in range(5)]


def all_one_prefix(rng: random.Random, room: int) -> Load:
    length = rng.randint(1, max(1, room // 2))
    return [
        {
            "length": length + rng.choice([0, 0, 1, 17]),
            "max_tokens": rng.randint(1, 20),
            "n": rng.choice([1, 1, 2, 4]),
            "kind": 0,
        }
        for _ in range(6)
    ]


def pool_one_block_short(rng: random.Random, room: int) -> Load:
    half = max(1, room // 2)
    return [{"length": half, "max_tokens": rng.randint(2, 30)} for _ in range(6)]


def flooding_tenant(rng: random.Random, room: int) -> Load:
    load: Load = [{"length": rng.randint(1, 20), "max_tokens": rng.randint(1, 12), "tenant": "a"} for _ in range(14)]
    for _ in range(3):
        other = {
            "length": rng.randint(1, max(1, room // 2)),
            "max_tokens": 9,
            "tenant": "b",
            "priority": rng.choice([0, 2]),
        }
        load.insert(rng.randrange(len(load)), other)
    return load


def ends_of_all_kinds(rng: random.Random, room: int) -> Load:
    """Running ones that end at many different steps, and heads that need what they leave."""
    load: Load = [{"length": rng.randint(1, 20), "max_tokens": rng.randint(1, 60)} for _ in range(4)]
    for _ in range(4):
        load.append({"length": rng.randint(1, room), "max_tokens": rng.choice([1, 5, 30, None])})
        load += [{"length": rng.randint(1, 12), "max_tokens": rng.randint(1, 40)} for _ in range(3)]
    return load


def mixed(rng: random.Random, room: int) -> Load:
    return [
        {"length": rng.randint(1, room), "max_tokens": rng.choice([None, 1, 5, 30]), "n": rng.choice([1, 1, 1, 3])}
        for _ in range(8)
    ]


LoadKind = Callable[[random.Random, int], Load]
KINDS: tuple[LoadKind, ...] = (
    one_giant_and_many_tiny,
    a_hole_behind_the_head,
    outgrown,
    all_limits_huge,
    all_one_prefix,
    pool_one_block_short,
    flooding_tenant,
    ends_of_all_kinds,
    mixed,
)


# Settings in which much is passed, and in which much is preempted.
ROOMY: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 1000, "max_queue": None, "batching": "continuous"}
PASSING: dict[str, Any] = {
    **ROOMY,
    "kind": a_hole_behind_the_head,
    "num_blocks": 20,
    "packing": "best_fit",
    "itl_limit_ms": None,
    "aging_barrier_s": 10,
    "max_context": 1000,
}
CHUNKED: dict[str, Any] = {
    **PASSING,
    "kind": long_ones_behind_the_head,
    "num_blocks": 32,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 40,
    "order": "fifo",
    "window": 64,
    "bypass_budget": 4,
    "watermark": 0.0,
    "ttft_limit_ms": None,
    "max_batch_wait_ms": 0,
}
PREEMPTING: dict[str, Any] = {
    **ROOMY,
    "kind": outgrown,
    "num_blocks": 8,
    "capacity": "optimistic",
    "watermark": 0.0,
    "max_context": 1000,
}


def random_config(rng: random.Random, **fixed: Any) -> SchedulerConfig:
    max_num_seqs = rng.choice([1, 2, 3, 5, 8, 8])
    settings: dict[str, Any] = {
        "num_blocks": rng.choice([2, 3, 4, 6, 8, 12, 20, 40]),
        "max_context": rng.choice([40, 150, 1000, 1000]),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + rng.choice([0, 7, 60, 200, 1000]),
        "batching": rng.choice(["continuous", "continuous", "continuous", "static"]),
        "order": rng.choice(["fifo", "fifo", "priority", "fair", "deadline", "shortest"]),
        "packing": rng.choice(["none", "best_fit", "best_fit"]),
        "capacity": rng.choice(["guaranteed", "predicted", "optimistic"]),
        "capacity_quantile": rng.choice([0.2, 0.8, 1.0]),
        "victim": rng.choice(["cheapest", "latest"]),
        "prefix_caching": rng.random() < 0.6,
        "watermark": rng.choice([0.0, 0.01, 0.3]),
        "itl_limit_ms": rng.choice([None, None, None, 0.0016]),
        "ttft_limit_ms": rng.choice([None] * 7 + [0.1]),
        "max_queue": rng.choice([None, None, 6]),
        "max_batch_wait_ms": rng.choice([0, 0, 0, 0.005]),
        "aging_barrier_s": rng.choice([10, 10, 10, 2e-5]),
        "bypass_budget": rng.choice([4, 4, 4, 0.5]),
        "window": rng.choice([64, 64, 64, 2]),
        "priority_promotion_s": rng.choice([30, 3e-5, 1e-9]),
    }
    return SchedulerConfig(**{**settings, **fixed})


class Trial:
    """One world, one load, and what happens to it at random."""

    def __init__(self, seed: int, *, kind: LoadKind | None = None, is_logged: bool = True, **fixed: Any) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.config = random_config(rng, **fixed)
        self.world = PolicyWorld(self.config, is_logged=is_logged)
        choices = random.Random(seed)
        self.world.wants_fork = lambda: choices.random() < 0.1
        self.abort_rate = rng.choice([0.0, 0.0, 0.02, 0.3])
        self.end_rate = rng.choice([0.0, 0.05])
        self.hold_rate = rng.choice([0.0, 0.0, 0.1])
        self.pause_rate = rng.choice([0.0, 0.0, 0.05])
        self.jumps = rng.random() < 0.2
        self.load = (kind or KINDS[seed % len(KINDS)])(rng, self.config.num_blocks * self.config.block_size)
        self.has_itl_limits = True
        capacity = self.world.scheduler._capacity
        if isinstance(capacity, Predicted) and rng.random() < 0.7:
            # It predicts only once it has seen enough: often too short, sometimes too long.
            for _ in range(MIN_LENGTHS):
                capacity._lengths.add(rng.choice([1, 3, 10, 30]))
            self.world.scheduler.recorder = None  # a recording would have to know these
        self.plans: list[tuple[Any, ...]] = []
        self.refused: Counter[str] = Counter()
        self.failure: AssertionError | None = None

    def run(self) -> Trial:
        """Raises AssertionError where something is not true."""
        rng, world = self.rng, self.world
        for item in self.load:
            num_steps = item.pop("steps", rng.choice([0, 0, 1, 5]))
            self.submit(**item)
            for _ in range(num_steps):
                self.busy_step()
        for _ in range(20):
            self.busy_step()
        world.drain()
        world.check_everything()
        assert all(request.is_finished for request in world.requests)
        return self

    def submit(self, length: int, max_tokens: int | None, kind: int | None = None, **fields: Any) -> None:
        rng, world = self.rng, self.world
        kind = rng.randrange(3) if kind is None else kind
        prompt = [(kind + i) % 5 for i in range(length)]
        fields.setdefault("tenant", rng.choice(TENANTS))
        fields.setdefault("priority", rng.choice([0, 0, 1, 3]))
        fields["cache_salt"] = rng.choice(["", "", "", "s"])
        fields["ttft_limit_ns"] = rng.choice([None] * 9 + [10_000, 200_000, 10**6])
        fields["itl_limit_ns"] = rng.choice([None, None, None, 1_700]) if self.has_itl_limits else None
        fields["needs_all_prompt_logits"] = rng.random() < 0.05
        room = self.config.num_blocks * self.config.block_size
        if max_tokens is not None or min(room, self.config.max_context) > MAX_OUTPUTS:
            max_tokens = min(max_tokens or MAX_OUTPUTS, MAX_OUTPUTS)
        num_waiting, number = world.scheduler.num_waiting, len(world.requests)
        num = fields.get("n", 1)
        fits = length < self.config.max_context and length <= self.config.num_blocks * self.config.block_size
        has_place = self.config.max_queue is None or num_waiting + num <= self.config.max_queue
        try:
            world.submit(prompt, max_tokens, **fields)
        except NeverFits:
            assert not fits, "one that fits an empty engine was refused"
        except QueueFull:
            assert not has_place
        except TTFTUnreachable:
            assert fields["ttft_limit_ns"] is not None or self.config.ttft_limit_ms is not None
        else:
            assert fits, "one that does not fit an empty engine was accepted"
            assert has_place
            world.check_everything()
            return
        self.refused["at submit"] += 1
        assert (world.scheduler.num_waiting, len(world.requests)) == (num_waiting, number)
        world.check_everything()
        world.check_queue()

    def busy_step(self) -> None:
        rng, world = self.rng, self.world
        world.advance_clock(rng.choice([0, 1, 1000, 10**12 if self.jumps else 30]))
        self.disturb()
        plan = world.issue()
        self.note(plan)
        if plan.is_empty:
            return
        self.abort_some()
        world.advance_clock(world.device_ns(plan))
        world.finish_step({request: "stop" for request in plan.requests if rng.random() < self.end_rate})
        world.check_everything()
        self.abort_some()

    def note(self, plan: Any) -> None:
        number = self.world.requests.index
        self.refused["late"] += len(plan.refused)
        self.plans.append(
            (
                plan.step,
                [number(request) for request in plan.requests],
                plan.num_new_tokens,
                plan.num_computed,
                [number(request) for request in plan.joined],
                [number(request) for request in plan.preempted],
                [number(request) for request, _ in plan.refused],
            )
        )

    def disturb(self) -> None:
        rng, world = self.rng, self.world
        if rng.random() < self.hold_rate:
            waiting = [request for request in world.requests if request.state is RequestState.WAITING]
            if waiting:
                world.hold(rng.choice(waiting), world.now_ns + rng.choice([1, 5_000, 10**9]))
        for request in list(world.scheduler._held):
            if rng.random() < 0.2:
                world.wake(request)
        if rng.random() < self.pause_rate:
            world.scheduler.pause()
        elif world.scheduler.is_paused and rng.random() < 0.5:
            world.scheduler.resume()
        if rng.random() < 0.01:
            world.scheduler.clear_prefix_cache()

    def abort_some(self) -> None:
        rng, world = self.rng, self.world
        for request in world.requests:
            if rng.random() < self.abort_rate / len(world.requests):
                self.check_abort(request)

    def check_abort(self, victim: Any) -> None:
        """Abort in any state ends it, frees its table at once and changes nobody else; twice is once."""
        world = self.world
        world.counts["check_abort"] += 1
        others = [r for r in world.requests if r is not victim]
        before = [(r.state, list(r.token_ids), list(r.block_table), r.num_computed_tokens) for r in others]
        was_finished, reason = victim.is_finished, victim.finish_reason
        assert world.scheduler.abort(victim) is not was_finished
        assert victim.finish_reason == (reason if was_finished else "abort")
        assert victim.block_table == []
        assert before == [(r.state, list(r.token_ids), list(r.block_table), r.num_computed_tokens) for r in others]
        free, ended_ns = world.scheduler.num_free_blocks, victim.finished_ns
        assert world.scheduler.abort(victim, "error") is False
        assert (world.scheduler.num_free_blocks, victim.finished_ns) == (free, ended_ns)
        world.check_everything()


class Failures:
    """What went wrong in many trials, by the invariant that found it; and how often each was looked at."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.trials: list[Trial] = []

    def run(self, seeds: Iterable[int], **fixed: Any) -> None:
        for seed in seeds:
            trial = Trial(seed, **fixed)
            try:
                trial.run()
            except Exception as error:
                self.found.setdefault(_invariant_of(error), f"seed {seed}: {error!r}\n{traceback.format_exc()}")
            self.counts += trial.world.counts
            self.trials.append(trial)


def _invariant_of(error: Exception) -> str:
    """The name of the innermost check that failed, else of what raised."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return next((name for name in reversed(names) if name.startswith("check_")), "anything else")
