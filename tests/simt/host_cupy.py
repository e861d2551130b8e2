"""A stand-in for CuPy, of the calls that pyengine.backends makes, over memory of the host and streams of `_simt`.

It is stricter than a GPU: what would be a race, a stale read or an access to freed memory there raises DeviceMisuse
here. A copy to the host shows its data only after a wait for it, and its target is filled with rubbish until then; the
source of a copy to the device must be left alone until then.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

TOTAL_BYTES = 2**30
ALIGNMENT = 512
RUBBISH = 0xA5
GUARD_BYTES = 512  # behind every allocation, never to be written


class DeviceMisuse(AssertionError):
    """A call that a GPU would carry out wrongly, or not at all."""


class CUDARuntimeError(RuntimeError):
    """As CuPy's: the name of the error, and its text."""


class OutOfMemoryError(MemoryError):
    """As CuPy's."""


class Memory:
    """One allocation, of the device or pinned; filled with rubbish, with a guard behind it."""

    def __init__(self, size: int, registry: Registry) -> None:
        self.raw = np.full(size + GUARD_BYTES + ALIGNMENT, RUBBISH, np.uint8)
        offset = -self.raw.ctypes.data % ALIGNMENT
        self.bytes = self.raw[offset : offset + size]
        self.guard = self.raw[offset + size : offset + size + GUARD_BYTES]
        self.ptr = int(self.bytes.ctypes.data)
        self.size = size
        registry.add(self)


class Registry:
    """The live allocations of one kind, by address."""

    def __init__(self) -> None:
        self._memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()

    def add(self, memory: Memory) -> None:
        self._memories[memory.ptr] = memory

    def find(self, ptr: int, size: int) -> Memory | None:
        """The allocation in which all of [ptr, ptr + size) lies."""
        live = sorted(self._memories.items())
        index = bisect.bisect_right([address for address, _ in live], ptr) - 1
        if index < 0 or ptr + size > live[index][0] + live[index][1].size:
            return None
        return live[index][1]

    def used_bytes(self) -> int:
        return sum(memory.size for memory in self._memories.values())

    def check_guards(self) -> None:
        for memory in list(self._memories.values()):
            if (memory.guard != RUBBISH).any():
                raise DeviceMisuse(f"something was written behind an allocation of {memory.size} bytes")


@dataclass
class MemoryPointer:
    mem: Memory
    ptr: int


@dataclass
class _Copy:
    """A copy whose end nobody has waited for."""

    source: npt.NDArray[np.uint8]
    snapshot: npt.NDArray[np.uint8]
    target: npt.NDArray[np.uint8] | None  # on the host: filled at the wait

    def finish(self) -> None:
        if self.target is not None:
            self.target[:] = self.snapshot
        elif not np.array_equal(self.source, self.snapshot):
            raise DeviceMisuse("host memory was changed while a copy to the device was reading it")


