"""StepInputs: writes one step into one staging buffer and reads its result; csrc/step_view.h is the layout in C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
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
HEADER_WORDS = len(COUNTS) + len(SECTIONS)

IntArray = npt.NDArray[np.int32]

_NUM_ROWS, _TOP_WIDTH = COUNTS.index("num_rows"), COUNTS.index("top_width")
_NOTHING: tuple[list[int], list[Any]] = ([], [])


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
        target: a token id whose log-probability is wanted, or -1 to draw. Nothing is drawn then, so that penalties and
            biases have no part in it and are not listed.
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


def num_rows_of(staging: IntArray) -> int:
    """Rows of logits of a step that the native side has accepted."""
    return int(staging[_NUM_ROWS])


def result_words_of(staging: IntArray) -> int:
    """32-bit words of the result of a step that the native side has accepted."""
    return num_rows_of(staging) * (2 + 2 * int(staging[_TOP_WIDTH]))


def plain_words(*, max_tokens: int, max_seqs: int, table_width: int) -> int:
    """32-bit words that any step fits into, apart from its lists of penalties, biases and masks."""
    of_tokens, of_seqs = 3 * max_tokens, max_seqs * (table_width + 1) + max_seqs + 1
    of_rows = 13 * max_tokens + 2 * (max_tokens + 1)
    of_copies, alignment = 2 * max_seqs, 1
    return HEADER_WORDS + of_tokens + of_seqs + of_rows + of_copies + alignment


class StepInputs:
    """A staging buffer that is written anew each step; it grows when a step needs more and is never freed before.

    A step is collected in lists and converted once: for the few numbers of a decode step that costs a fraction of
    what an array for each section would.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._words = np.zeros(1 << 14, np.int32)
        self._result = np.zeros(1 << 10, np.int32)

    def write(
        self, chunks: Sequence[SequenceChunk], rows: Sequence[LogitsRow], copies: Sequence[tuple[int, int]] = ()
    ) -> tuple[IntArray, IntArray]:
        """Lay out one step. Returns (staging, result) arrays to hand to the native step; valid until the next write."""
        batch = self._batch_sections(chunks)
        sampling = _sampling_sections(rows)
        sections = {
            **batch,
            "logits_rows": [r.token_index for r in rows],
            "copies": list(chain.from_iterable(copies)),
            **sampling,
        }
        top_width = max((r.num_logprobs for r in rows), default=0)
        counts = {
            "magic": STEP_MAGIC,
            "num_words": 0,
            "num_tokens": len(batch["token_ids"]),
            "num_seqs": len(chunks),
            "table_width": len(batch["block_tables"]) // len(chunks) if chunks else 0,
            "max_query_len": max((len(c.token_ids) for c in chunks), default=0),
            "max_context_len": max(batch["context_lens"], default=0),
            "num_rows": len(rows),
            "num_copies": len(copies),
            "num_penalties": len(sampling["penalty_ids"]),
            "num_biases": len(sampling["bias_ids"]),
            "mask_words": 0,
            "top_width": max(top_width, 0),
        }
        return self._staged(counts, sections), self._result_of(len(rows), counts["top_width"])

    @staticmethod
    def read(result: IntArray, num_rows: int) -> StepResult:
        """The result buffer as arrays (views)."""
        width = (result.size // num_rows - 2) // 2 if num_rows else 0
        top = result[2 * num_rows :].reshape(2, num_rows, width)
        logprobs = result[num_rows : 2 * num_rows].view(np.float32)
        return StepResult(result[:num_rows], logprobs, top[0], top[1].view(np.float32))

    def _staged(self, counts: dict[str, int], sections: dict[str, list[int]]) -> IntArray:
        body: list[int] = []
        offsets = []
        for name in SECTIONS:
            if name == "seed" and (HEADER_WORDS + len(body)) % 2:
                body.append(0)  # 64-bit seeds are aligned to 8 bytes
            offsets.append(HEADER_WORDS + len(body))
            body += sections[name]
        num_words = counts["num_words"] = HEADER_WORDS + len(body)
        if num_words > self._words.size:
            self._words = np.zeros(2 * num_words, np.int32)
        self._words[:num_words] = [*(counts[name] for name in COUNTS), *offsets, *body]
        return self._words[:num_words]

    def _result_of(self, num_rows: int, top_width: int) -> IntArray:
        num_words = num_rows * (2 + 2 * top_width)
        if num_words > self._result.size:
            self._result = np.zeros(2 * num_words, np.int32)
        return self._result[:num_words]

    def _batch_sections(self, chunks: Sequence[SequenceChunk]) -> dict[str, list[int]]:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start = [0]
        context_lens: list[int] = []
        tables: list[int] = []
        width = max((len(c.block_table) for c in chunks), default=0)
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            token_ids += chunk.token_ids
            positions += range(chunk.start, end)
            self._add_slots(slots, chunk.block_table, chunk.start, end)
            query_start.append(len(token_ids))
            context_lens.append(end)
            tables += chunk.block_table
            tables += [0] * (width - len(chunk.block_table))
        return {
            "token_ids": token_ids,
            "positions": positions,
            "slot_mapping": slots,
            "query_start": query_start,
            "context_lens": context_lens,
            "block_tables": tables,
        }

    def _add_slots(self, slots: list[int], block_table: Sequence[int], start: int, end: int) -> None:
        """Slots of the positions start .. end - 1: one run a block."""
        size = self._block_size
        for index in range(start // size, (end - 1) // size + 1):
            shift = (block_table[index] - index) * size
            slots += range(shift + max(start, index * size), shift + min(end, (index + 1) * size))


def _sampling_sections(rows: Sequence[LogitsRow]) -> dict[str, list[int]]:
    settings = [r.sampling.words for r in rows]
    columns = [list(column) for column in zip(*settings, strict=True)] or [[] for _ in range(9)]
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    biases = [r.sampling.bias if r.target < 0 else _NOTHING for r in rows]
    penalties = [(r.sampling.penalty_ids, r.sampling.penalty_counts) if r.target < 0 else _NOTHING for r in rows]
    bias_values = [value for _, values in biases for value in values]
    return {
        **dict(zip(names, columns[:7], strict=True)),
        "seed": list(chain.from_iterable(words[7:] for words in settings)),
        "position": [r.position for r in rows],
        "target": [r.target for r in rows],
        "num_logprobs": [r.num_logprobs for r in rows],
        "penalty_start": list(accumulate((len(ids) for ids, _ in penalties), initial=0)),
        "penalty_ids": list(chain.from_iterable(ids for ids, _ in penalties)),
        "penalty_counts": list(chain.from_iterable(counts for _, counts in penalties)),
        "bias_start": list(accumulate((len(ids) for ids, _ in biases), initial=0)),
        "bias_ids": list(chain.from_iterable(ids for ids, _ in biases)),
        "bias_values": np.array(bias_values, np.float32).view(np.int32).tolist() if bias_values else [],
        "allow_mask": [],
    }
