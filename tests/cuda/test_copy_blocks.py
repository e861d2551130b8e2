"""copy_blocks on the device: as if one pair after another, whatever blocks they share, and nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest

from .device_ops import NUMPY_DTYPE, Device, Guarded

# (kv heads, head_dim, block_size): less than a piece, several pieces, part of a piece, bytes that 16 does not divide.
SHAPES = ((1, 16, 16), (8, 64, 16), (3, 80, 32), (1, 3, 1))

CHAINS = {
    "none": [],
    "apart": [[0, 5], [3, 1], [2, 4]],
    "one source": [[0, 5], [0, 1], [0, 2]],
    "read after written": [[0, 5], [3, 1], [1, 2], [4, 4]],
    "written after read": [[0, 5], [3, 0], [2, 3]],
    "written twice": [[0, 5], [1, 5], [2, 4], [2, 4]],
    "swapped through a third": [[0, 6], [1, 0], [6, 1]],
    "round and round": [[0, 1], [1, 0], [0, 2], [3, 3]],
    "two chains": [[0, 1], [4, 5], [1, 2], [5, 6]],
}


def check(
    device: Device,
    dtype: str,
    shape: tuple[int, int, int],
    num_blocks: int,
    pairs: np.ndarray,
    *,
    aligned: bool = True,
) -> None:
    kv_heads, head_dim, block_size = shape
    heads = device.ops.AttentionShape(
        num_heads=kv_heads, num_kv_heads=kv_heads, head_dim=head_dim, rotary_dim=0, scale=1.0
    )
    block_bytes = device.ops.kv_block_bytes(dtype, block_size, heads)
    before = np.random.default_rng(len(pairs)).integers(0, 256, (num_blocks, block_bytes), np.uint8)
    items = before.view(NUMPY_DTYPE[dtype]).ravel()
    blocks = Guarded(device, items.shape, dtype, items, aligned=aligned)
    kv = device.ops.KvLayer(blocks.array.view(np.uint8), dtype, num_blocks, block_size)
    device.ops.copy_blocks(device.context(), kv, heads, device.to_device(pairs))
    expected = before.copy()
    for source, destination in pairs:
        expected[destination] = expected[source]
    np.testing.assert_array_equal(blocks.get().view(np.uint8).reshape(before.shape), expected)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pairs", CHAINS.values(), ids=list(CHAINS))
def test_pairs_are_copied_in_order(device: Device, dtype: str, shape: tuple[int, int, int], pairs: list) -> None:
    check(device, dtype, shape, 7, np.array(pairs, np.int32).reshape(-1, 2))


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_blocks_may_lie_anywhere(device: Device, dtype: str) -> None:
    check(device, dtype, (2, 16, 16), 7, np.array([[0, 5], [3, 1], [1, 2]], np.int32), aligned=False)


@pytest.mark.parametrize("seed", range(8))
def test_random_pairs(device: Device, seed: int) -> None:
    rng = np.random.default_rng(seed)
    check(device, "bf16", (1, 16, 16), 6, rng.integers(0, 6, (rng.integers(2, 9), 2)).astype(np.int32))


@pytest.mark.parametrize("last", [[600, 601], [7, 8]], ids=["apart", "in order"])
def test_more_pairs_than_a_block_has_threads(device: Device, last: list[int]) -> None:
    pairs = np.append(np.arange(600, dtype=np.int32).reshape(300, 2), np.array([last], np.int32), axis=0)
    check(device, "bf16", (1, 16, 1), 602, pairs)
