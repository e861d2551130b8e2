"""Results: what a simulated run is summed up to, alone and over several seeds. Plain data, as JSON has it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.request import Request
from pyengine.scheduler.ledger import REASONS
from pyengine.scheduler.request_record import RequestRecord
from pyengine.simulate.workload import SimRequest

Floats = npt.NDArray[np.float64]
_BIN_RATIO = 1.001  # of the histogram of gaps between tokens: each is known to 0.1 %
_FLUSH_GAPS = 1 << 17


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of some times, in seconds; None where there were none."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of one policy.

    Attributes:
        device: the profile's title, which says whether it was measured.
        ttft, ttft_short, ttft_long: from arrival to first token; of all requests, and of those with prompts below and
            from `long_from` tokens.
        itl: between two tokens of one request, over all gaps, each known to 0.1 %.
        itl_over_limit: the part of these gaps that is longer than itl_limit_ms; None without such a limit.
        makespan_s: from the first arrival to the last token, in simulated time.
        requests_per_s, output_tokens_per_s: finished over makespan.
        busy: part of the makespan in which a replica ran steps, on average.
        preemptions, recomputed_tokens, cached_tokens: as the requests count them.
        blocked_heads: requests that did not fit when they were first, and got a reserved start.
        passed_heads: requests that others passed while they were blocked.
        moved_starts: how often a reserved start became later. Zero with capacity "guaranteed".
        refusals: by kind of error.
        waiting_s: seconds of waiting of all requests together, by reason.
        ttft_curve, ttft_short_curve, ttft_long_curve: their quantiles at 0, 1, .. 100 %, in seconds.
        wall_s: how long the simulation took.
    """

    policy: str
    seed: int | None
    device: str
    workload: str
    num_replicas: int
    router: str | None
    long_from: int
    num_requests: int
    num_finished: int
    refusals: Mapping[str, int]
    ttft: Quantiles
    ttft_short: Quantiles
    ttft_long: Quantiles
    itl: Quantiles
    itl_over_limit: float | None
    makespan_s: float
    requests_per_s: float
    output_tokens_per_s: float
    busy: float
    num_steps: int
    mean_batch: float
    preemptions: int
    recomputed_tokens: int
    cached_tokens: int
    prompt_tokens: int
    output_tokens: int
    blocked_heads: int
    passed_heads: int
    moved_starts: int
    waiting_s: Mapping[str, float]
    ttft_curve: Sequence[float]
    ttft_short_curve: Sequence[float]
    ttft_long_curve: Sequence[float]
    wall_s: float

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


class Recorder:
    """Collects what ended requests tell; keeps a few numbers of each, and a histogram of the gaps between tokens."""

    def __init__(self, long_from: int, itl_limit_ms: float | None = None) -> None:
        self.long_from = long_from
        self._itl_limit_ns = None if itl_limit_ms is None else int(itl_limit_ms * 1e6)
        self._num_over_limit = 0
        self.refusals: dict[str, int] = {}
        self.waiting_ns: dict[str, int] = {}
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.blocked_heads = 0
        self.passed_heads = 0
        self.moved_starts = 0
        self.last_ns = 0
        self._ttft_ns: list[int] = []
        self._is_long: list[bool] = []
        self._gaps: list[npt.NDArray[np.int64]] = []
        self._num_gaps = 0
        self._histogram = np.zeros(0, np.int64)

    @property
    def num_finished(self) -> int:
        """Requests that ended with their last token."""
        return len(self._ttft_ns)

    def refused(self, request: Request, error: Exception) -> None:
        """Count a refusal, and what the request waited for it."""
        self._add_waiting(request)
        kind = type(error).__name__
        self.refusals[kind] = self.refusals.get(kind, 0) + 1

    def ended(self, asked: SimRequest, request: Request) -> None:
        """Take what a finished request tells."""
        times = request.token_times_ns
        self._ttft_ns.append(times[0] - request.arrival_ns)
        self._is_long.append(asked.prompt_tokens >= self.long_from)
        self.last_ns = max(self.last_ns, times[-1])
        self.preemptions += request.num_preemptions
        self.recomputed_tokens += request.num_recomputed_tokens
        self.cached_tokens += request.num_cached_tokens
        self.prompt_tokens += request.num_prompt_tokens
        self.output_tokens += len(times)
        self._add_waiting(request)
        if len(times) > 1:
            moments = np.array(times, np.int64)
            self._gaps.append(moments[1:] - moments[:-1])
            self._num_gaps += len(times) - 1
            if self._num_gaps >= _FLUSH_GAPS:
                self._flush()

    def ttft(self) -> tuple[Floats, Floats, Floats]:
        """Sorted seconds to the first token: of all, of the short prompts, of the long ones."""
        seconds = np.array(self._ttft_ns, np.float64) / 1e9
        is_long = np.array(self._is_long, np.bool_)
        return np.sort(seconds), np.sort(seconds[~is_long]), np.sort(seconds[is_long])

    def itl(self) -> Quantiles:
        """Quantiles of the gaps between tokens."""
        self._flush()
        total = int(self._histogram.sum())
        if total == 0:
            return Quantiles(0, None, None, None)
        below = np.cumsum(self._histogram)
        at = [int(np.searchsorted(below, q * total)) for q in (0.5, 0.9, 0.99)]
        p50, p90, p99 = ((_BIN_RATIO ** (i + 0.5)) / 1e9 for i in at)
        return Quantiles(total, p50, p90, p99)

    def itl_over_limit(self) -> float | None:
        """The part of the gaps that is longer than the limit; None without a limit or gaps."""
        self._flush()
        total = int(self._histogram.sum())
        return None if self._itl_limit_ns is None or total == 0 else self._num_over_limit / total

    def _add_waiting(self, request: Request) -> None:
        record: RequestRecord | None = request.log
        if record is None:  # refused before it waited
            return
        for reason, wait_ns in zip(REASONS, record.parts, strict=True):
            if wait_ns:
                self.waiting_ns[reason.value] = self.waiting_ns.get(reason.value, 0) + wait_ns
        self.blocked_heads += record.num_reservations > 0
        self.passed_heads += record.passed_by.number > 0
        self.moved_starts += record.num_moves

    def _flush(self) -> None:
        if not self._gaps:
            return
        gaps = np.maximum(np.concatenate(self._gaps), 1)
        if self._itl_limit_ns is not None:
            self._num_over_limit += int((gaps > self._itl_limit_ns).sum())
        counts = np.bincount((np.log(gaps) / math.log(_BIN_RATIO)).astype(np.int64))
        longer = max(len(counts), len(self._histogram))
        self._histogram = np.pad(self._histogram, (0, longer - len(self._histogram)))
        self._histogram[: len(counts)] += counts
        self._gaps.clear()
        self._num_gaps = 0


