"""gather_rows on the device: the bits of the chosen rows, and nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.reference_attention import DTYPES

from .device_ops import NUMPY_DTYPE, Device, Guarded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cols", "count"), [(1, 3), (7, 1), (8, 40), (576, 33), (2500, 2), (64, 0)])
@pytest.mark.parametrize("aligned", [True, False])
def test_gather_copies_the_chosen_rows(device: Device, dtype: str, cols: int, count: int, aligned: bool) -> None:
    rng = np.random.default_rng(cols)
    width = cols + 3  # rows go on behind what is copied, with something else than is behind those of out
    x = rng.integers(0, 256, (20, width * np.dtype(NUMPY_DTYPE[dtype]).itemsize), np.uint8).view(NUMPY_DTYPE[dtype])
    rows = rng.integers(0, 20, count).astype(np.int32)
    source = Guarded(device, x.shape, dtype, x, aligned=aligned)
    out = Guarded(device, (count, cols), dtype, aligned=aligned)
    device.ops.gather_rows(device.context(), source.array[:, :cols], device.to_device(rows), out.array)
    assert out.get().tobytes() == x[rows, :cols].tobytes()
    assert source.get().tobytes() == x.tobytes()


def test_an_out_of_another_type_is_refused(device: Device) -> None:
    x, out = Guarded(device, (2, 8), "f16"), Guarded(device, (2, 8), "bf16")
    with pytest.raises(ValueError, match="out"):
        device.ops.gather_rows(device.context(), x.array, device.to_device(np.zeros(2, np.int32)), out.array)
