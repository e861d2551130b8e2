"""The gated activations: against float64, at the ends of the range, and the same bits in any company."""

from __future__ import annotations

import numpy as np
import pytest

from .reference_attention import DTYPES, ISAS, NUMPY_DTYPE, UNIT_ROUNDOFF, activate, bits, from_dtype, make_context, ops

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def run(isa: str, name: str, gate: np.ndarray, up: np.ndarray, dtype: str = "f32", threads: int = 1) -> np.ndarray:
    out = np.empty(gate.shape, NUMPY_DTYPE[dtype])
    ops.gated_activation(make_context(isa, threads), name, np.concatenate([gate, up], axis=1), out)
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_agrees_with_the_reference(isa: str, dtype: str, name: str) -> None:
    """Relative to x * up, since 1 + erf (and 1 + tanh) lose their own relative accuracy where they vanish."""
    gate = np.linspace(-30, 30, 4 * 1003, dtype=np.float32).reshape(4, 1003)
    up = np.random.default_rng(0).standard_normal(gate.shape).astype(np.float32)
    actual = from_dtype(run(isa, name, gate, up, dtype), dtype)
    expected = activate(name, gate) * up
    tolerance = 4 * 2.0**-24 * np.abs(gate * up) + 1e-37
    if dtype != "f32":
        tolerance = tolerance + UNIT_ROUNDOFF[dtype] * np.abs(expected) + (2.0**-25 if dtype == "f16" else 0)
    assert (np.abs(actual - expected) <= tolerance).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_sigmoid_forms_are_relatively_exact_for_negative_inputs(isa: str, name: str) -> None:
    gate = -np.linspace(0.01, 5, 997, dtype=np.float32)[None]
    actual = run(isa, name, gate, np.ones_like(gate))
    np.testing.assert_allclose(actual, activate(name, gate), rtol=1e-5 if name == "gelu_tanh" else 1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_ends_of_the_range_give_x_or_zero(isa: str, name: str) -> None:
    gate = np.array([[0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0, 1e6, -1e6, np.nan]], np.float32)
    actual = run(isa, name, gate, np.ones_like(gate))[0]
    assert (actual[:2] == 0).all()
    assert actual[4] == 100
    assert actual[6] == 1e6
    assert abs(actual[5]) < 1e-40
    assert abs(actual[7]) < 1e-40
    assert np.isnan(actual[8])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bits_of_an_element_do_not_depend_on_its_place(isa: str, name: str) -> None:
    """Not on its row, its column (also in the tail of a vector), or the threads."""
    rng = np.random.default_rng(2)
    gate, up = rng.standard_normal((2, 90, 333)).astype(np.float32) * 3
    whole = run(isa, name, gate, up, threads=3)
    for begin, end in ((0, 1), (5, 12), (300, 333), (17, 332)):
        part = run(isa, name, gate[40:41, begin:end], up[40:41, begin:end])
        np.testing.assert_array_equal(bits(part[0]), bits(whole[40, begin:end]))


def test_columns_and_rows_beyond_out_are_untouched() -> None:
    gate_up = np.random.default_rng(3).standard_normal((3, 2 * 37)).astype(np.float32)
    out = np.full((4, 40), 77, np.float32)
    ops.gated_activation(make_context(ISAS[-1]), "silu", gate_up, out[:3, :37])
    assert (out[3] == 77).all()
    assert (out[:, 37:] == 77).all()
    assert (out[:3, :37] != 77).all()
