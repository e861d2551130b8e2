"""Prompts on their way through an engine, pass by pass; outputs come in the order of the prompts, as soon as done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pyengine.cli.prompts import PromptItem
from pyengine.engine import Engine
from pyengine.errors import PyEngineError
from pyengine.outputs import RequestOutput, StreamEvent, refused_output

IsStopped = Callable[[], bool]


def passes(engine: Engine, is_stopped: IsStopped) -> Iterator[list[StreamEvent]]:
    """The events of one pass after another until nothing is left; between two passes one may stop."""
    while engine.has_unfinished and not is_stopped():
        yield engine.step()


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
        self._outputs: list[RequestOutput | None] = [None] * len(items)
        self._index_of: dict[str, int] = {}
        for index, item in enumerate(items):
            try:
                self._index_of[engine.submit(item.prompt, item.params)] = index
            except PyEngineError as error:
                self._finish(index, refused_output(item.prompt, error))

    def outputs(self, is_stopped: IsStopped, on_pass: Callable[[], None]) -> Iterator[RequestOutput]:
        """Outputs in the order of the prompts; fewer when stopped. `on_pass` is called after each pass."""
        events_of_passes = passes(self._engine, is_stopped)
        for index in range(len(self._outputs)):
            while (output := self._outputs[index]) is None:
                events = next(events_of_passes, None)
                if events is None:
                    return
                for event in events:
                    self.num_tokens += len(event.token_ids)
                    if event.output is not None:
                        self._finish(self._index_of[event.request_id], event.output)
                on_pass()
            if is_stopped():
                return
            yield output

    def _finish(self, index: int, output: RequestOutput) -> None:
        self._outputs[index] = output
        self.num_finished += 1
