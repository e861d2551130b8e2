"""Steps that overlap: the next one is planned, and given to the device, before the tokens of the last one are known."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pyengine.config import SchedulerConfig
from pyengine.request import PENDING, Request, RequestState
from pyengine.scheduler import StepPlan
from pyengine.scheduler.recording import Recorder
from pyengine.scheduler.replay import plan_record, replay
from tests.properties.scheduler_world import MAX_OUTPUTS, InFlight, World, expected_output


class PipelinedWorld(World):
    """The device runs a pass when it is given one, in this order; its tokens reach the scheduler one turn later."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.results: dict[int, list[int | None]] = {}  # by step
        self.plans: list[Any] = []

    def turn(self, ends: dict[Request, str] | None = None) -> StepPlan:
        """Plan a step behind the one in flight, give it to the device, and commit the one that was in flight."""
        last = self.in_flight
        if last is not None:
            self.scheduler.expect(last.plan)
            self.check_structures()
        plan = self.scheduler.schedule()
        self.plans.append(plan_record(plan, {request: request.arrival_seq for request in self.requests}))
        self.steps += 1
        self.in_flight = None
        if not plan.is_empty:
            self.in_flight = self.launch(plan, last)
        self.check_budget(plan)
        self.check_seats(plan)
        self.check_guarantee(plan)
        if last is not None:
            self.commit(last, ends or {})
        return plan

    def launch(self, plan: StepPlan, last: InFlight | None) -> InFlight:
        rows = self.device.read_inputs(plan)
        sampled = {} if last is None else {row.request: i for i, row in enumerate(last.rows) if row.samples}
        for row in rows:
            assert PENDING not in row.tokens[:-1]
            if row.tokens[-1] == PENDING:
                assert last is not None
                token = self.results[last.plan.step][sampled[row.request]]
                assert token is not None
                row.tokens[-1] = token
        flying = InFlight(plan, rows)
        self.results[plan.step] = self.device.run(rows, plan.copies)
        return flying

    def commit(self, last: InFlight, ends: dict[Request, str]) -> None:
        reasons = {i: ends[row.request] for i, row in enumerate(last.rows) if row.samples and row.request in ends}
        ended = {request: list(request.token_ids) for request in self.requests if request.is_finished}
        self.scheduler.commit(last.plan, self.results.pop(last.plan.step), reasons)
        for request, token_ids in ended.items():
            assert request.token_ids == token_ids, "a late result reached a request that had ended"
        for i in reasons:
            assert last.rows[i].request.is_finished

    def drain(self) -> None:
        while self.scheduler.has_unfinished or self.in_flight is not None:
            self.advance_clock(1000)
            had_one = self.in_flight is not None
            plan = self.turn()
            assert had_one or not plan.is_empty, "somebody waits, and nothing runs"
            self.check_everything()

    def check_outputs(self) -> None:
        for request in self.requests:
            made, prompt = request.output_token_ids, tuple(request.token_ids[: request.num_prompt_tokens])
            if made and made[-1] == PENDING:
                assert not request.is_finished
                made.pop()
            assert made == expected_output(prompt, request.index, MAX_OUTPUTS)[: len(made)]
            assert len(made) <= request.max_tokens
            assert len(request.token_times_ns) == len(made)
            assert request.token_times_ns == sorted(request.token_times_ns)
            assert request.first_token_ns == (request.token_times_ns[0] if made else None)
            if request.finish_reason == "length":
                assert len(made) == request.max_tokens

    def check_writes(self) -> None:
        """A pass may write blocks that are given away by now: those who have them read them in a later one."""


def random_config(rng: random.Random) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=rng.randrange(4, 14),
        max_context=160,
        max_num_seqs=rng.choice((1, 3, 8)),
        max_num_batched_tokens=rng.choice((8, 16, 64)),
        block_size=16,
        order=rng.choice(("fifo", "priority", "fair", "shortest")),
        packing=rng.choice(("none", "best_fit")),
        capacity=rng.choice(("guaranteed", "predicted", "optimistic")),
        batching=rng.choice(("continuous", "continuous", "static")),
        prefix_caching=rng.random() < 0.7,
    )


def run_trial(seed: int) -> PipelinedWorld:
    rng = random.Random(seed)
    world = PipelinedWorld(random_config(rng))
    shared = [rng.randrange(50) for _ in range(48)]
    for _ in range(60):
        world.advance_clock(rng.randrange(2000))
        roll = rng.random()
        if roll < 0.4:
            prompt = shared[: rng.randrange(1, 40)] + [rng.randrange(50) for _ in range(rng.randrange(1, 6))]
            usable = world.config.num_blocks * world.config.block_size
            n = rng.choice((1, 1, 1, 3))
            world.submit(prompt[: usable - 1], rng.choice((1, 2, 12, 50)), n, tenant=rng.choice("ab"))
        elif roll < 0.5 and (live := [r for r in world.requests if not r.is_finished]):
            world.scheduler.abort(rng.choice(live))
        elif world.scheduler.has_unfinished or world.in_flight is not None:
            candidates = [] if world.in_flight is None else world.in_flight.plan.requests
            world.turn({request: "stop" for request in candidates if rng.random() < 0.1})
        world.check_everything()
    world.drain()
    return world


