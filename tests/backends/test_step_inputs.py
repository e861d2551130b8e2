"""The staging buffer says what it was told, and the binding refuses every step that would leave its bounds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyengine import Engine, SamplingParams
from pyengine.backends.step_inputs import COUNTS, HEADER_WORDS, SECTIONS, LogitsRow, SequenceChunk, StepInputs
from pyengine.sampling_row import SamplingRow

from ..engine.conftest import write_model

NEUTRAL = {"temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "top_k": 9, "repetition_penalty": 1.5}


def a_step() -> tuple[list[SequenceChunk], list[LogitsRow]]:
    """A decode in its third block, a chunk that ends in the middle of a block, and a whole prompt."""
    chunks = [
        SequenceChunk([7], 33, [4, 9, 2]),
        SequenceChunk(list(range(20, 50)), 5, [1, 0, 3]),
        SequenceChunk([60, 61], 0, [8]),
    ]
    biased = SamplingParams(**NEUTRAL, logit_bias={3: -1.5, 5: 2.0}, presence_penalty=0.75, min_tokens=1)
    first = SamplingRow(biased, 2**64 - 2, [7, 7, 8], [1])
    second = SamplingRow(SamplingParams(**NEUTRAL), 3, [60], [1])
    return chunks, [LogitsRow(0, first, 34, -1, 2), LogitsRow(31, second, 1, 61, 0), LogitsRow(32, second, 2)]


def section(staging: np.ndarray, name: str, length: int) -> np.ndarray:
    begin = staging[len(COUNTS) + SECTIONS.index(name)]
    return staging[begin : begin + length]


def test_the_arrays_of_a_step_stand_in_the_buffer_as_its_layout_says() -> None:
    chunks, rows = a_step()
    staging, result = StepInputs(16).write(chunks, rows, [(3, 5)])
    counts = dict(zip(COUNTS, staging.tolist(), strict=False))
    assert counts["num_words"] == staging.size
    assert [counts[n] for n in ("num_tokens", "num_seqs", "table_width", "max_query_len")] == [33, 3, 3, 30]
    assert [counts[n] for n in ("max_context_len", "num_rows", "num_copies", "top_width")] == [35, 3, 1, 2]
    assert section(staging, "token_ids", 33).tolist() == [7, *range(20, 50), 60, 61]
    assert section(staging, "positions", 33).tolist() == [33, *range(5, 35), 0, 1]
    tables = section(staging, "block_tables", 9).reshape(3, 3)
    assert tables.tolist() == [[4, 9, 2], [1, 0, 3], [8, 0, 0]]
    sequence = np.repeat([0, 1, 2], [1, 30, 2])
    positions = section(staging, "positions", 33)
    expected = tables[sequence, positions // 16] * 16 + positions % 16
    assert section(staging, "slot_mapping", 33).tolist() == expected.tolist()
    assert section(staging, "query_start", 4).tolist() == [0, 1, 31, 33]
    assert section(staging, "context_lens", 3).tolist() == [34, 35, 2]
    assert section(staging, "copies", 2).tolist() == [3, 5]
    assert result.size == 3 * (2 + 2 * 2)


def test_the_settings_of_each_row_stand_in_the_buffer_as_its_layout_says() -> None:
    _, rows = a_step()
    staging, _ = StepInputs(16).write(*a_step())
    del rows
    for name, value in (("temperature", 0.5), ("top_p", 0.25), ("min_p", 0.125), ("repetition_penalty", 1.5)):
        assert section(staging, name, 3).view(np.float32).tolist() == [value] * 3
    assert section(staging, "presence_penalty", 3).view(np.float32).tolist() == [0.75, 0.0, 0.0]
    assert section(staging, "top_k", 3).tolist() == [9, 9, 9]
    begin = staging[len(COUNTS) + SECTIONS.index("seed")]
    assert begin % 2 == 0
    assert staging[begin : begin + 6].view(np.uint64).tolist() == [2**64 - 2, 3, 3]
    assert section(staging, "target", 3).tolist() == [-1, 61, -1]
    assert section(staging, "num_logprobs", 3).tolist() == [2, 0, -1]
    assert section(staging, "position", 3).tolist() == [34, 1, 2]
    # A penalty is in force on every row, so each that draws lists its tokens; the biases include the end id forbidden
    # so far.
    assert section(staging, "penalty_start", 4).tolist() == [0, 2, 2, 3]
    assert section(staging, "penalty_ids", 3).tolist() == [7, 8, 60]
    assert section(staging, "bias_start", 4).tolist() == [0, 3, 3, 3]
    assert section(staging, "bias_ids", 3).tolist() == [3, 5, 1]
    assert section(staging, "bias_values", 3).view(np.float32).tolist() == [-1.5, 2.0, float("-inf")]


@pytest.fixture(scope="module")
def backend_and_step(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, np.ndarray, np.ndarray]]:
    folder: Path = write_model(tmp_path_factory.mktemp("model"))
    with Engine(folder, kv_cache_memory="1MiB", num_threads=1, max_num_batched_tokens=64, max_num_seqs=8) as engine:
        staging, result = StepInputs(16).write(*a_step())
        engine.model.backend.step(staging, result)
        yield engine, staging.copy(), result.copy()


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("token_ids", 0, -1),
        ("token_ids", 32, 320),
        ("positions", 3, 511),
        ("positions", 3, -1),
        ("slot_mapping", 0, 10**6),
        ("slot_mapping", 0, -16),
        ("slot_mapping", 0, 3),
        ("query_start", 0, 1),
        ("query_start", 1, 32),
        ("query_start", 3, 40),
        ("context_lens", 0, 49),
        ("context_lens", 0, 0),
        ("context_lens", 1, 2**31 - 1),
        ("block_tables", 1, -3),
        ("block_tables", 1, 10**6),
        ("logits_rows", 0, 33),
        ("logits_rows", 0, -1),
        ("target", 0, 320),
        ("target", 0, -2),
        ("num_logprobs", 0, 3),
        ("num_logprobs", 0, 2**31 - 1),
        ("num_logprobs", 0, -2),
        ("penalty_start", 1, 5),
        ("penalty_ids", 0, 320),
        ("bias_start", 3, 9),
        ("bias_ids", 0, -7),
        ("temperature", 0, -1),  # as a float: not a number
        ("top_p", 0, 0x40000000),  # 2.0
        ("min_p", 1, 0x40000000),
        ("repetition_penalty", 2, 0),
    ],
)
def test_an_index_out_of_bounds_is_refused_before_a_kernel_sees_it(
    backend_and_step: tuple[Engine, np.ndarray, np.ndarray], name: str, index: int, value: int
) -> None:
    engine, staging, result = backend_and_step
    broken = staging.copy()
    broken[broken[len(COUNTS) + SECTIONS.index(name)] + index] = value
    with pytest.raises(ValueError, match="argument"):
        engine.model.backend.step(broken, result.copy())


def test_a_header_with_any_word_replaced_is_refused_or_harmless(
    backend_and_step: tuple[Engine, np.ndarray, np.ndarray],
) -> None:
    engine, staging, result = backend_and_step
    rng = random.Random(4)
    refusals = []
    for word in range(HEADER_WORDS):
        for value in (-1, -(2**31), 2**31 - 1, 0, int(staging[word]) + 1, rng.randrange(staging.size)):
            broken = staging.copy()
            broken[word] = value
            try:
                engine.model.backend.step(broken, np.zeros(4096, np.int32))
            except ValueError as error:
                refusals.append(str(error))
    assert len(refusals) > HEADER_WORDS
    assert all("argument" in refusal for refusal in refusals)
    engine.model.backend.step(staging, result)


def test_arrays_of_another_type_or_shape_are_refused_with_the_arguments_name(
    backend_and_step: tuple[Engine, np.ndarray, np.ndarray],
) -> None:
    engine, staging, result = backend_and_step
    backend = engine.model.backend
    with pytest.raises(TypeError):
        backend.step(staging.astype(np.int64), result)
    with pytest.raises(ValueError, match="'staging' is not C-contiguous"):
        backend.step(np.repeat(staging, 2)[::2], result)
    with pytest.raises(ValueError, match=f"'result' has .* {result.nbytes} are needed"):
        backend.step(staging, result[:-1].copy())
    frozen = result.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="'result' is read-only"):
        backend.step(staging, frozen)
