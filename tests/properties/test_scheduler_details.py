"""Rules that no load brings out by itself, each on a case small enough to follow by hand."""

from __future__ import annotations

from typing import Any

import pytest

from pyengine.config import SchedulerConfig
from pyengine.errors import TTFTUnreachable
from pyengine.request import Request, RequestState
from pyengine.scheduler import Reason, Scheduler, StepPlan
from pyengine.scheduler.capacity import MAX_LENGTHS, MIN_LENGTHS, OutputLengths
from pyengine.scheduler.forecast import Forecast, decode_charge
from pyengine.scheduler.latency import Budget
from pyengine.scheduler.victim import Latest

from .policy_world import STEP_COST, FixedModel


class Run:
    """A scheduler, its clock, and its steps."""

    def __init__(self, **settings: Any) -> None:
        values = {"num_blocks": 10, "max_context": 200, "capacity": "guaranteed", "prefix_caching": False}
        self.now_ns = 0
        self.scheduler = Scheduler(
            SchedulerConfig(**{**values, **settings}), lambda: self.now_ns, step_time=FixedModel(STEP_COST)
        )

    def submit(self, name: str, length: int, max_tokens: int, **fields: Any) -> Request:
        request = Request(name, [hash(name) % 97] * length, max_tokens, **fields)
        self.scheduler.add([request])
        return request

    def step(self, ns: int = 1000) -> StepPlan:
        plan = self.scheduler.schedule()
        self.now_ns += ns
        self.scheduler.commit(plan, [0] * len(plan.requests))
        return plan


