"""Runs steps on one stream of a GPU: copies in and out, a ring of host buffers, CUDA graphs for plain decode steps.

    host (ring)                    device, one of each                    host (ring)
    words ──────────────copy──────> words ─> native step ─> result ─copy──> result + event
    decode words ───────copy──────> decode words ─> graph ──┘ └─> previous ids of the next step

The device buffers are not in a ring: all work is on one stream, so a copy into a buffer begins when the step that reads
it has ended. The native step reads the previous ids before it writes its own result (csrc/decoder.cpp: embedding first,
sampling last), so they may share a buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pyengine.backends.base import MAX_PENDING, StepLimits, StepTrace
from pyengine.backends.cuda_memory import CupyArray, DeviceMemory
from pyengine.backends.decode_layout import DecodeLayout, DecodeShape, most_decode_words, shape_of
from pyengine.backends.step_inputs import IntArray, num_rows_of, plain_words, result_words_of
from pyengine.sampling_params import MAX_LOGPROBS

# Room for lists whose length a step's size does not bound (penalties, biases). Longer ones make the buffers grow.
LIST_WORDS = 2**20


def step_buffer_bytes(limits: StepLimits, *, uses_graphs: bool) -> int:
    """Bytes that a StepRunner allocates on the device."""
    words = _staging_words(limits) + _result_words(limits)
    return 4 * (words + (_decode_words(limits) if uses_graphs else 0))


@dataclass(slots=True)
class GraphCounts:
    """How steps were run: as a graph that was recorded before, while recording it, or call by call."""

    replayed: int = 0
    captured: int = 0
    eager: int = 0


class _Slot:
    """Host buffers of one launch; busy from the launch until its result was taken."""

    def __init__(self, memory: DeviceMemory, limits: StepLimits, *, uses_graphs: bool) -> None:
        self.words: IntArray = memory.pinned(_staging_words(limits), np.int32)
        self.decode_words: IntArray = memory.pinned(_decode_words(limits) if uses_graphs else 0, np.int32)
        self.result: IntArray = memory.pinned(_result_words(limits), np.int32)
        self.event = memory.event()
        self.is_busy = False


class LaunchedStep:
    """See Pending."""

    def __init__(self, slot: _Slot, num_rows: int, num_words: int, layout: DecodeLayout | None) -> None:
        self._slot: _Slot | None = slot
        self._num_rows = num_rows
        self._num_words = num_words
        self._layout = layout
        self._result: IntArray = np.empty(0, np.int32)

    def wait(self) -> IntArray:
        slot = self._slot
        if slot is not None:
            slot.event.synchronize()
            words = slot.result[: self._num_words]
            self._result = words.copy() if self._layout is None else self._layout.result(words, self._num_rows)
            slot.is_busy = False
            self._slot = None
        return self._result


@dataclass(slots=True)
class _DecodeGraph:
    """The graph is recorded at the second step of its shape: the first one lets libraries choose their algorithms."""

    layout: DecodeLayout
    graph: Any = None


class StepRunner:
    """Owns the buffers of steps. Every method is called with the device and its stream current (`with memory`).

    Args:
        decoder: the native one, made for `limits.num_blocks` blocks and one more, which belongs to no sequence.
    """

    def __init__(self, memory: DeviceMemory, decoder: Any, limits: StepLimits, *, uses_graphs: bool) -> None:
        self.counts = GraphCounts()
        self._memory = memory
        self._decoder = decoder
        self._limits = limits
        self._uses_graphs = uses_graphs
        self._slots = [_Slot(memory, limits, uses_graphs=uses_graphs) for _ in range(MAX_PENDING)]
        self._turn = 0
        self._words = self._device_words(_staging_words(limits))
        self._decode_words = self._device_words(_decode_words(limits) if uses_graphs else 0)
        self._result = self._device_words(_result_words(limits))
        memory.clear(self._result)
        self._num_previous = 0
        self._graphs: dict[DecodeShape, _DecodeGraph] = {}

    def launch(
        self, staging: IntArray, num_result_words: int, *, uses_previous: bool, trace: StepTrace | None = None
    ) -> LaunchedStep:
        """See Backend.launch; a step with a trace has ended when this returns."""
        slot = self._slots[self._turn]
        if slot.is_busy:
            raise RuntimeError(f"{MAX_PENDING} steps are pending; wait for the first of them.")
        num_previous = self._num_previous if uses_previous else 0
        self._decoder.check(staging, num_previous=num_previous)  # before anything is put on the stream
        if num_result_words != result_words_of(staging):
            raise ValueError(
                f"argument 'num_result_words' is {num_result_words}; the step has {result_words_of(staging)}."
            )
        shape = shape_of(staging, self._limits.max_seqs, self._limits.max_context) if self._uses_graphs else None
        if shape is None or trace is not None:
            layout = None
            num_words = num_result_words
            self._run_eagerly(slot, staging, num_previous, trace)
        else:
            layout = self._run_decode(slot, staging, shape)
            num_words = 2 * shape.rows
        self._memory.to_host(slot.result[:num_words], self._result)
        slot.event.record(self._memory.stream)
        slot.is_busy = True
        self._turn = (self._turn + 1) % len(self._slots)
        self._num_previous = num_rows_of(staging)
        return LaunchedStep(slot, self._num_previous, num_words, layout)

    def step(self, staging: IntArray, result: IntArray, trace: StepTrace | None) -> None:
        """See Backend.step."""
        self._decoder.check(staging)
        words = result_words_of(staging)
        if result.dtype != np.int32 or result.size < words:
            raise ValueError(f"argument 'result' has {result.nbytes} bytes; {4 * words} are needed, as int32.")
        result[:words] = self.launch(staging, words, uses_previous=False, trace=trace).wait()

    def _run_eagerly(self, slot: _Slot, staging: IntArray, num_previous: int, trace: StepTrace | None) -> None:
        if staging.size > slot.words.size:
            self._grow(slot, staging.size)
        words = slot.words[: staging.size]
        words[:] = staging
        self._memory.to_device(self._words, words)
        previous = self._result[:num_previous] if num_previous else None
        traced = {} if trace is None else {"logits": trace.logits, "residuals": trace.residuals}
        self._decoder.step(words, self._result, arrays=self._words, previous=previous, **traced)
        self.counts.eager += 1

    def _run_decode(self, slot: _Slot, staging: IntArray, shape: DecodeShape) -> DecodeLayout:
        decode = self._graphs.get(shape)
        is_first = decode is None
        if decode is None:
            layout = DecodeLayout(shape, self._limits.block_size, trash_block=self._limits.num_blocks)
            decode = self._graphs[shape] = _DecodeGraph(layout)
        words = slot.decode_words[: decode.layout.num_words]
        decode.layout.fill(staging, words)
        self._memory.to_device(self._decode_words, words)
        if is_first:
            self._decode(words)
            self.counts.eager += 1
            return decode.layout
        if decode.graph is None:
            decode.graph = self._captured(words)
            self.counts.captured += 1
        else:
            self.counts.replayed += 1
        decode.graph.launch(self._memory.stream)
        return decode.layout

    def _decode(self, words: IntArray) -> None:
        # A graph keeps the addresses, so the previous ids are given whether this step needs them or not; all that there
        # can be, for a prompt whose log-probabilities are wanted had a row for each token.
        previous = self._result[: self._limits.max_tokens]
        self._decoder.step(words, self._result, arrays=self._decode_words, previous=previous)

    def _captured(self, words: IntArray) -> Any:
        self._memory.begin_capture()
        try:
            self._decode(words)
        except BaseException:
            self._memory.abandon_capture()
            raise
        return self._memory.stream.end_capture()

    def _grow(self, slot: _Slot, num_words: int) -> None:
        """Room for a step with longer lists than any before, out of the device's reserve."""
        slot.words = self._memory.pinned(2 * num_words, np.int32)
        if num_words > self._words.size:
            self._memory.stream.synchronize()  # until nobody reads the old one
            self._words = self._device_words(2 * num_words)

    def _device_words(self, count: int) -> CupyArray:
        return self._memory.array(count, np.int32, what="Buffers of a step", setting="max_num_batched_tokens")


def _staging_words(limits: StepLimits) -> int:
    width = -(-limits.max_context // limits.block_size)
    return plain_words(max_tokens=limits.max_tokens, max_seqs=limits.max_seqs, table_width=width) + LIST_WORDS


def _decode_words(limits: StepLimits) -> int:
    return most_decode_words(limits.max_seqs, limits.max_context, limits.block_size)


def _result_words(limits: StepLimits) -> int:
    return limits.max_tokens * (2 + 2 * MAX_LOGPROBS)
