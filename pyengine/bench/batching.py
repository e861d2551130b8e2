"""The whole lesson on batching: batch sizes, loads of several rates, all policies at one of them. It draws nothing."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from pyengine.bench.batch_size import BatchSizes, batch_sizes_up_to, sweep
from pyengine.bench.client import Options
from pyengine.bench.load import LoadResult, Setting, WorstRequest, measure_capacity, run_load
from pyengine.bench.machine import OthersLoad
from pyengine.bench.workload import BenchRequest, make_requests, mix_for
from pyengine.engine import Engine
from pyengine.errors import InvalidRequest
from pyengine.request_options import RequestOptions
from pyengine.simulate.policies import Policy, parse_policies

FORMAT = "pyengine bench batching"
VERSION = 1
OnProgress = Callable[[float, str], None]

BLOCK_SIZE = 16
MAX_NUM_SEQS = 32
MAX_NUM_BATCHED_TOKENS = 256
# With the built-in model a step takes less than a millisecond; to examine the default 64 waiting requests in each would
# take the scheduler as long again, which is no matter where steps take longer.
WINDOW = 8
POOL_OF_LONGEST = 2  # so many of the longest requests fill the KV pool
COMPARED = "static fifo fifo-predicted best-fit"
PLANE = (
    "static fifo fifo-predicted fifo-guaranteed best-fit-optimistic:best-fit,capacity=optimistic best-fit "
    "best-fit-guaranteed priority fair deadline shortest oracle"
)
CAPACITY_POLICY = "best-fit"
NUM_CAPACITIES = 3
_LEAST_REQUESTS, _MOST_REQUESTS = 40, 3000
# Order "deadline" needs limits: so many times the p99 of the slowest compared policy under about this load.
_SHORT_DEADLINE, _LONG_DEADLINE = 4.0, 12.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and for how long. Raises InvalidRequest, naming the field.

    Attributes:
        max_batch: the largest batch size. rounds: of the sweep over batch sizes.
        rates: loads, as parts of the measured capacity. plane_rate: the one at which all policies are compared.
        compared: policies at every rate. plane: policies at one rate.
        seconds: how long the requests of one run take to arrive at the measured capacity.
        seeds: runs of each policy in the plane.
        with_load: whether to do more than the sweep over batch sizes.
    """

    max_batch: int = 64
    rounds: int = 6
    rates: tuple[float, ...] = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
    plane_rate: float = 0.9
    compared: tuple[Policy, ...] = field(default_factory=lambda: tuple(parse_policies(COMPARED)))
    plane: tuple[Policy, ...] = field(default_factory=lambda: tuple(parse_policies(PLANE)))
    seconds: float = 3.0
    seeds: int = 3
    seed: int = 0
    with_load: bool = True

    def __post_init__(self) -> None:
        for name, low, high in (("max_batch", 1, 1024), ("rounds", 1, 1000), ("seeds", 1, 100), ("seed", 0, 2**31)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise _refused(name, value, f"an integer from {low} to {high}", high)
        for value in (*self.rates, self.plane_rate):
            if not 0.01 <= value <= 10:
                raise _refused("rates", value, "numbers from 0.01 to 10, parts of the measured capacity", 10)
        if not self.rates:
            raise _refused("rates", "", "at least one number", 1)
        if not 0.05 <= self.seconds <= 600:
            raise _refused("seconds", self.seconds, "a number from 0.05 to 600", 600)


QUICK = Plan(max_batch=32, rounds=3, rates=(0.4, 0.7, 0.9, 1.1), seconds=1.5, seeds=1)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Everything that was measured.

    Attributes:
        setting: the model, sizes and workload, in JSON-able form.
        machine: what it ran on. others: the part of the processors that other processes used meanwhile.
        capacity: requests a second that `best-fit` finishes when half as many requests as it has seats are in it all
            the time, the median of NUM_CAPACITIES measurements. None, as all that follows is empty, if only batch
            sizes were measured.
        capacity_after: the same, measured again at the end to see whether the machine was the same.
        loads: each compared policy at each rate. plane: each policy of the plane at `plane_rate`, each seed.
        worst: for some policies, at `plane_rate`, the requests that waited longest.
    """

    setting: Mapping[str, Any]
    machine: Mapping[str, Any]
    plan: Plan
    sizes: BatchSizes
    capacity: float | None = None
    capacity_after: float | None = None
    num_requests: int = 0
    loads: tuple[LoadResult, ...] = ()
    plane: tuple[LoadResult, ...] = ()
    worst: Mapping[str, tuple[WorstRequest, ...]] = field(default_factory=dict)
    others: float | None = None
    wall_s: float = 0.0

    def record(self) -> dict[str, Any]:
        """As JSON has it: times in seconds, bytes, requests a second."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "setting": dict(self.setting),
            "machine": dict(self.machine),
            "others": self.others,
            "wall_s": self.wall_s,
            "policies": {
                policy.name: {**policy.settings, **({"lengths": "known"} if policy.knows_lengths else {})}
                for policy in (*self.plan.compared, *self.plan.plane)
            },
            "batch_sizes": asdict(self.sizes),
            "capacity_requests_per_s": self.capacity,
            "capacity_after_requests_per_s": self.capacity_after,
            "num_requests": self.num_requests,
            "plane_rate": self.plan.plane_rate,
            "loads": [asdict(result) for result in self.loads],
            "plane": [asdict(result) for result in self.plane],
            "worst": {
                policy: [
                    {
                        "ttft_s": one.ttft_s,
                        "prompt_tokens": one.prompt_tokens,
                        "output_tokens": one.output_tokens,
                        "slices": [[round(s.start_s, 6), round(s.end_s, 6), s.what] for s in one.slices],
                    }
                    for one in requests
                ]
                for policy, requests in self.worst.items()
            },
        }


