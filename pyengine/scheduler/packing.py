"""Packing: which waiting requests are tried in a step, and whether one may pass another that does not fit."""

from __future__ import annotations

from typing import Protocol

from pyengine.request import Request
from pyengine.scheduler.admission import Admission


class Packing(Protocol):
    """Decides whom to try, and when to stop. Whether a request fits is not its business.

    For one of your own, `name` and `admit` are enough; `admission` has what it may ask and do. Trying a request twice,
    or one that does not wait, is a PolicyFault: the call is refused, and the rest of the step goes in strict order.
    """

    name: str

    def admit(self, admission: Admission) -> None:
        """Try requests of `admission.waiting()`."""
        ...


class StrictOrder:
    """Nobody passes: the first that does not fit ends the step's admissions.

    One that waits for others to compute a prefix it shares does not lack room, so it holds up nobody.
    """

    name = "none"

    def admit(self, admission: Admission) -> None:
        for request in admission.waiting():
            if admission.try_start(request).blocks_others:
                admission.block(request)
                return


class BestFit:
    """EASY backfilling: the first that does not fit is promised a start, and later ones may pass if that stays.

    Among those that may, the one that leaves least of what is scarcest goes first.
    """

    name = "best_fit"

    def admit(self, admission: Admission) -> None:
        behind: list[Request] = []
        for request in admission.waiting():
            if admission.head is not None:
                behind.append(request)
            elif admission.try_start(request).blocks_others and not admission.block(request, may_be_passed=True):
                return
        # Room only shrinks within a step: who may not pass now need not be asked again.
        able = [request for request in behind if admission.may_pass(request).starts]
        for request in sorted(able, key=admission.slack):
            admission.try_start(request)


PACKINGS: dict[str, type[Packing]] = {StrictOrder.name: StrictOrder, BestFit.name: BestFit}
