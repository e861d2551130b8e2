"""SchedulerConfig: the limits and rules of the scheduler, checked when it is made. It knows nothing of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyengine.errors import InvalidRequest

BATCHINGS = ("continuous", "static")
ORDERS = ("fifo", "priority", "fair", "deadline", "shortest")
PACKINGS = ("none", "best_fit")
VICTIMS = ("cheapest", "latest")
CAPACITIES = ("guaranteed", "predicted", "optimistic")
MAX_PRIORITY = 9
BLOCK_SIZE_UNIT = 16
MAX_BATCHED_TOKENS = 2**20
MAX_SECONDS = 10**6  # of any time limit
MAX_INDEX = 2**31 - 1  # of anything: the native step counts in 32 bits


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler. Raises InvalidRequest, naming the field, its value and what is allowed.

    Attributes:
        num_blocks: KV blocks in the pool, all of them usable by requests.
        max_context: most tokens of one sequence, prompt and output.
        block_size: tokens of one KV block, a multiple of 16.
        max_num_seqs: most sequences that run at a time. At most max_num_batched_tokens: each decode has its token in
            each step. More raises throughput and the time between two tokens of everybody.
        max_num_batched_tokens: most tokens in one pass. More makes prefill faster and the steps of others longer.
        batching: "continuous": a request joins and leaves the batch at any step. "static": a batch is formed, runs
            until its last member ends, then the next is formed; it is here to be compared with. Or a `Batching` of your
            own.
        order: who is first. "fifo": arrival. "priority": class, then arrival. "fair": class, then the tenant that had
            least service. "deadline": class, then when the first token is due. "shortest": class, then the least work,
            less a credit for age. Or an `Order` of your own.
        packing: "none": when the first in order does not fit, nobody behind it starts. "best_fit": others may pass it,
            if that does not move the start that it has been promised. Or a `Packing` of your own.
        capacity: "guaranteed": a request starts when there is room for all even if each makes max_tokens, so nobody is
            ever preempted, and the pool is emptier. "predicted": the same for the lengths that outputs recently had,
            with preemption when that is wrong. "optimistic": it starts when its present tokens fit and `watermark`
            stays free; more run at a time, more are preempted and computed again. Or a class of your own.
        capacity_quantile: for "predicted", in (0, 1]: the part of recent outputs that the expected length covers. More
            means fewer preemptions and a longer queue.
        watermark: for "predicted" and "optimistic": the part of the pool, in [0, 1), that a start leaves free for
            running ones to grow beyond what was expected. Waived when nothing runs.
        victim: who is preempted when running ones outgrow the pool. "cheapest": of the worst class, and the tenant
            with most service, the one that is cheapest to compute again. "latest": the latest arrival, as most engines
            do. Or a `Victim` of your own.
        prefix_caching: KV of prompts and outputs is kept while nobody needs the blocks, and used by later requests
            that begin with the same tokens and have the same salt.
        itl_limit_ms: longest time between two tokens of a running request: prompt chunks are cut to keep it. Less
            makes the others' first tokens later. None: no limit.
        ttft_limit_ms: longest time to the first token: a request that is not expected to keep it is refused at submit,
            one that has not started by then is ended. None: no limit.
        max_queue: most requests that wait at a time; None is no limit.
        max_batch_wait_ms: when nothing runs, wait so long for company before a pass is begun.
        aging_barrier_s: nobody passes a head that has waited so long.
        bypass_budget: those who pass a head have in all at most so many times its prompt tokens.
        window: how many waiting requests a step examines at most.
        priority_promotion_s: a waiting request moves up one class each time it has waited so long.
    """

    num_blocks: int
    max_context: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    batching: Any = "continuous"
    order: Any = "fifo"
    packing: Any = "best_fit"
    capacity: Any = "predicted"
    capacity_quantile: float = 0.8
    watermark: float = 0.01
    victim: Any = "cheapest"
    prefix_caching: bool = True
    itl_limit_ms: float | None = None
    ttft_limit_ms: float | None = None
    max_queue: int | None = None
    max_batch_wait_ms: float = 0
    aging_barrier_s: float = 10
    bypass_budget: float = 4
    window: int = 64
    priority_promotion_s: float = 30

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_blocks", 1, MAX_INDEX),
            ("max_context", 2, MAX_INDEX),
            ("block_size", BLOCK_SIZE_UNIT, 4096),
            ("max_num_seqs", 1, 2**16),
            ("max_num_batched_tokens", 1, MAX_BATCHED_TOKENS),
            ("window", 1, 2**16),
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
        _check_policy("batching", self.batching, BATCHINGS, "closed_by")
        _check_policy("order", self.order, ORDERS, "key")
        _check_policy("packing", self.packing, PACKINGS, "admit")
        _check_policy("capacity", self.capacity, CAPACITIES, "judge")
        _check_policy("victim", self.victim, VICTIMS, "choose")
        check_number("capacity_quantile", self.capacity_quantile, above=0, most=1)
        check_number("watermark", self.watermark, least=0, below=1)
        if not isinstance(self.prefix_caching, bool):
            raise _refused("prefix_caching", self.prefix_caching, "True or False", (True, False))
        for name in ("itl_limit_ms", "ttft_limit_ms"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0, most=MAX_SECONDS * 1000, also=" or None")
        check_number("max_batch_wait_ms", self.max_batch_wait_ms, least=0, most=MAX_SECONDS * 1000)
        for name in ("aging_barrier_s", "bypass_budget"):
            check_number(name, getattr(self, name), least=0, most=MAX_SECONDS)
        check_number("priority_promotion_s", self.priority_promotion_s, above=0, most=MAX_SECONDS)


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    also: str = "",
) -> None:
    """Raise InvalidRequest unless `value` is a number within the bounds that are given."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    bounds = [
        (">=", least, is_number and (least is None or value >= least)),
        (">", above, is_number and (above is None or value > above)),
        ("<=", most, is_number and (most is None or value <= most)),
        ("<", below, is_number and (below is None or value < below)),
    ]
    if not all(holds for _, _, holds in bounds):
        wanted = " and ".join(f"{sign} {bound:g}" for sign, bound, _ in bounds if bound is not None)
        limit = tuple(bound for _, bound, _ in bounds if bound is not None)
        raise _refused(name, value, f"a number {wanted}{also}", limit)


def _refused(name: str, value: Any, wanted: str, limit: Any) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value!r}; it must be {wanted}.", field=name, value=value, limit=limit)


def _check_count(name: str, value: Any, low: int, high: int, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refused(name, value, f"an integer from {low} to {high}{also}", (low, high))


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise _refused(name, value, f"one of {', '.join(map(repr, allowed))}", allowed)


def _check_policy(name: str, value: Any, allowed: tuple[str, ...], method: str) -> None:
    """A built-in one by its name, or an object (or class) of the user's that has `name` and the method."""
    if not isinstance(value, str):
        if isinstance(getattr(value, "name", None), str) and callable(getattr(value, method, None)):
            return
        raise _refused(name, value, f"one of {', '.join(map(repr, allowed))}, or have `name` and `{method}()`", allowed)
    _check_choice(name, value, allowed)
