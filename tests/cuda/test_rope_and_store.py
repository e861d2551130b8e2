"""rope_and_store on the device: q and pages against the CPU op, to the layout of pages that attention reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.ops.reference_attention import (
    DTYPES,
    ISAS,
    UNIT_ROUNDOFF,
    Heads,
    PagedRun,
    TokenRows,
    bits,
    from_dtype,
    make_context,
    rms_norm,
    rope_tables,
    rotate,
    rounded,
    to_dtype,
)
from tests.ops.reference_attention import ops as cpu

from .device_ops import CANARY, Device, Guarded

EPS = 1e-6
POSITIONS = 60
# (head_dim, rotary_dim): all rotated, in part, not at all; what a 16-byte pack holds (8 or 4 elements) divides head_dim
# and half of rotary_dim, or not; as many parts as lanes, or fewer; an odd number of packs that pass through.
SIZES = (
    (16, 16),
    (32, 0),
    (64, 64),
    (80, 80),
    (80, 32),
    (96, 20),
    (128, 128),
    (128, 96),
    (256, 64),
    (18, 10),
    (40, 16),
    (20, 8),
)


@dataclass(frozen=True)
class Case:
    heads: Heads
    rotary_dim: int
    dtype: str
    block_size: int
    q: np.ndarray  # [T, heads, head_dim] float32, of numbers that dtype has; k and v the same
    k: np.ndarray
    v: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    num_blocks: int
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None

    def part(self, tokens: slice) -> Case:
        fields = {name: getattr(self, name)[tokens] for name in ("q", "k", "v", "positions", "slots")}
        return Case(**{**self.__dict__, **fields})


def random_case(
    heads: Heads,
    rotary_dim: int,
    dtype: str,
    *,
    tokens: int = 9,
    block_size: int = 16,
    norms: tuple[bool, bool] = (False, False),
    seed: int = 0,
) -> Case:
    rng = np.random.default_rng(seed)
    num_blocks = -(-tokens // block_size) + 2
    q, k, v = (
        rounded(rng.standard_normal((tokens, n, heads.head_dim)), dtype)
        for n in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    q_norm, k_norm = (rng.standard_normal(heads.head_dim).astype(np.float32) if has else None for has in norms)
    return Case(
        heads,
        rotary_dim,
        dtype,
        block_size,
        q,
        k,
        v,
        rng.integers(0, POSITIONS, tokens).astype(np.int32),
        rng.permutation(num_blocks * block_size)[:tokens].astype(np.int32),
        num_blocks,
        q_norm,
        k_norm,
    )


def run(device: Device, case: Case, *, aligned: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [T, heads, head_dim], keys and values [blocks, kv heads, block_size, head_dim], in the bits of dtype; what was
    not written holds canaries."""
    tokens, width = len(case.q), case.heads.num_heads * case.heads.head_dim
    stacked = np.concatenate([x.reshape(tokens, x.shape[1] * x.shape[2]) for x in (case.q, case.k, case.v)], axis=1)
    stored = to_dtype(stacked, case.dtype)
    qkv = Guarded(device, stored.shape, case.dtype, stored, aligned=aligned)
    q = Guarded(device, (tokens, width), case.dtype, aligned=aligned)
    page = (case.num_blocks, 2, case.heads.num_kv_heads, case.block_size, case.heads.head_dim)
    pages = Guarded(device, (int(np.prod(page)),), case.dtype, aligned=aligned)
    tables = [
        Guarded(device, x.shape, "f32", x, aligned=aligned).array.reshape(*x.shape)
        for x in (case.q_norm, case.k_norm)
        if x is not None
    ]
    norms = iter(tables)
    params = device.ops.RopeAndNorm(
        *(device.to_device(x) for x in rope_tables(POSITIONS, case.rotary_dim)),
        None if case.q_norm is None else next(norms),
        None if case.k_norm is None else next(norms),
        EPS,
    )
    heads = case.heads
    shape = device.ops.AttentionShape(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rotary_dim=case.rotary_dim,
        scale=1.0,
    )
    batch = device.batch(
        token_ids=np.zeros(tokens, np.int32),
        positions=case.positions,
        slot_mapping=case.slots,
        query_start=np.array([0, tokens], np.int32),
        context_lens=np.array([tokens], np.int32),
        block_tables=np.zeros((1, case.num_blocks), np.int32),
    )
    kv = device.ops.KvLayer(pages.array.view(np.uint8), case.dtype, case.num_blocks, case.block_size)
    device.ops.rope_and_store(device.context(), qkv.array, params, shape, batch, q.array, kv)
    np.testing.assert_array_equal(bits(qkv.get()), bits(stored))
    keys, values = np.moveaxis(pages.get().reshape(page), 1, 0)
    return q.get().reshape(case.q.shape), keys, values


