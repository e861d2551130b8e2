"""Paged attention of the CUDA backend: against the CPU op, and what a row's bits may depend on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ops.reference_attention import (
    F32,
    ISAS,
    NUMPY_DTYPE,
    UNIT_ROUNDOFF,
    Heads,
    PagedRun,
    TokenRows,
    bits,
    from_dtype,
    make_context,
    rounded,
    to_dtype,
)

from .device_ops import CANARY, Device, Guarded

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
HALVES = ("bf16", "f16")
SPLIT = 512  # keys of one block of the decode kernel
LOUD = 64  # values at the edges of what a row sees are so much larger that one too many or too few shows

Part = tuple[int, int, int]  # (sequence, its tokens that are in the pages already, its next tokens)


@lru_cache(maxsize=32)
def make_rows(seed: int, length: int, heads: Heads, dtype: str, loud: tuple[int, ...] = ()) -> TokenRows:
    """Queries, keys and values that `dtype` holds exactly, loud values at some positions. Read-only."""
    rng = np.random.default_rng(seed)

    def normal(count: int) -> F32:
        return rounded(rng.standard_normal((length, count, heads.head_dim)), dtype)

    rows = TokenRows(normal(heads.num_heads), normal(heads.num_kv_heads), normal(heads.num_kv_heads))
    rows.v[[p for p in loud if 0 <= p < length]] *= LOUD
    for x in (rows.q, rows.k, rows.v):
        x.flags.writeable = False
    return rows


@lru_cache(maxsize=64)
def cpu_attention(rows: TokenRows, heads: Heads, absolute: bool = False) -> F32:
    """The CPU op's results in fp32 for every token; `absolute`: of the values' absolute values."""
    if absolute:
        rows = TokenRows(rows.q, rows.k, np.abs(rows.v))
    return PagedRun(make_context(ISAS[-1]), [rows], heads, "f32").run([[(0, len(rows.q))]])[0]


def tolerance(rows: TokenRows, heads: Heads, dtype: str) -> F32:
    """How far a result may be from the CPU's, for each element.

    Weights and the result are each rounded to the type (in f16, weights below 2^-14 to steps of 2^-24): at most that
    much of the weighted sum of absolute values. Scores of up to six deviations are off by some roundings of their
    size, weights relatively by as much, on both sides.
    """
    u = UNIT_ROUNDOFF[dtype]
    size = cpu_attention(rows, heads, absolute=True)
    narrow = 0 if dtype == "f32" else 2.01 * u
    steps = len(rows.q) * 2.0**-25 * np.abs(rows.v).max() if dtype == "f16" else 0
    return size * (narrow + 2 * 2.0**-24 * (16 + 4 * 6)) + steps


class Pages:
    """The pool of one layer, on the device, with the sequences' keys and values in blocks in any order. Every other
    slot is NaN, or made of the byte `stale`."""

    def __init__(
        self, device: Device, rows: Sequence[TokenRows], heads: Heads, dtype: str, block_size: int = 16, seed: int = 0
    ) -> None:
        self.device, self.rows, self.heads, self.dtype, self.block_size = device, rows, heads, dtype, block_size
        counts = [-(-len(r.q) // block_size) for r in rows]
        self.num_blocks = sum(counts) + 3
        order = np.random.default_rng(seed).permutation(self.num_blocks)
        self.tables = np.full((len(counts), max(counts) + 1), -1, np.int32)
        for s, count in enumerate(counts):
            self.tables[s, :count] = order[sum(counts[:s]) :][:count]

    def pool(self, parts: Sequence[Part], stale: int, hide_unseen: bool) -> NDArray[Any]:
        h = self.heads
        items = np.dtype(NUMPY_DTYPE[self.dtype])
        shape = (self.num_blocks, 2, h.num_kv_heads, self.block_size, h.head_dim)
        pool = np.full(int(np.prod(shape)) * items.itemsize, stale, np.uint8).view(items).reshape(shape)
        for s, done, count in parts:
            first = max(0, done + 1 - h.window) if hide_unseen and h.window else 0
            position = np.arange(first, done + count)
            block, offset = self.tables[s, position // self.block_size], position % self.block_size
            pool[block, 0, :, offset] = to_dtype(self.rows[s].k[first : done + count], self.dtype)
            pool[block, 1, :, offset] = to_dtype(self.rows[s].v[first : done + count], self.dtype)
        return pool

    def attend(
        self,
        parts: Sequence[Part],
        *,
        deterministic: bool = False,
        aligned: bool = True,
        stale: int = CANARY,
        hide_unseen: bool = True,
        bounds: tuple[int, int] = (0, 0),
    ) -> list[NDArray[Any]]:
        """The results [tokens, num_heads, head_dim] of each part, as they are stored. `bounds`: what max_query_len and
        max_context_len are said to be at least. Whatever lies around q, out and scratch is NaN and stays so."""
        h, device = self.heads, self.device
        length = sum(count for _, _, count in parts)
        width = h.num_heads * h.head_dim
        q = [self.rows[s].q[done : done + count].reshape(count, width) for s, done, count in parts]
        q_there = Guarded(device, (length, width), self.dtype, to_dtype(np.concatenate(q), self.dtype), aligned=aligned)
        out = Guarded(device, (length, width), self.dtype, aligned=aligned)
        contexts = [done + count for _, done, count in parts]
        max_query_len = max(bounds[0], *(count for _, _, count in parts))
        max_context_len = max(bounds[1], *contexts)
        table = np.full((len(parts), -(-max_context_len // self.block_size)), -1, np.int32)
        for i, (s, done, count) in enumerate(parts):
            used = -(-(done + count) // self.block_size)
            table[i, :used] = self.tables[s, :used]
        arrays = {
            "token_ids": np.zeros(length),
            "positions": np.concatenate([np.arange(done, done + count) for _, done, count in parts]),
            "slot_mapping": np.zeros(length),
            "query_start": np.cumsum([0] + [count for _, _, count in parts]),
            "context_lens": np.array(contexts),
            "block_tables": table,
        }
        batch = device.ops.Batch(
            **{name: device.to_device(np.ascontiguousarray(value, np.int32)) for name, value in arrays.items()},
            max_query_len=max_query_len,
            max_context_len=max_context_len,
        )
        context = device.context(deterministic=deterministic, library=False)
        shape = device_shape(device, h)
        scratch = device.scratch(context, shape, max_seqs=len(parts), max_context_len=max_context_len)
        pool = device.to_device(self.pool(parts, stale, hide_unseen).reshape(-1).view(np.uint8))
        kv = device.ops.KvLayer(pool, self.dtype, self.num_blocks, self.block_size)
        device.ops.attention(context, q_there.array, kv, shape, batch, out.array)
        result = out.get().reshape(length, h.num_heads, h.head_dim)
        scratch.check()
        starts = arrays["query_start"]
        return [result[a:b] for a, b in pairwise(starts)]

    def check(self, parts: Sequence[Part], **options: Any) -> list[NDArray[Any]]:
        """attend(), and every element is as near to the CPU's as its type allows."""
        results = self.attend(parts, **options)
        for (s, done, count), result in zip(parts, results, strict=True):
            here = slice(done, done + count)
            expected = cpu_attention(self.rows[s], self.heads)[here]
            allowed = tolerance(self.rows[s], self.heads, self.dtype)[here]
            wrong = ~(np.abs(from_dtype(result, self.dtype) - expected) <= allowed)  # also where it is NaN
            assert not wrong.any(), f"part {(s, done, count)}: {np.argwhere(wrong)[:3].tolist()}, {wrong.mean():.1%}"
        return results


