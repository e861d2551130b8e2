"""What a scheduler knows while nobody waits or runs, as data, so that another one can go on from there.

It is what outlives the requests: the number of the step, KV that can be found again, accounts of tenants, lengths of
recent outputs, the step-time model. What a policy of the user's keeps is not among it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from pyengine.scheduler.capacity import Predicted
from pyengine.scheduler.latency import StepTimeLimit
from pyengine.scheduler.order import Fair
from pyengine.scheduler.verdict import Reason

if TYPE_CHECKING:
    from pyengine.scheduler.scheduler import Scheduler

State = dict[str, Any]


def capture(scheduler: Scheduler) -> State:
    """The state of `scheduler`, JSON-able but for "block_hashes": bytes, the least recently used first.

    Raises RuntimeError if somebody waits or runs.
    """
    if scheduler.has_unfinished:
        raise RuntimeError("Only the state of a scheduler that has no requests is plain data.")
    pool, latency, order, capacity = scheduler._cache.pool, scheduler._latency, scheduler._order, scheduler._capacity
    hash_of = {block: block_hash for block_hash, block in pool.keys.items()}
    idle = islice(pool.free_blocks(), pool.num_free - pool.num_idle, None)
    return {
        "step": scheduler._step,
        "paused": None if scheduler._paused_for is None else scheduler._paused_for.name,
        "block_hashes": [hash_of[block] for block in idle],
        "step_time": scheduler.step_time.to_dict(),
        "floor_steps": latency._floor_steps if isinstance(latency, StepTimeLimit) else 0,
        "floor_tokens": latency._floor_tokens if isinstance(latency, StepTimeLimit) else 0,
        "output_lengths": list(capacity._lengths._recent) if isinstance(capacity, Predicted) else [],
        "service": dict(order.service) if isinstance(order, Fair) else {},
        "least_service": order._floor if isinstance(order, Fair) else 0,
    }


def restore(scheduler: Scheduler, state: Mapping[str, Any]) -> None:
    """Let a new scheduler, which was made with the step-time model of `state`, go on from there.

    If its pool is smaller than the content that could be found, the least recently used is not. Lengths and accounts
    are dropped where its own policies have none.
    """
    pool, latency, order, capacity = scheduler._cache.pool, scheduler._latency, scheduler._order, scheduler._capacity
    scheduler._step = state["step"]
    scheduler._paused_for = None if state["paused"] is None else Reason[state["paused"]]
    if scheduler.config.prefix_caching:
        hashes = state["block_hashes"][-pool.num_blocks :]
        blocks = pool.allocate(len(hashes))
        assert blocks is not None
        for block, block_hash in zip(blocks, hashes, strict=True):
            pool.name([block], [block_hash])
        pool.free(blocks)
    if isinstance(latency, StepTimeLimit):
        latency._floor_steps, latency._floor_tokens = state["floor_steps"], state["floor_tokens"]
    if isinstance(capacity, Predicted):
        for length in state["output_lengths"]:
            capacity._lengths.add(length)
    if isinstance(order, Fair):
        order.service.update(state["service"])
        order._floor = state["least_service"]
