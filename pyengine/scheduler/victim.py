"""Victim: who loses its KV when the running requests have outgrown the pool. It does not carry it out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pyengine.request import Request

MAX_PREEMPTIONS_UNPROTECTED = 2


class Victim(Protocol):
    """Chooses among running requests."""

    def choose(self, running: Iterable[Request]) -> Request:
        """One of `running`, which is not empty."""
        ...


class LatestArrival:
    """The latest arrival; of one submit, the cheapest to compute again.

    One that was preempted twice is taken only when no other is left: it is protected, yet there is always a victim.
    """

    def choose(self, running: Iterable[Request]) -> Request:
        return max(running, key=_readiness)


def _readiness(request: Request) -> tuple[bool, int, int, int]:
    first_of_submit = request.group.requests[0] if request.group else request
    return (
        request.num_preemptions < MAX_PREEMPTIONS_UNPROTECTED,
        first_of_submit.arrival_seq,
        -request.num_computed_tokens,
        request.arrival_seq,
    )