def device_shape(device: Device, heads: Heads) -> Any:
    return device.ops.AttentionShape(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rotary_dim=0,
        scale=heads.scale,
        window=heads.window,
    )


def edges(*positions: int) -> tuple[int, ...]:
    """The positions and their neighbours."""
    return tuple(sorted({p + d for p in positions for d in (-1, 0, 1)}))


def assert_same_bits(actual: Iterable[NDArray[Any]], expected: Iterable[NDArray[Any]], what: object = "") -> None:
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b), str(what))


def mixed_batch(rows: Sequence[TokenRows]) -> list[Part]:
    """Prompt chunks that begin anywhere, decode rows and a sequence without tokens, in one batch."""
    lengths = [len(r.q) for r in rows]
    assert len(lengths) == 6
    assert min(lengths[:5]) > 80
    return [(0, 0, lengths[0]), (1, lengths[1] - 1, 1), (2, 16, 33), (3, 5, 0), (4, 63, 2), (5, 0, 1)]


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_decode_rows_of_every_length_agree_with_the_cpu(device: Device, dtype: str) -> None:
    """One key, one less and one more than a page, than a tile, than a split; two splits and one key."""
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=32)
    lengths = (1, 2, 15, 16, 17, 63, 64, 65, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 1)
    rows = [make_rows(n, n, heads, dtype, edges(0, 16, 64, SPLIT, 2 * SPLIT, n)) for n in lengths]
    Pages(device, rows, heads, dtype).check([(s, n - 1, 1) for s, n in enumerate(lengths)])


