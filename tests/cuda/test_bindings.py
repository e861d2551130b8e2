"""What the bindings of the CUDA backend accept and refuse."""

from __future__ import annotations

import numpy as np
import pytest

from .device_ops import Device, Guarded


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_read_matrix_widens_every_type_exactly(device: Device, dtype: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((5, 7)).astype(np.float32)
    stored = {
        "f32": values,
        "f16": values.astype(np.float16),
        "bf16": (values.view(np.uint32) >> 16).astype(np.uint16),
    }[dtype]
    expected = {
        "f32": values,
        "f16": values.astype(np.float16).astype(np.float32),
        "bf16": (values.view(np.uint32) >> 16 << 16).view(np.float32),
    }[dtype]
    matrix = Guarded(device, (5, 7), dtype, stored)
    np.testing.assert_array_equal(device.ops.read_matrix(device.context(), matrix.array), expected)
