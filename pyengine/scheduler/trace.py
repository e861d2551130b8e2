"""Trace: the decision log as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open. Only what the log holds.

    requests   one track each: waiting, by reason; prefill; decode
    engine     a track of steps, and counters of the batch, the KV pool and the queue

Format: Trace Event Format (JSON), with times in whole microseconds since the oldest moment that is told of.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pyengine.request import RequestState
from pyengine.scheduler.decision_log import DecisionLog
from pyengine.scheduler.ledger import INDEX, REASONS
from pyengine.scheduler.log_tables import DECODES, ENDED, MOVED, NO_STEP, PREFILLS, SHARED, SHARES, VOID
from pyengine.scheduler.request_record import NOBODY
from pyengine.scheduler.verdict import Reason

REQUESTS, ENGINE = 1, 2  # the two "processes"; their tracks are "threads", request n on n + FIRST_TRACK
FIRST_TRACK = 1  # Perfetto takes thread 0 of all processes for the same one, and drops what overlaps there
MAX_SHARED_SLICES = 64  # in one stretch of sharing; if the reason changed more often it is drawn as one
UNKNOWN, SEVERAL = 106, 107  # codes of slices only

# Names of chrome://tracing's palette. Perfetto colours by the slice's name, which is the reason.
COLOURS = {
    Reason.MID_STEP: "grey",
    Reason.MAX_SEQS: "thread_state_runnable",
    Reason.TOKEN_BUDGET: "yellow",
    Reason.LATENCY_LIMIT: "olive",
    Reason.KV_NOW: "terrible",
    Reason.KV_PEAK: "bad",
    Reason.WOULD_DELAY_HEAD: "rail_animation",
    Reason.BYPASS_BUDGET: "rail_response",
    Reason.AGING_BARRIER: "thread_state_iowait",
    Reason.BEHIND_HEAD: "thread_state_uninterruptible",
    Reason.PRIORITY: "rail_load",
    Reason.TENANT_SHARE: "rail_idle",
    Reason.SHARED_PREFIX_PENDING: "generic_work",
    Reason.PREEMPTED: "black",
    Reason.HELD: "thread_state_sleeping",
    Reason.STATIC_BATCH: "cq_build_attempt_failed",
    Reason.BATCH_WAIT: "cq_build_attempt_runnig",  # spelled like that in the palette
    Reason.PAUSED: "white",
    Reason.DRAIN: "white",
}
NAMES = {
    **{INDEX[reason]: reason.value for reason in REASONS},
    PREFILLS: "prefill",
    DECODES: "decode",
    UNKNOWN: "waiting (why is no longer in the log)",
    SEVERAL: "waiting (reasons in turn)",
}
SLICE_COLOURS = {
    **{INDEX[reason]: colour for reason, colour in COLOURS.items()},
    PREFILLS: "thread_state_running",
    DECODES: "good",
    UNKNOWN: "thread_state_unknown",
    SEVERAL: "thread_state_unknown",
}


@dataclass(slots=True)
class Slice:
    """One stretch of a request's life: `code` is a reason's place, PREFILLS or DECODES, or one of this module."""

    start_ns: int
    end_ns: int
    code: int
    args: dict[str, Any]


def chrome_trace(log: DecisionLog, now_ns: int | None = None) -> dict[str, Any]:
    """The log as JSON-able data; what has not ended goes up to `now_ns` (None: the last moment the log heard of)."""
    until_ns = max(log.now_ns, now_ns or 0)
    rows = list(log.records.rows(*log.records.columns))
    steps = list(log.steps.rows(*log.steps.columns))
    start_column = list(log.steps.columns).index("start_ns")
    origin_ns = min([row[2] for row in rows[:1]] + [row[start_column] for row in steps[:1]], default=until_ns)
    labels = {record.key: record.label for record in log.known()}
    events: list[dict[str, Any]] = [
        _metadata(REQUESTS, None, "process_name", name="requests"),
        _metadata(ENGINE, None, "process_name", name="engine"),
        _metadata(ENGINE, FIRST_TRACK, "thread_name", name="steps"),
    ]
    for key, slices in sorted(_request_slices(log, rows, labels, origin_ns, until_ns).items()):
        track = key + FIRST_TRACK
        events.append(_metadata(REQUESTS, track, "thread_name", name=_label(labels, key)))
        events.append(_metadata(REQUESTS, track, "thread_sort_index", sort_index=key))
        events += _slice_events(key, slices, origin_ns)
    events += _reservation_events(rows, labels, origin_ns)
    names = list(log.steps.columns)
    for row in steps:
        events += _step_events(dict(zip(names, row, strict=True)), log.config.num_blocks, origin_ns, until_ns)
    lost = {"steps": log.steps.num_lost, "records": log.records.num_lost}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"no longer in the log": lost}}


def save_trace(log: DecisionLog, path: str | os.PathLike[str], now_ns: int | None = None) -> None:
    """Write chrome_trace() to `path`. Raises OSError if it cannot be written."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(chrome_trace(log, now_ns), file, separators=(",", ":"))