@pytest.mark.parametrize("length", [SPLIT, 2 * SPLIT])
def test_a_longest_row_of_whole_splits_has_no_empty_one(device: Device, length: int) -> None:
    """There is scratch for as many as it has keys for."""
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=16)
    rows = [make_rows(length, length, heads, "bf16", edges(0, SPLIT, length))]
    Pages(device, rows, heads, "bf16").check([(0, length - 1, 1)])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_chunks_and_decode_rows_of_one_batch_agree_with_the_cpu(
    device: Device, dtype: str, deterministic: bool
) -> None:
    heads = Heads(num_heads=6, num_kv_heads=2, head_dim=32)
    rows = [make_rows(s, n, heads, dtype, edges(0, 64, n)) for s, n in enumerate((90, 530, 100, 81, 150, 1))]
    Pages(device, rows, heads, dtype).check(mixed_batch(rows), deterministic=deterministic)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size_agrees_with_the_cpu(device: Device, dtype: str, head_dim: int) -> None:
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=head_dim)
    rows = [make_rows(s, n, heads, dtype, edges(0, n)) for s, n in enumerate((70, 131))]
    Pages(device, rows, heads, dtype).check([(0, 31, 39), (1, 130, 1)])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (4, 2), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (34, 2)]
)
def test_groups_of_every_size_share_their_kv_head(device: Device, num_heads: int, num_kv_heads: int) -> None:
    heads = Heads(num_heads, num_kv_heads, head_dim=16)
    rows = [make_rows(s, n, heads, "f16", edges(0, n)) for s, n in enumerate((45, 38))]
    Pages(device, rows, heads, "f16").check([(0, 20, 25), (1, 37, 1)])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [1, 2, 16, 17, 100])
def test_a_sliding_window_sees_only_its_keys(device: Device, window: int, deterministic: bool) -> None:
    """The keys before it are NaN in the pages."""
    heads = Heads(num_heads=3, num_kv_heads=1, head_dim=32, window=window)
    lengths = (150, 170, 33, 5)
    rows = [make_rows(n, n, heads, "f16", edges(0, n - window, n)) for n in lengths]
    parts = [(0, 100, 50), (1, 169, 1), (2, 0, 33), (3, 4, 1)]
    Pages(device, rows, heads, "f16").check(parts, deterministic=deterministic)


@pytest.mark.parametrize("window", [SPLIT, SPLIT + 20])
def test_a_window_of_several_splits_agrees_with_the_cpu(device: Device, window: int) -> None:
    """Splits begin at multiples of a page, so even a window of one split may take two."""
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=16, window=window)
    lengths = (window - 1, window, window + 1, 1100)
    rows = [make_rows(n, n, heads, "f16", edges(n, n - window, SPLIT)) for n in lengths]
    Pages(device, rows, heads, "f16").check([(s, n - 1, 1) for s, n in enumerate(lengths)])


@pytest.mark.parametrize("size", [SPLIT, 4 * SPLIT])
def test_rows_with_more_keys_than_splits_have_longer_ones(device: Device, size: int) -> None:
    """With 16 KV heads there are at most 16 splits. The longest have more steps than a warp has lanes."""
    heads = Heads(num_heads=16, num_kv_heads=16, head_dim=16)
    length = 16 * size + 1
    rows = make_rows(1, length, heads, "bf16", edges(0, SPLIT, size, size + SPLIT, 2 * size, 2048, 16 * size))
    (result,) = Pages(device, [rows], heads, "bf16", block_size=256).attend([(0, length - 1, 1)])
    last = TokenRows(rows.q[-1:], rows.k, rows.v)
    expected, size_of_sum = one_row(last, heads), one_row(TokenRows(last.q, last.k, np.abs(last.v)), heads)
    difference = np.abs(from_dtype(result[0], "bf16") - expected)
    np.testing.assert_array_less(difference, size_of_sum * 2.01 * UNIT_ROUNDOFF["bf16"])


