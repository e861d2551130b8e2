"""Decision log: what the scheduler decided and why each request waited, in fixed memory. It decides nothing.

ring of steps      one row a pass: times, tokens, budget and what bound it, KV blocks
ring of records    one row whenever what a request waits for, or who is in its way, changes
request.log        one RequestRecord a request, as long as it lives and while it is among the last ones that ended
ledger             the time of each wait by reason, exact
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pyengine.config import SchedulerConfig
from pyengine.request import Request, RequestState
from pyengine.scheduler.explanation import Explanation, explain_request, unknown_request, unlogged_request
from pyengine.scheduler.ledger import HELD, INDEX, MID_STEP, PREEMPTED, REASONS, Ledger
from pyengine.scheduler.log_tables import (
    DECODES,
    ENDED,
    MOVED,
    NO_STEP,
    PREFILLS,
    RECORD_COLUMNS,
    SHARED,
    SHARES,
    STEP_COLUMNS,
    VOID,
    Ring,
    Totals,
)
from pyengine.scheduler.plan import StepPlan
from pyengine.scheduler.request_record import NOBODY, Facts, Numbers, RequestRecord, Submit
from pyengine.scheduler.stats import EngineStats, make_stats
from pyengine.scheduler.verdict import Reason, Verdict


class DecisionLog:
    """Told by the scheduler what it decides; nothing that it does has an effect on the scheduler.

    In each step: `begin`, then `waits` for each request that was examined and did not start and `started` for each
    that did, `rest_waits` once, after them, `planned`, and `committed` when the pass has returned. The other methods
    may be called at any moment. A step without `rest_waits` leaves those that were not examined with what they had.

    Memory: `num_steps` + `num_records` rows, `num_ended` ended requests, and the live ones. With `enabled` False
    nothing is kept, and no request has a record.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        enabled: bool = True,
        num_steps: int = 16384,
        num_records: int = 65536,
        num_ended: int = 4096,
    ) -> None:
        self.config = config
        self.enabled = enabled
        self.num_ended = num_ended
        self.now_ns = 0
        self.step = 0
        self.totals = Totals()
        self.ledger = Ledger()
        self.live: dict[int, RequestRecord] = {}
        self.ended_records: deque[RequestRecord] = deque()
        self._submits: dict[str, Submit] = {}
        # Those that wait each for its own reason, PREEMPTED and HELD ones not among them.
        self._examined: dict[RequestRecord, None] = {}
        self._round = 0
        self._shared_by: int | None = None  # None: they were never given a reason
        self._shared_label: str | None = None
        self._reserved: RequestRecord | None = None
        self._begins_to_decode: deque[tuple[int, RequestRecord]] = deque()  # with the step that samples their first
        self.steps = Ring(num_steps if enabled else 1, STEP_COLUMNS)
        self.records = Ring(num_records if enabled else 1, RECORD_COLUMNS)
        self._step_columns = tuple(self.steps.columns.values())
        self._record_columns = tuple(self.records.columns.values())

    # ---- In and out of the queue

    def arrived(self, request: Request, now_ns: int) -> None:
        """`request` is accepted, `group` and `arrival_seq` are set: it waits, for the next step first of all."""
        if not self.enabled:
            return
        self.now_ns = now_ns
        siblings = (request,) if request.group is None else request.group.requests
        if siblings[0].log is None:  # the first of its submit; an earlier one of this id is found no more
            submit = self._submits[request.request_id] = Submit(request.request_id, len(siblings))
        else:
            submit = siblings[0].log.submit
        request.log = record = RequestRecord(request, submit, self.step)
        submit.records[request.index] = record
        self.live[record.key] = record
        self.totals.num_arrived += 1
        self.ledger.wait(record, MID_STEP, now_ns)
        self._examined[record] = None
        self._note(record.key, now_ns, MID_STEP)

    def started(self, request: Request, now_ns: int, passed: Sequence[Request] = ()) -> None:
        """`request` starts or resumes; `passed` are the blocked ones ahead of it that it overtook."""
        if not self.enabled:
            return
        self.now_ns = now_ns
        record: RequestRecord = request.log
        self._leave_queue(record, now_ns)
        if record.started_step is None:
            record.started_step = self.step
        for other in passed:
            overtaken: RequestRecord = other.log
            overtaken.passed_by = overtaken.passed_by.plus(record.label)
            record.passed = record.passed.plus(overtaken.label)
        self._note(record.key, now_ns, PREFILLS)

    def preempted(self, request: Request, now_ns: int) -> None:
        """`request` runs no more and waits again, for PREEMPTED until it is back, whatever a step finds it to lack."""
        if not self.enabled:
            return
        self.now_ns = now_ns
        self.totals.num_preemptions += 1
        self._fix(request.log, PREEMPTED, now_ns)

    def held(self, request: Request, cause: str, now_ns: int) -> None:
        """`request` may not start until `cause` is gone."""
        if not self.enabled:
            return
        self.now_ns = now_ns
        request.log.held_for = request.log.held_for.plus(cause)
        self._fix(request.log, HELD, now_ns)

    def woken(self, request: Request, now_ns: int) -> None:
        """The cause that `request` was held for is gone: it waits for the next step."""
        if not self.enabled:
            return
        self.now_ns = now_ns
        record: RequestRecord = request.log
        self._leave_queue(record, now_ns)
        self.ledger.wait(record, MID_STEP, now_ns)
        self._examined[record] = None
        self._note(record.key, now_ns, MID_STEP)

    def note(self, request: Request, why: str) -> None:
        """`why` tells what ends `request`; called before `ended`."""
        if self.enabled:
            request.log.end_note = why

    def ended(self, request: Request, now_ns: int) -> None:
        """`request` is FINISHED, `finish_reason` and `finished_ns` are set; it was in whatever state before."""
        if not self.enabled:
            return
        self.now_ns = now_ns
        record: RequestRecord = request.log
        self._leave_queue(record, now_ns)
        record.ended_step = self.step
        record.facts = Facts(request)
        record.request = None
        del self.live[record.key]
        self._note(record.key, now_ns, ENDED)
        self._add_up(record, record.facts)
        if len(self.ended_records) == self.num_ended:
            self._forget(self.ended_records.popleft())
        self.ended_records.append(record)

    # ---- One step

    def begin(self, step: int, now_ns: int) -> None:
        """schedule() of `step` begins: what was found in the step before held until now."""
        if not self.enabled:
            return
        self.now_ns = now_ns
        self.step = step
        self._round += 1
        self.ledger.begin(now_ns)

    def waits(self, request: Request, verdict: Verdict, by: Request | None = None) -> None:
        """`request` was examined in this step and does not start; `by` is the request in its way, the blocked head."""
        if not self.enabled:
            return
        record: RequestRecord = request.log
        record.examined = self._round
        by_key = NOBODY if by is None else by.arrival_seq
        numbers = record.open_numbers
        if numbers is not None and verdict.reason is numbers.lacked and by_key == record.by:
            numbers.update(verdict.need, verdict.have, self.step)
        else:
            self._change(record, verdict, by, by_key)

    def rest_waits(self, reason: Reason, by: Request | None = None) -> None:
        """All others in the queue were not examined and share one reason; `by` is the blocked head or None."""
        if not self.enabled:
            return
        by_key = NOBODY if by is None else by.arrival_seq
        if reason is not self.ledger.shared_reason or by_key != self._shared_by:
            self.ledger.share_reason(reason)
            self._shared_by = by_key
            self._shared_label = None if by is None else by.log.label
            self._note(SHARED, self.ledger.begun_ns, INDEX[reason], by=by_key)
        now = self._round
        for record in [record for record in self._examined if record.examined != now]:
            del self._examined[record]
            self.ledger.share(record)
            record.by = NOBODY
            record.open_numbers = None
            self._number_shared(record, self.step)
            self._note(record.key, self.ledger.begun_ns, SHARES)

    def reserved(self, request: Request, start_step: int | None) -> None:
        """`request` is the blocked head and sure to fit at `start_step`; None if no finite step is known."""
        if not self.enabled:
            return
        record: RequestRecord = request.log
        last, self._reserved = self._reserved, record
        if last is not None and last is not record and last.is_reserved:
            self._void(last, record)
        before = record.reserved_step
        if not record.is_reserved:
            record.is_reserved = True
            record.num_reservations += 1
            self.totals.num_reservations += 1
        elif before is not None and (start_step is None or start_step > before):
            record.num_moves += 1
            self.totals.num_reservation_moves += 1
            have = NO_STEP if start_step is None else start_step
            self._note(record.key, self.ledger.begun_ns, MOVED, need=before, have=have)
        record.reserved_step = start_step

    def void_reservation(self, request: Request, by: Request) -> None:
        """`by`, of higher order, came: the reserved start of `request` is void, as when another one is reserved."""
        if not self.enabled:
            return
        if request.log.is_reserved:
            self._void(request.log, by.log)

    def planned(
        self,
        plan: StepPlan,
        *,
        budget: int,
        bound_by: Reason | None,
        predicted_ns: int | None,
        num_waiting: int,
        num_free_blocks: int,
        num_cached_blocks: int,
        num_reserved_blocks: int,
        stop_reason: Reason | None,
        is_ahead: bool = False,
    ) -> None:
        """The plan is made. An empty one has no row.

        Args:
            budget: most prompt tokens that the step could have; bound_by: the limit that set it.
            predicted_ns: how long the step should take, None if not known.
            num_free_blocks: that hold nothing. num_cached_blocks: that nobody uses, with KV that may be found again.
            num_reserved_blocks: that running requests do not hold yet and are counted on to need.
            stop_reason: what ended the step's admissions.
            is_ahead: the tokens of the step before were not known yet, and so who ended with them was not.
        """
        if not self.enabled or plan.is_empty:
            return
        ring = self.steps
        place = ring.number % ring.size
        ring.number += 1
        num_decodes, num_prefill_tokens = plan.num_decode_tokens, plan.num_prefill_tokens
        num_sequences = len(plan.requests)
        row = (
            plan.step,
            self.ledger.begun_ns,
            predicted_ns or 0,
            -1,
            num_sequences,
            num_decodes,
            num_prefill_tokens,
            budget,
            -1 if bound_by is None else INDEX[bound_by],
            -1 if stop_reason is None else INDEX[stop_reason],
            num_free_blocks,
            num_cached_blocks,
            num_reserved_blocks,
            num_waiting,
            is_ahead,
        )
        for column, value in zip(self._step_columns, row, strict=True):
            column[place] = value
        totals = self.totals
        totals.num_steps += 1
        totals.num_ahead_steps += is_ahead
        totals.sequences += num_sequences
        totals.decode_tokens += num_decodes
        totals.prefill_tokens += num_prefill_tokens
        totals.free_blocks += num_free_blocks
        totals.cached_blocks += num_cached_blocks
        totals.reserved_blocks += num_reserved_blocks
        if bound_by is not None:
            totals.bound[INDEX[bound_by]] += 1
        for i in range(num_decodes, num_sequences):
            if plan.samples[i]:
                self._begins_to_decode.append((plan.step, plan.requests[i].log))

    def committed(self, step: int, started_ns: int, now_ns: int, num_discarded: int = 0) -> None:
        """The pass of `step`, which began at `started_ns`, has returned, and those that it ended were reported.

        `num_discarded` of its tokens were sampled for requests that had ended before.
        """
        if not self.enabled:
            return
        self.now_ns = now_ns
        self.totals.discarded_tokens += num_discarded
        ring = self.steps
        for number in range(ring.number - 1, max(ring.number - 3, ring.num_lost - 1), -1):
            place = number % ring.size  # its row is the last one, or the one before if the next step is planned
            if ring.columns["step"][place] == step:
                ring.columns["start_ns"][place] = started_ns
                ring.columns["real_ns"][place] = now_ns - started_ns
                break
        while self._begins_to_decode and self._begins_to_decode[0][0] == step:
            _, record = self._begins_to_decode.popleft()
            if record.request is not None and record.request.state is RequestState.DECODE:
                self._note(record.key, now_ns, DECODES)

    # ---- What can be asked

    def explain(self, request: Request, now_ns: int | None = None) -> Explanation:
        """Why `request` waited, up to `now_ns` (None: the last moment the log heard of) or its end."""
        now_ns = max(self.now_ns, now_ns or 0)
        record: RequestRecord | None = request.log
        if record is None:
            return unlogged_request(request, "The decision log is off, or was when it arrived.")
        return self._explain(record, now_ns)

    def explain_id(self, request_id: str, now_ns: int | None = None) -> tuple[Explanation, ...]:
        """The same for each of the n sequences of the latest submit of this id; "unknown" where no more is known."""
        now_ns = max(self.now_ns, now_ns or 0)
        submit = self._submits.get(request_id)
        if submit is None:
            return (unknown_request(request_id, 0, request_id, self._why_unknown()),)
        return tuple(
            self._explain(submit.records[index], now_ns)
            if index in submit.records
            else unknown_request(request_id, index, f"{request_id}[{index}]", self._why_unknown())
            for index in range(submit.n)
        )

    def key_of(self, request_id: str, index: int) -> int | None:
        """The arrival_seq of one of the sequences of the latest submit of this id; None if it is not known."""
        submit = self._submits.get(request_id)
        record = None if submit is None else submit.records.get(index)
        return None if record is None else record.key

    def stats(
        self,
        now_ns: int | None = None,
        *,
        step_model: Mapping[str, Any] | None = None,
        policy_faults: Mapping[str, int] = MappingProxyType({}),
    ) -> EngineStats:
        """The fleet: what all waiting was for, how full batch and pool are. O(live requests + num_steps)."""
        now_ns = max(self.now_ns, now_ns or 0)
        live = [(record.facts_now(), self.ledger.parts_at(record, now_ns)) for record in self.live.values()]
        return make_stats(self.config, self.totals, self.steps, live, step_model, policy_faults)

    def known(self) -> Iterator[RequestRecord]:
        """All requests that are still known: the last that ended, then the live ones, by arrival."""
        yield from self.ended_records
        yield from self.live.values()

    def waits_for(self, record: RequestRecord) -> Reason | None:
        """What it waits for now; None if it does not wait."""
        if record.snapshot is not None:
            return self.ledger.shared_reason
        return REASONS[record.index] if record.index >= 0 else None

    # ---- Details

    def _explain(self, record: RequestRecord, now_ns: int) -> Explanation:
        if record.snapshot is not None:
            self._number_shared(record, self.step)
        parts = self.ledger.parts_at(record, now_ns)
        return explain_request(record, parts, self.waits_for(record), now_ns)

    def _why_unknown(self) -> str:
        if not self.enabled:
            return "The decision log is off."
        if self.totals.num_ended <= self.num_ended:
            return "No request of this id was accepted."
        return f"It never came, or it ended and the {self.num_ended} requests that are kept ended later."

    def _change(self, record: RequestRecord, verdict: Verdict, by: Request | None, by_key: int) -> None:
        """What it waits for, or who is in its way, is not what it was."""
        lacked = verdict.reason
        assert lacked is not None, "a request that starts does not wait"
        if record.is_fixed:
            index = record.index
        else:
            index = INDEX[lacked]
            if record.snapshot is not None:
                self._number_shared(record, self.step - 1)
            if record.index != index:
                self.ledger.wait(record, index, self.ledger.begun_ns)
            self._examined[record] = None
            self._note(record.key, self.ledger.begun_ns, index, verdict.need, verdict.have, by_key)
        numbers = record.numbers.get(index)
        if numbers is None or numbers.lacked is not lacked:
            record.numbers[index] = numbers = Numbers(lacked, self.step)
        numbers.update(verdict.need, verdict.have, self.step)
        if by is not None:
            numbers.add_by(by.log.label)
        record.open_numbers = numbers
        record.by = by_key

    def _void(self, record: RequestRecord, by: RequestRecord) -> None:
        record.is_reserved = False
        record.voided_by = record.voided_by.plus(by.label)
        self.totals.num_reservations_void += 1
        self._note(record.key, self.ledger.begun_ns, VOID, by=by.key)

    def _number_shared(self, record: RequestRecord, step: int) -> None:
        """`record` shared, in `step` too: keep that it waited for the shared reason, and who was in the way."""
        reason = self.ledger.shared_reason
        numbers = record.numbers.get(INDEX[reason])
        if numbers is None:
            record.numbers[INDEX[reason]] = numbers = Numbers(reason, self.step)
        numbers.last_step = max(numbers.last_step, step)
        if self._shared_label is not None and self._shared_label != record.label:
            numbers.add_by(self._shared_label)

    def _fix(self, record: RequestRecord, index: int, now_ns: int) -> None:
        """From now on it waits for the reason at this place in REASONS, whatever a step finds."""
        self._leave_queue(record, now_ns)
        record.is_fixed = True
        self.ledger.wait(record, index, now_ns)
        self._note(record.key, now_ns, index)

    def _leave_queue(self, record: RequestRecord, now_ns: int) -> None:
        if record.snapshot is not None:
            self._number_shared(record, self.step - (now_ns == self.ledger.begun_ns))
        self.ledger.stop(record, now_ns)
        self._examined.pop(record, None)
        record.by = NOBODY
        record.open_numbers = None
        record.is_fixed = record.is_reserved = False

    def _add_up(self, record: RequestRecord, facts: Facts) -> None:
        totals = self.totals
        totals.num_ended += 1
        totals.recomputed_tokens += facts.num_recomputed_tokens
        if facts.started_ns is not None:
            totals.started_prompt_tokens += facts.num_prompt_tokens
            totals.cached_tokens += facts.num_cached_tokens
        for index, waited_ns in enumerate(record.parts):
            totals.parts[index] += waited_ns

    def _forget(self, record: RequestRecord) -> None:
        """It left the ring of ended requests."""
        submit = record.submit
        del submit.records[record.sibling]
        if not submit.records and self._submits.get(submit.request_id) is submit:
            del self._submits[submit.request_id]

    def _note(self, key: int, at_ns: int, code: int, need: int = 0, have: int = 0, by: int = NOBODY) -> None:
        """One row in the ring of records."""
        ring = self.records
        place = ring.number % ring.size
        ring.number += 1
        keys, steps, times, codes, needs, haves, bys = self._record_columns
        keys[place] = key
        steps[place] = self.step
        times[place] = at_ns
        codes[place] = code
        needs[place] = need
        haves[place] = have
        bys[place] = by
