"""Progress is shown on a terminal, given to a callback, and silent elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from pyengine.checkpoint.progress import progress_shown


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_callback_gets_everything() -> None:
    said: list[tuple[str, float | None]] = []
    with progress_shown(lambda what, part: said.append((what, part))) as show:
        show("Converting", 0.5)
        show("Building", None)
    assert said == [("Converting", 0.5), ("Building", None)]


@pytest.mark.parametrize(("stream", "is_shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_a_bar_appears_on_a_terminal_only(stream: io.StringIO, is_shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_shown(None) as show:
        show("Converting", 0.5)
        show("Converting", 1.0)
    assert ("Converting" in stream.getvalue()) == is_shown
