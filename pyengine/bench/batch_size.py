"""Decode steps against batch size: so many sequences, all of them decoding, and the line through their step times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pyengine.bench.machine import CeilingMeter, Ceilings, Work, least_step_s, work_of
from pyengine.bench.workload import random_tokens
from pyengine.engine import Engine
from pyengine.sampling_params import SamplingParams

OnProgress = Callable[[float], None]
PROMPT_TOKENS = 32
STEPS = 64  # of a round, at one batch size
_CEILING_S = 0.05


@dataclass(frozen=True, slots=True)
class BatchSizePoint:
    """One batch size, decodes only. Times in seconds, by the client's clock.

    Attributes:
        step_s: median time of a step. itl_p50_s / itl_p99_s: from one token of a sequence to its next.
        tokens_per_s: batch size over the median step.
        memory_s / compute_s: what reading and arithmetic alone would take at the machine's ceilings; None if those are
            not known for the device.
        mean_context: tokens of context that a sequence had on average.
    """

    batch_size: int
    num_steps: int
    step_s: float
    itl_p50_s: float
    itl_p99_s: float
    tokens_per_s: float
    mean_context: float
    memory_s: float | None
    compute_s: float | None


@dataclass(frozen=True, slots=True)
class Line:
    """step_s = base_s + per_sequence_s * n, fitted by least squares of the relative errors, both >= 0.

    `mean_error` is the mean of |line - measured| / measured.
    """

    base_s: float
    per_sequence_s: float
    mean_error: float

    def at(self, batch_size: float) -> float:
        """Seconds of a step."""
        return self.base_s + self.per_sequence_s * batch_size


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The whole sweep. `ceilings` is None for a device whose ceilings are not measured."""

    points: tuple[BatchSizePoint, ...]
    line: Line
    work: Work
    ceilings: Ceilings | None


@dataclass(slots=True)
class _Samples:
    steps: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    context: list[float] = field(default_factory=list)


def batch_sizes_up_to(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    sizes = [1]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == most else [*sizes, most]


def sweep(
    engine: Engine, sizes: Sequence[int], rounds: int, *, num_threads: int | None, seed: int, on_progress: OnProgress
) -> BatchSizes:
    """Measure each batch size in each of `rounds` rounds, so that a disturbance meets all sizes alike."""
    random = np.random.default_rng(seed)
    work = work_of(engine)
    is_cpu = engine.model.backend.description.startswith("cpu")
    meter = CeilingMeter(engine.model.spec.dtype, work.weight_bytes, num_threads) if is_cpu else None
    ceilings: Ceilings | None = None
    samples = {size: _Samples() for size in sizes}
    _decode(engine, min(sizes), random, _Samples())  # warm-up
    total = rounds * sum(sizes)
    done = 0
    for _ in range(rounds):
        if meter is not None:
            ceilings = meter.measure(_CEILING_S)
        for size in sizes:
            _decode(engine, size, random, samples[size])
            done += size
            on_progress(done / total)
    points = tuple(_point(size, samples[size], work, ceilings) for size in sizes)
    return BatchSizes(points, fit_line([p.batch_size for p in points], [p.step_s for p in points]), work, ceilings)


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line of least relative squares with base and slope >= 0."""
    x, y = np.array(sizes, np.float64), np.array(seconds, np.float64)

    def solved(*columns: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.linalg.lstsq(np.stack(columns, axis=1) / y[:, None], np.ones_like(y), rcond=None)[0]
        return found

    one = np.ones_like(x)
    base, slope = (solved(one, x) if len(x) > 1 else np.array([y[0], 0.0])).tolist()
    if slope < 0:
        base, slope = float(solved(one)[0]), 0.0
    elif base < 0:
        base, slope = 0.0, float(solved(x)[0])
    return Line(base, slope, float(np.mean(np.abs(base + slope * x - y) / y)))


def _decode(engine: Engine, size: int, random: np.random.Generator, samples: _Samples) -> None:
    """Run `size` sequences together; keep the steps in which all of them decoded."""
    context = engine.limits.max_context
    prompt_tokens = min(PROMPT_TOKENS, context // 4)
    num_tokens = min(STEPS + 1, context - prompt_tokens)
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    made = {
        engine.submit(random_tokens(random, prompt_tokens, engine.model.spec.vocab_size), params): 0
        for _ in range(size)
    }
    last_s: float | None = None  # when the last step returned, if all decoded in it
    while engine.has_unfinished:
        everyone_decodes = len(made) == size and all(made.values())
        mean_context = prompt_tokens + sum(made.values()) / size
        started_s = time.perf_counter()
        events = engine.step()
        now_s = time.perf_counter()
        if everyone_decodes and len(events) == size:
            samples.steps.append(now_s - started_s)
            samples.context.append(mean_context)
            if last_s is not None:
                samples.gaps.append(now_s - last_s)
            last_s = now_s
        for event in events:
            made[event.request_id] += 1
            if event.finish_reason is not None:
                del made[event.request_id]


def _point(size: int, samples: _Samples, work: Work, ceilings: Ceilings | None) -> BatchSizePoint:
    step_s = float(np.median(samples.steps))
    gap_p50, gap_p99 = np.quantile(samples.gaps or samples.steps, (0.5, 0.99)).tolist()
    context = float(np.mean(samples.context))
    least = (None, None) if ceilings is None else least_step_s(work, ceilings, size, context)
    return BatchSizePoint(
        size, len(samples.steps), step_s, gap_p50, gap_p99, size / step_s, context, least[0], least[1]
    )