def measure_batching(
    model: str | None, engine_settings: Mapping[str, Any], plan: Plan, on_progress: OnProgress
) -> Lesson:
    """Run everything. `engine_settings` are device, dtype and num_threads as Engine has them."""
    started = time.perf_counter()
    others = OthersLoad()
    progress = _Progress(plan, on_progress)
    num_threads = engine_settings.get("num_threads")
    with Engine(
        model,
        max_num_seqs=plan.max_batch,
        max_num_batched_tokens=max(1024, plan.max_batch),
        block_size=BLOCK_SIZE,
        **engine_settings,
    ) as engine:
        progress.say("batch sizes")
        sizes = sweep(
            engine,
            batch_sizes_up_to(plan.max_batch),
            plan.rounds,
            num_threads=num_threads,
            seed=plan.seed,
            on_progress=progress.part,
        )
        setting = _setting(model, engine_settings, engine)
        described = _described(engine, setting)
        machine = {
            "device": engine.model.backend.description,
            "platform": platform.platform(terse=True),
            "python": platform.python_version(),
        }
    progress.end("batch sizes")
    lesson = Lesson(described, machine, plan, sizes)
    if plan.with_load:
        lesson = replace(lesson, **_under_load(setting, plan, progress))
    return replace(lesson, others=others.share(), wall_s=time.perf_counter() - started)


def _under_load(setting: Setting, plan: Plan, progress: _Progress) -> dict[str, Any]:
    """The fields of Lesson that need requests which arrive."""
    capacity, requests = _measured_capacity(setting, plan, progress)
    worst: dict[str, tuple[WorstRequest, ...]] = {}
    loads = _loads(setting, plan, requests, capacity, progress, worst)
    plane = _plane(setting, plan, requests, capacity, loads, progress)
    progress.say("capacity, again")
    after = measure_capacity(setting, parse_policies(CAPACITY_POLICY)[0], requests)
    progress.end("capacity, again")
    return {
        "capacity": capacity,
        "capacity_after": after,
        "num_requests": len(requests),
        "loads": tuple(loads),
        "plane": tuple(plane),
        "worst": worst,
    }


