"""Explanation: why one request waited, as plain data and as a short text. It reads the log and judges nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pyengine.request import QUEUED_STATES, Request
from pyengine.scheduler.ledger import INDEX, REASONS
from pyengine.scheduler.request_record import Facts, RequestRecord
from pyengine.scheduler.verdict import Reason

MAX_NAMES_IN_TEXT = 5

# What a request waits for, in words, and the unit of need and have ("": it has no numbers).
WAITS_FOR: dict[Reason, tuple[str, str]] = {
    Reason.MID_STEP: ("the next step to begin", ""),
    Reason.MAX_SEQS: ("a seat in the batch", "seats"),
    Reason.TOKEN_BUDGET: ("tokens of a step", "tokens"),
    Reason.LATENCY_LIMIT: ("tokens that the inter-token limit leaves", "tokens"),
    Reason.KV_NOW: ("free KV blocks", "blocks"),
    Reason.KV_PEAK: ("KV blocks, now or when running requests grow", "blocks"),
    Reason.WOULD_DELAY_HEAD: ("the head: to pass it would delay it", "blocks"),
    Reason.BYPASS_BUDGET: ("the head: enough have passed it", "tokens"),
    Reason.AGING_BARRIER: ("the head: it waited too long to be passed", ""),
    Reason.BEHIND_HEAD: ("the head, which does not fit", ""),
    Reason.PRIORITY: ("requests of a better class", ""),
    Reason.TENANT_SHARE: ("tenants that had less service", ""),
    Reason.SHARED_PREFIX_PENDING: ("another request to compute a shared prefix", ""),
    Reason.PREEMPTED: ("room to be computed again", ""),
    Reason.HELD: ("something outside the scheduler", ""),
    Reason.STATIC_BATCH: ("the running batch to end", ""),
    Reason.BATCH_WAIT: ("more company for a batch", ""),
    Reason.PAUSED: ("the engine to be resumed", ""),
    Reason.DRAIN: ("nothing: the engine starts no more requests", ""),
}


class WhatIf(Protocol):
    """What another setting would have done, found by replay."""

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able data."""
        ...


