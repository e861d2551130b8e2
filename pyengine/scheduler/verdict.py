"""Why a waiting request does or does not start now, with the numbers. Plain data."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Reason(str, Enum):
    """What a request waits for; each has one cause that somebody could change.

    MID_STEP: the next step to begin; it arrived since the last one did.
    MAX_SEQS: a seat. TOKEN_BUDGET: tokens of this step. LATENCY_LIMIT: tokens that an inter-token limit leaves.
    KV_NOW: free KV blocks. KV_PEAK: KV blocks that running requests will, or are expected to, need later.
    WOULD_DELAY_HEAD: it fits, but would move the reserved start of the head, which does not fit.
    BYPASS_BUDGET: it fits, but those who pass the head have had their share of tokens.
    AGING_BARRIER: the head has waited so long that nobody may pass it any more.
    BEHIND_HEAD: the head, which does not fit; nobody examined this request further.
    PRIORITY: a later request of a better class is first. TENANT_SHARE: a later one of a tenant with less service is.
    SHARED_PREFIX_PENDING: a running request that computes the prefix they share.
    PREEMPTED: room to be computed again. HELD: something outside the scheduler, such as a grammar being compiled.
    STATIC_BATCH: the end of the batch that runs (static batching). BATCH_WAIT: more company, at most max_batch_wait_ms.
    PAUSED, DRAIN: the owner lets nobody start.
    """

    MID_STEP = "mid_step"
    MAX_SEQS = "max_seqs"
    TOKEN_BUDGET = "token_budget"
    LATENCY_LIMIT = "latency_limit"
    KV_NOW = "kv_now"
    KV_PEAK = "kv_peak"
    WOULD_DELAY_HEAD = "would_delay_head"
    BYPASS_BUDGET = "bypass_budget"
    AGING_BARRIER = "aging_barrier"
    BEHIND_HEAD = "behind_head"
    PRIORITY = "priority"
    TENANT_SHARE = "tenant_share"
    SHARED_PREFIX_PENDING = "shared_prefix_pending"
    PREEMPTED = "preempted"
    HELD = "held"
    STATIC_BATCH = "static_batch"
    BATCH_WAIT = "batch_wait"
    PAUSED = "paused"
    DRAIN = "drain"

    __hash__ = str.__hash__  # Enum's own is a function in Python


class Verdict(NamedTuple):
    """`reason` is None when the request starts; else it needs `need` and there are `have`, in the reason's unit."""

    reason: Reason | None
    need: int = 0
    have: int = 0

    @property
    def starts(self) -> bool:
        """Whether the request starts, or may."""
        return self.reason is None

    @property
    def blocks_others(self) -> bool:
        """Whether it lacks room, so that it is the head that those behind it may not simply pass."""
        return self.reason is not None and self.reason is not Reason.SHARED_PREFIX_PENDING


STARTS = Verdict(None)
