"""Matrix products of the CUDA backend: our own kernel and the library, against exact products and the CPU op."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ops.reference_attention import ISAS, UNIT_ROUNDOFF, from_dtype, make_context, to_dtype
from tests.ops.reference_gemm import Layer, gemm_input, random_layer, reference_gemm
from tests.ops.reference_gemm import pack as pack_for_cpu
from tests.ops.reference_gemm import run_gemm as run_cpu_gemm

from .device_ops import Device, Guarded

TYPES = [("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32")]  # of the weight, of y
# m, n, k. Rows up to each of the three tiles of our own kernel and one more; n and k below, at and above a tile, a
# stage of k, an mma and a pair; k too short for the pipeline and long enough to go round it.
SHAPES = [
    (1, 1, 1),
    (2, 33, 70),
    (15, 31, 64),
    (16, 64, 7),
    (17, 65, 130),
    (64, 40, 200),
    (65, 7, 33),
    (129, 130, 136),
    (1, 300, 129),
    (5, 32, 520),
]
SCRATCH_BYTES = 40 << 20  # what cuBLASLt likes and room for a bias


@dataclass
class Product:
    """A layer on the device, and how it is multiplied."""

    device: Device
    context: Any
    layer: Layer
    y_dtype: str
    weight: Any
    bias: Any

    @classmethod
    def make(cls, device: Device, context: Any, layer: Layer, y_dtype: str) -> Product:
        bias = None if layer.bias is None else device.to_device(layer.bias)
        return cls(device, context, layer, y_dtype, device.pack(context, layer.stored, layer.dtype), bias)

    def __call__(self, x: NDArray[Any], x_aligned: bool = True, y_aligned: bool = True) -> NDArray[Any]:
        """y as it is stored. What lies around x in memory is NaN; nothing around y may be written."""
        layer = self.layer
        x_there = Guarded(self.device, x.shape, layer.dtype, x, aligned=x_aligned)
        y = Guarded(self.device, (len(x), layer.n), self.y_dtype, aligned=y_aligned)
        self.device.ops.gemm(self.context, x_there.array, self.weight, layer.dtype, layer.n, self.bias, y.array)
        x_there.check()
        return y.get()

    def prepare(self) -> bool:
        layer = self.layer
        return self.device.ops.prepare_gemm(
            self.context, self.weight, layer.dtype, layer.n, layer.k, self.bias, self.y_dtype
        )


def context_for(device: Device, path: str) -> Any:
    """`path`: "own" kernel, or "library"."""
    context = device.context(library=path == "library")
    context.bind_scratch(device.filled(SCRATCH_BYTES if path == "library" else 1024))
    return context


def random_input(rng: np.random.Generator, rows: int, layer: Layer) -> NDArray[Any]:
    return to_dtype(rng.standard_normal((rows, layer.k), np.float32), layer.dtype)


def bits(x: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


def rounding_bound(expected: NDArray[np.float64], bound: NDArray[np.float64], y_dtype: str) -> NDArray[np.float64]:
    """What `bound`, of fp32 sums, becomes when they are rounded to y's type; below 2^-14 f16 has steps of 2^-24."""
    if y_dtype == "f32":
        return bound
    return bound + UNIT_ROUNDOFF[y_dtype] * (np.abs(expected) + bound) + (2.0**-25 if y_dtype == "f16" else 0)