def turned_by_the_cpu(x: np.ndarray, case: Case, norm: np.ndarray | None) -> np.ndarray:
    """Heads x [T, n, head_dim] normed and rotated in fp32, as queries of the CPU op."""
    tokens, n, head_dim = x.shape
    heads = Heads(n, 1, head_dim)
    padding = np.zeros((tokens, 2 * head_dim), np.float32)
    blank = np.zeros((tokens, 1, head_dim), np.float32)
    paged = PagedRun(make_context(ISAS[-1]), [TokenRows(x, blank, blank)], heads, "f32")
    batch = cpu.Batch(
        token_ids=np.zeros(tokens, np.int32),
        positions=case.positions,
        slot_mapping=np.arange(tokens, dtype=np.int32),
        query_start=np.array([0, tokens], np.int32),
        context_lens=np.array([tokens], np.int32),
        block_tables=np.zeros((1, 9), np.int32),
    )
    out = np.empty((tokens, n * head_dim), np.float32)
    params = cpu.RopeAndNorm(*rope_tables(POSITIONS, case.rotary_dim), norm, None, EPS)
    qkv = np.concatenate([x.reshape(tokens, n * head_dim), padding], axis=1)
    cpu.rope_and_store(paged.context, qkv, params, heads.shape(case.rotary_dim), batch, out, paged.kv())
    return out.reshape(x.shape)


def assert_close(actual: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    # A norm whose squares are summed in another order, two products and their sum, in fp32; then one rounding to dtype.
    atol = 16 * 2.0**-24 * np.abs(expected).max(initial=0) + (2.0**-25 if dtype == "f16" else 0)
    rtol = 0 if dtype == "f32" else UNIT_ROUNDOFF[dtype]
    np.testing.assert_allclose(from_dtype(actual, dtype), expected, rtol=rtol, atol=atol)


def check(device: Device, case: Case, *, aligned: bool = True) -> None:
    q, keys, values = run(device, case, aligned=aligned)
    assert_close(q, turned_by_the_cpu(case.q, case, case.q_norm), case.dtype)
    block, offset = case.slots // case.block_size, case.slots % case.block_size
    assert_close(keys[block, :, offset], turned_by_the_cpu(case.k, case, case.k_norm), case.dtype)
    np.testing.assert_array_equal(bits(values[block, :, offset]), bits(to_dtype(case.v, case.dtype)))
    for pages in (keys, values):
        pages[block, :, offset] = np.full(1, CANARY, np.uint8).repeat(pages.itemsize).view(pages.dtype)[0]
        assert (np.ascontiguousarray(pages).view(np.uint8) == CANARY).all(), "written outside the tokens' slots"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SIZES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("aligned", [True, False])
def test_queries_keys_and_values(
    device: Device, dtype: str, head_dim: int, rotary_dim: int, has_norm: bool, aligned: bool
) -> None:
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=head_dim)
    check(device, random_case(heads, rotary_dim, dtype, norms=(has_norm, has_norm)), aligned=aligned)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_of_more_parts_than_lanes(device: Device, dtype: str) -> None:
    """Wider than what the CPU op takes: against float64."""
    case = random_case(Heads(2, 1, 520), 16, dtype, norms=(True, True), tokens=3)
    for aligned in (True, False):
        q, _, _ = run(device, case, aligned=aligned)
        tables = (table[case.positions] for table in rope_tables(POSITIONS, 16))
        assert_close(q, rotate(rms_norm(case.q, case.q_norm, EPS), *tables), dtype)


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_any_number_of_heads(device: Device, group: int, kv_heads: int) -> None:
    check(device, random_case(Heads(group * kv_heads, kv_heads, 64), 64, "bf16", norms=(True, True), seed=group))


