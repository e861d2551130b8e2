"""A decoder with random weights, made straight from a compiled module: for tests of the native interface itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyengine import SamplingParams
from pyengine.backends.memory import aligned_empty
from pyengine.backends.number_formats import from_float32
from pyengine.backends.step_inputs import LogitsRow, SequenceChunk, StepInputs
from pyengine.sampling_row import SamplingRow

from ..ops.reference_attention import rope_tables

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 70, 64, 48, 4, 2, 32, 2
BLOCK_SIZE, NUM_BLOCKS, MAX_CONTEXT, MAX_TOKENS = 16, 8, 64, 64
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, min_p=0.0)

Put = Callable[[NDArray[Any]], Any]  # a NumPy array -> the backend's


def put_on_cpu(array: NDArray[Any]) -> NDArray[Any]:
    copy = aligned_empty(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def config(dtype: str = "float32") -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "dtype": dtype,
        "norm_eps": 1e-6,
        "activation": "silu",
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rotary_dim": HEAD_DIM,
        "attention_scale": HEAD_DIM**-0.5,
        "sliding_windows": [0] * LAYERS,
        "block_size": BLOCK_SIZE,
        "rope_positions": MAX_CONTEXT,
        "max_tokens": MAX_TOKENS,
        "max_seqs": 8,
        "max_rows": MAX_TOKENS,
        "max_context_len": MAX_CONTEXT,
        "mlp_rows": 32,
        "logits_rows": 16,
    }


class TinyDecoder:
    """`native`: the module, `context`: one of its contexts, `put`: a NumPy array to the backend's memory.

    Attributes: `parts`, the arguments of native.Decoder, with which a test can make another one; `decoder`, that one.
    """

    def __init__(self, native: ModuleType, context: Any, put: Put, dtype: str = "float32") -> None:
        self.native, self.context, self.put, self.dtype = native, context, put, dtype
        self._rng = np.random.default_rng(0)
        settings = config(dtype)
        kv_bytes = native.kv_block_bytes(context, settings) * LAYERS * NUM_BLOCKS
        native.bind_scratch(context, put(np.zeros(native.scratch_bytes(context, settings), np.uint8)))
        self.parts: dict[str, Any] = {
            "context": context,
            "config": settings,
            "arrays": self._arrays(),
            "kv_blocks": put(np.full(kv_bytes, 0xFF, np.uint8)),  # NaN: what is not written must not be read
            "num_blocks": NUM_BLOCKS,
            "workspace": put(np.full(native.workspace_bytes(context, settings), 0xFF, np.uint8)),
        }
        self.decoder = native.Decoder(**self.parts)

    def _arrays(self) -> dict[str, Any]:
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        shapes = {
            "qkv": (q + 2 * kv, HIDDEN),
            "o": (HIDDEN, q),
            "gate_up": (2 * INNER, HIDDEN),
            "down": (HIDDEN, INNER),
        }
        cos, sin = rope_tables(MAX_CONTEXT, HEAD_DIM)
        arrays = {
            "embedding": self._linear(VOCAB, HIDDEN),
            "head": self._linear(VOCAB, HIDDEN),
            "final_norm": self._vector(HIDDEN),
            "rope_cos": self.put(cos),
            "rope_sin": self.put(sin),
        }
        for layer in range(LAYERS):
            prefix = f"layers.{layer}."
            arrays |= {prefix + name: self._linear(*shape) for name, shape in shapes.items()}
            arrays |= {prefix + name: self._vector(HIDDEN) for name in ("attention_norm", "mlp_norm")}
            arrays |= {prefix + name: self._vector(HEAD_DIM) for name in ("q_norm", "k_norm")}
            arrays[prefix + "qkv_bias"] = self._vector(shapes["qkv"][0])
        return arrays

    def _linear(self, n: int, k: int) -> Any:
        rows = from_float32(self._rng.standard_normal((n, k), np.float32) * np.float32(2 / np.sqrt(k)), self.dtype)
        packed = self.put(np.zeros(self.native.packed_weight_bytes(self.dtype, n, k), np.uint8))
        self.native.pack_weight(self.context, rows, self.dtype, 0, n, k, packed)
        return packed

    def _vector(self, size: int) -> Any:
        return self.put(self._rng.uniform(0.5, 1.5, size).astype(np.float32))


def greedy_step(chunks: Sequence[SequenceChunk], logprobs: int = -1) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(staging, result) of a step that draws one token greedily after the last token of each chunk."""
    rows, index = [], -1
    for chunk in chunks:
        index += len(chunk.token_ids)
        position = chunk.start + len(chunk.token_ids)
        rows.append(LogitsRow(index, SamplingRow(GREEDY, 0, list(chunk.token_ids), []), position, -1, logprobs))
    staging, result = StepInputs(BLOCK_SIZE).write(chunks, rows)
    return staging.copy(), np.full_like(result, -7)
