"""The command as a process: exit codes, Ctrl-C, closed pipes, encodings. It knows nothing of models."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO

from pyengine.cli.terminal import OutputFailed, note_error
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
            # It is taken even where nothing is written to it: else the next file to be opened would get its number.
            nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (lives as long as the process)
            setattr(sys, name, ClosedOutput(nowhere) if name == "stdout" else nowhere)
        else:
            _reconfigure(stream, errors="backslashreplace")
    if sys.stdin is not None:
        _reconfigure(sys.stdin, errors="surrogateescape")


def _reconfigure(stream: Any, *, errors: str) -> None:
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", errors=errors)


class ClosedOutput(io.StringIO):
    """Standard output where there is none: what is written fails instead of getting lost."""

    def __init__(self, nowhere: TextIO) -> None:
        super().__init__()
        self._nowhere = nowhere  # keeps the descriptor taken

    def write(self, text: str) -> int:
        """Raise OutputFailed."""
        raise OutputFailed("Standard output cannot be written: it is closed.")


def exit_of(application: Callable[[], object]) -> NoReturn:
    """Run the typer application and exit with its code, also where its own output (help, a usage error) fails.

    From here on a further Ctrl-C changes nothing any more; Python's end would otherwise be cut short by it.
    """
    code: str | int | None = DONE
    try:
        application()
    except SystemExit as end:
        code = READER_GONE if _is_closed_pipe(end.__context__) else end.code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except PyEngineError as error:
        code = FAILED
        note_error(str(error))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        code = FAILED
        note_error(f"Standard output cannot be written: {error.strerror}.")
        _discard_further_output()
    ignore_interrupts()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = READER_GONE
    except OSError as error:
        code = FAILED
        note_error(f"Standard output cannot be written: {error.strerror or error}.")
        _discard_further_output()
    if code == READER_GONE:
        _discard_further_output()
    sys.exit(code)


def _is_closed_pipe(error: BaseException | None) -> bool:
    """Whether typer, which exits with 1 then, met a pipe without a reader."""
    return isinstance(error, OSError) and error.errno == errno.EPIPE


def take_interrupts() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, so that a command can clean up; until now it ended the process."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_interrupts() -> None:
    """From here on Ctrl-C does nothing: the process is ending."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command; an error that pyengine raises on purpose becomes one line and a code, never a traceback."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        ignore_interrupts()
        if sys.stderr.isatty():
            sys.stderr.write("\n")  # after the terminal's own ^C
        return INTERRUPTED
    except BrokenPipeError:
        _discard_further_output()
        return READER_GONE
    except InvalidRequest as error:
        note_error(plain_message(error))
        return USAGE
    except PyEngineError as error:
        note_error(str(error))
        return FAILED


def plain_message(error: InvalidRequest) -> str:
    """The error's message with its value as JSON spells it and without Python's None, which nobody here can write."""
    message, limit = str(error), error.limit
    if not isinstance(limit, str) or message != f"{error.field} is {error.value!r}; it must be {limit}.":
        return message
    wanted = limit.removesuffix(" or None").replace("True or False", "true or false")
    return f"{error.field} is {as_json(error.value)}; it must be {wanted}."


def as_json(value: Any) -> str:
    """A value as a user of the command line writes it."""
    return json.dumps(value, ensure_ascii=False, default=repr)


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
