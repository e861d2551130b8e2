"""What this machine can do, and whether others were using it meanwhile. It runs no model."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pyengine.backends.memory import aligned_empty
from pyengine.backends.native import native_context
from pyengine.engine import Engine

_NATIVE_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
LEAST_BYTES = 8 << 20
_MOST_BYTES = 256 << 20  # more than any cache: beyond it a larger buffer reads no slower


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates that no program passes on this machine, as measured just now.

    Attributes:
        read_bytes_per_s: of reading a buffer as large as the weights, but at least LEAST_BYTES. Smaller weights
            may come from a cache that is faster still.
        multiply_flop_per_s: multiplications and additions with weights of the model's dtype.
    """

    read_bytes_per_s: float
    multiply_flop_per_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """What one step has to do at least.

    Attributes:
        weight_bytes: read once a step. flop_per_token: two for each weight of a matrix.
        kv_bytes_per_token: read for each token of context of each sequence.
    """

    weight_bytes: int
    flop_per_token: float
    kv_bytes_per_token: float


def work_of(engine: Engine) -> Work:
    """Of the engine's model."""
    spec, backend, block_size = engine.model.spec, engine.model.backend, engine.limits.block_size
    in_matrices = spec.num_parameters()
    if not spec.tied_head:  # of the embedding only the rows of the tokens are read
        in_matrices -= spec.vocab_size * spec.hidden_size
    item_bytes = 4 if spec.dtype == "float32" else 2
    return Work(in_matrices * item_bytes, 2.0 * in_matrices, backend.kv_block_bytes(block_size) / block_size)


class CeilingMeter:
    """Measures the ceilings several times; the highest values count, since others can only make them lower."""

    def __init__(self, dtype: str, weight_bytes: int, num_threads: int | None) -> None:
        self._ops: Any = import_module("pyengine._cpu").ops
        self._context = native_context(num_threads)
        self._dtype = _NATIVE_NAMES[dtype]
        self._buffer = aligned_empty(max(LEAST_BYTES, min(weight_bytes, _MOST_BYTES)))
        self._buffer[:] = 1
        self._read = self._multiply = 0.0

    def measure(self, seconds: float) -> Ceilings:
        """The highest so far, after another measurement of so many seconds each."""
        self._read = max(self._read, self._ops.measure_read(self._context, self._buffer, seconds))
        self._multiply = max(self._multiply, self._ops.measure_multiply(self._context, self._dtype, seconds))
        return Ceilings(self._read, self._multiply)


def least_step_s(work: Work, ceilings: Ceilings, batch_size: int, context: float) -> tuple[float, float]:
    """Seconds of a decode step that memory alone, and arithmetic alone, would take at the ceilings."""
    bytes_read = work.weight_bytes + batch_size * context * work.kv_bytes_per_token
    return bytes_read / ceilings.read_bytes_per_s, batch_size * work.flop_per_token / ceilings.multiply_flop_per_s


class OthersLoad:
    """How much of all processors' time other processes took since this was made; None where it cannot be told."""

    def __init__(self) -> None:
        self._started = _processor_times()
        self._own_s = time.process_time()
        self._wall_s = time.perf_counter()

    def share(self) -> float | None:
        """A part of all processors, 0 to 1."""
        now = _processor_times()
        if now is None or self._started is None:
            return None
        busy_s = now - self._started
        own_s = time.process_time() - self._own_s
        whole_s = (time.perf_counter() - self._wall_s) * (os.cpu_count() or 1)
        return max(0.0, min(1.0, (busy_s - own_s) / whole_s)) if whole_s > 0 else None


def _processor_times() -> float | None:
    """Seconds in which any processor was busy, or taken from this virtual machine, since it started; Linux only."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
