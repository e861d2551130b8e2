"""The CUDA backend: CuPy owns every buffer and the stream; the extension module runs the step on them.

The same class drives the kernels where they run on the host, for tests: see CudaRuntime.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyengine.backends.base import Progress, StepLimits, StepTrace
from pyengine.backends.cuda_memory import UPLOAD_BYTES, CupyArray, DeviceMemory, Uploads
from pyengine.backends.cuda_runtime import CudaRuntime
from pyengine.backends.cuda_steps import GraphCounts, LaunchedStep, StepRunner, step_buffer_bytes
from pyengine.backends.step_inputs import IntArray
from pyengine.backends.weights import MAX_VOCAB_SIZE, WEIGHT_ALIGNMENT, WeightArena, decoder_config, load_vectors
from pyengine.checkpoint import Checkpoint
from pyengine.errors import EngineClosed, ModelError
from pyengine.models.rope import rope_tables
from pyengine.models.spec import DecoderSpec

# Logits are computed for so many rows at once that they take about this many bytes.
LOGITS_BYTES = 256 * 2**20

# The MLP is computed for so many tokens at once: its intermediate would otherwise be the largest part of the workspace.
MLP_ROWS = 4096

# The part of what is free that the KV pool takes where the user leaves it to us: a GPU is rarely shared.
AUTO_KV_FRACTION = 0.9

# Head sizes that the attention kernels are compiled for.
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)


class CudaBackend:
    """Loads a checkpoint's weights to one device (see Backend).

    Args:
        runtime: the device and the libraries that drive it.
        deterministic: results do not depend on a request's company nor on how its prompt was cut.
        uses_graphs: plain decode steps are recorded as CUDA graphs and replayed.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: Checkpoint,
        runtime: CudaRuntime,
        *,
        deterministic: bool = False,
        uses_graphs: bool = True,
        progress: Progress | None = None,
    ) -> None:
        _check_spec(spec)
        self._spec = spec
        self._native = runtime.native
        self._uses_graphs = uses_graphs
        self._runner: StepRunner | None = None
        self._memory = DeviceMemory(runtime.cupy, runtime.device_index)
        self._context: Any = runtime.native.Context(
            runtime.device_index,
            stream=self._memory.stream.ptr,
            matmul_library=runtime.matmul_library,
            deterministic=deterministic,
        )
        self._arrays: dict[str, CupyArray] = {}
        self._weight_bytes = 0
        with self._memory:
            self._load(checkpoint, progress)
            self._memory.stream.synchronize()
        self._memory.give_back()

    @property
    def description(self) -> str:
        mode = ", deterministic" if self._context.deterministic else ""
        return f"{self._context.description}{mode}"

    @property
    def is_asynchronous(self) -> bool:
        return True

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    @property
    def graph_counts(self) -> GraphCounts:
        """How the steps so far were run."""
        return self._started().counts

    def kv_block_bytes(self, block_size: int) -> int:
        limits = StepLimits(1, 1, 1, block_size, 1)
        return int(self._native.kv_block_bytes(self._context, self._config(limits))) * self._spec.num_layers

    def free_memory(self) -> int:
        return self._memory.free_bytes()

    def auto_kv_bytes(self, free: int) -> int:
        return int(AUTO_KV_FRACTION * free)

    def workspace_bytes(self, limits: StepLimits) -> int:
        config = self._config(limits)
        workspace = int(self._native.workspace_bytes(self._context, config))
        scratch = int(self._native.scratch_bytes(self._context, config))
        rope = 4 * limits.max_context * self._spec.rope.rotary_dim
        trash_block = self.kv_block_bytes(limits.block_size)
        return workspace + scratch + rope + trash_block + step_buffer_bytes(limits, uses_graphs=self._uses_graphs)

    def start(self, limits: StepLimits) -> None:
        config = self._config(limits)
        native, memory = self._native, self._memory
        with memory:
            uploads = Uploads(memory, UPLOAD_BYTES)
            tables = rope_tables(self._spec.rope, limits.max_context, self._spec.max_context)
            for name, table in zip(("rope_cos", "rope_sin"), tables, strict=True):
                array = memory.array(table.size, np.float32, what="Tables of positions", setting="max_context")
                uploads.upload(table.reshape(-1), array)
                self._arrays[name] = array
            # One block more than the pool has: rows that only fill up a decode step write there.
            num_blocks = limits.num_blocks + 1
            kv = self._bytes(self.kv_block_bytes(limits.block_size) * num_blocks, "The KV pool", "kv_cache_memory")
            setting = "max_num_batched_tokens"
            workspace = self._bytes(native.workspace_bytes(self._context, config), "The workspace of a step", setting)
            scratch = self._bytes(native.scratch_bytes(self._context, config), "The scratch memory of a step", setting)
            native.bind_scratch(self._context, scratch)
            decoder = native.Decoder(self._context, config, self._arrays, kv, num_blocks, workspace)
            self._runner = StepRunner(memory, decoder, limits, uses_graphs=self._uses_graphs)
            memory.stream.synchronize()

    def launch(self, staging: IntArray, num_result_words: int, *, uses_previous: bool) -> LaunchedStep:
        runner = self._started()
        with self._memory:
            return runner.launch(staging, num_result_words, uses_previous=uses_previous)

    def step(self, staging: IntArray, result: IntArray, trace: StepTrace | None = None) -> None:
        runner = self._started()
        with self._memory:
            runner.step(staging, result, trace)

    def close(self) -> None:
        if self._context is None:
            return
        self._memory.finish()
        self._runner = None
        self._arrays = {}
        self._context = None
        self._memory.give_back()

    def _started(self) -> StepRunner:
        if self._runner is None:
            raise EngineClosed("The CUDA backend is closed or was not started.")
        return self._runner

    def _config(self, limits: StepLimits) -> dict[str, Any]:
        return decoder_config(self._spec, limits, mlp_rows=MLP_ROWS, logits_bytes=LOGITS_BYTES)

    def _bytes(self, num_bytes: int, what: str, setting: str) -> CupyArray:
        return self._memory.array(num_bytes, np.uint8, what=what, setting=setting)

    def _load(self, checkpoint: Checkpoint, progress: Progress | None) -> None:
        weights = WeightArena(self._native, self._spec)
        vectors = load_vectors(self._spec, checkpoint)
        vector_sizes = {name: -(-v.nbytes // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT for name, v in vectors.items()}
        self._weight_bytes = weights.num_bytes + sum(vector_sizes.values())
        free = self.free_memory()
        if self._weight_bytes > free:
            raise ModelError(
                f"The weights need {self._weight_bytes:,} bytes as {self._spec.dtype}; on the device {free:,} are "
                "free. Use a smaller model or dtype, or end what else uses the device."
            )
        arena = self._bytes(self._weight_bytes, "The weights", "dtype")
        uploads = Uploads(self._memory, weights.slice_bytes)
        self._arrays |= weights.load(arena, self._context, checkpoint, host_rows=uploads.pinned_copy, progress=progress)
        offset = weights.num_bytes
        for name, vector in vectors.items():
            self._arrays[name] = arena[offset : offset + vector.nbytes].view(np.float32)
            uploads.upload(vector, self._arrays[name])
            offset += vector_sizes[name]


def _check_spec(spec: DecoderSpec) -> None:
    """Raise ModelError for sizes that the CUDA kernels do not handle."""
    if spec.vocab_size > MAX_VOCAB_SIZE:
        raise ModelError(f"vocab_size is {spec.vocab_size}; the CUDA backend handles at most {MAX_VOCAB_SIZE} tokens.")
    if spec.head_dim not in HEAD_DIMS:
        handled = ", ".join(map(str, HEAD_DIMS))
        raise ModelError(f"head_dim is {spec.head_dim}; the CUDA backend handles head sizes {handled}.")
