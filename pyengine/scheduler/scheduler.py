"""Scheduler: every step, decides which requests share the next model pass. It runs no pass and knows no model."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from types import MappingProxyType
from typing import cast

from pyengine.config import SchedulerConfig
from pyengine.errors import DeadlinePassed, PolicyFault
from pyengine.kv_cache.blocks import need
from pyengine.kv_cache.kv_cache import KVCache, Prefix
from pyengine.request import PENDING, Request, RequestGroup, RequestState, StepTimes, move
from pyengine.scheduler import refusal
from pyengine.scheduler.admission import Admission
from pyengine.scheduler.batching import BATCHINGS, Batching, GuardedBatching
from pyengine.scheduler.capacity import CAPACITIES, Capacity
from pyengine.scheduler.clean_state import capture
from pyengine.scheduler.decision_log import DecisionLog
from pyengine.scheduler.guarded_order import GuardedOrder
from pyengine.scheduler.latency import Latency, StepTimeLimit, estimate_ttft_ns
from pyengine.scheduler.order import ORDERS, Order, WaitingQueue
from pyengine.scheduler.packing import PACKINGS, Packing, StrictOrder
from pyengine.scheduler.plan import PlanDraft, StepPlan
from pyengine.scheduler.policies import make_policy
from pyengine.scheduler.recording import Recorder
from pyengine.scheduler.step_time import StepFeatures, StepTimeModel, step_features
from pyengine.scheduler.verdict import Reason
from pyengine.scheduler.victim import VICTIMS, Cheapest, Victim

NOBODY_ENDS: Mapping[int, str] = MappingProxyType({})
NEVER_NS = 2**63
MAX_STEP_TIMES = 4096  # beyond so many, those that nobody needs any more are forgotten


@dataclass(slots=True)
class _InFlight:
    """The step that runs: its plan, what its duration depends on, and who left while it ran."""

    plan: StepPlan
    features: StepFeatures
    started_ns: int
    has_leavers: bool = False


@dataclass(frozen=True, slots=True)
class _FruitlessScan:
    """Admissions of a step in which nobody started. While nothing they depend on changes, they need not be repeated."""

    state: tuple[int, int, int]
    budget: int
    valid_until_ns: int
    stopped_by: Reason | None


class Scheduler:
    """Continuous batching over a paged KV pool.

    The loop is `plan = schedule()`, run the pass, `commit(plan, token_ids)`. One plan is in flight at a time, or two
    where a device runs passes in the order in which they were given to it, and the next is to be there when one ends:

        a = schedule()   expect(a)   b = schedule()   commit(a, ..)   expect(b)   c = schedule()   commit(b, ..)

    Requests may be added and aborted at any moment, also between these (inputs of the pass must have been read by
    then). Not thread-safe: the owner calls it from one thread at a time.

    Each live request is in exactly one container, by its state:

        WAITING, PREEMPTED   _waiting      sorted by the order, scanned by each step
        HELD                 _held         not scanned, until it is woken
        PREFILL              _prefilling   given as many tokens as the budget allows
        DECODE               _decoding     given one token in each step, always
        DECODE               _ending       has its last token in the expected step, and holds nothing any more

    `clock` gives integer nanoseconds; one that goes backwards is taken as standing still. What a step takes is learned
    by `step_time`. Nothing else that it reads changes by itself: with the same calls and clock, plans are the same.

    Attributes:
        log: what was decided and why.
        recorder: the latest calls, to be replayed; None without `records_calls`.
        step_time: the model of a step's duration.
        policy_faults: how often a policy of the user's broke its rules, by its name.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        step_time: StepTimeModel | None = None,
        log: DecisionLog | None = None,
        records_calls: bool = True,
        model_id: str = "",
    ) -> None:
        self.config = config
        self.log = DecisionLog(config) if log is None else log
        self.step_time = StepTimeModel() if step_time is None else step_time
        self.policy_faults: dict[str, int] = {}
        self._clock = clock
        self._last_now_ns = 0
        self._cache = KVCache(
            config.num_blocks, config.block_size, prefix_caching=config.prefix_caching, model_id=model_id
        )
        self._batching: Batching = make_policy("batching", config.batching, BATCHINGS)
        if not isinstance(config.batching, str):
            self._batching = GuardedBatching(self._batching, self._note_fault)
        self._order: Order = make_policy("order", config.order, ORDERS, Order)
        if not isinstance(config.order, str):
            self._order = GuardedOrder(self._order, self._note_fault)
        self._packing: Packing = make_policy("packing", config.packing, PACKINGS)
        self._capacity: Capacity = make_policy("capacity", config.capacity, CAPACITIES, Capacity, self._cache, config)
        if not isinstance(config.capacity, str):
            self._capacity.on_fault = self._note_fault
        self._latency: Latency = StepTimeLimit(config.max_num_batched_tokens, config.block_size, self.step_time)
        self._victim: Victim = make_policy("victim", config.victim, VICTIMS)
        self._waiting = WaitingQueue(self._order, int(config.priority_promotion_s * 1e9))
        # Dictionaries serve as ordered sets with O(1) removal.
        self._held: dict[Request, int] = {}
        self._prefilling: dict[Request, None] = {}
        self._decoding: dict[Request, list[int]] = {}  # with their token_ids
        self._step_times = StepTimes()
        self._most_step_times = MAX_STEP_TIMES
        # A timing wheel over block_size steps. A decode gains one token a step, so it needs its next block every
        # block_size steps, always in the same bucket: (step - num_computed_tokens) mod block_size.
        self._wheel: tuple[dict[Request, None], ...] = tuple({} for _ in range(config.block_size))
        # By step, the decodes that reach max_tokens with the token it samples. One that left meanwhile is passed over.
        self._last_steps: dict[int, list[Request]] = {}
        self._deadlines: list[tuple[int, int, Request]] = []
        self._itl_limits: dict[int, int] = {}  # of running requests: how many have each limit, in ns
        self._num_decode_kv = 0  # tokens with KV of all decodes
        self._step = 0
        self._in_flight: _InFlight | None = None
        self._awaited: _InFlight | None = None  # the step before, if it was expected: its tokens are PENDING
        self._ending: dict[Request, None] = {}
        self._last_commit_ns = 0
        self._fruitless: _FruitlessScan | None = None
        self._head: Request | None = None
        self._paused_for: Reason | None = None
        self._wake_ns: int | None = None
        self._num_arrived = 0
        self.recorder = Recorder(config, self.step_time, state=lambda: capture(self)) if records_calls else None

    # ---- What may come in

    def clamp_max_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> tuple[int, bool]:
        """The limit that a prompt of this length gets, and whether it is lower than the one asked for (None: no limit).

        Raises NeverFits if not even one token can be made.
        """
        return refusal.clamp_max_tokens(self.config, num_prompt_tokens, max_tokens)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the n sequences of one submit, which have the same prompt: all of them or none.

        Raises NeverFits if an empty engine could not run one, QueueFull, TTFTUnreachable, and InvalidRequest for an
        empty prompt, more sequences than the queue ever holds, or a priority or max_tokens out of bounds.
        """
        if len(set(requests)) != len(requests):
            raise ValueError("A request is twice in the same submit.")
        for request in requests:
            refusal.check_new(self.config, request, requests[0])
        self._check_queue(len(requests))
        refusal.check_itl(self.step_time, requests[0].itl_limit_ns)
        now_ns = self._now()
        group = RequestGroup(requests) if len(requests) > 1 else None
        for i, request in enumerate(requests):
            request.group = group
            request.arrival_seq = self._num_arrived + i
            request.arrival_ns = request.queued_since_ns = now_ns
            if request.ttft_limit_ns is None and self.config.ttft_limit_ms is not None:
                request.ttft_limit_ns = int(self.config.ttft_limit_ms * 1e6)
            if request.itl_limit_ns is None and self.config.itl_limit_ms is not None:
                request.itl_limit_ns = int(self.config.itl_limit_ms * 1e6)
            self._cache.arrived(request)
        try:
            for request in requests:
                self._check_order_key(request)
            limit_ns = requests[0].ttft_limit_ns
            if limit_ns is not None:
                refusal.check_ttft(limit_ns, self._estimate_ttft_ns(requests[0]), is_idle=not self.has_unfinished)
        except Exception:
            for request in requests:
                self._waiting.forget(request)
                request.arrival_seq = -1
            raise
        self._num_arrived += len(requests)
        for request in requests:
            self._waiting.add(request, now_ns)
            self.log.arrived(request, now_ns)
            if request.ttft_limit_ns is not None:
                heappush(self._deadlines, (now_ns + request.ttft_limit_ns, request.arrival_seq, request))
        if self.recorder is not None:
            self.recorder.arrived(requests, now_ns)

    def abort(self, request: Request, reason: str = "abort") -> bool:
        """End `request` in whatever state it is, and free all it holds; False if it had ended before.

        Blocks that the step in flight writes are free once that is committed; its token for the request is dropped.
        """
        if request.arrival_seq < 0:
            raise ValueError(f"{request!r} was never added.")
        if request.is_finished:
            return False
        now_ns = self._now()
        self._finish(request, reason, now_ns)
        if self.recorder is not None:
            self.recorder.aborted(request, reason, now_ns)
        return True

    def hold(self, request: Request, cause: str, until_ns: int) -> None:
        """Let a waiting request that has not started wait for `cause` until `wake`; at `until_ns` it is ended.

        Raises RuntimeError if it has started or ended.
        """
        now_ns = self._now()
        if request.state is not RequestState.WAITING:
            raise RuntimeError(f"{request!r} cannot be held.")
        self._waiting.remove(request)
        move(request, RequestState.HELD, now_ns)
        self._held[request] = until_ns
        self.log.held(request, cause, now_ns)
        if self.recorder is not None:
            self.recorder.held(request, until_ns, now_ns)

    def wake(self, request: Request) -> bool:
        """Let a held request wait for its start again; False if it is not held."""
        if request not in self._held:
            return False
        now_ns = self._now()
        del self._held[request]
        move(request, RequestState.WAITING, now_ns)
        self._waiting.add(request, now_ns)
        self.log.woken(request, now_ns)
        if self.recorder is not None:
            self.recorder.woken(request, now_ns)
        return True

    def pause(self, reason: Reason = Reason.PAUSED) -> None:
        """Let nobody start until `resume`; those that run go on. `reason` is PAUSED or DRAIN."""
        if reason not in (Reason.PAUSED, Reason.DRAIN):
            raise ValueError(f"reason is {reason!r}; it must be PAUSED or DRAIN.")
        self._paused_for = reason
        if self.recorder is not None:
            self.recorder.paused(reason.name, self._now())

    def resume(self) -> None:
        """End a `pause`."""
        self._paused_for = None
        if self.recorder is not None:
            self.recorder.paused(None, self._now())

    def clear_prefix_cache(self) -> None:
        """Forget all KV that no running request holds."""
        self._cache.clear()
        if self.recorder is not None:
            self.recorder.cleared(self._now())

    # ---- One step

    def schedule(self) -> StepPlan:
        """Plan the next pass: decodes always, then running prefills, then those that start, until a limit binds.

        Raises RuntimeError while another plan is in flight that is not expected.
        """
        if self._in_flight is not None:
            raise RuntimeError(f"Step {self._in_flight.plan.step} is in flight; commit it before the next schedule().")
        now_ns = self._now()
        self.log.begin(self._step, now_ns)
        self._capacity.begin(self._step)
        self._waiting.promote(now_ns)
        draft = PlanDraft(self._step)
        self._refuse_late(draft, now_ns)
        self._grow_decodes(draft, now_ns)
        draft.add_decodes(list(self._decoding))
        self._set_budget(draft)
        self._continue_prefills(draft)
        stopped_by = self._admit(draft, now_ns)
        plan = draft.plan()
        features = step_features(plan, self._num_decode_kv)
        self._log_plan(plan, features, draft, stopped_by)
        if not plan.is_empty:
            self._in_flight = _InFlight(plan, features, now_ns)
            self._advance(plan, now_ns)
        if self.recorder is not None:
            self.recorder.scheduled(plan, now_ns)
        return plan

    def expect(self, plan: StepPlan) -> None:
        """Let the next plan be made before the tokens of `plan`, which is in flight, are known.

        Until `commit` the newest token of each request that samples is PENDING. Nobody knows who ends with it, but for
        those at max_tokens: the others get a token in the next plan too, which is dropped if they have ended. What
        `plan` writes can be shared, and what it alone still used be given away, by the next plan: passes run one after
        the other. Raises RuntimeError if `plan` is not in flight, or the one before it is not committed.
        """
        step = self._in_flight
        if step is None or plan is not step.plan:
            raise RuntimeError(f"Step {plan.step} is not in flight: it was committed before, or never scheduled here.")
        if self._awaited is not None:
            raise RuntimeError(f"Step {self._awaited.plan.step} is not committed; only one can be expected.")
        self._in_flight, self._awaited = None, step
        self._cache.committed(plan.step)
        self._append_tokens(step, [PENDING] * len(plan.requests))
        for request in self._last_steps.pop(plan.step, ()):
            if request.state is RequestState.DECODE and request.num_output_tokens == request.max_tokens:
                self._take_out(request)
                self._ending[request] = None
        if self.recorder is not None:
            self.recorder.expected(self._now())

    def commit(
        self, plan: StepPlan, token_ids: Sequence[int | None], finish_reasons: Mapping[int, str] = NOBODY_ENDS
    ) -> None:
        """Take what `plan` gave: the next token of each of its requests, None for those that sampled nothing.

        `finish_reasons` has those that end with that token, by place in the plan: "stop" or "error" as the caller
        found; the scheduler itself ends with "length" at max_tokens. What came for a request that was aborted
        meanwhile is dropped. After this the requests that ended have a `finish_reason`.
        Raises RuntimeError if `plan` is not in flight, and ValueError, nothing changed, if a token is missing.
        """
        if plan.is_empty:
            return
        step = self._in_flight if self._awaited is None else self._awaited
        if step is None or plan is not step.plan:
            raise RuntimeError(
                f"Step {plan.step} is not in flight: it was committed, never scheduled, or is not the oldest."
            )
        _check_token_ids(plan, token_ids)
        now_ns = self._now()
        started_ns = max(step.started_ns, self._last_commit_ns)  # it may have been waiting for the pass before it
        self._last_commit_ns = now_ns
        self.step_time.observe(step.features, now_ns - started_ns)
        self._step_times.append(plan.step, now_ns)
        num_discarded = 0
        if step.has_leavers:
            rows = zip(plan.requests, plan.samples, strict=True)
            num_discarded = sum(samples and request.is_finished for request, samples in rows)
        if step is self._awaited:
            self._awaited = None
            ends = list(self._ending)
            self._replace_pending(plan, token_ids, now_ns)
        else:
            self._in_flight = None
            self._cache.committed(plan.step)
            self._append_tokens(step, token_ids)
            ends = self._last_steps.pop(plan.step, [])
        for i, reason in finish_reasons.items():
            if plan.samples[i] and not plan.requests[i].is_finished:
                self._finish(plan.requests[i], reason, now_ns)
        for request in ends:
            if request.state is RequestState.DECODE and request.num_output_tokens == request.max_tokens:
                self._finish(request, "length", now_ns)
        if len(self._step_times) > self._most_step_times:
            self._step_times.forget(min((r.first_decode_step for r in self._decoding), default=self._step))
            self._most_step_times = max(MAX_STEP_TIMES, 2 * len(self._step_times))
        self.log.committed(plan.step, started_ns, now_ns, num_discarded)
        if self.recorder is not None:
            self.recorder.committed(plan, finish_reasons, now_ns)

    def next_wake_ns(self) -> int | None:
        """After an empty plan: when something may happen although nobody comes; None: nothing will."""
        held = min(self._held.values(), default=NEVER_NS)
        due = self._deadlines[0][0] if self._deadlines else NEVER_NS
        wake = min(held, due, NEVER_NS if self._wake_ns is None else self._wake_ns)
        return None if wake == NEVER_NS else wake

    # The parts of commit() and expect()

    def _append_tokens(self, step: _InFlight, token_ids: Sequence[int | None]) -> None:
        """Give each request of `step` that samples its token, the one in its place."""
        plan, first_row = step.plan, 0
        if not step.has_leavers:
            # The decodes of the plan are the first of those of now, in the same order.
            first_row = plan.num_decode_tokens
            tokens = cast("Sequence[int]", token_ids[:first_row])
            _consume(map(list.append, self._decoding.values(), tokens))
        for i in range(first_row, len(plan.requests)):
            request, token_id = plan.requests[i], token_ids[i]
            if plan.samples[i] and not request.is_finished:
                assert token_id is not None
                request.token_ids.append(token_id)

    def _replace_pending(self, plan: StepPlan, token_ids: Sequence[int | None], now_ns: int) -> None:
        """The tokens of `plan`, which was expected, are known: they take the places of the PENDING ones."""
        columns = zip(plan.requests, plan.num_computed, plan.num_new_tokens, plan.samples, token_ids, strict=True)
        for request, num_computed, num_new, samples, token_id in columns:
            if not samples or request.is_finished:
                continue
            assert token_id is not None
            request.token_ids[num_computed + num_new] = token_id
            if request.step_times is None or request.first_decode_step > plan.step:  # it has left the batch meanwhile
                request.settled_token_times_ns.append(now_ns)

    # The parts of schedule(), in its order

    def _refuse_late(self, draft: PlanDraft, now_ns: int) -> None:
        """End those whose limit on the first token, or on being held, has passed before they started."""
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, _, request = heappop(self._deadlines)
            if request.started_ns is None and not request.is_finished:
                assert request.ttft_limit_ns is not None
                self._refuse(draft, request, refusal.started_too_late(request, request.ttft_limit_ns, now_ns), now_ns)
        for request, until_ns in [item for item in self._held.items() if item[1] <= now_ns]:
            self._refuse(draft, request, refusal.held_too_long(request, until_ns, now_ns), now_ns)

    def _refuse(self, draft: PlanDraft, request: Request, error: DeadlinePassed, now_ns: int) -> None:
        draft.refused.append((request, error))
        self.log.note(request, str(error))
        self._finish(request, "error", now_ns)

    def _grow_decodes(self, draft: PlanDraft, now_ns: int) -> None:
        """Give each decode that crosses a block boundary its block, preempting victims if need be.

        Who is served first makes no difference: victims are taken in their own order until the rest have enough.
        """
        growing = list(self._wheel[self._step % self.config.block_size])
        if self._cache.grow_all(growing):
            return
        for request in growing:
            while request.state is RequestState.DECODE and not self._cache.grow(request):
                victim = self._choose_victim()
                self._preempt(victim, now_ns)
                draft.preempted.append(victim)

    def _choose_victim(self) -> Request:
        """Whom the policy names; whom the built-in one names, if the user's names nobody who runs."""
        running, surplus = tuple(self.running()), self._order.surplus
        if isinstance(self.config.victim, str):
            return self._victim.choose(running, surplus)
        try:
            chosen = self._victim.choose(running, surplus)
            if chosen not in running:
                raise PolicyFault(f"It chose {chosen!r}, which does not run.", policy=self._victim.name)
            return chosen
        except Exception as error:
            self._note_fault(self._victim.name, error)
            return Cheapest().choose(running, surplus)

    def _set_budget(self, draft: PlanDraft) -> None:
        """Prompt tokens that this step may carry beside its decodes, and what bounds them."""
        limit_ns = min(self._itl_limits) if self._itl_limits else None
        first = next(iter(self._prefilling), None)
        budget = self._latency.budget(
            len(draft.requests),
            self._num_decode_kv,
            limit_ns,
            0 if first is None else first.num_computed_tokens,
            bool(self._prefilling) or len(self._waiting) > 0,
        )
        draft.budget = draft.first_budget = budget.tokens
        draft.bound_by = budget.bound_by

    def _continue_prefills(self, draft: PlanDraft) -> None:
        """Chunks of the prompts that are being computed.

        At most one is left from the step before: nobody else is started once a chunk has used up the budget.
        """
        for request in list(self._prefilling):
            if draft.budget == 0:
                return
            if draft.add_chunk(request):
                self._capacity.decodes(request, draft.step)

    def _admit(self, draft: PlanDraft, now_ns: int) -> Reason | None:
        """Start those that wait, as the packing decides; returns what ended the admissions."""
        self._wake_ns = None
        if len(self._waiting) == 0:
            return None
        closed_by = self._gate(draft, now_ns)
        if closed_by is not None:
            self._fruitless = None
            self.log.rest_waits(closed_by)
            return closed_by
        state = (self._capacity.forecast.version, self._capacity.forecast.bucket, self._waiting.version)
        known = self._fruitless
        if (
            known is not None
            and known.state == state
            and draft.budget <= known.budget
            and now_ns < known.valid_until_ns
            and not draft.preempted
        ):
            return known.stopped_by
        admission = Admission(
            self.config,
            self._waiting,
            self._order,
            self._cache,
            self._capacity,
            self.log,
            draft,
            now_ns,
            self.num_running,
            bool(self._itl_limits),
            lambda request, prefix, head: self._start(draft, now_ns, request, prefix, head),
        )
        is_ours = self._run_packing(admission)
        admission.finish()
        is_awaiting = admission.head is None and not admission.is_final
        self._batching.admitted(Reason.SHARED_PREFIX_PENDING if is_awaiting else admission.stopped_by)
        self._note_head(admission.head)
        self._fruitless = None
        if admission.num_started == 0 and admission.is_final and is_ours and self._waiting.is_fixed:
            head = admission.head
            waited_ns = 0 if head is None else head.queue_ns_at(now_ns)
            left_ns = admission.barrier_ns - waited_ns
            until_ns = now_ns + left_ns if head is not None and left_ns > 0 else NEVER_NS
            self._fruitless = _FruitlessScan(state, draft.budget, until_ns, admission.stopped_by)
        return admission.stopped_by

    def _gate(self, draft: PlanDraft, now_ns: int) -> Reason | None:
        """Why nobody at all may start in this step; None: some may."""
        config, num_running = self.config, self.num_running
        if self._paused_for is not None:
            return self._paused_for
        closed_by = self._batching.closed_by(num_running)
        if closed_by is not None:
            return closed_by
        if num_running == config.max_num_seqs:
            return Reason.MAX_SEQS
        if draft.budget == 0:
            return draft.bound_by
        if config.max_batch_wait_ms and num_running == 0 and len(self._waiting) < config.max_num_seqs:
            oldest_ns = min(request.queued_since_ns for request in self._waiting)
            until_ns = oldest_ns + int(config.max_batch_wait_ms * 1e6)
            if self._deadlines:  # half of the time is left for the pass
                due_ns, _, first_due = self._deadlines[0]
                until_ns = min(until_ns, (first_due.arrival_ns + due_ns) // 2)
            if now_ns < until_ns:
                self._wake_ns = until_ns
                return Reason.BATCH_WAIT
        return None

    def _run_packing(self, admission: Admission) -> bool:
        """Let the packing admit; False if it is not a built-in one, of which nothing can be known beforehand."""
        if isinstance(self.config.packing, str):
            self._packing.admit(admission)
            return True
        try:
            self._packing.admit(admission)
        except Exception as error:
            self._note_fault(self._packing.name, error)
            admission.start_over()
            StrictOrder().admit(admission)
        if admission.num_running == 0:
            idle = PolicyFault("It started nobody, though nothing runs.", policy=self._packing.name)
            self._note_fault(self._packing.name, idle)
            admission.start_over()
            StrictOrder().admit(admission)
        return False

    def _start(self, draft: PlanDraft, now_ns: int, request: Request, prefix: Prefix, head: Request | None) -> None:
        """Start or resume `request`, with `prefix` shared; it has been judged to fit. It passes `head`, if any."""
        self._waiting.remove(request)
        copy = self._cache.start(request, prefix)
        if copy is not None:
            draft.copies.append(copy)
        if request.started_ns is None:
            request.num_cached_tokens = prefix.num_tokens
        request.num_recomputed_tokens += max(0, request.num_dropped_tokens - prefix.num_tokens)
        self._order.granted(request, request.num_tokens - max(prefix.num_tokens, request.num_reached_tokens))
        move(request, RequestState.PREFILL, now_ns)
        self.log.started(request, now_ns, () if head is None else (head,))
        self._prefilling[request] = None
        self._count_itl_limit(request, 1)
        draft.joined.append(request)
        if draft.add_chunk(request):
            self._capacity.decodes(request, draft.step)
        else:
            self._capacity.started(request)

    def _note_head(self, head: Request | None) -> None:
        """A reservation is void when a request of higher order has become the head."""
        before, self._head = self._head, head
        if before is not None and head is not None and before is not head and before.is_waiting:
            self.log.void_reservation(before, head)

    def _log_plan(self, plan: StepPlan, features: StepFeatures, draft: PlanDraft, stopped_by: Reason | None) -> None:
        if plan.is_empty or not self.log.enabled:
            return
        pool, model = self._cache.pool, self.step_time
        num_held = self.config.num_blocks - pool.num_free - pool.num_fenced
        self.log.planned(
            plan,
            budget=draft.first_budget,
            bound_by=draft.bound_by if draft.budget == 0 else None,
            predicted_ns=model.predict(features) if model.is_fitted else None,
            num_waiting=self.num_waiting,
            num_free_blocks=pool.num_free - pool.num_idle,
            num_cached_blocks=pool.num_idle,
            num_reserved_blocks=max(0, self._capacity.forecast.peak() - num_held),
            stop_reason=stopped_by,
            is_ahead=self._awaited is not None,
        )

    def _advance(self, plan: StepPlan, now_ns: int) -> None:
        """Count the tokens of `plan` as computed, so that the next step starts behind them."""
        self._step += 1
        num_decodes = plan.num_decode_tokens
        self._num_decode_kv += num_decodes
        self._order.stepped()
        for request in plan.requests[:num_decodes]:
            request.num_computed_tokens += 1
        for i in range(num_decodes, len(plan.requests)):
            request = plan.requests[i]
            request.num_computed_tokens += plan.num_new_tokens[i]
            if plan.samples[i]:
                self._begin_decode(request, now_ns)
            self._cache.computed(request)

    def _begin_decode(self, request: Request, now_ns: int) -> None:
        """The step that was just planned computes the last known token of `request` and samples the next."""
        del self._prefilling[request]
        self._decoding[request] = request.token_ids
        request.follow(self._step_times, self._step - 1)
        self._bucket(request)[request] = None
        move(request, RequestState.DECODE, now_ns)
        self._num_decode_kv += request.num_computed_tokens
        self._order.decodes(request)
        last_step = self._step - 1 + request.max_tokens - request.num_output_tokens - 1
        self._last_steps.setdefault(last_step, []).append(request)

    # ---- Leaving the batch

    def _preempt(self, request: Request, now_ns: int) -> None:
        """Drop the KV of a running request and put it back to its place in the order; its tokens stay."""
        num_dropped = request.num_computed_tokens
        self._take_out(request)
        move(request, RequestState.PREEMPTED, now_ns)
        request.num_preemptions += 1
        request.num_dropped_tokens = num_dropped
        self._waiting.add(request, now_ns)
        self.log.preempted(request, now_ns)

    def _finish(self, request: Request, reason: str, now_ns: int) -> None:
        if request.token_ids[-1] == PENDING:
            del request.token_ids[-1]
        self._take_out(request)
        self._waiting.forget(request)
        move(request, RequestState.FINISHED, now_ns)
        request.finish_reason = reason
        if reason in ("stop", "length"):
            self._capacity.learn(request)
        self.log.ended(request, now_ns)
        if self.recorder is not None:
            self.recorder.ended(request)

    def _take_out(self, request: Request) -> None:
        """Take `request` out of its container and its blocks back."""
        if request.state is RequestState.HELD:
            del self._held[request]
            return
        if request.is_waiting:
            self._waiting.remove(request)
            return
        if request in self._ending:
            del self._ending[request]
            return
        if request.state is RequestState.DECODE:
            del self._bucket(request)[request]
            del self._decoding[request]
            request.unfollow()
            self._num_decode_kv -= request.num_computed_tokens
            self._order.stopped(request)
        else:
            del self._prefilling[request]
            reached = max(request.num_computed_tokens, request.num_reached_tokens)
            self._order.granted(request, reached - request.num_tokens)  # what was charged and is not computed
        request.num_reached_tokens = max(request.num_computed_tokens, request.num_reached_tokens)
        self._count_itl_limit(request, -1)
        step = self._in_flight
        if step is not None and request in step.plan.requests:
            step.has_leavers = True
            place = step.plan.requests.index(request)
            self._cache.release(request, fence=step.plan.step, num_settled_tokens=step.plan.num_computed[place])
        else:
            self._cache.release(request)
        self._capacity.left(request)

    # ---- What can be asked

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running, or has its last token yet to come."""
        return self.num_waiting + self.num_running + len(self._ending) > 0

    @property
    def is_paused(self) -> bool:
        """Whether nobody may start until `resume`."""
        return self._paused_for is not None

    @property
    def num_waiting(self) -> int:
        """Requests that are accepted and not running: waiting, held or preempted."""
        return len(self._waiting) + len(self._held)

    @property
    def num_running(self) -> int:
        """Requests that have a seat and KV blocks."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that nobody holds and no step in flight writes."""
        return self._cache.pool.num_free

    def running(self) -> Iterator[Request]:
        """Running requests, decodes first."""
        return chain(self._decoding, self._prefilling)

    def unfinished(self) -> list[Request]:
        """All live requests: running, then waiting in order."""
        return [*self._ending, *self.running(), *self._waiting, *self._held]

    def check(self) -> None:
        """Raise AssertionError where state, containers, block tables and pool disagree. For tests; O(everything)."""
        places = (
            (self._decoding, (RequestState.DECODE,)),
            (self._ending, (RequestState.DECODE,)),
            (self._prefilling, (RequestState.PREFILL,)),
            (self._waiting, (RequestState.WAITING, RequestState.PREEMPTED)),
            (self._held, (RequestState.HELD,)),
        )
        for container, states in places:
            for request in container:
                assert request.state in states, f"{request!r} is in the wrong container"
        everyone = self.unfinished()
        assert len(set(everyone)) == len(everyone), "a request is in two containers"
        assert self.num_running <= self.config.max_num_seqs, "more run than max_num_seqs"
        self._cache.check(self.running())
        for request in self._decoding:
            assert request in self._bucket(request), f"{request!r} is not in its bucket"
        assert self._num_decode_kv == sum(request.num_computed_tokens for request in self._decoding)
        assert sum(map(len, self._wheel)) == len(self._decoding), "the wheel holds others than the decodes"

    # ---- Details

    def _check_queue(self, num_new: int) -> None:
        limit = self.config.max_queue
        if limit is None:
            return
        refusal.check_never_too_many(limit, num_new)
        if self.num_waiting + num_new > limit:
            raise refusal.queue_full(limit, self.num_waiting, num_new, self._estimate_ttft_ns(None))

    def _estimate_ttft_ns(self, request: Request | None) -> int | None:
        """When the first token of `request`, or of one that comes last, is expected; None while that is not known."""
        if not self.step_time.is_fitted:
            return None
        num_ahead, tokens_ahead, blocks_ahead = 0, 0, 0
        standing = None if request is None else self._waiting.standing(request)
        for other in self._waiting:
            if standing is None or self._waiting.standing(other) < standing:
                num_ahead += 1
                tokens_ahead += other.num_tokens
                blocks_ahead += need(other, 0, self.config.block_size)
        tokens_ahead += sum(other.num_tokens - other.num_computed_tokens for other in self._prefilling)
        own_blocks = 0 if request is None else need(request, 0, self.config.block_size)
        forecast, config = self._capacity.forecast, self.config
        num_seats = max(0, config.max_num_seqs - 1 - num_ahead)
        num_blocks = max(0, config.num_blocks - blocks_ahead - own_blocks)
        if self.num_running <= num_seats and own_blocks + blocks_ahead <= self._cache.pool.num_free:
            steps = 0
        else:
            bucket = forecast.first_room(num_blocks, num_seats)
            bucket = forecast.last_bucket if bucket is None else bucket
            steps = (bucket - forecast.bucket) * config.block_size
        prefix = None if request is None else self._cache.find_prefix(request)
        return estimate_ttft_ns(
            self.step_time,
            num_prompt_tokens=1 if request is None else request.num_prompt_tokens,
            num_cached_tokens=0 if prefix is None else prefix.num_tokens,
            num_tokens_ahead=tokens_ahead,
            tokens_per_step=max(1, config.max_num_batched_tokens - len(self._decoding)),
            num_decodes=len(self._decoding),
            kv_tokens=self._num_decode_kv,
            steps_until_room=steps,
        )

    def _check_order_key(self, request: Request) -> None:
        """Raise PolicyFault if an order of the user's gives `request` no key that compares with those of others."""
        if isinstance(self.config.order, str):
            return
        try:
            self._waiting.check_place(request)
        except Exception as error:
            self._note_fault(self._order.name, error)
            raise PolicyFault(
                f"The order {self._order.name!r} gives no key for request {request.request_id!r}: {error}",
                policy=self._order.name,
            ) from error

    def _note_fault(self, name: str, error: Exception) -> None:
        self.policy_faults[name] = self.policy_faults.get(name, 0) + 1
        if self.policy_faults[name] == 1:  # the others are counted
            what = str(error) or type(error).__name__
            warnings.warn(f"The scheduling policy {name!r} broke its rules: {what}", RuntimeWarning, stacklevel=4)

    def _count_itl_limit(self, request: Request, sign: int) -> None:
        limit = request.itl_limit_ns
        if limit is None:
            return
        number = self._itl_limits.pop(limit, 0) + sign
        if number:
            self._itl_limits[limit] = number

    def _now(self) -> int:
        self._last_now_ns = max(self._last_now_ns, self._clock())
        return self._last_now_ns

    def _bucket(self, request: Request) -> dict[Request, None]:
        return self._wheel[(self._step - request.num_computed_tokens) % self.config.block_size]


def _consume(iterator: Iterator[object]) -> None:
    """Run through `iterator` for what it does, in C."""
    deque(iterator, maxlen=0)


def _check_token_ids(plan: StepPlan, token_ids: Sequence[int | None]) -> None:
    """Raise ValueError unless there is one for each request of `plan` that samples and is still live."""
    if len(token_ids) != len(plan.requests):
        raise ValueError(f"Step {plan.step} has {len(plan.requests)} requests, but {len(token_ids)} tokens came.")
    if None not in token_ids:
        return
    for request, samples, token_id in zip(plan.requests, plan.samples, token_ids, strict=True):
        if token_id is None and samples and not request.is_finished:
            raise ValueError(f"Step {plan.step} has no token for {request!r}, which samples.")
