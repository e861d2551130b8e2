"""Reads a config.json value by value, checked, with a family's defaults; knows no family and touches no file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pyengine.errors import ModelError

# Options of other families that change the computation: a checkpoint that carries one with any other value than these
# is not a plain decoder of our families, whatever its architecture says.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None, {}),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
    "per_layer_config": (None, {}),
    "rope_interleaved": (None, False),
    "rotary_dim": (None,),
    "rotary_pct": (None, 1.0),
    "alibi": (None, False),
    "parallel_attn": (None, False),
    "use_parallel_residual": (None, False),
    "clip_qkv": (None,),
    "qk_layernorm": (None, False),
    "use_qk_norm": (None, False),
    "query_pre_attn_scalar": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "scale_emb": (None, 1.0),
    "scale_depth": (None,),
    "dim_model_base": (None,),
    "no_rope_layers": (None, []),
    "no_rope_layer_interval": (None, 0),
    "attention_chunk_size": (None,),
    "attn_temperature_tuning": (None, False, 0),
    "use_moe": (None, False),
    "use_mrope": (None, False),
}
# The same for whole groups of names: soft caps, experts, multipliers, mu-parametrisation.
NEUTRAL_PATTERNS: tuple[tuple[re.Pattern[str], tuple[Any, ...]], ...] = (
    (re.compile(r"softcap"), (None, 0)),
    (re.compile(r"expert|(^|_)moe(_|$)"), (None, 0, 1, False, [])),
    (re.compile(r"_multiplier$"), (None, 1.0)),
    (re.compile(r"(^|_)mup(_|$)"), (None, False, 1.0)),
    (re.compile(r"layer_?norm_type|^norm_type$"), (None, "rms_norm", "rmsnorm")),
)


class ConfigReader:
    """A config.json with one family's defaults; methods raise ModelError naming key, value and what is allowed."""

    def __init__(self, family: str, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.family = family
        self._config = config
        self._defaults = defaults
        self._refuse_unknown_computation()

    def value(self, key: str) -> Any:
        """The value as written, else the family's default, else None."""
        return self._config[key] if key in self._config else self._defaults.get(key)

    def refuse(self, key: str, value: Any, wanted: str) -> ModelError:
        return ModelError(f"config.json of a {self.family} model: {key} is {value!r}; it must be {wanted}.")

    def integer(self, key: str, low: int = 1, high: int = 2**31 - 1) -> int:
        return checked_integer(self, key, self.value(key), low, high)

    def number(self, key: str, low: float, high: float) -> float:
        return checked_number(self, key, self.value(key), low, high)

    def flag(self, key: str) -> bool:
        value = self.value(key)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return value

    def choice(self, key: str, allowed: Mapping[str, str]) -> str:
        value = self.value(key)
        if not isinstance(value, str) or value not in allowed:
            raise self.refuse(key, value, "one of " + ", ".join(allowed))
        return allowed[value]

    def refuse_unless(self, key: str, neutral: tuple[Any, ...]) -> None:
        """Refuse a key that this family does not compute, unless its value changes nothing."""
        if key in self._config and not _is_one_of(self._config[key], neutral):
            allowed = " or ".join(repr(value) for value in neutral)
            raise ModelError(
                f"config.json of a {self.family} model: {key} is {self._config[key]!r}; this option is not "
                f"handled, and only {allowed} would leave the computation as it is."
            )

    def _refuse_unknown_computation(self) -> None:
        for key, neutral in NEUTRAL_VALUES.items():
            self.refuse_unless(key, neutral)
        for key in self._config:
            for pattern, neutral in NEUTRAL_PATTERNS:
                if pattern.search(key):
                    self.refuse_unless(key, neutral)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)


def checked_integer(reader: ConfigReader, key: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise reader.refuse(key, value, f"an integer from {low} to {high}")
    return value


def checked_number(reader: ConfigReader, key: str, value: Any, low: float, high: float) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high:
        raise reader.refuse(key, value, f"a number from {low:g} to {high:g}")
    return float(value)
