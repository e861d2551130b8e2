"""SmolLM2-135M-Instruct against Hugging Face on the same folder: logits, greedy text of a batch, bfloat16, chat."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine import Engine, SamplingParams
from pyengine.checkpoint import resolve_model, smollm2

from .comparison import (
    KL_RATIO_TOLERANCE,
    LOGITS_TOLERANCE,
    OurModel,
    hf_forward,
    load_hf,
    mean_kl,
    relative_difference,
)
from .conftest import hf_greedy

pytest.importorskip("torch", reason="needs the extra [hf-test]")
transformers = pytest.importorskip("transformers", reason="needs the extra [hf-test]")
pytestmark = [pytest.mark.hf, pytest.mark.network]

MAX_TOKENS = 64
SMALLEST_MARGIN = 1e-3  # of the best logit over the second; below it rounding might decide

STORY = (
    "The ferry left at dawn with four passengers, two goats and a crate of oranges. Nobody asked why the captain wore "
    "a coat in July. Halfway across the strait the wind died, and the sails hung like wet paper. "
)
PROMPTS = (
    "The",
    "Once upon a time",
    "The three laws of thermodynamics are:\n1.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Question: 17 + 25 = 42, 18 + 31 = 49, 123 + 456 =",
    "Le chat est sur la table. La traduction en anglais :",
    "Ingredients for pancakes:\n- 2 eggs\n- 250 ml milk\n- 125 g flour\n\nMethod:\n",
    STORY * 6 + "Then the captain",
)
CONVERSATIONS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What colour is the sky?"},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "And grass?  <3  12345"},
    ],
)


@pytest.fixture(scope="module")
def folder() -> Path:
    converted = smollm2.cache_folder() / f"{smollm2.NAME}-{smollm2.CONVERSION}"
    if not converted.is_dir() and os.environ.get("PYENGINE_NETWORK_TESTS") != "1":
        pytest.skip(f"{smollm2.NAME} was not fetched yet; set PYENGINE_NETWORK_TESTS=1 to fetch 93 MB")
    return resolve_model(smollm2.NAME).folder


@pytest.fixture(scope="module")
def hf_tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def prompt_ids(hf_tokenizer: Any) -> list[list[int]]:
    return [hf_tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def exact(folder: Path) -> Any:
    return load_hf(folder, "float32", "sdpa")


@pytest.fixture(scope="module")
def reference(exact: Any, prompt_ids: list[list[int]]) -> list[Any]:
    return [hf_forward(exact, ids) for ids in prompt_ids]


def test_prompts_are_of_all_lengths(prompt_ids: list[list[int]]) -> None:
    lengths = sorted(len(ids) for ids in prompt_ids)
    assert len(lengths) >= 8
    assert lengths[0] == 1
    assert lengths[-1] >= 250


def test_float32_logits_and_every_layer_agree(folder: Path, prompt_ids: list[list[int]], reference: list[Any]) -> None:
    with OurModel(folder, "float32") as model:
        for ids, expected in zip(prompt_ids, reference, strict=True):
            got = model.forward(ids)
            assert relative_difference(expected.logits, got.logits) <= LOGITS_TOLERANCE
            for layer in range(len(expected.residuals)):
                assert relative_difference(expected.residuals[layer], got.residuals[layer]) <= LOGITS_TOLERANCE, layer


def test_bfloat16_is_no_farther_from_float32_than_that_of_hf(
    folder: Path, prompt_ids: list[list[int]], reference: list[Any]
) -> None:
    rounded = load_hf(folder, "bfloat16", "sdpa")
    theirs = np.concatenate([hf_forward(rounded, ids).logits for ids in prompt_ids])
    with OurModel(folder, "bfloat16") as model:
        ours = np.concatenate([model.forward(ids).logits for ids in prompt_ids])
    expected = np.concatenate([one.logits for one in reference])
    assert mean_kl(expected, ours) <= KL_RATIO_TOLERANCE * mean_kl(expected, theirs)


def test_greedy_tokens_of_a_batch_in_float32_are_those_of_hf(
    folder: Path, exact: Any, prompt_ids: list[list[int]]
) -> None:
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    with Engine(folder, device="cpu", dtype="float32", max_num_seqs=8, max_num_batched_tokens=64) as engine:
        outputs = engine.generate(list(PROMPTS), greedy, on_error="raise")
    for prompt, ids, output in zip(PROMPTS, prompt_ids, outputs, strict=True):
        assert list(output.prompt_token_ids) == ids
        path = hf_greedy(exact, ids, MAX_TOKENS)
        assert min(path.margins) >= SMALLEST_MARGIN, f"nearly a tie, another prompt is needed: {prompt!r}"
        assert output.outputs[0].token_ids == path.token_ids, prompt


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one turn", "system and three turns"])
def test_chat_is_rendered_and_encoded_as_by_hf(folder: Path, hf_tokenizer: Any, messages: list[dict[str, str]]) -> None:
    expected = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    with Engine(folder, device="cpu", max_num_seqs=1, max_context=256) as engine:
        assert engine.tokenizer.apply_chat_template(messages) == expected


def test_chat_knows_the_capital_of_france_and_ends_by_itself(folder: Path, hf_tokenizer: Any, exact: Any) -> None:
    with Engine(folder, device="cpu", dtype="float32", max_num_seqs=1, max_context=512) as engine:
        answer = engine.chat(CONVERSATIONS[0], SamplingParams(max_tokens=48, temperature=0.0))
    completion = answer.outputs[0]
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop"
    path = hf_greedy(exact, answer.prompt_token_ids, len(completion.token_ids))
    assert completion.text == hf_tokenizer.decode(path.token_ids, skip_special_tokens=True)
