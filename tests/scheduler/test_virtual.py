"""VirtualEngine: requests end at their true lengths, arrivals come at their times, and time is the device's."""

from __future__ import annotations

import random

import pytest

from pyengine.config import SchedulerConfig
from pyengine.errors import DeadlinePassed, NeverFits
from pyengine.request import Request
from pyengine.scheduler.step_time import StepTimeModel
from pyengine.scheduler.virtual import VirtualEngine

MODEL = StepTimeModel((5e6, 30_000.0, 10_000.0, 35.0, 0.0))
LIMITS = {"num_blocks": 40, "max_context": 400, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def request_of(name: int, length: int, max_tokens: int = 100) -> Request:
    return Request(f"r{name}", [name] * length, max_tokens)


def loaded(seed: int, count: int = 60) -> tuple[VirtualEngine, dict[Request, tuple[int, int]]]:
    rng = random.Random(seed)
    engine = VirtualEngine(SchedulerConfig(**LIMITS, capacity="optimistic"), MODEL)
    sent = {}
    at_ns = 0
    for name in range(count):
        at_ns += rng.choice([0, rng.randrange(60_000_000)])
        request, length = request_of(name, rng.randint(1, 200), rng.randint(1, 150)), rng.randint(1, 150)
        sent[request] = (at_ns, length)
        engine.arrive(at_ns, [request], [length])
    return engine, sent


@pytest.mark.parametrize("seed", range(4))
def test_each_request_makes_its_true_number_of_tokens_and_no_more(seed: int) -> None:
    engine, sent = loaded(seed)
    engine.drain()
    assert set(engine.finished) == set(sent)
    assert sum(request.num_preemptions for request in sent) > 0, "the pool is too large to show anything"
    for request, (at_ns, length) in sent.items():
        assert request.arrival_ns == at_ns
        assert request.num_output_tokens == min(length, request.max_tokens)
        assert request.finish_reason == ("stop" if length <= request.max_tokens else "length")
    assert not engine.scheduler.has_unfinished


def test_a_lone_request_takes_exactly_what_the_device_says() -> None:
    engine = VirtualEngine(SchedulerConfig(**LIMITS), MODEL, start_ns=1000)
    request = request_of(1, 100)
    engine.arrive(5000, [request], [3])
    engine.drain()
    prefill = [5_000_000 + 64 * 30_000, 5_000_000 + 36 * 30_000]
    decodes = [5_000_000 + 10_000 + 35 * context for context in (100, 101)]
    assert request.first_token_ns == 5000 + sum(prefill)
    assert request.finished_ns == engine.now_ns == 5000 + sum(prefill) + sum(decodes)
    assert engine.steps is not None
    assert [b - a for a, b in zip(engine.steps.started_ns, engine.steps.ended_ns, strict=True)] == prefill + decodes
    assert engine.busy_ns == sum(prefill) + sum(decodes)


def test_running_in_pieces_is_the_same_as_running_through() -> None:
    whole, sent = loaded(7)
    whole.drain()
    pieces, sent_too = loaded(7)
    rng = random.Random(1)
    while pieces.now_ns < whole.now_ns:
        before = pieces.now_ns
        pieces.run_until(before + rng.randrange(40_000_000))
        assert all(request.finished_ns <= pieces.now_ns for request in pieces.finished if request.finished_ns)
    pieces.drain()
    for one, other in zip(sent, sent_too, strict=True):
        assert (one.started_ns, one.token_times_ns) == (other.started_ns, other.token_times_ns)


def test_those_that_arrive_at_one_moment_are_all_seen_by_the_step_that_begins_then() -> None:
    engine = VirtualEngine(SchedulerConfig(**LIMITS), MODEL)
    engine.run_until(500)
    for name in range(3):
        engine.arrive(500, [request_of(name, 5)], [2])
        engine.run_until(500)
    assert engine.step_ends_ns is None
    engine.run_until(501)
    assert engine.scheduler.num_running == 3
    assert engine.step_ends_ns is not None
    engine.drain()
    assert {request.started_ns for request in engine.finished} == {500}


def test_a_closed_loop_sends_the_next_when_one_ends() -> None:
    names = iter(range(100, 110))

    def send_next(_: Request) -> None:
        for name in names:
            engine.arrive(engine.now_ns + 10, [request_of(name, 5)], [4])
            return

    engine = VirtualEngine(SchedulerConfig(**LIMITS), MODEL, on_finish=send_next, keep_steps=False)
    engine.arrive(0, [request_of(1, 5)], [4])
    engine.drain()
    assert len(engine.finished) == 11
    assert all(
        later.arrival_ns == earlier.finished_ns + 10
        for earlier, later in zip(engine.finished, engine.finished[1:], strict=False)
    )


def test_what_can_never_fit_is_refused_and_max_tokens_is_clamped() -> None:
    engine = VirtualEngine(SchedulerConfig(**LIMITS), MODEL)
    too_long, clamped = request_of(1, 400), request_of(2, 390, 1000)
    engine.arrive(0, [too_long], [1])
    engine.arrive(0, [clamped], [900])
    engine.drain()
    assert [(request, type(error), at_ns) for request, error, at_ns in engine.refused] == [(too_long, NeverFits, 0)]
    assert engine.finished == [clamped]
    assert (clamped.num_output_tokens, clamped.max_tokens_clamped, clamped.finish_reason) == (10, True, "length")


def test_an_abort_in_any_state_ends_the_request_at_once_and_only_it() -> None:
    engine, sent = loaded(3)
    rng, aborted = random.Random(5), set()
    for time_ns in range(0, 3_000_000_000, 50_000_000):
        engine.run_until(time_ns)
        live = [request for request in sent if request.arrival_seq >= 0 and not request.is_finished]
        if live and rng.random() < 0.5:
            victim = rng.choice(live)
            assert engine.abort(victim)
            assert not engine.abort(victim)
            aborted.add(victim)
    engine.drain()
    assert aborted
    assert len(engine.finished) == len(sent)
    for request, (_, length) in sent.items():
        if request in aborted:
            assert request.finish_reason == "abort"
        else:
            assert request.num_output_tokens == min(length, request.max_tokens)


def test_the_past_and_impossible_lengths_are_refused() -> None:
    engine = VirtualEngine(SchedulerConfig(**LIMITS), MODEL, start_ns=100)
    with pytest.raises(ValueError, match="at 99 ns, but it is 100 ns"):
        engine.arrive(99, [request_of(1, 5)], [4])
    with pytest.raises(ValueError, match="one >= 1"):
        engine.arrive(100, [request_of(1, 5)], [0])


def test_one_that_is_given_up_before_its_start_is_refused_at_its_deadline_and_the_loop_goes_on() -> None:
    told: list[Request] = []
    config = SchedulerConfig(**LIMITS | {"max_num_seqs": 1})
    engine = VirtualEngine(config, MODEL, on_finish=told.append)
    first, late = request_of(1, 10), request_of(2, 10)
    late.ttft_limit_ns = 50_000_000
    engine.arrive(0, [first], [50])
    engine.arrive(1, [late], [5])
    engine.drain()
    assert [(request, type(error)) for request, error, _ in engine.refused] == [(late, DeadlinePassed)]
    assert engine.refused[0][2] >= 50_000_001
    assert told == [late, first]
    assert engine.finished == [first]


def test_waiting_for_company_takes_exactly_the_time_that_it_may() -> None:
    engine = VirtualEngine(SchedulerConfig(**LIMITS, max_batch_wait_ms=30), MODEL)
    engine.arrive(1000, [request_of(1, 10)], [3])
    engine.arrive(20_001_000, [request_of(2, 10)], [3])
    engine.drain()
    assert [request.started_ns for request in engine.finished] == [30_001_000, 30_001_000]


def test_a_hold_and_a_pause_are_seen_when_the_engine_looks_again() -> None:
    engine = VirtualEngine(SchedulerConfig(**LIMITS), MODEL)
    held, paused = request_of(1, 10), request_of(2, 10)
    engine.arrive(5, [held], [3])
    engine.run_until(5)
    engine.scheduler.hold(held, "grammar", 10**10)
    engine.run_until(1000)
    engine.scheduler.wake(held)
    engine.look_again()
    engine.run_until(2000)
    assert held.started_ns == 1000
    engine.scheduler.pause()
    engine.arrive(engine.now_ns, [paused], [3])
    with pytest.raises(RuntimeError, match="1 requests wait, and nothing is going to happen"):
        engine.drain()
    engine.scheduler.resume()
    engine.look_again()
    engine.drain()
    assert engine.finished == [held, paused]


def test_a_run_can_stop_at_the_first_token_of_one_request() -> None:
    engine, sent = loaded(2)
    target = list(sent)[20]
    engine.run_until(10**15, target)
    assert target.token_times_ns == [engine.now_ns]
