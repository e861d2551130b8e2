"""SamplingRow: one sequence's sampling settings as the native step reads them, and its token counts for penalties."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from pyengine.sampling_params import SamplingParams

_MASK64 = 2**64 - 1
_SCALARS = struct.Struct("=fifffffQ")
_WORDS = struct.Struct("=9i")


def child_seed(seed: int, index: int) -> int:
    """The seed of completion `index`: the request's own for the first, a 64-bit mix of both for the others.

    The mixing function is the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


class SamplingRow:
    """State of one sequence between steps.

    Args:
        params: with every default filled in (SamplingParams.with_defaults).
        seed: of this sequence.
        prompt_token_ids: counted as "in the prompt" by the repetition penalty.
        end_ids: tokens that may not be drawn while fewer than min_tokens were made.

    Attributes:
        words: temperature, top_k, top_p, min_p, repetition, presence and frequency penalty, and the seed (two words),
            as the 32-bit words that the native step reads.
        penalty_ids, penalty_counts: distinct tokens of prompt and output, and how often each is in the output;
            empty when no penalty is in force.
    """

    __slots__ = ("_base_bias", "_index_of", "_min_bias", "_min_tokens", "_num_output", "_penalized", "penalty_counts",
                 "penalty_ids", "words")  # fmt: skip

    def __init__(
        self, params: SamplingParams, seed: int, prompt_token_ids: Iterable[int], end_ids: Iterable[int]
    ) -> None:
        assert params.temperature is not None
        assert params.top_p is not None
        repetition = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        packed = _SCALARS.pack(
            params.temperature,
            min(params.top_k or 0, 2**31 - 1),
            params.top_p,
            params.min_p or 0.0,
            repetition,
            params.presence_penalty,
            params.frequency_penalty,
            seed,
        )
        self.words: tuple[int, ...] = _WORDS.unpack(packed)
        self._num_output = 0
        self._min_tokens = params.min_tokens
        self._base_bias = (list(params.logit_bias.keys()), list(params.logit_bias.values()))
        # Each token once: a backend may add the biases of a row in any order.
        forbidden = dict.fromkeys(sorted(set(end_ids)) if params.min_tokens else (), float("-inf"))
        with_minimum = {**params.logit_bias, **forbidden}
        self._min_bias = (list(with_minimum.keys()), list(with_minimum.values()))
        self._penalized = repetition != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.penalty_ids: list[int] = []
        self.penalty_counts: list[int] = []
        self._index_of: dict[int, int] = {}
        if self._penalized:
            self.penalty_ids = list(dict.fromkeys(prompt_token_ids))
            self.penalty_counts = [0] * len(self.penalty_ids)
            self._index_of = {token_id: i for i, token_id in enumerate(self.penalty_ids)}

    @property
    def bias(self) -> tuple[list[int], list[float]]:
        """(token ids, values) added to the logits of the next draw; -inf forbids."""
        return self._min_bias if self._num_output < self._min_tokens else self._base_bias

    @property
    def depends_on_output(self) -> bool:
        """Whether the next draw depends on which tokens, or how many, were drawn before."""
        return self._penalized or self._num_output < self._min_tokens

    def append(self, token_id: int) -> None:
        """Count a token that was drawn."""
        self._num_output += 1
        if not self._penalized:
            return
        index = self._index_of.get(token_id)
        if index is None:
            self._index_of[token_id] = len(self.penalty_ids)
            self.penalty_ids.append(token_id)
            self.penalty_counts.append(1)
        else:
            self.penalty_counts[index] += 1
