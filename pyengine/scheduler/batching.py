"""Batching: when waiting requests may join those that run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pyengine.errors import PolicyFault
from pyengine.scheduler.verdict import Reason


class Batching(Protocol):
    """A gate before all admissions of a step. One of your own has `name` and `closed_by`, and perhaps `admitted`."""

    name: str

    def closed_by(self, num_running: int) -> Reason | None:
        """Why nobody may start in this step; None: they may. Never closed when nothing runs."""
        ...

    def admitted(self, stopped_by: Reason | None) -> None:
        """The admissions of this step are over; `stopped_by` is what ended them, None if everyone was tried.

        SHARED_PREFIX_PENDING if nobody lacked room, and some wait for what those that run are computing for them.
        """


class GuardedBatching(Batching):
    """Asks `batching`, one of the user's; where that breaks its rules, `on_fault` is told, and all may start."""

    def __init__(self, batching: Batching, on_fault: Callable[[str, Exception], None]) -> None:
        self.name = batching.name
        self._batching = batching
        self._on_fault = on_fault

    def closed_by(self, num_running: int) -> Reason | None:
        try:
            reason = self._batching.closed_by(num_running)
            if reason is not None and not isinstance(reason, Reason):
                raise PolicyFault(f"It is closed by {reason!r}, which is no Reason.", policy=self.name)
            if reason is not None and num_running == 0:
                raise PolicyFault("It lets nobody start, though nothing runs.", policy=self.name)
            return reason
        except Exception as error:
            self._on_fault(self.name, error)
            return None

    def admitted(self, stopped_by: Reason | None) -> None:
        try:
            if hasattr(self._batching, "admitted"):
                self._batching.admitted(stopped_by)
        except Exception as error:
            self._on_fault(self.name, error)


class Continuous(Batching):
    """Requests join at any step."""

    name = "continuous"

    def closed_by(self, num_running: int) -> Reason | None:
        return None


class Static(Batching):
    """A batch is formed when nothing runs, and nobody joins until its last member has ended.

    Forming takes as many steps as the token budget makes it, and waits for a prefix that members share.
    """

    name = "static"

    def __init__(self) -> None:
        self._is_forming = True

    def closed_by(self, num_running: int) -> Reason | None:
        self._is_forming |= num_running == 0
        return None if self._is_forming else Reason.STATIC_BATCH

    def admitted(self, stopped_by: Reason | None) -> None:
        self._is_forming = stopped_by in (Reason.TOKEN_BUDGET, Reason.LATENCY_LIMIT, Reason.SHARED_PREFIX_PENDING)


BATCHINGS: dict[str, Callable[[], Batching]] = {Continuous.name: Continuous, Static.name: Static}