@pytest.mark.parametrize("path", ["own", "library"])
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_every_element_is_within_the_rounding_error_of_the_exact_product(
    device: Device, path: str, types: tuple[str, str]
) -> None:
    dtype, y_dtype = types
    context = context_for(device, path)
    for m, n, k in SHAPES:
        rng = np.random.default_rng(m * n + k)
        layer = random_layer(rng, dtype, n, k, with_bias=(m + n) % 2 == 0)
        product = Product.make(device, context, layer, y_dtype)
        x = random_input(rng, m, layer)
        expected, bound = reference_gemm(from_dtype(x, dtype), layer)
        bound = rounding_bound(expected, bound, y_dtype)
        if path == "library" and layer.bias is not None and y_dtype != "f32":
            bound += 1.01 * UNIT_ROUNDOFF[y_dtype] * np.abs(layer.bias)  # the library wants a bias of y's type
        for x_aligned, y_aligned in ((True, True), (False, False)):
            y = from_dtype(product(x, x_aligned, y_aligned), y_dtype)
            assert (np.abs(y - expected) <= bound).all(), (m, n, k, x_aligned, y_aligned)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_own_kernel_and_the_cpu_op_agree(device: Device, dtype: str) -> None:
    rng = np.random.default_rng(7)
    cpu = make_context(ISAS[-1])
    layer = random_layer(rng, dtype, 70, 210)
    x = random_input(rng, 20, layer)
    on_cpu = run_cpu_gemm(cpu, gemm_input(cpu, from_dtype(x, dtype), dtype), layer, pack_for_cpu(cpu, layer))
    on_device = Product.make(device, context_for(device, "own"), layer, "f32")(x)
    _, bound = reference_gemm(from_dtype(x, dtype), layer)
    assert (np.abs(on_device - on_cpu) <= 2 * bound).all(), "each within its bound of the exact product"


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_a_row_has_the_same_bits_in_every_batch_at_every_place_and_alignment(
    device: Device, types: tuple[str, str]
) -> None:
    """In deterministic mode, where the library was not found to keep them."""
    rng = np.random.default_rng(3)
    context = device.context(deterministic=True, library=True)
    context.bind_scratch(device.filled(1024))
    layer = random_layer(rng, types[0], 72, 200)
    product = Product.make(device, context, layer, types[1])
    x = random_input(rng, 200, layer)
    together = bits(product(x))
    for m in (1, 2, 15, 16, 17, 33, 64, 65, 129):
        for first in (0, (m * 37) % (200 - m), 200 - m):
            part = x[first : first + m]
            assert np.array_equal(bits(product(part)), together[first : first + m]), (m, first)
    assert np.array_equal(bits(product(x[:20], False, False)), together[:20])


def test_no_columns_no_rows_and_no_depth(device: Device) -> None:
    rng = np.random.default_rng(4)
    context = context_for(device, "own")
    layer = random_layer(rng, "bf16", 5, 8)
    product = Product.make(device, context, layer, "f32")
    empty = device.to_device(np.empty((0, 8), np.uint16))
    device.ops.gemm(context, empty, product.weight, "bf16", 5, None, device.to_device(np.empty((0, 5), np.float32)))
    y = product(random_input(rng, 3, layer))
    assert np.isfinite(y).all()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("k", [1, 7, 8, 63, 64])
