"""The engine that runs CUDA kernels on the host: what kernels compute, and the mistakes that it must name."""

from __future__ import annotations

from itertools import permutations
from types import ModuleType

import numpy as np
import pytest

ORDERS = ["forward", "reverse", "1", "2", "12345"]


def values(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32)


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest, checks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SIMT_ORDER", request.param)
    return request.param


# ---- correct kernels: the same result in every order --------------------------------------------------------------


def test_indices_cover_grid_and_block(checks: ModuleType, order: str) -> None:
    array = np.zeros(12 * 30, np.float32)
    checks.run("indices", array)
    expected = np.arange(30)[None, :] + 1000 * np.arange(12)[:, None]
    assert (array.reshape(12, 30) == expected).all()


@pytest.mark.parametrize("threads", [32, 64, 1024])
def test_warp_instructions(checks: ModuleType, order: str, threads: int) -> None:
    array = np.full(18 * threads, -100, np.float32)
    checks.run("all_instructions", array, 1, threads)
    lane = np.arange(threads) % 32
    half = lane // 4 * 4 + np.minimum(lane % 4 + 1, 3)  # the last of four keeps its own
    expected = [
        np.full(threads, 5),
        lane // 8 * 8 + 3,
        np.where(lane < 2, lane, lane - 2),
        np.where(lane > 29, lane, lane + 2),
        lane ^ 16,
        half + 0.5,
        np.full(threads, 11),  # 0, 3, ..., 30
        np.full(threads, 1),
        np.full(threads, 0),
        np.full(threads, -496),
        np.full(threads, -9),
        np.full(threads, 3),
        np.full(threads, 1),
        np.full(threads, 4),
        np.where(lane < 8, 28, -100),
        np.full(threads, threads // 32),
        np.full(threads, 1),
        np.full(threads, 1),
    ]
    np.testing.assert_array_equal(array.reshape(18, threads), np.stack(expected))


def test_known_values_of_arithmetic(checks: ModuleType) -> None:
    array = np.full(100, -1, np.float32)
    checks.run("known_values", array, 1, 1)
    count = int(array[0])
    assert count > 25
    wrong = [line for line in range(1, count + 1) if array[line] != 1]
    assert not wrong, f"lines of known_values that do not hold (the first is 1): {wrong}"


@pytest.mark.parametrize(("name", "step"), [("multiply_bf16", 2.0**-7), ("multiply_f16", 2.0**-10)])
def test_tensor_core_tile(checks: ModuleType, order: str, name: str, step: float) -> None:
    # Integers times a step that the type holds exactly: the products and their sums are exact in fp32.
    rng = np.random.default_rng(3)
    a = rng.integers(-100, 100, (16, 16)) * step
    b = rng.integers(-100, 100, (16, 8)) * step
    array = np.concatenate([a.ravel(), b.ravel(), np.zeros(256)]).astype(np.float32)
    checks.run(name, array)
    np.testing.assert_array_equal(array[384:512].reshape(16, 8), a @ b + 1)
    np.testing.assert_array_equal(array[512:].reshape(16, 8), a @ b + 1)


def test_barrier_orders_shared_memory(checks: ModuleType, order: str) -> None:
    array = values(64)
    checks.run("reverse_values", array, 1, 64)
    assert (array == values(64)[::-1]).all()


def test_atomics_count_all_threads(checks: ModuleType, order: str) -> None:
    array = values(1)
    checks.run("count_threads", array, 5, 96)
    assert array[0] == 5 * 96


def test_threads_that_ended_are_not_waited_for(checks: ModuleType, order: str) -> None:
    array = values(64)
    checks.run("some_threads_end_early", array, 1, 64)
    assert (array == np.where(np.arange(64) % 2, np.arange(64), 32)).all()


def test_async_copies_and_zeros(checks: ModuleType, order: str) -> None:
    array = values(128)
    checks.run("async_copy", array)
    first = values(128)
    second = np.where(np.arange(128) // 4 % 2 == 0, first, 0)
    assert (array == first + 100 * second).all()


def test_an_empty_grid_runs_nothing(checks: ModuleType) -> None:
    before = checks.simt.launches()
    checks.run("empty_grid", values(1))
    assert checks.simt.launches() == before


# ---- what makes mistakes visible -----------------------------------------------------------------------------------


def order_of(checks: ModuleType, blocks: int, threads: int) -> list[int]:
    array = np.zeros(1 + blocks * threads, np.float32)
    checks.run("order_of_threads", array, blocks, threads)
    return [int(x) for x in array[1:]]


def test_orders_of_blocks_and_threads(checks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = list(range(3 * 4))
    assert order_of(checks, 3, 4) == everyone
    monkeypatch.setenv("SIMT_ORDER", "reverse")
    assert order_of(checks, 3, 4) == everyone[::-1]
    seen = set()
    for seed in range(40):
        monkeypatch.setenv("SIMT_ORDER", str(seed))
        ran = order_of(checks, 1, 3)
        assert ran == order_of(checks, 1, 3), "the same number must give the same order"
        seen.add(tuple(ran))
    assert seen == set(permutations(range(3)))


def test_an_unknown_order_is_refused(checks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMT_ORDER", "backwards")
    with pytest.raises(RuntimeError, match="SIMT_ORDER is 'backwards'; it must be forward, reverse or a number"):
        checks.run("add_one", values(32))


def test_shared_memory_is_nan_for_every_block(checks: ModuleType, order: str) -> None:
    array = values(3 * 64)
    checks.run("fresh_shared_memory", array, 3, 64)
    assert np.isnan(array).all()


def test_a_missing_barrier_shows_in_every_order(checks: ModuleType, order: str) -> None:
    array = values(64)
    checks.run("reverse_values_without_barrier", array, 1, 64)
    assert not (array == values(64)[::-1]).all()


@pytest.mark.parametrize(
    "name", ["async_copy_without_wait", "async_copy_waits_for_the_wrong_group", "async_copy_of_a_changing_source"]
)
def test_early_and_late_copies_differ_where_a_wait_is_missing(
    checks: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    late, early = values(128), values(128)
    checks.run(name, late)
    monkeypatch.setenv("SIMT_ORDER", "reverse")
    checks.run(name, early)
    assert not np.array_equal(late, early)


# ---- mistakes that are named ---------------------------------------------------------------------------------------

MISTAKES = [
    (
        "half_a_warp_shuffles",
        32,
        r"deadlock: 16 of 32 threads .*\n  16 at .*meetings\.cu:\d+, shuffle, ",
    ),
    (
        "lanes_diverge",
        32,
        r"meetings\.cu:\d+: lanes of one warp diverged: one waits at shuffle at .*\.cu:\d+, another",
    ),
    ("mask_without_its_caller", 32, r"meetings\.cu:\d+: shuffle: its mask leaves out the lane that calls it"),
    ("masks_overlap", 32, r"meetings\.cu:\d+: lanes of one warp wait with masks that overlap but differ"),
    (
        "shuffle_from_absent_lane",
        32,
        r"meetings\.cu:\d+: the shuffle of lane 0 reads lane 9, which its mask",
    ),
    ("shuffle_of_width_12", 32, r"meetings\.cu:\d+: the width of a shuffle is not a power of two"),
    # The mask names lanes that the second warp does not have.
    ("all_instructions", 40, r"40 of 40 threads .*\n  32 at .*, __syncthreads, .*\n  8 at .*, shuffle, .* \(32,0,0\)"),
    ("different_barriers", 64, r"threads of one block wait at different barriers: .*meetings\.cu:\d+ and .*\.cu:\d+"),
    ("host_exception", 32, r"thrown in a kernel"),
    ("shared_struct_larger_than_launched", 64, r"memory\.cu:\d+: the kernel's shared struct has 1280 bytes.* 1276"),
    ("index_outside_array", 32, r"memory\.cu:\d+: index 64 is outside 'float ?\[64\]'"),
    ("write_behind_shared_memory", 32, r"a thread wrote behind the end of shared memory"),
    # Clang does not check this access, and leaves it to the hardware.
    (
        "misaligned_load",
        32,
        r"numeric\.h:\d+: an access to .*uint4' at 0x\w+, which is not a mul|not aligned",
    ),
    ("misaligned_async_copy", 32, r"copies\.cu:\d+: cp\.async: its address is not a multiple of 16 bytes"),
    ("async_copy_to_global_memory", 32, r"copies\.cu:\d+: cp\.async writes outside shared memory"),
    ("misaligned_ldmatrix", 32, r"copies\.cu:\d+: ldmatrix: its address is not a multiple of 16 bytes"),
    ("null_pointer", 32, r"a thread was stopped by Segmentation fault at address"),
    ("shift_too_far", 32, r"memory\.cu:\d+: a shift by 32 bits.\n  thread \(31,0,0\)"),
    ("divide_by_zero", 32, r"memory\.cu:\d+: an integer division by zero"),
    ("endless_recursion", 32, r"a thread needs more than its 64 KiB of stack"),
]


@pytest.mark.parametrize(("name", "threads", "message"), MISTAKES, ids=[f"{m[0]}-{m[1]}" for m in MISTAKES])
def test_a_mistake_in_a_kernel_is_named(checks: ModuleType, name: str, threads: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as caught:
        checks.run(name, np.zeros(1 << 12, np.float32), 2, threads)
    assert "in block (0,0,0) of the launch at tests/simt/kernels/" in str(caught.value)
    assert "/tests/" not in str(caught.value), "files are named from the root of the repository"
    after = values(32)
    checks.run("add_one", after)  # the engine goes on
    assert (after == values(32) + 1).all()


LAUNCHES = [
    ("add_one", 1, 1025, r"memory\.cu:\d+: block\.x is 1025; the limit is 1024"),
    ("add_one", 1, 0, r"memory\.cu:\d+: a block of 0 threads; it must have 1 to 1024"),
    ("add_one", 1 << 31, 32, r"memory\.cu:\d+: grid\.x is 2147483648; the limit is 2147483647"),
    ("grid_of_height_65536", 1, 32, r"memory\.cu:\d+: grid\.y is 65536; the limit is 65535"),
    (
        "shared_memory_over_the_limit",
        1,
        32,
        r"memory\.cu:\d+: a block with 101377 bytes of shared memory; the limit",
    ),
]


@pytest.mark.parametrize(("name", "blocks", "threads", "message"), LAUNCHES)
def test_a_launch_beyond_the_limits_is_refused(
    checks: ModuleType, name: str, blocks: int, threads: int, message: str
) -> None:
    array = values(64)
    with pytest.raises(RuntimeError, match=message):
        checks.run(name, array, blocks, threads)
    assert (array == values(64)).all()


def test_the_limit_of_shared_memory_can_be_set(checks: ModuleType) -> None:
    assert checks.simt.shared_limit() == 99 * 1024 == checks.simt.DEFAULT_SHARED_LIMIT
    checks.simt.set_shared_limit(227 * 1024)
    try:
        checks.run("shared_memory_over_the_limit", values(64))
    finally:
        checks.simt.set_shared_limit(checks.simt.DEFAULT_SHARED_LIMIT)


# ---- streams, graphs and failing devices ---------------------------------------------------------------------------


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_a_captured_stream_is_recorded_and_replayed_in_order(checks: ModuleType) -> None:
    simt = checks.simt
    array, source = values(32), np.full(32, 7, np.float32)
    before = simt.launches()
    simt.begin_capture(5)
    checks.run("add_one", array, stream=5)
    simt.copy(address(source), address(array), array.nbytes, 5)
    checks.run("add_one", array, stream=5)
    simt.fill(address(array), 0, 4, 5)
    checks.run("add_one", array, stream=6)  # another stream: at once
    graph = simt.end_capture(5)
    assert simt.launches() == before + 3
    assert (array == values(32) + 1).all()
    assert (source == 7).all()
    assert len(graph) == 4

    graph.launch()
    assert (source == values(32) + 2).all()
    expected = values(32) + 3
    expected[0] = 0
    assert (array == expected).all()
    graph.launch(5)
    assert (source == expected + 1).all()
    assert simt.launches() == before + 3
    assert simt.graph_launches() >= 2


def test_a_graph_in_a_captured_stream_becomes_part_of_the_outer_graph(checks: ModuleType) -> None:
    simt, array = checks.simt, values(32)
    simt.begin_capture(5)
    checks.run("add_one", array, stream=5)
    inner = simt.end_capture(5)
    simt.begin_capture(5)
    inner.launch(5)
    inner.launch(5)
    outer = simt.end_capture(5)
    assert (array == values(32)).all()
    del inner
    outer.launch()
    assert (array == values(32) + 2).all()


def test_waiting_for_a_captured_stream_is_an_error_and_ends_the_capture(checks: ModuleType) -> None:
    simt = checks.simt
    simt.begin_capture(5)
    simt.synchronize(6)
    with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureUnsupported"):
        simt.synchronize(5)
    with pytest.raises(RuntimeError, match="The capture is invalid: cudaStreamSynchronize was called"):
        simt.end_capture(5)
    simt.synchronize(5)


def test_captures_that_cannot_be(checks: ModuleType) -> None:
    simt = checks.simt
    with pytest.raises(ValueError, match="default stream"):
        simt.begin_capture(0)
    with pytest.raises(ValueError, match="not captured"):
        simt.end_capture(5)
    simt.begin_capture(5)
    with pytest.raises(ValueError, match="captured already"):
        simt.begin_capture(5)


def test_a_refused_launch_is_refused_in_a_capture_too(checks: ModuleType) -> None:
    checks.simt.begin_capture(5)
    with pytest.raises(RuntimeError, match=r"block\.x is 2000"):
        checks.run("add_one", values(32), 1, 2000, 5)


@pytest.mark.parametrize("graph", [False, True])
def test_a_launch_that_was_asked_to_fail(checks: ModuleType, graph: bool) -> None:
    simt, array = checks.simt, values(32)
    simt.begin_capture(5)
    checks.run("add_one", array, stream=5)
    recorded = simt.end_capture(5)
    assert simt.error() is None
    simt.fail_next("cudaErrorIllegalAddress")
    assert simt.error() is None, "the device is well until the launch"
    simt.synchronize()
    what = "a graph launch" if graph else "a kernel launch"
    text = f"{what} failed: an illegal memory access was encountered \\(cudaErrorIllegalAddress\\)"
    with pytest.raises(RuntimeError, match=text):
        recorded.launch() if graph else checks.run("add_one", array)
    assert simt.error() == (700, "cudaErrorIllegalAddress", "an illegal memory access was encountered")
    calls = [
        lambda: checks.run("add_one", array),
        recorded.launch,
        simt.synchronize,
        lambda: simt.copy(address(array), address(array), 4),
        lambda: simt.fill(address(array), 0, 4),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
            call()
    assert (array == values(32)).all()
    simt.reset()
    checks.run("add_one", array)
    assert (array == values(32) + 1).all()


def test_a_failure_that_shows_when_somebody_waits(checks: ModuleType) -> None:
    simt, array = checks.simt, values(32)
    simt.fail_next("cudaErrorLaunchFailure", at="synchronize")
    simt.synchronize()  # nothing was launched yet
    checks.run("add_one", array)
    checks.run("add_one", array)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"unspecified launch failure \(cudaErrorLaunchFailure\)"):
            simt.synchronize()
    with pytest.raises(RuntimeError, match="a kernel launch failed: unspecified launch failure"):
        checks.run("add_one", array)


def test_failures_nobody_knows_are_refused(checks: ModuleType) -> None:
    with pytest.raises(ValueError, match="'cudaErrorOfMine' is none of the errors"):
        checks.simt.fail_next("cudaErrorOfMine")
    with pytest.raises(ValueError, match="at is 'noon'; it must be launch or synchronize"):
        checks.simt.fail_next("cudaErrorAssert", at="noon")
