"""The stand-in for CuPy has what the backend uses and nothing that CuPy has not; and it finds wrong use."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import pyengine.backends
from pyengine.backends.cuda_memory import DeviceMemory, Uploads

from .device import simt_device
from .host_cupy import Array, CUDARuntimeError, Device, DeviceMisuse, Event, Graph, HostCupy, OutOfMemoryError, Stream

BACKENDS = Path(pyengine.backends.__file__).parent
# Classes by their name in CuPy; `_simt`'s and the tests' own parts begin with an underscore or are not methods.
CLASSES = {
    "cuda.Device": Device,
    "cuda.Stream": Stream,
    "cuda.Event": Event,
    "cuda.Graph": Graph,
    "ndarray": Array,
}


@pytest.fixture
def cupy(simt: ModuleType) -> Iterator[HostCupy]:
    with simt_device(simt) as machine:
        yield machine


@pytest.fixture
def memory(cupy: HostCupy) -> Iterator[DeviceMemory]:
    with DeviceMemory(cupy, 0) as made:
        yield made


def names_used() -> set[str]:
    """Every name below `cupy` that the backend's files mention, such as "cuda.runtime.memcpyAsync"."""
    found = set()
    for path in BACKENDS.glob("cuda*.py"):
        tree = ast.parse(path.read_text())
        aliases = {}
        for node in ast.walk(tree):  # runtime = self._cupy.cuda.runtime
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = dotted(node.value)
                if name is not None and "cupy." in name:
                    aliases[node.targets[0].id] = name.partition("cupy.")[2]
        for node in ast.walk(tree):
            name = dotted(node) if isinstance(node, ast.Attribute) else None
            if name is None:
                continue
            head, _, rest = name.partition(".")
            if "cupy." in name:
                found.add(name.partition("cupy.")[2])
            elif head in aliases:
                found.add(f"{aliases[head]}.{rest}")
    return found


def dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return None if inner is None else f"{inner}.{node.attr}"
    return None


def attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def public_methods(kind: type) -> dict[str, Callable[..., Any]]:
    return {
        name: member
        for name, member in vars(kind).items()
        if callable(member) and (not name.startswith("_") or name in ("__enter__", "__exit__", "__getitem__"))
    }


def test_every_name_of_cupy_that_the_backend_uses_is_in_the_stand_in(cupy: HostCupy) -> None:
    names = names_used()
    assert {"cuda.Stream", "cuda.MemoryPool", "cuda.runtime.memcpyAsync", "cuda.runtime.memGetInfo"} <= names
    for name in names:
        attribute(cupy, name)


def test_what_the_stand_in_offers_is_in_cupy_with_the_same_arguments(cupy: HostCupy) -> None:
    real = pytest.importorskip("cupy", reason="compares with CuPy: pip install 'pyengine-llm[cuda13]'")
    for name in names_used():
        attribute(real, name)
    for name, kind in CLASSES.items():
        for method, fake in public_methods(kind).items():
            check_arguments(f"{name}.{method}", fake, getattr(attribute(real, name), method))
    for name in ("cuda.Stream", "cuda.Event"):
        check_arguments(name, CLASSES[name].__init__, attribute(real, name).__init__, leave_out=1)
    for name in ("cuda.MemoryPool", "cuda.PinnedMemoryPool"):
        pool = attribute(cupy, name)()
        for method in public_methods(type(pool)):
            check_arguments(f"{name}.{method}", getattr(type(pool), method), getattr(attribute(real, name), method))
    assert issubclass(real.cuda.runtime.CUDARuntimeError, RuntimeError)
    assert not issubclass(real.cuda.runtime.CUDARuntimeError, ValueError)
    assert issubclass(real.cuda.memory.OutOfMemoryError, MemoryError)
    for constant in ("memcpyHostToDevice", "memcpyDeviceToHost", "streamCaptureModeThreadLocal"):
        assert getattr(cupy.cuda.runtime, constant) == getattr(real.cuda.runtime, constant)