@pytest.mark.parametrize("norms", [(True, False), (False, True)])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_norm_of_q_or_k_alone(device: Device, norms: tuple[bool, bool], aligned: bool) -> None:
    check(device, random_case(Heads(4, 2, 64), 64, "f16", norms=norms), aligned=aligned)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("tokens", [0, 1, 17, 65])
def test_any_number_of_tokens_and_size_of_block(device: Device, block_size: int, tokens: int) -> None:
    check(device, random_case(Heads(2, 2, 32), 32, "bf16", tokens=tokens, block_size=block_size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (80, 48), (96, 20)])
def test_bits_of_a_token_depend_neither_on_others_nor_on_addresses(
    device: Device, dtype: str, head_dim: int, rotary_dim: int
) -> None:
    case = random_case(Heads(6, 2, head_dim), rotary_dim, dtype, norms=(True, True), tokens=5)
    case.q[0] = case.k[0] = case.v[0] = np.nan
    q, keys, values = run(device, case)
    assert np.isfinite(from_dtype(q[1:], dtype)).all()
    for t in (1, 4):
        for aligned in (True, False):
            alone_q, alone_keys, alone_values = run(device, case.part(slice(t, t + 1)), aligned=aligned)
            np.testing.assert_array_equal(bits(alone_q[0]), bits(q[t]))
            block, offset = case.slots[t] // case.block_size, case.slots[t] % case.block_size
            np.testing.assert_array_equal(bits(alone_keys[block, :, offset]), bits(keys[block, :, offset]))
            np.testing.assert_array_equal(bits(alone_values[block, :, offset]), bits(values[block, :, offset]))


@pytest.mark.parametrize("aligned", [True, False])
def test_a_head_with_nan_spoils_no_other(device: Device, aligned: bool) -> None:
    case = random_case(Heads(4, 4, 32), 32, "bf16", norms=(True, True), tokens=2)
    case.q[0, 1, 3] = case.k[1, 2, 0] = case.v[0, 3, 31] = np.nan
    q, keys, values = (from_dtype(x, "bf16") for x in run(device, case, aligned=aligned))
    block, offset = case.slots // case.block_size, case.slots % case.block_size
    for actual, whole in ((q, False), (keys[block, :, offset], False), (values[block, :, offset], True)):
        spoilt = np.isnan(actual).any(axis=-1)
        assert spoilt.sum() == 1
        assert np.isnan(actual).sum() == (1 if whole else 32)


def test_other_types_of_q_and_pages_are_refused(device: Device) -> None:
    case = random_case(Heads(2, 1, 16), 16, "bf16", tokens=1)
    shape = device.ops.AttentionShape(num_heads=2, num_kv_heads=1, head_dim=16, rotary_dim=16, scale=1.0)
    params = device.ops.RopeAndNorm(*(device.to_device(x) for x in rope_tables(POSITIONS, 16)))
    one = np.zeros(1, np.int32)
    batch = device.batch(
        token_ids=one,
        positions=one,
        slot_mapping=one,
        query_start=np.array([0, 1], np.int32),
        context_lens=one + 1,
        block_tables=one.reshape(1, 1),
    )
    qkv = Guarded(device, (1, 64), "bf16", to_dtype(np.zeros((1, 64)), "bf16"))
    for q_dtype, kv_dtype, name in (("f16", "bf16", "q"), ("bf16", "f16", "kv")):
        q = Guarded(device, (1, 32), q_dtype)
        kv = device.ops.KvLayer(device.filled(case.num_blocks * 16 * 32 * 2), kv_dtype, case.num_blocks, 16)
        with pytest.raises(ValueError, match=f"rope_and_store: {name} must"):
            device.ops.rope_and_store(device.context(), qkv.array, params, shape, batch, q.array, kv)
