"""Token ids that a step takes from the result of the step before, which the host need not have seen."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine import _cpu
from pyengine.backends.step_inputs import SequenceChunk

from .tiny_decoder import VOCAB, TinyDecoder, greedy_step, put_on_cpu

PROMPTS = [SequenceChunk([5, 9, 33], 0, [2]), SequenceChunk([7], 0, [0]), SequenceChunk(list(range(20)), 0, [5, 3])]


@pytest.fixture
def tiny() -> TinyDecoder:
    return TinyDecoder(_cpu, _cpu.Context(1), put_on_cpu)


def drawn_after_prompts(tiny: TinyDecoder) -> np.ndarray:
    staging, result = greedy_step(PROMPTS)
    tiny.decoder.step(staging, result)
    return result[: len(PROMPTS)].copy()


def next_chunks(ids: list[int], order: list[int]) -> list[SequenceChunk]:
    return [SequenceChunk([ids[s]], len(PROMPTS[s].token_ids), PROMPTS[s].block_table) for s in order]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1]])
def test_negative_ids_give_what_the_ids_they_stand_for_give(tiny: TinyDecoder, order: list[int]) -> None:
    ids = drawn_after_prompts(tiny)
    assert len(set(ids.tolist())) == len(ids), "equal ids would hide that one is taken for another"
    outcomes = []
    for previous, tokens in ((None, ids.tolist()), (ids, [-1, -2, -3])):
        staging, result = greedy_step(next_chunks(tokens, order), logprobs=3)
        logits = np.empty((len(order), VOCAB), np.float32)
        tiny.decoder.step(staging, result, previous=previous, logits=logits)
        outcomes.append((result.tolist(), logits.tolist()))
    assert outcomes[0] == outcomes[1]


def test_negative_ids_may_stand_beside_ids_in_one_prompt(tiny: TinyDecoder) -> None:
    outcomes = []
    for previous, tokens in ((None, [11, 4, 60]), (np.array([60, 11], np.int32), [-2, 4, -1])):
        staging, result = greedy_step([SequenceChunk(tokens, 0, [1])], logprobs=5)
        tiny.decoder.step(staging, result, previous=previous)
        outcomes.append(result.tolist())
    assert outcomes[0] == outcomes[1]


def test_the_id_of_a_row_that_failed_stands_for_token_0(tiny: TinyDecoder) -> None:
    outcomes = []
    for previous, token in ((None, 0), (np.array([-1], np.int32), -1)):
        staging, result = greedy_step([SequenceChunk([token], 0, [1])], logprobs=5)
        tiny.decoder.step(staging, result, previous=previous)
        outcomes.append(result.tolist())
    assert outcomes[0] == outcomes[1]


def test_ids_that_stand_for_nothing_are_refused(tiny: TinyDecoder) -> None:
    previous = np.array([1, 2], np.int32)
    for token, given, message in (
        (-1, None, "'token_ids' holds -1 at index 0; it must be in 0 .. 69"),
        (-3, previous, "'token_ids' holds -3 at index 0; it must be in -2 .. 69"),
        (VOCAB, previous, "'token_ids' holds 70"),
        (-2, np.array([1, VOCAB], np.int32), "'previous' holds 70 at index 1"),
        (-1, np.array([-2, 1], np.int32), "'previous' holds -2 at index 0"),
        (-1, previous.astype(np.int64), "'previous' is not int32"),
        (-1, np.arange(4, dtype=np.int32)[::2], "'previous' is not C-contiguous"),
    ):
        staging, result = greedy_step([SequenceChunk([token], 0, [1])])
        with pytest.raises(ValueError, match=message):
            tiny.decoder.step(staging, result, previous=given)
        assert (result == -7).all()
