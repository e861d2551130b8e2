"""GuardedOrder: an order of the user's, of which no mistake may hurt anybody."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from pyengine.errors import PolicyFault
from pyengine.request import Request
from pyengine.scheduler.order import Key, Order


class GuardedOrder(Order):
    """Passes everything on to `order` until that raises or answers with something that is of no use.

    From then on it goes by arrival; who waits already keeps the place that it has. `on_fault` is told once. What
    raises for the key of a request that is not yet queued is the caller's to handle: that request is refused.
    """

    def __init__(self, order: Order, on_fault: Callable[[str, Exception], None]) -> None:
        self.name = order.name
        self.has_classes = bool(order.has_classes)
        self._order = order
        self._on_fault = on_fault
        self._is_broken = False

    def key(self, request: Request) -> Key:
        return (request.arrival_seq,) if self._is_broken else self._order.key(request)

    def lane(self, request: Request) -> Hashable:
        lane: Hashable = self._ask("lane", None, request)
        try:
            hash(lane)
        except TypeError as error:
            self._break(error)
            return None
        return lane

    def rank(self, lane: Any) -> Key:
        rank = self._ask("rank", (), lane)
        if isinstance(rank, tuple) and all(isinstance(part, (int, float)) for part in rank):
            return rank
        self._break(
            PolicyFault(f"Its rank of {lane!r} is {rank!r}; that must be a tuple of numbers.", policy=self.name)
        )
        return ()

    def opened(self, lane: Any, others: Iterable[Any]) -> None:
        self._ask("opened", None, lane, tuple(others))

    def closed(self, lane: Any) -> None:
        self._ask("closed", None, lane)

    def granted(self, request: Request, num_tokens: int) -> None:
        self._ask("granted", None, request, num_tokens)

    def decodes(self, request: Request) -> None:
        self._ask("decodes", None, request)

    def stopped(self, request: Request) -> None:
        self._ask("stopped", None, request)

    def stepped(self) -> None:
        self._ask("stepped", None)

    def surplus(self, request: Request) -> float:
        surplus = self._ask("surplus", 0.0, request)
        return float(surplus) if isinstance(surplus, (int, float)) else 0.0

    def _ask(self, hook: str, default: Any, *args: Any) -> Any:
        if self._is_broken:
            return default
        try:
            return getattr(self._order, hook)(*args)
        except Exception as error:
            self._break(error)
            return default

    def _break(self, error: Exception) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._on_fault(self.name, error)
