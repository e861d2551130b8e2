"""Memory of one GPU and of the host beside it: arrays from pools of our own, and copies between the two on one stream.

Of CuPy only buffers, streams, events and copies are used, never an operation on elements: those are compiled when they
are first called, by a compiler that need not be installed. bfloat16 travels as bytes.
"""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.errors import InvalidRequest

# Left to the device: code of kernels, which is loaded when they are first used, CUDA graphs, other programs.
RESERVE_BYTES = 256 * 2**20

# Uploads go through two pinned buffers of at least this size.
UPLOAD_BYTES = 2**20

CupyArray = Any


class DeviceMemory:
    """Allocates on one device. As a context manager it makes that device and the stream the current ones.

    Attributes:
        stream: a non-blocking CuPy stream; everything runs on it, in order.
    """

    def __init__(self, cupy: Any, device_index: int) -> None:
        self._cupy = cupy
        self._device = cupy.cuda.Device(device_index)
        self._name = f"cuda:{device_index}"
        with self._device:
            self.stream: Any = cupy.cuda.Stream(non_blocking=True)
        self._pool: Any = cupy.cuda.MemoryPool()
        self._pinned_pool: Any = cupy.cuda.PinnedMemoryPool()

    def __enter__(self) -> DeviceMemory:
        self._device.__enter__()
        self.stream.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stream.__exit__(kind, error, traceback)
        self._device.__exit__(kind, error, traceback)

    def free_bytes(self) -> int:
        """What can be allocated, less the reserve."""
        with self:
            return max(0, int(self._cupy.cuda.runtime.memGetInfo()[0]) - RESERVE_BYTES)

    def array(self, count: int, dtype: Any, *, what: str, setting: str) -> CupyArray:
        """An uninitialised array in one dimension; `what` it is and the `setting` to lower are for the error.

        Raises InvalidRequest when the device has not so much memory.
        """
        num_bytes = count * np.dtype(dtype).itemsize
        try:
            pointer = self._pool.malloc(max(num_bytes, 1))
        except MemoryError as error:  # CuPy's OutOfMemoryError is one
            free = int(self._cupy.cuda.runtime.memGetInfo()[0])
            raise InvalidRequest(
                f"{what}: {num_bytes:,} bytes are needed on {self._name}, where {free:,} are free. Lower {setting}, or "
                "end what else uses the device.",
                field=setting,
                limit=free,
            ) from error
        return self._cupy.ndarray((count,), dtype, memptr=pointer)

    def pinned(self, count: int, dtype: Any) -> npt.NDArray[Any]:
        """A host array in one dimension, all zeros, that copies read and write while the host goes on."""
        pointer = self._pinned_pool.malloc(max(count * np.dtype(dtype).itemsize, 1))
        array: npt.NDArray[Any] = np.frombuffer(pointer, dtype, count)
        array[:] = 0
        return array

    def event(self) -> Any:
        """An event that times nothing."""
        return self._cupy.cuda.Event(disable_timing=True)

    def to_device(self, device: CupyArray, host: npt.NDArray[Any]) -> None:
        """Begin to copy a pinned array to the beginning of a device array."""
        assert host.nbytes <= device.nbytes
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(device.data.ptr, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, self.stream.ptr)

    def to_host(self, host: npt.NDArray[Any], device: CupyArray) -> None:
        """Begin to copy the beginning of a device array to a pinned array."""
        assert host.nbytes <= device.nbytes
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(host.ctypes.data, device.data.ptr, host.nbytes, runtime.memcpyDeviceToHost, self.stream.ptr)

    def clear(self, device: CupyArray) -> None:
        """Begin to set all bytes to zero."""
        self._cupy.cuda.runtime.memsetAsync(device.data.ptr, 0, device.nbytes, self.stream.ptr)

    def begin_capture(self) -> None:
        """From now on work on the stream is recorded instead of done. Other threads may go on using CUDA meanwhile."""
        self.stream.begin_capture(self._cupy.cuda.runtime.streamCaptureModeThreadLocal)

    def abandon_capture(self) -> None:
        """End a capture in which a call failed: that error is under way, and the one that this causes adds nothing."""
        with suppress(RuntimeError):
            self.stream.end_capture()

    def finish(self) -> None:
        """Wait for all work. An error of the device was reported by the step that met it, and is not again."""
        with suppress(self._cupy.cuda.runtime.CUDARuntimeError):
            self.stream.synchronize()

    def give_back(self) -> None:
        """Give the memory of arrays that nobody refers to any more back to the device and to the system."""
        with self._device:
            self._pool.free_all_blocks()
            self._pinned_pool.free_all_blocks()


class Uploads:
    """Brings host arrays to the device through two pinned buffers in turn: one is filled while the other is read.

    Whoever reads what `pinned_copy` returned does so on the stream, before the next call here.
    """

    def __init__(self, memory: DeviceMemory, num_bytes: int) -> None:
        self._memory = memory
        size = max(num_bytes, UPLOAD_BYTES)
        self._buffers = [memory.pinned(size, np.uint8) for _ in range(2)]
        self._events = [memory.event() for _ in range(2)]
        self._calls = 0

    def pinned_copy(self, host: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The same array, C-contiguous, in a pinned buffer; it is written over at the second call after this one."""
        current, last = self._calls % 2, (self._calls + 1) % 2
        if self._calls >= 1:
            self._events[last].record(self._memory.stream)
        if self._calls >= 2:
            self._events[current].synchronize()
        self._calls += 1
        copy = self._buffers[current][: host.nbytes].view(host.dtype).reshape(host.shape)
        np.copyto(copy, host)
        return copy

    def upload(self, host: npt.NDArray[Any], device: CupyArray) -> None:
        """Copy a host array in one dimension, of any length, into a device array of the same type."""
        step = self._buffers[0].nbytes // host.itemsize
        for begin in range(0, host.size, step):
            part = self.pinned_copy(host[begin : begin + step])
            self._memory.to_device(device[begin : begin + part.size], part)
