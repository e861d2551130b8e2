"""The decision log keeps the last rows and requests, writes on change only, and does nothing when it is off."""

from __future__ import annotations

from pyengine.scheduler.ledger import INDEX
from pyengine.scheduler.log_tables import DECODES, ENDED, PREFILLS, SHARED, SHARES
from pyengine.scheduler.verdict import Reason, Verdict

from .driven_log import MS, DrivenLog, one_step


def rows(driven: DrivenLog) -> list[tuple[int, ...]]:
    return list(driven.log.records.rows("key", "code", "need", "have", "by"))


def test_a_record_is_written_only_when_the_reason_or_who_is_in_the_way_changes() -> None:
    driven = DrivenLog()
    head, other = driven.arrive("A"), driven.arrive("B")
    number = driven.log.records.number
    for have in (20, 18, 22):
        driven.begin()
        driven.log.waits(head, Verdict(Reason.KV_PEAK, 30, have))
        driven.log.waits(other, Verdict(Reason.KV_PEAK, 3, 2), head)
        driven.log.rest_waits(Reason.BEHIND_HEAD, head)
    assert rows(driven)[number:] == [
        (0, INDEX[Reason.KV_PEAK], 30, 20, -1),
        (1, INDEX[Reason.KV_PEAK], 3, 2, 0),
        (SHARED, INDEX[Reason.BEHIND_HEAD], 0, 0, 0),
    ]
    driven.begin()
    driven.log.waits(head, Verdict(Reason.MAX_SEQS, 1, 0))
    driven.log.waits(other, Verdict(Reason.KV_PEAK, 3, 2))
    driven.log.rest_waits(Reason.BEHIND_HEAD, head)
    assert rows(driven)[number + 3 :] == [
        (0, INDEX[Reason.MAX_SEQS], 1, 0, -1),
        (1, INDEX[Reason.KV_PEAK], 3, 2, -1),
    ]


def test_a_request_leaves_a_record_at_each_turn_of_its_life() -> None:
    driven = DrivenLog()
    request = driven.arrive("A")
    driven.begin()
    driven.log.rest_waits(Reason.PAUSED)
    driven.begin()
    driven.start(request)
    driven.plan()
    driven.commit()
    one_step(driven, 1)
    driven.end(request)
    assert [row[:2] for row in rows(driven)] == [
        (0, INDEX[Reason.MID_STEP]),
        (SHARED, INDEX[Reason.PAUSED]),
        (0, SHARES),
        (0, PREFILLS),
        (0, DECODES),
        (0, ENDED),
    ]


def test_a_row_of_each_pass_has_its_numbers() -> None:
    driven = DrivenLog()
    driven.begin()
    driven.start(driven.arrive("A", num_tokens=12))
    driven.plan(
        free=9,
        cached=2,
        reserved=1,
        waiting=5,
        budget=50,
        bound_by=Reason.LATENCY_LIMIT,
        predicted_ns=77,
        stop_reason=Reason.KV_NOW,
    )
    start_ns = driven.now_ns
    assert list(driven.log.steps.rows("real_ns")) == [(-1,)]
    driven.now_ns += 8 * MS
    driven.commit()
    names = tuple(driven.log.steps.columns)
    (row,) = driven.log.steps.rows(*names)
    assert dict(zip(names, row, strict=True)) == {
        "step": 0,
        "start_ns": start_ns,
        "predicted_ns": 77,
        "real_ns": 8 * MS,
        "sequences": 1,
        "decodes": 0,
        "prefill_tokens": 12,
        "budget": 50,
        "bound_by": INDEX[Reason.LATENCY_LIMIT],
        "stop_reason": INDEX[Reason.KV_NOW],
        "free_blocks": 9,
        "cached_blocks": 2,
        "reserved_blocks": 1,
        "waiting": 5,
        "ahead": 0,
    }


def test_an_empty_plan_has_no_row() -> None:
    driven = DrivenLog()
    one_step(driven, 1)
    assert driven.log.steps.number == 0
    assert driven.log.stats().num_steps == 0


def test_memory_is_fixed_however_much_happens() -> None:
    driven = DrivenLog(num_steps=8, num_records=16, num_ended=4)
    for i in range(100):
        request = driven.arrive(f"r{i % 10}")
        driven.begin()
        driven.start(request)
        driven.plan()
        driven.now_ns += MS
        driven.commit()
        driven.end(request)
    log = driven.log
    assert [len(column) for column in log.steps.columns.values()] == [8] * len(log.steps.columns)
    assert [len(column) for column in log.records.columns.values()] == [16] * len(log.records.columns)
    assert [row[0] for row in log.steps.rows("step")] == list(range(92, 100))
    assert log.steps.num_lost == 92
    assert [record.label for record in log.known()] == ["r6", "r7", "r8", "r9"]
    assert len(log._submits) == 4
    assert not log._examined
    assert not log.live
    assert log.totals.num_ended == 100


def test_an_off_log_keeps_nothing() -> None:
    driven = DrivenLog(enabled=False)
    request, other = driven.arrive("A"), driven.arrive("B")
    driven.begin()
    driven.start(request, [other])
    driven.log.waits(other, Verdict(Reason.KV_NOW, 3, 2), request)
    driven.log.reserved(other, 3)
    driven.log.void_reservation(other, request)
    driven.log.rest_waits(Reason.BEHIND_HEAD)
    driven.plan()
    driven.commit()
    driven.begin()
    driven.preempt(request)
    driven.log.held(other, "a grammar", driven.now_ns)
    driven.log.woken(other, driven.now_ns)
    driven.end(other)
    assert request.log is other.log is None
    assert (driven.log.steps.number, driven.log.records.number) == (0, 0)
    assert list(driven.log.known()) == []
