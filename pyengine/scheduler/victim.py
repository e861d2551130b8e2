"""Victim: who loses its KV when the running requests have outgrown the pool. It does not carry it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from pyengine.request import Request

MAX_PREEMPTIONS_UNPROTECTED = 2


class Victim(Protocol):
    """Chooses among running requests."""

    def choose(self, running: Iterable[Request]) -> Request:
        """One of `running`, which is not empty."""
        ...


class CheapestOfLowest:
    """Of the worst class, of the tenant that had most beyond the others, the one that is cheapest to compute again.

    One that was preempted twice is taken only when no other is left, and then the latest arrival: it is protected, yet
    there is always a victim, and the earliest of all always comes to its end.
    """

    def __init__(self, surplus: Callable[[Request], float]) -> None:
        self._surplus = surplus

    def choose(self, running: Iterable[Request]) -> Request:
        everyone = list(running)
        unprotected = [request for request in everyone if request.num_preemptions < MAX_PREEMPTIONS_UNPROTECTED]
        if not unprotected:
            return max(everyone, key=lambda request: request.arrival_seq)
        return max(unprotected, key=self._readiness)

    def _readiness(self, request: Request) -> tuple[int, float, int, int]:
        return (request.priority_class, self._surplus(request), -request.num_computed_tokens, request.arrival_seq)