def quantiles(ordered: Floats) -> Quantiles:
    """Of sorted values, each with linear interpolation."""
    if not len(ordered):
        return Quantiles(0, None, None, None)
    p50, p90, p99 = np.quantile(ordered, (0.5, 0.9, 0.99)).tolist()
    return Quantiles(len(ordered), p50, p90, p99)


def curve(ordered: Floats) -> list[float]:
    """The quantiles at 0, 1, .. 100 %; empty without values."""
    return [] if not len(ordered) else [float(value) for value in np.quantile(ordered, np.linspace(0, 1, 101))]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over several seeds: median, least and most."""

    median: float
    low: float
    high: float


def spread_of(values: Sequence[float]) -> Spread | None:
    """Of these values; None where there are none."""
    return Spread(statistics.median(values), min(values), max(values)) if values else None


FIGURES: dict[str, str] = {
    "ttft_p50": "TTFT p50",
    "ttft_p90": "TTFT p90",
    "ttft_p99": "TTFT p99",
    "ttft_short_p50": "short p50",
    "ttft_short_p90": "short p90",
    "ttft_short_p99": "short p99",
    "ttft_long_p50": "long p50",
    "ttft_long_p90": "long p90",
    "ttft_long_p99": "long p99",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
    "itl_over_limit": "ITL over limit",
    "output_tokens_per_s": "tokens/s",
    "requests_per_s": "requests/s",
    "mean_batch": "batch",
    "preemptions": "preempted",
    "recomputed_tokens": "recomputed",
    "cached_tokens": "cached",
    "refused": "refused",
    "blocked_heads": "promised starts",
    "passed_heads": "passed heads",
    "moved_starts": "moved starts",
}


def figure(result: RunResult, name: str) -> float | None:
    """One of FIGURES; times in seconds."""
    if name == "refused":
        return sum(result.refusals.values())
    group, _, point = name.rpartition("_")
    if point in ("p50", "p90", "p99"):
        value: float | None = getattr(getattr(result, group), point)
    else:
        value = getattr(result, name)
    return value


def spread(results: Sequence[RunResult], name: str) -> Spread | None:
    """One of FIGURES over the runs of one policy; None if no run has it."""
    return spread_of([value for value in (figure(result, name) for result in results) if value is not None])


def by_policy(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """The runs of each policy, in the order in which the policies first appear."""
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(result.policy, []).append(result)
    return groups


def summary(results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """For each policy its name, number of runs, and the spread of each of FIGURES, as JSON has them."""
    return [
        {
            "policy": policy,
            "runs": len(runs),
            **{name: None if (found := spread(runs, name)) is None else asdict(found) for name in FIGURES},
        }
        for policy, runs in by_policy(results).items()
    ]
