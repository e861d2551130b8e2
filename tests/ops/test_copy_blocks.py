"""copy_blocks: whole blocks, in order, and nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest

from .reference_attention import DTYPES, ISAS, Heads, PagedRun, aligned_bytes, bits, make_context, ops, random_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "block_size"), [(Heads(2, 1, 16), 16), (Heads(4, 2, 72), 32), (Heads(3, 3, 256), 64)], ids=str
)
def test_pairs_are_copied_in_order(dtype: str, heads: Heads, block_size: int) -> None:
    block_bytes = ops.kv_block_bytes(dtype, block_size, heads.shape())
    pool = aligned_bytes(7 * block_bytes)
    pool[:] = np.random.default_rng(0).integers(0, 256, pool.size)
    pairs = np.array([[0, 5], [3, 1], [1, 2], [4, 4]], np.int32)
    expected = pool.reshape(7, -1).copy()
    for source, destination in pairs:
        expected[destination] = expected[source]
    ops.copy_blocks(make_context(ISAS[-1], 3), ops.KvLayer(pool, dtype, 7, block_size), heads.shape(), pairs)
    np.testing.assert_array_equal(pool.reshape(7, -1), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_goes_on_from_the_copy_of_its_last_block(isa: str, dtype: str) -> None:
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=32)
    rows = random_rows(1, 60, heads, dtype)
    (expected,) = PagedRun(make_context(isa), [rows], heads, dtype).run([[(0, 60)]])
    run = PagedRun(make_context(isa), [rows], heads, dtype)
    run.store([(0, 40)], [0])
    block_bytes = ops.kv_block_bytes(dtype, 16, heads.shape())
    source = int(run.tables[0, 2])
    spare = next(b for b in range(run.pool.size // block_bytes) if b not in run.tables[0])
    ops.copy_blocks(run.context, run.kv(), heads.shape(), np.array([[source, spare]], np.int32))
    run.pool[source * block_bytes :][:block_bytes] = 0xFF
    run.tables[0, 2] = spare
    (actual,) = run.run([[(0, 20)]], stored=[40])
    np.testing.assert_array_equal(bits(actual), bits(expected[40:]))
