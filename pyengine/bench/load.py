"""One policy under one load on the real engine: latencies by the client's clock, waiting by the scheduler's account."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pyengine.bench.client import OnEnded, Options, Served, serve, serve_closed
from pyengine.bench.machine import OthersLoad
from pyengine.bench.workload import BenchRequest, Mix, make_requests, poisson_times
from pyengine.engine import Engine
from pyengine.scheduler.stats import EngineStats
from pyengine.simulate.policies import Policy
from pyengine.simulate.results import Quantiles, quantiles

BEFORE_SUBMIT = "before_submit"  # due while a step ran: the client could not submit it yet
NUM_WORST = 50
_NUM_WARM_UP = 24
_WARM_UP_SEED = 1 << 20
# Threads of the trace, as pyengine.scheduler.trace numbers them.
_REQUESTS = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """The engine of all loads: its model and sizes. `engine` are settings of Engine beside those of a policy."""

    model: str | None
    engine: Mapping[str, Any]
    block_size: int
    block_bytes: int
    num_blocks: int
    mix: Mix
    vocab_size: int

    def start(self, policy: Policy) -> Engine:
        """A fresh engine with that policy, warmed up: it has served some requests of the same kind."""
        given = {**self.engine, **policy.settings}
        num_blocks = given.pop("num_blocks", self.num_blocks)
        engine = Engine(
            self.model, block_size=self.block_size, kv_cache_memory=int(num_blocks * self.block_bytes), **given
        )
        try:
            warm_up = make_requests(self.mix, _NUM_WARM_UP, self.vocab_size, _WARM_UP_SEED)
            serve(engine, warm_up, [0.0] * len(warm_up), knows_lengths=policy.knows_lengths)
        except BaseException:
            engine.close()
            raise
        return engine


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of a request's life, in seconds of the run: what it waited for, "prefill" or "decode"."""

    start_s: float
    end_s: float
    what: str


