"""Sampling defaults and end-of-sequence ids of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from pyengine.checkpoint import eos_token_ids, generation_defaults
from pyengine.errors import ModelError
from pyengine.sampling_params import SamplingParams


def test_without_the_file_the_model_has_no_opinion() -> None:
    defaults = generation_defaults(None)
    assert defaults.values == {}
    assert "no generation_config.json" in defaults.origin


def test_values_of_a_sampling_model_become_defaults() -> None:
    defaults = generation_defaults(
        {
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
            "min_p": 0.1,
            "repetition_penalty": 1.05,
            "max_new_tokens": 99,
            "eos_token_id": 2,
        }
    )
    assert defaults.values == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "max_tokens": 99,
    }
    assert "temperature 0.6" in defaults.origin
    params = SamplingParams(top_p=0.5).with_defaults(defaults.values)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.5, 20, 99)


@pytest.mark.parametrize("file", [{}, {"do_sample": False}, {"do_sample": None}, {"temperature": 0.7}])
def test_a_file_that_does_not_ask_for_sampling_is_greedy(file: dict[str, Any]) -> None:
    defaults = generation_defaults(file)
    assert defaults.values == {"temperature": 0.0}
    assert "do_sample" in defaults.origin


def test_other_values_stand_for_the_user_who_asks_for_a_temperature() -> None:
    defaults = generation_defaults({"top_p": 0.9, "top_k": None})
    assert defaults.values == {"temperature": 0.0, "top_p": 0.9}


def test_what_is_not_applied_is_said() -> None:
    defaults = generation_defaults({"do_sample": True, "num_beams": 4, "typical_p": 1.0, "suppress_tokens": [5]})
    assert defaults.not_applied == ("num_beams", "suppress_tokens")
    assert "not applied: num_beams, suppress_tokens" in defaults.origin


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"do_sample": "yes"}, ["do_sample", "'yes'"]),
        ({"do_sample": True, "temperature": -1}, ["temperature", "-1"]),
        ({"top_p": 1.5}, ["top_p", "1.5"]),
        ({"top_k": 2.5}, ["top_k", "2.5"]),
        ({"max_new_tokens": 0}, ["max_tokens", "0"]),
    ],
)
def test_a_wrong_value_is_a_model_error_with_the_file_in_it(file: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        generation_defaults(file)
    assert all(word in str(caught.value) for word in ["generation_config.json", *words]), str(caught.value)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        ({}, None, None, set()),
        ({"eos_token_id": 2}, None, None, {2}),
        ({"eos_token_id": 2}, {"eos_token_id": [2, 7]}, 9, {2, 7, 9}),
        ({"eos_token_id": [0, 1]}, {"eos_token_id": None}, 0, {0, 1}),
        ({"eos_token_id": None}, {}, 3, {3}),
    ],
)
def test_the_eos_ids_are_the_union_of_all_sources(config: Any, generation: Any, tokenizer: Any, expected: Any) -> None:
    assert eos_token_ids(config, generation, tokenizer) == frozenset(expected)


@pytest.mark.parametrize("wrong", [-1, "2", 2.0, True, [1, "2"], {"a": 1}])
def test_a_wrong_eos_id_is_refused(wrong: Any) -> None:
    with pytest.raises(ModelError, match="eos_token_id"):
        eos_token_ids({"eos_token_id": wrong}, None)
