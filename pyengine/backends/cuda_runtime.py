"""Finds what the CUDA backend needs: driver, extension module, CuPy, cuBLAS, a device; says what is missing.

Importing this module imports none of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pyengine.errors import DeviceNotAvailable

# The oldest drivers of the generations that there is an extra for.
DRIVER_OF_GENERATION = {12: "525", 13: "580"}
BUILD_COMMAND = "PYENGINE_CUDA=ON pip install --force-reinstall --no-deps --no-binary pyengine-llm pyengine-llm"


@dataclass(frozen=True, slots=True)
class CudaRuntime:
    """One device and the libraries that drive it.

    Attributes:
        cupy: the module, or one with the same names.
        native: the extension module with the kernels.
        device_index: which of the visible devices.
        matmul_library: path of cuBLASLt.
    """

    cupy: Any
    native: Any
    device_index: int
    matmul_library: str


def cuda_runtime(device: str, index: int) -> CudaRuntime:
    """What `device` (as the user wrote it, for messages) needs. Raises DeviceNotAvailable, naming what is missing."""
    native = _native(device)
    cupy = _cupy(device, native)
    count = _device_count(device, cupy)
    if index >= count:
        raise DeviceNotAvailable(
            f"device is {device!r}, but {count} {'device is' if count == 1 else 'devices are'} visible; "
            f"the last one is 'cuda:{count - 1}'."
        )
    return CudaRuntime(cupy, native, index, _matmul_library(device))


def cuda_is_visible() -> bool:
    """Whether `device="auto"` means a GPU: this build has the kernels, CuPy is installed, and a device answers."""
    try:
        native = _native("auto")
        _device_count("auto", _cupy("auto", native))
    except DeviceNotAvailable:
        return False
    return True


def simt_runtime() -> CudaRuntime:
    """The CUDA kernels on the host: for pyengine's own tests, which provide the module that is imported here."""
    try:
        provided = import_module("pyengine_simt")
    except ModuleNotFoundError as error:
        if error.name != "pyengine_simt":
            raise
        raise DeviceNotAvailable(
            "device is 'simt', which runs the CUDA kernels on the host, slowly, for pyengine's own tests only; use "
            "'cpu' or 'cuda'."
        ) from None
    runtime: CudaRuntime = provided.cuda_runtime()
    return runtime


def driver_version() -> int | None:
    """Newest CUDA version that the installed driver runs, as 1000 * major + 10 * minor; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def _native(device: str) -> Any:
    """The extension module, on a driver that can run it."""
    native = import_module("pyengine.backends.cuda_module").native
    if native is None:
        raise DeviceNotAvailable(f"device is {device!r}, but {_no_module_words()}")
    version = driver_version()
    if version is None:
        raise DeviceNotAvailable(
            f"device is {device!r}, but no NVIDIA driver is installed here (libcuda.so.1 is not found or does not "
            f"answer). Install a driver, {DRIVER_OF_GENERATION[13]} or newer."
        )
    toolkit = json.loads(native.build)["cuda_toolkit"]
    generation = int(toolkit.split(".")[0])
    if version // 1000 < generation:
        raise DeviceNotAvailable(
            f"device is {device!r}, but the driver here is for CUDA {_dotted(version)}, and this build of pyengine was "
            f"made with toolkit {toolkit}. Update the driver to {DRIVER_OF_GENERATION.get(generation, 'the newest')} "
            "or newer."
        )
    return native


def _no_module_words() -> str:
    if not sys.platform.startswith("linux"):
        return "the CUDA backend is for Linux only; use device='cpu'."
    decision = json.loads(import_module("pyengine._cpu").build)["cuda"]
    return f"this build of pyengine has no CUDA backend ({decision}). Install one that has: {BUILD_COMMAND}"


def _cupy(device: str, native: Any) -> Any:
    """CuPy, of a generation that the driver runs."""
    try:
        cupy = import_module("cupy")
    except ImportError as error:
        raise DeviceNotAvailable(
            f"device is {device!r}, but CuPy, which owns the memory of the GPU, cannot be imported ({error}). "
            f"Install it: {_extra_command()}"
        ) from error
    version, needed = driver_version() or 0, int(cupy.cuda.runtime.runtimeGetVersion())
    if version // 1000 < needed // 1000:
        raise DeviceNotAvailable(
            f"device is {device!r}, but the installed CuPy is for CUDA {_dotted(needed)}, and the driver here is for "
            f"{_dotted(version)}. Install the one for this driver: pip uninstall -y cupy-cuda{needed // 1000}x && "
            f"{_extra_command()}"
        )
    return cupy


def _device_count(device: str, cupy: Any) -> int:
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceNotAvailable(
            f"device is {device!r}, but CUDA names no device: {error}{_visible_words()}"
        ) from error
    if count == 0:
        raise DeviceNotAvailable(f"device is {device!r}, but no NVIDIA GPU is visible here{_visible_words()}")
    return count


def _visible_words() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "." if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}."


def _matmul_library(device: str) -> str:
    try:
        pathfinder = import_module("cuda.pathfinder")
    except ImportError as error:
        raise DeviceNotAvailable(
            f"device is {device!r}, but cuda.pathfinder, which finds cuBLAS, cannot be imported ({error}). "
            f"Install it: {_extra_command()}"
        ) from error
    try:
        path = pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path
    except pathfinder.DynamicLibNotFoundError:
        path = None
    if path is None:
        raise DeviceNotAvailable(
            f"device is {device!r}, but cuBLAS (libcublasLt) is not found. Install it: {_extra_command()}"
        )
    return str(path)


def _extra_command() -> str:
    """What brings the run-time libraries for the driver that is installed."""
    generation = 12 if (driver_version() or 13000) < 13000 else 13
    return f'pip install "pyengine-llm[cuda{generation}]"'


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