@dataclass(frozen=True, slots=True)
class WorstRequest:
    """One of those with the longest time to first token."""

    ttft_s: float
    prompt_tokens: int
    output_tokens: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one policy did with one load.

    Attributes:
        rate: requests that were due each second, on average. rate_share: that over the measured capacity.
        ttft, ttft_short, ttft_long: from when a request was due to its first token; of all, short and long prompts.
        itl: from one token of a request to its next, over all requests.
        waiting_s: seconds of waiting of all requests together, by reason, as the scheduler accounts for it; and
            "before_submit", by the client's clock.
        mean_batch: sequences of a step, on average. kv_used: part of the KV pool that requests held, on average.
        makespan_s: from the first request to the last token.
        preemptions, recomputed_tokens: of the requests of this run.
        others: the part of all processors that other processes used meanwhile; None where it cannot be told.
    """

    policy: str
    seed: int
    rate: float
    rate_share: float
    num_requests: int
    num_finished: int
    refusals: Mapping[str, int]
    ttft: Quantiles
    ttft_short: Quantiles
    ttft_long: Quantiles
    itl: Quantiles
    waiting_s: Mapping[str, float]
    mean_batch: float
    kv_used: float
    makespan_s: float
    output_tokens_per_s: float
    preemptions: int
    recomputed_tokens: int
    others: float | None


def run_load(
    setting: Setting,
    policy: Policy,
    requests: Sequence[BenchRequest],
    rate: float,
    rate_share: float,
    seed: int,
    *,
    options: Options | None = None,
    on_ended: OnEnded | None = None,
    worst: list[WorstRequest] | None = None,
) -> LoadResult:
    """Serve `requests` as Poisson arrivals of that rate; those that waited longest are appended to `worst`."""
    with setting.start(policy) as engine:
        before = engine.stats()
        others = OthersLoad()
        served = serve(
            engine,
            requests,
            poisson_times(len(requests), rate, seed),
            knows_lengths=policy.knows_lengths,
            options=options,
            on_ended=on_ended,
        )
        share = others.share()
        result = _result(engine, policy.name, served, rate, rate_share, seed, share, before)
        if worst is not None:
            worst += worst_requests(engine, served)
    return result


def measure_capacity(
    setting: Setting, policy: Policy, requests: Sequence[BenchRequest], on_ended: OnEnded | None = None
) -> float:
    """Requests a second that it finishes with half as many in it as it has seats; the first and last tenth left out.

    So there is always somebody in the queue if the KV pool is what limits the batch, and never a long queue, which
    would cost the scheduler time that it does not take at lower rates.
    """
    in_flight = max(1, setting.engine["max_num_seqs"] // 2)
    with setting.start(policy) as engine:
        ends_ns = serve_closed(engine, requests, in_flight, knows_lengths=policy.knows_lengths, on_ended=on_ended)
    first, last = len(ends_ns) // 10, len(ends_ns) - 1 - len(ends_ns) // 10
    return (last - first) / max(1, ends_ns[last] - ends_ns[first]) * 1e9


def _result(
    engine: Engine,
    policy: str,
    served: Sequence[Served],
    rate: float,
    rate_share: float,
    seed: int,
    others: float | None,
    before: EngineStats,
) -> LoadResult:
    finished = [one for one in served if one.has_finished]
    makespan_s = (max((one.token_times_ns[-1] for one in finished), default=0) - served[0].due_ns) / 1e9
    refusals: dict[str, int] = {}
    for one in served:
        if one.refusal is not None:
            refusals[one.refusal] = refusals.get(one.refusal, 0) + 1
    gaps = [(later - earlier) / 1e9 for one in finished for earlier, later in pairwise(one.token_times_ns)]
    mean_batch, kv_used = _fill(before, engine.stats())
    output_tokens = sum(len(one.token_times_ns) for one in finished)
    return LoadResult(
        policy=policy,
        seed=seed,
        rate=rate,
        rate_share=rate_share,
        num_requests=len(served),
        num_finished=len(finished),
        refusals=refusals,
        ttft=_ttft(finished),
        ttft_short=_ttft([one for one in finished if not one.asked.is_long]),
        ttft_long=_ttft([one for one in finished if one.asked.is_long]),
        itl=quantiles(np.sort(np.array(gaps, np.float64))),
        waiting_s=_waiting(engine, served),
        mean_batch=mean_batch,
        kv_used=kv_used,
        makespan_s=makespan_s,
        output_tokens_per_s=output_tokens / makespan_s if makespan_s > 0 else 0.0,
        preemptions=sum(one.preemptions for one in finished),
        recomputed_tokens=sum(one.recomputed_tokens for one in finished),
        others=others,
    )


def _fill(before: EngineStats, after: EngineStats) -> tuple[float, float]:
    """Mean sequences of a step, and mean part of the KV pool in use, of the steps between the two."""

    def sums(stats: EngineStats) -> tuple[float, float]:
        used = 0.0 if stats.kv_mean is None else stats.kv_mean.used
        return stats.sequences_per_step * stats.num_steps, used * stats.num_steps

    num_steps = max(1, after.num_steps - before.num_steps)
    (first_seqs, first_used), (last_seqs, last_used) = sums(before), sums(after)
    return (last_seqs - first_seqs) / num_steps, (last_used - first_used) / num_steps / after.num_blocks


def _ttft(served: Sequence[Served]) -> Quantiles:
    return quantiles(np.sort(np.array([one.ttft_s for one in served], np.float64)))


def _waiting(engine: Engine, served: Sequence[Served]) -> dict[str, float]:
    """Seconds by reason. The warm-up is not in it, as each request is asked for by its id."""
    total_ns = {BEFORE_SUBMIT: sum(one.submitted_ns - one.due_ns for one in served)}
    for one in served:
        if one.request_id:
            for part in engine.explain(one.request_id, what_if=False).parts:
                total_ns[part.reason.value] = total_ns.get(part.reason.value, 0) + part.wait_ns
    return {reason: wait_ns / 1e9 for reason, wait_ns in sorted(total_ns.items()) if wait_ns}


def worst_requests(engine: Engine, served: Sequence[Served]) -> list[WorstRequest]:
    """The NUM_WORST requests with the longest time to first token, the worst first, with what the log holds of them.

    The trace counts its time from a moment that it does not tell; it is put on the client's clock by this: a request's
    first slice begins when it was submitted.
    """
    finished = sorted((one for one in served if one.has_finished), key=lambda one: -one.ttft_s)[:NUM_WORST]
    slices = _traced_slices(engine)
    origin_ns = served[0].due_ns
    worst = []
    for one in finished:
        submitted_s = (one.submitted_ns - origin_ns) / 1e9
        life = [Slice((one.due_ns - origin_ns) / 1e9, submitted_s, BEFORE_SUBMIT)]
        traced = slices.get(one.request_id, [])
        for start_us, end_us, what in traced:
            shift_s = submitted_s - traced[0][0] / 1e6
            life.append(Slice(start_us / 1e6 + shift_s, end_us / 1e6 + shift_s, what))
        worst.append(WorstRequest(one.ttft_s, len(one.asked.prompt), len(one.token_times_ns), tuple(life)))
    return worst


def _traced_slices(engine: Engine) -> dict[str, list[tuple[int, int, str]]]:
    """For each request id the slices of its track in the engine's trace, in microseconds of the trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        engine.save_trace(path)
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names: dict[int, str] = {}
    slices: dict[str, list[tuple[int, int, str]]] = {}
    for event in events:
        if event["pid"] != _REQUESTS:
            continue
        if event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            made = (event["ts"], event["ts"] + event["dur"], event["name"])
            slices.setdefault(names[event["tid"]], []).append(made)
    return slices
