"""EngineStats: what all requests together waited for, and how full batch and KV pool are, as plain data and as text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyengine.config import SchedulerConfig
from pyengine.request import QUEUED_STATES
from pyengine.scheduler.ledger import REASONS
from pyengine.scheduler.log_tables import Ring, Totals
from pyengine.scheduler.request_record import Facts
from pyengine.scheduler.verdict import Reason

# Which resource a reason is a lack of, and what to do about it.
LACKS: tuple[tuple[str, str, tuple[Reason, ...]], ...] = (
    (
        "KV blocks",
        "more memory for the KV cache shortens it (kv_cache_memory)",
        (
            Reason.KV_NOW,
            Reason.KV_PEAK,
            Reason.WOULD_DELAY_HEAD,
            Reason.BYPASS_BUDGET,
            Reason.AGING_BARRIER,
            Reason.BEHIND_HEAD,
            Reason.PREEMPTED,
        ),
    ),
    ("seats", "more sequences at a time shorten it (max_num_seqs)", (Reason.MAX_SEQS,)),
    (
        "tokens of a step",
        "a faster device, or more tokens a step, shortens it (max_num_batched_tokens)",
        (Reason.TOKEN_BUDGET,),
    ),
    ("the inter-token limit", "a faster device or a looser limit shortens it (itl_limit_ms)", (Reason.LATENCY_LIMIT,)),
    (
        "the step that runs",
        "shorter steps shorten it (max_num_batched_tokens, a faster device); it is the least wait there is",
        (Reason.MID_STEP,),
    ),
    ("the batch to end", 'batching="continuous" shortens it', (Reason.STATIC_BATCH,)),
    (
        "other requests by order",
        "it is a matter of classes and shares, of no resource",
        (Reason.PRIORITY, Reason.TENANT_SHARE),
    ),
    (
        "a shared prefix",
        "without prefix_caching each would compute it again",
        (Reason.SHARED_PREFIX_PENDING,),
    ),
    ("company", "a smaller max_batch_wait_ms shortens it", (Reason.BATCH_WAIT,)),
    (
        "something outside the scheduler",
        "no resource of the engine shortens it",
        (Reason.HELD, Reason.PAUSED, Reason.DRAIN),
    ),
)


@dataclass(frozen=True, slots=True)
class KVUse:
    """KV blocks of the pool: used + cached + free is all of them.

    `used` ones are held by requests, or written by a step whose request has ended; `cached` ones are held by nobody
    and have KV that may be found again; `free` ones hold nothing. `reserved` of the latter two are counted on by
    running requests that will grow.
    """

    used: float
    cached: float
    free: float
    reserved: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long steps took, over the steps that the log still has and that have returned.

    Attributes:
        num_steps: how many. num_predicted: those that had a prediction; the other fields on it are None without.
        mean_error: mean of |real - predicted|, as a part of the mean real time. bias: mean of predicted - real, same.
        p95_error_s: 95 % of these differences were smaller.
    """

    num_steps: int
    mean_s: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None
    num_predicted: int = 0
    mean_error: float | None = None
    bias: float | None = None
    p95_error_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The fleet view. Sums and means are over everything since the start, means over steps.

    Attributes:
        queue_ns: all waiting of all requests, those that wait now included: exactly the sum of wait_ns.
        wait_ns: by reason, the longest first.
        tokens_per_step / token_fill: mean tokens of a pass, and as a part of max_num_batched_tokens.
        sequences_per_step / seat_fill: mean sequences of a pass, and as a part of max_num_seqs.
        bound_steps: for each limit, in how many steps it set the budget of prompt tokens.
        kv_now / kv_mean: of the last step, and the mean; None before the first one.
        recompute_tax: tokens computed again after preemptions, as a part of all tokens computed.
        cache_hit_rate: prompt tokens that were cached when their request first started, as a part of all prompt tokens.
        num_ahead_steps: passes planned before the tokens of the pass before were known (see Scheduler.expect).
        discarded_tokens: sampled for requests that had ended by then: aborted, or ended by a token not known in time.
        num_reservation_moves: reserved starts that became later while they held, which must never happen.
        step_model: the step-time model as its owner gave it.
        policy_faults: how often a policy of the user's broke its rules, by its name.
        hint: which resource most waiting was for.
    """

    num_steps: int
    num_ahead_steps: int
    discarded_tokens: int
    num_requests: int
    num_waiting: int
    num_running: int
    num_ended: int
    queue_ns: int
    wait_ns: dict[Reason, int]
    decode_tokens: int
    prefill_tokens: int
    tokens_per_step: float
    token_fill: float
    sequences_per_step: float
    seat_fill: float
    bound_steps: dict[Reason, int]
    num_blocks: int
    kv_now: KVUse | None
    kv_mean: KVUse | None
    num_preemptions: int
    recomputed_tokens: int
    recompute_tax: float
    cached_tokens: int
    prompt_tokens: int
    cache_hit_rate: float
    num_reservations: int
    num_reservation_moves: int
    num_reservations_void: int
    step_times: StepTimes
    step_model: dict[str, Any] | None
    policy_faults: dict[str, int]
    hint: str

    @property
    def queue_s(self) -> float:
        """All waiting, in seconds."""
        return self.queue_ns / 1e9

    @property
    def wait_share(self) -> dict[Reason, float]:
        """The part that each reason has of all waiting."""
        return {reason: ns / self.queue_ns for reason, ns in self.wait_ns.items()} if self.queue_ns else {}

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able data, reasons by their values."""
        data = {name: getattr(self, name) for name in EngineStats.__slots__}
        for name in ("wait_ns", "bound_steps"):
            data[name] = {reason.value: number for reason, number in data[name].items()}
        data["wait_share"] = {reason.value: share for reason, share in self.wait_share.items()}
        for name in ("kv_now", "kv_mean", "step_times"):
            data[name] = None if data[name] is None else dataclasses.asdict(data[name])
        return data

    def __str__(self) -> str:
        lines = [
            f"{self.num_requests} requests: {self.num_waiting} waiting, {self.num_running} running, "
            f"{self.num_ended} ended; {self.num_steps} steps",
            f"waited {self.queue_s:.3f} s in all",
            *(
                f"  {ns / 1e9:>10.3f} s {self.wait_share[reason]:>6.1%}  {reason.value}"
                for reason, ns in self.wait_ns.items()
            ),
            f"batch      {self.sequences_per_step:.1f} sequences a step ({self.seat_fill:.0%} of the seats), "
            f"{self.tokens_per_step:.1f} tokens ({self.token_fill:.0%} of the most)",
        ]
        if self.kv_now is not None and self.kv_mean is not None:
            parts = ", ".join(
                f"{getattr(self.kv_now, name):.0f} {name} (mean {getattr(self.kv_mean, name):.0f})"
                for name in ("used", "cached", "free", "reserved")
            )
            lines.append(f"KV         {parts} of {self.num_blocks} blocks")
        lines.append(
            f"cache      {self.cached_tokens} of {self.prompt_tokens} prompt tokens ({self.cache_hit_rate:.1%})"
        )
        lines.append(
            f"preempted  {self.num_preemptions} times, {self.recomputed_tokens} tokens computed again "
            f"({self.recompute_tax:.1%} of all)"
        )
        if self.num_ahead_steps:
            lines.append(
                f"overlap    {self.num_ahead_steps} steps planned ahead; {self.discarded_tokens} tokens came too late, "
                "for requests that had ended"
            )
        if self.num_reservations:
            lines.append(
                f"heads      {self.num_reservations} reserved starts: {self.num_reservation_moves} moved, "
                f"{self.num_reservations_void} void"
            )
        if self.bound_steps:
            bounds = ", ".join(f"{reason.value} in {number}" for reason, number in self.bound_steps.items())
            lines.append(f"bound by   {bounds} of {self.num_steps} steps")
        times = self.step_times
        if times.mean_s is not None and times.p50_s is not None and times.p99_s is not None:
            error = "" if times.mean_error is None else f"; predicted within {times.mean_error:.1%} on average"
            lines.append(
                f"step time  mean {times.mean_s * 1e3:.3f} ms, median {times.p50_s * 1e3:.3f}, "
                f"p99 {times.p99_s * 1e3:.3f}{error}"
            )
        lines += [f"policy     {name!r} broke its rules {number} times" for name, number in self.policy_faults.items()]
        return "\n".join([*lines, self.hint])


