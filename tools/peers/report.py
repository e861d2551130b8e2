"""What a run measured, and the numbers that follow from it: data and arithmetic; it measures and prints nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from peers.limits import Ceilings, Limit, decode_limit, goals_of, lowest_ratio, paired_ratio, prefill_limit, sizes_of

PREFILL_TOKENS = 512
DECODE_PROMPT_TOKENS = 128


@dataclass(frozen=True)
class Plan:
    """What is measured: batch sizes, steps of a decode run, rounds, threads."""

    batches: tuple[int, ...]
    steps: int
    rounds: int
    threads: int

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures, in the order of a round."""
        return ("prefill", *(f"decode {batch}" for batch in self.batches))


@dataclass
class Peer:
    """What is known of one engine. `rates` are tokens/s by figure and round; `problem` is why there are none."""

    name: str
    problem: str | None = None
    version: str = ""
    load_s: float = 0.0
    peak_bytes: int = 0
    installed_bytes: int = 0
    tokens: list[int] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Report:
    """Everything a run gave."""

    model: str
    plan: Plan
    peers: list[Peer]
    ceilings: list[Ceilings]
    limits: dict[str, list[Limit]]
    others_load: float | None

    @property
    def rates(self) -> dict[str, dict[str, list[float]]]:
        """Tokens/s by peer, figure and round, of those that were measured."""
        return {peer.name: peer.rates for peer in self.peers if peer.problem is None}


def rate_of(figure: str, steps: int, seconds: float) -> float:
    """Tokens/s of one run."""
    return (PREFILL_TOKENS if figure == "prefill" else int(figure.split()[1]) * steps) / seconds


def limits_of(config: dict[str, Any], plan: Plan, ceilings: list[Ceilings]) -> dict[str, list[Limit]]:
    """Limit of each figure in each round."""
    sizes = sizes_of(config)
    limits = {"prefill": [prefill_limit(sizes, PREFILL_TOKENS, c) for c in ceilings]}
    context = DECODE_PROMPT_TOKENS + plan.steps / 2
    for batch in plan.batches:
        limits[f"decode {batch}"] = [decode_limit(sizes, batch, context, c) for c in ceilings]
    return limits


def as_json(report: Report) -> dict[str, Any]:
    """The whole report as plain values."""
    return {
        "model": report.model,
        "dtype": "bfloat16",
        "prefill_tokens": PREFILL_TOKENS,
        "decode_prompt_tokens": DECODE_PROMPT_TOKENS,
        **asdict(report.plan),
        "ceilings": [asdict(c) for c in report.ceilings],
        "others_load": report.others_load,
        "limits_tokens_per_s": {figure: [asdict(x) for x in limits] for figure, limits in report.limits.items()},
        "peers": [asdict(peer) for peer in report.peers],
        "ratios": {
            peer.name: {f: paired_ratio(report.rates["pyengine"][f], peer.rates[f]) for f in report.plan.figures}
            for peer in report.peers
            if peer.problem is None and "pyengine" in report.rates
        },
        "goals": [
            {"goal": goal.text, "peer": goal.peer or "best", "factor": goal.factor, "ratio": ratio}
            for goal in goals_of(report.plan.batches)
            for ratio in [lowest_ratio(goal, report.rates)]
        ],
    }
