"""The gated activations on the device: against the CPU op and float64, at the ends of the range, in any company."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.reference_attention import (
    DTYPES,
    ISAS,
    UNIT_ROUNDOFF,
    activate,
    bits,
    from_dtype,
    make_context,
    rounded,
    to_dtype,
)
from tests.ops.reference_attention import ops as cpu

from .device_ops import Device, Guarded

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def run(device: Device, name: str, gate: np.ndarray, up: np.ndarray, dtype: str, *, aligned: bool = True) -> np.ndarray:
    """The result in the bits of dtype."""
    gate_up = to_dtype(np.concatenate([gate, up], axis=1), dtype)
    source = Guarded(device, gate_up.shape, dtype, gate_up, aligned=aligned)
    out = Guarded(device, gate.shape, dtype, aligned=aligned)
    device.ops.gated_activation(device.context(), name, source.array, out.array)
    np.testing.assert_array_equal(bits(source.get()), bits(gate_up))
    return out.get()


def random_case(rows: int, cols: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(cols)
    gate = rounded(rng.uniform(-20, 20, (rows, cols)), dtype)
    return gate, rounded(rng.standard_normal((rows, cols)), dtype)


def tolerance(product: np.ndarray, expected: np.ndarray, dtype: str) -> np.ndarray:
    """Relative to gate * up, since 1 + erf loses its own relative accuracy where it vanishes. The fast exponential and
    quotient of 16 bits add 2^-18 of the result at most: 2 + 1.173 |x| units in the last place for |x| <= 30 or so."""
    if dtype == "f32":
        return 8 * 2.0**-24 * np.abs(product) + 1e-37
    tiny = 2.0**-25 if dtype == "f16" else 1e-36
    return 8 * 2.0**-24 * np.abs(product) + (UNIT_ROUNDOFF[dtype] + 2.0**-18) * np.abs(expected) + tiny


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 7), (2, 24), (5, 260), (1, 4099), (2, 4104), (0, 8)])
@pytest.mark.parametrize("aligned", [True, False])
def test_activation_agrees_with_the_cpu(
    device: Device, dtype: str, name: str, rows: int, cols: int, aligned: bool
) -> None:
    gate, up = random_case(rows, cols, dtype)
    expected = np.empty_like(gate)
    cpu.gated_activation(make_context(ISAS[-1]), name, np.concatenate([gate, up], axis=1), expected)
    actual = from_dtype(run(device, name, gate, up, dtype, aligned=aligned), dtype)
    assert (np.abs(actual - expected) <= tolerance(gate * up, expected, dtype)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_agrees_with_float64(device: Device, dtype: str, name: str) -> None:
    gate = rounded(np.linspace(-30, 30, 2048).reshape(2, 1024), dtype)
    up = rounded(np.random.default_rng(0).standard_normal(gate.shape), dtype)
    actual = from_dtype(run(device, name, gate, up, dtype), dtype)
    expected = activate(name, gate) * up
    assert (np.abs(actual - expected) <= tolerance(gate.astype(np.float64) * up, expected, dtype)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_ends_of_the_range(device: Device, dtype: str, name: str) -> None:
    large = 3e4 if dtype == "f16" else 1e30
    gate = np.array([[0, -0.0, large, -large, -100, 100, np.inf, np.nan]], np.float32)
    actual = from_dtype(run(device, name, gate, np.ones_like(gate), dtype), dtype)[0]
    exact = rounded(gate, dtype)[0]
    np.testing.assert_array_equal(actual[:6], [0, 0, exact[2], 0, 0, exact[5]])
    assert actual[6] == np.inf
    assert np.isnan(actual[7])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bits_of_a_row_depend_neither_on_other_rows_nor_on_addresses(device: Device, dtype: str, name: str) -> None:
    gate, up = random_case(5, 264, dtype)
    gate[0] = np.nan
    together = run(device, name, gate, up, dtype)
    assert np.isfinite(from_dtype(together[1:], dtype)).all()
    for row in (1, 4):
        for aligned in (True, False):
            one = slice(row, row + 1)
            alone = run(device, name, gate[one], up[one], dtype, aligned=aligned)
            np.testing.assert_array_equal(bits(alone), bits(together[one]))


def test_an_out_of_another_type_is_refused(device: Device) -> None:
    gate_up, out = Guarded(device, (2, 16), "f16"), Guarded(device, (2, 8), "bf16")
    with pytest.raises(ValueError, match="out"):
        device.ops.gated_activation(device.context(), "silu", gate_up.array, out.array)