@pytest.mark.parametrize("seed", range(40))
def test_tokens_are_those_of_each_request_alone_whatever_overlaps(seed: int) -> None:
    world = run_trial(seed)
    assert all(request.is_finished for request in world.requests)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1600))
def test_tokens_are_those_of_each_request_alone_in_many_more_trials(seed: int) -> None:
    run_trial(seed)


def test_the_trials_meet_what_they_are_for() -> None:
    """Preemptions of requests whose token is awaited, ends that come too late, ends at max_tokens, shared prefixes."""
    worlds = [run_trial(seed) for seed in range(40)]
    totals = [world.scheduler.log.totals for world in worlds]
    assert sum(total.num_ahead_steps for total in totals) > 500
    assert sum(total.discarded_tokens for total in totals) > 20
    assert sum(total.num_preemptions for total in totals) > 20
    assert sum(total.cached_tokens for total in totals) > 100
    assert sum(request.finish_reason == "length" for world in worlds for request in world.requests) > 50


@pytest.mark.parametrize("seed", range(10))
def test_a_recording_of_steps_that_overlap_gives_the_same_plans(seed: int, tmp_path: Any) -> None:
    world = run_trial(seed)
    recorder = world.scheduler.recorder
    assert isinstance(recorder, Recorder)
    recording = recorder.recording()
    path = tmp_path / "recording.jsonl"
    recording.save(path)
    for one in (recording, type(recording).load(path)):
        result = replay(one)
        assert result.diverged is None
        assert result.plans == world.plans
        for key, request in result.requests.items():
            real = next(r for r in world.requests if r.arrival_seq == key)
            assert request.token_times_ns == real.token_times_ns
            assert (request.finish_reason, request.queue_ns) == (real.finish_reason, real.queue_ns)


def small_world(**settings: Any) -> PipelinedWorld:
    return PipelinedWorld(SchedulerConfig(num_blocks=8, max_context=128, block_size=16, max_num_seqs=4, **settings))


def test_one_that_ends_at_max_tokens_gets_no_token_too_many() -> None:
    world = small_world()
    (request,) = world.submit([1, 2, 3], 2)
    assert world.turn().num_tokens == 3
    assert world.turn().num_tokens == 1
    last = world.turn()
    assert last.is_empty
    assert request.finish_reason == "length"
    assert world.scheduler.log.totals.discarded_tokens == 0


def test_one_that_stops_computes_one_token_that_is_dropped() -> None:
    world = small_world()
    (request,) = world.submit([1, 2, 3], 20)
    world.turn()
    assert world.turn({request: "stop"}).requests == [request]
    assert request.finish_reason == "stop"
    assert request.num_output_tokens == 1
    assert world.turn().is_empty
    assert world.scheduler.log.totals.discarded_tokens == 1
    assert world.scheduler.num_free_blocks == 8


def test_the_newest_token_is_pending_until_its_step_is_committed() -> None:
    world = small_world()
    (request,) = world.submit([1, 2, 3], 20)
    plan = world.scheduler.schedule()
    world.scheduler.expect(plan)
    assert request.token_ids == [1, 2, 3, PENDING]
    assert request.first_token_ns is None
    with pytest.raises(RuntimeError, match="not in flight"):
        world.scheduler.expect(plan)
    second = world.scheduler.schedule()
    with pytest.raises(RuntimeError, match="only one can be expected"):
        world.scheduler.expect(second)
    with pytest.raises(RuntimeError, match="not the oldest"):
        world.scheduler.commit(second, [5])
    world.scheduler.commit(plan, [9])
    assert request.token_ids == [1, 2, 3, 9]
    world.scheduler.commit(second, [5])
    assert request.token_ids == [1, 2, 3, 9, 5]


def test_an_abort_while_a_token_is_awaited_leaves_what_was_known() -> None:
    world = small_world()
    (request,) = world.submit([1, 2, 3], 20)
    plan = world.scheduler.schedule()
    world.scheduler.expect(plan)
    world.scheduler.abort(request)
    assert request.token_ids == [1, 2, 3]
    world.scheduler.commit(plan, [None])
    assert request.token_ids == [1, 2, 3]
    assert not world.scheduler.has_unfinished


def test_a_step_takes_from_the_end_of_the_one_before_it() -> None:
    world = small_world()
    world.submit([1, 2, 3], 20)
    first = world.scheduler.schedule()
    world.scheduler.expect(first)
    second = world.scheduler.schedule()  # given to the device while the first one runs
    world.advance_clock(10)
    world.scheduler.commit(first, [7])
    world.advance_clock(30)
    world.scheduler.commit(second, [8])
    assert list(world.scheduler.log.steps.rows("start_ns", "real_ns", "ahead")) == [(0, 10, 0), (10, 30, 1)]


def test_one_whose_token_is_awaited_can_be_preempted_and_goes_on_from_it() -> None:
    world = small_world(capacity="optimistic", packing="none", prefix_caching=False, watermark=0.0)
    first, second = world.submit([1] * 48, 60)[0], world.submit([2] * 48, 60)[0]
    while not second.num_preemptions:
        world.advance_clock(5)
        world.turn()
        world.check_everything()
    assert second.state in (RequestState.PREEMPTED, RequestState.PREFILL)
    world.drain()
    assert (first.num_output_tokens, second.num_output_tokens) == (60, 60)
