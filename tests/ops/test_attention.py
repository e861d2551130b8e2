"""Attention over pages: against a float64 reference, and the promise that a token's bits depend on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from .reference_attention import (
    DTYPES,
    ISAS,
    Heads,
    PagedRun,
    TokenRows,
    bits,
    from_dtype,
    in_chunks,
    make_context,
    ops,
    random_rows,
    reference_attention,
    rounded,
)

CHUNK = 256  # keys of one partial of the CPU kernels


def takes_bf16_pairs(isa: str, dtype: str) -> bool:
    return isa == "avx512bf16" and dtype == "bf16"


def assert_close(actual, rows, heads: Heads, isa: str, dtype: str) -> None:
    """`actual` is of the last tokens of the rows. Scores are off by some roundings of their size, weights relatively by
    as much, outputs by that times the values. Where the products take bf16, weights are rounded to it (in their sum
    too, so the error is at most twice that)."""
    pairs = takes_bf16_pairs(isa, dtype)
    expected = reference_attention(rows, heads, round_queries=pairs, last=len(actual))
    size = np.abs(rows.v).max()
    score_size = 12  # |q| |k| / sqrt(head_dim) of standard normal k and twice that of q, six deviations
    tolerance = size * 2.0**-24 * (16 + 4 * score_size) + (size * 2.0**-8 if pairs else 0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 72, 80, 96, 128, 256])
def test_whole_prompt_agrees_with_the_reference_for_every_head_size(isa: str, dtype: str, head_dim: int) -> None:
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=head_dim)
    rows = random_rows(head_dim, CHUNK + 37, heads, dtype)
    (actual,) = PagedRun(make_context(isa), [rows], heads, dtype).run([[(0, len(rows.q))]])
    assert_close(actual, rows, heads, isa, dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (2, 1), (9, 3), (8, 2), (5, 1), (8, 1), (16, 1), (20, 1)]
)
def test_groups_of_query_heads_share_their_kv_head(isa: str, num_heads: int, num_kv_heads: int) -> None:
    heads = Heads(num_heads, num_kv_heads, head_dim=32)
    rows = random_rows(num_heads, 53, heads, "bf16")
    (actual,) = PagedRun(make_context(isa), [rows], heads, "bf16").run([[(0, 40)], [(0, 12)], [(0, 1)]])
    assert_close(actual, rows, heads, isa, "bf16")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 1300])
def test_last_token_agrees_with_the_reference_at_every_length(isa: str, dtype: str, length: int) -> None:
    heads = Heads(num_heads=3, num_kv_heads=1, head_dim=64)
    rows = random_rows(length, length, heads, dtype)
    run = PagedRun(make_context(isa, 2), [rows], heads, dtype)
    if length > 1:
        run.store([(0, length - 1)], [0])
    (actual,) = run.run([[(0, 1)]], stored=[length - 1])
    assert_close(actual, rows, heads, isa, dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 5, 16, 100, CHUNK, CHUNK + 3])
def test_sliding_window_sees_only_its_keys(isa: str, dtype: str, window: int) -> None:
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=32, window=window)
    rows = random_rows(window, 2 * CHUNK + 21, heads, dtype)
    (whole,) = PagedRun(make_context(isa), [rows], heads, dtype).run([[(0, len(rows.q))]])
    assert_close(whole, rows, heads, isa, dtype)
    (chunked,) = PagedRun(make_context(isa, 2), [rows], heads, dtype).run(in_chunks(len(rows.q), 97))
    np.testing.assert_array_equal(bits(chunked), bits(whole))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads", [Heads(3, 1, 64), Heads(4, 4, 48), Heads(9, 3, 24, window=77), Heads(8, 1, 40)], ids=str
)
def test_bits_of_a_token_do_not_depend_on_chunking_threads_or_block_size(isa: str, dtype: str, heads: Heads) -> None:
    length = CHUNK + 70
    rows = random_rows(5, length, heads, dtype)
    (whole,) = PagedRun(make_context(isa), [rows], heads, dtype).run([[(0, length)]])
    for size, threads, block_size in [
        (1, 1, 16),
        (7, 2, 16),
        (16, 3, 32),
        (33, 2, 64),
        (length, 3, 16),
        (length, 2, 128),
    ]:
        run = PagedRun(make_context(isa, threads), [rows], heads, dtype, block_size, seed=size)
        (actual,) = run.run(in_chunks(length, size))
        np.testing.assert_array_equal(bits(actual), bits(whole), f"{size=} {threads=} {block_size=}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_token_do_not_depend_on_the_sequences_beside_it(isa: str, dtype: str) -> None:
    heads = Heads(num_heads=6, num_kv_heads=2, head_dim=64)
    rows = [random_rows(11, length, heads, dtype) for length in (700, 1, 16, 300, 33, 17)]
    schedule = [
        [(0, 500), (1, 1), (3, 17)],
        [(2, 15), (0, 150), (3, 240)],
        [(0, 1), (2, 1), (3, 1), (4, 33), (5, 16)],
        [(5, 1), (3, 42), (0, 49)],
    ]
    together = PagedRun(make_context(isa, 3), rows, heads, dtype).run(schedule)
    for s, actual in enumerate(together):
        assert len(actual) == len(rows[s].q)
        (alone,) = PagedRun(make_context(isa), [rows[s]], heads, dtype, seed=s).run([[(0, len(actual))]])
        np.testing.assert_array_equal(bits(actual), bits(alone), f"sequence {s}")
        assert_close(actual, rows[s], heads, isa, dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "window"), [("f32", 0), ("bf16", 0), ("bf16", 5000)])
def test_long_context_shared_out_over_threads_keeps_the_bits(isa: str, dtype: str, window: int) -> None:
    """9 * 1024 keys are 36 chunks a KV head: more than one wave of 16 partials a thread."""
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=32, window=window)
    length = 9 * 1024 + 3
    rows = random_rows(3, length, heads, dtype)
    results = []
    for threads in (1, 2, 3):
        run = PagedRun(make_context(isa, threads), [rows], heads, dtype)
        run.store([(0, length - 21)], [0])
        results.append(run.run([[(0, 20)], [(0, 1)]], stored=[length - 21])[0])
    for other in results[1:]:
        np.testing.assert_array_equal(bits(other), bits(results[0]))
    assert_close(results[0], rows, heads, isa, dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_stale_contents_of_unused_slots_have_no_effect(isa: str, dtype: str) -> None:
    """The harness fills the pool with NaN; other rubbish must give the same bits."""
    heads = Heads(num_heads=3, num_kv_heads=1, head_dim=72)
    rows = random_rows(8, CHUNK + 19, heads, dtype)
    schedule = [[(0, 250)], [(0, 11)], *in_chunks(14, 1)]
    (nan_filled,) = PagedRun(make_context(isa), [rows], heads, dtype).run(schedule)
    assert np.isfinite(nan_filled).all()
    for rubbish in (0x00, 0x7B, 0x7C):  # zeros, huge numbers, in f16 infinities
        run = PagedRun(make_context(isa), [rows], heads, dtype)
        run.pool[:] = rubbish
        (actual,) = run.run(schedule)
        np.testing.assert_array_equal(bits(actual), bits(nan_filled))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_output_is_rounded_once_to_its_type(isa: str, dtype: str) -> None:
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=40)
    rows = random_rows(2, 30, heads, dtype)
    outputs = [
        PagedRun(make_context(isa), [rows], heads, dtype, out_dtype=out).run([[(0, 30)]])[0] for out in ("f32", dtype)
    ]
    np.testing.assert_array_equal(from_dtype(outputs[1], dtype), rounded(outputs[0], dtype))


@pytest.mark.parametrize("isa", ISAS)
def test_large_scores_do_not_overflow(isa: str) -> None:
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=64)
    mild = random_rows(4, 300, heads, "f32")
    rows = TokenRows(mild.q * 1000, mild.k, mild.v)
    (actual,) = PagedRun(make_context(isa), [rows], heads, "f32").run([[(0, 300)]])
    assert np.isfinite(actual).all()
    assert np.abs(actual).max() <= np.abs(rows.v).max() * (1 + 1e-6)


@pytest.mark.parametrize(
    ("field", "block_size", "shape"),
    [
        ("block_size", 8, Heads(2, 1, 64)),
        ("block_size", 24, Heads(2, 1, 64)),
        ("head_dim", 16, Heads(2, 1, 33)),
        ("head_dim", 16, Heads(2, 1, 258)),
    ],
)
def test_shapes_the_kernels_cannot_serve_are_refused_by_name(field: str, block_size: int, shape: Heads) -> None:
    with pytest.raises(ValueError, match=field):
        ops.kv_block_bytes("f32", block_size, shape.shape())


def test_attention_without_enough_scratch_is_refused() -> None:
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=32)
    rows = random_rows(0, 3, heads, "f32")
    run = PagedRun(ops.Context(1, ISAS[0]), [rows], heads, "f32")
    with pytest.raises(ValueError, match="scratch"):
        run.run([[(0, 3)]])