def one_row(rows: TokenRows, heads: Heads) -> NDArray[np.float64]:
    """Attention [num_heads, head_dim] of one token over all keys, one query head for each KV head, in float64."""
    scores = np.einsum("hd,khd->hk", rows.q[0].astype(np.float64), rows.k) * heads.scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hk,khd->hd", weights / weights.sum(axis=1, keepdims=True), rows.v.astype(np.float64))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("window", [0, 40])
def test_a_row_has_the_same_bits_alone_and_in_company(
    device: Device, dtype: str, window: int, deterministic: bool
) -> None:
    heads = Heads(num_heads=3, num_kv_heads=1, head_dim=32, window=window)
    rows = [make_rows(s, n, heads, dtype) for s, n in enumerate((90, 530, 100, 81, 150, 1))]
    parts = mixed_batch(rows)
    together = Pages(device, rows, heads, dtype).attend(parts, deterministic=deterministic)
    for (s, done, count), expected in zip(parts, together, strict=True):
        if count:
            alone = Pages(device, [rows[s]], heads, dtype, seed=9).attend(
                [(0, done, count)], deterministic=deterministic
            )
            assert_same_bits(alone, [expected], s)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("window", [0, 70])
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(device: Device, dtype: str, window: int) -> None:
    """The whole prompt is enough for the larger tiles, the chunks are not. One token alone goes through the decode
    kernel, unless the mode is deterministic."""
    heads = Heads(num_heads=9, num_kv_heads=1, head_dim=16, window=window)
    length = 150
    rows = [make_rows(4, length, heads, dtype)]
    (whole,) = Pages(device, rows, heads, dtype).check([(0, 0, length)])
    for size, block_size, deterministic in ((2, 16, False), (37, 48, False), (64, 64, True)):
        pages = Pages(device, rows, heads, dtype, block_size, seed=size)
        for done in range(length - length % size - size, length, size):
            count = min(size, length - done)
            (chunk,) = pages.attend([(0, done, count)], deterministic=deterministic)
            assert_same_bits([chunk], [whole[done : done + count]], (size, done))
    single = [(0, done, 1) for done in (0, 1, 15, 16, 63, 64, 65, 149)]
    for part in single:
        (row,) = Pages(device, rows, heads, dtype, 32).attend([part], deterministic=True)
        assert_same_bits([row], [whole[part[1] : part[1] + 1]], part)


def test_in_fp32_decode_rows_and_chunks_have_the_same_bits(device: Device) -> None:
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=32)
    rows = [make_rows(4, 70, heads, "f32")]
    pages = Pages(device, rows, heads, "f32")
    (whole,) = pages.attend([(0, 0, 70)])
    for done in (0, 31, 32, 69):
        assert_same_bits(pages.attend([(0, done, 1)]), [whole[done : done + 1]], done)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_stale_slots_never_reach_a_result(device: Device, dtype: str) -> None:
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=32, window=30)
    rows = [make_rows(s, n, heads, dtype) for s, n in enumerate((90, 530, 100, 81, 150, 1))]
    pages = Pages(device, rows, heads, dtype)
    expected = pages.attend(mixed_batch(rows))
    assert all(np.isfinite(from_dtype(x, dtype)).all() for x in expected)
    for stale in (0x00, 0x7B, 0x7C):  # zeros, huge numbers, in f16 infinities
        assert_same_bits(pages.attend(mixed_batch(rows), stale=stale), expected, stale)
    assert_same_bits(pages.attend(mixed_batch(rows), hide_unseen=False), expected)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_rows_at_odd_addresses_have_the_same_bits(device: Device, dtype: str) -> None:
    heads = Heads(num_heads=3, num_kv_heads=1, head_dim=16)
    rows = [make_rows(s, n, heads, dtype) for s, n in enumerate((90, 530, 100, 81, 150, 1))]
    pages = Pages(device, rows, heads, dtype)
    assert_same_bits(pages.attend(mixed_batch(rows), aligned=False), pages.attend(mixed_batch(rows)))