# ---- Requests


def _request_slices(
    log: DecisionLog, rows: list[tuple[int, ...]], labels: dict[int, str], origin_ns: int, until_ns: int
) -> dict[int, list[Slice]]:
    """For each request that the rows tell of, or that lives, its stretches in the order of time, without gaps."""
    shared = _SharedReason(log, rows, until_ns)
    opened: dict[int, list[Slice]] = {}
    for key, step, at_ns, code, need, have, by in rows:
        if key == SHARED or code in (MOVED, VOID):
            continue
        slices = opened.setdefault(key, [])
        if slices:
            slices[-1].end_ns = at_ns
        if code == ENDED:
            continue
        args: dict[str, Any] = {"step": step}
        if need:
            args.update(need=need, had=have)
        if by != NOBODY:
            args["by"] = _label(labels, by)
        slices.append(Slice(at_ns, until_ns, code, args))
    for key, record in log.live.items():
        if key not in opened:  # nothing about it changed for so long that the ring has no row of it
            opened[key] = [Slice(max(record.since_ns, origin_ns), until_ns, _code_now(log, key), {})]
    return {key: _merged(piece for part in slices for piece in shared.resolve(part)) for key, slices in opened.items()}


def _code_now(log: DecisionLog, key: int) -> int:
    record = log.live[key]
    if record.snapshot is not None:
        return SHARES
    if record.index >= 0:
        return record.index
    assert record.request is not None
    return DECODES if record.request.state is RequestState.DECODE else PREFILLS


class _SharedReason:
    """What those that share waited for, in the course of time."""

    def __init__(self, log: DecisionLog, rows: list[tuple[int, ...]], until_ns: int) -> None:
        changes = [(at_ns, code) for key, _, at_ns, code, *_ in rows if key == SHARED]
        self._times = [at_ns for at_ns, _ in changes]
        self._codes = [code for _, code in changes]
        is_unknown = bool(changes) and log.records.num_lost > 0
        self._before = UNKNOWN if is_unknown else INDEX[log.ledger.shared_reason]
        self._until_ns = until_ns

    def resolve(self, part: Slice) -> Iterator[Slice]:
        """`part` itself, or what it consists of if its request shared."""
        if part.code != SHARES:
            yield part
            return
        first = bisect_right(self._times, part.start_ns)
        last = bisect_right(self._times, part.end_ns, lo=first)
        if last - first > MAX_SHARED_SLICES:
            yield Slice(part.start_ns, part.end_ns, SEVERAL, part.args)
            return
        code = self._codes[first - 1] if first else self._before
        bounds = [part.start_ns, *self._times[first:last], part.end_ns]
        for (start_ns, end_ns), here in zip(pairwise(bounds), [code, *self._codes[first:last]], strict=True):
            yield Slice(start_ns, end_ns, here, part.args)


