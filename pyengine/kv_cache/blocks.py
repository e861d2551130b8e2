"""How many KV blocks tokens need: the one formula that submit, admission, growth and preemption all use."""

from __future__ import annotations

from pyengine.request import Request


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold the KV of `num_tokens` tokens of one sequence."""
    return -(-num_tokens // block_size)


def need(request: Request, horizon: int, block_size: int) -> int:
    """Blocks that `request` needs for all tokens it knows now and the KV of `horizon` more.

    Horizon 0 is what it needs to sample its next token: that token has KV only in the step after. Shared blocks count.
    """
    return num_blocks_for(request.num_tokens + horizon, block_size)


def last_horizon(request: Request) -> int:
    """Horizon of the longest that `request` can become: its last output token is sampled and never gets KV."""
    return request.max_tokens - request.num_output_tokens - 1