@pytest.mark.parametrize("deterministic", [False, True])
def test_bounds_may_be_larger_than_what_is_there(device: Device, deterministic: bool) -> None:
    """As in a graph that was captured for the largest step."""
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=16)
    rows = [make_rows(s, n, heads, "bf16") for s, n in enumerate((90, 530, 100, 81, 150, 1))]
    pages = Pages(device, rows, heads, "bf16")
    for parts in (mixed_batch(rows), [(1, 529, 1), (0, 20, 1)]):
        expected = pages.attend(parts, deterministic=deterministic)
        assert_same_bits(pages.attend(parts, deterministic=deterministic, bounds=(1, 9000)), expected)
        assert_same_bits(pages.attend(parts, deterministic=deterministic, bounds=(200, 9000)), expected)


def test_more_sequences_than_blocks_find_their_own_keys(device: Device) -> None:
    """More than a warp looks at together, and more work than there are blocks in the grid."""
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=16)
    lengths = [1 + s * 7 % 40 for s in range(70)]
    rows = [make_rows(s, n, heads, "f16") for s, n in enumerate(lengths)]
    pages = Pages(device, rows, heads, "f16")
    for deterministic in (False, True):
        parts = [(s, n - 1, 1) if s % 3 else (s, n - min(n, 3), min(n, 3)) for s, n in enumerate(lengths)]
        pages.check(parts, deterministic=deterministic)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_large_scores_do_not_overflow(device: Device, dtype: str, sign: int) -> None:
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=16)
    mild = make_rows(4, 100, heads, dtype)
    rows = TokenRows(rounded(mild.q * 1000, dtype), rounded(np.abs(mild.k) * 100 * sign, dtype), mild.v)
    for part in ((0, 30, 70), (0, 99, 1), (0, 9, 1)):  # the last has keys for one warp only
        (result,) = Pages(device, [rows], heads, dtype).attend([part])
        result = from_dtype(result, dtype)
        assert np.isfinite(result).all()
        largest = np.abs(result).max(axis=-1)
        assert (largest > 0).all(), "a sum that is no number gives zeros"
        assert largest.max() <= np.abs(mild.v).max() * (1 + 2 * UNIT_ROUNDOFF[dtype])


@pytest.mark.parametrize(
    ("field", "heads", "block_size"),
    [
        ("head_dim", Heads(2, 1, 48), 16),
        ("head_dim", Heads(2, 1, 272), 16),
        ("block_size", Heads(2, 1, 64), 24),
        ("window", Heads(2, 1, 64, window=-1), 16),
    ],
)
def test_shapes_the_kernels_cannot_serve_are_refused_by_name(
    device: Device, field: str, heads: Heads, block_size: int
) -> None:
    rows = [make_rows(1, 20, Heads(heads.num_heads, heads.num_kv_heads, heads.head_dim), "bf16")]
    with pytest.raises(ValueError, match=field):
        Pages(device, rows, heads, "bf16", block_size).attend([(0, 10, 1)])


def test_attention_without_enough_scratch_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=16)
    rows = [make_rows(1, SPLIT + 1, heads, "bf16")]

    def too_little(context: Any, shape: Any, **limits: int) -> Guarded:
        guarded = Guarded(device, (256,), "u8")
        context.bind_scratch(guarded.array)
        return guarded

    monkeypatch.setattr(Device, "scratch", lambda self, context, shape, **limits: too_little(context, shape, **limits))
    with pytest.raises(ValueError, match="scratch"):
        Pages(device, rows, heads, "bf16").attend([(0, SPLIT, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("window", [0, 200])
def test_the_whole_grid_agrees_with_the_cpu(
    device: Device, dtype: str, head_dim: int, group: int, window: int, deterministic: bool
) -> None:
    heads = Heads(2 * group, 2, head_dim, window)
    rows = [make_rows(s, n, heads, dtype, edges(0, 64, n)) for s, n in enumerate((300, 1100, 100, 81, 150, 1))]
    pages = Pages(device, rows, heads, dtype, block_size=16 * (1 + group % 3))
    pages.check(mixed_batch(rows), deterministic=deterministic)
