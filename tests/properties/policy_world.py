"""A world for every axis of the scheduler: orders, packings, capacities, batching, limits, holds and pauses.

Each `check_` method is one invariant. It says what must be true in terms of its own: whoever is first by its own key,
what its own count of blocks and tokens is. `counts` has how often each was looked at.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from pyengine.request import Request, RequestState
from pyengine.scheduler import Reason, Scheduler, StepPlan
from pyengine.scheduler.admission import Admission
from pyengine.scheduler.capacity import Guaranteed
from pyengine.scheduler.decision_log import DecisionLog
from pyengine.scheduler.forecast import Forecast
from pyengine.scheduler.order import Fair
from pyengine.scheduler.plan import PlanDraft
from pyengine.scheduler.reservation import Reservation
from pyengine.scheduler.step_time import StepFeatures, StepTimeModel, step_features

from .scheduler_world import CachedWorld

STEP_COST = (1000.0, 20.0, 50.0, 1.0, 0.0)  # ns: base, a prefill token, a decode, a token with KV, a pair
OUTPUT_WEIGHT = 2
NO_LIMIT_NS = 60 * 10**9
CREDIT_PER_S = 256
GATES = frozenset(
    {
        Reason.PAUSED,
        Reason.DRAIN,
        Reason.STATIC_BATCH,
        Reason.BATCH_WAIT,
        Reason.TOKEN_BUDGET,
        Reason.LATENCY_LIMIT,
    }
)
Key = tuple[Any, ...]


class FixedModel(StepTimeModel):
    """A device whose cost is known; it learns nothing."""

    __slots__ = ()

    def observe(self, features: StepFeatures, duration_ns: int) -> None:
        pass


@dataclass
class Seen:
    """What the admissions of the last step were."""

    budget: int = 0
    bound_by: Reason | None = None
    is_forced: bool = False
    closed_by: Reason | None = None
    is_open: bool = False  # somebody waited and no gate was closed
    scanned: bool = False
    service: dict[str, int] = field(default_factory=dict)
    head: Request | None = None
    reservation: Reservation | None = None
    stopped_by: Reason | None = None


class WatchedFair(Fair):
    """Remembers what was charged for each request, by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.paid: Counter[int] = Counter()

    def granted(self, request: Request, num_tokens: int) -> None:
        super().granted(request, num_tokens)
        self.paid[request.arrival_seq] += num_tokens


class WatchedScheduler(Scheduler):
    """A scheduler that remembers what its last admissions were."""

    seen = Seen()

    def schedule(self) -> StepPlan:
        self.seen = Seen()
        return super().schedule()

    def _set_budget(self, draft: PlanDraft) -> None:
        before = getattr(self._latency, "num_forced_steps", 0)
        super()._set_budget(draft)
        self.seen.budget, self.seen.bound_by = draft.budget, draft.bound_by
        self.seen.is_forced = getattr(self._latency, "num_forced_steps", 0) > before

    def _gate(self, draft: PlanDraft, now_ns: int) -> Reason | None:
        self.seen.closed_by = super()._gate(draft, now_ns)
        self.seen.is_open = self.seen.closed_by is None
        return self.seen.closed_by

    def _run_packing(self, admission: Admission) -> bool:
        self.seen.scanned = True
        self.seen.service = dict(self._order.service) if isinstance(self._order, Fair) else {}
        done = super()._run_packing(admission)
        self.seen.head, self.seen.reservation = admission.head, admission.reservation
        self.seen.stopped_by = admission.stopped_by
        return done


def fork(scheduler: Scheduler) -> tuple[WatchedScheduler, dict[int, Any]]:
    """A copy that goes its own way, with a clock that stands still, and what became of each object, by its id."""
    recorder, clock = scheduler.recorder, scheduler._clock
    now_ns = clock()
    silent = DecisionLog(scheduler.config, enabled=False)
    memo: dict[int, Any] = {id(scheduler.log): silent, id(recorder): None, id(clock): lambda: now_ns}
    scheduler.recorder = None
    try:
        made: WatchedScheduler = copy.deepcopy(scheduler, memo)  # type: ignore[assignment]
    finally:
        scheduler.recorder = recorder
    return made, memo


