"""add_rms_norm on the device: against the CPU op, and row by row the same bits in any company and at any address."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.reference_attention import DTYPES, ISAS, UNIT_ROUNDOFF, bits, from_dtype, make_context, to_dtype
from tests.ops.reference_attention import ops as cpu

from .device_ops import Device, Guarded

EPS = 1e-5
# Below, at and above what divides by four; then rows of which a thread keeps 1, 2 and 4 times four elements, the last
# also with more threads, and one that no registers hold.
COLUMNS = (1, 7, 16, 100, 577, 2048, 2060, 5000, 8200, 16400)


def norm(
    device: Device,
    residual: np.ndarray,
    delta: np.ndarray | None,
    weight: np.ndarray,
    dtype: str,
    *,
    aligned: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """The residual afterwards, and the normed rows in the bits of dtype."""
    x = Guarded(device, residual.shape, "f32", residual, aligned=aligned)
    d = None if delta is None else Guarded(device, delta.shape, dtype, delta, aligned=aligned)
    w = Guarded(device, weight.shape, "f32", weight, aligned=aligned)
    out = Guarded(device, residual.shape, dtype, aligned=aligned)
    device.ops.add_rms_norm(device.context(), x.array, None if d is None else d.array, w.array, EPS, out.array)
    if d is not None:
        np.testing.assert_array_equal(bits(d.get()), bits(delta))
    return x.get(), out.get()


def random_case(cols: int, rows: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(cols)
    residual = (rng.standard_normal((rows, cols)) * 10.0 ** rng.integers(-3, 4, (rows, 1))).astype(np.float32)
    return residual, to_dtype(rng.standard_normal((rows, cols)), dtype), rng.standard_normal(cols).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", COLUMNS)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("has_delta", [True, False])
def test_norm_agrees_with_the_cpu(device: Device, dtype: str, cols: int, aligned: bool, has_delta: bool) -> None:
    residual, delta, weight = random_case(cols, 3, dtype)
    expected_residual, expected = residual.copy(), np.empty_like(residual)
    widened = from_dtype(delta, dtype) if has_delta else None
    cpu.add_rms_norm(make_context(ISAS[-1]), expected_residual, widened, weight, EPS, expected)
    actual_residual, actual = norm(device, residual, delta if has_delta else None, weight, dtype, aligned=aligned)
    np.testing.assert_array_equal(bits(actual_residual), bits(expected_residual))
    # Sums of squares in two orders, a root, a quotient and two products, in fp32; then one rounding to dtype.
    rtol = 8 * 2.0**-24 + (0 if dtype == "f32" else UNIT_ROUNDOFF[dtype])
    atol = 2.0**-25 if dtype == "f16" else 1e-38
    np.testing.assert_allclose(from_dtype(actual, dtype), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [100, 576, 5000, 16400])
def test_bits_of_a_row_depend_neither_on_other_rows_nor_on_addresses(device: Device, dtype: str, cols: int) -> None:
    residual, delta, weight = random_case(cols, 5, dtype)
    together_residual, together = norm(device, residual, delta, weight, dtype)
    for row in (0, 4):
        for aligned in (True, False):
            one = slice(row, row + 1)
            alone_residual, alone = norm(device, residual[one], delta[one], weight, dtype, aligned=aligned)
            np.testing.assert_array_equal(bits(alone_residual), bits(together_residual[one]))
            np.testing.assert_array_equal(bits(alone), bits(together[one]))


@pytest.mark.parametrize("cols", [64, 65])
def test_a_row_with_nan_spoils_only_itself(device: Device, cols: int) -> None:
    residual, delta, weight = random_case(cols, 3, "f32")
    residual[1, 5] = np.nan
    _, out = norm(device, residual, delta, weight, "f32")
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


def test_no_rows_are_no_error(device: Device) -> None:
    residual, delta, weight = random_case(64, 0, "bf16")
    x, out = norm(device, residual, delta, weight, "bf16")
    assert x.shape == out.shape == (0, 64)


def test_a_delta_of_another_type_than_out_is_refused(device: Device) -> None:
    x, d, out = (Guarded(device, (2, 8), dtype) for dtype in ("f32", "f16", "bf16"))
    weight = device.to_device(np.ones(8, np.float32))
    with pytest.raises(ValueError, match="delta"):
        device.ops.add_rms_norm(device.context(), x.array, d.array, weight, EPS, out.array)
