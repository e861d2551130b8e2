"""What becomes of a blocked head with those who passed it, and without: two copies of a scheduler, run to the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyengine.request import Request
from pyengine.scheduler import Scheduler

from .policy_world import PolicyWorld, fork

MAX_STEPS = 5_000


@dataclass
class Futures:
    """Compares, at each moment at which a head is passed, the step at which it starts with and without the passers.

    In both everyone runs to max_tokens and nobody else arrives or passes: all others who wait are gone. (With order
    "fair" one who passes may bring another tenant's turn; that is not the passing, but the order.)
    """

    world: PolicyWorld
    num_moments: int = 0
    late: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world.on_passing = self.compare

    def compare(self, scheduler: Scheduler, passers: list[Request], head: Request) -> None:
        assert self.world.copy is not None
        self.num_moments += 1
        before, _ = self.world.copy
        waiting = {request.arrival_seq for request in scheduler._waiting if request is not head}
        passed = {request.arrival_seq for request in passers}
        with_them = start_of(fork(scheduler)[0], head.arrival_seq, waiting)
        without = start_of(before, head.arrival_seq, waiting | passed)
        if with_them > without:
            self.late.append(f"seed: head {head!r} at {with_them}, without {passers!r} at {without}")


def start_of(scheduler: Scheduler, key: int, gone: set[int]) -> int:
    """The step at which the request of this number starts when those of these numbers are gone."""
    everyone = {request.arrival_seq: request for request in scheduler.unfinished()}
    head = everyone[key]
    if scheduler._in_flight is not None:
        plan = scheduler._in_flight.plan
        scheduler.commit(plan, [0] * len(plan.requests))
    for number in gone:
        scheduler.abort(everyone[number])
    for _ in range(MAX_STEPS):
        plan = scheduler.schedule()
        if head in plan.joined:
            return plan.step
        assert not plan.is_empty, "the head waits, and nothing runs"
        scheduler.commit(plan, [0] * len(plan.requests))
    raise AssertionError("the head never starts")
