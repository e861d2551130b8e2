"""The times of tokens are kept once a step, not once a token, and only as long as somebody needs them."""

from __future__ import annotations

from pyengine.config import SchedulerConfig
from pyengine.request import Request, StepTimes
from pyengine.scheduler import Scheduler
from pyengine.scheduler.scheduler import MAX_STEP_TIMES


def test_step_times_are_found_by_step_and_forgotten_in_front() -> None:
    times = StepTimes()
    for step in range(5, 12):
        times.append(step, 100 * step)
    assert times.of(6, 3) == [600, 700, 800]
    times.forget(8)
    assert len(times) == 4
    assert times.of(9, 2) == [900, 1000]
    times.forget(3)
    assert times.of(8, 1) == [800]


def test_one_that_decodes_for_ever_keeps_its_times_and_short_ones_do_not_pile_up() -> None:
    now = [0]
    config = SchedulerConfig(num_blocks=3000, max_context=30_000, max_num_seqs=4)
    scheduler = Scheduler(config, clock=lambda: now[0])
    long = Request("long", [1], 3 * MAX_STEP_TIMES)
    scheduler.add([long])
    short: list[Request] = []
    while not long.is_finished:
        if scheduler.num_running + scheduler.num_waiting < 2:
            short.append(Request(str(len(short)), [2], 100))
            scheduler.add([short[-1]])
        now[0] += 10
        plan = scheduler.schedule()
        now[0] += 1
        scheduler.commit(plan, [0] * len(plan.requests))
    assert long.token_times_ns == [11 * (step + 1) for step in range(3 * MAX_STEP_TIMES)]
    for request in short[:-1]:
        first = request.token_times_ns[0]
        assert request.token_times_ns == [first + 11 * i for i in range(100)]
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        scheduler.commit(plan, [0] * len(plan.requests))
    assert len(scheduler._step_times) <= 2 * 3 * MAX_STEP_TIMES
    for _ in range(2 * 3 * MAX_STEP_TIMES):
        if not scheduler.has_unfinished:
            scheduler.add([Request("next", [2], 100)])
        plan = scheduler.schedule()
        scheduler.commit(plan, [0] * len(plan.requests))
    assert len(scheduler._step_times) <= MAX_STEP_TIMES + 1
