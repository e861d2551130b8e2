"""The CPU backend: NumPy owns the packed weights, the KV pool and the workspaces; pyengine._cpu runs the step."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.backends.base import Progress, StepLimits, StepTrace
from pyengine.backends.memory import aligned_empty, available_memory
from pyengine.backends.native import native_context
from pyengine.backends.number_formats import convert, to_float32
from pyengine.backends.step_inputs import IntArray
from pyengine.checkpoint import Checkpoint
from pyengine.errors import EngineClosed, ModelError
from pyengine.models.rope import rope_tables
from pyengine.models.spec import DecoderSpec

# Logits are computed for so many rows at once that they take about this many bytes.
LOGITS_BYTES = 32 * 2**20

# The MLP is computed for so many tokens at once that its intermediate stays in the cache.
MLP_ROWS = 256

# Weights are packed (and converted, where another dtype is wanted) in slices of about so many float32 bytes.
SLICE_BYTES = 16 * 2**20

# Largest vocabulary whose probabilities still add up exactly in 64 bits (csrc/sampling_math.h).
MAX_VOCAB_SIZE = 2**19
MAX_HEAD_DIM = 256

# Each packed weight is made of parts that lie one after another along its rows.
LAYER_LINEARS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
LAYER_VECTORS = ("attention_norm", "mlp_norm", "q_norm", "k_norm")


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
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._decoder: Any = None
        self._load(checkpoint, progress)

    @property
    def description(self) -> str:
        return str(self._context.description)

    @property
    def weight_bytes(self) -> int:
        return int(self._arena.nbytes)

    def kv_block_bytes(self, block_size: int) -> int:
        limits = StepLimits(1, 1, 1, block_size, 1)
        return int(self._native.kv_block_bytes(self._context, self._config(limits))) * self._spec.num_layers

    def free_memory(self) -> int:
        return available_memory()

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

    def step(self, staging: IntArray, result: IntArray, trace: StepTrace | None = None) -> None:
        if self._decoder is None:
            raise EngineClosed("The CPU backend is closed or was not started.")
        if trace is None:
            self._decoder.step(staging, result)
        else:
            self._decoder.step(staging, result, logits=trace.logits, residuals=trace.residuals)

    def close(self) -> None:
        self._decoder = None
        self._arrays = {}
        self._arena = np.empty(0, np.uint8)
        self._context = None

    def _config(self, limits: StepLimits) -> dict[str, Any]:
        spec = self._spec
        logits_rows = max(16, LOGITS_BYTES // (4 * spec.vocab_size))
        return {
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "dtype": spec.dtype,
            "norm_eps": spec.norm_eps,
            "activation": spec.activation,
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "rotary_dim": spec.rope.rotary_dim,
            "attention_scale": spec.attention_scale,
            "sliding_windows": list(spec.sliding_windows),
            "block_size": limits.block_size,
            "rope_positions": limits.max_context,
            "max_tokens": limits.max_tokens,
            "max_seqs": limits.max_seqs,
            "max_rows": limits.max_tokens,
            "max_context_len": limits.max_context,
            "mlp_rows": min(MLP_ROWS, limits.max_tokens),
            "logits_rows": min(logits_rows, limits.max_tokens),
        }

    def _load(self, checkpoint: Checkpoint, progress: Progress | None) -> None:
        plan = self._linears()
        sizes = {name: self._native.packed_weight_bytes(self._spec.dtype, n, k) for name, (_, n, k) in plan.items()}
        padded = {name: -(-size // 128) * 128 for name, size in sizes.items()}
        # One arena: large enough for huge pages, and one number to report.
        self._arena = aligned_empty(sum(padded.values()))
        offset = 0
        for done, (name, (roles, n, k)) in enumerate(plan.items()):
            packed = self._arena[offset : offset + sizes[name]]
            self._pack(checkpoint, roles, n, k, packed)
            self._arrays[name] = packed
            offset += padded[name]
            if progress is not None:
                progress((done + 1) / len(plan))
        if self._spec.tied_head:
            self._arrays["head"] = self._arrays["embedding"]
        self._load_vectors(checkpoint)

    def _linears(self) -> dict[str, tuple[tuple[str, ...], int, int]]:
        """Name of each packed weight -> (roles of its parts, n, k)."""
        spec = self._spec
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        shapes = {
            "qkv": (q + 2 * kv, spec.hidden_size),
            "o": (spec.hidden_size, q),
            "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
            "down": (spec.hidden_size, spec.intermediate_size),
        }
        vocabulary = (spec.vocab_size, spec.hidden_size)
        plan: dict[str, tuple[tuple[str, ...], int, int]] = {"embedding": (("embedding",), *vocabulary)}
        if not spec.tied_head:
            plan["head"] = (("head",), *vocabulary)
        for layer in range(spec.num_layers):
            for name, parts in LAYER_LINEARS.items():
                plan[f"layers.{layer}.{name}"] = (tuple(f"layers.{layer}.{part}" for part in parts), *shapes[name])
        return plan

    def _pack(
        self, checkpoint: Checkpoint, roles: tuple[str, ...], n: int, k: int, packed: npt.NDArray[np.uint8]
    ) -> None:
        """Pack the parts, some rows at a time: what a slice needs in memory is given back before the next."""
        first_row = 0
        slice_rows = max(32, SLICE_BYTES // (4 * k) // 32 * 32)
        for role in roles:
            tensor = checkpoint.tensor(role)
            for begin in range(0, tensor.shape[0], slice_rows):
                part = convert(tensor.array[begin : begin + slice_rows], tensor.dtype, self._spec.dtype)
                rows = np.ascontiguousarray(part)
                self._native.pack_weight(self._context, rows, self._spec.dtype, first_row + begin, n, k, packed)
                tensor.release()
            first_row += tensor.shape[0]

    def _load_vectors(self, checkpoint: Checkpoint) -> None:
        spec = self._spec
        self._arrays["final_norm"] = self._vector(checkpoint, "final_norm")
        for layer in range(spec.num_layers):
            prefix = f"layers.{layer}."
            for role in LAYER_VECTORS:
                if spec.qk_norm or role not in ("q_norm", "k_norm"):
                    self._arrays[prefix + role] = self._vector(checkpoint, prefix + role)
            has_bias = {"qkv": spec.qkv_bias, "o": spec.o_bias, "gate_up": spec.mlp_bias, "down": spec.mlp_bias}
            for name, parts in LAYER_LINEARS.items():
                if has_bias[name]:
                    biases = [self._vector(checkpoint, f"{prefix}{part}_bias") for part in parts]
                    self._arrays[f"{prefix}{name}_bias"] = np.concatenate(biases)

    @staticmethod
    def _vector(checkpoint: Checkpoint, role: str) -> npt.NDArray[np.float32]:
        tensor = checkpoint.tensor(role)
        return np.ascontiguousarray(to_float32(tensor.array, tensor.dtype))


def _check_spec(spec: DecoderSpec) -> None:
    """Raise ModelError for sizes that the CPU kernels do not handle."""
    if spec.vocab_size > MAX_VOCAB_SIZE:
        raise ModelError(f"vocab_size is {spec.vocab_size}; the CPU backend handles at most {MAX_VOCAB_SIZE} tokens.")
    if spec.head_dim % 2 or spec.head_dim > MAX_HEAD_DIM:
        raise ModelError(f"head_dim is {spec.head_dim}; the CPU backend handles even head sizes up to {MAX_HEAD_DIM}.")
