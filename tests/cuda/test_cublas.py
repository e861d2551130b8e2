"""cublas.cpp without a GPU: against a library with cuBLASLt's functions that computes on the host, and without one."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
from ctypes import POINTER, byref, c_char, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ops.reference_attention import aligned_bytes, from_dtype, to_dtype
from tests.simt.build import CSRC, find_compiler

DTYPES = ("f32", "f16", "bf16")  # in the order of DType
HERE = Path(__file__).parent
WORKSPACE_BYTES = 32 << 20


def cuda_headers() -> list[Path]:
    """The folder of CUDA's headers: of a toolkit, or of the wheels; none where neither is there."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    homes += [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    homes += [f"{sysconfig.get_paths()[name]}/nvidia/cu13" for name in ("purelib", "platlib")]
    for home in filter(None, homes):
        include = Path(home) / "include"
        if (include / "cuda_bf16.h").exists() and (include / "library_types.h").exists():
            return [include, include / "cccl"]
    return []


class Log(ctypes.Structure):
    """What fake_cublaslt.cpp writes down."""

    _fields_ = [
        ("heuristics", c_int32),
        ("products", c_int32),
        ("objects", c_int32),
        ("algorithm", c_int32),
        ("rows_asked", c_int64),
        ("workspace_limit", c_uint64),
        ("workspace_bytes", c_uint64),
        ("workspace_misalignment", c_uint64),
        ("alignments", c_uint32 * 4),
        ("reduction_schemes", c_uint32),
    ]


class Failure(Exception):
    """An exception of the C++ side; its text."""


@dataclass
class Calls:
    """cublas.cpp behind ctypes, and the fake library's memory."""

    code: ctypes.CDLL
    fake_path: Path
    fake: ctypes.CDLL

    @property
    def log(self) -> Log:
        return Log.in_dll(self.fake, "fake_log")

    def failure(self) -> Failure:
        return Failure((c_char * 1024).in_dll(self.code, "last_error").value.decode())

    def open(self, path: Path | str, one_algorithm: bool = False) -> Library:
        pointer = c_void_p()
        if self.code.open_library(os.fsencode(path), int(one_algorithm), byref(pointer)) < 0:
            raise self.failure()
        return Library(self, pointer)


