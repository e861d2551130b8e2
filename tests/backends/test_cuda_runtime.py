"""Whatever a GPU needs and is not there is named, with the one command that brings it; "auto" then means the CPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyengine import DeviceNotAvailable, Engine, InvalidRequest
from pyengine.backends import cuda_runtime as runtime_module
from pyengine.backends.cuda_runtime import cuda_is_visible, cuda_runtime, driver_version

from ..engine.conftest import write_model


class CUDARuntimeError(RuntimeError):
    pass


class DynamicLibNotFoundError(RuntimeError):
    pass


class Machine:
    """A machine with a GPU, its driver and all libraries; a test takes away what it is about."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.modules: dict[str, Any] = {}
        monkeypatch.setattr(runtime_module, "import_module", self._import)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(sys, "platform", "linux")
        self.has_driver_for(13000)
        self.has_build_with("13.0.88")
        self.has_cupy_for(13020, lambda: 2)
        self.modules["pyengine._cpu"] = SimpleNamespace(build=json.dumps({"cuda": "not built: no CUDA compiler"}))
        self.has_cublas(lambda name: SimpleNamespace(abs_path=f"/lib/{name}.so"))

    def _import(self, name: str) -> Any:
        if name not in self.modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return self.modules[name]

    def has_driver_for(self, version: int | None) -> None:
        self._monkeypatch.setattr(runtime_module, "driver_version", lambda: version)

    def has_build_with(self, toolkit: str) -> None:
        native = SimpleNamespace(build=json.dumps({"cuda_toolkit": toolkit}))
        self.modules["pyengine.backends.cuda_module"] = SimpleNamespace(native=native)

    def has_cupy_for(self, version: int, count: Callable[[], int]) -> None:
        runtime = SimpleNamespace(
            runtimeGetVersion=lambda: version, getDeviceCount=count, CUDARuntimeError=CUDARuntimeError
        )
        self.modules["cupy"] = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))

    def has_cublas(self, load: Callable[[str], Any]) -> None:
        self.modules["cuda.pathfinder"] = SimpleNamespace(
            load_nvidia_dynamic_lib=load, DynamicLibNotFoundError=DynamicLibNotFoundError
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def refusal(device: str = "cuda", index: int = 0) -> str:
    with pytest.raises(DeviceNotAvailable) as refused:
        cuda_runtime(device, index)
    return str(refused.value)


def not_found(name: str) -> Any:
    raise DynamicLibNotFoundError(name)


def no_device() -> int:
    raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")


def test_a_machine_that_has_everything_gives_the_device_and_the_path_of_cublas(machine: Machine) -> None:
    runtime = cuda_runtime("cuda:1", 1)
    assert (runtime.device_index, runtime.matmul_library) == (1, "/lib/cublasLt.so")
    assert runtime.cupy is machine.modules["cupy"]
    assert runtime.native is machine.modules["pyengine.backends.cuda_module"].native
    assert cuda_is_visible()


def test_a_build_without_kernels_says_why_and_how_to_get_one(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.modules["pyengine.backends.cuda_module"] = SimpleNamespace(native=None)
    assert "no CUDA backend (not built: no CUDA compiler)" in refusal()
    assert "PYENGINE_CUDA=ON pip install" in refusal()
    assert not cuda_is_visible()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux only; use device='cpu'" in refusal()


def test_no_driver_and_an_old_driver_are_told_apart(machine: Machine) -> None:
    machine.has_driver_for(None)
    assert "no NVIDIA driver is installed" in refusal()
    assert not cuda_is_visible()
    machine.has_driver_for(12040)
    assert "driver here is for CUDA 12.4" in refusal()
    assert "toolkit 13.0.88. Update the driver to 580 or newer" in refusal()
    assert not cuda_is_visible()


@pytest.mark.parametrize(("driver", "extra"), [(12080, "cuda12"), (13000, "cuda13"), (14010, "cuda13")])
def test_missing_libraries_name_the_extra_for_the_driver(machine: Machine, driver: int, extra: str) -> None:
    machine.has_driver_for(driver)
    machine.has_build_with("12.8.93")
    command = f'pip install "pyengine-llm[{extra}]"'
    machine.has_cupy_for(12090, lambda: 1)
    machine.has_cublas(not_found)
    assert "cuBLAS (libcublasLt) is not found" in refusal()
    assert refusal().endswith(f"Install it: {command}")
    assert cuda_is_visible()  # so that "auto" says this too, instead of being slow
    del machine.modules["cuda.pathfinder"]
    assert "cuda.pathfinder" in refusal()
    assert refusal().endswith(command)
    del machine.modules["cupy"]
    assert "CuPy" in refusal()
    assert refusal().endswith(f"Install it: {command}")
    assert not cuda_is_visible()


def test_a_cupy_that_is_too_new_for_the_driver_is_to_be_replaced(machine: Machine) -> None:
    machine.has_driver_for(12080)
    machine.has_build_with("12.8.93")
    assert "installed CuPy is for CUDA 13.2, and the driver here is for 12.8" in refusal()
    assert refusal().endswith('pip uninstall -y cupy-cuda13x && pip install "pyengine-llm[cuda12]"')


def test_no_visible_device_and_an_index_too_large_say_what_is_visible(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "2 devices are visible; the last one is 'cuda:1'" in refusal("cuda:2", 2)
    machine.has_cupy_for(13000, no_device)
    assert "cudaErrorNoDevice" in refusal()
    assert not cuda_is_visible()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is ''" in refusal()
    machine.has_cupy_for(13000, lambda: 0)
    assert "no NVIDIA GPU is visible here" in refusal()


def test_the_driver_of_this_machine_is_asked_without_an_error() -> None:
    version = driver_version()
    assert version is None or version >= 11000


def test_engines_raise_these_errors_and_auto_takes_the_cpu(tmp_path: Path, machine: Machine) -> None:
    machine.has_driver_for(None)
    folder = write_model(tmp_path)
    for device in ("cuda", "cuda:0", "cuda:7"):
        with pytest.raises(DeviceNotAvailable, match=f"device is {device!r}, but no NVIDIA driver"):
            Engine(folder, device=device)
    with Engine(folder, device="auto", kv_cache_memory="1MiB", num_threads=1) as engine:
        assert engine.model.backend.description.startswith("cpu")


@pytest.mark.parametrize(
    "device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1.0", "cpu:0", "cpu:", "simt:0", "", None]
)
def test_a_name_that_is_none_is_refused_with_those_that_are(tmp_path: Path, device: Any) -> None:
    with pytest.raises(InvalidRequest, match=re.escape("auto, cpu, cuda, cuda:N")) as refused:
        Engine(write_model(tmp_path), device=device)
    assert refused.value.field == "device"


def test_the_device_of_the_tests_says_so_where_they_do_not_provide_it(tmp_path: Path) -> None:
    with pytest.raises(DeviceNotAvailable, match="for pyengine's own tests only"):
        Engine(write_model(tmp_path), device="simt")


def test_a_cpu_engine_imports_neither_cupy_nor_what_finds_cublas(tmp_path: Path) -> None:
    code = """
import sys
from pyengine import Engine
Engine(sys.argv[1], device="cpu", kv_cache_memory="1MiB", num_threads=1).close()
print([name for name in sys.modules if name.split(".")[0] in ("cupy", "cupyx", "cuda") or name.endswith("._cuda")])
"""
    folder = write_model(tmp_path)
    # Elsewhere, so that the folder of this checkout does not stand in for what is installed.
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "[]"
