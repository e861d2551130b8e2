"""Order: who is first among those that wait. It does not know whether anyone fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from pyengine.request import Request

Key = tuple[Any, ...]
NO_DEADLINE_NS = 60_000_000_000  # where order is by deadline, a request without a limit is taken to have this one
AGE_CREDIT_TOKENS_PER_S = 256  # `shortest`: the work that a second of waiting outweighs
OUTPUT_WEIGHT = 2  # `fair`: an output token counts as so many prompt tokens
MAX_IDLE_TENANTS = 1024  # `fair`: beyond so many, those that have nothing here and no more than others are forgotten


class Order(ABC):
    """A sort key; the smallest is first. Subclass it for an order of your own: `name` and `key` are enough.

    An order whose ranks change while requests wait, as `fair`, has lanes: requests within one keep their order, and
    the lane with the smallest rank is served next. What it is told of those that run it may keep accounts of.
    """

    name = "order"
    has_classes = True  # whether `priority_class` is part of the key, so that a waiting request is promoted in time

    @abstractmethod
    def key(self, request: Request) -> Key:
        """Where `request` stands in its lane. It stays the same while it waits in its class; no two have the same.

        Ending with `arrival_seq` is a simple way to keep the second rule.
        """

    def lane(self, request: Request) -> Hashable:
        """Which lane `request` waits in."""
        return None

    def rank(self, lane: Any) -> Key:
        """Where a lane stands now."""
        return ()

    def opened(self, lane: Any, others: Iterable[Any]) -> None:
        """Somebody waits in `lane`, where nobody did; `others` are the lanes in which somebody does."""

    def closed(self, lane: Any) -> None:
        """Nobody waits in `lane` any more."""

    def granted(self, request: Request, num_tokens: int) -> None:
        """`request` starts, and so many of its tokens will be computed that never were; negative: they will not be."""

    def decodes(self, request: Request) -> None:
        """`request` gains one token in each step from now on."""

    def stopped(self, request: Request) -> None:
        """`request`, which did, gains no more tokens."""

    def stepped(self) -> None:
        """Each decode has got its token."""

    def surplus(self, request: Request) -> float:
        """How much more than others the tenant of `request` had; where it is largest, a victim is sought first."""
        return 0.0


class Fifo(Order):
    """By arrival. A preempted request comes back to the place that its arrival gives it."""

    name = "fifo"
    has_classes = False

    def key(self, request: Request) -> Key:
        return (request.arrival_seq,)


class ByPriority(Order):
    """By class, then arrival."""

    name = "priority"

    def key(self, request: Request) -> Key:
        return (request.priority_class, request.arrival_seq)


class ByDeadline(Order):
    """By class, then by the time at which the first token is due, then arrival."""

    name = "deadline"

    def key(self, request: Request) -> Key:
        return (request.priority_class, _deadline_ns(request), request.arrival_seq)


class Shortest(Order):
    """By class, then prompt and output tokens less a credit for age, then arrival.

    All waiting requests earn the credit at the same rate, so `work + rate * arrival` sorts alike and does not change.
    """

    name = "shortest"

    def key(self, request: Request) -> Key:
        work = request.num_prompt_tokens + request.max_tokens
        return (
            request.priority_class,
            work * 1_000_000_000 + request.arrival_ns * AGE_CREDIT_TOKENS_PER_S,
            request.arrival_seq,
        )


class Fair(Order):
    """By class, then by the service that the tenant had (a virtual token counter), then deadline and arrival.

    Service is counted when it is granted: the prompt tokens to be computed at the start, each output token as it is
    made, with OUTPUT_WEIGHT. A tenant that comes back with nothing queued is lifted to the least service among those
    that have something queued: nobody lives on what he did not use. Tokens that were charged and are never computed
    are given back, and tokens computed again after a preemption are not charged.
    """

    name = "fair"

    def __init__(self) -> None:
        self.service: dict[str, int] = {}
        self._num_decoding: dict[str, int] = {}
        self._floor = 0

    def key(self, request: Request) -> Key:
        return (_deadline_ns(request), request.arrival_seq)

    def lane(self, request: Request) -> Hashable:
        return (request.priority_class, request.tenant)

    def rank(self, lane: tuple[int, str]) -> Key:
        priority_class, tenant = lane
        return (priority_class, self.service.get(tenant, self._floor))

    def opened(self, lane: tuple[int, str], others: Iterable[tuple[int, str]]) -> None:
        tenants = {tenant for _, tenant in others}
        if lane[1] in tenants:
            return
        self._floor = min((self.service[tenant] for tenant in tenants), default=self._floor)
        self.service[lane[1]] = max(self.service.get(lane[1], 0), self._floor)
        if len(self.service) > MAX_IDLE_TENANTS + len(tenants) + len(self._num_decoding):
            busy = {lane[1], *tenants, *self._num_decoding}
            self.service = {t: had for t, had in self.service.items() if t in busy or had > self._floor}

    def closed(self, lane: tuple[int, str]) -> None:
        self._floor = self.service[lane[1]]

    def granted(self, request: Request, num_tokens: int) -> None:
        self.service[request.tenant] = self.service.get(request.tenant, self._floor) + num_tokens

    def decodes(self, request: Request) -> None:
        self._num_decoding[request.tenant] = self._num_decoding.get(request.tenant, 0) + 1

    def stopped(self, request: Request) -> None:
        left = self._num_decoding.pop(request.tenant) - 1
        if left:
            self._num_decoding[request.tenant] = left

    def stepped(self) -> None:
        for tenant, number in self._num_decoding.items():
            self.service[tenant] = self.service.get(tenant, self._floor) + OUTPUT_WEIGHT * number

    def surplus(self, request: Request) -> float:
        return self.service.get(request.tenant, self._floor)


def _deadline_ns(request: Request) -> int:
    limit = request.ttft_limit_ns
    return request.arrival_ns + (NO_DEADLINE_NS if limit is None else limit)


ORDERS: dict[str, type[Order]] = {order.name: order for order in (Fifo, ByPriority, Fair, ByDeadline, Shortest)}


class WaitingQueue:
    """The requests in state WAITING or PREEMPTED, by lane, each lane always sorted by the order.

    Attributes:
        version: changes whenever somebody comes, goes or is promoted.
    """

    __slots__ = ("_due", "_due_times", "_keys", "_lane_of", "_lanes", "_order", "_promotion_ns", "_size", "version")

    def __init__(self, order: Order, promotion_ns: int) -> None:
        self._order = order
        self._promotion_ns = promotion_ns
        self._lanes: dict[Hashable, list[Request]] = {}
        self._size = 0
        self._lane_of: dict[Request, Hashable] = {}
        self._keys: dict[Request, tuple[int, Key]] = {}  # of all live ones, with the class that they are for
        self._due: dict[Request, int] = {}  # when each is promoted to the next better class
        self._due_times: list[tuple[int, int, Request]] = []
        self.version = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Everyone, lane by lane."""
        for lane in self._lanes.values():
            yield from lane

    @property
    def is_fixed(self) -> bool:
        """Whether the order changes only as `version` does: there is one lane at most."""
        return len(self._lanes) <= 1

    def scan(self) -> Iterator[Request]:
        """Everyone in order. The one that was given last may leave the queue before the next is asked for."""
        if len(self._lanes) == 1:
            (lane,) = self._lanes.values()
            place = 0
            while place < len(lane):
                request = lane[place]
                yield request
                if place < len(lane) and lane[place] is request:
                    place += 1
            return
        key, rank, lanes = self._key, self._order.rank, self._lanes
        heads = [(rank(name), key(lane[0]), i, 0, name) for i, (name, lane) in enumerate(lanes.items())]
        heapify(heads)
        num_moved = 0
        while heads:
            known_rank, _, i, place, name = heappop(heads)
            lane = lanes[name]
            request = lane[place]
            # A lane of the same tenant may have been served meanwhile; a rank that never rests is not waited for.
            if num_moved < len(lanes) and rank(name) != known_rank:
                heappush(heads, (rank(name), key(request), i, place, name))
                num_moved += 1
                continue
            num_moved = 0
            yield request
            if place < len(lane) and lane[place] is request:
                place += 1
            if place < len(lane):
                heappush(heads, (rank(name), key(lane[place]), i, place, name))

    def add(self, request: Request, now_ns: int) -> None:
        """Put `request` at its place; at the back in O(1)."""
        self._insert(request)
        if self._order.has_classes and request.priority_class > 0:
            self._plan_promotion(request, now_ns)

    def remove(self, request: Request) -> None:
        """Take `request` out, found by its key. Raises RuntimeError if it is not there."""
        self._close_if_empty(self._take(request))
        self._due.pop(request, None)

    def standing(self, request: Request) -> tuple[Key, Key]:
        """What is smaller is scanned first: the rank of its lane, and its key."""
        return self._order.rank(self._order.lane(request)), self._key(request)

    def forget(self, request: Request) -> None:
        """`request` has ended, and comes back no more."""
        self._keys.pop(request, None)

    def check_place(self, request: Request) -> None:
        """Raise what an order of the user's raises where it has no key for `request` that compares with others'."""
        lane = self._lanes.get(self._order.lane(request), [])
        key = self._key(request)
        key < key  # noqa: B015
        bisect_left(lane, key, key=self._key)
        if lane:
            self._key(lane[-1]) < key  # noqa: B015

    def promote(self, now_ns: int) -> None:
        """Move those that have waited long enough in their class to the next better one."""
        while self._due_times and self._due_times[0][0] <= now_ns:
            due_ns, _, request = heappop(self._due_times)
            if self._due.get(request) != due_ns:
                continue
            old_lane = self._take(request)
            del self._due[request]
            request.priority_class -= 1
            self.add(request, now_ns)  # before its old lane is closed: its tenant was never away
            self._close_if_empty(old_lane)

    def _plan_promotion(self, request: Request, now_ns: int) -> None:
        self._due[request] = now_ns + self._promotion_ns
        heappush(self._due_times, (self._due[request], request.arrival_seq, request))

    def _insert(self, request: Request) -> None:
        name = self._lane_of[request] = self._order.lane(request)
        lane = self._lanes.get(name)
        key = self._key
        if lane is None:
            self._order.opened(name, self._lanes)
            self._lanes[name] = [request]
        elif not lane or key(lane[-1]) < key(request):
            lane.append(request)
        else:
            insort(lane, request, key=key)
        self._size += 1
        self.version += 1

    def _take(self, request: Request) -> Hashable:
        name = self._lane_of.pop(request, None)
        lane = self._lanes.get(name, [])
        place = bisect_left(lane, self._key(request), key=self._key)
        if place == len(lane) or lane[place] is not request:
            if request not in lane:
                raise RuntimeError(f"{request!r} is not in the waiting queue.")
            place = lane.index(request)  # an order of the user's gave two the same key
        del lane[place]
        self._size -= 1
        self.version += 1
        return name

    def _key(self, request: Request) -> Key:
        """The key of `request`, asked for once in each class."""
        known = self._keys.get(request)
        if known is None:
            known = self._keys[request] = (request.priority_class, self._order.key(request))
        elif known[0] != request.priority_class:
            known = self._keys[request] = (request.priority_class, self._key_after(request, known[1]))
        return known[1]

    def _key_after(self, request: Request, before: Key) -> Key:
        """The key in its new class; the one it had, if an order of the user's has none that compares with it."""
        try:
            key = self._order.key(request)
            before < key  # noqa: B015
            return key
        except TypeError:
            return before

    def _close_if_empty(self, name: Hashable) -> None:
        if not self._lanes[name]:
            del self._lanes[name]
            self._order.closed(name)
