"""This machine as a device profile: steps of many shapes, timed, and the step-time model through them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from pyengine.bench.workload import random_tokens
from pyengine.engine import Engine
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler.step_time import COEFFICIENTS, StepFeatures, StepTimeModel, chunk_pairs
from pyengine.simulate.profiles import DeviceProfile

OnProgress = Callable[[float], None]
DECODES = 12  # steps of one run of decodes
_MOST_CONTEXT = 4096  # tokens of all decodes of a shape: their prompts have to be computed first
_OBSERVED = 40  # times that each shape's median counts in the fit
# Settings of the engine that is measured: everything that is asked for starts at once.
SETTINGS: dict[str, Any] = {"packing": "none", "capacity": "optimistic", "watermark": 0.0, "prefix_caching": False}


@dataclass(frozen=True, slots=True)
class Shape:
    """A step to be timed: `decodes` sequences with `context` tokens each, and `prefills` prompts of `chunk` tokens."""

    decodes: int
    context: int
    prefills: int
    chunk: int


@dataclass(frozen=True, slots=True)
class TimedShape:
    """The median time of a shape's steps, in seconds, and what the fitted model says."""

    shape: Shape
    num_steps: int
    step_s: float
    fitted_s: float


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """The profile and what it was made from; `mean_error` is the mean of |fitted - measured| / measured."""

    profile: DeviceProfile
    shapes: tuple[TimedShape, ...]
    mean_error: float


def shapes_for(engine: Engine) -> list[Shape]:
    """Decodes of several batch sizes and contexts, prompts of several lengths, and both together."""
    limits = engine.limits
    longest = min(limits.max_context - DECODES - 2, 1024)
    budget = limits.max_tokens
    contexts = sorted({max(1, longest // 16), max(1, longest // 2)})
    sizes = sorted({size for size in (1, 4, 16, 64) if size <= limits.max_seqs} | {min(64, limits.max_seqs)})
    room = min(limits.num_blocks * limits.block_size, _MOST_CONTEXT)
    chunks = sorted({size for size in (16, 64, 256, 512) if size < min(longest, budget)} | {min(longest, budget // 2)})
    shapes = [
        Shape(size, context, 0, 0)
        for size in sizes
        for context in contexts
        if size * (context + DECODES + limits.block_size) <= room
    ]
    shapes += [Shape(0, 0, 1, chunk) for chunk in chunks]
    shapes += [Shape(0, 0, 4, chunk) for chunk in chunks if 4 * chunk <= budget and limits.max_seqs >= 4]
    shapes += [
        Shape(size, contexts[0], 1, chunk)
        for size in sizes
        for chunk in chunks
        if size < limits.max_seqs and size + chunk <= budget
    ]
    return shapes


def measure_device(engine: Engine, seconds: float, *, seed: int, on_progress: OnProgress) -> MeasuredDevice:
    """Time every shape in rounds for about so long, at least in two, and fit the model.

    `engine` is made with SETTINGS; nothing else runs on it.
    """
    shapes = shapes_for(engine)
    generator = np.random.default_rng(seed)
    times: dict[Shape, list[tuple[StepFeatures, float]]] = {shape: [] for shape in shapes}
    _run_shape(engine, shapes[0], generator)  # warm-up
    started = time.perf_counter()
    rounds, part = 0, 0.0
    while rounds < 2 or part < 1.0:
        for place, shape in enumerate(shapes):
            times[shape] += _run_shape(engine, shape, generator)
            part = (time.perf_counter() - started) / seconds
            on_progress(min(1.0, part, (rounds * len(shapes) + place + 1) / (2 * len(shapes)) if rounds < 2 else 1.0))
        rounds += 1
    medians = {
        shape: (_middle([features for features, _ in steps]), median(seconds for _, seconds in steps))
        for shape, steps in times.items()
        if steps
    }
    model = _fit(list(medians.values()), seed)
    timed = tuple(
        TimedShape(shape, len(times[shape]), seconds, model.predict(features) / 1e9)
        for shape, (features, seconds) in medians.items()
    )
    error = float(np.mean([abs(one.fitted_s - one.step_s) / one.step_s for one in timed]))
    limits, backend, spec = engine.limits, engine.model.backend, engine.model.spec
    profile = DeviceProfile(
        name=f"{engine.model.name} on {backend.description}",
        origin="measured",
        note=f"pyengine bench --save-profile: {len(timed)} shapes of steps, {rounds} rounds; the model is off by "
        f"{error:.1%} on average over them.",
        step_time=dict(zip(COEFFICIENTS, (float(f"{value:.6g}") for value in model.coefficients), strict=True)),
        kv_bytes_per_token=backend.kv_block_bytes(limits.block_size) // limits.block_size,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_context=spec.max_context,
    )
    return MeasuredDevice(profile, timed, error)


def _run_shape(engine: Engine, shape: Shape, generator: np.random.Generator) -> list[tuple[StepFeatures, float]]:
    """What its steps had to do and took, in seconds."""
    made: dict[str, int] = {}

    def submit(count: int, length: int, num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for _ in range(count):
            prompt = random_tokens(generator, length, engine.model.spec.vocab_size)
            made[engine.submit(prompt, params)] = 0

    def step() -> float:
        started = time.perf_counter()
        events = engine.step()
        seconds = time.perf_counter() - started
        for event in events:
            made[event.request_id] += 1
        return seconds

    submit(shape.decodes, shape.context, DECODES + 2)
    while not all(made.values()):
        step()
    steps = []
    if shape.prefills == 0:
        for _ in range(DECODES):
            kv_tokens = sum(shape.context + count - 1 for count in made.values())
            if min(made.values()) > 0 and max(made.values()) < DECODES + 2:
                steps.append((StepFeatures(0, shape.decodes, kv_tokens, 0), step()))
    else:
        kv_tokens = sum(shape.context + count - 1 for count in made.values())
        submit(shape.prefills, shape.chunk, 1)
        seconds = step()
        if all(made.values()):  # the prompts were computed in this one step
            pairs = shape.prefills * chunk_pairs(shape.chunk, 0)
            steps.append((StepFeatures(shape.prefills * shape.chunk, shape.decodes, kv_tokens, pairs), seconds))
    while engine.has_unfinished:
        step()
    return steps


def _middle(features: list[StepFeatures]) -> StepFeatures:
    """Those of the middle step: the steps of a shape differ by their KV tokens only."""
    return sorted(features, key=lambda one: one.kv_tokens)[len(features) // 2]


def _fit(medians: list[tuple[StepFeatures, float]], seed: int) -> StepTimeModel:
    """Each shape counts the same, in a random order, and nothing is forgotten."""
    model = StepTimeModel(forgetting=1.0)
    for _ in range(_OBSERVED):
        random.Random(seed).shuffle(medians)
        for features, seconds in medians:
            model.observe(features, round(seconds * 1e9))
    model.solve()
    return model