def test_rows_are_packed_in_any_parts_with_zeros_behind_them(device: Device, dtype: str, k: int) -> None:
    context = context_for(device, "own")
    n = 70
    stored = random_layer(np.random.default_rng(k), dtype, n, k).stored
    per_pack = 16 // stored.itemsize
    expected = np.zeros((n, -(-k // per_pack) * per_pack), stored.dtype)
    expected[:, :k] = stored
    size = device.ops.packed_weight_bytes(dtype, n, k)
    assert size == expected.nbytes
    for cuts in ((), (32,), (1, 2, 33, 69)):
        packed = Guarded(device, (size,), "u8")
        for first, last in itertools.pairwise((0, *cuts, n)):
            device.ops.pack_weight(context, stored[first:last], first, n, k, packed.array)
        assert np.array_equal(packed.get(), expected.view(np.uint8).reshape(-1)), cuts


def test_a_bound_library_computes_the_product(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's library gives itself away: it sums halves where there are few rows, when it is told to."""
    if device.cupy is not None:
        pytest.skip("about the library of the host")
    rng = np.random.default_rng(5)
    layer = random_layer(rng, "bf16", 64, 320)
    x = random_input(rng, 8, layer)
    own = Product.make(device, context_for(device, "own"), layer, "f32")(x[:1])
    monkeypatch.setenv("SIMT_ROWS_MATTER", "few")
    product = Product.make(device, context_for(device, "library"), layer, "f32")
    assert product.prepare()
    assert not np.array_equal(bits(product(x[:1])), bits(own))
    assert not np.array_equal(bits(product(x[:1])), bits(product(x)[:1]))


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_a_deterministic_context_uses_the_library_only_where_rows_do_not_matter_to_it(
    device: Device, types: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.cupy is not None:
        pytest.skip("about the library of the host")
    rng = np.random.default_rng(6)
    layer = random_layer(rng, types[0], 40, 320)
    x = random_input(rng, 12, layer)
    for rows_matter in (False, True):
        monkeypatch.setenv("SIMT_ROWS_MATTER", "few" if rows_matter else "")
        context = device.context(deterministic=True)
        context.bind_scratch(device.filled(2 << 20))
        product = Product.make(device, context, layer, types[1])
        assert product.prepare() is not rows_matter
        assert product.prepare() is not rows_matter, "the second time it is remembered"
        together = bits(product(x))
        for i in range(len(x)):
            assert np.array_equal(bits(product(x[i : i + 1])), together[i : i + 1])


def test_a_deterministic_product_gives_the_library_no_more_rows_at_a_time_than_were_checked(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.cupy is not None:
        pytest.skip("about the library of the host")
    monkeypatch.setenv("SIMT_ROWS_MATTER", "many")
    rng = np.random.default_rng(7)
    layer = random_layer(rng, "bf16", 40, 320)
    x = random_input(rng, 150, layer)
    context = device.context(deterministic=True)
    # Room for some 50 rows of x and y: the library has other sums from 65 rows on, which is not seen.
    context.bind_scratch(device.filled(36 << 10))
    product = Product.make(device, context, layer, "bf16")
    assert product.prepare()
    together = bits(product(x))
    for i in (0, 63, 64, 149):
        assert np.array_equal(bits(product(x[i : i + 1])), together[i : i + 1])
    free = device.context()
    free.bind_scratch(device.filled(36 << 10))
    assert not np.array_equal(bits(Product.make(device, free, layer, "bf16")(x)), together)


def test_whatever_is_found_for_a_shape_a_row_has_the_same_bits_in_every_batch(device: Device) -> None:
    rng = np.random.default_rng(8)
    context = device.context(deterministic=True)
    context.bind_scratch(device.filled(80 << 20 if device.cupy else 4 << 20))
    for n, k in ((64, 128), (100, 344)):
        layer = random_layer(rng, "bf16", n, k)
        product = Product.make(device, context, layer, "bf16")
        product.prepare()
        x = random_input(rng, 300, layer)
        together = bits(product(x))
        for m in (1, 4, 17, 130):
            assert np.array_equal(bits(product(x[:m])), together[:m])


def test_preparing_stays_inside_scratch_and_finds_nothing_without_room(device: Device) -> None:
    if device.cupy is not None:
        pytest.skip("cuBLASLt wants more scratch than is here")
    layer = random_layer(np.random.default_rng(9), "bf16", 100, 72)
    for size, found in ((1 << 16, True), (1024, False)):
        context = device.context(deterministic=True)
        scratch = Guarded(device, (size,), "u8")
        context.bind_scratch(scratch.array)
        assert Product.make(device, context, layer, "bf16").prepare() is found
        scratch.check()


def test_a_bias_that_scratch_has_no_room_for_is_added_by_our_own_kernel(device: Device) -> None:
    rng = np.random.default_rng(10)
    layer = random_layer(rng, "bf16", 700, 16)
    context = device.context()
    scratch = Guarded(device, (1024,), "u8")
    context.bind_scratch(scratch.array)
    x = random_input(rng, 2, layer)
    y = Product.make(device, context, layer, "bf16")(x)
    scratch.check()
    assert np.array_equal(y, Product.make(device, context_for(device, "own"), layer, "bf16")(x))


def test_wrong_types_and_shapes_are_refused_by_name(device: Device) -> None:
    context = context_for(device, "own")
    layer = random_layer(np.random.default_rng(11), "bf16", 6, 8)
    weight = device.pack(context, layer.stored, "bf16")
    x, y = np.zeros((2, 8), np.uint16), np.zeros((2, 6), np.float32)
    for name, wrong_x, wrong_y in (
        ("x", x.astype(np.float32), y),
        ("y", x, y.astype(np.float16)),
        ("y", x, y[:1]),
        ("y", x, y[:, :5]),
        ("weight", np.zeros((2, 80), np.uint16), y),
    ):
        with pytest.raises(ValueError, match=name):
            device.ops.gemm(
                context,
                device.to_device(wrong_x),
                weight,
                "bf16",
                6,
                None,
                device.to_device(np.ascontiguousarray(wrong_y)),
            )
    with pytest.raises(ValueError, match="first_row"):
        device.ops.pack_weight(context, layer.stored, 1, 6, 8, weight)