class HostCupy:
    """The module. Every instance is a machine with one device of its own.

    Args:
        native: the extension `_simt`.
        total_bytes: of the device's memory.

    Attributes:
        num_allocations: on the device so far.
    """

    def __init__(self, native: Any, *, total_bytes: int = TOTAL_BYTES) -> None:
        self._simt = native.simt
        self._device_error = native.DeviceError
        self._total = total_bytes
        self._device, self._pinned = Registry(), Registry()
        self._may_allocate = True
        self._entered_devices: list[int] = []
        self._current_streams: list[Stream] = []
        self._handles = itertools.count(0x5000)
        self.num_allocations = 0
        self.cuda = SimpleNamespace(
            Device=self._bound(Device),
            Stream=self._bound(Stream),
            Event=self._bound(Event),
            MemoryPool=self._bound(MemoryPool),
            PinnedMemoryPool=self._bound(PinnedMemoryPool),
            runtime=Runtime(self),
        )

    def ndarray(self, shape: tuple[int, ...], dtype: Any, memptr: MemoryPointer) -> Array:
        return Array(self, shape, np.dtype(dtype), memptr.mem, memptr.ptr)

    @contextmanager
    def no_allocations(self) -> Iterator[None]:
        """Whoever allocates on the device meanwhile gets DeviceMisuse."""
        self._may_allocate = False
        try:
            yield
        finally:
            self._may_allocate = True

    def check_guards(self) -> None:
        """Raise DeviceMisuse if something was written behind an allocation that is still there."""
        self._device.check_guards()
        self._pinned.check_guards()

    def used_bytes(self) -> int:
        """Of the device."""
        return self._device.used_bytes()

    def pinned_bytes(self) -> int:
        return self._pinned.used_bytes()

    def _bound(self, kind: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            return kind(self, *args, **kwargs)

        return make

    def _check_device(self) -> None:
        if not self._entered_devices:
            raise DeviceMisuse("no device was made the current one")

    def _call(self, function: Any, *args: Any) -> Any:
        """A call of the runtime, with CuPy's error if it fails."""
        try:
            return function(*args)
        except self._device_error as error:
            state = self._simt.error()
            raise CUDARuntimeError(f"{state[1]}: {state[2]}" if state else str(error)) from None


class Array:
    """cupy.ndarray, contiguous and in one dimension."""

    def __init__(self, host: HostCupy, shape: tuple[int, ...], dtype: np.dtype[Any], mem: Memory, ptr: int) -> None:
        if len(shape) != 1:
            raise DeviceMisuse("only arrays in one dimension are used")
        self._host, self._mem = host, mem
        self.shape, self.dtype = shape, dtype
        self.size = shape[0]
        self.nbytes = self.size * dtype.itemsize
        self.data = MemoryPointer(mem, ptr)
        if ptr + self.nbytes > mem.ptr + mem.size:
            raise DeviceMisuse("an array is longer than its allocation")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        streams = self._host._current_streams
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "strides": None,
            "stream": streams[-1].ptr if streams else 1,
        }

    def __getitem__(self, index: slice) -> Array:
        start, stop, step = index.indices(self.size)
        if step != 1:
            raise DeviceMisuse("only contiguous slices are used")
        offset = start * self.dtype.itemsize
        return Array(self._host, (max(0, stop - start),), self.dtype, self._mem, self.data.ptr + offset)

    def view(self, dtype: Any) -> Array:
        to = np.dtype(dtype)
        if self.nbytes % to.itemsize:
            raise DeviceMisuse(f"{self.nbytes} bytes are no whole number of {to}")
        return Array(self._host, (self.nbytes // to.itemsize,), to, self._mem, self.data.ptr)


class Device:
    def __init__(self, host: HostCupy, device: int) -> None:
        self._host, self.id = host, device

    def __enter__(self) -> Device:
        if self.id != 0:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self._host._entered_devices.append(self.id)
        return self

    def __exit__(self, *args: object) -> None:
        self._host._entered_devices.pop()


class Stream:
    def __init__(self, host: HostCupy, null: bool = False, non_blocking: bool = False) -> None:
        host._check_device()
        if null or not non_blocking:
            raise DeviceMisuse("the stream of an engine does not wait for the default stream")
        self._host = host
        self.ptr = next(host._handles)
        self._is_capturing = False
        self._unfinished: list[_Copy] = []
        self.num_submitted = 0

    def __enter__(self) -> Stream:
        self._host._check_device()
        self._host._current_streams.append(self)
        return self

    def __exit__(self, *args: object) -> None:
        if self._host._current_streams.pop() is not self:
            raise DeviceMisuse("streams are left in another order than they were entered")

    def synchronize(self) -> None:
        self._host._call(self._host._simt.synchronize, self.ptr)
        self._finish(self.num_submitted)

    def begin_capture(self, mode: int | None = None) -> None:
        if mode not in (0, 1, 2):
            raise DeviceMisuse("the mode of a capture is not said")
        self._host._simt.begin_capture(self.ptr)
        self._is_capturing = True

    def end_capture(self) -> Graph:
        self._is_capturing = False
        return Graph(self._host, self._host._simt.end_capture(self.ptr))

    def _submit(self, copy: _Copy) -> None:
        if self._is_capturing:
            raise DeviceMisuse("a copy between host and device would become a part of the graph")
        self._unfinished.append(copy)
        self.num_submitted += 1

    def _finish(self, until: int) -> None:
        """Everything up to this number of copies is done."""
        count = len(self._unfinished) - (self.num_submitted - until)
        for copy in self._unfinished[: max(count, 0)]:
            copy.finish()
        del self._unfinished[: max(count, 0)]


class Graph:
    def __init__(self, host: HostCupy, graph: Any) -> None:
        self._host, self._graph = host, graph

    def launch(self, stream: Stream | None = None) -> None:
        if stream is None or stream not in self._host._current_streams:
            raise DeviceMisuse("a graph is launched on the engine's own stream")
        self._host._call(self._graph.launch, stream.ptr)


class Event:
    def __init__(self, host: HostCupy, block: bool = False, disable_timing: bool = False) -> None:
        host._check_device()
        if not disable_timing:
            raise DeviceMisuse("an event that takes the time makes every wait slower")
        self._host = host
        self._recorded: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        if stream is None:
            raise DeviceMisuse("an event is recorded on the engine's own stream")
        if stream._is_capturing:
            raise DeviceMisuse("an event would become a part of the graph")
        self._recorded = (stream, stream.num_submitted)

    def synchronize(self) -> None:
        if self._recorded is None:
            raise DeviceMisuse("a wait for an event that was never recorded ends at once")
        stream, submitted = self._recorded
        self._host._call(self._host._simt.synchronize, stream.ptr)
        stream._finish(submitted)


class MemoryPool:
    """Memory is the device's again when nobody refers to it and free_all_blocks was called."""

    def __init__(self, host: HostCupy) -> None:
        self._host = host
        self._blocks: list[Memory] = []

    def malloc(self, size: int) -> MemoryPointer:
        host = self._host
        host._check_device()
        if not host._may_allocate:
            raise DeviceMisuse(f"{size} bytes are allocated on the device inside a step")
        if any(stream._is_capturing for stream in host._current_streams):
            raise DeviceMisuse("memory is allocated during a capture")
        if size > host._total - host.used_bytes():
            raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes")
        host.num_allocations += 1
        memory = Memory(size, host._device)
        self._blocks.append(memory)
        return MemoryPointer(memory, memory.ptr)

    def free_all_blocks(self) -> None:
        self._host._check_device()
        held = [weakref.ref(block) for block in self._blocks]
        self._blocks = []
        self._blocks = [block for ref in held if (block := ref()) is not None]


class PinnedMemoryPool:
    """What malloc returns is a buffer of the rounded size, as CuPy's is."""

    def __init__(self, host: HostCupy) -> None:
        self._host = host

    def malloc(self, size: int) -> Any:
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        memory = Memory(rounded, self._host._pinned)
        buffer = (ctypes.c_ubyte * rounded).from_address(memory.ptr)
        buffer.memory = memory  # kept alive by every array over the buffer
        return buffer

    def free_all_blocks(self) -> None:
        pass


class Runtime:
    CUDARuntimeError = CUDARuntimeError
    memcpyHostToDevice, memcpyDeviceToHost = 1, 2
    streamCaptureModeGlobal, streamCaptureModeThreadLocal, streamCaptureModeRelaxed = 0, 1, 2

    def __init__(self, host: HostCupy) -> None:
        self._host = host

    def getDeviceCount(self) -> int:
        return 1

    def runtimeGetVersion(self) -> int:
        return 13000

    def memGetInfo(self) -> tuple[int, int]:
        self._host._check_device()
        return self._host._total - self._host.used_bytes(), self._host._total

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        host = self._host
        on_stream = self._stream(stream)
        to_device = kind == self.memcpyHostToDevice
        if not to_device and kind != self.memcpyDeviceToHost:
            raise DeviceMisuse(f"a copy of kind {kind}")
        device_ptr, host_ptr = (dst, src) if to_device else (src, dst)
        device_memory = host._device.find(device_ptr, size)
        if device_memory is None:
            raise DeviceMisuse("a copy leaves the device's allocations, or one that was given back")
        pinned = host._pinned.find(host_ptr, size)
        if pinned is None:
            raise DeviceMisuse("the host's side of a copy is not pinned: the host would wait for it")
        on_device = device_memory.bytes[device_ptr - device_memory.ptr :][:size]
        on_host = pinned.bytes[host_ptr - pinned.ptr :][:size]
        if to_device:
            host._call(host._simt.copy, dst, src, size, stream)
            on_stream._submit(_Copy(on_host, on_host.copy(), None))
        else:
            on_stream._submit(_Copy(on_device, on_device.copy(), on_host))
            on_host[:] = RUBBISH

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        self._stream(stream)
        if self._host._device.find(ptr, size) is None:
            raise DeviceMisuse("a fill leaves the device's allocations")
        self._host._call(self._host._simt.fill, ptr, value, size, stream)

    def _stream(self, handle: int) -> Stream:
        for stream in self._host._current_streams:
            if stream.ptr == handle:
                return stream
        raise DeviceMisuse("work is put on a stream that is not the current one")
