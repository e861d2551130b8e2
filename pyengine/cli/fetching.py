"""Finds the model that was named; one that has to be fetched first is announced, also where no bar can be shown."""

from __future__ import annotations

import sys

from pyengine.checkpoint import resolve_model
from pyengine.checkpoint.source import ResolvedModel
from pyengine.cli.process import take_interrupts
from pyengine.cli.terminal import note


def found_model(model: str | None) -> ResolvedModel:
    """The model's folder and name. From here on Ctrl-C raises, so that no half fetched file stays behind.

    On a terminal the fetch shows its own bar; elsewhere each of its phases is one line on standard error.
    """
    take_interrupts()
    return resolve_model(model, progress=None if sys.stderr.isatty() else _PhaseLines())


class _PhaseLines:
    """A progress callback that writes a line when another phase begins."""

    def __init__(self) -> None:
        self._phase = ""

    def __call__(self, what: str, part: float | None) -> None:
        if what != self._phase:
            self._phase = what
            note(f"pyengine: {what} ...")
