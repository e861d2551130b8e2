"""add_rms_norm and gather_rows: against float64, and row by row the same bits whatever else is in the call."""

from __future__ import annotations

import numpy as np
import pytest

from .reference_attention import DTYPES, ISAS, NUMPY_DTYPE, UNIT_ROUNDOFF, bits, from_dtype, make_context, ops, rms_norm

EPS = 1e-5


def guarded(rows: int, cols: int, dtype: str, fill: int = 77) -> np.ndarray:
    return np.full((rows + 1, cols + 3), fill, NUMPY_DTYPE[dtype])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 7, 16, 64, 100, 576, 2053])
@pytest.mark.parametrize("has_delta", [False, True])
def test_norm_agrees_with_the_reference(isa: str, dtype: str, cols: int, has_delta: bool) -> None:
    rng = np.random.default_rng(cols)
    rows = 3
    residual, delta = guarded(rows, cols, "f32"), guarded(rows, cols, "f32", 5)
    residual[:rows, :cols] = rng.standard_normal((rows, cols)) * [[1e-3], [1], [1e4]]
    delta[:rows, :cols] = rng.standard_normal((rows, cols))
    weight = rng.standard_normal(cols).astype(np.float32)
    total = residual[:rows, :cols] + delta[:rows, :cols] if has_delta else residual[:rows, :cols].copy()
    out = guarded(rows, cols, dtype)
    ops.add_rms_norm(
        make_context(isa),
        residual[:rows, :cols],
        delta[:rows, :cols] if has_delta else None,
        weight,
        EPS,
        out[:rows, :cols],
    )
    np.testing.assert_array_equal(residual[:rows, :cols], total)
    expected = rms_norm(total, weight, EPS)
    tolerance = 8 * 2.0**-24 + (0 if dtype == "f32" else UNIT_ROUNDOFF[dtype])
    tiny = 2.0**-25 if dtype == "f16" else 1e-38
    np.testing.assert_allclose(from_dtype(out[:rows, :cols], dtype), expected, rtol=tolerance, atol=tiny)
    for buffer, fill in ((residual, 77), (out, 77), (delta, 5)):
        assert (buffer[rows] == fill).all()
        assert (buffer[:, cols:] == fill).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cols", [100, 576])
def test_bits_of_a_normed_row_do_not_depend_on_rows_threads_or_alignment(isa: str, cols: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, cols)).astype(np.float32)
    delta = rng.standard_normal((300, cols)).astype(np.float32)
    weight = rng.standard_normal(cols).astype(np.float32)
    together = np.empty_like(x)
    ops.add_rms_norm(make_context(isa, 3), x.copy(), delta, weight, EPS, together)
    for row in (0, 7, 299):
        shifted = np.zeros((1, cols + 1), np.float32)
        shifted[0, 1:] = x[row]
        alone = np.empty((1, cols), np.float32)
        ops.add_rms_norm(make_context(isa), shifted[:, 1:], delta[row : row + 1], weight, EPS, alone)
        np.testing.assert_array_equal(bits(alone[0]), bits(together[row]))


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_with_nan_spoils_only_itself(isa: str) -> None:
    x = np.ones((3, 64), np.float32)
    x[1, 5] = np.nan
    out = np.empty_like(x)
    ops.add_rms_norm(make_context(isa), x, None, np.ones(64, np.float32), EPS, out)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cols", "count"), [(1, 3), (7, 1), (576, 200)])
def test_gather_copies_the_chosen_rows_and_nothing_else(dtype: str, cols: int, count: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 1000, (50, cols + 2)).astype(NUMPY_DTYPE[dtype])[:, :cols]
    chosen = rng.integers(0, 50, count).astype(np.int32)
    out = guarded(count, cols, dtype)
    ops.gather_rows(make_context(ISAS[-1], 2), x, chosen, out[:count, :cols])
    np.testing.assert_array_equal(out[:count, :cols], x[chosen])
    assert (out[count] == 77).all()
    assert (out[:, cols:] == 77).all()
