"""rope_and_store: q against float64; what it writes to the pages is read back through attention."""

from __future__ import annotations

import numpy as np
import pytest

from .reference_attention import (
    DTYPES,
    ISAS,
    NUMPY_DTYPE,
    UNIT_ROUNDOFF,
    Heads,
    PagedRun,
    TokenRows,
    bits,
    from_dtype,
    make_context,
    ops,
    random_rows,
    reference_attention,
    rms_norm,
    rope_tables,
    rotate,
    rounded,
)

EPS = 1e-6


def call(run: PagedRun, qkv, params, rotary_dim: int, batch, q_dtype: str = "f32") -> np.ndarray:
    q = np.full((len(qkv) + 1, run.heads.num_heads * run.heads.head_dim + 3), 77, NUMPY_DTYPE[q_dtype])
    inner = q[:-1, :-3]
    ops.rope_and_store(run.context, qkv, params, run.heads.shape(rotary_dim), batch, inner, run.kv())
    assert (q[-1] == 77).all()
    assert (q[:, -3:] == 77).all()
    return inner.reshape(len(qkv), run.heads.num_heads, run.heads.head_dim)


def stacked(rows: TokenRows) -> np.ndarray:
    return np.concatenate([x.reshape(len(x), -1) for x in (rows.q, rows.k, rows.v)], axis=1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("q_dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(16, 16), (64, 64), (80, 80), (80, 32), (128, 128), (256, 64), (96, 20), (32, 0)]
)
@pytest.mark.parametrize("has_norm", [False, True])
def test_queries_are_normed_and_rotated(isa: str, q_dtype: str, head_dim: int, rotary_dim: int, has_norm: bool) -> None:
    heads = Heads(num_heads=3, num_kv_heads=1, head_dim=head_dim)
    rng = np.random.default_rng(head_dim + rotary_dim)
    rows = random_rows(1, 40, heads, "f32")
    weights = rng.standard_normal((2, head_dim)).astype(np.float32) if has_norm else (None, None)
    cos, sin = rope_tables(40, rotary_dim)
    run = PagedRun(make_context(isa), [rows], heads, "f32")
    actual = call(
        run, stacked(rows), ops.RopeAndNorm(cos, sin, *weights, EPS), rotary_dim, run.batch([(0, 40)], [0]), q_dtype
    )
    normed = rms_norm(rows.q, weights[0], EPS) if has_norm else rows.q
    expected = rotate(normed, cos, sin)
    tolerance = 2.0**-24 * 16 * np.abs(normed).max()
    rtol = 0 if q_dtype == "f32" else UNIT_ROUNDOFF[q_dtype]
    np.testing.assert_allclose(from_dtype(actual, q_dtype), expected, rtol=rtol, atol=tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (40, 24)])
def test_keys_and_values_reach_attention(isa: str, dtype: str, has_norm: bool, head_dim: int, rotary_dim: int) -> None:
    """Two steps through normed and rotated pages give what the reference makes of normed and rotated rows."""
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=head_dim)
    rng = np.random.default_rng(4)
    length, cut = 50, 37
    rows = random_rows(4, length, heads, dtype)
    weights = (1 + rng.standard_normal((2, head_dim)) / 4).astype(np.float32) if has_norm else (None, None)
    cos, sin = rope_tables(length, rotary_dim)
    params = ops.RopeAndNorm(cos, sin, *weights, EPS)
    run = PagedRun(make_context(isa, 2), [rows], heads, dtype)
    qkv, parts = stacked(rows), []
    for begin, end in ((0, cut), (cut, length)):
        batch = run.batch([(0, end - begin)], [begin])
        q = call(run, qkv[begin:end], params, rotary_dim, batch).reshape(end - begin, -1)
        out = np.empty_like(q)
        ops.attention(run.context, q, run.kv(), heads.shape(rotary_dim), batch, out)
        parts.append(out.reshape(end - begin, 4, head_dim))
    q, k = (
        rotate(rms_norm(x, w, EPS) if has_norm else x, cos, sin).astype(np.float32)
        for x, w in ((rows.q, weights[0]), (rows.k, weights[1]))
    )
    expected = reference_attention(TokenRows(q, rounded(k, dtype), rows.v), heads)
    # A key off by a rounding of its type moves a score by that times |q| |k| / sqrt(head_dim), here at most 12.
    tolerance = 12 * UNIT_ROUNDOFF[dtype] * np.abs(rows.v).max()
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_and_queries_have_the_same_bits_alone_or_in_company(isa: str, dtype: str) -> None:
    heads = Heads(num_heads=6, num_kv_heads=2, head_dim=72)
    rng = np.random.default_rng(6)
    rows = random_rows(6, 90, heads, dtype)
    weights = rng.standard_normal((2, 72)).astype(np.float32)
    params = ops.RopeAndNorm(*rope_tables(90, 56), *weights, EPS)
    qkv = stacked(rows)
    together, single = (PagedRun(make_context(isa, n), [rows], heads, dtype) for n in (3, 1))
    q = call(together, qkv, params, 56, together.batch([(0, 90)], [0]))
    for t in range(90):
        alone = call(single, qkv[t : t + 1], params, 56, single.batch([(0, 1)], [t]))
        np.testing.assert_array_equal(bits(alone[0]), bits(q[t]))
    np.testing.assert_array_equal(single.pool, together.pool)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_a_token_writes_its_own_slot_and_nothing_else(isa: str, dtype: str, block_size: int) -> None:
    """Each of a block's tokens changes 2 * num_kv_heads * head_dim elements of the block, no two tokens the same."""
    heads = Heads(num_heads=2, num_kv_heads=2, head_dim=24)
    rows = random_rows(7, 2 * block_size, heads, dtype)
    run = PagedRun(make_context(isa), [rows], heads, dtype, block_size)
    block_bytes = ops.kv_block_bytes(dtype, block_size, heads.shape())
    params = ops.RopeAndNorm(*rope_tables(2 * block_size, 0))
    element = np.dtype(NUMPY_DTYPE[dtype]).itemsize
    seen = np.zeros(run.pool.size // element, np.int64)
    for t in range(2 * block_size):
        before = run.pool.copy()
        call(run, stacked(rows)[t : t + 1], params, 0, run.batch([(0, 1)], [t]))
        changed = (before != run.pool).reshape(-1, element).any(axis=1)
        block = run.tables[0, t // block_size]
        places = np.flatnonzero(changed)
        assert len(places) == 2 * heads.num_kv_heads * heads.head_dim
        assert (places * element // block_bytes == block).all()
        seen += changed
    assert seen.max() == 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_values_are_rounded_to_nearest_even(isa: str, dtype: str) -> None:
    """With one key, attention returns the stored value itself."""
    heads = Heads(num_heads=1, num_kv_heads=1, head_dim=64)
    v = np.random.default_rng(9).standard_normal((1, 1, 64)).astype(np.float32)
    step = 2.0 ** (-10 if dtype == "f16" else -7)
    v[0, 0, :4] = [1 + step / 2, 1 + 3 * step / 2, -1 - step / 2, 1 + step / 2 + 2.0**-20]  # ties, and just above one
    rows = TokenRows(np.ones((1, 1, 64), np.float32), np.ones((1, 1, 64), np.float32), v)
    (actual,) = PagedRun(make_context(isa), [rows], heads, dtype).run([[(0, 1)]])
    np.testing.assert_array_equal(actual, rounded(v, dtype))