def make_stats(
    config: SchedulerConfig,
    totals: Totals,
    steps: Ring,
    live: Iterable[tuple[Facts, Sequence[int]]],
    step_model: Mapping[str, Any] | None,
    policy_faults: Mapping[str, int],
) -> EngineStats:
    """The stats of `totals` and the `live` requests, each with its wait in ns by the reason's place in REASONS."""
    parts = list(totals.parts)
    prompt, cached, recomputed = totals.started_prompt_tokens, totals.cached_tokens, totals.recomputed_tokens
    num_waiting = num_running = 0
    for facts, waited_ns in live:
        for index, ns in enumerate(waited_ns):
            parts[index] += ns
        recomputed += facts.num_recomputed_tokens
        is_waiting = facts.state in QUEUED_STATES
        num_waiting += is_waiting
        num_running += not is_waiting
        if facts.started_ns is not None:
            prompt += facts.num_prompt_tokens
            cached += facts.num_cached_tokens
    wait_ns = {reason: ns for ns, reason in sorted(_nonzero(parts), key=lambda pair: -pair[0])}
    num_steps = totals.num_steps
    tokens = totals.decode_tokens + totals.prefill_tokens
    return EngineStats(
        num_steps=num_steps,
        num_ahead_steps=totals.num_ahead_steps,
        discarded_tokens=totals.discarded_tokens,
        num_requests=totals.num_arrived,
        num_waiting=num_waiting,
        num_running=num_running,
        num_ended=totals.num_ended,
        queue_ns=sum(parts),
        wait_ns=wait_ns,
        decode_tokens=totals.decode_tokens,
        prefill_tokens=totals.prefill_tokens,
        tokens_per_step=_ratio(tokens, num_steps),
        token_fill=_ratio(tokens, num_steps * config.max_num_batched_tokens),
        sequences_per_step=_ratio(totals.sequences, num_steps),
        seat_fill=_ratio(totals.sequences, num_steps * config.max_num_seqs),
        bound_steps={reason: number for number, reason in _nonzero(totals.bound)},
        num_blocks=config.num_blocks,
        kv_now=_kv_now(config, steps),
        kv_mean=_kv_mean(config, totals),
        num_preemptions=totals.num_preemptions,
        recomputed_tokens=recomputed,
        recompute_tax=_ratio(recomputed, tokens),
        cached_tokens=cached,
        prompt_tokens=prompt,
        cache_hit_rate=_ratio(cached, prompt),
        num_reservations=totals.num_reservations,
        num_reservation_moves=totals.num_reservation_moves,
        num_reservations_void=totals.num_reservations_void,
        step_times=_step_times(steps),
        step_model=None if step_model is None else dict(step_model),
        policy_faults=dict(policy_faults),
        hint=_hint(wait_ns),
    )


