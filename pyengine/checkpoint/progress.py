"""Shows how far a long preparation is: a bar on a terminal, silence elsewhere, or a callback of the caller's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# (what is being done, the part that is done from 0 to 1, or None where that is not known)
ProgressCallback = Callable[[str, "float | None"], None]


@contextmanager
def progress_shown(callback: ProgressCallback | None) -> Iterator[ProgressCallback]:
    """The callback itself, or a bar on standard error if that is a terminal, or one that shows nothing."""
    if callback is not None:
        yield callback
    elif sys.stderr.isatty():
        with _terminal_bar() as bar:
            yield bar
    else:
        yield lambda what, part: None


@contextmanager
def _terminal_bar() -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(what: str, part: float | None) -> None:
            bar.update(task, description=what, total=None if part is None else 1.0, completed=part or 0.0)

        yield show
