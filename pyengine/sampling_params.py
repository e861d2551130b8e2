"""SamplingParams: how the next token is chosen and when a completion ends. Checked when made, frozen afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any

from pyengine.errors import InvalidRequest

MAX_LOGPROBS = 64
MAX_N = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request.

    A field left at None takes the model's own default (generation_config.json) and else the neutral value in the table
    below. Order of the steps: penalties, logit bias, masks (end-of-sequence and stop ids while fewer than `min_tokens`
    tokens were made), temperature, top-k, top-p, min-p. Ties go to the lower token id.

    Attributes:
        max_tokens: most tokens to make, >= 1. None: as many as the context and the KV pool allow.
        min_tokens: no end of sequence and no stop id before this many tokens, >= 0.
        temperature: >= 0; 0 is greedy. Neutral 1.0.
        top_k: keep exactly the k most likely tokens; 0 or None keeps all.
        top_p: keep the smallest set of most likely tokens whose mass is >= top_p, in (0, 1]. Neutral 1.0.
        min_p: keep tokens at least min_p times as likely as the most likely one, in [0, 1]. Neutral 0.0.
        repetition_penalty: > 0; divides positive and multiplies negative logits of every token in prompt or output.
            Neutral 1.0.
        presence_penalty: in [-2, 2]; subtracted once from logits of tokens in the output. Neutral 0.0.
        frequency_penalty: in [-2, 2]; subtracted once for each time a token is in the output. Neutral 0.0.
        logit_bias: token id -> value in [-100, 100] added to its logit.
        seed: any integer in [0, 2**64); the same seed gives the same tokens in any company. None: a fresh seed.
        n: completions to make from one prompt, >= 1. Greedy ones would all be equal, so n > 1 needs temperature > 0.
        stop: up to 64 strings; the text ends before the earliest one to be completed.
        stop_token_ids: token ids that end the completion; their text is not part of it.
        ignore_eos: go on after the end-of-sequence token.
        logprobs: report the log-probability of each token and of this many most likely ones (0 to 64).
        prompt_logprobs: the same for the prompt's tokens (the first has none). Computes the whole prompt.
        skip_special_tokens: leave special tokens out of the text.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, Integral) and not isinstance(value, bool):  # NumPy's integers are welcome
                object.__setattr__(self, name, int(value))
        _check_int("max_tokens", self.max_tokens, 1, None, optional=True)
        _check_int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}.",
                field="min_tokens",
                value=self.min_tokens,
                limit=self.max_tokens,
            )
        _check_real("temperature", self.temperature, 0.0, 1e4, optional=True)
        _check_int("top_k", self.top_k, 0, None, optional=True)
        _check_real("top_p", self.top_p, 0.0, 1.0, optional=True, low_open=True)
        _check_real("min_p", self.min_p, 0.0, 1.0, optional=True)
        _check_real("repetition_penalty", self.repetition_penalty, 0.0, 1e4, optional=True, low_open=True)
        _check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("seed", self.seed, 0, 2**64 - 1, optional=True)
        _check_int("n", self.n, 1, MAX_N)
        if self.n > 1 and self.temperature == 0:
            raise InvalidRequest(
                f"n is {self.n} with temperature 0: greedy completions would be equal; use n=1 or a temperature > 0.",
                field="n",
                value=self.n,
                limit=1,
            )
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong_type(name, getattr(self, name), "True or False")
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """A copy in which each field that is None takes `defaults[name]`, else its neutral value; `seed` stays."""
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        chosen = {name: defaults.get(name, value) for name, value in neutral.items() if getattr(self, name) is None}
        if self.max_tokens is None and defaults.get("max_tokens") is not None:
            chosen["max_tokens"] = defaults["max_tokens"]
        return replace(self, **chosen)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Make one from names and values; an unknown name is refused (InvalidRequest) and never ignored."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidRequest(
                    f"{name!r} is not a sampling parameter; known are {', '.join(sorted(known))}.",
                    field=str(name),
                    value=values[name],
                    limit=sorted(known),
                )
        return cls(**values)


def _wrong_type(name: str, value: Any, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value!r}; it must be {wanted}.", field=name, value=value, limit=wanted)


def _check_int(name: str, value: Any, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    wanted = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise _wrong_type(name, value, wanted + (" or None" if optional else ""))


def _check_real(
    name: str, value: Any, low: float, high: float, *, optional: bool = False, low_open: bool = False
) -> None:
    if value is None and optional:
        return
    wanted = f"a number {'>' if low_open else '>='} {low:g} and <= {high:g}"
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise _wrong_type(name, value, wanted)
    if float(value) < low or float(value) > high or (low_open and float(value) == low):
        raise _wrong_type(name, value, wanted)


def _checked_stop(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or len(strings) > 64:
        raise _wrong_type("stop", stop, "a string or up to 64 strings")
    for text in strings:
        if not isinstance(text, str) or text == "":
            raise _wrong_type("stop", text, "a non-empty string")
    return tuple(strings)


def _checked_ids(ids: Any) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise _wrong_type("stop_token_ids", ids, "a list of token ids")
    for token_id in ids:
        _check_int("stop_token_ids", token_id, 0, None)
    return tuple(ids)


def _checked_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise _wrong_type("logit_bias", bias, "a mapping of token id to a number")
    for token_id, value in bias.items():
        _check_int("logit_bias", token_id, 0, None)
        _check_real(f"logit_bias[{token_id}]", value, -100.0, 100.0)
    return dict(bias)
