"""Scheduler: every step, decides which requests share the next model pass. It runs no pass and knows no model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType

from pyengine.config import SchedulerConfig
from pyengine.errors import InvalidRequest, NeverFits, QueueFull
from pyengine.kv_cache.blocks import num_blocks_for
from pyengine.kv_cache.kv_cache import KVCache
from pyengine.request import QUEUED_STATES, Request, RequestGroup, RequestState, move
from pyengine.scheduler.capacity import CAPACITIES, Capacity
from pyengine.scheduler.latency import Latency, NoLimit
from pyengine.scheduler.order import ORDERS, Order, WaitingQueue
from pyengine.scheduler.packing import PACKINGS, Packing
from pyengine.scheduler.plan import PlanDraft, StepPlan
from pyengine.scheduler.verdict import Reason, Verdict
from pyengine.scheduler.victim import LatestArrival, Victim

NOBODY_ENDS: Mapping[int, str] = MappingProxyType({})


class Scheduler:
    """Continuous batching over a paged KV pool.

    The loop is `plan = schedule()`, run the pass, `commit(plan, token_ids)`. One plan is in flight at a time. Requests
    may be added and aborted at any moment, also between the two (inputs of the pass must have been read by then).
    Not thread-safe: the owner calls it from one thread at a time.

    Each live request is in exactly one container, by its state:

        WAITING, PREEMPTED   _waiting      sorted by the order, scanned by each step
        PREFILL              _prefilling   given as many tokens as the budget allows
        DECODE               _decoding     given one token in each step, always

    `clock` gives integer nanoseconds; one that goes backwards is taken as standing still.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.config = config
        self._clock = clock
        self._last_now_ns = 0
        self._cache = KVCache(config.num_blocks, config.block_size)
        self._order: Order = ORDERS[config.order]()
        self._packing: Packing = PACKINGS[config.packing]()
        self._capacity: Capacity = CAPACITIES[config.capacity](self._cache, config)
        self._latency: Latency = NoLimit(config.max_num_batched_tokens)
        self._victim: Victim = LatestArrival()
        self._waiting = WaitingQueue(self._order)
        # Dictionaries serve as ordered sets with O(1) removal.
        self._prefilling: dict[Request, None] = {}
        self._decoding: dict[Request, None] = {}
        # A timing wheel over block_size steps. A decode gains one token a step, so it needs its next block every
        # block_size steps, always in the same bucket: (step - num_computed_tokens) mod block_size.
        self._wheel: tuple[dict[Request, None], ...] = tuple({} for _ in range(config.block_size))
        self._step = 0
        self._in_flight: StepPlan | None = None
        self._num_arrived = 0

    # ---- What may come in

    def clamp_max_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> tuple[int, bool]:
        """The limit that a prompt of this length gets, and whether it is lower than the one asked for (None: no limit).

        An empty pool holds usable_blocks * block_size tokens; the last output token needs no KV.
        Raises NeverFits if not even one token can be made.
        """
        config = self.config
        if num_prompt_tokens >= config.max_context:
            raise NeverFits(
                f"The prompt has {num_prompt_tokens} tokens and needs room for one more; the context is "
                f"{config.max_context} tokens.",
                need=num_prompt_tokens + 1,
                usable=config.max_context,
                unit="tokens",
            )
        needed = num_blocks_for(num_prompt_tokens, config.block_size)
        if needed > self.usable_blocks:
            raise NeverFits(
                f"The prompt of {num_prompt_tokens} tokens needs {needed} KV blocks of {config.block_size} tokens; "
                f"the whole pool has {self.usable_blocks}. Give the KV cache more memory or shorten the prompt.",
                need=needed,
                usable=self.usable_blocks,
            )
        most = min(
            config.max_context - num_prompt_tokens,
            self.usable_blocks * config.block_size - num_prompt_tokens + 1,
        )
        if max_tokens is None:
            return most, False
        return min(max_tokens, most), max_tokens > most

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the n sequences of one submit, which have the same prompt: all of them or none.

        Raises NeverFits if an empty engine could not run one, QueueFull, and InvalidRequest for an empty prompt,
        more sequences than the queue ever holds, or a max_tokens that is < 1 or not clamped.
        """
        if len(set(requests)) != len(requests):
            raise ValueError("A request is twice in the same submit.")
        for request in requests:
            self._check_new(request, requests[0])
        limit = self.config.max_queue
        if limit is not None and len(requests) > limit:
            raise InvalidRequest(
                f"n is {len(requests)}; max_queue is {limit}, so that the completions of one prompt never find room.",
                field="n",
                value=len(requests),
                limit=limit,
            )
        if limit is not None and self.num_waiting + len(requests) > limit:
            raise QueueFull(
                f"{self.num_waiting} requests wait and {len(requests)} more were submitted; max_queue is {limit}.",
                limit=limit,
            )
        now_ns = self._now()
        group = RequestGroup(requests) if len(requests) > 1 else None
        for request in requests:
            request.group = group
            request.arrival_seq = self._num_arrived
            request.arrival_ns = request.queued_since_ns = now_ns
            self._num_arrived += 1
            self._waiting.add(request)

    def abort(self, request: Request, reason: str = "abort") -> bool:
        """End `request` in whatever state it is, and free all it holds; False if it had ended before.

        Blocks that the step in flight writes are free once that is committed; its outcome for the request is dropped.
        """
        if request.arrival_seq < 0:
            raise ValueError(f"{request!r} was never added.")
        if request.is_finished:
            return False
        self._finish(request, reason, self._now())
        return True

    # ---- One step

    def schedule(self) -> StepPlan:
        """Plan the next pass: decodes always, then running prefills, then those that start, until a limit binds.

        Raises RuntimeError while another plan is in flight.
        """
        if self._in_flight is not None:
            raise RuntimeError(f"Step {self._in_flight.step} is in flight; commit it before the next schedule().")
        now_ns = self._now()
        draft = PlanDraft(self._step)
        self._grow_decodes(draft, now_ns)
        draft.add_decodes(list(self._decoding))
        draft.budget = self._latency.prefill_budget(len(draft.requests))
        self._continue_prefills(draft)
        self._packing.admit(self._waiting, partial(self._try_start, draft, now_ns))
        plan = draft.plan()
        if not plan.is_empty:
            self._in_flight = plan
            self._advance(plan, now_ns)
        return plan

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
        if plan is not self._in_flight:
            raise RuntimeError(f"Step {plan.step} is not in flight: it was committed before, or never scheduled here.")
        _check_token_ids(plan, token_ids)
        self._in_flight = None
        self._cache.pool.lift_fence(plan.step)
        now_ns = self._now()
        finished = RequestState.FINISHED
        for i, (request, token_id) in enumerate(zip(plan.requests, token_ids, strict=True)):
            if token_id is None or not plan.samples[i] or request.state is finished:
                continue
            request.token_ids.append(token_id)
            request.token_times_ns.append(now_ns)
            if i in finish_reasons:
                self._finish(request, finish_reasons[i], now_ns)
            elif request.num_output_tokens == request.max_tokens:
                self._finish(request, "length", now_ns)

    def _grow_decodes(self, draft: PlanDraft, now_ns: int) -> None:
        """Give each decode that crosses a block boundary its block, preempting victims if need be.

        Who is served first makes no difference: victims are taken in their own order until the rest have enough.
        """
        for request in list(self._wheel[self._step % self.config.block_size]):
            while request.state is RequestState.DECODE and not self._cache.grow(request):
                victim = self._victim.choose(self.running())
                self._preempt(victim, now_ns)
                draft.preempted.append(victim)

    def _continue_prefills(self, draft: PlanDraft) -> None:
        for request in self._prefilling:
            if draft.budget == 0:
                return
            draft.add_chunk(request)

    def _try_start(self, draft: PlanDraft, now_ns: int, request: Request) -> Verdict:
        """Start or resume `request` if there are a seat, tokens of this step, and blocks for all tokens it knows."""
        if self.num_running == self.config.max_num_seqs:
            return Verdict(Reason.MAX_SEQS, 1, 0)
        if draft.budget == 0:
            return Verdict(Reason.TOKEN_BUDGET, 1, 0)
        prefix = self._cache.find_prefix(request)
        if prefix is None:
            return Verdict(Reason.SHARED_PREFIX_PENDING)
        verdict = self._capacity.judge(request, prefix, self.num_running)
        if verdict.reason is not None:
            return verdict
        self._waiting.remove(request)
        copy = self._cache.start(request, prefix)
        if copy is not None:
            draft.copies.append(copy)
        if request.started_ns is None:
            request.num_cached_tokens = prefix.num_tokens
        request.num_recomputed_tokens += max(0, request.num_dropped_tokens - prefix.num_tokens)
        move(request, RequestState.PREFILL, now_ns)
        self._prefilling[request] = None
        self._capacity.started(request)
        draft.joined.append(request)
        draft.add_chunk(request)
        return verdict

    def _advance(self, plan: StepPlan, now_ns: int) -> None:
        """Count the tokens of `plan` as computed, so that the next step starts behind them."""
        self._step += 1
        first_chunk = plan.num_decode_tokens
        for request in plan.requests[:first_chunk]:
            request.num_computed_tokens += 1
        for i in range(first_chunk, len(plan.requests)):
            request = plan.requests[i]
            request.num_computed_tokens += plan.num_new_tokens[i]
            if plan.samples[i]:
                del self._prefilling[request]
                self._decoding[request] = None
                self._bucket(request)[request] = None
                move(request, RequestState.DECODE, now_ns)
                self._capacity.decodes(request, self._step)
            self._cache.computed(request)

    # ---- Leaving the batch

    def _preempt(self, request: Request, now_ns: int) -> None:
        """Drop the KV of a running request and put it back to its place in the order; its tokens stay."""
        num_dropped = request.num_computed_tokens
        self._take_out(request)
        move(request, RequestState.PREEMPTED, now_ns)
        request.num_preemptions += 1
        request.num_dropped_tokens = num_dropped
        self._waiting.add(request)

    def _finish(self, request: Request, reason: str, now_ns: int) -> None:
        self._take_out(request)
        move(request, RequestState.FINISHED, now_ns)
        request.finish_reason = reason

    def _take_out(self, request: Request) -> None:
        """Take `request` out of its container and its blocks back."""
        if request.state in QUEUED_STATES:
            self._waiting.remove(request)
            return
        if request.state is RequestState.DECODE:
            del self._bucket(request)[request]
            del self._decoding[request]
        else:
            del self._prefilling[request]
        plan = self._in_flight
        if plan is not None and request in plan.requests:
            place = plan.requests.index(request)
            self._cache.release(request, fence=plan.step, num_settled_tokens=plan.num_computed[place])
        else:
            self._cache.release(request)
        self._capacity.left(request)

    # ---- What can be asked

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return self.num_waiting + self.num_running > 0

    @property
    def num_waiting(self) -> int:
        """Requests that are accepted and not running: waiting or preempted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a seat and KV blocks."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def usable_blocks(self) -> int:
        """KV blocks that an empty engine has for requests."""
        return self.config.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that nobody holds and no step in flight writes."""
        return self._cache.pool.num_free

    def running(self) -> Iterator[Request]:
        """Running requests, decodes first."""
        return chain(self._decoding, self._prefilling)

    def unfinished(self) -> list[Request]:
        """All live requests: running, then waiting in order."""
        return [*self.running(), *self._waiting]

    def check(self) -> None:
        """Raise AssertionError where state, containers, block tables and pool disagree. For tests; O(everything)."""
        places = (
            (self._decoding, (RequestState.DECODE,)),
            (self._prefilling, (RequestState.PREFILL,)),
            (self._waiting, QUEUED_STATES),
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
        assert sum(map(len, self._wheel)) == len(self._decoding), "the wheel holds others than the decodes"

    # ---- Details

    def _now(self) -> int:
        self._last_now_ns = max(self._last_now_ns, self._clock())
        return self._last_now_ns

    def _bucket(self, request: Request) -> dict[Request, None]:
        return self._wheel[(self._step - request.num_computed_tokens) % self.config.block_size]

    def _check_new(self, request: Request, first: Request) -> None:
        if request.arrival_seq >= 0 or request.is_finished:
            raise ValueError(f"{request!r} was added before.")
        if request.num_prompt_tokens < 1:
            raise InvalidRequest("The prompt is empty; it must have at least one token.", field="prompt", limit=1)
        if request.token_ids != first.token_ids:
            raise ValueError(f"{request!r} has another prompt than the others of its submit.")
        most, _ = self.clamp_max_tokens(request.num_prompt_tokens, None)
        if not 1 <= request.max_tokens <= most:
            raise InvalidRequest(
                f"max_tokens is {request.max_tokens}; with a prompt of {request.num_prompt_tokens} tokens it must be "
                f"from 1 to {most}.",
                field="max_tokens",
                value=request.max_tokens,
                limit=most,
            )


def _check_token_ids(plan: StepPlan, token_ids: Sequence[int | None]) -> None:
    """Raise ValueError unless there is one for each request of `plan` that samples and is still live."""
    if len(token_ids) != len(plan.requests):
        raise ValueError(f"Step {plan.step} has {len(plan.requests)} requests, but {len(token_ids)} tokens came.")
    if None not in token_ids:
        return
    for request, samples, token_id in zip(plan.requests, plan.samples, token_ids, strict=True):
        if token_id is None and samples and not request.is_finished:
            raise ValueError(f"Step {plan.step} has no token for {request!r}, which samples.")
