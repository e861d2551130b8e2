"""`device`: the kernels of the CUDA backend, run by the host in two orders of threads, and by a GPU if there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .device_ops import Device


def gpu_device() -> Device:
    cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'pyengine-llm[cuda13]'")
    native = pytest.importorskip("pyengine._cuda", reason="needs a build with the CUDA backend (PYENGINE_CUDA=ON)")
    if not cupy.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU and its driver")
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return Device("gpu", native, cupy, load_nvidia_dynamic_lib("cublasLt").abs_path)


@pytest.fixture(params=["simt-forward", "simt-reverse", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A test that takes it runs on each of the three; skipped, with the reason, where one is not to be had."""
    if request.param == "gpu":
        yield gpu_device()
        return
    native = request.getfixturevalue("simt")
    monkeypatch.setenv("SIMT_ORDER", request.param.removeprefix("simt-"))
    native.simt.reset()
    yield Device(request.param, native)
    native.simt.reset()
