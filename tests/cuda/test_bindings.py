"""What the bindings of the CUDA backend accept, and what they refuse in which words."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pyengine import _cpu
from pyengine.backends.step_inputs import SequenceChunk
from tests.backends.tiny_decoder import VOCAB, TinyDecoder, greedy_step, put_on_cpu

from .device_ops import Altered, Device, Guarded, HostArray, read_only, shifted

PROMPTS = [SequenceChunk([5, 9, 33], 0, [2]), SequenceChunk([7], 0, [0]), SequenceChunk(list(range(20)), 0, [5, 3])]


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "rope_positions", "max_tokens", "max_seqs", "max_rows")


def tiny_on(device: Device, dtype: str = "float32", **settings: Any) -> TinyDecoder:
    return TinyDecoder(device.module, device.context(**settings), device.to_device, dtype)


def host(array: Any) -> np.ndarray:
    return array.get()


def every_other(array: Any) -> Any:
    """The elements 0, 2, ... of an array twice as long: as many, but not contiguous."""
    return array[::2]


def spread(device: Device, array: Any) -> Any:
    """The same elements, lying apart."""
    return every_other(device.to_device(np.repeat(host(array), 2, axis=0)))


# ---- arrays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("aligned", [True, False])
def test_read_matrix_widens_every_type_exactly(device: Device, dtype: str, aligned: bool) -> None:
    values = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    bits = values.view(np.uint32) >> 16
    stored = {"f32": values, "f16": values.astype(np.float16), "bf16": bits.astype(np.uint16)}[dtype]
    expected = {"f32": values, "f16": stored.astype(np.float32), "bf16": (bits << 16).view(np.float32)}[dtype]
    matrix = Guarded(device, (5, 7), dtype, stored, aligned=aligned)
    np.testing.assert_array_equal(device.ops.read_matrix(device.context(), matrix.array), expected)
    for rows in (0, 1):
        part = device.ops.read_matrix(device.context(), matrix.array[:rows])
        np.testing.assert_array_equal(part, expected[:rows])


def test_the_guard_of_a_buffer_sees_a_write_of_one_byte_on_each_side(simt: ModuleType) -> None:
    device = Device("simt-forward", simt)
    for shape, aligned in (((3, 5), True), ((3, 5), False), ((7,), True)):
        matrix = Guarded(device, shape, "f32", np.zeros(shape), aligned=aligned)
        assert (matrix.get() == np.zeros(shape)).all()
        address = matrix.array.array.ctypes.data
        row_bytes = matrix.array.array.strides[0] if len(shape) == 2 else 0
        last = address + (shape[0] - 1) * row_bytes + shape[-1] * 4
        for place in (address - 1, address + shape[-1] * 4, last):
            simt.simt.fill(place, 0, 1)
            with pytest.raises(AssertionError, match="written outside the array"):
                matrix.get()
            simt.simt.fill(place, 0xFF, 1)
        matrix.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "of a version before 3"),
        ({"version": ...}, "without all that version 3 says"),
        ({"shape": ...}, "without all that version 3 says"),
        ({"data": 7}, "whose fields are not what version 3 says"),
        ({"shape": "2x2"}, "whose fields are not what version 3 says"),
        ({"data": (0, False)}, "does not lie in the memory of a CUDA device"),
        ({"shape": (-2, 2)}, "has a dimension of negative length"),
        ({"typestr": "<f"}, "has items of type '<f'"),
        ({"typestr": "<f0"}, "has items of type '<f0', which has no size"),
        ({"typestr": "<f4x"}, "has items of type '<f4x', which has no size"),
        ({"typestr": "<f99999999999999999999"}, "which has no size"),
        ({"mask": HostArray(np.ones(1, bool))}, "is masked"),
        ({"stream": 0}, "names stream 0"),
        ({"strides": (4,)}, "has not one stride for each dimension"),
        ({"typestr": ">f4"}, "has items of type '>f4'"),
        ({"typestr": "<f8"}, "has a dtype that is not float32, float16, or uint16 for bf16"),
        ({"typestr": "<i2"}, "has a dtype that is not float32, float16, or uint16 for bf16"),
        ({"strides": (8, 8)}, "has rows that are not contiguous"),
        ({"strides": (4, 4)}, "has rows that overlap"),
        ({"shape": (4,), "strides": (4,)}, "must have 2 dimensions, has 1"),
    ],
)
def test_an_array_that_is_none_is_refused_by_its_name(device: Device, change: dict[str, Any], message: str) -> None:
    matrix = device.to_device(np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match=f"argument 'x' .*{message}"):
        device.ops.read_matrix(device.context(), Altered(matrix, **change))


def test_fields_that_may_be_absent(device: Device) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    matrix = device.to_device(values)
    for change in ({"stream": ...}, {"stream": None}, {"strides": ...}, {"strides": None}, {"mask": None}):
        read = device.ops.read_matrix(device.context(), Altered(matrix, **change))
        np.testing.assert_array_equal(read, values)


def test_an_array_of_another_stream_is_waited_for(device: Device) -> None:
    values = np.ones((512, 512), np.float32)
    context = device.context()
    with device.stream():
        matrix = device.to_device(values)
        if device.cupy is not None:
            for _ in range(200):  # so long that reading too early would show
                matrix = matrix @ matrix / 512
        read = device.ops.read_matrix(context, matrix)
    np.testing.assert_allclose(read, values, rtol=1e-5)


@pytest.mark.parametrize("what", ["a NumPy array", "a list", "None"])
def test_what_is_not_on_the_device_is_refused_by_name(device: Device, what: str) -> None:
    thing = {"a NumPy array": np.zeros((2, 2), np.float32), "a list": [[0.0]], "None": None}[what]
    kind = type(thing).__name__
    with pytest.raises(
        ValueError, match=f"'x' is of type {kind}; it must be an array in the memory of the CUDA device"
    ):
        device.ops.read_matrix(device.context(), thing)


def test_an_exception_of_the_interface_itself_arrives(device: Device) -> None:
    class Freed:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise KeyError("freed")

    with pytest.raises(KeyError, match="freed"):
        device.ops.read_matrix(device.context(), Freed())


# ---- contexts ------------------------------------------------------------------------------------------------------


def test_a_context_says_what_it_is(device: Device) -> None:
    context = device.context(deterministic=True)
    assert context.device == 0
    assert context.deterministic
    assert not device.context().deterministic
    begin = "cuda " if device.cupy is not None else "simt, CUDA kernels on the host, a loop on the host"
    assert context.description.startswith(begin)
    assert "," not in device.context(library=False).description.removeprefix("simt, ")
    for dtype in ("f32", "f16", "bf16"):
        assert context.activation_types(dtype) == (dtype, dtype, dtype)


@pytest.mark.parametrize("number", [-1, 99])
def test_a_device_that_is_not_there_is_refused(device: Device, number: int) -> None:
    with pytest.raises(ValueError, match=f"'device' is {number}; this machine has [0-9]+ CUDA device"):
        device.module.Context(number)


def test_a_context_of_another_backend_is_refused(device: Device) -> None:
    tiny = tiny_on(device)
    other = _cpu.Context(1)
    with pytest.raises(TypeError):
        device.ops.read_matrix(other, device.to_device(np.zeros((2, 2), np.float32)))
    with pytest.raises(TypeError):
        device.module.Decoder(**{**tiny.parts, "context": other})


def test_scratch_that_does_not_fit_is_refused(device: Device) -> None:
    context = device.context()
    scratch = device.filled(1024)
    for bad, message in (
        (shifted(scratch, 32), "not aligned to 64 bytes|not 64-byte aligned"),
        (read_only(scratch), "'scratch' is read-only"),
        (spread(device, scratch), "'scratch' is not C-contiguous"),
        (np.zeros(1024, np.uint8), "'scratch' is of type ndarray"),
    ):
        for bind in (context.bind_scratch, lambda array: device.module.bind_scratch(context, array)):
            with pytest.raises(ValueError, match=message):
                bind(bad)


# ---- the decoder ---------------------------------------------------------------------------------------------------

Change = Callable[[Device, Any], Any]

BAD_BYTES: dict[str, tuple[Change, str]] = {
    "on the host": (lambda device, array: host(array), "is of type ndarray"),
    "too small": (lambda device, array: array[: len(array) - 1], "are needed"),
    "misaligned": (lambda device, array: shifted(array), "is not aligned to"),
    "apart": (spread, "is not C-contiguous"),
}
READ_ONLY: dict[str, tuple[Change, str]] = {"read-only": (lambda device, array: read_only(array), "is read-only")}
BAD_FLOATS: dict[str, tuple[Change, str]] = {
    **BAD_BYTES,
    "wrong type": (lambda device, array: array.view(np.int32), "is not float32"),
}


@pytest.mark.parametrize("bad", [*BAD_BYTES, *READ_ONLY])
@pytest.mark.parametrize("name", ["kv_blocks", "workspace"])
def test_the_decoder_names_the_buffer_that_it_refuses(device: Device, name: str, bad: str) -> None:
    tiny = tiny_on(device)
    change, message = {**BAD_BYTES, **READ_ONLY}[bad]
    with pytest.raises(ValueError, match=f"argument '{name}' .*{message}"):
        device.module.Decoder(**{**tiny.parts, name: change(device, tiny.parts[name])})


@pytest.mark.parametrize("bad", [*BAD_FLOATS, "missing"])
def test_the_decoder_names_the_array_that_it_refuses(device: Device, bad: str) -> None:
    tiny = tiny_on(device)
    arrays = tiny.parts["arrays"]
    assert len(arrays) > 20
    for name in arrays:
        is_weight = arrays[name].dtype == np.uint8
        if bad == "missing":
            if name.endswith(("bias", "q_norm", "k_norm")):
                continue  # a model may have none
            changed = {key: value for key, value in arrays.items() if key != name}
            message = "is missing"
        elif is_weight and bad == "wrong type":
            continue  # packed weights are bytes
        else:
            change, message = BAD_FLOATS[bad]
            changed = {**arrays, name: change(device, arrays[name])}
        with pytest.raises(ValueError, match=f"argument '{name}' .*{message}"):
            device.module.Decoder(**{**tiny.parts, "arrays": changed})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_kv_heads", 0, "is 0; it must be at least 1"),
        ("num_heads", 0, "is 0; it must be at least 1"),
        ("head_dim", -1, "is -1; it must be at least 1"),
        ("block_size", 0, "is 0; it must be at least 1"),
        ("mlp_rows", 0, "is 0; it must be at least 1"),
        ("logits_rows", -3, "is -3; it must be at least 1"),
        ("dtype", "int8", "it must be float32, float16 or bfloat16"),
        ("num_heads", 3, "is 3; it must be a multiple of num_kv_heads, 2"),
        ("rotary_dim", 34, "is 34; it must be even and from 0 to head_dim, 32"),
        ("rotary_dim", 7, "is 7; it must be even"),
        ("rotary_dim", -2, "is -2; it must be even"),
        ("attention_scale", 0.0, "is 0.0+; it must be positive and finite"),
        ("attention_scale", math.nan, "is nan; it must be positive and finite"),
        ("attention_scale", math.inf, "is inf; it must be positive and finite"),
        ("norm_eps", math.nan, "is nan; it must be finite and not negative"),
        ("norm_eps", -1e-6, "it must be finite and not negative"),
        ("sliding_windows", [0, -1], "has -1; a window is positive, or 0 for all keys"),
        *((name, -1, "is -1; it must be at least 1") for name in SIZES),
        ("vocab_size", ..., "is missing from the configuration"),
    ],
)
def test_the_decoder_names_the_setting_that_it_refuses(device: Device, name: str, value: Any, message: str) -> None:
    tiny = tiny_on(device)
    settings = {key: val for key, val in {**tiny.parts["config"], name: value}.items() if val is not ...}
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        device.module.Decoder(**{**tiny.parts, "config": settings})
    with pytest.raises(ValueError, match="'num_blocks' is negative"):
        device.module.Decoder(**{**tiny.parts, "num_blocks": -1})


# ---- steps ---------------------------------------------------------------------------------------------------------


class Stepper:
    """Runs steps of a decoder on the device with all arrays where they belong."""

    def __init__(self, device: Device, tiny: TinyDecoder) -> None:
        self.device, self.tiny = device, tiny

    def arguments(self, chunks: list[SequenceChunk], logprobs: int = -1) -> dict[str, Any]:
        staging, result = greedy_step(chunks, logprobs)
        put = self.device.to_device
        return {"staging": staging, "arrays": put(staging), "result": put(result)}

    def run(self, chunks: list[SequenceChunk], previous: Any = None, logprobs: int = -1) -> list[int]:
        arguments = self.arguments(chunks, logprobs)
        self.tiny.decoder.step(**arguments, previous=previous)
        self.device.ops.read_matrix(self.tiny.context, self.device.to_device(np.zeros((1, 1), np.float32)))  # waits
        return host(arguments["result"]).tolist()


STEP_CASES: dict[str, tuple[str, Change, str]] = {
    "arrays left out": ("arrays", lambda device, array: None, "is of type ndarray; it must be an array in the memory"),
    "arrays on the host": ("arrays", lambda device, array: host(array), "is of type ndarray"),
    "arrays too small": ("arrays", lambda device, array: array[:-1], "are needed"),
    "arrays misaligned": ("arrays", lambda device, array: shifted(array, 4), "is not aligned to 8 bytes"),
    "arrays apart": ("arrays", spread, "is not C-contiguous"),
    "arrays of another type": ("arrays", lambda device, array: array.view(np.uint32), "is not int32"),
    "result on the host": ("result", lambda device, array: host(array), "is of type ndarray"),
    "result too small": ("result", lambda device, array: array[:-1], "are needed"),
    "result misaligned": ("result", lambda device, array: shifted(array, 2), "is not aligned to 4 bytes"),
    "result apart": ("result", spread, "is not C-contiguous"),
    "result read-only": ("result", lambda device, array: read_only(array), "is read-only"),
    "result of another type": ("result", lambda device, array: array.view(np.float32), "is not int32"),
    "previous on the host": ("previous", lambda device, array: np.zeros(3, np.int32), "is of type ndarray"),
    "previous misaligned": ("previous", lambda device, array: shifted(array, 2), "is not aligned to 4 bytes"),
    "previous apart": ("previous", lambda device, array: every_other(array), "is not C-contiguous"),
    "previous of another type": ("previous", lambda device, array: array.view(np.float32), "is not int32"),
    "staging apart": ("staging", lambda device, array: np.repeat(array, 2)[::2], "is not C-contiguous"),
    "logits read-only": (
        "logits",
        lambda device, array: np.frombuffer(bytes(4 * 3 * VOCAB), np.float32).reshape(3, VOCAB),
        "is read-only",
    ),
    "logits of another shape": (
        "logits",
        lambda device, array: np.zeros((3, VOCAB - 1), np.float32),
        r"has a wrong shape; \[3, 70\] is needed",
    ),
    "logits apart": (
        "logits",
        lambda device, array: np.zeros((3, 2 * VOCAB), np.float32)[:, ::2],
        "is not C-contiguous",
    ),
    "residuals of a step without them": (
        "residuals",
        lambda device, array: np.zeros((3, 24, 64), np.float32),
        "needs a step with one row of logits for each token",
    ),
}


@pytest.mark.parametrize("case", STEP_CASES)
def test_a_step_names_the_argument_that_it_refuses(device: Device, case: str) -> None:
    stepper = Stepper(device, tiny_on(device))
    name, change, message = STEP_CASES[case]
    arguments = stepper.arguments(PROMPTS)
    original = arguments.get(name, device.to_device(np.zeros(8, np.int32)))
    untouched = host(arguments["result"])
    result = arguments["result"]
    with pytest.raises(ValueError, match=f"argument '{name}' {message}" if "needed" not in message else message):
        stepper.tiny.decoder.step(**{**arguments, name: change(device, original)})
    assert (host(result) == untouched).all()


def test_a_step_refuses_arrays_of_the_host_that_cannot_be_taken(device: Device) -> None:
    stepper = Stepper(device, tiny_on(device))
    arguments = stepper.arguments(PROMPTS)
    for name, value in (
        ("staging", arguments["staging"].astype(np.int64)),
        ("staging", arguments["arrays"]),
        ("logits", np.zeros((3, VOCAB))),
        ("logits", device.to_device(np.zeros((3, VOCAB), np.float32))),
    ):
        with pytest.raises(TypeError, match="step"):
            stepper.tiny.decoder.step(**{**arguments, name: value})


def test_the_host_copy_of_a_step_is_checked_whatever_the_device_has(device: Device) -> None:
    stepper = Stepper(device, tiny_on(device))
    good = stepper.arguments(PROMPTS)
    bad = good["staging"].copy()
    bad[bad[13]] = VOCAB  # the first token id
    with pytest.raises(ValueError, match="'token_ids' holds 70 at index 0"):
        stepper.tiny.decoder.step(**{**good, "staging": bad})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_draws_what_the_cpu_draws_and_shows_what_it_shows(device: Device, dtype: str) -> None:
    """Logits are sums of 64 products of numbers near 1 after 2 layers: fp32 differs by 1e-4 at most, bf16, with 8 bits
    in every number between two operations, by a few percent of their size."""
    tiny = tiny_on(device, dtype)
    reference = TinyDecoder(_cpu, _cpu.Context(1), put_on_cpu, dtype)
    chunks = [SequenceChunk([token], 0, [block]) for block, token in enumerate([5, 69, 0, 33])]
    arguments = Stepper(device, tiny).arguments(chunks)
    logits, residuals = np.full((4, VOCAB), np.nan, np.float32), np.full((3, 4, 64), np.nan, np.float32)
    tiny.decoder.step(**arguments, logits=logits, residuals=residuals)
    expected_logits, expected_residuals = np.empty_like(logits), np.empty_like(residuals)
    staging, result = greedy_step(chunks)
    reference.decoder.step(staging, result, logits=expected_logits, residuals=expected_residuals)
    tolerance = 1e-4 if dtype == "float32" else 0.05 * np.abs(expected_logits).max()
    np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=tolerance)
    np.testing.assert_allclose(residuals, expected_residuals, rtol=0, atol=tolerance)
    if dtype == "float32":
        assert host(arguments["result"])[:4].tolist() == result[:4].tolist()


def test_ids_of_the_step_before_need_not_pass_through_the_host(device: Device) -> None:
    stepper = Stepper(device, tiny_on(device))
    arguments = stepper.arguments(PROMPTS)
    stepper.tiny.decoder.step(**arguments)
    ids = host(arguments["result"])[:3].tolist()
    assert len(set(ids)) == 3, "equal ids would hide that one is taken for another"
    for order in ([0, 1, 2], [2, 0]):
        runs = []
        for previous, tokens in ((None, ids), (arguments["result"], [-1, -2, -3])):
            chunks = [SequenceChunk([tokens[s]], len(PROMPTS[s].token_ids), PROMPTS[s].block_table) for s in order]
            runs.append(stepper.run(chunks, previous, logprobs=2))
        assert runs[0] == runs[1]


def test_ids_that_stand_for_nothing_are_refused(device: Device) -> None:
    stepper = Stepper(device, tiny_on(device))
    previous = device.to_device(np.array([1, 2], np.int32))
    for token, given, message in ((-1, None, "it must be in 0 .. 69"), (-3, previous, "it must be in -2 .. 69")):
        with pytest.raises(ValueError, match=f"'token_ids' holds {token} at index 0; {message}"):
            stepper.run([SequenceChunk([token], 0, [1])], given)


def test_a_step_can_be_captured_and_replayed(device: Device) -> None:
    with device.stream() as stream:
        stepper = Stepper(device, tiny_on(device, stream=stream))
        expected = stepper.run(PROMPTS)  # also loads what must not be loaded in a capture
        arguments = stepper.arguments(PROMPTS)
        untouched = host(arguments["result"]).tolist()
        launch = device.capture(lambda: stepper.tiny.decoder.step(**arguments))
        assert host(arguments["result"]).tolist() == untouched, "a captured step runs when its graph does"
        launch()
        assert host(arguments["result"]).tolist() == expected


def test_a_capture_cannot_wait_for_an_array_of_another_stream(simt: ModuleType) -> None:
    device = Device("simt-forward", simt)
    with device.stream() as stream:
        stepper = Stepper(device, tiny_on(device, stream=stream))
        arguments = stepper.arguments(PROMPTS)
        arguments["arrays"] = Altered(arguments["arrays"], stream=9)
        with pytest.raises(simt.DeviceError, match="waiting for the stream of an array failed: dependency created on"):
            device.capture(lambda: stepper.tiny.decoder.step(**arguments))


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_decoder_knows_which_products_the_library_may_compute(
    simt: ModuleType, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """The library sums in another order where there are fewer than 8 rows: that must show without the setting."""
    monkeypatch.setenv("SIMT_ROWS_MATTER", "few")
    tiny = tiny_on(Device("simt-forward", simt), deterministic=deterministic)
    logits = []
    for count in (1, 12):
        chunks = [SequenceChunk([5], 0, [0]), SequenceChunk(list(range(20, 19 + count)), 0, [1])][: 1 + (count > 1)]
        arguments = Stepper(Device("simt-forward", simt), tiny).arguments(chunks)
        shown = np.empty((len(chunks), VOCAB), np.float32)
        tiny.decoder.step(**arguments, logits=shown)
        logits.append(shown[0].tolist())
    assert (logits[0] == logits[1]) is deterministic


# ---- errors of the device ------------------------------------------------------------------------------------------


def test_an_error_of_the_device_is_an_exception_of_its_own_and_lasts(simt: ModuleType) -> None:
    device = Device("simt-forward", simt)
    simt.simt.reset()
    stepper = Stepper(device, tiny_on(device))
    matrix = device.to_device(np.zeros((2, 2), np.float32))
    expected = stepper.run(PROMPTS)
    assert issubclass(simt.DeviceError, RuntimeError)
    try:
        simt.simt.fail_next("cudaErrorIllegalAddress")
        for _ in range(2):
            with pytest.raises(
                simt.DeviceError, match=r"failed: an illegal memory access .*\(cudaErrorIllegalAddress\)"
            ):
                stepper.run(PROMPTS)
        with pytest.raises(simt.DeviceError, match="cudaErrorIllegalAddress"):
            device.ops.read_matrix(stepper.tiny.context, matrix)
        with pytest.raises(simt.DeviceError, match="cudaErrorIllegalAddress"):
            device.context()
        with pytest.raises(simt.DeviceError, match="cudaErrorIllegalAddress"):
            tiny_on(device)
    finally:
        simt.simt.reset()
    assert stepper.run(PROMPTS) == expected


def test_an_error_that_shows_late_shows_in_the_op_that_waits(simt: ModuleType) -> None:
    device = Device("simt-forward", simt)
    simt.simt.reset()
    context = device.context(library=False)
    rows = np.ones((3, 8), np.float32)
    weight, y = device.pack(context, rows, "f32"), device.to_device(np.zeros((2, 3), np.float32))
    x = device.to_device(rows[:2])
    try:
        simt.simt.fail_next("cudaErrorLaunchFailure", at="synchronize")
        with pytest.raises(simt.DeviceError, match="the work of the device failed: unspecified launch failure"):
            device.ops.gemm(context, x, weight, "f32", 3, None, y)
    finally:
        simt.simt.reset()


# ---- ops -----------------------------------------------------------------------------------------------------------

GEMM_CASES: dict[str, tuple[str, Callable[[Device, dict[str, Any]], Any], str]] = {
    "x on the host": ("x", lambda device, a: host(a["x"]), "is of type ndarray"),
    "x of another type": (
        "x",
        lambda device, a: device.to_device(np.zeros((2, 8), np.uint16)),
        "must have dtype f32, has bf16",
    ),
    "x misaligned": ("x", lambda device, a: shifted(a["x"], 2), "is not aligned to 4 bytes"),
    "x not contiguous": ("x", lambda device, a: Altered(a["x"], strides=(64, 8)), "has rows that are not contiguous"),
    "y read-only": ("y", lambda device, a: read_only(a["y"]), "is read-only"),
    "y of another shape": ("y", lambda device, a: a["y"][:1], r"must have shape \(2, 3\), has \(1, 3\)"),
    "y of another type": (
        "y",
        lambda device, a: device.to_device(np.zeros((2, 3), np.float16)),
        "must have dtype f32, has f16",
    ),
    "weight too small": ("weight", lambda device, a: a["weight"][:-1], "must have 96 elements, has 95"),
    "weight misaligned": ("weight", lambda device, a: shifted(a["weight"], 16), "is not aligned to 64 bytes"),
    "weight on the host": ("weight", lambda device, a: host(a["weight"]), "is of type ndarray"),
    "weight of another type": (
        "weight",
        lambda device, a: a["weight"].view(np.int8),
        "must have dtype uint8, has int8",
    ),
    "bias too small": ("bias", lambda device, a: a["bias"][:2], "must have 3 elements, has 2"),
    "bias on the host": ("bias", lambda device, a: host(a["bias"]), "is of type ndarray"),
    "dtype": ("dtype", lambda device, a: "f64", "is 'f64'; it must be f32, f16 or bf16"),
}


@pytest.mark.parametrize("case", GEMM_CASES)
def test_gemm_names_the_argument_that_it_refuses(device: Device, case: str) -> None:
    context = device.context(library=False)
    arguments = {
        "x": device.to_device(np.ones((2, 8), np.float32)),
        "weight": device.pack(context, np.ones((3, 8), np.float32), "f32"),
        "dtype": "f32",
        "n": 3,
        "bias": device.to_device(np.ones(3, np.float32)),
        "y": device.to_device(np.zeros((2, 3), np.float32)),
    }
    name, change, message = GEMM_CASES[case]
    with pytest.raises(ValueError, match=f"argument '{name}' {message}"):
        device.ops.gemm(context, **{**arguments, name: change(device, arguments)})
    assert (host(arguments["y"]) == 0).all()


def test_packing_names_the_argument_that_it_refuses(device: Device) -> None:
    context = device.context()
    rows = np.ones((4, 8), np.float32)
    packed = device.filled(device.ops.packed_weight_bytes("f32", 4, 8))
    for name, arguments in (
        ("rows", (device.to_device(rows), 0, 4, 8, packed)),
        ("rows", (rows[:, :7].copy(), 0, 4, 8, packed)),
        ("rows", (rows.T, 0, 8, 4, packed)),
        ("first_row", (rows, 1, 4, 8, packed)),
        ("first_row", (rows, -1, 4, 8, packed)),
        ("packed", (rows, 0, 4, 8, host(packed))),
        ("packed", (rows, 0, 4, 8, read_only(packed))),
        ("packed", (rows, 0, 4, 8, packed[:-1])),
    ):
        with pytest.raises(ValueError, match=f"argument '{name}' "):
            device.ops.pack_weight(context, *arguments)
        data, first_row, n, k, target = arguments
        with pytest.raises(ValueError, match=f"argument '{name}' "):
            device.module.pack_weight(context, data, "float32", first_row, n, k, target)
    assert (host(packed) == 0xFF).all()


def test_indices_out_of_range_are_refused_where_the_host_sees_them(simt: ModuleType) -> None:
    device = Device("simt-forward", simt)
    ops, context, put = device.ops, device.context(), device.to_device
    shape = ops.AttentionShape(num_heads=1, num_kv_heads=1, head_dim=32, rotary_dim=32, scale=1.0)
    blocks = device.filled(2 * ops.kv_block_bytes("f32", 16, shape))
    kv = ops.KvLayer(blocks, "f32", 2, 16)
    table = device.pack(context, np.ones((4, 32), np.float32), "f32")
    x, one = put(np.ones((1, 32), np.float32)), put(np.ones((1, 96), np.float32))

    def ints(*values: int) -> Any:
        return put(np.array(values, np.int32))

    def batch(position: int = 0, slot: int = 0, block: int = 0, query_len: int = 1, context_len: int = 1) -> Any:
        tables = np.array([[block]], np.int32)
        return ops.Batch(
            token_ids=ints(0),
            positions=ints(position),
            slot_mapping=ints(slot),
            query_start=ints(0, query_len),
            context_lens=ints(context_len),
            block_tables=put(tables),
        )

    rope = ops.RopeAndNorm(put(np.ones((8, 16), np.float32)), put(np.ones((8, 16), np.float32)))
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("token_ids", lambda: ops.embed(context, table, "f32", 4, ints(4), x)),
        ("token_ids", lambda: ops.embed(context, table, "f32", 4, ints(-1), x)),
        ("token_ids", lambda: ops.embed(context, table, "f32", 4, ints(-2), x, ints(0))),
        ("previous_ids", lambda: ops.embed(context, table, "f32", 4, ints(-1), x, ints(4))),
        ("rows", lambda: ops.gather_rows(context, x, ints(1), x)),
        ("pairs", lambda: ops.copy_blocks(context, kv, shape, put(np.array([[0, 2]], np.int32)))),
        ("positions", lambda: ops.rope_and_store(context, one, rope, shape, batch(position=8), x, kv)),
        ("slot_mapping", lambda: ops.rope_and_store(context, one, rope, shape, batch(slot=32), x, kv)),
        ("block_tables", lambda: ops.attention(context, x, kv, shape, batch(block=2), x)),
        ("block_tables", lambda: ops.attention(context, x, kv, shape, batch(context_len=17), x)),
        ("query_start", lambda: batch(query_len=2)),
        ("query_start", lambda: batch(context_len=0)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=f"argument '{name}' "):
            call()
