"""One sequence on its way through the engine: its tokens, KV blocks, state and times. It decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

PENDING = -1
"""In the place of a token that a pass which has not returned yet samples; always a request's newest."""


class RequestState(Enum):
    """Where a request is; it is in exactly one container of the scheduler for each.

    WAITING: accepted, not started. HELD: accepted, and may not start until its cause is gone. PREFILL: running, some
    known tokens have no KV yet. DECODE: running, each step computes its newest token and samples the next.
    PREEMPTED: waiting again; tokens kept, KV blocks dropped.
    FINISHED: `finish_reason` says how.
    """

    WAITING = "waiting"
    HELD = "held"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"

    __hash__ = object.__hash__  # members are compared by identity; Enum's own hash is a function in Python


LEGAL_MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.PREFILL, RequestState.HELD, RequestState.FINISHED}),
    RequestState.HELD: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.PREFILL: frozenset({RequestState.DECODE, RequestState.PREEMPTED, RequestState.FINISHED}),
    RequestState.DECODE: frozenset({RequestState.PREEMPTED, RequestState.FINISHED}),
    RequestState.PREEMPTED: frozenset({RequestState.PREFILL, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}
QUEUED_STATES = frozenset({RequestState.WAITING, RequestState.HELD, RequestState.PREEMPTED})


class Request:
    """One sequence. Compared by identity.

    Attributes:
        request_id: the caller's id, shared by the n sequences of one submit.
        index: which of these n sequences this is.
        token_ids: prompt, then output; only ever appended to. The last one may be PENDING.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many have their KV computed, or being computed by the step in flight.
        max_tokens: most output tokens, already clamped to context and pool.
        max_tokens_clamped: whether the limit asked for was lowered.
        priority: class, an integer; a smaller one is served first.
        priority_class: the class it is in now; one that waits long is promoted.
        tenant: on whose account it runs.
        cache_salt: KV is shared only between requests of the same salt.
        ttft_limit_ns / itl_limit_ns: the longest it may wait for its first token, and between two tokens; None: no
            limit.
        needs_all_prompt_logits: prompt log-probabilities were asked for, so its prompt is always computed whole.
        block_hashes: of the first full blocks of its tokens, as the KV cache computed them.
        has_known_hashes: block_hashes was filled beforehand, all that its tokens will ever have, and is used as it is:
            a recording has the hashes of a prompt, not its tokens.
        num_indexed_blocks: the first so many blocks of its table can be found by their hash.
        block_table: KV block of each run of block_size tokens; only appended to while it runs.
        group: the sequences of the same submit, None when it is alone.
        step_times / first_decode_step: while it decodes, when the steps were committed, and the first that gave it a
            token in this run.
        arrival_ns / arrival_seq: when it was accepted, and its number in the order of acceptance.
        started_ns: first admission to the batch. finished_ns: when it ended. Both None before.
        settled_token_times_ns: when each output token was committed, those of the present run of decode steps left out.
        queue_ns: all time so far, up to the last change of state, in which it was accepted and not running.
        bypassed_tokens: prompt tokens of those that passed it while it was the head.
        num_reached_tokens: the most tokens it had KV for when it left the batch.
        num_preemptions: how often it lost its KV; num_recomputed_tokens: what that cost.
        num_cached_tokens: prompt tokens whose KV existed already when it first started.
        finish_reason: "stop", "length", "abort" or "error" once it is FINISHED.
        log: the decision log's record of it.
        payload: whatever the owner of the scheduler ties to it; the scheduler never looks at it.
    """

    __slots__ = (
        "arrival_ns",
        "arrival_seq",
        "block_hashes",
        "block_table",
        "bypassed_tokens",
        "cache_salt",
        "finish_reason",
        "finished_ns",
        "first_decode_step",
        "group",
        "has_known_hashes",
        "index",
        "itl_limit_ns",
        "log",
        "max_tokens",
        "max_tokens_clamped",
        "needs_all_prompt_logits",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_dropped_tokens",
        "num_indexed_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "num_reached_tokens",
        "num_recomputed_tokens",
        "payload",
        "priority",
        "priority_class",
        "queue_ns",
        "queued_since_ns",
        "request_id",
        "settled_token_times_ns",
        "started_ns",
        "state",
        "step_times",
        "tenant",
        "token_ids",
        "ttft_limit_ns",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        *,
        index: int = 0,
        max_tokens_clamped: bool = False,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        ttft_limit_ns: int | None = None,
        itl_limit_ns: int | None = None,
        needs_all_prompt_logits: bool = False,
        payload: Any = None,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.max_tokens = max_tokens
        self.max_tokens_clamped = max_tokens_clamped
        self.priority = self.priority_class = priority
        self.tenant = tenant
        self.cache_salt = cache_salt
        self.ttft_limit_ns = ttft_limit_ns
        self.itl_limit_ns = itl_limit_ns
        self.needs_all_prompt_logits = needs_all_prompt_logits
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.has_known_hashes = False
        self.num_indexed_blocks = 0
        self.group: RequestGroup | None = None
        self.state = RequestState.WAITING
        self.arrival_ns = 0
        self.arrival_seq = -1
        self.queued_since_ns = 0
        self.queue_ns = 0
        self.started_ns: int | None = None
        self.finished_ns: int | None = None
        self.settled_token_times_ns: list[int] = []
        self.step_times: StepTimes | None = None
        self.first_decode_step = 0
        self.bypassed_tokens = 0
        self.num_preemptions = 0
        self.num_dropped_tokens = 0
        self.num_reached_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.log: Any = None
        self.payload = payload

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens made so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output tokens made so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def token_times_ns(self) -> list[int]:
        """When each output token was committed."""
        if self.step_times is None:
            return self.settled_token_times_ns
        count = self.num_output_tokens - len(self.settled_token_times_ns)
        return self.settled_token_times_ns + self.step_times.of(self.first_decode_step, count)

    def follow(self, step_times: StepTimes, step: int) -> None:
        """From `step` on it gains one token in each, so the times of its tokens are those of the steps."""
        self.step_times, self.first_decode_step = step_times, step

    def unfollow(self) -> None:
        """It gains no more tokens: keep the times of those that it has."""
        self.settled_token_times_ns = self.token_times_ns
        self.step_times = None

    @property
    def first_token_ns(self) -> int | None:
        """When the first output token was committed; None before."""
        if self.settled_token_times_ns:
            return self.settled_token_times_ns[0]
        times_ns = [] if self.step_times is None else self.step_times.of(self.first_decode_step, 1)
        return times_ns[0] if times_ns else None

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the queue that each step scans: WAITING or PREEMPTED."""
        return self.state is RequestState.WAITING or self.state is RequestState.PREEMPTED

    @property
    def is_finished(self) -> bool:
        """Whether it has ended; `finish_reason` says how."""
        return self.state is RequestState.FINISHED

    def queue_ns_at(self, now_ns: int) -> int:
        """All time up to `now_ns` in which it was accepted and not running, in ns."""
        return self.queue_ns + (now_ns - self.queued_since_ns if self.state in QUEUED_STATES else 0)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, index={self.index}, {self.state.value}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}/{self.max_tokens}, computed={self.num_computed_tokens})"
        )


class StepTimes:
    """When each of the latest steps was committed: the times of the tokens of everybody who decodes, written once."""

    __slots__ = ("_first", "_times_ns")

    def __init__(self) -> None:
        self._first = 0  # the step that the first one is of
        self._times_ns: list[int] = []

    def __len__(self) -> int:
        return len(self._times_ns)

    def append(self, step: int, now_ns: int) -> None:
        """`step`, the one after the last, is committed now."""
        if not self._times_ns:
            self._first = step
        self._times_ns.append(now_ns)

    def of(self, first: int, count: int) -> list[int]:
        """The times of `count` steps from `first` on."""
        start = first - self._first
        return self._times_ns[start : start + count]

    def forget(self, first_kept: int) -> None:
        """Forget the steps before `first_kept`."""
        del self._times_ns[: max(0, first_kept - self._first)]
        self._first = max(self._first, first_kept)


class RequestGroup:
    """The n sequences of one submit, which have one prompt: who computes its KV, and who holds it.

    Attributes:
        requests: all n of them, by index.
        computing: running ones whose shared part of the prompt (all but its last token) is not computed yet.
        holders: running ones whose block table holds the shared part, computed by an earlier step.
    """

    __slots__ = ("computing", "holders", "requests")

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        # Dictionaries serve as ordered sets: O(1) removal, and the first member is always the same one.
        self.computing: dict[Request, None] = {}
        self.holders: dict[Request, None] = {}


def move(request: Request, state: RequestState, now_ns: int) -> None:
    """Change the state of `request`, the only place that does, and account the time it spent in the queue.

    Raises RuntimeError for a move that LEGAL_MOVES does not have.
    """
    if state not in LEGAL_MOVES[request.state]:
        raise RuntimeError(f"Request {request.request_id!r} cannot move from {request.state.value} to {state.value}.")
    was_queued = request.state in QUEUED_STATES
    is_queued = state in QUEUED_STATES
    if was_queued and not is_queued:
        request.queue_ns += now_ns - request.queued_since_ns
    elif is_queued and not was_queued:
        request.queued_since_ns = now_ns
    if state is RequestState.PREFILL and request.started_ns is None:
        request.started_ns = now_ns
    elif state is RequestState.FINISHED:
        request.finished_ns = now_ns
    request.state = state
