"""Rows of an embedding table on the device: the stored bits, widened; ids that the step before has drawn."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.reference_attention import DTYPES, ISAS, bits, make_context
from tests.ops.reference_gemm import ops as cpu
from tests.ops.reference_gemm import pack as cpu_pack
from tests.ops.reference_gemm import random_layer

from .device_ops import Device, Guarded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 7), (100, 64), (64, 577), (9, 1030), (5, 5000)])
@pytest.mark.parametrize("aligned", [True, False])
def test_rows_are_those_of_the_cpu_bit_by_bit(device: Device, dtype: str, n: int, k: int, aligned: bool) -> None:
    rng = np.random.default_rng(n)
    layer = random_layer(rng, dtype, n, k)
    ids = rng.integers(0, n, 11).astype(np.int32)
    context = make_context(ISAS[-1])
    expected = np.empty((11, k), np.float32)
    cpu.embed(context, cpu_pack(context, layer), dtype, n, ids, expected)
    out = Guarded(device, (11, k), "f32", aligned=aligned)
    on_device = device.context()
    device.ops.embed(on_device, device.pack(on_device, layer.stored, dtype), dtype, n, device.to_device(ids), out.array)
    np.testing.assert_array_equal(bits(out.get()), bits(expected))
    np.testing.assert_array_equal(bits(expected), bits(layer.values[ids]))


def test_ids_below_zero_stand_for_those_of_the_step_before(device: Device) -> None:
    layer = random_layer(np.random.default_rng(0), "bf16", 50, 24)
    previous = np.array([7, -1, 49], np.int32)  # the second row failed: token 0 stands for it
    ids = np.array([3, -1, -3, -2, 0, -1], np.int32)
    meant = [3, 7, 49, 0, 0, 7]
    out = Guarded(device, (6, 24), "f32")
    context = device.context()
    table = device.pack(context, layer.stored, "bf16")
    device.ops.embed(context, table, "bf16", 50, device.to_device(ids), out.array, device.to_device(previous))
    np.testing.assert_array_equal(bits(out.get()), bits(layer.values[meant]))


def test_every_number_of_16_bits_survives(device: Device) -> None:
    every = np.arange(65536, dtype=np.uint16).reshape(64, 1024)
    context = device.context()
    ids = device.to_device(np.arange(64, dtype=np.int32))
    out = Guarded(device, (64, 1024), "f32")
    for dtype in ("f16", "bf16"):
        stored = every.view(np.float16) if dtype == "f16" else every
        expected = stored.astype(np.float32) if dtype == "f16" else (every.astype(np.uint32) << 16).view(np.float32)
        device.ops.embed(context, device.pack(context, stored, dtype), dtype, 64, ids, out.array)
        np.testing.assert_array_equal(out.get(), expected)


def test_an_out_that_is_not_fp32_is_refused(device: Device) -> None:
    layer = random_layer(np.random.default_rng(0), "f16", 4, 8)
    context = device.context()
    table = device.pack(context, layer.stored, "f16")
    with pytest.raises(ValueError, match="out"):
        device.ops.embed(
            context, table, "f16", 4, device.to_device(np.zeros(1, np.int32)), Guarded(device, (1, 8), "f16").array
        )
