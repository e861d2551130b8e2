"""`pyengine chat`: a conversation on a terminal with its history, or one answer to one question."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pyengine.text.chat_template  # noqa: F401 (needed later, and imported while Ctrl-C still ends the process)
from pyengine.cli.batch import passes
from pyengine.cli.loading import loaded_engine
from pyengine.cli.process import DONE, FAILED, INTERRUPTED, InterruptRequest
from pyengine.cli.records import note_stats
from pyengine.cli.terminal import TextOutput, note, note_error
from pyengine.engine import Engine
from pyengine.errors import EngineClosed, EngineFailed, ModelError, NeverFits, PyEngineError
from pyengine.outputs import RequestMetrics
from pyengine.sampling_params import SamplingParams

PROMPT = ">>> "
HELP = """\
/reset   forget the conversation
/quit    leave (also Ctrl-D)
/help    show this
Ctrl-C   stop the answer that is being written; at the prompt, leave"""


class Conversation:
    """A chat model, what was said so far, and how the next answer is made."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        if not engine.tokenizer.has_chat_template:
            raise ModelError(
                f"The model {engine.model.name!r} has no chat template, so it can continue a text but not answer; "
                f"use a chat model, for example --model smollm2-135m-instruct, or `pyengine generate`."
            )
        self._engine = engine
        self._params = params
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._out = TextOutput()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is remembered but the system message."""
        return self._messages == self._start

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = list(self._start)

    def answer(self, question: str, interrupt: InterruptRequest) -> RequestMetrics | None:
        """Write the answer as it grows and remember both; Ctrl-C ends it early, and what there is of it is kept.

        Returns its metrics. Raises what the engine raises; the question is then forgotten.
        """
        messages = [*self._messages, {"role": "user", "content": question}]
        request_id = self._engine.submit(self._engine.tokenizer.apply_chat_template(messages), self._params)
        texts: list[str] = []
        metrics = None
        for events in passes(self._engine, lambda: interrupt.requested):
            for event in events:
                texts.append(event.text)
                self._out.write(event.text)
                metrics = event.metrics or metrics
                if event.error is not None:
                    self._out.end_line()
                    raise event.error
        if self._engine.abort(request_id):
            self._engine.step()  # takes the event that says so
        if interrupt.requested:
            self._out.end_interrupted_line()
        else:
            self._out.end_line()
        if any(texts):
            self._messages = [*messages, {"role": "assistant", "content": "".join(texts)}]
        return metrics


def run_chat(
    question: str | None,
    model: str,
    system: str | None,
    params: SamplingParams,
    settings: Mapping[str, Any],
    *,
    stats: bool,
    verbose: bool,
) -> int:
    """Answer one question, or without one hold a conversation; returns the exit code."""
    with loaded_engine(model, settings, verbose=verbose) as loaded:
        conversation = Conversation(loaded.engine, params, system)
        if question is None:
            return _converse(conversation, loaded.engine.model.name, loaded.load_s if stats else None)
        with InterruptRequest() as interrupt:
            metrics = conversation.answer(question, interrupt)
        _note_turn(metrics, loaded.load_s if stats else None)
        return INTERRUPTED if interrupt.requested else DONE


def _converse(conversation: Conversation, name: str, load_s: float | None) -> int:
    _enable_line_editing()
    note(f"Chat with {name}. /help shows the commands; Ctrl-D leaves.")
    while True:
        try:
            line = _read_line()
        except EOFError:
            sys.stdout.write("\n")
            return DONE
        command = line.strip()
        if command in ("/quit", "/exit"):
            return DONE
        if command == "/reset":
            conversation.reset()
            note("The conversation is forgotten.")
        elif command.startswith("/"):
            note(HELP if command == "/help" else f"There is no command {command}.\n{HELP}")
        elif command and not _take_turn(conversation, line, load_s):
            return FAILED


def _take_turn(conversation: Conversation, question: str, load_s: float | None) -> bool:
    """One question and its answer. False when the engine cannot go on."""
    try:
        with InterruptRequest() as interrupt:
            metrics = conversation.answer(question, interrupt)
    except PyEngineError as error:
        note_error(str(error))
        if isinstance(error, (EngineFailed, EngineClosed)):
            return False
        if isinstance(error, NeverFits):
            note(_too_long_hint(conversation))
        return True
    if interrupt.requested:
        note("(stopped)")
    _note_turn(metrics, load_s)
    return True


def _too_long_hint(conversation: Conversation) -> str:
    if conversation.is_empty:
        return "The message alone is too long; write a shorter one."
    return "The conversation has become too long; /reset forgets it."


def _note_turn(metrics: RequestMetrics | None, load_s: float | None) -> None:
    if metrics is not None and metrics.completion_tokens >= metrics.max_tokens:
        note(f"(ended after {metrics.max_tokens} tokens, the limit)")
    if metrics is not None and load_s is not None:
        note_stats([metrics], num_failed=0, load_s=load_s, run_s=metrics.finished_s or 0.0)


def _read_line() -> str:
    if sys.stdout.isatty():
        return input(PROMPT)
    sys.stderr.write(PROMPT)
    sys.stderr.flush()
    return input()


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401 (importing it is what makes input() use it)
    except ImportError:  # not every build of Python has it; input() works without
        return
