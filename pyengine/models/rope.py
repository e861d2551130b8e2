"""Rotary position embedding: frequencies of every kind we handle, and the cos/sin tables that the native step reads.

Kinds and formulas: plain (RoFormer, arXiv 2104.09864), linear position interpolation (arXiv 2306.15595), dynamic NTK
scaling, Llama 3's piecewise scaling, YaRN (arXiv 2309.00071). The numbers agree with Hugging Face's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.models.spec import RopeSpec

FloatArray = npt.NDArray[np.float32]
_TABLE_CHUNK = 8192  # positions computed at a time: keeps the float64 temporaries small


def rope_frequencies(rope: RopeSpec, max_context: int) -> tuple[FloatArray, float]:
    """Angle per position of each rotated pair, and the factor on cos and sin.

    Args:
        rope: the model's rope.
        max_context: longest sequence that will be served, in tokens. Only `dynamic` depends on it: frequencies are
            chosen once, for this length, where HF chooses them anew as a sequence grows; so an answer does not
            depend on how its prompt was cut. Up to the config's max_position_embeddings nothing is scaled, as in HF.

    Returns:
        inverse frequencies, float32 [rotary_dim / 2], and the attention factor (1.0 but for `yarn`).
    """
    parameters: Mapping[str, Any] = rope.parameters or {}
    if rope.kind == "default":
        return _plain(rope.base, rope.rotary_dim), 1.0
    if rope.kind == "linear":
        return _plain(rope.base, rope.rotary_dim) / np.float32(parameters["factor"]), 1.0
    if rope.kind == "dynamic":
        return _plain(_dynamic_base(rope, parameters, max_context), rope.rotary_dim), 1.0
    if rope.kind == "llama3":
        return _llama3(_plain(rope.base, rope.rotary_dim), parameters), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, parameters), _yarn_attention_factor(parameters)
    raise ValueError(f"rope of kind {rope.kind!r} has no formula here")


def rope_tables(rope: RopeSpec, num_positions: int, max_context: int) -> tuple[FloatArray, FloatArray]:
    """cos and sin of positions 0 to num_positions - 1, float32 [num_positions, rotary_dim / 2], factor multiplied in.

    Angles are float32 products of position and frequency, as in HF; cos and sin are then exact to the last bit.
    """
    frequencies, attention_factor = rope_frequencies(rope, max_context)
    cos = np.empty((num_positions, frequencies.size), np.float32)
    sin = np.empty_like(cos)
    for start in range(0, num_positions, _TABLE_CHUNK):
        stop = min(start + _TABLE_CHUNK, num_positions)
        positions = np.arange(start, stop, dtype=np.float32)
        angles = (positions[:, None] * frequencies).astype(np.float64)
        cos[start:stop] = np.cos(angles)
        sin[start:stop] = np.sin(angles)
    if attention_factor != 1.0:
        cos *= np.float32(attention_factor)
        sin *= np.float32(attention_factor)
    return cos, sin


def longest_context(rope: RopeSpec, max_context: int) -> int:
    """How far a user may raise max_context: `linear` and `dynamic` stretch by their factor, the others do not."""
    if rope.kind in ("linear", "dynamic") and rope.parameters is not None:
        return int(rope.parameters["factor"] * max_context)
    return max_context


def _powers(base: float, rotary_dim: int) -> FloatArray:
    """base ** (2 i / rotary_dim), exponent in float32, the power correctly rounded to float32."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return np.power(np.float64(np.float32(base)), exponents.astype(np.float64)).astype(np.float32)


def _plain(base: float, rotary_dim: int) -> FloatArray:
    return np.float32(1.0) / _powers(base, rotary_dim)


def _dynamic_base(rope: RopeSpec, parameters: Mapping[str, Any], max_context: int) -> float:
    trained, factor, dim = parameters["max_position_embeddings"], parameters["factor"], rope.rotary_dim
    if max_context <= trained or dim <= 2:  # with one pair the exponent has no meaning, and its frequency is 1 anyway
        return rope.base
    stretch = factor * max_context / trained - (factor - 1.0)
    return float(rope.base * stretch ** (dim / (dim - 2)))


def _llama3(plain: FloatArray, parameters: Mapping[str, Any]) -> FloatArray:
    """Long waves are slowed by `factor`, short ones kept, those between blended by how often they turn."""
    factor, low, high = (np.float32(parameters[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = np.float32(parameters["original_max_position_embeddings"])
    # A number divided by an array is, in HF's arithmetic, the array's reciprocals times it; the last bit follows that.
    wavelengths = np.float32(2 * math.pi) * (np.float32(1.0) / plain)
    blend = (trained * (np.float32(1.0) / wavelengths) - low) / (high - low)
    blended = (1 - blend) * plain / factor + blend * plain
    is_long, is_short = wavelengths > trained / low, wavelengths < trained / high
    return np.where(is_long, plain / factor, np.where(is_short, plain, blended)).astype(np.float32)


def _yarn(rope: RopeSpec, parameters: Mapping[str, Any]) -> FloatArray:
    """Pairs that turn more than beta_fast times over the trained length are kept, less than beta_slow are slowed."""
    dim, trained = rope.rotary_dim, parameters["original_max_position_embeddings"]

    def dimension_that_turns(times: float) -> float:
        return float(dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(rope.base)))

    low = dimension_that_turns(parameters.get("beta_fast") or 32.0)
    high = dimension_that_turns(parameters.get("beta_slow") or 1.0)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = np.float32(1.0) - np.clip(ramp, 0.0, 1.0)
    powers = _powers(rope.base, dim)
    slowed = np.float32(1.0) / (np.float32(parameters["factor"]) * powers)
    frequencies: FloatArray = slowed * (np.float32(1.0) - kept) + np.float32(1.0) / powers * kept
    return frequencies


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    """As given, else 0.1 * ln(factor) + 1, or a ratio of two such, weighted with mscale and mscale_all_dim."""
    given, factor = parameters.get("attention_factor"), parameters["factor"]
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if given is not None:
        return float(given)
    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)