@dataclass
class Library:
    """An open MatmulLibrary."""

    calls: Calls
    pointer: c_void_p

    def close(self) -> None:
        self.calls.code.close_library(self.pointer)

    def multiply(
        self,
        x: NDArray,
        weight: NDArray,
        bias: NDArray | None,
        y: NDArray,
        k: int,
        types: tuple[str, str],
        scratch: NDArray[np.uint8],
    ) -> bool:
        """y = x[:, :k] weight[:, :k]^T + bias; `types` of x and weight, and of y and bias."""
        result = self.calls.code.multiply_matrices(
            self.pointer,
            *map(DTYPES.index, types),
            *map(c_int64, (len(x), len(weight), k)),
            *(c_void_p(x.ctypes.data), c_int64(x.strides[0] // x.itemsize), c_void_p(weight.ctypes.data)),
            *(c_void_p(None if bias is None else bias.ctypes.data), c_void_p(y.ctypes.data)),
            *(c_int64(y.strides[0] // y.itemsize), c_void_p(scratch.ctypes.data), c_size_t(scratch.size)),
        )
        if result < 0:
            raise self.calls.failure()
        return bool(result)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """cublas.cpp with cublas_calls.cpp, and the fake library."""
    headers = cuda_headers()
    if not headers:
        pytest.skip("no CUDA headers were found")
    folder = tmp_path_factory.mktemp("cublas")
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off"]
    options += [f"-isystem{path}" for path in headers] + [f"-I{CSRC}"]
    sources = {
        "calls.so": [CSRC / "cuda" / "cublas.cpp", HERE / "cublas_calls.cpp"],
        "libcublasLt.so": [HERE / "fake_cublaslt.cpp"],
    }
    for name, files in sources.items():
        subprocess.run([find_compiler(), *options, *map(str, files), "-o", str(folder / name), "-ldl"], check=True)
    return folder / "calls.so", folder / "libcublasLt.so"


@pytest.fixture
def calls(libraries: tuple[Path, Path]) -> Calls:
    code, fake = libraries
    loaded = Calls(ctypes.CDLL(str(code)), fake, ctypes.CDLL(str(fake)))
    loaded.code.close_library.argtypes = [c_void_p]
    loaded.code.open_library.argtypes = [ctypes.c_char_p, c_int, POINTER(c_void_p)]
    loaded.log.objects = 0
    return loaded


def elements(rng: np.random.Generator, rows: int, stride: int, dtype: str, used: int) -> NDArray:
    """[rows, stride], aligned to 64 bytes; NaN from column `used` on."""
    values = rng.standard_normal((rows, stride), np.float32)
    values[:, used:] = np.nan
    stored = to_dtype(values, dtype)
    array = aligned_bytes(stored.nbytes).view(stored.dtype).reshape(stored.shape)
    array[:] = stored
    return array


def product(
    library: Library, rng: np.random.Generator, rows: int, n: int, k: int, types: tuple[str, str], with_bias: bool
) -> bool:
    """Multiplies random matrices with padding, and compares with NumPy; what multiply returned."""
    x_type, y_type = types
    x = elements(rng, rows, (k + 31) // 32 * 32, x_type, k)
    per_pack = 4 if x_type == "f32" else 8
    weight = elements(rng, n, -(-k // per_pack) * per_pack, x_type, k)
    bias = elements(rng, 1, n, y_type, n)[0] if with_bias else None
    y = elements(rng, rows, (n + 31) // 32 * 32, y_type, 0)
    scratch = aligned_bytes(WORKSPACE_BYTES + 256)
    done = library.multiply(x, weight, bias, y, k, types, scratch)
    if done:
        x64, w64 = from_dtype(x, x_type)[:, :k].astype(float), from_dtype(weight, x_type)[:, :k].astype(float)
        expected = x64 @ w64.T + (0 if bias is None else from_dtype(bias, y_type).astype(float))
        # k + 2 roundings to fp32 of sums that are at most this, and one to y's type.
        bound = (k + 2) * 2.0**-24 * (np.abs(x64) @ np.abs(w64).T + 4)
        bound += {"f32": 0, "f16": 2.0**-11, "bf16": 2.0**-8}[y_type] * (np.abs(expected) + bound)
        values = from_dtype(y, y_type)
        assert (np.abs(values[:, :n] - expected) <= bound).all()
        assert np.isnan(values[:, n:]).all(), "written beyond the columns of y"
    return done


@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32")])
@pytest.mark.parametrize("with_bias", (False, True))
def test_the_library_is_told_what_to_multiply(calls: Calls, types: tuple[str, str], with_bias: bool) -> None:
    library = calls.open(calls.fake_path)
    rng = np.random.default_rng(len(types[1]))
    for rows, n, k in ((1, 8, 16), (5, 24, 40), (3, 7, 9), (17, 33, 64)):
        assert product(library, rng, rows, n, k, types, with_bias)
    assert list(calls.log.alignments) == [16] * 4
    assert calls.log.workspace_limit == WORKSPACE_BYTES
    assert calls.log.workspace_misalignment == 0
    assert calls.log.reduction_schemes == 2, "only sums of parts in fp32"
    library.close()


def test_an_algorithm_is_asked_for_once_for_each_shape_and_power_of_two_of_rows(calls: Calls) -> None:
    library = calls.open(calls.fake_path)
    rng = np.random.default_rng(1)
    before = calls.log.heuristics
    asked = []
    for rows in (1, 2, 3, 4, 5, 8, 9, 4, 3, 16, 1):
        product(library, rng, rows, 16, 32, ("bf16", "bf16"), False)
        asked.append((calls.log.heuristics - before, calls.log.rows_asked))
        assert calls.log.algorithm == 1
    assert asked == [(1, 1), (2, 2), (3, 4), (3, 4), (4, 8), (4, 8), (5, 16), *[(5, 16)] * 4]
    product(library, rng, 1, 16, 32, ("bf16", "f32"), False)
    product(library, rng, 1, 16, 32, ("bf16", "bf16"), True)
    product(library, rng, 1, 24, 32, ("bf16", "bf16"), False)
    product(library, rng, 1, 16, 40, ("bf16", "bf16"), False)
    assert calls.log.heuristics - before == 9
    library.close()


def test_one_algorithm_serves_all_numbers_of_rows_and_splits_no_sum(calls: Calls) -> None:
    library = calls.open(calls.fake_path, one_algorithm=True)
    rng = np.random.default_rng(2)
    before = calls.log.heuristics
    for rows in (1, 2, 9, 70):
        assert product(library, rng, rows, 16, 32, ("f16", "f16"), True)
        assert calls.log.algorithm == 3
    assert calls.log.heuristics - before == 1
    assert calls.log.reduction_schemes == 0
    library.close()


def test_a_shape_without_an_algorithm_is_left_alone_and_asked_for_once(calls: Calls) -> None:
    library = calls.open(calls.fake_path)
    rng = np.random.default_rng(3)
    before = calls.log.heuristics, calls.log.products
    for _ in range(3):
        assert not product(library, rng, 4, 16, 56, ("bf16", "bf16"), False)
    assert (calls.log.heuristics, calls.log.products) == (before[0] + 1, before[1])
    library.close()


def test_a_number_of_rows_that_the_algorithm_does_not_serve_is_left_alone(calls: Calls) -> None:
    library = calls.open(calls.fake_path)
    rng = np.random.default_rng(6)
    served = [product(library, rng, rows, 16, 32, ("bf16", "bf16"), False) for rows in (12, 13, 14)]
    assert served == [True, False, True]
    library.close()


def test_every_object_of_the_library_is_destroyed_once(calls: Calls) -> None:
    library = calls.open(calls.fake_path)
    for rows in (1, 3, 4):
        product(library, np.random.default_rng(4), rows, 16, 32, ("f32", "f32"), True)
    assert calls.log.objects == 1 + 2 * 4, "a handle; a description and three layouts for each of two algorithms"
    library.close()
    assert calls.log.objects == 0


def test_less_scratch_than_when_the_algorithm_was_chosen_is_refused(calls: Calls) -> None:
    library = calls.open(calls.fake_path)
    rng = np.random.default_rng(5)
    x, weight, y = (elements(rng, 8, 8, "f32", 8) for _ in range(3))
    assert library.multiply(x, weight, None, y, 8, ("f32", "f32"), aligned_bytes(5000))
    assert calls.log.workspace_bytes == 1000
    with pytest.raises(Failure, match="scratch: 600 bytes are left"):
        library.multiply(x, weight, None, y, 8, ("f32", "f32"), aligned_bytes(600))
    library.close()


def test_the_version_is_named(calls: Calls) -> None:
    library = calls.open(calls.fake_path)
    text = ctypes.create_string_buffer(64)
    scratch_bytes = calls.code.describe_library(library.pointer, text, c_size_t(64))
    assert text.value == b"cuBLASLt 13.2"
    assert scratch_bytes >= WORKSPACE_BYTES
    library.close()


def test_a_missing_library_is_named(calls: Calls, tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"cuBLASLt could not be opened: .*nowhere\.so: .*No such file"):
        calls.open(tmp_path / "nowhere.so")


def test_another_library_is_named_with_the_function_it_lacks(calls: Calls, libraries: tuple[Path, Path]) -> None:
    with pytest.raises(Failure, match=r"calls\.so is not cuBLASLt: it has no cublasLtCreate; cuBLAS 12 or 13"):
        calls.open(libraries[0])


def test_a_library_that_does_not_start_says_why(calls: Calls) -> None:
    status = c_int32.in_dll(calls.fake, "fake_create_status")
    status.value = 1
    try:
        with pytest.raises(Failure, match=r"could not be started: cublasLtCreate failed: a status of the fake \(1\)"):
            calls.open(calls.fake_path)
    finally:
        status.value = 0
    assert calls.log.objects == 0
