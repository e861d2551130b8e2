"""The command as a process: exit codes, Ctrl-C, closed pipes, encodings. It knows nothing of models."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TextIO

from pyengine.cli.terminal import note_error
from pyengine.errors import InvalidRequest, PyEngineError

DONE = 0
FAILED = 1  # the model, the device or the engine failed, or at least one prompt did
USAGE = 2  # the command line or an input file is wrong; nothing was run
INTERRUPTED = 130  # 128 + SIGINT, as shells count it
READER_GONE = 141  # 128 + SIGPIPE


def use_utf8() -> None:
    """Make standard streams speak UTF-8 whatever the locale says; what has no encoding is written as an escape."""
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:  # the descriptor was closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (lives as long as the process)
        else:
            _reconfigure(stream, errors="backslashreplace")
    if sys.stdin is not None:
        _reconfigure(sys.stdin, errors="surrogateescape")


def _reconfigure(stream: Any, *, errors: str) -> None:
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", errors=errors)


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command; an error that pyengine raises on purpose becomes one line and a code, never a traceback."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            sys.stderr.write("\n")  # after the terminal's own ^C
        return INTERRUPTED
    except BrokenPipeError:
        _discard_further_output()
        return READER_GONE
    except InvalidRequest as error:
        note_error(str(error))
        return USAGE
    except PyEngineError as error:
        note_error(str(error))
        return FAILED


def _discard_further_output() -> None:
    """Let what is still buffered, and what the interpreter flushes at its end, go nowhere instead of failing again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


class InterruptRequest:
    """While it is entered, Ctrl-C only sets `requested`, so that a pass is never left half done; a second one raises.

    A handler that raised in the middle of a pass would leave the engine's bookkeeping behind what its device did.
    """

    def __init__(self) -> None:
        self.requested = False
        self._former: Any = None

    def __enter__(self) -> InterruptRequest:
        self.requested = False
        self._former = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
