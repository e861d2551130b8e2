"""CompletionState: when a completion ends, what its text is, and what it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyengine import SamplingParams, TokenLogprobs
from pyengine.completion import CompletionState, EndRules
from pyengine.text import Tokenizer

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


def completed(
    tokenizer: Tokenizer | None, text: str, *, end: tuple[int, ...] = (), max_tokens: int = 100, **settings: Any
) -> CompletionState:
    """A completion that was given the tokens of `text`, one a step, and then `end`, as long as it had not ended."""
    params = SamplingParams(**settings)
    rules = EndRules(frozenset({EOS}), frozenset(params.stop_token_ids))
    state = CompletionState(0, params, rules, tokenizer, (0,))
    ids = tokenizer.encode(text, add_special_tokens=False) if tokenizer is not None else [5, 6, 7]
    for token_id in (*ids, *end):
        if state.finish_reason is None:
            state.push(token_id, TokenLogprobs(token_id, -0.5), max_tokens)
    return state


def ending(state: CompletionState) -> tuple[Any, ...]:
    return state.completion().text, state.finish_reason, state.stop_reason


def test_the_end_of_sequence_is_not_part_of_the_text(tokenizer: Tokenizer) -> None:
    assert ending(completed(tokenizer, "the cat", end=(EOS,))) == ("the cat", "stop", None)
    assert ending(completed(tokenizer, "the cat", end=(EOS,), skip_special_tokens=False)) == ("the cat", "stop", None)


def test_special_tokens_are_part_of_the_text_only_when_asked_for(tokenizer: Tokenizer) -> None:
    assert ending(completed(tokenizer, "the", end=(0, EOS)))[0] == "the"
    assert ending(completed(tokenizer, "the", end=(0, EOS), skip_special_tokens=False))[0] == "the<s>"


def test_a_stop_id_is_reported_and_not_part_of_the_text(tokenizer: Tokenizer) -> None:
    (dog,) = tokenizer.encode("z", add_special_tokens=False)
    assert ending(completed(tokenizer, "the cat", end=(dog,), stop_token_ids=[dog])) == ("the cat", "stop", dog)


def test_text_held_back_for_a_stop_string_comes_out_when_the_length_ends_it(tokenizer: Tokenizer) -> None:
    num_tokens = len(tokenizer.encode("the cat an", add_special_tokens=False))
    state = completed(tokenizer, "the cat an", max_tokens=num_tokens, stop=[" and"])
    assert ending(state) == ("the cat an", "length", None)


def test_stop_strings_before_min_tokens_are_not_searched_and_later_ones_are(tokenizer: Tokenizer) -> None:
    assert ending(completed(tokenizer, "a b a b", stop=["b"])) == ("a ", "stop", "b")
    (_, *rest) = ids = tokenizer.encode("a b a b", add_special_tokens=False)
    assert rest
    late = completed(tokenizer, "a b a b", stop=["b"], min_tokens=len(ids))
    assert ending(late) == ("a b a ", "stop", "b")


def test_a_stop_string_of_an_unfinished_character_counts_when_the_length_ends_it(tokenizer: Tokenizer) -> None:
    (first_byte, *_) = tokenizer.encode("é", add_special_tokens=False)
    state = CompletionState(0, SamplingParams(stop=["\ufffd"]), EndRules(frozenset(), frozenset()), tokenizer, (0,))
    assert state.push(first_byte, None, 1) == ""
    assert ending(state) == ("", "stop", "\ufffd")


def test_logprobs_add_up_and_appear_only_when_asked_for(tokenizer: Tokenizer) -> None:
    state = completed(tokenizer, "the cat", end=(EOS,), logprobs=0)
    completion = state.completion()
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    assert completion.cumulative_logprob == -0.5 * len(completion.token_ids)
    plain = completed(tokenizer, "the cat", end=(EOS,)).completion()
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    state = completed(None, "", end=(EOS,))
    assert (state.completion().token_ids, *ending(state)) == ((5, 6, 7, EOS), "", "stop", None)


def test_an_end_from_outside_gives_the_text_that_was_held_back(tokenizer: Tokenizer) -> None:
    state = completed(tokenizer, "the cat an", stop=[" and"])
    assert state.end("abort") == " an"
    assert ending(state) == ("the cat an", "abort", None)
