"""NumPy reference, in float64, of packed linear layers, with a rigorous bound of the rounding error; no speed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyengine import _cpu

from .reference_attention import aligned_bytes, from_dtype, to_dtype

ops = _cpu.ops
DTYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Layer:
    """A weight [n, k] as the ops take it (`stored`), what it stands for (`values`, float32), and a bias or None."""

    dtype: str
    stored: NDArray
    values: NDArray[np.float32]
    bias: NDArray[np.float32] | None

    @property
    def n(self) -> int:
        return self.values.shape[0]

    @property
    def k(self) -> int:
        return self.values.shape[1]


def random_layer(rng: np.random.Generator, dtype: str, n: int, k: int, with_bias: bool = True) -> Layer:
    stored = to_dtype(rng.standard_normal((n, k), np.float32), dtype)
    return Layer(dtype, stored, from_dtype(stored, dtype), rng.standard_normal(n, np.float32) if with_bias else None)


def pack(context: _cpu.Context, layer: Layer, cuts: tuple[int, ...] = ()) -> NDArray[np.uint8]:
    """The packed weight, written in parts that begin at 0 and at each of `cuts`. Its bytes are 0xff (NaN) before."""
    size = ops.packed_weight_bytes(layer.dtype, layer.n, layer.k)
    guard = 256
    buffer = aligned_bytes(size + guard, fill=0xFF)
    edges = (0, *cuts, layer.n)
    for first, last in itertools.pairwise(edges):
        ops.pack_weight(context, layer.stored[first:last], first, layer.n, layer.k, buffer[:size])
    assert (buffer[size:] == 0xFF).all(), "packing wrote behind its buffer"
    return buffer[:size]


def gemm_input(context: _cpu.Context, x: NDArray[np.float32], dtype: str) -> NDArray:
    """x in the type the context wants before a layer whose weights are `dtype`."""
    return to_dtype(x, context.activation_types(dtype)[1])


def input_values(context: _cpu.Context, x: NDArray, dtype: str) -> NDArray[np.float32]:
    return from_dtype(x, context.activation_types(dtype)[1])


def run_gemm(context: _cpu.Context, x: NDArray, layer: Layer, packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """y [m, n], computed into a buffer of NaN with guard rows and columns around it, which must stay as they are."""
    m = x.shape[0]
    guarded = np.full((m + 2, layer.n + 19), np.nan, np.float32)
    before = guarded.view(np.uint32).copy()
    y = guarded[1 : m + 1, 3 : 3 + layer.n]
    ops.gemm(context, x, packed, layer.dtype, layer.n, layer.bias, y)
    result = y.copy()
    y[:] = np.nan
    assert np.array_equal(guarded.view(np.uint32), before), "gemm wrote outside y"
    return result


def reference_gemm(x: NDArray[np.float32], layer: Layer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(y, bound): the exact product and sum, and the most that k + 1 roundings to fp32 of each product and partial sum
    can be off (N. Higham, Accuracy and Stability of Numerical Algorithms, section 3.1)."""
    x64, w64 = x.astype(np.float64), layer.values.astype(np.float64)
    bias = np.zeros(layer.n) if layer.bias is None else layer.bias.astype(np.float64)
    return x64 @ w64.T + bias, (layer.k + 2) * 2.0**-24 * (np.abs(x64) @ np.abs(w64).T + np.abs(bias))