def _nonzero(by_reason: Sequence[int]) -> list[tuple[int, Reason]]:
    return [(number, reason) for number, reason in zip(by_reason, REASONS, strict=True) if number]


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _kv_use(num_blocks: int, cached: float, free: float, reserved: float) -> KVUse:
    return KVUse(used=num_blocks - cached - free, cached=cached, free=free, reserved=reserved)


def _kv_now(config: SchedulerConfig, steps: Ring) -> KVUse | None:
    if not steps.number:
        return None
    place = (steps.number - 1) % steps.size
    columns = steps.columns
    cached, free, reserved = (columns[f"{name}_blocks"][place] for name in ("cached", "free", "reserved"))
    return _kv_use(config.num_blocks, cached, free, reserved)


def _kv_mean(config: SchedulerConfig, totals: Totals) -> KVUse | None:
    number = totals.num_steps
    if not number:
        return None
    return _kv_use(
        config.num_blocks, totals.cached_blocks / number, totals.free_blocks / number, totals.reserved_blocks / number
    )


def _step_times(steps: Ring) -> StepTimes:
    rows = [(real, predicted) for real, predicted in steps.rows("real_ns", "predicted_ns") if real >= 0]
    if not rows:
        return StepTimes(0)
    reals = sorted(real for real, _ in rows)
    times = StepTimes(
        num_steps=len(rows),
        mean_s=sum(reals) / len(reals) / 1e9,
        p50_s=_quantile(reals, 0.5) / 1e9,
        p99_s=_quantile(reals, 0.99) / 1e9,
    )
    pairs = [(real, predicted) for real, predicted in rows if predicted]
    if not pairs:
        return times
    errors = sorted(abs(real - predicted) for real, predicted in pairs)
    real_sum = sum(real for real, _ in pairs)
    return dataclasses.replace(
        times,
        num_predicted=len(pairs),
        mean_error=_ratio(sum(errors), real_sum),
        bias=_ratio(sum(predicted - real for real, predicted in pairs), real_sum),
        p95_error_s=_quantile(errors, 0.95) / 1e9,
    )


def _quantile(ordered: Sequence[int], quantile: float) -> int:
    """The smallest value that at least this part of them does not exceed."""
    return ordered[math.ceil(quantile * len(ordered)) - 1]


def _hint(wait_ns: Mapping[Reason, int]) -> str:
    """One line: the resource that most waiting was for."""
    queue_ns = sum(wait_ns.values())
    if not queue_ns:
        return "Nobody has waited."
    shares = [(sum(wait_ns.get(reason, 0) for reason in reasons), name, advice) for name, advice, reasons in LACKS]
    most_ns, name, advice = max(shares, key=lambda share: share[0])
    return f"{most_ns / queue_ns:.0%} of all waiting was for {name}: {advice}."
