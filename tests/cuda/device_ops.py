"""What the tests of CUDA ops share: the module under test, arrays in its memory, and guarded buffers.

`Device` is `_simt` (the kernels run on the host; an array is a `HostArray`) or `_cuda` (an array is CuPy's). Both kinds
of array have `__cuda_array_interface__`, `.get()`, slices, `.view()` and `.reshape()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

NUMPY_DTYPE = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i32": np.int32, "u8": np.uint8}
ALIGNMENT = 512  # of allocations, as CuPy's
CANARY = 0xFF  # every byte that no kernel may write; as a number it is NaN, so that reading it shows too


class HostArray:
    """A NumPy array that passes for one on the device. Slices and views share its memory; `get()` is a copy.

    As CuPy's, it names the stream that is current when it is asked (Device.stream), at first the default one.
    """

    current_stream: ClassVar[int] = 1

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.array.shape,
            "typestr": self.array.dtype.str,
            "data": (self.array.ctypes.data, not self.array.flags.writeable),
            "strides": None if self.array.flags.c_contiguous else self.array.strides,
            "stream": self.current_stream,
        }

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def size(self) -> int:
        return self.array.size

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def get(self) -> NDArray[Any]:
        return self.array.copy()

    def view(self, dtype: DTypeLike) -> HostArray:
        return HostArray(self.array.view(dtype))

    def reshape(self, *shape: int) -> HostArray:
        return HostArray(self.array.reshape(*shape))

    def __getitem__(self, index: Any) -> HostArray:
        return HostArray(self.array[index])

    def __len__(self) -> int:
        return len(self.array)


def aligned_empty(num_bytes: int) -> NDArray[np.uint8]:
    """Bytes of the host that begin where an allocation of the device would."""
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    return raw[-raw.ctypes.data % ALIGNMENT :][:num_bytes]


@dataclass(frozen=True)
class Device:
    """The module under test and how arrays get into its memory. `name`: simt-forward, simt-reverse or gpu."""

    name: str
    module: ModuleType
    cupy: ModuleType | None = None  # on a real GPU
    matmul_library: str = "a loop on the host"

    @property
    def ops(self) -> Any:
        return self.module.ops

    def context(self, *, stream: int = 0, deterministic: bool = False, library: bool = True) -> Any:
        """A context without scratch. `library`: products by cuBLASLt (on the host by a loop)."""
        path = self.matmul_library if library else ""
        return self.module.Context(stream=stream, matmul_library=path, deterministic=deterministic)

    @contextmanager
    def stream(self) -> Iterator[int]:
        """The handle of a new stream, which is the current one inside."""
        if self.cupy is not None:
            with self.cupy.cuda.Stream(non_blocking=True) as stream:
                yield stream.ptr
            return
        HostArray.current_stream = 5
        try:
            yield 5
        finally:
            HostArray.current_stream = 1

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work`, recorded on the current stream as a graph. What comes back runs the graph and waits for it."""
        if self.cupy is not None:
            stream = self.cupy.cuda.get_current_stream()
            stream.begin_capture()
            try:
                work()
            finally:
                graph = stream.end_capture()

            def launch() -> None:
                graph.launch(stream)
                stream.synchronize()

            return launch
        handle = HostArray.current_stream
        self.module.simt.begin_capture(handle)
        try:
            work()
        finally:
            host_graph = self.module.simt.end_capture(handle)
        return lambda: host_graph.launch(handle)

    def to_device(self, array: NDArray[Any]) -> Any:
        """A dense copy, aligned as an allocation is."""
        if self.cupy is not None:
            return self.cupy.array(array, order="C")
        copy = aligned_empty(array.nbytes).view(array.dtype).reshape(array.shape)
        copy[...] = array
        return HostArray(copy)

    def filled(self, num_bytes: int, byte: int = CANARY) -> Any:
        return self.to_device(np.full(num_bytes, byte, np.uint8))

    def scratch(self, context: Any, shape: Any, **limits: int) -> Any:
        """Gives the context the scratch of these limits (max_tokens, max_seqs, max_rows, max_context_len, vocab_size,
        widest_k; each 1 where it is left out), with nothing usable behind it. Returns the Guarded."""
        names = ("max_tokens", "max_seqs", "max_rows", "max_context_len", "vocab_size", "widest_k")
        size = context.scratch_bytes(shape, **{name: limits.get(name, 1) for name in names})
        guarded = Guarded(self, (size,), "u8")
        context.bind_scratch(guarded.array)
        return guarded

    def pack(self, context: Any, rows: NDArray[Any], dtype: str) -> Any:
        """A weight [n, k] (items of dtype, in the host's memory) as the ops want it."""
        n, k = rows.shape
        packed = self.filled(self.ops.packed_weight_bytes(dtype, n, k))
        self.ops.pack_weight(context, np.ascontiguousarray(rows), 0, n, k, packed)
        return packed

    def batch(
        self,
        *,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        slot_mapping: NDArray[np.int32],
        query_start: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        block_tables: NDArray[np.int32],
    ) -> Any:
        """ops.Batch of NumPy arrays."""
        arrays = {
            "token_ids": token_ids,
            "positions": positions,
            "slot_mapping": slot_mapping,
            "query_start": query_start,
            "context_lens": context_lens,
            "block_tables": block_tables,
        }
        return self.ops.Batch(
            **{name: self.to_device(np.ascontiguousarray(value, np.int32)) for name, value in arrays.items()},
            max_query_len=int(np.diff(query_start).max(initial=0)),
            max_context_len=int(np.max(context_lens, initial=0)),
        )


