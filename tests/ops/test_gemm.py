"""Packed linear layers: right within the rounding of fp32, and the bits of a row never depend on the batch."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine import _cpu

from .reference_attention import aligned_bytes, make_context, to_dtype
from .reference_gemm import DTYPES, gemm_input, input_values, ops, pack, random_layer, reference_gemm, run_gemm

# n and k below, at and above multiples of the panel width, of every vector width, and of a pair; several blocks of k.
SHAPES = ((1, 1), (7, 2), (31, 3), (32, 64), (33, 31), (96, 576), (100, 577), (160, 1536), (70, 1001))
ROWS = (*range(1, 41), 64, 257)


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_row_is_within_the_rounding_error_of_the_exact_product(isa: str, dtype: str, n: int, k: int) -> None:
    rng = np.random.default_rng(n * 1000 + k)
    context = make_context(isa, 2)
    layer = random_layer(rng, dtype, n, k, with_bias=n % 2 == 0)
    packed = pack(context, layer)
    x = gemm_input(context, rng.standard_normal((40, k), np.float32), dtype)
    expected, bound = reference_gemm(input_values(context, x, dtype), layer)
    for m in (1, 2, 3, 5, 12, 13, 40):
        assert (np.abs(run_gemm(context, x[:m], layer, packed) - expected[:m]) <= bound[:m]).all(), m


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), ((100, 577), (32, 1536)))
def test_a_row_has_the_same_bits_in_every_batch_and_at_every_place(isa: str, dtype: str, n: int, k: int) -> None:
    rng = np.random.default_rng(k)
    context = make_context(isa, 2)
    layer = random_layer(rng, dtype, n, k)
    packed = pack(context, layer)
    x = gemm_input(context, rng.standard_normal((max(ROWS), k), np.float32), dtype)
    alone = np.concatenate([run_gemm(context, x[i : i + 1], layer, packed) for i in range(len(x))])
    for m in ROWS:
        start = (m * 37) % (len(x) - m + 1)
        batch = run_gemm(context, x[start : start + m], layer, packed)
        assert np.array_equal(bits(batch), bits(alone[start : start + m])), m


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", (1, 2, 30, 257))
def test_bits_do_not_depend_on_the_number_of_threads(isa: str, dtype: str, m: int) -> None:
    rng = np.random.default_rng(m)
    layer = random_layer(rng, dtype, 200, 130)
    contexts = [make_context(isa, threads) for threads in (1, 2, 3, 7)]
    packed = [pack(context, layer) for context in contexts]
    x = gemm_input(contexts[0], rng.standard_normal((m, 130), np.float32), dtype)
    results = [run_gemm(context, x, layer, weight) for context, weight in zip(contexts, packed, strict=True)]
    for weight, result in zip(packed[1:], results[1:], strict=True):
        assert np.array_equal(weight, packed[0])
        assert np.array_equal(bits(result), bits(results[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", (64, 65))
@pytest.mark.parametrize("cuts", ((32,), (32, 96), (16, 48), (1, 2, 33, 69), (5,)))
def test_a_weight_packed_in_parts_equals_the_weight_packed_whole(dtype: str, k: int, cuts: tuple[int, ...]) -> None:
    context = make_context(_cpu.ops.supported_isas()[-1], 2)
    layer = random_layer(np.random.default_rng(k), dtype, 110, k)
    assert np.array_equal(pack(context, layer, cuts), pack(context, layer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", (63, 64))
def test_nan_in_the_padding_of_x_and_in_other_rows_does_not_leak(isa: str, dtype: str, k: int) -> None:
    rng = np.random.default_rng(k)
    context = make_context(isa, 1)
    layer = random_layer(rng, dtype, 70, k)
    packed = pack(context, layer)
    clean = gemm_input(context, rng.standard_normal((20, k), np.float32), dtype)
    padded = to_dtype(np.full((20, k + 9), np.nan, np.float32), context.activation_types(dtype)[1])
    padded[:, :k] = clean
    padded[7] = padded[0, -1]
    expected = run_gemm(context, clean, layer, packed)
    for rows in (slice(0, 20), slice(0, 8), slice(7, 9)):
        result = run_gemm(context, padded[rows, :k], layer, packed)
        sick = np.arange(20)[rows] == 7
        assert np.isnan(result[sick]).all()
        assert np.array_equal(bits(result[~sick]), bits(expected[rows][~sick]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_is_added_once_to_the_finished_sum(isa: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    context = make_context(isa, 1)
    layer = random_layer(rng, dtype, 40, 1100)  # several blocks of k
    bare = type(layer)(layer.dtype, layer.stored, layer.values, None)
    packed = pack(context, layer)
    x = gemm_input(context, rng.standard_normal((30, 1100), np.float32), dtype)
    for rows in (1, 30):
        with_bias, without = (run_gemm(context, x[:rows], which, packed) for which in (layer, bare))
        assert np.array_equal(bits(with_bias), bits(without + layer.bias))


def test_no_rows_is_no_work(isa: str) -> None:
    context = make_context(isa, 2)
    layer = random_layer(np.random.default_rng(0), "f32", 40, 8)
    assert run_gemm(context, np.zeros((0, 8), np.float32), layer, pack(context, layer)).shape == (0, 40)


def test_dot_product_instructions_take_bf16_and_everything_else_fp32(isa: str) -> None:
    context = make_context(isa, 1)
    expected = {"f32": "f32", "f16": "f32", "bf16": "bf16" if isa == "avx512bf16" else "f32"}
    for dtype, gemm_type in expected.items():
        assert context.activation_types(dtype) == ("f32", gemm_type, dtype)


def test_wrong_types_shapes_and_strides_are_refused_by_name() -> None:
    context = make_context("base" if "base" in ops.supported_isas() else "neon", 1)
    layer = random_layer(np.random.default_rng(0), "f32", 40, 8)
    packed = pack(context, layer)
    x, y = np.zeros((2, 8), np.float32), np.zeros((2, 40), np.float32)
    cases = (
        ("x", x.astype(np.float64), packed, y),
        ("x", x.astype(np.float16), packed, y),
        ("x", x[:, ::2], packed, y),
        ("y", x, packed, y[:1]),
        ("y", x, packed, y.astype(np.float16)),
        ("weight", x[:, :7], packed, y),
        ("weight", x, packed[:-1], y),
        ("aligned", x, aligned_bytes(len(packed) + 1)[1:], y),
    )
    for name, bad_x, bad_packed, bad_y in cases:
        with pytest.raises(ValueError, match=name):
            ops.gemm(context, bad_x, bad_packed, "f32", 40, None, bad_y)
    with pytest.raises(ValueError, match="first_row"):
        ops.pack_weight(context, layer.stored, 1, 40, 8, packed)
    y.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ops.gemm(context, x, packed, "f32", 40, None, y)


def test_the_environment_variable_forces_an_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENGINE_CPU_ISA", isa)
    assert _cpu.Context(1).isa == isa


@pytest.mark.parametrize("name", ("avx1024", "AVX2", " avx2"))
def test_an_unknown_instruction_set_is_an_error_that_lists_the_known_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYENGINE_CPU_ISA", name)
    with pytest.raises(ValueError, match=ops.supported_isas()[0]):
        _cpu.Context(1)
    with pytest.raises(ValueError, match="isa"):
        _cpu.Context(1, name)
