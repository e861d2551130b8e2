"""Latency: how many prompt tokens a step may carry beside its decodes."""

from __future__ import annotations

from typing import Protocol


class Latency(Protocol):
    """Bounds the length of a step through its prompt tokens; decodes are never held back."""

    def prefill_budget(self, num_decodes: int) -> int:
        """Most prompt tokens in a step with `num_decodes` decode tokens."""
        ...


class NoLimit:
    """Whatever max_num_batched_tokens leaves."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_num_batched_tokens = max_num_batched_tokens

    def prefill_budget(self, num_decodes: int) -> int:
        return self._max_num_batched_tokens - num_decodes
