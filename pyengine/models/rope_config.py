"""Reads the rope section of a config.json, in its older and its newer form, into a RopeSpec; computes no angle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyengine.errors import ModelError
from pyengine.models.config_reader import ConfigReader, checked_number
from pyengine.models.spec import RopeSpec

# Per kind of rope: key -> (needed, smallest value allowed). Keys of the other kinds are refused, not ignored.
ROPE_KEYS: Mapping[str, Mapping[str, tuple[bool, float]]] = {
    "default": {},
    "linear": {"factor": (True, 1.0)},
    "dynamic": {"factor": (True, 1.0)},
    "llama3": {
        "factor": (True, 1.0),
        "low_freq_factor": (True, 1e-6),
        "high_freq_factor": (True, 1e-6),
        "original_max_position_embeddings": (False, 1),
    },
    "yarn": {
        "factor": (False, 1.0),
        "original_max_position_embeddings": (False, 1),
        "attention_factor": (False, 0.0),
        "beta_fast": (False, 0.0),
        "beta_slow": (False, 0.0),
        "mscale": (False, 0.0),
        "mscale_all_dim": (False, 0.0),
    },
}
ROPE_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
# Keys that inform and do not compute: YaRN's "was trained with it", and the trained length where the kind has no use.
ROPE_SILENT_KEYS: Mapping[str, frozenset[str]] = {
    "linear": frozenset({"original_max_position_embeddings"}),
    "dynamic": frozenset({"original_max_position_embeddings"}),
    "yarn": frozenset({"finetuned"}),
}
DEFAULT_ROPE_THETA = 10000.0


def rope_spec(reader: ConfigReader, head_dim: int) -> RopeSpec:
    """Rope from `rope_scaling` + `rope_theta` (older configs) or from `rope_parameters` (newer ones).

    A `partial_rotary_factor` below 1 rotates the first int(head_dim * factor) dimensions of each head.
    """
    section = "rope_scaling" if reader.value("rope_scaling") else "rope_parameters"
    found = reader.value(section) or {}
    if not isinstance(found, Mapping):
        raise reader.refuse(section, found, "an object or null")
    kind = found.get("rope_type", found.get("type", "default"))
    if any(isinstance(value, Mapping) for value in found.values()):
        raise reader.refuse(section, dict(found), "one rope for all layers; a rope per layer type is not handled")
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise reader.refuse(f"{section}.rope_type", kind, "one of " + ", ".join(ROPE_KEYS))
    return RopeSpec(
        base=_rope_number(reader, section, found, "rope_theta", DEFAULT_ROPE_THETA, 1.0),
        rotary_dim=_rotary_dim(reader, section, found, head_dim),
        kind=kind,
        parameters=_rope_parameters(reader, section, found, kind) or None,
    )


def _rope_number(
    reader: ConfigReader, section: str, found: Mapping[str, Any], key: str, default: float, low: float
) -> float:
    """A value of the rope section, else of the config's top level, else the default."""
    if found.get(key) is not None:
        return checked_number(reader, f"{section}.{key}", found[key], low, 1e12)
    return default if reader.value(key) is None else reader.number(key, low, 1e12)


def _rotary_dim(reader: ConfigReader, section: str, found: Mapping[str, Any], head_dim: int) -> int:
    factor = _rope_number(reader, section, found, "partial_rotary_factor", 1.0, 0.0)
    rotary_dim = int(head_dim * factor)
    if factor > 1.0 or rotary_dim < 2 or rotary_dim % 2:
        key, value = ("head_dim", head_dim) if factor == 1.0 else ("partial_rotary_factor", factor)
        raise reader.refuse(key, value, f"such that an even number >= 2 of dimensions is rotated, not {rotary_dim}")
    return rotary_dim


def _rope_parameters(
    reader: ConfigReader, section: str, found: Mapping[str, Any], kind: str
) -> dict[str, float | bool]:
    known = ROPE_KEYS[kind]
    silent = ROPE_COMMON_KEYS | ROPE_SILENT_KEYS.get(kind, frozenset())
    parameters: dict[str, float | bool] = {}
    for key, value in found.items():
        if key in known and value is not None:
            parameters[key] = checked_number(reader, f"{section}.{key}", value, known[key][1], 1e12)
        elif key == "truncate" and kind == "yarn":
            if not isinstance(value, bool):
                raise reader.refuse(f"{section}.truncate", value, "true or false")
            parameters[key] = value
        elif key not in known and key not in silent:
            raise reader.refuse(f"{section}.{key}", value, f"absent: rope of kind {kind} is not known to use it")
    for key, (needed, _) in known.items():
        if needed and key not in parameters:
            raise _missing(reader, section, kind, key)
    if kind == "yarn" and "factor" not in found:  # null asks for the ratio of the lengths, absent is a mistake
        raise _missing(reader, section, kind, "factor")
    return _with_trained_length(reader, section, kind, parameters)


def _missing(reader: ConfigReader, section: str, kind: str, key: str) -> ModelError:
    return ModelError(
        f"config.json of a {reader.family} model: {section}.{key} is missing; rope of kind {kind} needs a number there."
    )


def _with_trained_length(
    reader: ConfigReader, section: str, kind: str, parameters: dict[str, float | bool]
) -> dict[str, float | bool]:
    """Adds the lengths that a kind computes with: the trained one, and for `dynamic` the one where scaling begins."""
    longest = reader.integer("max_position_embeddings")
    if kind == "dynamic":
        parameters["max_position_embeddings"] = longest
    if kind in ("llama3", "yarn"):
        if reader.value("original_max_position_embeddings") is not None:  # at the top level it has priority, as in HF
            parameters["original_max_position_embeddings"] = reader.integer("original_max_position_embeddings")
        if kind == "yarn" and "factor" not in parameters and "original_max_position_embeddings" not in parameters:
            raise _missing(reader, section, kind, "factor")
        original = parameters.setdefault("original_max_position_embeddings", longest)
        if kind == "yarn" and "factor" not in parameters:
            ratio = longest / original
            parameters["factor"] = checked_number(
                reader, f"{section}.factor", ratio, ROPE_KEYS[kind]["factor"][1], 1e12
            )
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        wanted = f"more than low_freq_factor, {parameters['low_freq_factor']:g}"
        raise reader.refuse(f"{section}.high_freq_factor", parameters["high_freq_factor"], wanted)
    return parameters


def served_context(rope: RopeSpec, max_position_embeddings: int) -> int:
    """Longest sequence that is served unless the user says otherwise.

    It is the config's max_position_embeddings. Only with `yarn` do configs often keep the trained length there (Qwen2.5
    does), so then it is factor * original_max_position_embeddings where that is longer.
    """
    if rope.kind == "yarn" and rope.parameters is not None:
        stretched = int(rope.parameters["factor"] * rope.parameters["original_max_position_embeddings"])
        return max(max_position_embeddings, stretched)
    return max_position_embeddings
