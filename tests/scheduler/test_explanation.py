"""An explanation says what a request waited for, with numbers and names, as far as that is known."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pyengine.request import Request
from pyengine.scheduler.explanation import WAITS_FOR, Explanation
from pyengine.scheduler.verdict import Reason, Verdict

from .driven_log import MS, DrivenLog


def blocked_head() -> tuple[DrivenLog, dict[str, Request]]:
    """A runs with 20 of 40 blocks; B needs 30; C to J need 2 each and pass, all but J."""
    driven = DrivenLog()
    requests = {"A": driven.arrive("A")}
    driven.at(1)
    driven.begin()
    driven.start(requests["A"])
    driven.log.rest_waits(Reason.BEHIND_HEAD)
    driven.plan()
    driven.at(3)
    head = requests["B"] = driven.arrive("B")
    driven.at(5)
    driven.commit()
    requests.update((name, driven.arrive(name)) for name in "CDEFGHIJ")
    driven.begin()
    driven.log.waits(head, Verdict(Reason.KV_PEAK, 30, 20))
    driven.log.reserved(head, 4)
    for name in "CDEFGHI":
        driven.start(requests[name], [head])
    driven.log.waits(requests["J"], Verdict(Reason.WOULD_DELAY_HEAD, 2, 1), head)
    driven.log.rest_waits(Reason.BEHIND_HEAD, head)
    driven.plan(waiting=2, stop_reason=Reason.KV_PEAK)
    driven.at(12)
    driven.commit()
    driven.begin()
    driven.log.waits(head, Verdict(Reason.KV_PEAK, 30, 6))
    driven.log.reserved(head, 4)
    driven.log.waits(requests["J"], Verdict(Reason.MAX_SEQS, 1, 0), head)
    driven.log.rest_waits(Reason.BEHIND_HEAD, head)
    driven.plan(waiting=2)
    return driven, requests


def test_a_blocked_head_is_told_what_it_needed_what_there_was_and_who_passed() -> None:
    driven, requests = blocked_head()
    driven.at(20)
    driven.commit()
    driven.begin()
    driven.start(requests["B"])
    driven.plan()
    driven.at(25)
    driven.commit()
    driven.end(requests["B"], "stop")
    explained = driven.log.explain(requests["B"])
    assert explained.queue_ns == requests["B"].queue_ns == 17 * MS
    assert explained.wait_ns == {Reason.KV_PEAK: 15 * MS, Reason.MID_STEP: 2 * MS}
    part = explained.part(Reason.KV_PEAK)
    assert part is not None
    assert (part.need, part.had, part.had_least, part.had_most, part.unit) == (30, 20, 6, 20, "blocks")
    assert (part.first_step, part.last_step) == (1, 2)
    assert part.share == pytest.approx(15 / 17)
    assert (explained.passed_by, explained.num_passed_by) == (tuple("CDEFGHI"), 7)
    assert (explained.reserved_step, explained.num_reservation_moves, explained.num_reservations_void) == (4, 0, 0)
    assert (explained.started_s, explained.first_token_s, explained.finished_s) == (0.017, 0.022, 0.022)
    assert (explained.arrived_step, explained.started_step, explained.ended_step) == (0, 3, 3)
    assert str(explained) == (
        "Request B: finished (stop), 10 prompt tokens, 1 of at most 8 output tokens\n"
        "  started after 17.000 ms (step 3), first token after 22.000 ms, ended after 22.000 ms\n"
        "  waited 17.000 ms for\n"
        "     15.000 ms  88.2%  kv_peak   KV blocks, now or when running requests grow: "
        "need 30 blocks, had 20 (6 to 20)\n"
        "      2.000 ms  11.8%  mid_step  the next step to begin\n"
        "  passed by C, D, E, F, G (+2)\n"
        "  reserved start, as forecast: step 4, never moved"
    )


def test_one_that_waits_is_explained_up_to_now_in_the_middle_of_a_step() -> None:
    driven, requests = blocked_head()
    driven.at(16)
    explained = driven.log.explain(requests["J"], driven.now_ns)
    assert explained.wait_ns == {Reason.WOULD_DELAY_HEAD: 7 * MS, Reason.MAX_SEQS: 4 * MS}
    assert explained.queue_ns == requests["J"].queue_ns_at(driven.now_ns)
    assert explained.waits_for is Reason.MAX_SEQS
    assert "It has not ended" in explained.notes[0]
    assert "need 1 seats, had 0; in its way: B (now)" in str(explained)
    assert explained.at_s == 0.011


def test_the_reason_of_now_is_told_even_if_no_time_has_passed() -> None:
    driven = DrivenLog()
    request = driven.arrive("A")
    assert driven.log.explain(request).wait_ns == {Reason.MID_STEP: 0}
    driven.begin()
    driven.log.rest_waits(Reason.PAUSED)
    assert driven.log.explain(request).wait_ns == {Reason.PAUSED: 0}


def test_one_that_shares_its_reason_is_told_who_is_in_the_way() -> None:
    driven = DrivenLog()
    head, last = driven.arrive("head"), driven.arrive("last")
    driven.begin()
    driven.log.waits(head, Verdict(Reason.KV_NOW, 9, 4))
    driven.log.rest_waits(Reason.BEHIND_HEAD, head)
    driven.at(4)
    part = driven.log.explain(last, driven.now_ns).part(Reason.BEHIND_HEAD)
    assert part is not None
    assert (part.wait_ns, part.by, part.need) == (4 * MS, ("head",), None)


def test_a_preempted_one_waits_for_that_whatever_it_lacks_and_says_what() -> None:
    driven = DrivenLog()
    request = driven.arrive("A", num_tokens=20)
    driven.begin()
    driven.start(request)
    driven.plan()
    driven.at(2)
    driven.commit()
    driven.begin()
    driven.preempt(request)
    driven.log.rest_waits(Reason.BEHIND_HEAD)
    driven.at(3)
    for verdict in (Verdict(Reason.MAX_SEQS, 1, 0), Verdict(Reason.KV_NOW, 3, 2), Verdict(Reason.KV_NOW, 3, 1)):
        driven.begin()
        driven.log.waits(request, verdict)
        driven.log.rest_waits(Reason.BEHIND_HEAD)
        driven.now_ns += MS
    request.num_recomputed_tokens = 20
    explained = driven.log.explain(request, driven.now_ns)
    part = explained.part(Reason.PREEMPTED)
    assert part is not None
    assert explained.wait_ns == {Reason.PREEMPTED: 4 * MS}
    assert explained.queue_ns == request.queue_ns_at(driven.now_ns)
    assert (part.lacked, part.need, part.had, part.had_least, part.unit) == (Reason.KV_NOW, 3, 2, 1, "blocks")
    assert "room to be computed again: kv_now, need 3 blocks, had 2 (1 to 2)" in str(explained)
    assert "preempted once: 20 tokens computed again" in str(explained)


def test_a_held_one_says_what_for() -> None:
    driven = DrivenLog()
    request = driven.arrive("A")
    driven.log.held(request, "its grammar", driven.now_ns)
    driven.at(3)
    driven.log.woken(request, driven.now_ns)
    driven.at(4)
    explained = driven.log.explain(request, driven.now_ns)
    assert explained.wait_ns == {Reason.HELD: 3 * MS, Reason.MID_STEP: MS}
    assert "something outside the scheduler: its grammar" in str(explained)


def test_a_reserved_start_that_becomes_later_is_told_and_an_earlier_one_is_not_a_move() -> None:
    driven = DrivenLog()
    head = driven.arrive("A")
    for start_step in (None, 9, 7, 7, 8, None):
        driven.begin()
        driven.log.reserved(head, start_step)
    explained = driven.log.explain(head)
    assert explained.num_reservation_moves == 2
    assert explained.num_reservations == 1
    assert "reserved start, as forecast: no finite one, moved 2 times" in str(explained)
    assert driven.log.stats().num_reservation_moves == 2


def test_a_reservation_ends_with_the_start_and_the_next_one_after_a_preemption_is_another() -> None:
    driven = DrivenLog()
    head = driven.arrive("A")
    driven.begin()
    driven.log.reserved(head, 3)
    driven.begin()
    driven.start(head)
    driven.plan()
    driven.commit()
    driven.begin()
    driven.preempt(head)
    driven.log.reserved(head, 90)
    explained = driven.log.explain(head)
    assert (explained.num_reservations, explained.num_reservation_moves) == (2, 0)


def test_one_that_shares_is_told_the_first_and_the_last_that_were_in_the_way() -> None:
    driven = DrivenLog()
    first, second, last = (driven.arrive(name) for name in "ABC")
    for head in (first, second):
        driven.begin()
        driven.log.waits(head, Verdict(Reason.KV_NOW, 9, 4))
        driven.log.rest_waits(Reason.BEHIND_HEAD, head)
    driven.at(1)
    driven.end(last, "abort")
    part = driven.log.explain(last).part(Reason.BEHIND_HEAD)
    assert part is not None
    assert (part.by, part.first_step) == (("A", "B"), 0)


def test_a_reservation_is_void_when_another_one_is_the_head_and_begins_anew_afterwards() -> None:
    driven = DrivenLog()
    head, better, best = driven.arrive("A"), driven.arrive("B"), driven.arrive("C")
    driven.begin()
    driven.log.reserved(head, 3)
    driven.begin()
    driven.log.reserved(better, 8)
    driven.begin()
    driven.log.void_reservation(better, best)
    driven.begin()
    driven.log.reserved(head, 30)
    first, second = driven.log.explain(head), driven.log.explain(better)
    assert (first.num_reservations, first.num_reservation_moves, first.voided_by) == (2, 0, ("B",))
    assert (second.num_reservations, second.num_reservation_moves, second.voided_by) == (1, 0, ("C",))
    assert "reserved start, as forecast: step 30, never moved, void once by B" in str(first)


def test_each_sequence_of_a_submit_is_explained() -> None:
    driven = DrivenLog()
    first = driven.arrive("A", n=3)
    assert first.group is not None
    second = first.group.requests[1]
    driven.at(5)
    driven.begin()
    driven.start(first)
    driven.log.waits(second, Verdict(Reason.SHARED_PREFIX_PENDING))
    driven.log.rest_waits(Reason.BEHIND_HEAD)
    driven.at(6)
    explained = driven.log.explain_id("A", driven.now_ns)
    assert [(one.index, one.label, one.state) for one in explained] == [
        (0, "A[0]", "prefill"),
        (1, "A[1]", "waiting"),
        (2, "A[2]", "waiting"),
    ]
    assert [one.queue_ns for one in explained] == [5 * MS, 6 * MS, 6 * MS]
    assert explained[1].wait_ns == {Reason.MID_STEP: 5 * MS, Reason.SHARED_PREFIX_PENDING: MS}


def test_the_latest_submit_of_an_id_is_explained() -> None:
    driven = DrivenLog()
    driven.end(driven.arrive("A", num_tokens=5), "abort")
    driven.arrive("A", num_tokens=7)
    (explained,) = driven.log.explain_id("A")
    assert (explained.state, explained.num_prompt_tokens) == ("waiting", 7)


def test_an_id_that_comes_again_while_some_of_its_first_submit_are_known_is_another_submit() -> None:
    driven = DrivenLog(num_ended=1)
    first = driven.arrive("A", n=2)
    driven.end(first, "abort")
    driven.end(driven.arrive("B"), "abort")
    driven.arrive("A", n=3)
    assert [one.label for one in driven.log.explain_id("A")] == ["A[0]", "A[1]", "A[2]"]
    assert [one.state for one in driven.log.explain_id("A")] == ["waiting"] * 3


def test_those_that_left_the_ring_are_unknown_by_id_and_say_so() -> None:
    driven = DrivenLog(num_ended=2)
    (never,) = driven.log.explain_id("A")
    assert never.state == "unknown"
    assert never.notes == ("No request of this id was accepted.",)
    first = driven.arrive("A", n=2)
    assert first.group is not None
    sibling = first.group.requests[1]
    driven.at(3)
    driven.end(first, "abort")
    for name in "BC":
        driven.end(driven.arrive(name), "abort")
    gone, live = driven.log.explain_id("A", driven.now_ns)
    assert (gone.state, gone.index, live.state, live.index) == ("unknown", 0, "waiting", 1)
    assert "the 2 requests that are kept ended later" in str(gone)
    assert driven.log.explain(first).queue_ns == 3 * MS, "who still holds the request still has its record"
    driven.end(sibling, "abort")
    driven.end(driven.arrive("D"), "abort")
    driven.end(driven.arrive("E"), "abort")
    (unknown,) = driven.log.explain_id("A")
    assert (unknown.state, unknown.queue_ns, unknown.parts) == ("unknown", 0, ())


def test_an_ended_one_is_explained_without_its_tokens_being_kept() -> None:
    driven = DrivenLog()
    request = driven.arrive("A")
    driven.at(2)
    driven.end(request, "abort")
    (explained,) = driven.log.explain_id("A")
    assert explained == driven.log.explain(request)
    assert (explained.state, explained.finish_reason, explained.at_s) == ("finished", "abort", 0.002)
    assert [record.request for record in driven.log.known()] == [None]


def test_without_a_log_an_explanation_has_what_the_request_itself_knows() -> None:
    driven = DrivenLog(enabled=False)
    request = driven.arrive("A")
    driven.at(3)
    driven.begin()
    driven.start(request)
    driven.plan()
    explained = driven.log.explain(request)
    assert (explained.state, explained.queue_ns, explained.parts) == ("decode", 3 * MS, ())
    assert "log is off" in explained.notes[0]
    assert driven.log.explain_id("A")[0].notes == ("The decision log is off.",)


@dataclass
class MoreMemory:
    def to_dict(self) -> dict[str, Any]:
        return {"change": "+15 % KV"}

    def __str__(self) -> str:
        return "+15 % KV: 5.1 s earlier"


def test_an_explanation_is_json_and_what_ifs_have_their_place() -> None:
    driven, requests = blocked_head()
    explained = replace(driven.log.explain(requests["B"]), what_ifs=(MoreMemory(),))
    data = json.loads(json.dumps(explained.to_dict()))
    assert data["wait_ns"] == {"kv_peak": 7 * MS, "mid_step": 2 * MS}
    assert sum(data["wait_ns"].values()) == data["queue_ns"]
    assert data["waits_for"] == data["parts"][0]["reason"] == "kv_peak"
    assert data["what_ifs"] == [{"change": "+15 % KV"}]
    assert set(data) >= {"request_id", "index", "started_s", "passed_by", "num_preemptions", "notes"}
    assert "what if +15 % KV: 5.1 s earlier" in str(explained)


def test_every_reason_has_its_words() -> None:
    assert set(WAITS_FOR) == set(Reason)
    assert isinstance(blocked_head()[0].log.explain_id("A")[0], Explanation)
