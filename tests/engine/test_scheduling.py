"""Scheduling seen from outside: who starts when, what is said about it, and what a bad policy or setting does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyengine import Engine, InvalidRequest, RequestOptions, SamplingParams, StreamEvent
from pyengine.request import Request, RequestState
from pyengine.scheduler import Capacity, Reason
from pyengine.scheduler.admission import Admission
from pyengine.scheduler.capacity import Guaranteed
from pyengine.scheduler.order import Order
from pyengine.scheduler.verdict import Verdict

from .conftest import block_bytes

PolicyEngine = Callable[..., Engine]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def prompt(length: int, first: int = 0) -> list[int]:
    return [2 + (first + 7 * i) % 300 for i in range(length)]


def drain(engine: Engine, most_steps: int = 3000) -> list[StreamEvent]:
    events: list[StreamEvent] = []
    for _ in range(most_steps):
        if not engine.has_unfinished:
            return events
        events += engine.step()
    raise AssertionError("a finite load does not end")


def outputs_of(events: Iterable[StreamEvent]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for event in events:
        found[event.request_id] = found.get(event.request_id, ()) + tuple(event.token_ids)
    return found


def ends_of(events: Iterable[StreamEvent]) -> dict[str, str]:
    return {event.request_id: event.finish_reason for event in events if event.finish_reason}


def known(engine: Engine, request_id: str) -> Request:
    return engine._live[request_id].sequences[0].request


def all_is_free(engine: Engine) -> bool:
    scheduler = engine._scheduler
    scheduler.check()
    return not scheduler.has_unfinished and scheduler.num_free_blocks == engine.limits.num_blocks


@pytest.fixture(scope="module")
def bytes_of_block(model_folder: Path) -> int:
    return block_bytes(model_folder)


@pytest.fixture
def make(model_folder: Path, bytes_of_block: int) -> Iterator[PolicyEngine]:
    engines: list[Engine] = []

    def make_engine(num_blocks: int = 40, **settings: Any) -> Engine:
        engine = Engine(model_folder, kv_cache_memory=num_blocks * bytes_of_block, num_threads=1, **settings)
        engines.append(engine)
        return engine

    yield make_engine
    for engine in engines:
        engine.close()


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self, engine: Engine) -> None:
        self.now_ns = engine._scheduler._last_now_ns
        engine._scheduler._clock = lambda: self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


# ---- The hole that the head leaves


def test_small_ones_fill_the_hole_behind_a_big_head_which_starts_within_its_bound_and_is_told_all(
    make: PolicyEngine,
) -> None:
    engine = make(capacity="guaranteed")
    engine.submit(prompt(300), greedy(20), request_id="A")  # 20 blocks
    engine.step()
    engine.submit(prompt(460, 1), greedy(20), request_id="B")  # 30 blocks
    small = list("CDEFGHIJ")
    for i, name in enumerate(small):
        engine.submit(prompt(20, 10 + i), greedy(10), request_id=name)  # 2 blocks each
    engine.step()
    assert known(engine, "B").state is RequestState.WAITING
    assert all(known(engine, name).started_ns is not None for name in small)
    waiting = engine.explain("B", what_if=False)
    assert waiting.state == "waiting"
    assert waiting.waits_for is Reason.KV_PEAK
    assert waiting.num_passed_by == 8
    assert ends_of(drain(engine)) == dict.fromkeys(["A", "B", *small], "length")
    told = engine.explain("B")
    [part] = [part for part in told.parts if part.reason is Reason.KV_PEAK]
    assert (part.need, part.had, part.unit) == (30, 20, "blocks")
    assert "need 30 blocks, had 20" in str(told)
    assert set(told.passed_by) == set(small)
    assert told.started_step is not None
    assert told.reserved_step is not None
    assert told.started_step <= told.reserved_step
    assert (told.num_reservation_moves, told.num_preemptions) == (0, 0)
    assert sum(told.wait_ns.values()) == told.queue_ns
    assert all(name in str(told) for name in told.passed_by[:3])
    assert engine.explain("C", what_if=False).passed == ("B",)
    assert all_is_free(engine)


def test_in_strict_order_nobody_passes(make: PolicyEngine) -> None:
    engine = make(capacity="guaranteed", packing="none")
    engine.submit(prompt(300), greedy(20), request_id="A")
    engine.step()
    engine.submit(prompt(460, 1), greedy(20), request_id="B")
    engine.submit(prompt(20, 9), greedy(2), request_id="C")
    engine.step()
    assert known(engine, "C").started_ns is None
    assert engine.explain("C", what_if=False).waits_for is Reason.BEHIND_HEAD
    drain(engine)
    assert engine.explain("B", what_if=False).num_passed_by == 0


@pytest.mark.parametrize("order", ["fifo", "priority", "fair", "deadline", "shortest"])
@pytest.mark.parametrize("arrivals", ["small", "cached"])
def test_endless_small_or_cached_arrivals_never_starve_a_big_cold_request(
    make: PolicyEngine, order: str, arrivals: str
) -> None:
    engine = make(order=order, max_num_seqs=8, priority_promotion_s=1)
    clock = Clock(engine)
    shared = prompt(64)
    favoured = RequestOptions(tenant="many", ttft_limit_ms=30_000 if order == "deadline" else None)
    number = 0

    def submit_another() -> None:
        nonlocal number
        begin = shared if arrivals == "cached" else prompt(60, number)
        engine.submit([*begin, 5, 2 + number % 300], greedy(20), options=favoured)
        number += 1

    for _ in range(8):
        submit_another()
    engine.step()
    clock.advance(0.25)
    engine.step()
    engine.submit(prompt(460, 1), greedy(4), request_id="big", options=RequestOptions(tenant="one", priority=3))
    ended: dict[str, str] = {}
    for _ in range(600):
        submit_another()
        clock.advance(0.25)
        ended.update(ends_of(engine.step()))
        if "big" in ended:
            break
    assert ended.get("big") == "length", f"it starved beside {number} others"
    assert number > 20, "there was room for it from the beginning"
    assert engine.explain("big", what_if=False).queue_ns <= 100e9


# ---- What is told of whom


def test_one_that_waits_one_that_runs_and_one_that_is_forgotten_are_told_as_far_as_known(make: PolicyEngine) -> None:
    engine = make(20, max_num_seqs=1)
    engine._scheduler.log.num_ended = 2
    engine.submit(prompt(20), greedy(6), request_id="runs")
    engine.submit(prompt(20, 1), greedy(2), request_id="waits")
    engine.step()
    running, waiting = engine.explain("runs"), engine.explain("waits")
    assert (running.state, running.waits_for) == ("decode", None)
    assert (waiting.state, waiting.waits_for) == ("waiting", Reason.MAX_SEQS)
    assert waiting.started_s is None
    assert "waits" in str(waiting)
    drain(engine)
    for i in range(2):
        engine.submit(prompt(5, i), greedy(1), request_id=f"later{i}")
        drain(engine)
    forgotten, never = engine.explain("runs"), engine.explain("nobody")
    for explained in (forgotten, never):
        assert explained.state == "unknown"
        assert explained.notes
        assert explained.notes[0] in str(explained)
    assert engine.explain("later1", what_if=False).state == "finished"


# ---- Preemption


@pytest.mark.parametrize("victim", ["cheapest", "latest"])
def test_forced_preemption_equals_no_preemption(make: PolicyEngine, victim: str) -> None:
    roomy, tight = make(60), make(9, capacity="optimistic", victim=victim, watermark=0.0)
    found = []
    for engine in (roomy, tight):
        for i in range(5):
            engine.submit(prompt(12 + i, i), greedy(40), request_id=str(i))
        found.append(outputs_of(drain(engine)))
        assert all_is_free(engine)
    assert found[0] == found[1]
    assert roomy.stats().num_preemptions == 0
    assert tight.stats().num_preemptions > 0
    assert any(tight.explain(str(i), what_if=False).num_recomputed_tokens for i in range(5))


# ---- Tenants


def test_a_tenant_that_floods_gets_no_more_than_another_beyond_the_bound(make: PolicyEngine) -> None:
    """While both have something waiting, S(a) - S(b) <= max(D, P) + w N L: see docs/scheduling-proofs.md."""
    engine = make(80, order="fair", max_num_seqs=4, packing="none", prefix_caching=False)
    for i in range(40):
        engine.submit(prompt(30, i), greedy(8), options=RequestOptions(tenant="flood"))
    engine.step()
    for i in range(12):
        engine.submit(prompt(30, 100 + i), greedy(8), request_id=f"few{i}", options=RequestOptions(tenant="few"))
    order = engine._scheduler._order
    before = dict(order.service)  # type: ignore[attr-defined]
    tenants = {"flood", "few"}
    worst = 0
    while {request.tenant for request in engine._scheduler._waiting} == tenants:
        engine.step()
        gained = {name: order.service[name] - before[name] for name in tenants}  # type: ignore[attr-defined]
        worst = max(worst, abs(gained["flood"] - gained["few"]))
    assert 0 < worst <= 30 + 2 * 4 * 8 + before["flood"] - before["few"] + 30
    assert len(ends_of(drain(engine))) > 0


# ---- Abort


@pytest.mark.parametrize("state", ["waiting", "held", "prefill", "decode", "preempted"])
def test_abort_in_each_state_frees_all_and_changes_nobody_else(make: PolicyEngine, state: str) -> None:
    engine = make(8, capacity="optimistic", victim="latest", max_num_batched_tokens=32, max_num_seqs=2, watermark=0.0)
    scheduler = engine._scheduler
    expected = engine.generate([prompt(14)], greedy(80))[0].outputs[0].token_ids
    engine.submit(prompt(14), greedy(80), request_id="other")
    events = engine.step()
    engine.submit(prompt(60, 3), greedy(40), request_id="victim")
    victim = known(engine, "victim")
    if state == "held":
        scheduler.hold(victim, "its grammar", scheduler._last_now_ns + 10**12)
    elif state != "waiting":
        for _ in range(60):
            events += engine.step()
            if victim.state.value == state:
                break
    assert victim.state.value == state
    assert engine.abort("victim")
    assert not engine.abort("victim")
    assert victim.block_table == []
    assert scheduler.num_free_blocks + len(known(engine, "other").block_table) == 8
    events += drain(engine)
    assert ends_of(events) == {"other": "length", "victim": "abort"}
    assert outputs_of(events)["other"] == expected
    assert all_is_free(engine)


# ---- Policies of the user's


class Named:
    name = "mine"


class Twice(Named):
    """Starts each request twice."""

    def admit(self, admission: Admission) -> None:
        for request in admission.waiting():
            admission.try_start(request)
            admission.try_start(request)


class Unknown(Named):
    """Starts one that nobody submitted."""

    def admit(self, admission: Admission) -> None:
        admission.try_start(Request("x", [1, 2, 3], 4))


class Rubbish(Named):
    def admit(self, admission: Admission) -> None:
        admission.try_start("a request")  # type: ignore[arg-type]


class TooMany(Named):
    """Tries those that do not fit for ever."""

    def admit(self, admission: Admission) -> None:
        everyone = list(admission.waiting())
        while any(request.is_waiting for request in everyone):
            for request in everyone:
                if request.is_waiting:
                    admission.try_start(request)


class Raises(Named):
    def admit(self, admission: Admission) -> None:
        list(admission.waiting())
        raise KeyError("nothing here")


class Nobody(Named):
    """Looks at everyone and starts none."""

    def admit(self, admission: Admission) -> None:
        for _ in admission.waiting():
            pass


class LastFirst(Named):
    """A good one: the latest arrival first."""

    def admit(self, admission: Admission) -> None:
        for request in reversed(list(admission.waiting())):
            if admission.try_start(request).blocks_others:
                admission.block(request)
                return


@pytest.mark.filterwarnings("ignore:The scheduling policy:RuntimeWarning")
@pytest.mark.parametrize("policy", [Twice, Unknown, Rubbish, TooMany, Raises, Nobody, LastFirst])
def test_a_packing_of_the_users_that_breaks_its_rules_is_refused_by_name_and_all_requests_end(
    make: PolicyEngine, policy: type[Any]
) -> None:
    engine = make(packing=policy(), max_num_seqs=4)
    for i in range(6):
        engine.submit(prompt(10 + i, i), greedy(5), request_id=str(i))
    assert ends_of(drain(engine)) == {str(i): "length" for i in range(6)}
    assert all_is_free(engine)
    faults = engine._scheduler.policy_faults
    assert (faults.get("mine", 0) > 0) == (policy is not LastFirst)


def test_a_fault_of_a_policy_is_warned_of_with_its_name(make: PolicyEngine) -> None:
    engine = make(packing=Raises())
    engine.submit(prompt(10), greedy(2))
    with pytest.warns(RuntimeWarning, match="'mine'.*nothing here"):
        engine.step()
    assert engine.stats().policy_faults["mine"] == 1
    assert "'mine' broke its rules" in str(engine.stats())


class OnlyAKey(Named):
    """The least that an order is: no subclass of Order."""

    def key(self, request: Request) -> Any:
        return (-request.arrival_seq,)


class NoKey(Order):
    name = "mine"

    def key(self, request: Request) -> Any:
        return None


class KeyRaises(Order):
    name = "mine"

    def key(self, request: Request) -> Any:
        if request.num_prompt_tokens == 11:
            raise KeyError("eleven")
        return (request.arrival_seq,)


class MixedKeys(Order):
    """Each key compares with itself, and not with others."""

    name = "mine"

    def key(self, request: Request) -> Any:
        return (str(request.arrival_seq),) if request.num_prompt_tokens == 11 else (request.arrival_seq,)


class ChangingKeys(Order):
    """A key that is another one each time it is asked for."""

    name = "mine"

    def __init__(self) -> None:
        self.calls = 0

    def key(self, request: Request) -> Any:
        self.calls += 1
        return ((self.calls * 7919) % 101, request.arrival_seq)


class SameKeys(Order):
    name = "mine"

    def key(self, request: Request) -> Any:
        return ()


@pytest.mark.filterwarnings("ignore:The scheduling policy:RuntimeWarning")
@pytest.mark.parametrize("policy", [NoKey, KeyRaises, MixedKeys, ChangingKeys, SameKeys])
def test_an_order_of_the_users_that_breaks_its_rules_hurts_only_those_without_a_key(
    make: PolicyEngine, policy: type[Any]
) -> None:
    engine = make(order=policy(), max_num_seqs=2)
    outputs = engine.generate([prompt(10 + i, i) for i in range(6)], greedy(5))
    bad = {NoKey: range(6), KeyRaises: [1], MixedKeys: [1], ChangingKeys: [], SameKeys: []}[policy]
    for i, output in enumerate(outputs):
        if i in bad:
            assert "mine" in str(output.error)
            assert output.outputs[0].finish_reason == "error"
        else:
            assert output.error is None
            assert len(output.outputs[0].token_ids) == 5
    assert all_is_free(engine)
    assert (engine._scheduler.policy_faults.get("mine", 0) > 0) == bool(bad)


class YesToAll(Guaranteed):
    """Says that everyone fits."""

    name = "mine"

    def judge(self, *args: Any) -> Verdict:
        return Verdict(None)


class NoToAll(Guaranteed):
    name = "mine"

    def judge(self, *args: Any) -> Verdict:
        return Verdict(Reason.KV_NOW, 1, 0)


class JudgeRaises(Guaranteed):
    name = "mine"

    def judge(self, *args: Any) -> Verdict:
        raise KeyError("no verdict")


class JudgeRubbish(Guaranteed):
    name = "mine"

    def judge(self, *args: Any) -> Any:
        return "perhaps"


@pytest.mark.filterwarnings("ignore:The scheduling policy:RuntimeWarning")
@pytest.mark.parametrize("packing", ["none", "best_fit"])
@pytest.mark.parametrize("policy", [YesToAll, NoToAll, JudgeRaises, JudgeRubbish])
def test_a_capacity_of_the_users_that_breaks_its_rules_is_refused_by_name_and_all_requests_end(
    make: PolicyEngine, policy: type[Any], packing: str
) -> None:
    engine = make(6, capacity=policy, packing=packing, max_num_seqs=4, prefix_caching=False)
    for i in range(6):
        engine.submit(prompt(40 + i, i), greedy(5), request_id=str(i))
    assert ends_of(drain(engine)) == {str(i): "length" for i in range(6)}
    assert all_is_free(engine)
    assert engine._scheduler.policy_faults["mine"] > 0


class OnlyJudges(Named):
    """The least that a capacity might be: not derived from Capacity."""

    def judge(self, *args: Any) -> Verdict:
        return Verdict(None)


@pytest.mark.parametrize(
    ("setting", "policy", "base"), [("order", OnlyAKey, "Order"), ("capacity", OnlyJudges, "Capacity")]
)
@pytest.mark.parametrize("is_class", [True, False])
def test_an_order_or_capacity_that_is_derived_from_none_is_refused_at_start(
    make: PolicyEngine, setting: str, policy: type[Any], base: str, is_class: bool
) -> None:
    with pytest.raises(InvalidRequest, match=rf"derived from pyengine\.scheduler\.{base}") as refused:
        make(**{setting: policy if is_class else policy()})
    assert refused.value.field == setting


@pytest.mark.parametrize("policy", [object(), 7, None, Named()])
@pytest.mark.parametrize("setting", ["batching", "order", "packing", "capacity", "victim"])
def test_what_is_no_policy_at_all_is_refused_with_what_one_has(make: PolicyEngine, setting: str, policy: Any) -> None:
    with pytest.raises(InvalidRequest, match="or have `name` and") as refused:
        make(**{setting: policy})
    assert refused.value.field == setting


class FirstVictim(Named):
    def choose(self, running: Iterable[Request], surplus: Any) -> Request:
        return next(iter(running))


class NoVictim(Named):
    def choose(self, running: Iterable[Request], surplus: Any) -> Any:
        return None


class StrangeVictim(Named):
    def choose(self, running: Iterable[Request], surplus: Any) -> Any:
        return Request("x", [1], 1)


class VictimRaises(Named):
    def choose(self, running: Iterable[Request], surplus: Any) -> Any:
        raise ValueError("nobody")


@pytest.mark.filterwarnings("ignore:The scheduling policy:RuntimeWarning")
@pytest.mark.parametrize("policy", [FirstVictim, NoVictim, StrangeVictim, VictimRaises])
def test_a_victim_of_the_users_that_breaks_its_rules_is_refused_by_name_and_all_requests_end(
    make: PolicyEngine, policy: type[Any]
) -> None:
    engine = make(6, victim=policy(), capacity="optimistic", watermark=0.0)
    for i in range(4):
        engine.submit(prompt(12, i), greedy(30), request_id=str(i))
    assert ends_of(drain(engine)) == {str(i): "length" for i in range(4)}
    assert all_is_free(engine)
    assert engine.stats().num_preemptions > 0
    assert (engine._scheduler.policy_faults.get("mine", 0) > 0) == (policy is not FirstVictim)


class AtMostTwo(Named):
    def closed_by(self, num_running: int) -> Reason | None:
        return Reason.STATIC_BATCH if num_running >= 2 else None


class AlwaysClosed(Named):
    def closed_by(self, num_running: int) -> Reason | None:
        return Reason.STATIC_BATCH


class ClosedByText(Named):
    def closed_by(self, num_running: int) -> Any:
        return "full"


class GateRaises(Named):
    def closed_by(self, num_running: int) -> Reason | None:
        raise ValueError("no idea")


class EndRaises(AtMostTwo):
    def admitted(self, stopped_by: Reason | None) -> None:
        raise ValueError("no idea")


def most_at_a_time(engine: Engine) -> int:
    return max(sequences for (sequences,) in engine._scheduler.log.steps.rows("sequences"))


@pytest.mark.filterwarnings("ignore:The scheduling policy:RuntimeWarning")
@pytest.mark.parametrize(
    ("policy", "together", "is_at_fault"),
    [
        (AtMostTwo, 2, False),
        (AlwaysClosed, 1, True),
        (ClosedByText, 4, True),
        (GateRaises, 4, True),
        (EndRaises, 2, True),
    ],
)
def test_a_batching_of_the_users_decides_when_others_join_and_one_that_breaks_its_rules_lets_all_start(
    make: PolicyEngine, policy: type[Any], together: int, is_at_fault: bool
) -> None:
    engine = make(40, batching=policy())
    engine.submit(prompt(12, 0), greedy(30), request_id="first")
    engine.step()
    for i in range(3):
        engine.submit(prompt(12, i + 1), greedy(30), request_id=str(i))
        engine.step()
    assert most_at_a_time(engine) == together
    assert ends_of(drain(engine)) == {"first": "length", **{str(i): "length" for i in range(3)}}
    assert all_is_free(engine)
    assert (engine.stats().policy_faults.get("mine", 0) > 0) == is_at_fault
    if together == 2:
        assert {part.reason for part in engine.explain("2").parts} == {Reason.MID_STEP, Reason.STATIC_BATCH}


# ---- Settings


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("batching", "dynamic", ["continuous", "static"]),
        ("order", "lifo", ["fifo", "priority", "fair", "deadline", "shortest"]),
        ("packing", "tight", ["none", "best_fit"]),
        ("capacity", "endless", ["guaranteed", "predicted", "optimistic"]),
        ("victim", "oldest", ["cheapest", "latest"]),
        ("prefix_caching", "yes", ["True", "False"]),
        ("capacity_quantile", 0, ["> 0", "<= 1"]),
        ("watermark", 1, [">= 0", "< 1"]),
        ("itl_limit_ms", -1, ["> 0"]),
        ("ttft_limit_ms", 0, ["> 0"]),
        ("max_batch_wait_ms", float("nan"), [">= 0"]),
        ("aging_barrier_s", -1, [">= 0"]),
        ("bypass_budget", "much", [">= 0"]),
        ("window", 0, ["1"]),
        ("priority_promotion_s", 0, ["> 0"]),
    ],
)
def test_a_setting_that_is_not_known_is_refused_with_all_that_are(
    make: PolicyEngine, setting: str, value: Any, allowed: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make(**{setting: value})
    assert refused.value.field == setting
    assert repr(value) in str(refused.value)
    assert all(one in str(refused.value) for one in allowed)


def test_a_limit_between_tokens_below_one_decode_is_refused_at_start_with_the_measured_time(make: PolicyEngine) -> None:
    with pytest.raises(InvalidRequest, match=r"itl_limit_ms is 1e-05; .* takes [0-9.]+ ms here") as refused:
        make(itl_limit_ms=1e-5)
    assert refused.value.field == "itl_limit_ms"
    assert refused.value.limit > 1e-5
    assert make(itl_limit_ms=10_000).generate([prompt(40)], greedy(3))[0].error is None


# ---- Orders and capacities of the user's that break in the middle


def broken_order(hook: str) -> type[Any]:
    def raises(self: Any, *args: Any) -> Any:
        raise ZeroDivisionError(hook)

    def lane(self: Any, request: Request) -> Any:
        return request.tenant

    return type(
        "Broken", (Order,), {"name": "mine", "key": lambda self, r: (r.arrival_seq,), "lane": lane, hook: raises}
    )


@pytest.mark.filterwarnings("ignore:The scheduling policy:RuntimeWarning")
@pytest.mark.parametrize("hook", ["lane", "rank", "opened", "closed", "granted", "decodes", "stopped", "stepped"])
def test_an_order_of_the_users_that_breaks_anywhere_gives_way_to_arrival(make: PolicyEngine, hook: str) -> None:
    engine = make(order=broken_order(hook)(), max_num_seqs=2)
    for i in range(6):
        options = RequestOptions(tenant=str(i % 2))
        engine.submit(prompt(10 + i, i), greedy(5), request_id=str(i), options=options)
    assert ends_of(drain(engine)) == {str(i): "length" for i in range(6)}
    assert all_is_free(engine)
    assert engine.stats().policy_faults == {"mine": 1}


class NeverRests(Order):
    """Ranks that change each time they are asked for."""

    name = "mine"

    def __init__(self) -> None:
        self.asked = 0

    def key(self, request: Request) -> tuple[int, ...]:
        return (request.arrival_seq,)

    def lane(self, request: Request) -> str:
        return request.tenant

    def rank(self, lane: str) -> tuple[int, ...]:
        self.asked += 1
        return (self.asked * 7919 % 101,)


def test_ranks_that_never_rest_do_not_hold_up_a_step(make: PolicyEngine) -> None:
    engine = make(order=NeverRests(), max_num_seqs=2)
    for i in range(6):
        engine.submit(prompt(10 + i, i), greedy(5), request_id=str(i), options=RequestOptions(tenant=str(i % 3)))
    assert ends_of(drain(engine)) == {str(i): "length" for i in range(6)}


class ForgetsToLearn(Capacity):
    name = "mine"

    def judge(self, request: Request, prefix: Any, whole_in_step: bool, num_running: int) -> Verdict:
        return Verdict(None)

    def ended(self, request: Request) -> None:
        raise KeyError("lengths")


@pytest.mark.filterwarnings("ignore:The scheduling policy:RuntimeWarning")
def test_a_capacity_that_breaks_at_an_end_hurts_nobody(make: PolicyEngine) -> None:
    engine = make(capacity=ForgetsToLearn)
    engine.submit(prompt(10), greedy(5), request_id="a")
    assert ends_of(drain(engine)) == {"a": "length"}
    assert engine.stats().policy_faults == {"mine": 1}


def test_a_capacity_may_not_take_over_the_forecast(make: PolicyEngine) -> None:
    changed = type("Changed", (ForgetsToLearn,), {"left": lambda self, request: None})
    with pytest.raises(InvalidRequest, match=r"capacity 'mine' has its own left\(\)"):
        make(capacity=changed)
    with pytest.raises(InvalidRequest, match="must be a class derived from"):
        make(capacity=object.__new__(ForgetsToLearn))
