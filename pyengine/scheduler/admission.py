"""Admission: the waiting requests of one step, tried one by one. Whom to try, and in which order, a packing decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from pyengine.config import SchedulerConfig
from pyengine.errors import PolicyFault
from pyengine.kv_cache.kv_cache import KVCache, Prefix
from pyengine.request import Request, RequestState
from pyengine.scheduler.capacity import Capacity
from pyengine.scheduler.decision_log import DecisionLog
from pyengine.scheduler.order import Order, WaitingQueue
from pyengine.scheduler.plan import PlanDraft
from pyengine.scheduler.reservation import Reservation
from pyengine.scheduler.verdict import STARTS, Reason, Verdict

SHARED_REASONS = frozenset({Reason.MAX_SEQS, Reason.TOKEN_BUDGET, Reason.LATENCY_LIMIT})
MAX_TRIES_A_REQUEST = 4

Starter = Callable[[Request, Prefix, "Request | None"], None]


class Admission:
    """What a packing may ask and do in one step.

    Attributes:
        config: the scheduler's settings.
        now_ns: the time of the step.
        head: the first that does not fit, once `block` was called for it.
        num_running: requests that have a seat.
        num_started: those that started in this step.
        is_final: whether every refusal stands as long as nobody comes or goes.
        stopped_by: why the head does not start; None while there is none.
    """

    __slots__ = (
        "_cache",
        "_capacity",
        "_draft",
        "_is_limited",
        "_log",
        "_num_tries",
        "_order",
        "_queue",
        "_ready",
        "_rest",
        "_scan",
        "_slack",
        "_start",
        "_started_before_head",
        "config",
        "head",
        "is_final",
        "now_ns",
        "num_running",
        "num_started",
        "reservation",
        "stopped_by",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        queue: WaitingQueue,
        order: Order,
        cache: KVCache,
        capacity: Capacity,
        log: DecisionLog,
        draft: PlanDraft,
        now_ns: int,
        num_running: int,
        is_limited: bool,
        start: Starter,
    ) -> None:
        self.config = config
        self.now_ns = now_ns
        self.num_running = num_running
        self.num_started = 0
        self.head: Request | None = None
        self.reservation: Reservation | None = None
        self.stopped_by: Reason | None = None
        self.is_final = True
        self._queue = queue
        self._order = order
        self._cache = cache
        self._capacity = capacity
        self._log = log
        self._draft = draft
        self._is_limited = is_limited  # an inter-token limit may leave a step fewer prompt tokens than the others
        self._start = start
        self._rest: Reason | None = None
        self._scan = islice(queue.scan(), config.window)
        self._slack: dict[Request, float] = {}
        self._ready: dict[Request, Prefix] = {}  # those that may pass, as long as nobody else starts
        self._started_before_head: Request | None = None
        self._num_tries = 0

    # ---- What a packing may ask

    def waiting(self) -> Iterator[Request]:
        """The waiting requests in order, at most `config.window` of them. Can be gone through once."""
        return self._scan

    @property
    def budget(self) -> int:
        """Prompt tokens that this step has left."""
        return self._draft.budget

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that nobody holds."""
        return self._cache.pool.num_free

    def slack(self, request: Request) -> float:
        """The share of what is scarcest, tokens or blocks, that `request`, which may pass, would leave."""
        return self._slack[request]

    # ---- What a packing may do

    def try_start(self, request: Request) -> Verdict:
        """Start or resume `request` if seat, tokens and KV blocks allow, and if it may pass the head, if there is one.

        Raises PolicyFault for one that does not wait, or when far more are tried than there are.
        """
        self._check(request)
        ready = self._ready.get(request)
        verdict, prefix = (STARTS, ready) if ready is not None else self._judge(request)
        if prefix is None or not verdict.starts:
            self._note_waits(request, verdict)
            if self.head is None:
                self.stopped_by = verdict.reason if verdict.blocks_others else None
            return verdict
        if self.head is not None:
            self.head.bypassed_tokens += request.num_tokens - prefix.num_tokens
        else:
            self._started_before_head = request
        self._ready.clear()
        self._start(request, prefix, self.head)
        if self.reservation is not None:
            self._capacity.passed(self.reservation, request, is_whole=self._draft.samples[-1])
        self._is_limited |= request.itl_limit_ns is not None
        self.num_started += 1
        self.num_running += 1
        return verdict

    def block(self, head: Request, *, may_be_passed: bool = False) -> bool:
        """Note that `head` is the first that does not fit; returns whether others may pass it at all.

        Nobody may when what it lacks they lack as well, when it has waited beyond the aging barrier, or when there is
        no step at which it is sure to fit.
        """
        if not isinstance(head, Request) or not head.is_waiting:
            raise PolicyFault(f"It blocked {head!r}, which does not wait.", policy="")
        self.head = head
        if self.stopped_by in SHARED_REASONS:
            self._rest = self.stopped_by
            return False
        self._rest = Reason.BEHIND_HEAD
        if not may_be_passed:
            return False
        self.reservation = self._capacity.reserve(head)
        if self._started_before_head is not None:
            self._log.void_reservation(head, self._started_before_head)
        start = None if self.reservation is None else self.reservation.step
        self._log.reserved(head, start)
        if head.queue_ns_at(self.now_ns) >= self.barrier_ns:
            self._rest = Reason.AGING_BARRIER
            return False
        return self.reservation is not None

    def may_pass(self, request: Request) -> Verdict:
        """Whether `request` may start now although the head does not fit; noted in the log if not."""
        verdict, prefix = self._judge(request)
        if not verdict.starts:
            self._note_waits(request, verdict)
        elif prefix is not None:
            self._ready[request] = prefix
        return verdict

    # ---- For the scheduler

    def start_over(self) -> None:
        """Another packing goes on: it finds all who still wait, and no head."""
        self._scan = islice(self._queue.scan(), self.config.window)
        self._num_tries = 0
        self.head = self.reservation = self.stopped_by = None

    @property
    def barrier_ns(self) -> int:
        """How long a head waits before nobody may pass it any more."""
        return int(self.config.aging_barrier_s * 1e9)

    def finish(self) -> None:
        """The packing is done: note what those wait for that were not examined."""
        head = self.head
        if head is None:
            # Everyone in the window started or waits for its own reason; beyond it nobody was examined.
            self._log.rest_waits(Reason.BEHIND_HEAD)
            return
        if self._order.name != "fifo" and self._rest is Reason.BEHIND_HEAD:
            for request in self._scan:
                reason = _precedence(head, request)
                if reason is not None:
                    self._log.waits(request, Verdict(reason), head)
        assert self._rest is not None
        self._log.rest_waits(self._rest, None if self._rest in SHARED_REASONS else head)

    # ---- Details

    def _judge(self, request: Request) -> tuple[Verdict, Prefix | None]:
        config, draft = self.config, self._draft
        if self.num_running == config.max_num_seqs:
            return Verdict(Reason.MAX_SEQS, 1, 0), None
        if draft.budget == 0:
            return Verdict(draft.bound_by or Reason.TOKEN_BUDGET, request.num_tokens, 0), None
        prefix = self._cache.find_prefix(request)
        if prefix is None:
            return Verdict(Reason.SHARED_PREFIX_PENDING), None
        num_tokens = request.num_tokens - prefix.num_tokens
        whole_in_step = num_tokens <= draft.budget
        if self.head is None:
            return self._capacity.verdict(request, prefix, whole_in_step, self.num_running), prefix
        return self._judge_passing(self.head, request, prefix, num_tokens, whole_in_step), prefix

    def _judge_passing(
        self, head: Request, request: Request, prefix: Prefix, num_tokens: int, whole_in_step: bool
    ) -> Verdict:
        draft, reservation = self._draft, self.reservation
        if not whole_in_step and num_tokens <= draft.first_budget:  # the next step has as many
            return Verdict(draft.bound_by or Reason.TOKEN_BUDGET, num_tokens, draft.budget)
        num_steps = 1 if whole_in_step else self._num_chunks(request, num_tokens)
        if num_steps is None:
            return Verdict(Reason.BEHIND_HEAD)
        allowance = int(self.config.bypass_budget * head.num_prompt_tokens) - head.bypassed_tokens
        if num_tokens > allowance:
            return Verdict(Reason.BYPASS_BUDGET, num_tokens, max(allowance, 0))
        verdict = self._capacity.verdict(request, prefix, whole_in_step, self.num_running)
        if not verdict.starts:
            return verdict
        if reservation is None:
            return Verdict(Reason.WOULD_DELAY_HEAD)
        verdict = self._capacity.would_delay(reservation, request, num_steps)
        if not verdict.starts:
            return verdict
        blocks = self._cache.need_fresh(request, prefix)
        self._slack[request] = min(
            max(0, draft.budget - num_tokens) / self.config.max_num_batched_tokens,
            (self._cache.pool.num_free - blocks) / self.config.num_blocks,
        )
        return STARTS

    def _num_chunks(self, request: Request, num_tokens: int) -> int | None:
        """In how many steps from this one on a prompt of so many tokens is computed at the latest; None: not known.

        Nobody starts beside it until its last chunk, and later steps have at least what a full batch leaves.
        """
        least = self.config.max_num_batched_tokens - self.config.max_num_seqs
        if not 0 < least <= self._draft.first_budget or self._is_limited or request.itl_limit_ns is not None:
            return None
        return 1 - (self._draft.budget - num_tokens) // least

    def _note_waits(self, request: Request, verdict: Verdict) -> None:
        by = self.head
        if verdict.reason is Reason.SHARED_PREFIX_PENDING:
            by = self._cache.waits_for(request)
            self.is_final = False  # it may end without anybody coming or going
        self._log.waits(request, verdict, by)

    def _check(self, request: Request) -> None:
        self._num_tries += 1
        if not isinstance(request, Request) or request.state not in (RequestState.WAITING, RequestState.PREEMPTED):
            raise PolicyFault(f"It tried to start {request!r}, which does not wait.", policy="")
        if self._num_tries > MAX_TRIES_A_REQUEST * self.config.window:
            raise PolicyFault(f"It made {self._num_tries} tries for a window of {self.config.window}.", policy="")


def _precedence(head: Request, request: Request) -> Reason | None:
    """Why `head`, which came later, is before `request`; None if it came earlier."""
    if head.arrival_seq < request.arrival_seq:
        return None
    if head.priority_class < request.priority_class:
        return Reason.PRIORITY
    return Reason.TENANT_SHARE if head.tenant != request.tenant else None
