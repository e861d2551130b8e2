"""What the commands write: raw text to standard output, notes and bars to standard error; colours on terminals only."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from pyengine.errors import PyEngineError

if TYPE_CHECKING:
    from rich.progress import Progress

QUICK_S = 0.3  # what takes no longer than this needs no bar
DIM, BOLD, RED, RESET = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"

# What a model says must not drive the terminal: control characters become their pictures (U+2400 and on), tab and
# newline excepted; the second set of them (C1) has no pictures.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: "\u2421", **dict.fromkeys(range(0x80, 0xA0), "\ufffd")}


class OutputFailed(PyEngineError):
    """Standard output cannot be written, for example because the disk is full."""


def has_colours(stream: TextIO) -> bool:
    """Whether styles may be written: on a terminal, unless NO_COLOR is set or the terminal is a dumb one."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def shown_text(text: str) -> str:
    """Text as it may be written on a terminal."""
    return text.translate(_PICTURES)


class TextOutput:
    """Standard output for generated text: never wrapped, no markup; at once, not when a line is full."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self._has_colours = has_colours(sys.stdout)
        self._is_line_open = False

    def write(self, text: str, style: str = "") -> None:
        """Write and flush. On a terminal, control characters are replaced; elsewhere the text is written as it is."""
        if not text:
            return
        self._is_line_open = not text.endswith("\n")
        if self.is_terminal:
            text = shown_text(text)
        if style and self._has_colours:
            text = f"{style}{text}{RESET}"
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            # Closed here, or the interpreter would try, and complain, once more at its end.
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            raise OutputFailed(f"Standard output cannot be written: {error.strerror or error}.") from error

    def end_line(self) -> None:
        """End the line that is open, if one is."""
        if self._is_line_open:
            self.write("\n")

    def end_interrupted_line(self) -> None:
        """End the line on which a terminal has written its own ^C, whether or not text stands before it."""
        is_ended_here = self._is_line_open and self.is_terminal
        self.end_line()
        if not is_ended_here and sys.stderr.isatty():
            sys.stderr.write("\n")


def note(text: str) -> None:
    """A line for people, on standard error, dim on a terminal."""
    styled = has_colours(sys.stderr)
    sys.stderr.write(f"{DIM}{shown_text(text)}{RESET}\n" if styled else f"{shown_text(text)}\n")
    sys.stderr.flush()


def note_error(message: str) -> None:
    """The one line that an error is reported with."""
    label = f"{BOLD}{RED}error:{RESET}" if has_colours(sys.stderr) else "error:"
    line = shown_text(" ".join(message.split("\n")))
    sys.stderr.write(f"pyengine: {label} {line}\n")
    sys.stderr.flush()


@contextmanager
def loading_bar(what: str) -> Iterator[Callable[[float], None] | None]:
    """A callback for the part that is loaded; on a terminal it shows a bar unless all is quick; None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn

    bar = _bar(TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    task = bar.add_task(shown_text(what), total=1.0)
    started = time.monotonic()

    def show(part: float) -> None:
        bar.update(task, completed=part)
        if time.monotonic() - started > QUICK_S:
            bar.start()

    try:
        yield show
    finally:
        bar.stop()


class BatchBar:
    """How far a batch is, on standard error, where it appears with each update until it is hidden."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

        self._bar = _bar(
            TextColumn("Generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]:,} tokens"),
            TimeElapsedColumn(),
        )
        self._task = self._bar.add_task("", total=total, tokens=0)

    def update(self, num_finished: int, num_tokens: int) -> None:
        """Show new counts."""
        self._bar.update(self._task, completed=num_finished, tokens=num_tokens)
        self._bar.start()

    def hide(self) -> None:
        """Take the bar off the screen, so that something else can be written, and show the cursor again."""
        self._bar.stop()


class RunsBar:
    """How far several runs are together, on standard error, and which one is at work; shown until it is hidden."""

    def __init__(self, what: str, total: int) -> None:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self._bar = _bar(
            TextColumn(what),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[run]}", markup=False),
        )
        self._task = self._bar.add_task("", total=total, run="")

    def update(self, num_done: int, run: str) -> None:
        """Show new counts."""
        self._bar.update(self._task, completed=num_done, run=run)
        self._bar.start()

    def hide(self) -> None:
        """Take the bar off the screen and show the cursor again."""
        self._bar.stop()


def _bar(*columns: object) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)  # type: ignore[arg-type]
