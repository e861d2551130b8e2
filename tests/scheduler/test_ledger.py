"""The parts of each wait add up to it exactly, whoever shares a reason with whom, compared with the obvious way."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.explanation import Explanation
from pyengine.scheduler.verdict import Reason

from .one_by_one import ACTIONS, OneByOne


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_the_parts_of_each_wait_are_those_of_adding_up_one_by_one(calls: list[tuple[Any, ...]]) -> None:
    world = OneByOne()
    for name, *arguments in calls:
        getattr(world, name)(*arguments)
        world.check()


def test_nobody_examined_costs_nothing_and_still_adds_up_when_the_shared_reason_changes() -> None:
    world = OneByOne()
    for _ in range(5):
        world.arrive()
    for rest in (Reason.BEHIND_HEAD, Reason.MAX_SEQS, Reason.BEHIND_HEAD, Reason.PAUSED):
        world.step([], rest)
        world.pass_time(7)
        world.check()
    number = world.log.records.number
    for _ in range(10):
        world.step([], Reason.PAUSED)
        world.pass_time(1)
    assert world.log.records.number == number, "nothing changed"
    assert world.explain(2).wait_ns == {Reason.PAUSED: 17, Reason.BEHIND_HEAD: 14, Reason.MAX_SEQS: 7}


def test_what_comes_in_the_middle_of_a_step_waits_for_the_step_first() -> None:
    world = OneByOne()
    world.step([], Reason.PAUSED)
    world.pass_time(10)
    world.arrive()
    world.pass_time(32)
    assert world.explain(0).wait_ns == {Reason.MID_STEP: 32}
    world.step([0], Reason.PAUSED)
    world.pass_time(8)
    assert world.explain(0).wait_ns == {Reason.MID_STEP: 32, Reason.MAX_SEQS: 8}


def test_a_verdict_holds_until_the_request_starts() -> None:
    world = OneByOne()
    world.arrive()
    world.step([1], Reason.PAUSED)
    world.pass_time(10)
    world.step([4], Reason.PAUSED)
    world.pass_time(100)
    explained: Explanation = world.explain(0)
    assert explained.wait_ns == {Reason.TOKEN_BUDGET: 10}
    assert explained.queue_ns == world.requests[0].queue_ns == 10


def test_one_that_was_held_and_woken_waits_for_what_a_step_finds_again() -> None:
    world = OneByOne()
    world.arrive()
    world.arrive()
    world.disturb(1)
    world.pass_time(5)
    world.disturb(1)
    world.pass_time(1)
    world.step([4, 0], Reason.PAUSED)
    world.pass_time(20)
    world.check()
    assert world.explain(1).wait_ns == {Reason.MAX_SEQS: 20, Reason.HELD: 5, Reason.MID_STEP: 1}