@dataclass
class Photo:
    """What was there before a step."""

    free: list[int]
    keys: dict[bytes, int]
    table_sizes: dict[Request, int]
    waiting: list[Request]
    held: dict[Request, int]
    bypassed: dict[Request, int]
    service: dict[str, int]
    hits: tuple[int, int]
    peak: int
    limits: list[int]


class PolicyWorld(CachedWorld):
    """A world in which everything is looked at after each event."""

    def __post_init__(self) -> None:
        if self.step_time is None:
            self.step_time = FixedModel(STEP_COST)
        super().__post_init__()
        self.counts: Counter[str] = Counter()
        self.passed_tokens: Counter[Request] = Counter()
        self.novel: Counter[Request] = Counter()  # tokens computed in chunks that never were before
        self.reached: Counter[Request] = Counter()  # the most tokens that each ever had KV for
        self.promises: dict[Request, int | None] = {}
        self.excused: set[Request] = set()
        self.num_heads = 0
        self.num_late_heads = 0
        self.num_passers = self.num_chunked_passers = 0
        self.chunked_passers: dict[Request, int] = {}  # by which step each must have computed its prompt
        self.bound: int | None = None
        self.timers: dict[Request, int] = {}  # when each began to wait in its class
        self.classes: dict[Request, int] = {}
        self.batch_is_forming = True
        self.fork_before: WatchedScheduler | None = None
        self.wants_fork: Callable[[], bool] = lambda: False
        self.on_passing: Callable[[Scheduler, list[Request], Request], None] | None = None
        for name in dir(self):
            if name.startswith("check_"):
                setattr(self, name, self._counted(name))

    def _counted(self, name: str) -> Callable[..., None]:
        method = getattr(self, name)

        @wraps(method)
        def counted(*args: Any) -> None:
            self.counts[name] += 1
            method(*args)

        return counted

    def make_scheduler(self, log: DecisionLog) -> Scheduler:
        made = WatchedScheduler(self.config, clock=lambda: self.now_ns, step_time=self.step_time, log=log)
        if self.config.order == "fair":
            made._order = made._waiting._order = WatchedFair()
        return made

    @property
    def seen(self) -> Seen:
        assert isinstance(self.scheduler, WatchedScheduler)
        return self.scheduler.seen

    # ---- Events

    def submit(self, prompt: list[int], max_tokens: int | None, n: int = 1, **fields: Any) -> list[Request]:
        made = super().submit(prompt, max_tokens, n, **fields)
        for request in made:
            self.timers[request] = self.now_ns
        return made

    def hold(self, request: Request, until_ns: int) -> None:
        self.scheduler.hold(request, "its grammar", until_ns)
        self.timers.pop(request)
        self.promises.pop(request, None)

    def wake(self, request: Request) -> None:
        assert self.scheduler.wake(request)
        self.timers[request] = self.now_ns

    def preempt(self, request: Request) -> None:
        """Take the KV of a running request away, between two steps."""
        self.scheduler._preempt(request, self.now_ns)
        self.timers[request] = self.now_ns

    def photograph(self) -> Photo:
        scheduler = self.scheduler
        pool, order = scheduler._cache.pool, scheduler._order
        return Photo(
            free=list(pool.free_blocks()),
            keys=dict(pool.keys),
            table_sizes={request: len(request.block_table) for request in scheduler.running()},
            waiting=[request for request in self.requests if request.is_waiting],
            held=dict(scheduler._held),
            bypassed={request: request.bypassed_tokens for request in self.requests},
            service=dict(order.service) if isinstance(order, Fair) else {},
            hits=(scheduler._cache.num_queried_tokens, scheduler._cache.num_hit_tokens),
            peak=scheduler._capacity.forecast.peak(),
            limits=[r.itl_limit_ns for r in scheduler.running() if r.itl_limit_ns is not None],
        )

    def issue(self) -> StepPlan:
        self.photo = photo = self.photograph()
        self.copy = fork(self.scheduler) if self.on_passing is not None else None
        self.fork_before = None
        if self.scheduler._fruitless is not None and self.wants_fork():
            self.fork_before, _ = fork(self.scheduler)
        plan = super().issue()
        self.passers: list[Request] = []
        for request in plan.preempted:
            self.timers[request] = self.now_ns
        self.check_scan_order(plan, photo)
        self.check_passing(plan)
        self.check_bypass_budget(plan)
        self.check_aging_barrier(plan)
        self.check_reservation(plan)
        self.check_certificate(plan)
        self.check_failed_admission(plan, photo)
        self.check_gates(plan, photo)
        self.check_latency(plan, photo)
        self.check_refused(plan, photo)
        self.check_classes(photo)
        self.check_queue()
        self.check_forecast()
        self.check_service(plan)
        self.check_skipped_admissions(plan)
        return plan

    def device_ns(self, plan: StepPlan) -> int:
        """What the pass takes."""
        assert self.step_time is not None
        return self.step_time.predict(step_features(plan))

    def drain(self) -> None:
        """Resume, wake everyone, and run until nobody is left, within a bound on steps."""
        if self.in_flight is not None:
            self.finish_step()
        self.scheduler.resume()
        for request in list(self.scheduler._held):
            self.wake(request)
        tokens = sum(r.num_prompt_tokens + r.max_tokens for r in self.requests if not r.is_finished)
        bound = self.steps + 20 + 8 * tokens
        while self.scheduler.has_unfinished:
            plan = self.issue()
            self.check_finite_load(bound)
            if plan.is_empty:
                wake_ns = self.scheduler.next_wake_ns()
                if self.scheduler.has_unfinished:
                    assert wake_ns is not None, "somebody waits, and nothing will happen"
                    self.advance_clock(max(0, wake_ns - self.now_ns))
                continue
            self.advance_clock(self.device_ns(plan))
            self.finish_step()
            self.check_everything()

    # ---- What is true of a step

    def check_finite_load(self, bound: int) -> None:
        """A finite load ends in bounded steps."""
        assert self.steps <= bound, "a finite load does not end"

    def check_progress(self, plan: StepPlan) -> None:
        """With nothing running and somebody waiting something is scheduled, but for a pause, holds and a batch wait."""
        if not plan.is_empty or not self.scheduler.has_unfinished:
            return
        assert self.scheduler.num_running == 0
        waiting = [request for request in self.requests if request.is_waiting]
        if self.scheduler.is_paused or not waiting:
            return
        wake_ns = self.scheduler.next_wake_ns()
        assert self.seen.closed_by is Reason.BATCH_WAIT, "somebody waits, and nothing runs"
        assert self.config.max_batch_wait_ms
        assert wake_ns is not None
        assert wake_ns <= min(r.queued_since_ns for r in waiting) + self.config.max_batch_wait_ms * 1e6
        assert len(waiting) < self.config.max_num_seqs

    def own_key(self, request: Request, service: dict[str, int]) -> Key:
        """Where `request` stands, as the documentation has it."""
        limit = request.ttft_limit_ns
        due_ns = request.arrival_ns + (NO_LIMIT_NS if limit is None else limit)
        work = (request.num_prompt_tokens + request.max_tokens) * 10**9 + request.arrival_ns * CREDIT_PER_S
        keys: dict[str, Key] = {
            "fifo": (),
            "priority": (request.priority_class,),
            "deadline": (request.priority_class, due_ns),
            "shortest": (request.priority_class, work),
            "fair": (request.priority_class, service.get(request.tenant, 0), due_ns),
        }
        return (*keys[self.config.order], request.arrival_seq)

    def check_order(self, plan: StepPlan) -> None:
        pass  # see check_scan_order, which knows all orders

    def check_scan_order(self, plan: StepPlan, photo: Photo) -> None:
        """Nobody starts before an earlier one, but for those that wait for a prefix, and those that pass the head."""
        seen = self.seen
        if not seen.scanned:
            assert not plan.joined
            return
        refused = {request for request, _ in plan.refused}
        waiting = {*photo.waiting, *plan.preempted} - refused
        num_waiting = len(waiting)
        service, head = dict(seen.service), seen.head

        def key(request: Request) -> Key:
            return self.own_key(request, service)

        def excused(request: Request) -> bool:
            return request is not head and request.is_waiting and self.is_computed_by_another(request)

        for request in plan.joined:
            first = min((r for r in waiting if not excused(r)), key=key)
            if first is not request:
                assert first is head, f"{request!r} starts before {first!r}"
                assert self.config.packing == "best_fit", f"{request!r} passes {head!r}"
                self.passers.append(request)
            waiting.remove(request)
            place = plan.requests.index(request)
            # What passers are charged comes after the head was found.
            if self.config.order == "fair" and not self.passers:
                service[request.tenant] += request.num_tokens - max(plan.num_computed[place], self.reached[request])
        left = [request for request in waiting if not excused(request)]
        if left and head is None:
            assert num_waiting > self.config.window, f"{min(left, key=key)!r} waits for nothing"
        elif left:
            assert min(left, key=key) is head, f"{min(left, key=key)!r} is passed by the head"

    def check_passing(self, plan: StepPlan) -> None:
        """Who passes has all its tokens computed before the head can start, whose reserved start is to come."""
        self.num_passers += len(self.passers)
        for request, until in list(self.chunked_passers.items()):
            if request.state is not RequestState.PREFILL:
                del self.chunked_passers[request]
            else:
                assert plan.step + 1 < until, f"{request!r} has the tokens that a head was promised"
        for request in self.passers:
            reservation = self.seen.reservation
            assert reservation is not None
            if not plan.samples[plan.requests.index(request)]:
                self.num_chunked_passers += 1
                self.chunked_passers[request] = reservation.first_step
                assert plan.num_prefill_tokens == self.seen.budget, "tokens are left, and yet it was cut"
            assert reservation is not None
            # Where lengths are guessed, the forecast may have room for a head that does not fit now.
            assert reservation.step > plan.step or self.config.capacity != "guaranteed"
        if self.passers and self.on_passing is not None:
            assert self.copy is not None
            assert self.seen.head is not None
            self.on_passing(self.scheduler, self.passers, self.seen.head)

    def check_bypass_budget(self, plan: StepPlan) -> None:
        """Those who pass a head compute at most bypass_budget times its prompt tokens in all."""
        head = self.seen.head
        for request in self.passers:
            assert head is not None
            self.passed_tokens[head] += request_tokens(plan, plan.requests.index(request))
            assert self.passed_tokens[head] <= self.config.bypass_budget * head.num_prompt_tokens

    def check_aging_barrier(self, plan: StepPlan) -> None:
        """Nobody passes a head that has waited beyond the aging barrier."""
        if self.passers:
            assert self.seen.head is not None
            assert self.waited_ns[self.seen.head] < self.config.aging_barrier_s * 1e9

    def check_reservation(self, plan: StepPlan) -> None:
        """In guaranteed mode a head starts no later than promised, and no promise moves to later.

        But when one of higher order came, or the gate for all was closed, or prompts ahead used up the step's tokens.
        """
        seen = self.seen
        if self.config.capacity != "guaranteed":
            return
        if not seen.is_open:
            if seen.closed_by in GATES and not self.chunked_passers:  # for those was to be time
                self.excused.update(self.promises)
            return
        for request in plan.joined:
            promised = self.promises.pop(request, None)
            if promised is not None and request not in self.excused:
                self.num_heads += 1
                self.num_late_heads += plan.step > promised
                assert plan.step <= promised, f"{request!r} was promised step {promised}"
        if not seen.scanned:
            assert all(promised is None or plan.step < promised for promised in self.promises.values())
            return
        if any(request not in self.passers for request in plan.joined):
            self.promises.clear()
        head = seen.head
        if head is None or not self.promises.keys() <= {head}:
            self.promises.clear()
        if head is None:
            return
        start = None if seen.reservation is None else seen.reservation.step
        promised = self.promises.get(head)
        if promised is not None and head not in self.excused:
            assert start is not None
            assert start <= promised, f"the promise to {head!r} moved"
        if head not in self.promises or start is not None:
            self.promises[head] = start
            self.excused.discard(head)

    def check_certificate(self, plan: StepPlan) -> None:
        """In guaranteed mode no step uses more blocks than the certificate said when somebody last started."""
        capacity = self.scheduler._capacity
        if not isinstance(capacity, Guaranteed):
            return
        peak = capacity.forecast.peak()
        if plan.joined or self.bound is None:
            self.bound = peak
        assert peak <= self.bound, "the certificate rose by itself"
        held = {block for request in self.scheduler.running() for block in request.block_table}
        assert len(held) <= self.bound <= self.config.num_blocks

    def check_failed_admission(self, plan: StepPlan, photo: Photo) -> None:
        """Where nobody starts, all is as it was: only decodes that grow take blocks, from the front."""
        if plan.joined or plan.preempted or plan.refused:
            return
        scheduler = self.scheduler
        pool, order = scheduler._cache.pool, scheduler._order
        grown = sum(len(r.block_table) - size for r, size in photo.table_sizes.items())
        assert list(pool.free_blocks()) == photo.free[grown:]
        taken = set(photo.free[:grown])
        assert dict(pool.keys) == {key: block for key, block in photo.keys.items() if block not in taken}
        assert (scheduler._cache.num_queried_tokens, scheduler._cache.num_hit_tokens) == photo.hits
        assert {request: request.bypassed_tokens for request in self.requests} == photo.bypassed
        assert dict(scheduler._held) == photo.held
        if isinstance(order, Fair):
            made = Counter(r.tenant for r in plan.requests[: plan.num_decode_tokens])
            # One that begins to decode with this pass is not charged for it.
            began = Counter(
                r.tenant for i, r in enumerate(plan.requests) if i >= plan.num_decode_tokens and plan.samples[i]
            )
            for tenant, had in photo.service.items():
                gained = order.service[tenant] - had
                assert gained == OUTPUT_WEIGHT * made[tenant], (tenant, gained, made, began)

    def check_gates(self, plan: StepPlan, photo: Photo) -> None:
        """While paused, or while a static batch runs, nobody starts; the reason of a closed gate is true."""
        seen, scheduler = self.seen, self.scheduler
        joined = bool(plan.joined)
        if scheduler.is_paused:
            assert not joined
        if self.config.batching == "static" and joined and photo.table_sizes:
            assert self.batch_is_forming, "somebody joined a static batch that was formed"
        if seen.closed_by is not None:
            assert not joined
        if seen.closed_by is Reason.MAX_SEQS:
            assert scheduler.num_running == self.config.max_num_seqs
        if seen.closed_by in (Reason.TOKEN_BUDGET, Reason.LATENCY_LIMIT):
            assert plan.num_prefill_tokens == seen.budget
        if joined or not scheduler.num_running:
            # It goes on being formed only where the tokens of the step were the limit, or a prefix is computed first.
            self.batch_is_forming = plan.num_prefill_tokens == seen.budget or any(
                self.is_computed_by_another(r) for r in self.requests if r.is_waiting
            )

    def check_latency(self, plan: StepPlan, photo: Photo) -> None:
        """A pass with decodes keeps the tightest limit of those that run, unless the decodes alone break it."""
        assert plan.num_prefill_tokens <= self.seen.budget
        if not photo.limits or not plan.num_decode_tokens:
            return
        running = [r.itl_limit_ns for r in self.photo.table_sizes if r.itl_limit_ns is not None and not r.is_waiting]
        if not running or plan.num_prefill_tokens == 0:
            return
        if self.seen.is_forced:
            assert plan.num_prefill_tokens <= self.config.block_size
            return
        assert self.device_ns(plan) <= min(running), "a pass is longer than the tightest limit"

    def check_refused(self, plan: StepPlan, photo: Photo) -> None:
        """Who has not started by its limit, or is held for too long, is ended, and nobody else is."""
        for request, _ in plan.refused:
            assert request.finish_reason == "error"
            assert request.started_ns is None
            limit = request.ttft_limit_ns
            is_late = limit is not None and self.now_ns >= request.arrival_ns + limit
            is_held = request in photo.held and self.now_ns >= photo.held[request]
            assert is_late or is_held
        for request in self.scheduler.unfinished():
            if request.started_ns is None and request.ttft_limit_ns is not None:
                assert self.now_ns < request.arrival_ns + request.ttft_limit_ns
        assert all(until_ns > self.now_ns for until_ns in self.scheduler._held.values())

    def check_service(self, plan: StepPlan) -> None:
        """A tenant is charged for each token computed for it once, when it is to be; what is not is given back."""
        order = self.scheduler._order
        if not isinstance(order, WatchedFair):
            return
        for i in range(len(plan.requests)):
            request, computed, new = plan.requests[i], plan.num_computed[i], plan.num_new_tokens[i]
            if i >= plan.num_decode_tokens:
                self.novel[request] += max(0, computed + new - max(computed, self.reached[request]))
            self.reached[request] = max(self.reached[request], computed + new)
        for request in self.requests:
            due = self.novel[request]
            if request.state is RequestState.PREFILL:
                due += request.num_tokens - self.reached[request]
            assert order.paid[request.arrival_seq] == due

    def check_classes(self, photo: Photo) -> None:
        """A waiting request moves up one class whenever it has waited for the promotion time; under fifo never."""
        promotion_ns = int(self.config.priority_promotion_s * 1e9)
        for request in self.requests:
            if (request.is_waiting or request in photo.waiting) and self.config.order != "fifo":
                known = self.classes.setdefault(request, request.priority)
                # A step carries it out, and the next wait begins then.
                while known > 0 and self.now_ns - self.timers[request] >= promotion_ns:
                    known -= 1
                    self.timers[request] = self.now_ns
                self.classes[request] = known
            assert request.priority_class == self.classes.setdefault(request, request.priority)

    def check_queue(self) -> None:
        """The waiting queue is sorted by the order and holds exactly those that wait."""
        order = self.scheduler._order
        service = dict(order.service) if isinstance(order, Fair) else {}
        waiting = [request for request in self.requests if request.is_waiting]
        assert list(self.scheduler._waiting.scan()) == sorted(waiting, key=lambda r: self.own_key(r, service))
        assert set(self.scheduler._waiting) == set(waiting)
        assert len(self.scheduler._waiting) == len(waiting)

    def check_forecast(self) -> None:
        """The forecast is the sum of the charges of exactly those that run, and each is for all the tokens it knows."""
        capacity, size = self.scheduler._capacity, self.config.block_size
        assert set(capacity._charges) == set(self.scheduler.running())
        fresh = Forecast(self.config.max_context, size)
        fresh.move_to(capacity.forecast.bucket)
        for request, charge in capacity._charges.items():
            fresh.add(charge)
            assert charge.final * size < request.num_prompt_tokens + request.max_tokens - 1 + size
            if charge.last_bucket is None:
                assert request.state is RequestState.PREFILL
                assert charge.final * size >= request.num_tokens
            else:
                assert request.state is RequestState.DECODE
                assert charge.last_bucket >= capacity.forecast.bucket, f"{request!r} outlived its charge"
                now = min(charge.final, charge.offset + capacity.forecast.bucket)
                # One that outlives what was predicted is charged anew when the bucket is over, a block later at most.
                late = 1 if self.config.capacity == "predicted" else 0
                assert now + late >= len(request.block_table), f"{request!r} holds more than it is charged for"
        forecast = capacity.forecast
        assert forecast.peak() == fresh.peak()
        assert forecast.seats_in(forecast.bucket) == self.scheduler.num_running
        assert forecast.last_bucket >= fresh.last_bucket
        charges = list(capacity._charges.values())
        prefill_blocks = sum(charge.final for charge in charges if charge.last_bucket is None)
        num_prefills = sum(charge.last_bucket is None for charge in charges)
        for bucket in range(forecast.bucket, fresh.last_bucket):
            last = [charge for charge in charges if charge.last_bucket == bucket]
            later = [charge for charge in charges if charge.last_bucket is not None and charge.last_bucket > bucket]
            blocks, seats = forecast.use_from(bucket, 0)
            assert seats == num_prefills + len(last) + len(later)
            assert list(blocks) == [prefill_blocks + sum(c.final for c in last) + sum(c.offset + bucket for c in later)]
        in_ends = {r: bucket for bucket, requests in capacity._ends.items() for r in requests}
        wanted = {r: charge.last_bucket for r, charge in capacity._charges.items() if charge.last_bucket is not None}
        assert in_ends == wanted

    def check_skipped_admissions(self, plan: StepPlan) -> None:
        """Admissions that were skipped because nothing had changed would have started nobody."""
        if self.fork_before is None or self.seen.scanned or not self.seen.is_open:
            return
        self.fork_before._fruitless = None
        assert not self.fork_before.schedule().joined, "an admission was skipped that had somebody to start"

    # ---- What is true at any time

    def check_everything(self) -> None:
        self.check_structures()
        self.check_refcounts()
        self.check_blocks()
        self.check_tables()
        self.check_waits()
        self.check_moves()
        self.check_outputs()
        self.check_writes()
        self.check_log()

    def check_blocks(self) -> None:
        """free + held + fenced = pool; cached idle blocks are free ones."""
        pool = self.scheduler._cache.pool
        held = {block for request in self.scheduler.running() for block in request.block_table}
        free = list(pool.free_blocks())
        fenced = [block for blocks in pool._fenced.values() for block in blocks]
        assert sorted([*free, *held, *fenced]) == list(range(self.config.num_blocks))
        assert pool.num_idle == sum(block in set(pool.keys.values()) for block in free)
        assert self.scheduler.num_free_blocks == len(free)
        if self.in_flight is None:
            assert not fenced

    def check_refcounts(self) -> None:
        """A block's refcount is the number of tables that hold it."""
        held = Counter(block for request in self.scheduler.running() for block in request.block_table)
        pool = self.scheduler._cache.pool
        assert [pool.refcount(block) for block in range(self.config.num_blocks)] == [
            held[block] for block in range(self.config.num_blocks)
        ]

    def check_log(self) -> None:
        """The parts of each wait sum to its queue time exactly."""
        if not self.is_logged:
            return
        for request in self.requests:
            explained = self.scheduler.log.explain(request, self.now_ns)
            assert sum(explained.wait_ns.values()) == explained.queue_ns == self.waited_ns[request]


def request_tokens(plan: StepPlan, place: int) -> int:
    """All tokens that a request that joined has to compute."""
    request: Request = plan.requests[place]
    known = request.num_tokens
    return known - plan.num_computed[place]
