"""SchedulerConfig: the limits and rules of the scheduler, checked when it is made. It knows nothing of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyengine.errors import InvalidRequest

BATCHINGS = ("continuous",)
ORDERS = ("fifo",)
PACKINGS = ("none",)
CAPACITIES = ("guaranteed", "optimistic")
BLOCK_SIZE_UNIT = 16
MAX_INDEX = 2**31 - 1  # of anything: the native step counts in 32 bits


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler. Raises InvalidRequest, naming the field, its value and what is allowed.

    Attributes:
        num_blocks: KV blocks in the pool, all of them usable by requests.
        max_context: most tokens of one sequence, prompt and output.
        block_size: tokens of one KV block, a multiple of 16.
        max_num_seqs: most sequences that run at a time. At most max_num_batched_tokens: each decode has its token in
            each step.
        max_num_batched_tokens: most tokens in one pass. More makes prefill faster and the steps of others longer.
        batching: "continuous": a request joins and leaves the batch at any step.
        order: "fifo": by arrival.
        packing: "none": when the first in order does not fit, nobody behind it starts.
        capacity: "optimistic": a request starts when its present tokens fit and `watermark` stays free; if running
            ones outgrow the pool, one is preempted and computed again later. "guaranteed": it starts when there is
            room for all even if each makes max_tokens, so nobody is ever preempted, and the pool is emptier.
        watermark: the part of the pool, in [0, 1), that a start leaves free for running ones to grow. Waived when
            nothing runs.
        max_queue: most requests that wait at a time; None is no limit.
    """

    num_blocks: int
    max_context: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    batching: str = "continuous"
    order: str = "fifo"
    packing: str = "none"
    capacity: str = "optimistic"
    watermark: float = 0.01
    max_queue: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_blocks", 1, MAX_INDEX),
            ("max_context", 2, MAX_INDEX),
            ("block_size", BLOCK_SIZE_UNIT, 4096),
            ("max_num_seqs", 1, 2**16),
            ("max_num_batched_tokens", 1, 2**20),
        ):
            _check_count(name, getattr(self, name), low, high)
        if self.max_queue is not None:
            _check_count("max_queue", self.max_queue, 1, MAX_INDEX, also=" or None")
        if self.block_size % BLOCK_SIZE_UNIT:
            raise _refused("block_size", self.block_size, f"a multiple of {BLOCK_SIZE_UNIT}", BLOCK_SIZE_UNIT)
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise InvalidRequest(
                f"max_num_seqs is {self.max_num_seqs}, more than max_num_batched_tokens "
                f"{self.max_num_batched_tokens}: each running sequence needs at least one token in each step. "
                "Lower the first or raise the second.",
                field="max_num_seqs",
                value=self.max_num_seqs,
                limit=self.max_num_batched_tokens,
            )
        _check_choice("batching", self.batching, BATCHINGS)
        _check_choice("order", self.order, ORDERS)
        _check_choice("packing", self.packing, PACKINGS)
        _check_choice("capacity", self.capacity, CAPACITIES)
        mark = self.watermark
        if isinstance(mark, bool) or not isinstance(mark, (int, float)) or not 0 <= mark < 1:
            raise _refused("watermark", mark, "a number >= 0 and < 1", 1)


def _refused(name: str, value: Any, wanted: str, limit: Any) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value!r}; it must be {wanted}.", field=name, value=value, limit=limit)


def _check_count(name: str, value: Any, low: int, high: int, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refused(name, value, f"an integer from {low} to {high}{also}", (low, high))


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise _refused(name, value, f"one of {', '.join(map(repr, allowed))}", allowed)
