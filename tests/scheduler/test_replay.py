"""A recording replays to the identical plans, and a what-if is what a run with the other setting would have been."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyengine.config import SchedulerConfig
from pyengine.errors import InvalidRequest, PyEngineError
from pyengine.request import Request, RequestState
from pyengine.scheduler import Scheduler, StepPlan
from pyengine.scheduler.clean_state import capture
from pyengine.scheduler.order import Fifo
from pyengine.scheduler.recording import Arrival, Begin, Recorder, Recording, RecordingError
from pyengine.scheduler.replay import PlanRecord, plan_record, replay, what_if
from pyengine.scheduler.step_time import StepTimeModel
from pyengine.scheduler.virtual import VirtualEngine

MODEL = StepTimeModel((5e6, 30_000.0, 10_000.0, 35.0, 0.0))


class RecordedScheduler(Scheduler):
    """A scheduler that keeps what it planned, and a recording of a size that a test can fill."""

    recorder: Recorder

    def __init__(self, *args: Any, num_rows: int = 65536, **more: Any) -> None:
        super().__init__(*args, **more)
        self.recorder = Recorder(self.config, self.step_time, state=lambda: capture(self), num_rows=num_rows)
        self.key_of: dict[Request, int] = {}
        self.plans: list[PlanRecord] = []

    def add(self, requests: Sequence[Request]) -> None:
        super().add(requests)
        self.key_of.update((request, request.arrival_seq) for request in requests)

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        self.plans.append(plan_record(plan, self.key_of))
        return plan


def random_config(rng: random.Random) -> SchedulerConfig:
    max_num_seqs = rng.choice([1, 3, 8, 8])
    return SchedulerConfig(
        num_blocks=rng.randint(4, 14),
        max_context=rng.choice([60, 100, 300]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([7, 60, 60, 1000]),
        batching=rng.choice(["continuous"] * 4 + ["static"]),
        order=rng.choice(["fifo", "priority", "fair", "deadline", "shortest"]),
        packing=rng.choice(["none", "best_fit"]),
        capacity=rng.choice(["guaranteed", "predicted", "optimistic", "optimistic"]),
        prefix_caching=rng.choice([True, True, False]),
        itl_limit_ms=rng.choice([None, None, 8.0]),
        ttft_limit_ms=rng.choice([None, None, 400.0]),
        max_batch_wait_ms=rng.choice([0, 20]),
        aging_barrier_s=rng.choice([0.05, 10]),
        priority_promotion_s=rng.choice([0.1, 30]),
    )


class Load:
    """A random load on a recorded scheduler: bursts and pauses, shared prefixes, aborts, holds, and clock jumps."""

    def __init__(self, seed: int, num_rows: int) -> None:
        self.rng = random.Random(seed)
        self.now_ns = 10**9
        self.scheduler = RecordedScheduler(random_config(self.rng), clock=lambda: self.now_ns, num_rows=num_rows)
        self.prefixes = [[self.rng.randrange(9) for _ in range(100)] for _ in range(3)]
        self.live: list[Request] = []
        self.number = 0

    def run(self, bursts: int) -> None:
        for _ in range(bursts):
            for _ in range(self.rng.randint(1, 6)):
                self.arrive()
                for _ in range(self.rng.choice([0, 0, 0, 3])):
                    self.step()
            while self.scheduler.has_unfinished:
                self.step()
            self.pass_time(self.rng.choice([10, 10**9]))
            if self.rng.random() < 0.1:
                self.scheduler.clear_prefix_cache()

    def arrive(self) -> None:
        rng, config = self.rng, self.scheduler.config
        known = rng.choice(self.prefixes)[: rng.choice([0, 20, 40])]
        prompt = known + [rng.randrange(9) for _ in range(rng.randint(1, 30))]
        try:
            limit, _ = self.scheduler.clamp_max_tokens(len(prompt), rng.choice([None, None, 3, 40]))
            tenant, priority = rng.choice("abc"), rng.randint(0, 2)
            made = [
                Request(f"r{self.number}", prompt, limit, index=i, tenant=tenant, priority=priority)
                for i in range(rng.choice([1, 1, 1, 3]))
            ]
            made[0].ttft_limit_ns = rng.choice([None, None, 10**8])
            self.number += 1
            self.scheduler.add(made)
        except PyEngineError:
            return
        self.live += made
        if rng.random() < 0.1 and config.max_num_seqs > 1:
            self.scheduler.hold(made[0], "grammar", self.now_ns + 10**8)

    def pass_time(self, nanoseconds: int) -> None:
        self.now_ns += nanoseconds

    def step(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        plan = scheduler.schedule()
        if plan.is_empty:
            self.pass_time(10_000_000)
        else:
            self.pass_time(rng.randint(10**6, 10**7))
        if rng.random() < 0.1:
            self.disturb()
        if len(self.live) < 5 and rng.random() < 0.1:
            self.arrive()  # while the step is in flight
        ends = {i: "stop" for i in range(len(plan.requests)) if plan.samples[i] and rng.random() < 0.02}
        scheduler.commit(plan, [rng.randrange(9) for _ in plan.requests], ends)
        self.live = [request for request in self.live if not request.is_finished]
        self.pass_time(rng.choice([0, 100]))

    def disturb(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        if self.live and rng.random() < 0.5:
            scheduler.abort(rng.choice(self.live), rng.choice(["abort", "error"]))
        held = [request for request in self.live if request.state is RequestState.HELD]
        if held:
            scheduler.wake(rng.choice(held))
        if rng.random() < 0.3:
            scheduler.pause()
        else:
            scheduler.resume()
        if scheduler._paused_for is not None and rng.random() < 0.7:
            scheduler.resume()


@pytest.mark.parametrize("seed", range(15))
def test_a_replay_gives_the_identical_plans_also_from_a_later_clean_start_and_from_a_file(
    seed: int, tmp_path: Path
) -> None:
    load = Load(seed, num_rows=65536 if seed % 3 == 0 else 800)
    load.run(6)
    recorder, plans = load.scheduler.recorder, load.scheduler.plans
    recording = recorder.recording()
    result = replay(recording)
    assert result.diverged is None
    assert result.plans or seed % 3
    assert result.plans == plans[len(plans) - len(result.plans) :]
    recording.save(tmp_path / "recording.jsonl")
    loaded = Recording.load(tmp_path / "recording.jsonl")
    assert loaded.events == recording.events
    assert replay(loaded).plans == result.plans
    for key in list(recording.requests())[::40]:
        later = recorder.recording(key)
        assert key in later.requests()
        plans_later = replay(later).plans
        assert plans_later == plans[len(plans) - len(plans_later) :]


def test_at_least_some_of_these_loads_preempt_hit_the_cache_and_refuse() -> None:
    preempted = refused = cached = 0
    for seed in range(15):
        load = Load(seed, num_rows=65536)
        load.run(4)
        preempted += sum(len(plan.preempted) for plan in load.scheduler.plans)
        refused += sum(len(plan.refused) for plan in load.scheduler.plans)
        cached += load.scheduler._cache.num_hit_tokens
    assert (preempted > 10, refused > 10, cached > 1000) == (True, True, True), (preempted, refused, cached)


def test_a_plan_that_differs_from_the_recorded_one_is_said() -> None:
    load = Load(0, num_rows=65536)
    load.run(2)
    recording = load.scheduler.recorder.recording()
    events = list(recording.events)
    place = [i for i, event in enumerate(events) if isinstance(event, Begin)][5]
    begin = events[place]
    assert isinstance(begin, Begin)
    events[place] = replace(begin, num_prefill_tokens=begin.num_prefill_tokens + 1)
    result = replay(replace(recording, events=tuple(events)))
    assert result.diverged is not None
    assert "recorded are" in result.diverged
    assert len(result.plans) == 6
    nameless = replay(replace(recording, events=tuple(e for e in events if not isinstance(e, Arrival))))
    assert nameless.diverged is not None


def simulated(config: SchedulerConfig, count: int = 40) -> tuple[RecordedScheduler, list[Request], VirtualEngine]:
    """A queue on a tight engine, run under the virtual clock and recorded."""
    engine = VirtualEngine(config, MODEL)
    engine.scheduler = RecordedScheduler(config, clock=lambda: engine.now_ns, step_time=MODEL.copy())
    rng = random.Random(5)
    made = [Request(f"r{i}", [i] * rng.randint(5, 60), 60) for i in range(count)]
    for i, request in enumerate(made):
        engine.arrive(i * 4_000_000, [request], [rng.randint(1, 60)])
    engine.drain()
    return engine.scheduler, made, engine


TIGHT = SchedulerConfig(
    num_blocks=16, max_context=200, max_num_seqs=4, max_num_batched_tokens=64, capacity="guaranteed"
)


def test_a_virtual_replay_of_a_virtual_run_is_that_run() -> None:
    scheduler, made, _ = simulated(TIGHT)
    result = replay(scheduler.recorder.recording(), durations=MODEL)
    assert result.plans == [plan for plan in scheduler.plans if plan.rows]
    assert [r.token_times_ns for r in result.requests.values()] == [r.token_times_ns for r in made]


@pytest.mark.parametrize("change", [{"kv_blocks": 1.5}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 16}])
def test_a_what_if_is_the_difference_to_a_run_with_the_other_setting(change: dict[str, Any]) -> None:
    values = {"num_blocks": 24} if "kv_blocks" in change else change
    scheduler, made, _ = simulated(TIGHT)
    _, other, _ = simulated(replace(TIGHT, **values))
    for place in (3, 20, 39):
        (answer,) = what_if(scheduler.recorder, made[place].arrival_seq, [change])
        assert answer.problem is None
        assert answer.start_delta_ns == (other[place].started_ns or 0) - (made[place].started_ns or 0)
        assert answer.first_token_delta_ns == other[place].token_times_ns[0] - made[place].token_times_ns[0]
    assert answer.start_delta_ns != 0


def test_a_what_if_that_has_no_answer_says_why() -> None:
    scheduler, _, engine = simulated(TIGHT)
    recording = scheduler.recorder.recording()
    changes = [{"max_num_seqs": 100}, {"colour": 1}, {"kv_blocks": -1}, {"kv_blocks": 0.07}]
    answers = what_if(recording, 30, changes)
    said = ["max_num_seqs is 100", "colour is no setting", "kv_blocks is -1", "needs"]
    for answer, words in zip(answers, said, strict=True):
        assert words in (answer.problem or "")
        assert answer.start_delta_ns is answer.first_token_delta_ns is None
    assert "not in the recording" in (what_if(recording, 999, [{}])[0].problem or "")
    unfitted = replace(recording, step_time=StepTimeModel().to_dict())
    assert "seen only 0 steps" in (what_if(unfitted, 3, [{}])[0].problem or "")
    assert engine.num_steps > 20


def test_without_a_clean_start_in_memory_a_what_if_says_so() -> None:
    scheduler = RecordedScheduler(TIGHT, clock=lambda: 0, num_rows=50)
    made = [Request(f"r{i}", [i] * 10, 60) for i in range(2)]
    for request in made:
        scheduler.add([request])
    for _ in range(40):
        plan = scheduler.schedule()
        scheduler.commit(plan, [0] * len(plan.requests))
    (answer,) = what_if(scheduler.recorder, 1, [{"kv_blocks": 2}], model=MODEL)
    assert "not among the last" in (answer.problem or "")
    scheduler.add([late := Request("late", [7] * 10, 60)])
    (answer,) = what_if(scheduler.recorder, late.arrival_seq, [{"kv_blocks": 2}], model=MODEL)
    assert "never empty" in (answer.problem or "")


def test_other_settings_need_a_model_and_known_names() -> None:
    recording = simulated(TIGHT)[0].recorder.recording()
    with pytest.raises(ValueError, match="give a model"):
        replay(recording, config_changes={"max_num_seqs": 2})
    with pytest.raises(ValueError, match="must be 'recorded'"):
        replay(recording, durations="guessed")
    with pytest.raises(InvalidRequest, match="colour is no setting"):
        replay(recording, config_changes={"colour": 2}, durations=MODEL)


def test_a_policy_object_that_the_engine_uses_is_not_touched_by_a_replay() -> None:
    class Mine(Fifo):
        name = "mine"

    recording = simulated(replace(TIGHT, order=Mine))[0].recorder.recording()
    assert replay(recording).diverged is None
    in_use = replace(recording, config=replace(TIGHT, order=Mine()))
    with pytest.raises(RecordingError, match=r"order is .*Mine object.* in use"):
        replay(in_use)
    assert "in use" in (what_if(in_use, 3, [{}], model=MODEL)[0].problem or "")
