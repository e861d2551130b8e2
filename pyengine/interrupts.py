"""UninterruptedLock: a lock inside which Ctrl-C waits. It keeps bookkeeping whole; it does not make anything faster."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class UninterruptedLock:
    """A reentrant lock. On the main thread, a SIGINT that arrives inside is handled when the lock is left.

    Python may raise KeyboardInterrupt between any two instructions; in the middle of a change of several structures
    that would leave them in disagreement. The handler that was there, whichever it is, is called afterwards. A handler
    set by other than Python (or none) is left alone.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0  # on the main thread
        self._handler: Any = None
        self._arrived: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            if self._depth == 0:
                self._handler = signal.getsignal(signal.SIGINT)
                if callable(self._handler):
                    signal.signal(signal.SIGINT, self._note)
            self._depth += 1
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0 and callable(self._handler):
                signal.signal(signal.SIGINT, self._handler)
                arrived, self._arrived = self._arrived, None
                if arrived is not None:
                    self._handler(*arrived)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived = (number, frame)