def check_arguments(name: str, fake: Any, real: Any, *, leave_out: int = 0) -> None:
    """Every argument of the stand-in is one of CuPy's, in the same place. `leave_out`: of its own, after self."""
    try:
        theirs = list(inspect.signature(real).parameters)
    except (TypeError, ValueError):  # a method of an extension type that does not tell
        return
    mine = [p.name for p in inspect.signature(fake).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    del mine[1 : 1 + leave_out]
    assert mine == theirs[: len(mine)] or set(mine) <= set(theirs), name


def test_data_of_a_copy_to_the_host_is_there_after_a_wait_and_not_before(memory: DeviceMemory) -> None:
    device = memory.array(4, np.int32, what="x", setting="x")
    source, target = memory.pinned(4, np.int32), memory.pinned(4, np.int32)
    source[:] = [1, 2, 3, 4]
    memory.to_device(device, source)
    memory.to_host(target, device)
    event = memory.event()
    event.record(memory.stream)
    assert target.tolist() != [1, 2, 3, 4]
    event.synchronize()
    assert target.tolist() == [1, 2, 3, 4]


def test_memory_that_a_copy_reads_must_be_left_alone_until_a_wait(memory: DeviceMemory) -> None:
    device, source = memory.array(4, np.int32, what="x", setting="x"), memory.pinned(4, np.int32)
    memory.to_device(device, source)
    source[0] = 7
    with pytest.raises(DeviceMisuse, match="changed while a copy"):
        memory.stream.synchronize()


def test_copies_from_and_to_memory_of_the_wrong_kind_are_found(memory: DeviceMemory, cupy: HostCupy) -> None:
    device, pinned = memory.array(4, np.int32, what="x", setting="x"), memory.pinned(4, np.int32)
    with pytest.raises(DeviceMisuse, match="not pinned"):
        memory.to_device(device, np.zeros(4, np.int32))
    runtime, handle = cupy.cuda.runtime, memory.stream.ptr
    with pytest.raises(DeviceMisuse, match="leaves the device's allocations"):
        runtime.memcpyAsync(pinned.ctypes.data, pinned.ctypes.data, 16, runtime.memcpyHostToDevice, handle)
    with pytest.raises(DeviceMisuse, match="leaves the device's allocations"):
        runtime.memcpyAsync(device.data.ptr, pinned.ctypes.data, 20, runtime.memcpyHostToDevice, handle)
    with pytest.raises(DeviceMisuse, match="not the current one"):
        runtime.memcpyAsync(device.data.ptr, pinned.ctypes.data, 16, runtime.memcpyHostToDevice, 0)
    address = device.data.ptr
    del device
    memory.give_back()
    with pytest.raises(DeviceMisuse, match="given back"):
        runtime.memcpyAsync(address, pinned.ctypes.data, 16, runtime.memcpyHostToDevice, handle)


def test_events_captures_and_allocations_in_the_wrong_place_are_found(memory: DeviceMemory, cupy: HostCupy) -> None:
    with pytest.raises(DeviceMisuse, match="never recorded"):
        memory.event().synchronize()
    with cupy.no_allocations(), pytest.raises(DeviceMisuse, match="allocated on the device inside a step"):
        memory.array(1, np.int32, what="x", setting="x")
    pinned, device = memory.pinned(4, np.int32), memory.array(4, np.int32, what="x", setting="x")
    memory.begin_capture()
    for wrong in (
        lambda: memory.to_device(device, pinned),
        lambda: memory.event().record(memory.stream),
        lambda: memory.array(1, np.int32, what="x", setting="x"),
    ):
        with pytest.raises(DeviceMisuse):
            wrong()
    with pytest.raises(CUDARuntimeError, match="cudaErrorStreamCaptureUnsupported"):
        memory.stream.synchronize()
    memory.abandon_capture()
    memory.stream.synchronize()


def test_no_call_is_made_without_a_device_and_no_more_memory_is_given_than_there_is(simt: ModuleType) -> None:
    with simt_device(simt, total_bytes=1000) as cupy:
        with pytest.raises(DeviceMisuse, match="no device"):
            cupy.cuda.MemoryPool().malloc(1)
        with cupy.cuda.Device(0):
            pool = cupy.cuda.MemoryPool()
            block = pool.malloc(900)
            with pytest.raises(OutOfMemoryError):
                pool.malloc(101)
            del block
            pool.free_all_blocks()
            pool.malloc(1000)


def test_a_write_behind_an_allocation_is_found(memory: DeviceMemory, cupy: HostCupy, simt: ModuleType) -> None:
    device = memory.array(4, np.int32, what="x", setting="x")
    cupy.check_guards()
    simt.simt.fill(device.data.ptr, 0, 17, memory.stream.ptr)
    with pytest.raises(DeviceMisuse, match="behind an allocation"):
        cupy.check_guards()


@pytest.mark.parametrize("size", [0, 1, 1000, 2**20 // 4, 2**20 // 4 + 1, 10**6])
def test_uploads_bring_arrays_of_any_length_in_pieces(memory: DeviceMemory, size: int) -> None:
    host = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    device, back = memory.array(size, np.float32, what="x", setting="x"), memory.pinned(size, np.float32)
    Uploads(memory, 0).upload(host, device)
    memory.to_host(back, device)
    memory.stream.synchronize()
    assert np.array_equal(back, host)
