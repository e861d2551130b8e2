"""Victim: who loses its KV when the running requests have outgrown the pool. It does not carry it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from pyengine.request import Request

MAX_PREEMPTIONS_UNPROTECTED = 2
Surplus = Callable[[Request], float]


class Victim(Protocol):
    """Chooses among running requests. `surplus` tells how much more than others the tenant of a request had."""

    name: str

    def choose(self, running: Iterable[Request], surplus: Surplus) -> Request:
        """One of `running`, which is not empty."""
        ...


class Cheapest:
    """Of the worst class, of the tenant that had most beyond the others, the one that is cheapest to compute again.

    One that was preempted twice is taken only when no other is left, and then the latest arrival: it is protected, yet
    there is always a victim, and the earliest of all always comes to its end.
    """

    name = "cheapest"

    def choose(self, running: Iterable[Request], surplus: Surplus) -> Request:
        everyone = list(running)
        unprotected = [request for request in everyone if request.num_preemptions < MAX_PREEMPTIONS_UNPROTECTED]
        if not unprotected:
            return max(everyone, key=_arrival)
        return max(
            unprotected,
            key=lambda request: (
                request.priority_class,
                surplus(request),
                -request.num_computed_tokens,
                request.arrival_seq,
            ),
        )


class Latest:
    """The latest arrival, whatever it costs to compute it again."""

    name = "latest"

    def choose(self, running: Iterable[Request], surplus: Surplus) -> Request:
        return max(running, key=_arrival)


def _arrival(request: Request) -> int:
    return request.arrival_seq


VICTIMS: dict[str, type[Victim]] = {Cheapest.name: Cheapest, Latest.name: Latest}