class Guarded:
    """An array on the device in the middle of a larger buffer of canary bytes.

    `array` has the shape wanted and holds `values`, or canaries. A matrix has canaries beside its rows too, so its rows
    lie apart. `aligned`: the array and its rows begin at multiples of 16 bytes; otherwise at odd elements.
    """

    def __init__(
        self,
        device: Device,
        shape: tuple[int, ...],
        dtype: str,
        values: NDArray[Any] | None = None,
        *,
        aligned: bool = True,
    ) -> None:
        items = np.dtype(NUMPY_DTYPE[dtype])
        margin = 256 // items.itemsize
        before = margin if aligned else margin + 1
        rows, cols = (1, *shape) if len(shape) == 1 else (shape[0], int(np.prod(shape[1:])))
        stride = -(-(before + cols + margin) // margin) * margin + (0 if aligned else 1)
        host = np.full((rows + 2) * stride * items.itemsize, CANARY, np.uint8).view(items).reshape(rows + 2, stride)
        self._before = before
        self._inside = np.zeros(host.shape, bool)
        self._inside[1:-1, before : before + cols] = True
        if values is not None:
            host[1:-1, before : before + cols] = values.reshape(rows, cols)
        self._buffer = device.to_device(host)
        matrix = self._buffer[1:-1, before : before + cols]
        self.array = matrix[0] if len(shape) == 1 else matrix
        self._shape = shape

    def get(self) -> NDArray[Any]:
        """What the array holds now, dense, on the host; asserts first that nothing around it was written."""
        self.check()
        return self.array.get().reshape(self._shape)

    def check(self) -> None:
        """Assert that every byte around the array is as it was."""
        host = self._buffer.get()
        canary = np.full(1, -1, f"i{host.itemsize}")
        changed = (host.view(canary.dtype) != canary) & ~self._inside
        if changed.any():
            places = np.argwhere(changed) - (1, self._before)
            raise AssertionError(f"written outside the array, at these places from its begin: {places[:5].tolist()}")


class Altered:
    """An array on the device that says something else of itself: `changes` of its __cuda_array_interface__."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self._array = array
        self._changes = changes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        fields = {**self._array.__cuda_array_interface__, **self._changes}
        return {key: value for key, value in fields.items() if value is not ...}


def read_only(array: Any) -> Altered:
    return Altered(array, data=(array.__cuda_array_interface__["data"][0], True))


def shifted(array: Any, num_bytes: int = 1) -> Altered:
    """The same shape, so many bytes further on."""
    address, is_read_only = array.__cuda_array_interface__["data"]
    return Altered(array, data=(address + num_bytes, is_read_only))
