"""Decode steps in their fixed layout say the same as the ragged ones, and the rows that fill up are nobody's."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from pyengine import SamplingParams
from pyengine.backends.decode_layout import (
    DecodeLayout,
    DecodeShape,
    most_decode_words,
    rounded_context,
    rounded_rows,
    shape_of,
)
from pyengine.backends.step_inputs import COUNTS, SECTIONS, IntArray, LogitsRow, SequenceChunk, StepInputs
from pyengine.sampling_row import SamplingRow

BLOCK_SIZE = 16
TRASH_BLOCK = 500
PER_ROW = [name for name in SECTIONS if name not in ("block_tables", "copies", "seed", "query_start", "allow_mask")
           and "penalty_" not in name and "bias_" not in name]  # fmt: skip


def sampling(seed: int, **values: object) -> SamplingRow:
    return SamplingRow(SamplingParams(seed=seed, **values).with_defaults({}), seed, [5], frozenset())  # type: ignore[arg-type]


def decode_step(rows: int, *, seed: int = 0, num_logprobs: int = -1) -> IntArray:
    rng = random.Random(seed)
    chunks, wanted = [], []
    for r in range(rows):
        start = rng.randrange(900)
        table = rng.sample(range(TRASH_BLOCK), start // BLOCK_SIZE + 1)
        chunks.append(SequenceChunk([rng.randrange(-rows, 300)], start, table))
        row = sampling(rng.getrandbits(64), temperature=rng.random(), top_k=rng.randrange(50), top_p=0.5, min_p=0.25)
        wanted.append(LogitsRow(r, row, start + 1, -1, num_logprobs))
    staging, _ = StepInputs(BLOCK_SIZE).write(chunks, wanted)
    return staging.copy()


def section(words: IntArray, name: str, length: int) -> IntArray:
    begin = words[len(COUNTS) + SECTIONS.index(name)]
    return words[begin : begin + length]


def laid_out(staging: IntArray, shape: DecodeShape) -> IntArray:
    layout = DecodeLayout(shape, BLOCK_SIZE, TRASH_BLOCK)
    words = np.full(layout.num_words, 0x7FFFFFFF, np.int32)  # left over from something else
    layout.fill(staging, words)
    return words


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 11])
def test_the_first_rows_are_the_step_and_the_others_a_block_of_nobody(rows: int) -> None:
    staging = decode_step(rows)
    shape = DecodeShape(rounded_rows(rows, 64), 1024)
    words = laid_out(staging, shape)
    counts = dict(zip(COUNTS, words.tolist(), strict=False))
    assert counts["num_words"] == words.size
    assert [counts[name] for name in ("num_tokens", "num_seqs", "num_rows")] == [shape.rows] * 3
    assert [counts[name] for name in ("max_query_len", "max_context_len", "table_width")] == [1, 1024, 64]
    assert section(words, "query_start", shape.rows + 1).tolist() == list(range(shape.rows + 1))
    for name in PER_ROW:
        assert section(words, name, rows).tolist() == section(staging, name, rows).tolist(), name
    assert section(words, "seed", 2 * rows).tolist() == section(staging, "seed", 2 * rows).tolist()
    assert words[len(COUNTS) + SECTIONS.index("seed")] % 2 == 0
    for name in ("penalty_start", "bias_start"):
        assert not section(words, name, shape.rows + 1).any()

    width = staging[COUNTS.index("table_width")]
    tables = section(words, "block_tables", shape.rows * 64).reshape(shape.rows, 64)
    assert (tables[:rows, :width] == section(staging, "block_tables", rows * width).reshape(rows, width)).all()
    assert (tables[rows:, 0] == TRASH_BLOCK).all()
    slots = section(words, "slot_mapping", shape.rows)[rows:]
    assert (slots // BLOCK_SIZE == TRASH_BLOCK).all()
    assert len(set(slots.tolist())) == slots.size
    positions = section(words, "positions", shape.rows)[rows:]
    assert (positions == slots % BLOCK_SIZE).all()
    assert (section(words, "context_lens", shape.rows)[rows:] == positions + 1).all()
    assert section(words, "logits_rows", shape.rows).tolist() == list(range(shape.rows))
    assert (section(words, "target", shape.rows)[rows:] == -1).all()
    assert (section(words, "top_p", shape.rows)[rows:].view(np.float32) == 1.0).all()
    assert (section(words, "repetition_penalty", shape.rows)[rows:].view(np.float32) == 1.0).all()


def test_every_step_of_a_shape_has_its_arrays_at_the_same_places_and_forgets_the_last_one() -> None:
    shape = DecodeShape(8, 1024)
    layout = DecodeLayout(shape, BLOCK_SIZE, TRASH_BLOCK)
    words = np.zeros(layout.num_words, np.int32)
    layout.fill(decode_step(8, seed=1), words)
    header = words[: len(COUNTS) + len(SECTIONS)].copy()
    layout.fill(decode_step(5, seed=2), words)
    assert (words[: header.size] == header).all()
    fresh = laid_out(decode_step(5, seed=2), shape)
    tables = section(words, "block_tables", 0).size + header[len(COUNTS) + SECTIONS.index("block_tables")]
    assert (words[:tables] == fresh[:tables]).all()


def test_the_result_of_the_rows_that_fill_up_is_cut_off() -> None:
    layout = DecodeLayout(DecodeShape(4, 1024), BLOCK_SIZE, TRASH_BLOCK)
    words = np.array([1, 2, 3, 99, 10, 20, 30, 999, 7], np.int32)
    assert layout.result(words, 3).tolist() == [1, 2, 3, 10, 20, 30]
    result = layout.result(words, 3)
    words[:] = 0
    assert result.tolist() == [1, 2, 3, 10, 20, 30]


def test_only_plain_decode_steps_have_a_shape() -> None:
    assert shape_of(decode_step(3), 64, 2048) == DecodeShape(4, 1024)
    assert shape_of(decode_step(3, num_logprobs=0), 64, 2048) == DecodeShape(4, 1024)
    assert shape_of(decode_step(3, num_logprobs=2), 64, 2048) is None
    inputs, row = StepInputs(BLOCK_SIZE), sampling(1)
    chunk, long = SequenceChunk([7], 20, [1, 2]), SequenceChunk([7, 8], 20, [1, 2])
    plain, _ = inputs.write([chunk], [LogitsRow(0, row, 21)])
    assert shape_of(plain, 64, 2048) == DecodeShape(1, 1024)
    for chunks, rows, copies in (
        ([long], [LogitsRow(1, row, 22)], []),
        ([chunk, long], [LogitsRow(0, row, 21), LogitsRow(2, row, 22)], []),
        ([chunk], [], []),
        ([chunk], [LogitsRow(0, row, 21)], [(1, 3)]),
        ([chunk], [LogitsRow(0, sampling(1, presence_penalty=0.5), 21)], []),
        ([chunk], [LogitsRow(0, sampling(1, logit_bias={3: 1.0}), 21)], []),
        ([], [], [(1, 3)]),
    ):
        assert shape_of(inputs.write(chunks, rows, copies)[0], 64, 2048) is None
    assert shape_of(np.zeros(5, np.int32), 64, 2048) is None


def test_sizes_are_few_and_never_beyond_the_limits() -> None:
    for most in (1, 3, 6, 8, 64, 65, 256):
        sizes = [rounded_rows(rows, most) for rows in range(1, most + 1)]
        assert all(rows <= size <= most for rows, size in enumerate(sizes, 1))
        assert all(size - rows < BLOCK_SIZE for rows, size in enumerate(sizes, 1))
        assert len(set(sizes)) <= 4 + most // 8
    assert [rounded_rows(rows, 64) for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 63, 64)] == [
        1, 2, 4, 4, 8, 8, 16, 16, 24, 64, 64]  # fmt: skip
    for most in (2, 100, 1024, 1025, 131072):
        contexts = [rounded_context(context, most) for context in range(1, most + 1, 7)]
        assert all(context <= size <= most for context, size in zip(range(1, most + 1, 7), contexts, strict=True))
        assert all(a <= b for a, b in pairwise(contexts))
        assert len(set(contexts)) <= 5


def test_the_largest_layout_bounds_all() -> None:
    most = most_decode_words(20, 5000, BLOCK_SIZE)
    for rows in range(1, 21):
        for context in (1, 1024, 1025, 5000):
            shape = DecodeShape(rounded_rows(rows, 20), rounded_context(context, 5000))
            assert DecodeLayout(shape, BLOCK_SIZE, TRASH_BLOCK).num_words <= most
