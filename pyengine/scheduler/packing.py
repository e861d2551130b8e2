"""Packing: which waiting requests are tried in a step, and whether one may pass another that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pyengine.request import Request
from pyengine.scheduler.order import WaitingQueue
from pyengine.scheduler.verdict import Reason, Verdict


class Packing(Protocol):
    """Decides whom to try. `try_start` starts a request if every limit allows, and says so."""

    name: str

    def admit(self, waiting: WaitingQueue, try_start: Callable[[Request], Verdict]) -> None:
        """Try requests of `waiting`. One that starts has left the queue when `try_start` returns."""
        ...


class StrictOrder:
    """Nobody passes: the first that does not fit ends the step's admissions.

    One that waits for its own siblings does not lack room, so it holds up nobody else.
    """

    name = "none"

    def admit(self, waiting: WaitingQueue, try_start: Callable[[Request], Verdict]) -> None:
        place = 0
        while place < len(waiting):
            verdict = try_start(waiting[place])
            if verdict.reason is Reason.SHARED_PREFIX_PENDING:
                place += 1
            elif not verdict.starts:
                return


PACKINGS: dict[str, type[Packing]] = {StrictOrder.name: StrictOrder}
