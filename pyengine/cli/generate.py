"""`pyengine generate`: one prompt is streamed, many are one batch; text for people or JSON for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyengine.cli.batch import Batch, passes
from pyengine.cli.loading import loaded_engine
from pyengine.cli.process import DONE, FAILED, INTERRUPTED, InterruptRequest
from pyengine.cli.prompts import PromptItem
from pyengine.cli.records import json_line, note_stats
from pyengine.cli.terminal import DIM, BatchBar, TextOutput, note, note_error
from pyengine.engine import Engine
from pyengine.errors import PyEngineError
from pyengine.outputs import RequestMetrics, RequestOutput, refused_output

SEPARATOR = "---\n"  # between texts, where there is more than one


@dataclass(frozen=True, slots=True)
class Presentation:
    """How outputs are shown."""

    as_json: bool = False
    echo: bool = True
    stats: bool = False
    verbose: bool = False


def run_generate(
    items: Sequence[PromptItem], model: str | None, settings: Mapping[str, Any], presentation: Presentation
) -> int:
    """Complete the prompts, show the outputs and return the exit code."""
    with loaded_engine(model, settings, verbose=presentation.verbose) as loaded:
        report = _Report(loaded.engine, presentation, is_alone=len(items) == 1 and items[0].params.n == 1)
        started = time.monotonic()
        with InterruptRequest() as interrupt:
            if report.is_alone and not presentation.as_json:
                _stream(loaded.engine, items[0], report, interrupt)
            else:
                _run_batch(loaded.engine, items, report, interrupt)
        if interrupt.requested:
            report.out.end_interrupted_line()
        if presentation.stats:
            run_s = time.monotonic() - started
            note_stats(report.metrics, num_failed=report.num_failed, load_s=loaded.load_s, run_s=run_s)
        if interrupt.requested:
            return INTERRUPTED
        return FAILED if report.num_failed else DONE


class _Report:
    """What was shown so far and what has to be said about it."""

    def __init__(self, engine: Engine, presentation: Presentation, *, is_alone: bool) -> None:
        self.out = TextOutput()
        self.is_alone = is_alone
        self.num_failed = 0
        self.metrics: list[RequestMetrics] = []
        self.presentation = presentation
        self._tokenizer = engine.model.tokenizer
        self._num_texts = 0

    def show(self, item: PromptItem, output: RequestOutput) -> None:
        """Write one output as it was asked for."""
        if self.presentation.as_json:
            self.out.write(json_line(item.id, item.prompt, output, self._tokenizer))
        elif output.error is None:
            for completion in output.outputs:
                self.begin_text(item)
                self.out.write(completion.text)
                self.out.end_line()
        self.account(item, output.metrics, output.error)

    def begin_text(self, item: PromptItem) -> None:
        """Write what stands before a text: a separator after the first one, and the prompt."""
        if self._num_texts:
            self.out.write(SEPARATOR)
        self._num_texts += 1
        if self.presentation.echo:
            self.out.write(self._prompt_text(item.prompt), DIM)

    def account(self, item: PromptItem, metrics: RequestMetrics, error: PyEngineError | None) -> None:
        """Count one ended prompt and say what went otherwise than it was asked for."""
        which = "" if self.is_alone else f"prompt {item.id}: "
        if error is not None:
            self.num_failed += 1
            if not self.presentation.as_json:
                note_error(f"{which}{error}")
            return
        if self.presentation.stats:
            self.metrics.append(metrics)
        if metrics.max_tokens_clamped and not self.presentation.as_json:
            asked = item.params.max_tokens or "of the model's defaults"
            note(
                f"pyengine: note: {which}max_tokens {asked} was lowered to {metrics.max_tokens}, "
                f"which is what the context and the KV pool hold."
            )

    def _prompt_text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt) if self._tokenizer is not None else f"{prompt} "


def _stream(engine: Engine, item: PromptItem, report: _Report, interrupt: InterruptRequest) -> None:
    """Complete one prompt and write its text as it grows."""
    try:
        engine.submit(item.prompt, item.params)
    except PyEngineError as error:
        report.show(item, refused_output(item.prompt, error))
        return
    report.begin_text(item)
    for events in passes(engine, lambda: interrupt.requested):
        for event in events:
            report.out.write(event.text)
            if event.metrics is not None:
                report.out.end_line()
                report.account(item, event.metrics, event.error)


def _run_batch(engine: Engine, items: Sequence[PromptItem], report: _Report, interrupt: InterruptRequest) -> None:
    bar = BatchBar(len(items)) if len(items) > 1 and sys.stderr.isatty() else None
    try:
        for item, output in zip(items, _outputs(engine, items, interrupt, bar), strict=False):  # fewer when stopped
            if bar is not None and (report.out.is_terminal or output.error is not None):
                bar.hide()
            report.show(item, output)
    finally:
        if bar is not None:
            bar.hide()


def _outputs(
    engine: Engine, items: Sequence[PromptItem], interrupt: InterruptRequest, bar: BatchBar | None
) -> Iterable[RequestOutput]:
    batch = Batch(engine, items)

    def on_pass() -> None:
        if bar is not None:
            bar.update(batch.num_finished, batch.num_tokens)

    return batch.outputs(lambda: interrupt.requested, on_pass)
