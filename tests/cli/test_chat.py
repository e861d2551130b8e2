"""`pyengine chat` with pipes: one question, one answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyengine import Engine, SamplingParams


def test_a_question_is_answered_once_from_the_arguments_or_a_pipe(run: Callable[..., Any], chat_model: Path) -> None:
    options = ("-m", str(chat_model), "--system", "Be kind.", "--max-tokens", "8", "--seed", "5")
    from_arguments = run("chat", "Why?", *options)
    from_pipe = run("chat", *options, stdin="Why?\n")
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]
    with Engine(chat_model) as engine:
        expected = engine.chat(messages, SamplingParams(max_tokens=8, seed=5)).text
    assert from_arguments.out.removesuffix("\n") == expected.removesuffix("\n")
    assert from_arguments == from_pipe
    assert (from_pipe.code, from_pipe.err.count("\n")) == (0, 1)
    assert "(ended after 8 tokens, the limit)" in from_pipe.err


def test_a_model_without_a_template_is_refused_and_a_chat_model_named(
    run: Callable[..., Any], built_in: list[str]
) -> None:
    finished = run("chat", "Hi", "--model", built_in[-1] if built_in else "stories-1m")
    assert "has no chat template" in finished.err
    assert "smollm2-135m-instruct" in finished.err
    assert finished.err.count("\n") == 1
    assert (finished.code, finished.out) == (1, "")


@pytest.mark.parametrize("option", ["--logprobs", "--prompt-logprobs"])
def test_log_probabilities_are_not_promised(run: Callable[..., Any], chat_model: Path, option: str) -> None:
    finished = run("chat", "Why?", "-m", str(chat_model), option, "1")
    assert finished.err == (
        f"pyengine: error: {option} is 1, but a chat shows no log-probabilities; use pyengine generate --json.\n"
    )
    assert (finished.code, finished.out) == (2, "")


def test_an_empty_question_is_refused(run: Callable[..., Any], chat_model: Path) -> None:
    finished = run("chat", "-m", str(chat_model), stdin="\n")
    assert finished.err == "pyengine: error: The question is empty.\n"
    assert finished.code == 2
