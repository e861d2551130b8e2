"""What a checkpoint says about generating: default sampling values and end-of-sequence ids; it samples nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyengine.errors import InvalidRequest, ModelError
from pyengine.sampling_params import SamplingParams

FILE_NAME = "generation_config.json"

# The file's keys that we have, -> ours.
SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# Keys that would change what is generated and that we do not apply, with the values that change nothing.
NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0, 0.0),
    "typical_p": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({},),
    "guidance_scale": (1, 1.0),
    "exponential_decay_length_penalty": (),
    "min_new_tokens": (0,),
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """A model's own sampling defaults.

    Attributes:
        values: for `SamplingParams.with_defaults`; only what the model has an opinion on.
        origin: one line for people, e.g. "generation_config.json: temperature 0.6, top_p 0.9".
        not_applied: keys of the file that ask for something this engine does not do.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    origin: str = "no generation_config.json: neutral values"
    not_applied: tuple[str, ...] = ()


def generation_defaults(generation_config: Mapping[str, Any] | None) -> GenerationDefaults:
    """Sampling defaults that a generation_config.json asks for.

    Without one (None) the model has no opinion, and neutral values hold. With one, what HF's `generate` would do with
    it holds: sampling only where `do_sample` is true, else greedy (temperature 0), whatever temperature stands beside
    it. The other values stand as written, so that they act as soon as a user asks for a temperature; values that the
    file does not name are not invented (HF would take top_k 50).

    Raises:
        ModelError: for a value of a wrong type or out of range.
    """
    if generation_config is None:
        return GenerationDefaults()
    values = {
        ours: generation_config[key] for key, ours in SAMPLING_KEYS.items() if generation_config.get(key) is not None
    }
    samples = generation_config.get("do_sample") or False
    if not isinstance(samples, bool):
        raise ModelError(f"{FILE_NAME}: do_sample is {samples!r}; it must be true, false or null.")
    if not samples:
        values["temperature"] = 0.0
    try:
        SamplingParams(**values)
    except InvalidRequest as error:
        raise ModelError(f"{FILE_NAME}: {error}") from error
    not_applied = tuple(
        key
        for key, neutral in NOT_APPLIED.items()
        if generation_config.get(key) is not None and generation_config[key] not in neutral
    )
    shown = [f"{name} {value}" for name, value in values.items()]
    if not samples:
        shown.append("greedy, because do_sample is not true")
    if not_applied:
        shown.append(f"not applied: {', '.join(not_applied)}")
    return GenerationDefaults(values, f"{FILE_NAME}: {', '.join(shown) or 'sampling with neutral values'}", not_applied)


def eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, tokenizer_eos: int | None = None
) -> frozenset[int]:
    """Ids that end a sequence: union of config, generation config and tokenizer; may be empty. Raises ModelError."""
    ids: set[int] = set()
    found = {
        "config.json": config.get("eos_token_id"),
        FILE_NAME: (generation_config or {}).get("eos_token_id"),
        "tokenizer": tokenizer_eos,
    }
    for source, value in found.items():
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ModelError(
                    f"{source}: eos_token_id is {value!r}; it must be a token id >= 0, a list of them or null."
                )
            ids.add(token_id)
    return frozenset(ids)