def _setting(model: str | None, engine_settings: Mapping[str, Any], engine: Engine) -> Setting:
    mix = mix_for(engine.model.spec.max_context)
    return Setting(
        model=model,
        engine={
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "window": WINDOW,
            **engine_settings,
        },
        block_size=BLOCK_SIZE,
        block_bytes=engine.model.backend.kv_block_bytes(BLOCK_SIZE),
        num_blocks=POOL_OF_LONGEST * -(-mix.longest // BLOCK_SIZE),
        mix=mix,
        vocab_size=engine.model.spec.vocab_size,
    )


def _described(engine: Engine, setting: Setting) -> dict[str, Any]:
    return {
        "model": engine.model.name,
        "dtype": engine.model.spec.dtype,
        "parameters": engine.model.spec.num_parameters(),
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "window": WINDOW,
        "block_size": BLOCK_SIZE,
        "num_blocks": setting.num_blocks,
        "kv_cache_memory": setting.num_blocks * setting.block_bytes,
        "workload": asdict(setting.mix),
        "workload_in_words": setting.mix.describe(),
    }


def _measured_capacity(setting: Setting, plan: Plan, progress: _Progress) -> tuple[float, list[BenchRequest]]:
    """The rate at which requests end in a full engine, and the requests of all runs: as many as the plan's seconds."""
    progress.say("capacity")
    policy = parse_policies(CAPACITY_POLICY)[0]
    trial = make_requests(setting.mix, _LEAST_REQUESTS * 2, setting.vocab_size, plan.seed)
    rough = measure_capacity(setting, policy, trial)
    count = max(_LEAST_REQUESTS, min(_MOST_REQUESTS, round(rough * plan.seconds)))
    requests = make_requests(setting.mix, count, setting.vocab_size, plan.seed)
    measured = []
    for _ in range(NUM_CAPACITIES):
        measured.append(measure_capacity(setting, policy, requests, lambda ended: progress.part(ended / count)))
        progress.end("capacity")
    return median(measured), requests


def _loads(
    setting: Setting,
    plan: Plan,
    requests: Sequence[BenchRequest],
    capacity: float,
    progress: _Progress,
    worst: dict[str, tuple[WorstRequest, ...]],
) -> list[LoadResult]:
    results = []
    shown = min(plan.rates, key=lambda share: abs(share - plan.plane_rate))
    for share in plan.rates:
        for policy in plan.compared:
            progress.say(f"{policy.name} at {share:.0%}")
            kept: list[WorstRequest] = []
            results.append(
                run_load(
                    setting,
                    policy,
                    requests,
                    share * capacity,
                    share,
                    plan.seed,
                    on_ended=lambda ended: progress.part(ended / len(requests)),
                    worst=kept if share == shown else None,
                )
            )
            if kept:
                worst[policy.name] = tuple(kept)
            progress.end((policy.name, share))
    return results


def _plane(
    setting: Setting,
    plan: Plan,
    requests: Sequence[BenchRequest],
    capacity: float,
    loads: Sequence[LoadResult],
    progress: _Progress,
) -> list[LoadResult]:
    """Every policy at one rate. Runs of the loads that are just that are not made again."""
    with_deadlines = _deadline_options(plan, loads)
    results = []
    for seed in range(plan.seed, plan.seed + plan.seeds):
        mine = requests if seed == plan.seed else make_requests(setting.mix, len(requests), setting.vocab_size, seed)
        for policy in plan.plane:
            progress.say(f"{policy.name} at {plan.plane_rate:.0%}, run {seed - plan.seed + 1}")
            results.append(
                run_load(
                    setting,
                    policy,
                    mine,
                    plan.plane_rate * capacity,
                    plan.plane_rate,
                    seed,
                    options=with_deadlines if policy.settings.get("order") == "deadline" else _classes,
                    on_ended=lambda ended: progress.part(ended / len(requests)),
                )
            )
            progress.end((policy.name, seed, "plane"))
    return results


def _classes(asked: BenchRequest) -> RequestOptions:
    """Short prompts are of the better class and of another tenant; only orders that look at it are changed by it."""
    return RequestOptions(priority=int(asked.is_long), tenant="long" if asked.is_long else "short")


def _deadline_options(plan: Plan, loads: Sequence[LoadResult]) -> Options:
    """Limits that scarcely anyone misses, so that they order and hardly refuse; the long ones' are looser."""
    nearest = min(loads, key=lambda result: abs(result.rate_share - plan.plane_rate))
    p99_s = max(
        (r.ttft.p99 for r in loads if r.rate_share == nearest.rate_share and r.ttft.p99 is not None), default=1.0
    )

    def options(asked: BenchRequest) -> RequestOptions:
        factor = _LONG_DEADLINE if asked.is_long else _SHORT_DEADLINE
        return RequestOptions(ttft_limit_ms=max(1.0, factor * p99_s * 1e3))

    return options


class _Progress:
    """Turns what has ended into a part of the whole, by rough weights of what the runs take."""

    def __init__(self, plan: Plan, on_progress: OnProgress) -> None:
        self._weights: dict[Any, float] = {"batch sizes": 0.4 * plan.rounds * plan.max_batch / 32}
        if plan.with_load:
            self._weights.update({key: plan.seconds * weight for key, weight in _load_weights(plan).items()})
        self._whole = sum(self._weights.values()) + (NUM_CAPACITIES - 1) * self._weights.get("capacity", 0.0)
        self._done = 0.0
        self._key: Any = None
        self._text = ""
        self._on_progress = on_progress

    def say(self, text: str) -> None:
        """What runs now."""
        self._text = text
        self._on_progress(self._done / self._whole, text)

    def part(self, part: float) -> None:
        """So much of what runs now is done; it counts as an average run."""
        average = self._whole / len(self._weights)
        self._on_progress(min(1.0, (self._done + part * average * 0.99) / self._whole), self._text)

    def end(self, key: Any) -> None:
        """That run has ended."""
        self._done += self._weights[key]
        self._on_progress(min(1.0, self._done / self._whole), self._text)


def _load_weights(plan: Plan) -> dict[Any, float]:
    """What the runs under load take, in multiples of the plan's seconds."""
    weights: dict[Any, float] = {"capacity": 1.1, "capacity, again": 1.0}
    for share in plan.rates:
        for policy in plan.compared:
            slow = 1.6 if policy.settings.get("batching") == "static" else 1.0
            weights[policy.name, share] = max(slow, 1 / share)
    for seed in range(plan.seed, plan.seed + plan.seeds):
        for policy in plan.plane:
            weights[policy.name, seed, "plane"] = 1 / plan.plane_rate
    return weights


def _refused(field_name: str, value: object, wanted: str, limit: object) -> InvalidRequest:
    return InvalidRequest(
        f"{field_name} is {value!r}; it must be {wanted}.", field=field_name, value=value, limit=limit
    )
