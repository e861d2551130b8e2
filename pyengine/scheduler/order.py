"""Order: who is first among those that wait. It does not know whether anyone fits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from pyengine.request import Request


class Order(Protocol):
    """A sort key; the smallest is first. It stays the same while a request waits, and no two requests have the same."""

    name: str

    def key(self, request: Request) -> tuple[int, ...]:
        """Where `request` stands."""
        ...


class Fifo:
    """By arrival. A preempted request comes back to the place that its arrival gives it."""

    name = "fifo"

    def key(self, request: Request) -> tuple[int, ...]:
        return (request.arrival_seq,)


ORDERS: dict[str, type[Order]] = {Fifo.name: Fifo}


class WaitingQueue:
    """The requests in state WAITING or PREEMPTED, always sorted by an order."""

    __slots__ = ("_order", "_requests")

    def __init__(self, order: Order) -> None:
        self._order = order
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, place: int) -> Request:
        """The request at this place in the order; 0 is the first."""
        return self._requests[place]

    def add(self, request: Request) -> None:
        """Put `request` at its place; at the back in O(1)."""
        key = self._order.key
        if not self._requests or key(self._requests[-1]) < key(request):
            self._requests.append(request)
        else:
            insort(self._requests, request, key=key)

    def remove(self, request: Request) -> None:
        """Take `request` out, found by its key. Raises RuntimeError if it is not there."""
        place = bisect_left(self._requests, self._order.key(request), key=self._order.key)
        if place == len(self._requests) or self._requests[place] is not request:
            raise RuntimeError(f"{request!r} is not in the waiting queue.")
        del self._requests[place]
