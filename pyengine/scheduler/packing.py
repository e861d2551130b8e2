"""Packing: which waiting requests are tried in a step, and whether one may pass another that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pyengine.request import Request
from pyengine.scheduler.order import WaitingQueue
from pyengine.scheduler.verdict import Verdict


class Packing(Protocol):
    """Decides whom to try. `try_start` starts a request if every limit allows, and says so."""

    name: str

    def admit(self, waiting: WaitingQueue, try_start: Callable[[Request], Verdict]) -> None:
        """Try requests of `waiting`. One that starts, or is held, leaves the queue."""
        ...


class StrictOrder:
    """Nobody passes: the first that does not fit ends the step's admissions."""

    name = "none"

    def admit(self, waiting: WaitingQueue, try_start: Callable[[Request], Verdict]) -> None:
        while waiting and not try_start(waiting.first()).blocks_those_behind:
            pass


PACKINGS: dict[str, type[Packing]] = {StrictOrder.name: StrictOrder}
