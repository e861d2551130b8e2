"""The CPU backend: NumPy owns the packed weights, the KV pool and the workspaces; pyengine._cpu runs the step."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.backends.base import Progress, StepLimits, StepTrace
from pyengine.backends.memory import aligned_empty, available_memory
from pyengine.backends.native import native_context
from pyengine.backends.step_inputs import IntArray, num_rows_of
from pyengine.backends.weights import MAX_VOCAB_SIZE, WeightArena, decoder_config, load_vectors
from pyengine.checkpoint import Checkpoint
from pyengine.errors import EngineClosed, ModelError
from pyengine.models.rope import rope_tables
from pyengine.models.spec import DecoderSpec

# Logits are computed for so many rows at once that they take about this many bytes.
LOGITS_BYTES = 32 * 2**20

# The MLP is computed for so many tokens at once that its intermediate stays in the cache.
MLP_ROWS = 256

# The KV pool where the user leaves it to us: a part of what is free, and never more than the limit, because other
# programs live in the same memory.
AUTO_KV_FRACTION = 0.5
AUTO_KV_LIMIT_BYTES = 4 * 2**30

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    """A launch on the CPU: it has run."""

    result: IntArray

    def wait(self) -> IntArray:
        return self.result


class CpuBackend:
    """Loads a checkpoint's weights in their packed form (see Backend).

    Args:
        num_threads: None for all processors this process may use; never more than that.
        isa: name of an instruction set to force, for tests; None for the best.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: Checkpoint,
        *,
        num_threads: int | None = None,
        isa: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        _check_spec(spec)
        self._native: Any = import_module("pyengine._cpu")
        self._spec = spec
        self._context: Any = native_context(num_threads, isa)
        self._decoder: Any = None
        self._previous: IntArray = np.empty(0, np.int32)  # ids that the last step drew
        weights = WeightArena(self._native, spec)
        self._arena = aligned_empty(weights.num_bytes)
        self._arrays: dict[str, npt.NDArray[Any]] = {
            **weights.load(self._arena, self._context, checkpoint, host_rows=np.ascontiguousarray, progress=progress),
            **load_vectors(spec, checkpoint),
        }

    @property
    def description(self) -> str:
        return str(self._context.description)

    @property
    def is_asynchronous(self) -> bool:
        return False

    @property
    def weight_bytes(self) -> int:
        return int(self._arena.nbytes)

    def kv_block_bytes(self, block_size: int) -> int:
        limits = StepLimits(1, 1, 1, block_size, 1)
        return int(self._native.kv_block_bytes(self._context, self._config(limits))) * self._spec.num_layers

    def free_memory(self) -> int:
        return available_memory()

    def auto_kv_bytes(self, free: int) -> int:
        return min(int(AUTO_KV_FRACTION * free), AUTO_KV_LIMIT_BYTES)

    def workspace_bytes(self, limits: StepLimits) -> int:
        config = self._config(limits)
        workspace = int(self._native.workspace_bytes(self._context, config))
        return workspace + int(self._native.scratch_bytes(self._context, config))

    def start(self, limits: StepLimits) -> None:
        config = self._config(limits)
        cos, sin = rope_tables(self._spec.rope, limits.max_context, self._spec.max_context)
        self._arrays["rope_cos"], self._arrays["rope_sin"] = cos, sin
        kv = aligned_empty(self.kv_block_bytes(limits.block_size) * limits.num_blocks)
        workspace = aligned_empty(self._native.workspace_bytes(self._context, config))
        self._native.bind_scratch(self._context, aligned_empty(self._native.scratch_bytes(self._context, config)))
        self._decoder = self._native.Decoder(self._context, config, self._arrays, kv, limits.num_blocks, workspace)

    def launch(self, staging: IntArray, num_result_words: int, *, uses_previous: bool) -> _Done:
        result = np.empty(num_result_words, np.int32)
        self._started().step(staging, result, previous=self._previous if uses_previous else None)
        self._previous = result[: num_rows_of(staging)]
        return _Done(result)

    def step(self, staging: IntArray, result: IntArray, trace: StepTrace | None = None) -> None:
        decoder = self._started()
        if trace is None:
            decoder.step(staging, result)
        else:
            decoder.step(staging, result, logits=trace.logits, residuals=trace.residuals)
        self._previous = result[: num_rows_of(staging)].copy()  # the buffer is the caller's

    def _started(self) -> Any:
        if self._decoder is None:
            raise EngineClosed("The CPU backend is closed or was not started.")
        return self._decoder

    def close(self) -> None:
        self._decoder = None
        self._arrays = {}
        self._arena = np.empty(0, np.uint8)
        self._context = None

    def _config(self, limits: StepLimits) -> dict[str, Any]:
        return decoder_config(self._spec, limits, mlp_rows=MLP_ROWS, logits_bytes=LOGITS_BYTES)


def _check_spec(spec: DecoderSpec) -> None:
    """Raise ModelError for sizes that the CPU kernels do not handle."""
    if spec.vocab_size > MAX_VOCAB_SIZE:
        raise ModelError(f"vocab_size is {spec.vocab_size}; the CPU backend handles at most {MAX_VOCAB_SIZE} tokens.")
    if spec.head_dim % 2 or spec.head_dim > MAX_HEAD_DIM:
        raise ModelError(f"head_dim is {spec.head_dim}; the CPU backend handles even head sizes up to {MAX_HEAD_DIM}.")