def _merged(slices: Iterator[Slice]) -> list[Slice]:
    """Without empty ones, and those that follow with the same code as one; the first one's arguments stand for all."""
    merged: list[Slice] = []
    for part in slices:
        if part.end_ns <= part.start_ns:
            continue
        if merged and merged[-1].code == part.code and merged[-1].end_ns == part.start_ns:
            merged[-1].end_ns = part.end_ns
        else:
            merged.append(part)
    return merged


def _slice_events(key: int, slices: list[Slice], origin_ns: int) -> Iterator[dict[str, Any]]:
    for part in slices:
        start_us, end_us = _us(part.start_ns, origin_ns), _us(part.end_ns, origin_ns)
        if end_us > start_us:
            yield {
                "ph": "X",
                "pid": REQUESTS,
                "tid": key + FIRST_TRACK,
                "ts": start_us,
                "dur": end_us - start_us,
                "name": NAMES[part.code],
                "cat": "run" if part.code in (PREFILLS, DECODES) else "wait",
                "cname": SLICE_COLOURS[part.code],
                "args": part.args,
            }


def _reservation_events(
    rows: list[tuple[int, ...]], labels: dict[int, str], origin_ns: int
) -> Iterator[dict[str, Any]]:
    for key, step, at_ns, code, need, have, by in rows:
        if code not in (MOVED, VOID):
            continue
        args: dict[str, Any] = {"step": step}
        if code == MOVED:
            args.update({"from step": need, "to step": None if have == NO_STEP else have})
        else:
            args["by"] = _label(labels, by)
        name = "reserved start moved" if code == MOVED else "reserved start void"
        yield {
            "ph": "i",
            "pid": REQUESTS,
            "tid": key + FIRST_TRACK,
            "ts": _us(at_ns, origin_ns),
            "s": "t",
            "name": name,
            "cat": "reservation",
            "args": args,
        }


# ---- Steps


def _step_events(row: dict[str, int], num_blocks: int, origin_ns: int, until_ns: int) -> Iterator[dict[str, Any]]:
    start_us = _us(row["start_ns"], origin_ns)
    end_us = _us(until_ns if row["real_ns"] < 0 else row["start_ns"] + row["real_ns"], origin_ns)
    kind = "mixed" if row["decodes"] and row["prefill_tokens"] else "decode" if row["decodes"] else "prefill"
    yield {
        "ph": "X",
        "pid": ENGINE,
        "tid": FIRST_TRACK,
        "ts": start_us,
        "dur": max(0, end_us - start_us),
        "name": f"{kind} step",
        "cat": "step",
        "args": {
            "step": row["step"],
            "sequences": row["sequences"],
            "decodes": row["decodes"],
            "prefill tokens": row["prefill_tokens"],
            "budget": row["budget"],
            "bound by": _reason(row["bound_by"]),
            "admissions stopped by": _reason(row["stop_reason"]),
            "predicted ms": row["predicted_ns"] / 1e6 if row["predicted_ns"] else None,
        },
    }
    free, cached = row["free_blocks"], row["cached_blocks"]
    counters: dict[str, dict[str, int]] = {
        "batch (tokens)": {"decodes": row["decodes"], "prefill": row["prefill_tokens"]},
        "KV pool (blocks)": {"used": num_blocks - free - cached, "cached": cached, "free": free},
        "KV reserved (blocks)": {"reserved": row["reserved_blocks"]},
        "queue (requests)": {"waiting": row["waiting"]},
    }
    for name, values in counters.items():
        yield {"ph": "C", "pid": ENGINE, "ts": start_us, "name": name, "args": values}


def _reason(index: int) -> str | None:
    return REASONS[index].value if index >= 0 else None


# ---- Details


def _metadata(pid: int, tid: int | None, kind: str, **args: Any) -> dict[str, Any]:
    event = {"ph": "M", "pid": pid, "name": kind, "args": args}
    return event if tid is None else {**event, "tid": tid}


def _label(labels: dict[int, str], key: int) -> str:
    return labels.get(key, f"#{key}")


def _us(at_ns: int, origin_ns: int) -> int:
    """Whole microseconds, so that slices that meet in ns meet exactly; a fraction of them would be cut by readers."""
    return (at_ns - origin_ns) // 1000
