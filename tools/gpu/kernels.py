"""Each operation of csrc/ops.h by itself: how much of the measured bandwidth or GEMM rate it reaches.

Every case moves or computes so much that a call takes milliseconds: the calls wait for their work, and what that costs
(some 20 us) must not matter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

REPEATS = 15


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the cases are. Heads as in Llama-3-8B."""

    tokens: int = 16384
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    decode_rows: int = 64
    decode_context: int = 8192
    prompt_tokens: int = 8192
    vocab: int = 128256
    gemm: int = 8192
    copy_bytes: int = 4 << 30


SMALL = Sizes(32, 64, 96, 4, 2, 32, 16, 3, 40, 48, 300, 64, 1 << 16)


@dataclass(frozen=True, slots=True)
class Measured:
    """One case. `bytes` it must move and `flops` it must compute at least; `share` of the ceiling that binds it."""

    case: str
    seconds: float
    bytes: float
    flops: float
    bound: str
    share: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured on this device: bytes read and written by a copy, and FLOP/s of the best large matrix product."""

    copy_bytes_per_s: float
    gemm_flops_per_s: float


class Kernels:
    """The cases on one device. `native` is the extension module, `upload` takes a NumPy array to the device."""

    def __init__(
        self, native: Any, upload: Callable[[Any], Any], matmul_library: str, sizes: Sizes, dtype: str = "bf16"
    ) -> None:
        self.ops, self.upload, self.sizes, self.dtype = native.ops, upload, sizes, dtype
        self.context = native.Context(matmul_library=matmul_library)
        self.numbers = np.random.default_rng(0)
        shape = self.shape()
        limits = {
            "max_tokens": max(sizes.tokens, sizes.prompt_tokens),
            "max_seqs": sizes.decode_rows,
            "max_rows": sizes.decode_rows,
            "max_context_len": max(sizes.decode_context, sizes.prompt_tokens),
            "vocab_size": sizes.vocab,
            "widest_k": max(sizes.inner, sizes.gemm),
        }
        self.context.bind_scratch(self.zeros(self.context.scratch_bytes(shape, **limits), np.uint8))

    def zeros(self, shape: int | tuple[int, int], dtype: Any) -> Any:
        return self.upload(np.zeros(shape, dtype))

    def shape(self) -> Any:
        s = self.sizes
        return self.ops.AttentionShape(
            num_heads=s.heads,
            num_kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            rotary_dim=s.head_dim,
            scale=s.head_dim**-0.5,
        )

    def stored(self, values: Any) -> Any:
        """float32 as the dtype is stored; bf16 as its bits, cut off."""
        return (values.view(np.uint32) >> 16).astype(np.uint16) if self.dtype == "bf16" else values.astype(np.float16)

    def randoms(self, rows: int, cols: int) -> Any:
        """A matrix of the dtype, of numbers around zero: a pattern of a few rows, repeated."""
        few = self.numbers.standard_normal((min(rows, 64), cols)).astype(np.float32)
        return self.upload(np.resize(self.stored(few), (rows, cols)))

    def empty(self, rows: int, cols: int) -> Any:
        return self.zeros((rows, cols), np.uint16 if self.dtype == "bf16" else np.float16)

    def floats(self, rows: int, cols: int) -> Any:
        few = self.numbers.standard_normal((min(rows, 64), cols)).astype(np.float32)
        return self.upload(np.resize(few, (rows, cols)))

    def seconds(self, call: Callable[[], Any]) -> float:
        """Median of some calls that each wait for their work; the first ones are not counted."""
        for _ in range(3):
            call()
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def ceilings(self, copy: Callable[[int], float]) -> Ceilings:
        """`copy(bytes)` returns the seconds that the device takes to copy so many."""
        size = self.sizes.copy_bytes
        best = min(copy(size) for _ in range(5))
        return Ceilings(2 * size / best, self._gemm_flops(self.sizes.gemm) / self._gemm_seconds(self.sizes.gemm))

    def _gemm_flops(self, n: int) -> float:
        return 2.0 * n**3

    def _gemm_seconds(self, n: int) -> float:
        return self.seconds(self._gemm_call(n, n, n))

    def _gemm_call(self, rows: int, n: int, k: int) -> Callable[[], Any]:
        x, y = self.randoms(rows, k), self.empty(rows, n)
        packed = self.packed(n, k)
        return lambda: self.ops.gemm(self.context, x, packed, self.dtype, n, None, y)

    def packed(self, n: int, k: int) -> Any:
        few = self.numbers.standard_normal((min(n, 64), k)).astype(np.float32) * 0.02
        rows = self.stored(few)
        packed = self.zeros(self.ops.packed_weight_bytes(self.dtype, n, k), np.uint8)
        self.ops.pack_weight(self.context, np.ascontiguousarray(np.resize(rows, (n, k))), 0, n, k, packed)
        return packed

    # ---- The cases: (call, bytes, flops)

    def cases(self) -> dict[str, Callable[[], tuple[Callable[[], Any], float, float]]]:
        return {
            "embed": self.embed,
            "add_rms_norm": self.norm,
            "rope_and_store": self.rope,
            "attention, decode": self.decode,
            "attention, prompt": self.prompt,
            "gated_activation": self.activation,
            "gather_rows": self.gather,
            "copy_blocks": self.copy_blocks,
            "gemm, few rows": self.gemm_few,
            "gemm, many rows": self.gemm_many,
            "sample, greedy": lambda: self.sample(0.0, 0, 1.0),
            "sample, temperature": lambda: self.sample(1.0, 0, 1.0),
            "sample, top-k and top-p": lambda: self.sample(1.0, 50, 0.9),
        }

    def embed(self) -> tuple[Callable[[], Any], float, float]:
        s = self.sizes
        table, out = self.packed(s.vocab, s.hidden), self.zeros((s.tokens, s.hidden), np.float32)
        ids = self.upload(self.numbers.integers(0, s.vocab, s.tokens).astype(np.int32))
        return (
            lambda: self.ops.embed(self.context, table, self.dtype, s.vocab, ids, out),
            s.tokens * s.hidden * 6.0,
            0.0,
        )

    def norm(self) -> tuple[Callable[[], Any], float, float]:
        s = self.sizes
        residual, delta = self.floats(s.tokens, s.hidden), self.randoms(s.tokens, s.hidden)
        out = self.empty(s.tokens, s.hidden)
        weight = self.upload(np.ones(s.hidden, np.float32))
        return (
            lambda: self.ops.add_rms_norm(self.context, residual, delta, weight, 1e-6, out),
            s.tokens * s.hidden * 12.0,
            0.0,
        )

    def batch(self, rows: int, query_len: int, context: int) -> tuple[Any, int]:
        """`rows` sequences of `context` keys, the last `query_len` of them new, in shuffled blocks; and the blocks."""
        s = self.sizes
        width = -(-context // s.block_size)
        tables = self.numbers.permutation(rows * width).astype(np.int32).reshape(rows, width)
        positions = np.tile(np.arange(context - query_len, context, dtype=np.int32), rows)
        owner = np.repeat(np.arange(rows), query_len)
        slots = tables[owner, positions // s.block_size] * s.block_size + positions % s.block_size
        arrays = {
            "token_ids": np.zeros(rows * query_len, np.int32),
            "positions": positions,
            "slot_mapping": slots.astype(np.int32),
            "query_start": np.arange(0, rows * query_len + 1, query_len, dtype=np.int32),
            "context_lens": np.full(rows, context, np.int32),
            "block_tables": tables,
        }
        device = {name: self.upload(array) for name, array in arrays.items()}
        return self.ops.Batch(**device, max_query_len=query_len, max_context_len=context), rows * width

    def pages(self, blocks: int) -> Any:
        size = self.ops.kv_block_bytes(self.dtype, self.sizes.block_size, self.shape()) * blocks
        few = self.numbers.standard_normal(1 << 12).astype(np.float32)
        data = self.upload(np.resize(self.stored(few).view(np.uint8), size))
        return self.ops.KvLayer(data, self.dtype, blocks, self.sizes.block_size)

    def rope(self) -> tuple[Callable[[], Any], float, float]:
        s = self.sizes
        qkv_width = (s.heads + 2 * s.kv_heads) * s.head_dim
        batch, blocks = self.batch(1, s.tokens, s.tokens)
        cos = self.upload(np.ones((s.tokens, s.head_dim // 2), np.float32))
        params, kv = self.ops.RopeAndNorm(cos, cos), self.pages(blocks)
        qkv, q, shape = self.randoms(s.tokens, qkv_width), self.empty(s.tokens, s.heads * s.head_dim), self.shape()
        return (
            lambda: self.ops.rope_and_store(self.context, qkv, params, shape, batch, q, kv),
            s.tokens * qkv_width * 4.0,
            0.0,
        )

    def attention(self, rows: int, query_len: int, context: int) -> tuple[Callable[[], Any], float, float]:
        s = self.sizes
        batch, blocks = self.batch(rows, query_len, context)
        kv, shape, width = self.pages(blocks), self.shape(), s.heads * s.head_dim
        q, out = self.randoms(rows * query_len, width), self.empty(rows * query_len, width)
        mean_context = context - (query_len - 1) / 2
        return (
            lambda: self.ops.attention(self.context, q, kv, shape, batch, out),
            rows * (4.0 * s.kv_heads * s.head_dim * context + 4.0 * query_len * width),
            4.0 * rows * query_len * width * mean_context,
        )

    def decode(self) -> tuple[Callable[[], Any], float, float]:
        call, moved, _ = self.attention(self.sizes.decode_rows, 1, self.sizes.decode_context)
        return call, moved, 0.0

    def prompt(self) -> tuple[Callable[[], Any], float, float]:
        call, _, flops = self.attention(1, self.sizes.prompt_tokens, self.sizes.prompt_tokens)
        return call, 0.0, flops

    def activation(self) -> tuple[Callable[[], Any], float, float]:
        s = self.sizes
        gate_up, out = self.randoms(s.tokens, 2 * s.inner), self.empty(s.tokens, s.inner)
        return (
            lambda: self.ops.gated_activation(self.context, "silu", gate_up, out),
            s.tokens * s.inner * 6.0,
            0.0,
        )

    def gather(self) -> tuple[Callable[[], Any], float, float]:
        s = self.sizes
        x, out = self.randoms(s.tokens, s.hidden), self.empty(s.tokens, s.hidden)
        rows = self.upload(self.numbers.permutation(s.tokens).astype(np.int32))
        return lambda: self.ops.gather_rows(self.context, x, rows, out), s.tokens * s.hidden * 4.0, 0.0

    def copy_blocks(self) -> tuple[Callable[[], Any], float, float]:
        s = self.sizes
        blocks = 2 * (s.tokens // s.block_size)
        kv, shape = self.pages(blocks), self.shape()
        pairs = self.upload(self.numbers.permutation(blocks).astype(np.int32).reshape(-1, 2))
        size = self.ops.kv_block_bytes(self.dtype, s.block_size, shape)
        return lambda: self.ops.copy_blocks(self.context, kv, shape, pairs), 2.0 * size * len(pairs), 0.0

    def gemm_few(self) -> tuple[Callable[[], Any], float, float]:
        s = self.sizes
        n = 2 * s.inner
        return self._gemm_call(8, n, s.hidden), 2.0 * n * s.hidden, 0.0

    def gemm_many(self) -> tuple[Callable[[], Any], float, float]:
        s = self.sizes
        return self._gemm_call(s.tokens, s.hidden, s.inner), 0.0, 2.0 * s.tokens * s.hidden * s.inner

    def sample(self, temperature: float, top_k: int, top_p: float) -> tuple[Callable[[], Any], float, float]:
        s = self.sizes
        rows = s.decode_rows
        logits = self.floats(rows, s.vocab)

        def column(value: float, dtype: Any) -> Any:
            return self.upload(np.full(rows, value, dtype))

        empty, starts = self.upload(np.zeros(0, np.int32)), self.upload(np.zeros(rows + 1, np.int32))
        sampling = self.ops.SamplingRows(
            temperature=column(temperature, np.float32),
            top_k=column(top_k, np.int32),
            top_p=column(top_p, np.float32),
            min_p=column(0, np.float32),
            repetition_penalty=column(1, np.float32),
            presence_penalty=column(0, np.float32),
            frequency_penalty=column(0, np.float32),
            seed=self.upload(np.arange(rows, dtype=np.uint64)),
            position=column(5, np.int32),
            target=column(-1, np.int32),
            num_logprobs=column(-1, np.int32),
            penalty_start=starts,
            penalty_ids=empty,
            penalty_counts=empty,
            bias_start=starts,
            bias_ids=empty,
            bias_values=self.upload(np.zeros(0, np.float32)),
        )
        ids, logprobs = column(0, np.int32), column(0, np.float32)
        top_ids, top_logprobs = self.zeros((rows, 0), np.int32), self.zeros((rows, 0), np.float32)
        return (
            lambda: self.ops.sample(self.context, logits, sampling, ids, logprobs, top_ids, top_logprobs),
            4.0 * rows * s.vocab,
            0.0,
        )

    def measure(self, ceilings: Ceilings) -> list[dict[str, Any]]:
        """All cases, one after another; each gives its memory back."""
        found = []
        for name, make in self.cases().items():
            call, moved, flops = make()
            seconds = self.seconds(call)
            by_memory, by_work = moved / ceilings.copy_bytes_per_s, flops / ceilings.gemm_flops_per_s
            bound = "memory" if by_memory >= by_work else "arithmetic"
            found.append(asdict(Measured(name, seconds, moved, flops, bound, max(by_memory, by_work) / seconds)))
            del call
        return found
