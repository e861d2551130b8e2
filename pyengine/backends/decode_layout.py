"""A decode step in a layout that is the same for many steps, so that one CUDA graph serves all of them. NumPy only.

Most steps give each sequence one token and draw one token for it. What differs between two such steps are the contents
of the arrays and three numbers that shape the launches: rows, the longest context, the width of the block tables. Here
the three are rounded up to a few sizes. Rows that are there only to fill up read and write a block that belongs to no
sequence, and what they draw is cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyengine.backends.step_inputs import COUNTS, HEADER_WORDS, SECTIONS, STEP_MAGIC, IntArray

FIRST_CONTEXT = 1024  # sizes of contexts grow fourfold from here: a short one does not pay for the longest
CONTEXT_GROWTH = 4
SMALL_ROWS = (1, 2, 4)
ROW_STEP = 8  # above 8 rows; at most as large as a KV block, see DecodeLayout

# Sections with one word for each row, and what they hold for a row that fills up: token 0, greedy, nothing to report.
ROW_WORDS: dict[str, int | float] = {
    "token_ids": 0,
    "positions": 0,  # set below
    "slot_mapping": 0,  # set below
    "context_lens": 0,  # set below
    "logits_rows": 0,  # set below
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "position": 0,
    "target": -1,
    "num_logprobs": -1,
}

# Words of the header.
_NUM_ROWS, _TABLE_WIDTH = COUNTS.index("num_rows"), COUNTS.index("table_width")
_OFFSETS = {name: len(COUNTS) + index for index, name in enumerate(SECTIONS)}
_ROW_OFFSETS = [_OFFSETS[name] for name in ROW_WORDS]
_SEED_OFFSET, _TABLES_OFFSET = _OFFSETS["seed"], _OFFSETS["block_tables"]
_ABSENT = ("num_copies", "num_penalties", "num_biases", "mask_words", "top_width")


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What the launches of a decode step depend on: rows, and the longest context in tokens."""

    rows: int
    context: int


def shape_of(staging: IntArray, max_seqs: int, max_context: int) -> DecodeShape | None:
    """The smallest shape that the step fits into; None for a step that is not a plain decode.

    Every sequence has one token and one row. Lists of another length than the rows (penalties, biases, copies, several
    log-probabilities) are not in the layout.
    """
    if staging.size < HEADER_WORDS:
        return None
    counts = dict(zip(COUNTS, staging[: len(COUNTS)].tolist(), strict=True))
    rows = counts["num_rows"]
    if rows < 1 or rows != counts["num_tokens"] or rows != counts["num_seqs"] or counts["max_query_len"] != 1:
        return None
    if any(counts[name] for name in _ABSENT):
        return None
    return DecodeShape(rounded_rows(rows, max_seqs), rounded_context(counts["max_context_len"], max_context))


def rounded_rows(rows: int, max_seqs: int) -> int:
    """1, 2, 4, 8, 16, 24, ... or max_seqs."""
    rounded = next((size for size in SMALL_ROWS if size >= rows), -(-rows // ROW_STEP) * ROW_STEP)
    return min(rounded, max_seqs)


def rounded_context(context: int, max_context: int) -> int:
    """1024, 4096, 16384, ... or max_context."""
    rounded = FIRST_CONTEXT
    while rounded < context:
        rounded *= CONTEXT_GROWTH
    return min(rounded, max_context)


def most_decode_words(max_seqs: int, max_context: int, block_size: int) -> int:
    """32-bit words of the largest layout."""
    return DecodeLayout(DecodeShape(max_seqs, max_context), block_size, 0).num_words


class DecodeLayout:
    """Where each array of a decode step of one shape lies: always at the same offset.

    Row r, where it only fills up, is a sequence whose last token is at slot r % block_size of `trash_block`. Rows that
    fill up are fewer than that, so that no two of them write to one place.

        header | [15, rows]: one word a row | seeds | query_start, penalty_start, bias_start | block tables
    """

    def __init__(self, shape: DecodeShape, block_size: int, trash_block: int) -> None:
        assert block_size >= ROW_STEP
        self.shape = shape
        rows = shape.rows
        self._table_width = -(-shape.context // block_size)
        self._row_words = slice(HEADER_WORDS, HEADER_WORDS + len(ROW_WORDS) * rows)
        seed = self._row_words.stop + self._row_words.stop % 2  # 64-bit seeds are aligned to 8 bytes
        self._seed = slice(seed, seed + 2 * rows)
        query_start = self._seed.stop
        nothing = query_start + rows + 1  # the starts of lists that are all empty
        self._tables = slice(nothing + rows + 1, nothing + rows + 1 + rows * self._table_width)
        self.num_words = self._tables.stop

        offsets = {name: HEADER_WORDS + index * rows for index, name in enumerate(ROW_WORDS)}
        offsets |= {"seed": seed, "query_start": query_start, "block_tables": self._tables.start}
        offsets |= dict.fromkeys(("penalty_start", "bias_start"), nothing)
        counts = {
            "magic": STEP_MAGIC,
            "num_words": self.num_words,
            "num_tokens": rows,
            "num_seqs": rows,
            "table_width": self._table_width,
            "max_query_len": 1,
            "max_context_len": shape.context,
            "num_rows": rows,
        }
        words = np.zeros(self._tables.start, np.int32)
        words[: len(COUNTS)] = [counts.get(name, 0) for name in COUNTS]
        words[len(COUNTS) : HEADER_WORDS] = [offsets.get(name, HEADER_WORDS) for name in SECTIONS]
        words[query_start:nothing] = np.arange(rows + 1)
        offset = np.arange(rows) % block_size
        fill = words[self._row_words].reshape(len(ROW_WORDS), rows)
        special = {
            "positions": offset,
            "slot_mapping": trash_block * block_size + offset,
            "context_lens": offset + 1,
            "logits_rows": np.arange(rows),
        }
        for index, (name, value) in enumerate(ROW_WORDS.items()):
            plain = np.float32(value).view(np.int32) if isinstance(value, float) else np.int32(value)
            fill[index] = special.get(name, plain)
        self._template = words
        self._trash_block = trash_block

    def fill(self, staging: IntArray, words: IntArray) -> None:
        """Write the step of `staging` (as StepInputs lays it out) into `words`, num_words long."""
        header = staging[:HEADER_WORDS].tolist()
        rows, width = header[_NUM_ROWS], header[_TABLE_WIDTH]
        words[: self._tables.start] = self._template
        by_row = words[self._row_words].reshape(len(ROW_WORDS), self.shape.rows)
        for index, word in enumerate(_ROW_OFFSETS):
            by_row[index, :rows] = staging[header[word] : header[word] + rows]
        seed, table = header[_SEED_OFFSET], header[_TABLES_OFFSET]
        words[self._seed.start : self._seed.start + 2 * rows] = staging[seed : seed + 2 * rows]
        tables = words[self._tables].reshape(self.shape.rows, self._table_width)
        # What is left in the rest of a row is of no sequence: no kernel looks beyond a context.
        used = min(width, self._table_width)
        tables[:rows, :used] = staging[table : table + rows * width].reshape(rows, width)[:, :used]
        tables[rows:, 0] = self._trash_block

    def result(self, words: IntArray, num_rows: int) -> IntArray:
        """The result of the first rows, as StepInputs.read wants it, of a result of this shape."""
        cut: npt.NDArray[np.int32] = words[: 2 * self.shape.rows].reshape(2, -1)[:, :num_rows].reshape(-1).copy()
        return cut
