"""Conversion between float32, float16 and bfloat16 arrays; bfloat16 travels as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def to_float32(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """The values of an array whose items are `dtype`, exactly."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.view(np.dtype(dtype)).astype(np.float32)


def from_float32(array: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Rounded to nearest, ties to even. NaN stays NaN."""
    if dtype == "float32":
        return array
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return array.astype(np.float16)
    bits = array.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)


def convert(array: npt.NDArray[Any], source: str, target: str) -> npt.NDArray[Any]:
    """`array` with items of `target`; the same array when they are that already."""
    return array if source == target else from_float32(to_float32(array, source), target)