@dataclass(frozen=True, slots=True)
class WaitPart:
    """The part of a wait that one reason had.

    Attributes:
        wait_ns / share: how long, and that as a part of the whole wait.
        need / had: what was needed and what there was when it was first found, in `unit`; None if it has no numbers.
        had_least / had_most: the range of what there was in all steps that examined the request for this reason.
        lacked: the reason that the numbers belong to, where that is not `reason`: what a preempted one lacks.
        by: the first of those that were in its way.
        first_step / last_step: the steps that found the reason; None for one that no step finds, such as "mid_step".
    """

    reason: Reason
    wait_ns: int
    share: float
    need: int | None = None
    had: int | None = None
    had_least: int | None = None
    had_most: int | None = None
    unit: str = ""
    lacked: Reason | None = None
    by: tuple[str, ...] = ()
    first_step: int | None = None
    last_step: int | None = None

    @property
    def wait_s(self) -> float:
        """How long, in seconds."""
        return self.wait_ns / 1e9

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able data."""
        return {
            "reason": self.reason.value,
            "wait_ns": self.wait_ns,
            "wait_s": self.wait_s,
            "share": self.share,
            "need": self.need,
            "had": self.had,
            "had_least": self.had_least,
            "had_most": self.had_most,
            "unit": self.unit,
            "lacked": None if self.lacked is None else self.lacked.value,
            "by": list(self.by),
            "first_step": self.first_step,
            "last_step": self.last_step,
        }

    def __str__(self) -> str:
        """What was waited for: "free KV blocks: need 30 blocks, had 20 (4 to 20); in its way: A"."""
        text = WAITS_FOR[self.reason][0]
        if self.lacked is not None:
            text += f": {self.lacked.value}"
        if self.need is not None:
            text += f"{',' if self.lacked else ':'} need {self.need} {self.unit}".rstrip() + f", had {self.had}"
            if self.had_least != self.had_most:
                text += f" ({self.had_least} to {self.had_most})"
        if self.by:
            text += f": {', '.join(self.by)}" if self.reason is Reason.HELD else f"; in its way: {_names(self.by)}"
        return text


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one request waited for, and what else happened to it. Times ending in `_s` are seconds since its arrival.

    Attributes:
        label: its name in texts: the id, and the index if it was submitted with others.
        state: "waiting", "running" ones and so on as RequestState has them; "unknown" if nothing is known of it.
        at_s: the moment up to which this tells: its end, or when it was asked.
        queue_ns: all time accepted and not running; exactly the sum of the parts.
        parts: by reason, the longest first; also what it waits for now, even if not for long yet.
        waits_for: what it waits for now, None if it does not wait.
        passed_by / num_passed_by: the first of those that overtook it while it was blocked, and how many did.
        passed / num_passed: the blocked ones that it overtook.
        num_reservations: how often it was the blocked head and got a reserved start.
        reserved_step: the last of these, a step's number; None if no finite one was known.
        num_reservation_moves: how often a reserved start became later while it held, which must never happen.
        num_reservations_void / voided_by: how often one lost its place as head, to whom first.
        num_recomputed_tokens: tokens computed again after preemptions.
        arrived_step / started_step / ended_step: the last step that had begun at that time; -1: none.
        what_ifs: what other settings would have done, found by replay.
        notes: what is not known and why.
    """

    request_id: str
    index: int
    label: str
    state: str
    at_s: float = 0.0
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    finish_reason: str | None = None
    queue_ns: int = 0
    parts: tuple[WaitPart, ...] = ()
    waits_for: Reason | None = None
    passed_by: tuple[str, ...] = ()
    num_passed_by: int = 0
    passed: tuple[str, ...] = ()
    num_passed: int = 0
    num_reservations: int = 0
    reserved_step: int | None = None
    num_reservation_moves: int = 0
    num_reservations_void: int = 0
    voided_by: tuple[str, ...] = ()
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    max_tokens: int = 0
    arrived_step: int | None = None
    started_step: int | None = None
    ended_step: int | None = None
    what_ifs: tuple[WhatIf, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def wait_ns(self) -> dict[Reason, int]:
        """Nanoseconds by reason, the longest first."""
        return {part.reason: part.wait_ns for part in self.parts}

    @property
    def wait_s(self) -> dict[Reason, float]:
        """Seconds by reason, the longest first."""
        return {part.reason: part.wait_s for part in self.parts}

    @property
    def queue_s(self) -> float:
        """All time accepted and not running, in seconds."""
        return self.queue_ns / 1e9

    def part(self, reason: Reason) -> WaitPart | None:
        """What `reason` had of the wait; None if nothing."""
        return next((part for part in self.parts if part.reason is reason), None)

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able data, reasons by their values."""
        data = {name: getattr(self, name) for name in Explanation.__slots__}
        data.update((name, list(value)) for name, value in data.items() if isinstance(value, tuple))
        data["parts"] = [part.to_dict() for part in self.parts]
        data["wait_ns"] = {part.reason.value: part.wait_ns for part in self.parts}
        data["wait_s"] = {part.reason.value: part.wait_s for part in self.parts}
        data["queue_s"] = self.queue_s
        data["waits_for"] = None if self.waits_for is None else self.waits_for.value
        data["what_ifs"] = [what_if.to_dict() for what_if in self.what_ifs]
        return data

    def __str__(self) -> str:
        lines = [self._headline()]
        if self.state != "unknown":
            lines += [self._times(), *self._waits(), *self._others()]
        lines += [f"what if {what_if}" for what_if in self.what_ifs]
        lines += [f"note: {note}" for note in self.notes]
        return "\n  ".join(lines)

    def _headline(self) -> str:
        state = self.state if self.finish_reason is None else f"{self.state} ({self.finish_reason})"
        if self.state == "unknown":
            return f"Request {self.label}: {state}"
        cached = f", {self.num_cached_tokens} of them cached" if self.num_cached_tokens else ""
        return (
            f"Request {self.label}: {state}, {_count(self.num_prompt_tokens, 'prompt token')}{cached}, "
            f"{self.num_output_tokens} of at most {_count(self.max_tokens, 'output token')}"
        )

    def _times(self) -> str:
        step = "" if self.started_step is None else f" (step {self.started_step})"
        times = (
            ("started", self.started_s, step),
            ("first token", self.first_token_s, ""),
            ("ended", self.finished_s, ""),
        )
        told = [f"{what} after {_seconds(seconds)}{more}" for what, seconds, more in times if seconds is not None]
        if self.started_s is None:
            told.insert(0, "not started")
        return ", ".join(told)

    def _waits(self) -> list[str]:
        if not self.parts:
            return [f"waited {_seconds(self.queue_s)}" if self.queue_ns else "did not wait"]
        width = max(len(part.reason.value) for part in self.parts)
        lines = [f"waited {_seconds(self.queue_s)} for"]
        for part in self.parts:
            now = " (now)" if part.reason is self.waits_for else ""
            lines.append(f"  {_seconds(part.wait_s):>10} {part.share:>6.1%}  {part.reason.value:<{width}}  {part}{now}")
        return lines

    def _others(self) -> list[str]:
        lines = []
        if self.num_passed_by:
            lines.append(f"passed by {_names(self.passed_by, self.num_passed_by)}")
        if self.num_passed:
            lines.append(f"passed {_names(self.passed, self.num_passed)}")
        if self.num_reservations:
            step = "no finite one" if self.reserved_step is None else f"step {self.reserved_step}"
            moves = f"moved {_times_text(self.num_reservation_moves)}" if self.num_reservation_moves else "never moved"
            void = ""
            if self.num_reservations_void:
                by = _names(self.voided_by, self.num_reservations_void)
                void = f", void {_times_text(self.num_reservations_void)} by {by}"
            lines.append(f"reserved start, as forecast: {step}, {moves}{void}")
        if self.num_preemptions:
            lines.append(
                f"preempted {_times_text(self.num_preemptions)}: "
                f"{_count(self.num_recomputed_tokens, 'token')} computed again"
            )
        return lines


def explain_request(
    record: RequestRecord, parts_ns: Sequence[int], waits_for: Reason | None, now_ns: int
) -> Explanation:
    """What `record` tells; `parts_ns` is the wait up to `now_ns` by the reason's place in REASONS."""
    facts = record.facts_now()
    queue_ns = sum(parts_ns)
    parts = [
        _part(record, reason, parts_ns[index], queue_ns)
        for index, reason in enumerate(REASONS)
        if parts_ns[index] or reason is waits_for
    ]
    parts.sort(key=lambda part: -part.wait_ns)
    age = f"{_seconds((now_ns - facts.arrival_ns) / 1e9)} after its arrival"
    notes: tuple[str, ...] = () if record.end_note is None else (record.end_note,)
    if facts.finished_ns is None:
        notes += (f"It has not ended; this is what is known {age}.",)
    return Explanation(
        request_id=record.submit.request_id,
        index=record.sibling,
        label=record.label,
        queue_ns=queue_ns,
        parts=tuple(parts),
        waits_for=waits_for,
        passed_by=record.passed_by.first,
        num_passed_by=record.passed_by.number,
        passed=record.passed.first,
        num_passed=record.passed.number,
        num_reservations=record.num_reservations,
        reserved_step=record.reserved_step,
        num_reservation_moves=record.num_moves,
        num_reservations_void=record.voided_by.number,
        voided_by=record.voided_by.first,
        arrived_step=record.arrived_step,
        started_step=record.started_step,
        ended_step=record.ended_step,
        notes=notes,
        **_from_facts(facts, now_ns),
    )


def unknown_request(request_id: str, index: int, label: str, why: str) -> Explanation:
    """The answer for one of which nothing is known."""
    return Explanation(request_id, index, label, "unknown", notes=(why,))


def unlogged_request(request: Request, why: str) -> Explanation:
    """The answer for one that has no record: what `request` itself tells, up to its last change of state."""
    facts = Facts(request)
    return Explanation(
        request_id=request.request_id,
        index=request.index,
        label=request.request_id if request.group is None else f"{request.request_id}[{request.index}]",
        queue_ns=request.queue_ns,
        notes=(why, "What it waited for is not known; the wait is that up to its last change of state."),
        **_from_facts(facts, request.queued_since_ns if request.state in QUEUED_STATES else request.arrival_ns),
    )


def _from_facts(facts: Facts, now_ns: int) -> dict[str, Any]:
    def since_arrival(at_ns: int | None) -> float | None:
        return None if at_ns is None else (at_ns - facts.arrival_ns) / 1e9

    return {
        "state": facts.state.value,
        "at_s": since_arrival(now_ns if facts.finished_ns is None else facts.finished_ns),
        "started_s": since_arrival(facts.started_ns),
        "first_token_s": since_arrival(facts.first_token_ns),
        "finished_s": since_arrival(facts.finished_ns),
        "finish_reason": facts.finish_reason,
        "num_preemptions": facts.num_preemptions,
        "num_recomputed_tokens": facts.num_recomputed_tokens,
        "num_cached_tokens": facts.num_cached_tokens,
        "num_prompt_tokens": facts.num_prompt_tokens,
        "num_output_tokens": facts.num_output_tokens,
        "max_tokens": facts.max_tokens,
    }


def _part(record: RequestRecord, reason: Reason, wait_ns: int, queue_ns: int) -> WaitPart:
    share = wait_ns / queue_ns if queue_ns else 0.0
    numbers = record.numbers.get(INDEX[reason])
    if reason is Reason.HELD:
        return WaitPart(reason, wait_ns, share, by=record.held_for.first)
    if numbers is None:
        return WaitPart(reason, wait_ns, share)
    has_pair = numbers.need > 0
    return WaitPart(
        reason=reason,
        wait_ns=wait_ns,
        share=share,
        need=numbers.need if has_pair else None,
        # Fewer than none are there where more is expected to be needed than the pool has.
        had=max(0, numbers.had) if has_pair else None,
        had_least=max(0, numbers.least) if has_pair else None,
        had_most=max(0, numbers.most) if has_pair else None,
        unit=WAITS_FOR[numbers.lacked][1] if has_pair else "",
        lacked=None if numbers.lacked is reason else numbers.lacked,
        by=numbers.by,
        first_step=numbers.first_step,
        last_step=numbers.last_step,
    )


def _seconds(seconds: float) -> str:
    if 0 < seconds < 1e-4:
        return f"{seconds * 1e6:.3f} us"
    return f"{seconds * 1e3:.3f} ms" if 0 < seconds < 0.1 else f"{seconds:.3f} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _times_text(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _names(first: Sequence[str], number: int | None = None) -> str:
    """The first few names and how many more there are: "C, D, E (+5)"."""
    shown = first[:MAX_NAMES_IN_TEXT]
    more = (len(first) if number is None else number) - len(shown)
    return ", ".join(shown) + (f" (+{more})" if more > 0 else "")
