"""The header reader: what the safetensors library writes is read alike, and every lie is an error with names."""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from pyengine.checkpoint.safetensors_files import MappedFile, read_header, write_safetensors
from pyengine.errors import ModelError


def raw_file(path: Path, header: Any, data: bytes, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: Any, offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_arrays_come_back_as_the_library_wrote_them(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5, dtype=np.float16),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(arrays, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    assert set(header) == set(arrays)
    mapped = MappedFile(tmp_path / "x.safetensors")
    for name, array in arrays.items():
        found = mapped.array(header[name])
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        assert not found.flags.writeable


def test_values_stay_valid_after_their_pages_are_released(tmp_path: Path) -> None:
    values = np.arange(100_000, dtype=np.float32)
    save_file({"a": values, "b": values + 1}, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    mapped = MappedFile(tmp_path / "x.safetensors")
    found = mapped.array(header["a"])
    mapped.release(header["a"])
    mapped.release(header["b"])
    np.testing.assert_array_equal(found, values)


def test_data_at_an_odd_address_become_an_aligned_copy(tmp_path: Path) -> None:
    values = np.arange(3, dtype=np.float32)
    path = raw_file(tmp_path / "x", json.dumps({"a": entry("F32", [3], [0, 12])}).encode() + b" ", values.tobytes())
    stored = read_header(path)["a"]
    assert stored.start % 4 != 0
    found = MappedFile(path).array(stored)
    assert found.flags.aligned
    np.testing.assert_array_equal(found, values)


def test_the_writer_is_read_by_the_library(tmp_path: Path) -> None:
    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1, 2, 3], np.uint16)}
    layout = {"a": ("F32", (2, 3)), "b": ("BF16", (3,))}
    write_safetensors(tmp_path / "x.safetensors", layout, values.items())
    with safe_open(tmp_path / "x.safetensors", "np") as opened:
        np.testing.assert_array_equal(opened.get_tensor("a"), values["a"])
        assert opened.get_slice("b").get_dtype() == "BF16"
        assert opened.metadata() == {"format": "pt"}
    assert read_header(tmp_path / "x.safetensors")["b"].shape == (3,)


@pytest.mark.parametrize("values", [{"a": np.zeros(3, np.float32)}, {"b": np.zeros(2, np.float32)}, {}])
def test_the_writer_refuses_what_it_did_not_announce(tmp_path: Path, values: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        write_safetensors(tmp_path / "x", {"a": ("F32", (2,))}, values.items())


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"", b"", ["not valid JSON"]),
        (b"{not json", b"", ["not valid JSON"]),
        (b"\xff\xfe", b"", ["not valid JSON"]),
        (b"[" * 100_000, b"", ["not valid JSON"]),
        ([1, 2], b"", ["list", "object"]),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": 0}', b"\0" * 4, ["twice"]),
        ({"a": 7}, b"", ["tensor a", "7"]),
        ({"a": entry("F33", [1], [0, 4])}, b"\0" * 4, ["tensor a", "'F33'", "BF16"]),
        ({"a": entry("F4", [2], [0, 1])}, b"\0", ["tensor a", "'F4'"]),
        ({"a": entry("F32", [-1], [0, 4])}, b"\0" * 4, ["tensor a", "shape [-1]"]),
        ({"a": entry("F32", [True], [0, 4])}, b"\0" * 4, ["tensor a", "[True]"]),
        ({"a": entry("F32", "1", [0, 4])}, b"\0" * 4, ["tensor a", "'1'"]),
        ({"a": entry("F32", [1], [4, 0])}, b"\0" * 4, ["tensor a", "[4, 0]"]),
        ({"a": entry("F32", [1], [0])}, b"\0" * 4, ["tensor a", "[0]"]),
        ({"a": entry("F32", [1], None)}, b"\0" * 4, ["tensor a", "None"]),
        ({"a": entry("F32", [2], [0, 4])}, b"\0" * 4, ["tensor a", "F32", "[2]", "8 bytes", "hold 4"]),
        ({"a": entry("F32", [2**62], [0, 4])}, b"\0" * 4, ["tensor a", "hold 4"]),
        ({"a": entry("F32", [2], [0, 8])}, b"\0" * 4, ["truncated", "end at byte"]),
        ({"a": entry("F32", [1], [0, 4])}, b"\0" * 5, ["belongs to nothing"]),
        ({"a": entry("F32", [1], [4, 8])}, b"\0" * 8, ["tensor a", "hole"]),
        (
            {"a": entry("F32", [2], [0, 8]), "b": entry("F32", [2], [4, 12])},
            b"\0" * 12,
            ["tensor b", "overlaps", "tensor a"],
        ),
    ],
)
def test_a_lying_header_is_refused_with_what_was_found(
    tmp_path: Path, header: Any, data: bytes, words: list[str]
) -> None:
    path = raw_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(ModelError) as caught:
        read_header(path)
    assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)


@pytest.mark.parametrize("length", [3, 2**20, 2**63, 2**64 - 1])
def test_a_header_length_beyond_the_file_is_refused_without_reading_it(tmp_path: Path, length: int) -> None:
    path = raw_file(tmp_path / "x", b"{}", b"", length=length)
    with pytest.raises(ModelError, match=f"claims {length} bytes, but only 2 follow"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 7])
def test_a_file_shorter_than_the_length_field_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ModelError, match=f"{len(content)} bytes are too few"):
        read_header(tmp_path / "x")


def test_a_file_that_is_not_there_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(tmp_path / "absent.safetensors")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400), place=st.integers(0, 399), byte=st.integers(0, 255))
def test_a_damaged_file_is_either_refused_or_has_a_consistent_layout(
    tmp_path: Path, cut: int, place: int, byte: int
) -> None:
    header = {"a": entry("F32", [4, 4], [0, 64]), "b": entry("BF16", [8], [64, 80]), "__metadata__": {"k": "v"}}
    path = raw_file(tmp_path / "x", header, bytes(range(80)))
    content = bytearray(path.read_bytes())[: len(path.read_bytes()) - cut % 7]
    content[place % len(content)] = byte
    path.write_bytes(content)
    with contextlib.suppress(ModelError):  # any other error fails the test
        found = read_header(path)
        ranges = sorted((tensor.start, tensor.start + tensor.num_bytes) for tensor in found.values())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
        assert not ranges or (ranges[0][0] >= 8 and ranges[-1][1] == len(content))
