"""NumPy references, in float64, of attention, rotary embedding, RMS norm and the gated activations; no speed.

Also the harness that feeds a ragged, paged batch to the ops: whole sequences of q, k and v are cut into steps by a
schedule, their blocks lie in any order in a pool that is filled with NaN, and what comes back are the outputs of every
token. Keys and values reach the pages through `rope_and_store`, since a page's layout is the backend's own affair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from pyengine import _cpu

ops = _cpu.ops
ISAS: list[str] = ops.supported_isas()
DTYPES = ("f32", "bf16", "f16")
NUMPY_DTYPE = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
UNIT_ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def aligned_bytes(size: int, fill: int = 0) -> NDArray[np.uint8]:
    """A uint8 array that begins at a multiple of 64 bytes."""
    buffer = np.full(size + 64, fill, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size]


@cache
def make_context(isa: str, num_threads: int = 1) -> _cpu.Context:
    """A context with scratch for every test of this folder, which may have more threads than the machine."""
    context = _cpu.Context(num_threads, isa, oversubscribe=True)
    shape = ops.AttentionShape(num_heads=16, num_kv_heads=1, head_dim=256, rotary_dim=0, scale=1.0)
    limits = {"max_tokens": 4096, "max_seqs": 64, "max_rows": 64, "max_context_len": 8192, "vocab_size": 64}
    context.bind_scratch(aligned_bytes(context.scratch_bytes(shape, widest_k=64, **limits)))
    return context


def to_dtype(x: NDArray, dtype: str) -> NDArray:
    """x rounded to nearest even; bf16 as its bits."""
    if dtype != "bf16":
        return x.astype(NUMPY_DTYPE[dtype])
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_dtype(x: NDArray, dtype: str) -> F32:
    if dtype != "bf16":
        return x.astype(np.float32)
    return (x.astype(np.uint32) << 16).view(np.float32)


def rounded(x: NDArray, dtype: str) -> F32:
    return from_dtype(to_dtype(x, dtype), dtype)


def rms_norm(x: NDArray, weight: NDArray, eps: float) -> F64:
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(np.float64)


def rotate(x: NDArray, cos: NDArray, sin: NDArray) -> F64:
    """Rotary embedding of x [T, heads, head_dim] by cos, sin [T, rotary_dim / 2]; element i is paired with i + half."""
    x = x.astype(np.float64)
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)


def rope_tables(positions: int, rotary_dim: int, base: float = 10000.0) -> tuple[F32, F32]:
    angles = np.outer(np.arange(positions), base ** (-np.arange(0, rotary_dim, 2) / max(1, rotary_dim)))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def activate(name: str, x: NDArray) -> F64:
    x = x.astype(np.float64)
    with np.errstate(over="ignore"):
        if name == "silu":
            return x / (1 + np.exp(-x))
        if name == "gelu":
            return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        if name == "gelu_tanh":
            return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return np.maximum(x, 0)


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of an attention layer; `window` 0: every key before the query."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0

    @property
    def scale(self) -> float:
        return float(np.float32(self.head_dim**-0.5))

    def shape(self, rotary_dim: int = 0) -> ops.AttentionShape:
        return ops.AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotary_dim=rotary_dim,
            scale=self.scale,
            window=self.window,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """One sequence: q [L, num_heads, head_dim], k and v [L, num_kv_heads, head_dim], all float32. Compared by identity,
    so that what was computed of it can be cached."""

    q: F32
    k: F32
    v: F32


@lru_cache(maxsize=16)
def random_rows(seed: int, length: int, heads: Heads, dtype: str) -> TokenRows:
    """Keys and values that `dtype` holds exactly; queries sharp enough for softmax to matter. Read-only."""
    rng = np.random.default_rng(seed)
    d = heads.head_dim
    q = rng.standard_normal((length, heads.num_heads, d)).astype(np.float32) * 2
    k = rounded(rng.standard_normal((length, heads.num_kv_heads, d)), dtype)
    v = rounded(rng.standard_normal((length, heads.num_kv_heads, d)), dtype)
    for x in (q, k, v):
        x.flags.writeable = False
    return TokenRows(q, k, v)


@lru_cache(maxsize=16)
def reference_attention(rows: TokenRows, heads: Heads, round_queries: bool = False, last: int | None = None) -> F64:
    """Causal attention [tokens, num_heads, head_dim] of all, or the `last`, tokens. `round_queries`: of the scaled
    queries as bf16, as dot instructions take them."""
    q = rows.q[0 if last is None else len(rows.q) - last :] * np.float32(heads.scale)
    q = (rounded(q, "bf16") if round_queries else q).astype(np.float64).transpose(1, 0, 2)
    group = heads.num_heads // heads.num_kv_heads
    k = np.repeat(rows.k, group, axis=1).astype(np.float64).transpose(1, 2, 0)
    v = np.repeat(rows.v, group, axis=1).astype(np.float64).transpose(1, 0, 2)
    positions = np.arange(len(rows.q))
    distance = positions[-q.shape[1] :, None] - positions[None, :]
    visible = distance >= 0 if heads.window == 0 else (distance >= 0) & (distance < heads.window)
    scores = np.where(visible, q @ k, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v).transpose(1, 0, 2)


Step = Sequence[tuple[int, int]]  # (sequence, number of its next tokens) of one call


@dataclass(slots=True)
class PagedRun:
    """Runs a schedule of steps over sequences whose blocks are spread over a pool of NaN."""

    context: _cpu.Context
    rows: Sequence[TokenRows]
    heads: Heads
    dtype: str
    block_size: int = 16
    seed: int = 0
    out_dtype: str = "f32"
    spare_blocks: int = 3
    pool: NDArray[np.uint8] = field(init=False)
    tables: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        counts = [-(-len(r.q) // self.block_size) for r in self.rows]
        total = sum(counts) + self.spare_blocks
        order = np.random.default_rng(self.seed).permutation(total)
        self.tables = np.full((len(counts), max(counts) + 1), -1, np.int32)
        for s, count in enumerate(counts):
            self.tables[s, :count] = order[sum(counts[:s]) :][:count]
        self.pool = aligned_bytes(total * ops.kv_block_bytes(self.dtype, self.block_size, self.heads.shape()), 0xFF)

    def kv(self) -> ops.KvLayer:
        block = ops.kv_block_bytes(self.dtype, self.block_size, self.heads.shape())
        return ops.KvLayer(self.pool, self.dtype, self.pool.size // block, self.block_size)

    def batch(self, step: Step, done: Sequence[int]) -> ops.Batch:
        positions = [np.arange(done[s], done[s] + n) for s, n in step]
        slots = [
            self.tables[s, p // self.block_size] * self.block_size + p % self.block_size
            for (s, _), p in zip(step, positions, strict=True)
        ]
        return ops.Batch(
            token_ids=np.zeros(sum(n for _, n in step), np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            slot_mapping=np.concatenate(slots).astype(np.int32),
            query_start=np.cumsum([0] + [n for _, n in step]).astype(np.int32),
            context_lens=np.array([done[s] + n for s, n in step], np.int32),
            block_tables=self.tables[[s for s, _ in step]],
        )

    def run(self, schedule: Sequence[Step], stored: Sequence[int] | None = None) -> list[NDArray]:
        """The outputs [tokens, num_heads, head_dim] of each sequence, in the bits of out_dtype. `stored`: how many
        tokens of each sequence are in the pages already."""
        h, d = self.heads.num_heads, self.heads.head_dim
        done = [0] * len(self.rows) if stored is None else list(stored)
        outputs: list[list[NDArray]] = [[] for _ in self.rows]
        for step in schedule:
            batch = self.batch(step, done)
            q = self.store(step, done, batch)
            guarded = np.full((len(q) + 1, h * d + 7), 77, NUMPY_DTYPE[self.out_dtype])
            ops.attention(self.context, q, self.kv(), self.heads.shape(), batch, guarded[:-1, : h * d])
            assert (guarded[-1] == 77).all(), "written below the rows of out"
            assert (guarded[:, h * d :] == 77).all(), "written beside the columns of out"
            at = 0
            for s, n in step:
                outputs[s].append(guarded[at : at + n, : h * d].reshape(n, h, d))
                done[s] += n
                at += n
        return [np.concatenate(parts) if parts else np.empty((0, h, d)) for parts in outputs]

    def store(self, step: Step, done: Sequence[int], batch: ops.Batch | None = None) -> F32:
        """Writes the keys and values of a step; returns its queries, as rows that lie apart in memory."""
        width = self.heads.num_heads * self.heads.head_dim
        parts = []
        for s, n in step:
            rows = self.rows[s]
            parts.append(np.concatenate([r[done[s] : done[s] + n].reshape(n, -1) for r in (rows.q, rows.k, rows.v)], 1))
        qkv = np.concatenate(parts)
        q = np.full((len(qkv), width + 5), np.nan, np.float32)[:, :width]
        rope = ops.RopeAndNorm(*rope_tables(max(len(r.q) for r in self.rows), 0))
        batch = self.batch(step, done) if batch is None else batch
        ops.rope_and_store(self.context, qkv, rope, self.heads.shape(), batch, q, self.kv())
        return q


def in_chunks(length: int, size: int, seq: int = 0) -> list[Step]:
    """A schedule that computes one sequence `size` tokens at a time."""
    return [[(seq, min(size, length - start))] for start in range(0, length, size)]


def bits(x: NDArray) -> NDArray:
    return np.ascontiguousarray(x).view(np.uint16 if x.itemsize == 2 else np.uint32)
