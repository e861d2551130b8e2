"""The floor of time that a model and a machine set, and how runs are compared: arithmetic, measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WEIGHT_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Sizes:
    """What one token costs: parameters in the layers' matrices, in the head, and bytes of KV it leaves."""

    layer_parameters: int
    head_parameters: int
    kv_bytes_per_token: int


@dataclass(frozen=True)
class Ceilings:
    """What the machine did at most, right before a round; dot products of bfloat16, or fp32 where it has none."""

    read_gb_s: float
    dot_gflop_s: float
    fp32_gflop_s: float


@dataclass(frozen=True)
class Limit:
    """Tokens/s that cannot be passed, if arithmetic and memory overlap perfectly, and if they do not overlap at all."""

    overlapped: float
    serial: float


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """Sizes of a Llama-shaped model from its config.json, keys and values kept in two bytes."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    mlp = 3 * hidden * config["intermediate_size"]
    layers = config["num_hidden_layers"]
    return Sizes(layers * (attention + mlp), config["vocab_size"] * hidden, 2 * layers * kv_heads * head_dim * 2)


def prefill_limit(sizes: Sizes, tokens: int, ceilings: Ceilings) -> Limit:
    """Of one prompt: the head is computed for its last token only."""
    flop = 2 * (tokens * sizes.layer_parameters + sizes.head_parameters)
    return _limit(tokens, flop, WEIGHT_BYTES * (sizes.layer_parameters + sizes.head_parameters), ceilings)


def decode_limit(sizes: Sizes, batch: int, context: float, ceilings: Ceilings) -> Limit:
    """Of one step of `batch` sequences: weights are read once, keys and values of `context` tokens for each."""
    parameters = sizes.layer_parameters + sizes.head_parameters
    read = WEIGHT_BYTES * parameters + batch * context * sizes.kv_bytes_per_token
    return _limit(batch, 2 * batch * parameters, read, ceilings)


def _limit(tokens: int, flop: float, read_bytes: float, ceilings: Ceilings) -> Limit:
    compute_s, memory_s = flop / (ceilings.dot_gflop_s * 1e9), read_bytes / (ceilings.read_gb_s * 1e9)
    return Limit(tokens / max(compute_s, memory_s), tokens / (compute_s + memory_s))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over rounds of ours / theirs of the same round: what slows a whole round down cancels."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share before they part."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class Goal:
    """`figures` of pyengine shall reach `factor` times those of `peer` (None: of the best peer of each figure)."""

    text: str
    figures: tuple[str, ...]
    peer: str | None
    factor: float


def goals_of(batches: Sequence[int]) -> tuple[Goal, ...]:
    """What the project wants of itself, for the batch sizes that are measured."""
    first, last = f"decode {batches[0]}", f"decode {batches[-1]}"
    return (
        Goal("decode, every batch", tuple(f"decode {b}" for b in batches), "transformers", 3.0),
        Goal("prefill", ("prefill",), "transformers", 1.6),
        Goal(f"decode at batch {batches[0]}", (first,), "llama.cpp", 1.0),
        Goal(f"decode at batch {batches[-1]}", (last,), "llama.cpp", 1.5),
        Goal(f"stretch: decode at batch {batches[0]} and {batches[-1]}", (first, last), None, 1.2),
        Goal("stretch: prefill", ("prefill",), None, 0.9),
    )


def lowest_ratio(goal: Goal, rates: Mapping[str, Mapping[str, Sequence[float]]]) -> float | None:
    """The lowest of a goal's ratios; rates[peer][figure] are tokens/s by round. None: that peer was not measured."""
    ours = rates.get("pyengine", {})
    ratios = []
    for figure in goal.figures:
        peers = [p for p in rates if p != "pyengine" and (goal.peer is None or p == goal.peer) and figure in rates[p]]
        if figure not in ours or not peers:
            return None
        ratios.append(min(paired_ratio(ours[figure], rates[p][figure]) for p in peers))
    return min(ratios)
