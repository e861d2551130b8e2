"""The trace is in the format that its readers want, and tells of the same waits as the ledger."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.decision_log import DecisionLog
from pyengine.scheduler.trace import COLOURS, ENGINE, FIRST_TRACK, REQUESTS, chrome_trace, save_trace
from pyengine.scheduler.verdict import Reason, Verdict

from .driven_log import DrivenLog, one_step
from .one_by_one import ACTIONS, OneByOne

REQUIRED = {
    "X": {"ph", "pid", "tid", "ts", "dur", "name"},
    "C": {"ph", "pid", "ts", "name", "args"},
    "M": {"ph", "pid", "name", "args"},
    "i": {"ph", "pid", "tid", "ts", "s", "name"},
}


def check_format(trace: dict[str, Any]) -> None:
    """What Chrome's Trace Event Format requires of the kinds of events that are used."""
    assert json.loads(json.dumps(trace)) == trace
    ends: dict[tuple[int, int], int] = {}
    for event in trace["traceEvents"]:
        assert REQUIRED[event["ph"]] <= set(event)
        assert event["pid"] in (REQUESTS, ENGINE)
        assert event.get("tid") != 0, "Perfetto takes thread 0 of all processes for the same one"
        if event["ph"] == "M":
            continue
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        if event["ph"] == "X":
            assert event["dur"] >= 0
            track = event["pid"], event["tid"]
            assert event["ts"] >= ends.get(track, 0), "slices of a track do not overlap"
            ends[track] = event["ts"] + event["dur"]


def slices(trace: dict[str, Any], pid: int, number: int) -> list[tuple[str, int, int]]:
    """Of one track, by its number from 0 on."""
    return [
        (event["name"], event["ts"], event["dur"])
        for event in trace["traceEvents"]
        if event["ph"] == "X" and (event["pid"], event["tid"]) == (pid, number + FIRST_TRACK)
    ]


def a_life() -> DrivenLog:
    driven = DrivenLog()
    request, other = driven.arrive("A"), driven.arrive("B")
    driven.at(1)
    driven.begin()
    driven.start(request)
    driven.log.waits(other, Verdict(Reason.KV_NOW, 7, 3), request)
    driven.log.reserved(other, 5)
    driven.log.rest_waits(Reason.BEHIND_HEAD)
    driven.plan(predicted_ns=3_500_000, stop_reason=Reason.KV_NOW)
    driven.at(4)
    driven.commit()
    one_step(driven, 2)
    driven.begin()
    driven.preempt(request)
    driven.log.reserved(other, 6)
    driven.log.rest_waits(Reason.BEHIND_HEAD)
    driven.plan()
    driven.at(9)
    driven.begin()
    driven.start(request)
    driven.plan()
    driven.at(10)
    driven.commit()
    driven.at(12)
    driven.end(request)
    return driven


