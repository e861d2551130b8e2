"""The module that `Engine(device="simt")` imports as `pyengine_simt`: the kernels on the host and the CuPy for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from pyengine.backends.cuda_runtime import CudaRuntime

from .host_cupy import TOTAL_BYTES, HostCupy


@contextmanager
def simt_device(native: ModuleType, *, total_bytes: int = TOTAL_BYTES) -> Iterator[HostCupy]:
    """While it lasts, device "simt" is this machine, as good as new; it must be left with all memory given back."""
    native.simt.reset()
    cupy = HostCupy(native, total_bytes=total_bytes)
    provided: Any = ModuleType("pyengine_simt")
    provided.cuda_runtime = lambda: CudaRuntime(cupy, native, 0, "host")
    before = sys.modules.get("pyengine_simt")
    sys.modules["pyengine_simt"] = provided
    try:
        yield cupy
    finally:
        native.simt.reset()
        if before is None:
            del sys.modules["pyengine_simt"]
        else:
            sys.modules["pyengine_simt"] = before