class Budgets:
    """A latency rule that gives what it is told."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def budget(self, *_: Any) -> Budget:
        return Budget(self.tokens.pop(0), Reason.LATENCY_LIMIT)


def test_a_request_that_was_refused_was_never_added_and_can_be_submitted_again() -> None:
    run = Run()
    request = Request("r", [1] * 100, 4, ttft_limit_ns=1)
    with pytest.raises(TTFTUnreachable):
        run.scheduler.add([request])
    assert request.arrival_seq == -1
    with pytest.raises(ValueError, match="never added"):
        run.scheduler.abort(request)
    request.ttft_limit_ns = None
    run.scheduler.add([request])
    assert run.step().joined == [request]
    run.scheduler.check()


def test_the_reason_of_those_behind_a_head_changes_when_it_has_waited_beyond_the_barrier() -> None:
    run = Run(aging_barrier_s=1)
    run.submit("runs", 100, 40)
    run.step()
    head, behind = run.submit("head", 100, 20), run.submit("behind", 100, 60)
    run.step()
    waits_for = run.scheduler.log.explain(behind).waits_for
    assert waits_for not in (None, Reason.AGING_BARRIER)
    run.now_ns += 2 * 10**9
    run.step()
    assert run.scheduler.log.explain(behind).waits_for is Reason.AGING_BARRIER
    assert head.is_waiting


def test_one_that_did_not_pass_for_want_of_tokens_passes_when_there_are_more() -> None:
    run = Run()
    run.submit("runs", 60, 40)
    run.step()
    run.submit("head", 100, 20)
    small = run.submit("small", 10, 3)
    run.scheduler._latency = Budgets(5, 5, 50)  # type: ignore[assignment]
    assert [run.step().joined for _ in range(3)] == [[], [], [small]]


def test_of_those_that_may_pass_the_one_that_leaves_least_goes_first() -> None:
    run = Run(num_blocks=12)
    run.submit("runs", 60, 40)
    run.step()
    run.submit("head", 150, 20)
    made = [run.submit(str(length), length, 2) for length in (3, 40, 20)]
    joined = run.step().joined
    assert joined == [made[1], made[2], made[0]][: len(joined)]
    assert len(joined) > 1


def test_a_promotion_follows_the_next() -> None:
    run = Run(order="priority", priority_promotion_s=1, max_num_seqs=1)
    run.submit("runs", 3, 90)
    run.step()
    low = run.submit("low", 3, 3, priority=5)
    for expected in (4, 3, 2, 1, 0, 0):
        run.now_ns += 10**9
        run.step(0)
        assert low.priority_class == expected


def test_who_is_due_first_wakes_the_engine() -> None:
    run = Run()
    run.scheduler.pause()
    run.submit("waits", 3, 3, ttft_limit_ns=7 * 10**8)
    assert run.scheduler.schedule().is_empty
    assert run.scheduler.next_wake_ns() == 7 * 10**8
    held = run.submit("held", 3, 3)
    run.scheduler.hold(held, "its grammar", 5 * 10**8)
    assert run.scheduler.next_wake_ns() == 5 * 10**8


def test_lengths_are_expected_from_longer_outputs_and_old_ones_are_forgotten() -> None:
    lengths = OutputLengths()
    request = Request("r", [1], 500)
    for _ in range(MIN_LENGTHS - 1):
        lengths.add(10)
    assert lengths.expect(request, 0.5) == 500
    for length in (20, *[10] * 16, 100):
        lengths.add(length)
    assert lengths.expect(request, 0.5) == 10
    request.token_ids += [0] * 12
    assert lengths.expect(request, 0.0) == 20
    assert lengths.expect(request, 1.0) == 100
    request.token_ids += [0] * 100
    assert lengths.expect(request, 0.5) == 224
    for _ in range(MAX_LENGTHS):
        lengths.add(300)
    assert lengths.expect(Request("s", [1], 500), 0.0) == 300
    assert len(lengths._sorted) == len(lengths._recent) == MAX_LENGTHS


def test_a_forecast_that_has_moved_far_knows_nothing_of_what_is_over() -> None:
    forecast = Forecast(max_context=100, block_size=16)
    charges = [decode_charge(20, 60, step, 16) for step in (0, 40, 90, 200, 210)]
    for charge, step in zip(charges, (0, 40, 90, 200, 210), strict=True):
        forecast.move_to(step // 16)
        forecast.add(charge)
    forecast.move_to(20)
    assert (forecast.peak(), forecast.seats_in(20)) == (0, 0)
    late = decode_charge(20, 60, 330, 16)
    forecast.add(late)
    assert (forecast.peak(), forecast.seats_in(20)) == (5, 1)


def test_a_prefill_that_left_takes_no_seat_any_more() -> None:
    run = Run(num_blocks=40, max_num_seqs=2, max_num_batched_tokens=16)
    first = run.submit("first", 100, 3)
    run.step()
    run.scheduler.abort(first)
    run.submit("second", 3, 30)
    run.step()
    assert run.scheduler._capacity.forecast.seats_in(0) == 1


def test_the_limit_of_one_that_left_binds_nobody() -> None:
    run = Run(num_blocks=40)
    fast = run.submit("fast", 3, 5, itl_limit_ns=1400)
    run.submit("other", 3, 40)
    run.step()
    long = run.submit("long", 100, 3)
    assert 0 < run.step().num_prefill_tokens < 20
    run.scheduler.abort(fast)
    plan = run.step()
    assert plan.num_new_tokens[plan.requests.index(long)] > 70


# ---- The reserved start, by hand: blocks of 16 tokens, everyone to its max_tokens


def reserved_step(run: Run, head: Request) -> int | None:
    return run.scheduler.log.explain(head).reserved_step


def behind_a_head(num_blocks: int = 10, head_length: int = 140, **settings: Any) -> tuple[Run, Request]:
    """A has 4 blocks and its last token in step 10; the head has all 10 or so from step 11 on."""
    run = Run(num_blocks=num_blocks, **settings)
    run.submit("a", 50, 11)
    run.step()
    head = run.submit("head", head_length, 8)
    return run, head


def test_a_head_is_promised_the_step_after_the_end_that_makes_room_and_starts_in_it() -> None:
    run, head = behind_a_head()
    run.step()
    assert reserved_step(run, head) == 11
    started = [plan.step for plan in (run.step() for _ in range(20)) if head in plan.joined]
    assert started == [11]


@pytest.mark.parametrize(("max_tokens", "passes"), [(9, True), (10, True), (11, False), (15, False)])
def test_one_passes_that_is_gone_when_the_head_starts_and_not_a_step_later(max_tokens: int, passes: bool) -> None:
    run, head = behind_a_head()
    small = run.submit("small", 1, max_tokens)
    assert run.step().joined == ([small] if passes else [])
    while head.is_waiting:
        plan = run.step()
    assert plan.step == 11


@pytest.mark.parametrize("room", [0, 1, 2])
def test_so_many_pass_as_leave_the_head_its_room(room: int) -> None:
    run, head = behind_a_head(num_blocks=10 + room)
    made = [run.submit(f"small{i}", 1, 15) for i in range(3)]
    assert run.step().joined == made[:room]
    assert reserved_step(run, head) == 11
    while head.is_waiting:
        plan = run.step()
    assert plan.step == 11


def test_a_head_that_grows_starts_before_its_final_size_would_fit_and_nobody_passes_into_that() -> None:
    """A has 6 blocks until step 19. The head has 4, then 5: beside A that is too much now, and not from step 16 on."""
    run = Run(max_num_batched_tokens=500)
    run.submit("a", 77, 20)
    run.step()
    head = run.submit("head", 40, 80)
    early, late = run.submit("early", 1, 15), run.submit("late", 1, 16)
    assert run.step().joined == [early]
    assert reserved_step(run, head) == 20
    while head.is_waiting:
        plan = run.step()
    assert plan.step == 16
    assert late.is_waiting


def test_the_head_is_promised_what_leaves_the_watermark_free() -> None:
    for watermark, expected in ((0.0, 17), (0.2, 41)):
        run = Run(capacity="predicted", watermark=watermark)
        run.submit("a", 80, 17)
        run.step()
        b = run.submit("b", 1, 40)
        assert run.step().joined == [b]
        head = run.submit("head", 90, 7)
        run.step()
        assert reserved_step(run, head) == expected


def ten_of_twenty_blocks(left: int = 59, **limits: Any) -> Run:
    """A has 10 blocks for `left` more steps; a step has 36 tokens."""
    run = Run(num_blocks=20, max_num_seqs=4, max_num_batched_tokens=36, max_context=300)
    run.submit("a", 100, 60, **limits)
    while run.scheduler._prefilling or not run.scheduler._decoding:
        run.step()
    for _ in range(59 - left):
        run.step()
    return run


@pytest.mark.parametrize("has_follower", [False, True])
def test_a_head_that_a_step_computes_whole_thanks_to_its_cached_prefix_keeps_its_early_start(
    has_follower: bool,
) -> None:
    run = Run(prefix_caching=True, max_num_seqs=4, max_num_batched_tokens=40)
    prefix = [7] * 32
    run.scheduler.add([Request("cached", [*prefix, 1], 1)])
    run.step()
    first = run.submit("first", 60, 25)
    while first.num_output_tokens == 0:
        run.step()
    run.submit("second", 29, 4)
    head = Request("head", [*prefix, *range(100, 113)], 34)
    run.scheduler.add([head])
    if has_follower:
        run.submit("follower", 8, 43)
    while head.is_waiting:
        plan = run.step()
    assert plan.step == 16
    assert plan.num_new_tokens[plan.requests.index(head)] == 13


@pytest.mark.parametrize(
    ("length", "left", "limits", "reason"),
    [
        (70, 40, {}, None),
        (70, 3, {}, None),
        (70, 2, {}, Reason.WOULD_DELAY_HEAD),  # its third chunk might be in the step in which the head can start
        (98, 40, {}, None),  # 7 blocks, and 13 of the head
        (110, 40, {}, Reason.WOULD_DELAY_HEAD),  # 8, although it would have ended long before
        (70, 40, {"itl_limit_ns": 10**9}, Reason.BEHIND_HEAD),  # nobody knows how long its chunks will be
    ],
)
def test_a_prompt_of_several_steps_passes_if_it_is_computed_before_the_head_can_start_and_fits_beside_it(
    length: int, left: int, limits: dict[str, int], reason: Reason | None
) -> None:
    run = ten_of_twenty_blocks(left)
    head, passer = run.submit("head", 200, 5), run.submit("passer", length, 10, **limits)
    run.step()
    promised = reserved_step(run, head)
    if reason is None:
        assert passer.state is RequestState.PREFILL
    else:
        assert run.scheduler.log.explain(passer).waits_for is reason
    while head.is_waiting:
        plan = run.step()
    assert plan.step == promised
    assert passer.state is not RequestState.PREFILL


@pytest.mark.parametrize("is_new", [False, True])
def test_who_runs_under_a_limit_lets_no_prompt_of_several_steps_pass(is_new: bool) -> None:
    run = ten_of_twenty_blocks(**({} if is_new else {"itl_limit_ns": 10**9}))
    if is_new:
        run.submit("new", 5, 5, itl_limit_ns=10**9)
    run.submit("head", 200, 5)
    passer = run.submit("passer", 70, 10)
    run.step()
    assert run.scheduler.log.explain(passer).waits_for is Reason.BEHIND_HEAD


def test_a_prompt_that_the_next_step_computes_whole_is_not_cut_to_pass_in_this_one() -> None:
    run = ten_of_twenty_blocks()
    run.submit("head", 200, 5)
    short, long = run.submit("short", 20, 5), run.submit("long", 30, 5)
    assert run.step().joined == [long]
    assert run.scheduler.log.explain(short).waits_for is Reason.TOKEN_BUDGET
    assert run.step().joined == [short]


def test_a_batching_that_closes_an_empty_engine_is_overruled() -> None:
    class Closed:
        name = "closed"

        def closed_by(self, num_running: int) -> Reason | None:
            return Reason.STATIC_BATCH

    run = Run(batching=Closed())
    first = run.submit("first", 3, 5)
    with pytest.warns(RuntimeWarning, match="'closed'"):
        assert run.step().joined == [first]
    second = run.submit("second", 3, 5)
    while not first.is_finished:
        run.step()
        assert second.is_waiting
    assert run.step().joined == [second]
    assert run.scheduler.policy_faults == {"closed": 2}


def test_a_packing_that_tries_and_tries_is_stopped() -> None:
    class Tries:
        name = "tries"
        number = 0

        def admit(self, admission: Any) -> None:
            for request in list(admission.waiting()):
                for _ in range(10_000):
                    self.number += 1
                    admission.try_start(request)

    packing = Tries()
    run = Run(packing=packing, window=2)
    run.submit("runs", 100, 60)
    with pytest.warns(RuntimeWarning, match="'tries'"):
        run.step()
    run.submit("waits", 100, 60)
    packing.number = 0
    run.step()
    assert packing.number < 20
    assert run.scheduler.policy_faults == {"tries": 2}


def test_there_is_room_from_the_bucket_on_that_follows_the_last_that_is_too_full() -> None:
    forecast = Forecast(max_context=100, block_size=16)
    forecast.add(decode_charge(20, 27, 0, 16))  # 3 blocks until step 27, in bucket 1
    assert [forecast.first_room(blocks, 5) for blocks in (0, 2, 3)] == [2, 2, 0]
    assert [forecast.first_room(3, seats) for seats in (0, 1)] == [2, 0]


def test_the_completions_of_one_prompt_are_in_one_static_batch_and_who_comes_later_is_not() -> None:
    run = Run(batching="static", num_blocks=40)
    siblings = [Request("r", [1] * 40, 9, index=i) for i in range(3)]
    run.scheduler.add(siblings)
    assert run.step().joined == siblings[:1]
    assert run.step().joined == siblings[1:]
    late = run.submit("late", 3, 3)
    while not all(request.is_finished for request in siblings):
        assert run.step().joined == []
    assert run.step().joined == [late]


def test_the_latest_victim_is_the_latest_arrival() -> None:
    requests = [Request(str(i), [1] * (9 - i), 3) for i in range(3)]
    for i, request in enumerate(requests):
        request.arrival_seq = i
    assert Latest().choose(requests, lambda _: 0.0) is requests[2]


def test_those_who_passed_before_count_towards_the_bypass_budget() -> None:
    run, head = behind_a_head(num_blocks=20, head_length=280, max_context=400, bypass_budget=0.25)
    made = [run.submit(str(i), 30, 3) for i in range(2)]
    assert run.step().joined == made
    late = run.submit("late", 11, 3)
    assert run.step().joined == []
    assert run.scheduler.log.explain(late).waits_for is Reason.BYPASS_BUDGET
    small = run.submit("small", 10, 3)
    assert run.step().joined == [small]
    assert head.bypassed_tokens == 70
