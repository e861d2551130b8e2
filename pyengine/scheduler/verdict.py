"""Why a waiting request does or does not start now, with the numbers. Plain data."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Reason(Enum):
    """What a request waits for.

    MAX_SEQS: a seat. TOKEN_BUDGET: tokens of this step. KV_NOW: free KV blocks. KV_PEAK: KV blocks that running
    requests will or may need later.
    SHARED_PREFIX_PENDING: a running sibling that computes the prompt they share.
    """

    MAX_SEQS = "max_seqs"
    TOKEN_BUDGET = "token_budget"
    KV_NOW = "kv_now"
    KV_PEAK = "kv_peak"
    SHARED_PREFIX_PENDING = "shared_prefix_pending"


class Verdict(NamedTuple):
    """`reason` is None when the request starts; else it needs `need` and there are `have`, in the reason's unit."""

    reason: Reason | None
    need: int = 0
    have: int = 0

    @property
    def starts(self) -> bool:
        """Whether the request was started."""
        return self.reason is None
