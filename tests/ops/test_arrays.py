"""What the CPU's bindings take for an array, and what they refuse by the argument's name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyengine import _cpu

from .reference_attention import aligned_bytes, ops


def test_read_matrix_copies_rows_that_lie_apart() -> None:
    x = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    np.testing.assert_array_equal(ops.read_matrix(_cpu.Context(1), x[1:3, 2:7]), x[1:3, 2:7])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([[1.0]], "is of type list; it must be a NumPy array"),
        (np.zeros((2, 2), ">f4"), "has another byte order"),
        (np.zeros((2, 2)), "has a dtype that is not float32, float16, or uint16 for bf16"),
        (np.zeros(2, np.float32), "must have 2 dimensions, has 1"),
        (np.zeros((2, 4), np.float32)[:, ::2], "has rows that are not contiguous"),
        (np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (2, 2), (4, 4)), "has rows that overlap"),
        (aligned_bytes(17)[1:].view(np.float32).reshape(2, 2), "is not aligned to 4 bytes"),
    ],
)
def test_what_is_no_matrix_is_refused(x: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"argument 'x' {message}"):
        ops.read_matrix(_cpu.Context(1), x)


def test_rows_of_another_byte_order_are_not_packed() -> None:
    packed = aligned_bytes(ops.packed_weight_bytes("f32", 2, 2), fill=7)
    for rows, message in ((np.ones((2, 2), ">f4"), "another byte order"), ([[1.0]], "must be a NumPy array")):
        with pytest.raises(ValueError, match=f"argument 'rows' .*{message}"):
            ops.pack_weight(_cpu.Context(1), rows, 0, 2, 2, packed)
    assert (packed == 7).all()
