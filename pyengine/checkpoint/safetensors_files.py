"""Safetensors files: a checked header, tensors mapped into memory, and a streaming writer; knows no model.

Format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, data_offsets), then the data. The
header is checked as strictly as the format demands, so that a truncated or lying file is an error here and not a wrong
number later.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.errors import ModelError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

# Every dtype of the format -> bytes of one value. Sub-byte types are left out and so are refused by name.
ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

# What a model's weights may be: the format's name -> ours, and how NumPy holds it (bf16 as its 16 bits).
WEIGHT_DTYPES: Mapping[str, tuple[str, str]] = {
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        dtype: the format's name, e.g. "BF16".
        start: offset in bytes from the beginning of the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """All tensors of a file by name. Raises ModelError naming the file, the tensor, what was found and what must be."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise ModelError(f"{file}: {size} bytes are too few for a safetensors file; it is empty or truncated.")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(size - 8, MAX_HEADER_BYTES):
                raise ModelError(
                    f"{file}: the safetensors header claims {header_bytes} bytes, but only {size - 8} follow (at most "
                    f"{MAX_HEADER_BYTES} are allowed); the file is truncated or not safetensors."
                )
            text = stream.read(header_bytes)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror or error}.") from error
    entries = _parsed_header(file, text)
    tensors = {name: _checked_entry(file, name, entry, 8 + header_bytes) for name, entry in entries.items()}
    _check_layout(file, tensors, 8 + header_bytes, size)
    return tensors


def _parsed_header(file: Path, text: bytes) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) != len(pairs):
            raise ModelError(f"{file}: the safetensors header has a name twice.")
        return dict(pairs)

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: the safetensors header is not valid JSON ({error}).") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file}: the safetensors header is a {type(header).__name__}; it must be a JSON object.")
    header.pop("__metadata__", None)
    return header


def _checked_entry(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    def is_counts(values: Any) -> bool:
        return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)

    if not isinstance(entry, dict):
        raise ModelError(f"{file}: the header's entry of tensor {name} is {entry!r}; it must be an object.")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ModelError(f"{file}: tensor {name} has dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}.")
    if not isinstance(shape, list) or not is_counts(shape):
        raise ModelError(f"{file}: tensor {name} has shape {shape!r}; it must be a list of integers >= 0.")
    if not isinstance(offsets, list) or not is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(
            f"{file}: tensor {name} has data_offsets {offsets!r}; they must be [begin, end], begin <= end."
        )
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        raise ModelError(
            f"{file}: tensor {name} of dtype {dtype} and shape {shape} needs {num_bytes} bytes, "
            f"but its data_offsets {offsets} hold {offsets[1] - offsets[0]}."
        )
    return StoredTensor(file, name, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _check_layout(file: Path, tensors: Mapping[str, StoredTensor], data_start: int, size: int) -> None:
    """Tensors must follow each other without overlap or hole, to the very end of the file."""
    end, previous = data_start, "the header"
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.num_bytes)):
        if tensor.start != end:
            what = "overlaps" if tensor.start < end else "leaves a hole after"
            raise ModelError(
                f"{file}: tensor {tensor.name} begins at byte {tensor.start} and {what} {previous}, "
                f"which ends at byte {end}."
            )
        end, previous = tensor.start + tensor.num_bytes, f"tensor {tensor.name}"
    if end != size:
        what = "the file is truncated" if size < end else "the rest belongs to nothing"
        raise ModelError(f"{file}: its tensors end at byte {end}, but the file has {size} bytes; {what}.")


class MappedFile:
    """A file mapped read-only: pages are read when they are touched and can be dropped again, one range at a time."""

    def __init__(self, file: Path) -> None:
        try:
            with file.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: cannot be mapped into memory: {error}.") from error

    def array(self, tensor: StoredTensor) -> npt.NDArray[Any]:
        """The tensor's values, read-only, without a copy unless the file has it at an odd address."""
        dtype = np.dtype(WEIGHT_DTYPES[tensor.dtype][1])
        values = np.frombuffer(self._map, dtype, math.prod(tensor.shape), tensor.start).reshape(tensor.shape)
        return values if values.flags.aligned else values.copy()

    def release(self, tensor: StoredTensor) -> None:
        """Drop the tensor's pages from this process; touching the values again reads them again."""
        if not hasattr(mmap, "MADV_DONTNEED"):  # not on this system: the kernel drops them under memory pressure
            return
        first = tensor.start - tensor.start % mmap.PAGESIZE
        length = min(tensor.start + tensor.num_bytes, len(self._map)) - first
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)


def write_safetensors(
    file: Path,
    layout: Mapping[str, tuple[str, tuple[int, ...]]],
    values: Iterable[tuple[str, npt.NDArray[Any]]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors one at a time, so that only one is in memory.

    Args:
        layout: name -> (the format's dtype, shape), in the order of writing.
        values: (name, array) in the same order; bf16 as uint16.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, (dtype, shape) in layout.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        written = []
        for name, array in values:
            if array.shape != layout[name][1] or array.nbytes != math.prod(array.shape) * ITEM_BYTES[layout[name][0]]:
                raise ValueError(f"{name} has shape {array.shape} and {array.nbytes} bytes, not {layout[name]}")
            stream.write(np.ascontiguousarray(array).data)
            written.append(name)
        if written != list(layout):
            raise ValueError(
                f"wrote {len(written)} tensors in another order or number than the {len(layout)} announced"
            )
        stream.flush()
        os.fsync(stream.fileno())
