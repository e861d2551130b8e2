"""Prompts on their way through an engine, pass by pass; outputs come in the order of the prompts, as soon as done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pyengine.cli.prompts import PromptItem
from pyengine.engine import Engine, EventStream
from pyengine.errors import PyEngineError
from pyengine.outputs import Completion, RequestMetrics, RequestOutput, StreamEvent, TokenLogprobs

IsStopped = Callable[[], bool]


def passes(engine: Engine, is_stopped: IsStopped) -> Iterator[list[StreamEvent]]:
    """The events of one pass after another until nothing is left; between two passes one may stop."""
    while engine.has_unfinished and not is_stopped():
        yield engine.step()


@dataclass(slots=True)
class _GrowingCompletion:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: StreamEvent | None = None

    def add(self, event: StreamEvent) -> None:
        self.texts.append(event.text)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or ()
        if event.finish_reason is not None:
            self.last = event

    def completion(self, index: int, *, has_logprobs: bool) -> Completion:
        return Completion(
            index,
            "".join(self.texts),
            tuple(self.token_ids),
            self.last.finish_reason if self.last else None,
            self.last.stop_reason if self.last else None,
            tuple(self.logprobs) if has_logprobs else None,
            sum(entry.logprob for entry in self.logprobs) if has_logprobs else None,
        )


class _Growing:
    """One accepted prompt and what its completions have so far."""

    def __init__(self, item: PromptItem, request_id: str) -> None:
        self._item = item
        self._request_id = request_id
        self._completions = [_GrowingCompletion() for _ in range(item.params.n)]
        self._metrics: RequestMetrics | None = None
        self._error: PyEngineError | None = None

    @property
    def is_finished(self) -> bool:
        return all(completion.last is not None for completion in self._completions)

    def add(self, event: StreamEvent) -> None:
        self._completions[event.index].add(event)
        self._metrics = event.metrics or self._metrics
        self._error = event.error or self._error

    def output(self) -> RequestOutput:
        assert self._metrics is not None
        has_logprobs = self._item.params.logprobs is not None
        return RequestOutput(
            self._request_id,
            *_text_and_ids(self._item.prompt),
            tuple(c.completion(index, has_logprobs=has_logprobs) for index, c in enumerate(self._completions)),
            self.is_finished,
            self._metrics,
            error=self._error,
        )


class Batch:
    """All prompts of one call, submitted at once; the engine's scheduler decides which of them share a pass.

    Attributes:
        num_finished: prompts that have ended, refused ones included.
        num_tokens: tokens made so far.
    """

    def __init__(self, engine: Engine, items: Sequence[PromptItem]) -> None:
        self.num_finished = 0
        self.num_tokens = 0
        self._engine = engine
        self._entries: list[_Growing | RequestOutput] = []
        self._live: dict[str, _Growing] = {}
        for item in items:
            self._submit(item)

    def outputs(self, is_stopped: IsStopped, on_pass: Callable[[], None]) -> Iterator[RequestOutput]:
        """Outputs in the order of the prompts; fewer when stopped. `on_pass` is called after each pass."""
        events_of_passes = passes(self._engine, is_stopped)
        for index, entry in enumerate(self._entries):
            if isinstance(entry, _Growing):
                while not entry.is_finished:
                    events = next(events_of_passes, None)
                    if events is None:
                        return
                    for event in events:
                        self._take(event)
                    on_pass()
                entry = entry.output()
            self._entries[index] = entry
            if is_stopped():
                return
            yield entry

    def _submit(self, item: PromptItem) -> None:
        try:
            request_id = self._engine.submit(item.prompt, item.params)
        except PyEngineError as error:
            self._entries.append(refused(item, error))
            self.num_finished += 1
            return
        growing = _Growing(item, request_id)
        self._entries.append(growing)
        self._live[request_id] = growing

    def _take(self, event: StreamEvent) -> None:
        growing = self._live[event.request_id]
        growing.add(event)
        self.num_tokens += len(event.token_ids)
        if growing.is_finished:
            del self._live[event.request_id]
            self.num_finished += 1


def outputs_with_prompt_logprobs(
    engine: Engine, items: Sequence[PromptItem], is_stopped: IsStopped
) -> list[RequestOutput]:
    """The outputs of a batch that asks for the prompts' log-probabilities, which events do not carry; [] if stopped."""
    accepted: list[EventStream | RequestOutput] = []
    for item in items:
        try:
            accepted.append(engine.stream(item.prompt, item.params))
        except PyEngineError as error:
            accepted.append(refused(item, error))
    for _ in passes(engine, is_stopped):
        pass
    if is_stopped():
        return []
    return [entry if isinstance(entry, RequestOutput) else entry.output for entry in accepted]


def refused(item: PromptItem, error: PyEngineError) -> RequestOutput:
    """The output of a prompt that the engine did not accept."""
    return RequestOutput(
        "",
        *_text_and_ids(item.prompt),
        (Completion(0, "", (), finish_reason="error"),),
        True,
        RequestMetrics(arrived_at=time.monotonic()),
        error=error,
    )


def _text_and_ids(prompt: str | list[int]) -> tuple[str | None, tuple[int, ...]]:
    return (prompt, ()) if isinstance(prompt, str) else (None, tuple(prompt) if isinstance(prompt, list) else ())
