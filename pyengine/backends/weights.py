"""What every backend does with a checkpoint: which packed weights and vectors there are, and how they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.backends.base import Progress, StepLimits
from pyengine.backends.number_formats import ITEMSIZE, convert, to_float32
from pyengine.checkpoint import Checkpoint
from pyengine.models.spec import DecoderSpec

# Weights are packed (and converted, where another dtype is wanted) in slices of about so many float32 bytes.
SLICE_BYTES = 16 * 2**20

# Where the weights of one model begin in their arena: multiples of this many bytes.
WEIGHT_ALIGNMENT = 128

# Largest vocabulary whose probabilities still add up exactly in 64 bits (csrc/sampling_math.h).
MAX_VOCAB_SIZE = 2**19

# Each packed weight is made of parts that lie one after another along its rows.
LAYER_LINEARS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
LAYER_VECTORS = ("attention_norm", "mlp_norm", "q_norm", "k_norm")

ByteArray = Any  # uint8 in one dimension: of NumPy, or of CuPy


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One Linear of csrc/ops.h.

    Attributes:
        roles: of the tensors that lie one after another along its rows.
        n, k: rows and columns.
    """

    name: str
    roles: tuple[str, ...]
    n: int
    k: int

    @property
    def slice_rows(self) -> int:
        """Rows that are packed at a time, a multiple of 32."""
        return max(32, SLICE_BYTES // (4 * self.k) // 32 * 32)


def packed_weights(spec: DecoderSpec) -> list[PackedWeight]:
    """Every packed weight of a model, in the order of their use; a tied head is not listed."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {
        "qkv": (q + 2 * kv, spec.hidden_size),
        "o": (spec.hidden_size, q),
        "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
    }
    vocabulary = (spec.vocab_size, spec.hidden_size)
    listed = [PackedWeight("embedding", ("embedding",), *vocabulary)]
    if not spec.tied_head:
        listed.append(PackedWeight("head", ("head",), *vocabulary))
    for layer in range(spec.num_layers):
        for name, parts in LAYER_LINEARS.items():
            roles = tuple(f"layers.{layer}.{part}" for part in parts)
            listed.append(PackedWeight(f"layers.{layer}.{name}", roles, *shapes[name]))
    return listed


class WeightArena:
    """Where each packed weight lies in one piece of memory: large enough for huge pages, and one number to report.

    Args:
        native: the backend's extension module, which knows how large a packed weight is.
    """

    def __init__(self, native: Any, spec: DecoderSpec) -> None:
        self._native = native
        self._spec = spec
        self._weights = packed_weights(spec)
        self._sizes = [int(native.packed_weight_bytes(spec.dtype, weight.n, weight.k)) for weight in self._weights]

    @property
    def num_bytes(self) -> int:
        """Of the whole arena."""
        return sum(map(_padded, self._sizes))

    @property
    def slice_bytes(self) -> int:
        """Bytes of the largest slice that is handed to `host_rows` in `load`."""
        itemsize = ITEMSIZE[self._spec.dtype]
        return max(min(w.slice_rows, w.n) * w.k * itemsize for w in self._weights)

    def load(
        self,
        arena: ByteArray,
        context: Any,
        checkpoint: Checkpoint,
        *,
        host_rows: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
        progress: Progress | None,
    ) -> dict[str, ByteArray]:
        """Fill `arena` (num_bytes long) from the checkpoint; returns its parts by name, a tied head among them.

        host_rows: puts a slice of rows where the backend can read it, C-contiguous.
        """
        arrays = {}
        offset = 0
        for done, (weight, size) in enumerate(zip(self._weights, self._sizes, strict=True)):
            packed = arrays[weight.name] = arena[offset : offset + size]
            self._pack(weight, packed, context, checkpoint, host_rows)
            offset += _padded(size)
            if progress is not None:
                progress((done + 1) / len(self._weights))
        if self._spec.tied_head:
            arrays["head"] = arrays["embedding"]
        return arrays

    def _pack(
        self,
        weight: PackedWeight,
        packed: ByteArray,
        context: Any,
        checkpoint: Checkpoint,
        host_rows: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
    ) -> None:
        """Pack the parts, some rows at a time: what a slice needs in memory is given back before the next."""
        dtype, first_row = self._spec.dtype, 0
        for role in weight.roles:
            tensor = checkpoint.tensor(role)
            for begin in range(0, tensor.shape[0], weight.slice_rows):
                part = convert(tensor.array[begin : begin + weight.slice_rows], tensor.dtype, dtype)
                self._native.pack_weight(context, host_rows(part), dtype, first_row + begin, weight.n, weight.k, packed)
                tensor.release()
            first_row += tensor.shape[0]


def load_vectors(spec: DecoderSpec, checkpoint: Checkpoint) -> dict[str, npt.NDArray[np.float32]]:
    """Norm weights and biases by name, float32 on the host; a packed weight's bias is named after it."""
    vectors = {"final_norm": _vector(checkpoint, "final_norm")}
    has_bias = {"qkv": spec.qkv_bias, "o": spec.o_bias, "gate_up": spec.mlp_bias, "down": spec.mlp_bias}
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}."
        for role in LAYER_VECTORS:
            if spec.qk_norm or role not in ("q_norm", "k_norm"):
                vectors[prefix + role] = _vector(checkpoint, prefix + role)
        for name, parts in LAYER_LINEARS.items():
            if has_bias[name]:
                biases = [_vector(checkpoint, f"{prefix}{part}_bias") for part in parts]
                vectors[f"{prefix}{name}_bias"] = np.concatenate(biases)
    return vectors


def decoder_config(spec: DecoderSpec, limits: StepLimits, *, mlp_rows: int, logits_bytes: int) -> dict[str, Any]:
    """The configuration of the native decoder (DecoderConfig in csrc/decoder.h).

    mlp_rows: tokens whose MLP is computed at once. logits_bytes: logits are computed for so many rows at once that they
    take about this many bytes.
    """
    logits_rows = max(16, logits_bytes // (4 * spec.vocab_size))
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
        "mlp_rows": min(mlp_rows, limits.max_tokens),
        "logits_rows": min(logits_rows, limits.max_tokens),
    }


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT


def _vector(checkpoint: Checkpoint, role: str) -> npt.NDArray[np.float32]:
    tensor = checkpoint.tensor(role)
    return np.ascontiguousarray(to_float32(tensor.array, tensor.dtype))