def test_a_life_is_drawn_as_waiting_prefill_decode_and_preempted() -> None:
    trace = chrome_trace(a_life().log)
    check_format(trace)
    assert slices(trace, REQUESTS, 0) == [
        ("mid_step", 0, 1000),
        ("prefill", 1000, 3000),
        ("decode", 4000, 2000),
        ("preempted", 6000, 3000),
        ("prefill", 9000, 1000),
        ("decode", 10000, 2000),
    ]
    assert [(name, ts) for name, ts, _ in slices(trace, REQUESTS, 1)] == [
        ("mid_step", 0),
        ("kv_now", 1000),
        ("behind_head", 6000),
    ]
    events = trace["traceEvents"]
    waiting = next(event for event in events if event["name"] == "kv_now")
    assert waiting["args"] == {"step": 0, "need": 7, "had": 3, "by": "A"}
    assert waiting["cname"] == COLOURS[Reason.KV_NOW]
    moved = next(event for event in events if event["ph"] == "i")
    assert (moved["name"], moved["args"]) == ("reserved start moved", {"step": 2, "from step": 5, "to step": 6})
    assert moved["tid"] == 2
    names = {(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name" and e["pid"] == REQUESTS}
    assert names == {(1, "A"), (2, "B")}


def test_steps_are_a_track_with_counters() -> None:
    trace = chrome_trace(a_life().log)
    assert slices(trace, ENGINE, 0) == [
        ("prefill step", 1000, 3000),
        ("decode step", 4000, 2000),
        ("prefill step", 9000, 1000),
    ]
    step = next(event for event in trace["traceEvents"] if event["name"] == "prefill step")
    assert step["args"]["predicted ms"] == 3.5
    assert step["args"]["admissions stopped by"] == "kv_now"
    counters = {event["name"]: event["args"] for event in trace["traceEvents"] if event["ph"] == "C"}
    assert counters == {
        "batch (tokens)": {"decodes": 0, "prefill": 12},
        "KV pool (blocks)": {"used": 26, "cached": 4, "free": 10},
        "KV reserved (blocks)": {"reserved": 3},
        "queue (requests)": {"waiting": 0},
    }


def whole_microseconds(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(name, values[0] // 1000 * 1000) if name == "pass_time" else (name, *values) for name, *values in calls]


def played(calls: list[tuple[Any, ...]], **sizes: Any) -> OneByOne:
    world = OneByOne(**sizes)
    for name, *arguments in whole_microseconds(calls):
        getattr(world, name)(*arguments)
    return world


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_the_slices_of_each_request_are_its_parts_in_the_ledger(calls: list[tuple[Any, ...]]) -> None:
    world = played(calls)
    trace = chrome_trace(world.log, world.now_ns)
    check_format(trace)
    for request in world.requests:
        drawn: defaultdict[str, int] = defaultdict(int)
        everything = slices(trace, REQUESTS, request.arrival_seq)
        for name, _, duration in everything:
            drawn[name] += duration * 1000
        end_ns = world.now_ns if request.finished_ns is None else request.finished_ns
        assert sum(drawn.values()) == end_ns - request.arrival_ns, "no gap"
        parts = {reason.value: ns for reason, ns in world.waited[request].items() if ns}
        assert {name: ns for name, ns in drawn.items() if name not in ("prefill", "decode")} == parts


@settings(max_examples=100, deadline=None)
@given(st.lists(ACTIONS, max_size=60), st.integers(1, 12))
def test_what_left_the_ring_is_not_drawn_and_the_rest_is_the_same(calls: list[tuple[Any, ...]], size: int) -> None:
    whole = played(calls)
    part = played(calls, num_records=size, num_ended=2)
    trace = chrome_trace(part.log, part.now_ns)
    check_format(trace)
    lost = part.log.records.num_lost
    assert trace["otherData"] == {"no longer in the log": {"steps": 0, "records": lost}}
    complete = chrome_trace(whole.log, whole.now_ns)
    if not lost:
        assert [e for e in trace["traceEvents"] if e["ph"] == "X"] == [
            e for e in complete["traceEvents"] if e["ph"] == "X"
        ]
        return
    first_ns = next(part.log.records.rows("at_ns"))[0]
    shift = (first_ns - next(whole.log.records.rows("at_ns"))[0]) // 1000
    at = [slices(complete, REQUESTS, number) for number in range(len(whole.requests))]
    for number, drawn in enumerate(at):
        for name, ts, duration in slices(trace, REQUESTS, number):
            if name.startswith("waiting"):  # why is not known any more
                continue
            holders = [
                n for n, start, length in drawn if start <= ts + shift and ts + shift + duration <= start + length
            ]
            assert holders == [name]


def test_a_reason_that_changes_all_the_time_is_drawn_as_one_slice() -> None:
    world = OneByOne()
    world.arrive()
    for step in range(200):
        world.step([], (Reason.BEHIND_HEAD, Reason.MAX_SEQS)[step % 2])
        world.pass_time(1000)
    assert [name for name, _, _ in slices(chrome_trace(world.log, world.now_ns), REQUESTS, 0)] == [
        "waiting (reasons in turn)"
    ]


def test_one_of_which_the_ring_has_nothing_is_drawn_with_what_it_waits_for_now() -> None:
    driven = DrivenLog(num_records=4)
    own, shares = driven.arrive("A"), driven.arrive("B")
    driven.begin()
    driven.log.waits(own, Verdict(Reason.KV_NOW, 7, 3))
    driven.log.rest_waits(Reason.BEHIND_HEAD, own)
    driven.at(10)
    for name in "CDEF":
        driven.end(driven.arrive(name), "abort")
    driven.at(15)
    trace = chrome_trace(driven.log, driven.now_ns)
    check_format(trace)
    assert slices(trace, REQUESTS, own.arrival_seq) == [("kv_now", 0, 5000)]
    assert slices(trace, REQUESTS, shares.arrival_seq) == [("behind_head", 0, 5000)]
    driven.begin()
    driven.log.rest_waits(Reason.PAUSED)
    driven.at(17)
    trace = chrome_trace(driven.log, driven.now_ns)
    check_format(trace)
    assert slices(trace, REQUESTS, shares.arrival_seq) == [
        ("waiting (why is no longer in the log)", 0, 5000),
        ("paused", 5000, 2000),
    ]


def test_a_trace_is_saved_as_json(tmp_path: Path) -> None:
    log = a_life().log
    save_trace(log, tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == chrome_trace(log)


def test_an_empty_log_and_one_that_is_off_have_an_empty_trace() -> None:
    for log in (DrivenLog().log, DrivenLog(enabled=False).log):
        assert isinstance(log, DecisionLog)
        trace = chrome_trace(log)
        check_format(trace)
        assert {event["ph"] for event in trace["traceEvents"]} == {"M"}


def test_every_reason_has_a_colour() -> None:
    assert set(COLOURS) == set(Reason)
