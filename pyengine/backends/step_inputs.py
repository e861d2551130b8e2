"""StepInputs: writes one step into one staging buffer and reads its result; csrc/step_view.h is the layout in C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.sampling_row import SamplingRow

STEP_MAGIC = 0x50594531

COUNTS = (
    "magic",
    "num_words",
    "num_tokens",
    "num_seqs",
    "table_width",
    "max_query_len",
    "max_context_len",
    "num_rows",
    "num_copies",
    "num_penalties",
    "num_biases",
    "mask_words",
    "top_width",
)
SECTIONS = (
    "token_ids",
    "positions",
    "slot_mapping",
    "query_start",
    "context_lens",
    "block_tables",
    "logits_rows",
    "copies",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "position",
    "target",
    "num_logprobs",
    "penalty_start",
    "penalty_ids",
    "penalty_counts",
    "bias_start",
    "bias_ids",
    "bias_values",
    "allow_mask",
)
# What SamplingRow.words holds before the seed.
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
HEADER_INDEX = {name: index for index, name in enumerate(COUNTS + SECTIONS)}
HEADER_WORDS = len(HEADER_INDEX)

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The part of one sequence that is computed in this step: its tokens, where they begin, the blocks that hold it."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """One row of logits wanted of a step.

    Attributes:
        token_index: index, in the step's tokens, of the token whose logits these are.
        sampling: settings and state of the sequence.
        position: of the token that is drawn or looked up.
        target: a token id whose log-probability is wanted (nothing is drawn), or -1 to draw.
        num_logprobs: how many most likely tokens to report; -1 for no log-probabilities at all.
    """

    token_index: int
    sampling: SamplingRow
    position: int
    target: int = -1
    num_logprobs: int = -1


@dataclass(frozen=True, slots=True)
class StepResult:
    """Host arrays of one step: token_ids [R] (-1: that row failed), logprobs [R], top_ids and top_logprobs [R, W]."""

    token_ids: IntArray
    logprobs: npt.NDArray[np.float32]
    top_ids: IntArray
    top_logprobs: npt.NDArray[np.float32]


class StepInputs:
    """A staging buffer that is written anew each step; it grows when a step needs more and is never freed before."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._words = np.zeros(1 << 14, np.int32)
        self._result = np.zeros(1 << 10, np.int32)
        self._used = HEADER_WORDS

    def write(
        self, chunks: Sequence[SequenceChunk], rows: Sequence[LogitsRow], copies: Sequence[tuple[int, int]] = ()
    ) -> tuple[IntArray, IntArray]:
        """Lay out one step. Returns (staging, result) arrays to hand to the native step; valid until the next write."""
        lengths = np.fromiter((len(c.token_ids) for c in chunks), np.int32, len(chunks))
        starts = np.fromiter((c.start for c in chunks), np.int32, len(chunks))
        num_tokens = int(lengths.sum())
        width = max((len(c.block_table) for c in chunks), default=0)
        top_width = max((r.num_logprobs for r in rows), default=0)
        top_width = max(top_width, 0)
        num_penalties = sum(len(r.sampling.penalty_ids) for r in rows)
        num_biases = sum(len(r.sampling.bias[0]) for r in rows)
        words = 3 * num_tokens + len(chunks) * (2 + width) + 20 * len(rows) + 2 * len(copies)
        self._reserve(words + 2 * num_penalties + 2 * num_biases + 4 * HEADER_WORDS, len(rows), top_width)
        self._used = HEADER_WORDS

        self._write_batch(chunks, lengths, starts, num_tokens, width)
        self._put("logits_rows", [r.token_index for r in rows])
        self._put("copies", list(chain.from_iterable(copies)))
        self._write_sampling(rows)
        header = self._words
        counts = {
            "magic": STEP_MAGIC,
            "num_words": self._used,
            "num_tokens": num_tokens,
            "num_seqs": len(chunks),
            "table_width": width,
            "max_query_len": int(lengths.max(initial=0)),
            "max_context_len": int((starts + lengths).max(initial=0)),
            "num_rows": len(rows),
            "num_copies": len(copies),
            "num_penalties": num_penalties,
            "num_biases": num_biases,
            "mask_words": 0,
            "top_width": top_width,
        }
        header[: len(COUNTS)] = [counts[name] for name in COUNTS]
        return self._words[: self._used], self._result[: len(rows) * (2 + 2 * top_width)]

    @staticmethod
    def read(result: IntArray, num_rows: int) -> StepResult:
        """The result buffer as arrays (views)."""
        width = (result.size // num_rows - 2) // 2 if num_rows else 0
        top = result[2 * num_rows :].reshape(2, num_rows, width)
        logprobs = result[num_rows : 2 * num_rows].view(np.float32)
        return StepResult(result[:num_rows], logprobs, top[0], top[1].view(np.float32))

    def _reserve(self, words: int, num_rows: int, top_width: int) -> None:
        if words > self._words.size:
            self._words = np.zeros(2 * words, np.int32)
        if num_rows * (2 + 2 * top_width) > self._result.size:
            self._result = np.zeros(2 * num_rows * (2 + 2 * top_width), np.int32)

    def _section(self, name: str, length: int) -> IntArray:
        begin = self._used
        self._words[HEADER_INDEX[name]] = begin
        self._used = begin + length
        return self._words[begin : self._used]

    def _put(self, name: str, values: Any, dtype: Any = np.int32) -> None:
        array = np.asarray(values, dtype).view(np.int32)
        self._section(name, array.size)[:] = array.ravel()

    def _put_columns(self, names: Sequence[str], table: IntArray) -> None:
        """The columns of `table` [rows, names], one section each."""
        for name, column in zip(names, np.ascontiguousarray(table.T), strict=True):
            self._section(name, column.size)[:] = column

    def _write_batch(
        self, chunks: Sequence[SequenceChunk], lengths: IntArray, starts: IntArray, num_tokens: int, width: int
    ) -> None:
        query_start = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        tables = np.zeros((len(chunks), max(width, 1)), np.int32)
        for i, chunk in enumerate(chunks):
            tables[i, : len(chunk.block_table)] = chunk.block_table
        sequence = np.repeat(np.arange(len(chunks), dtype=np.int32), lengths)
        positions = np.arange(num_tokens, dtype=np.int32) - query_start[sequence] + starts[sequence]
        blocks = tables[sequence, positions // self._block_size]
        tokens = np.fromiter(chain.from_iterable(c.token_ids for c in chunks), np.int32, num_tokens)
        self._put("token_ids", tokens)
        self._put("positions", positions)
        self._put("slot_mapping", blocks * self._block_size + positions % self._block_size)
        self._put("query_start", query_start)
        self._put("context_lens", starts + lengths)
        self._put("block_tables", tables[:, :width])

    def _write_sampling(self, rows: Sequence[LogitsRow]) -> None:
        settings = np.array([r.sampling.words for r in rows], np.int32).reshape(len(rows), len(SETTINGS) + 2)
        self._put_columns(SETTINGS, settings[:, :-2])
        self._used += self._used % 2  # 64-bit seeds are aligned to 8 bytes
        self._put("seed", settings[:, -2:])
        ways = np.array([(r.position, r.target, r.num_logprobs) for r in rows], np.int32).reshape(len(rows), 3)
        self._put_columns(("position", "target", "num_logprobs"), ways)
        self._put_lists("penalty_start", [r.sampling.penalty_ids for r in rows])
        self._put("penalty_ids", list(chain.from_iterable(r.sampling.penalty_ids for r in rows)))
        self._put("penalty_counts", list(chain.from_iterable(r.sampling.penalty_counts for r in rows)))
        biases = [r.sampling.bias for r in rows]
        self._put_lists("bias_start", [ids for ids, _ in biases])
        self._put("bias_ids", list(chain.from_iterable(ids for ids, _ in biases)))
        self._put("bias_values", list(chain.from_iterable(values for _, values in biases)), np.float32)
        self._put("allow_mask", [])

    def _put_lists(self, name: str, lists: Sequence[Sequence[int]]) -> None:
        self._put(name, np.concatenate([[0], np.cumsum([len(x) for x in lists], dtype=np.int64)]))
