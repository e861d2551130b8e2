"""The requests of a benchmark: lengths drawn from a seed, prompts of random tokens. They say nothing of policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyengine.sampling_params import SamplingParams
from pyengine.simulate.lengths import Lengths, parse_lengths

# Sizes for a context of at least FULL_CONTEXT tokens; a model with less gets them in proportion.
FULL_CONTEXT = 512
SHORT_PROMPTS = "lognormal:24:0.5"
LONG_PROMPTS = "uniform:192:384"
LONG_SHARE = 0.15
OUTPUTS = "lognormal:32:0.6"
MAX_SHORT, MAX_LONG, MAX_OUTPUT = 96, 384, 120
MAX_TOKENS = 128  # what every request declares
END_ID = 0  # the token that ends a request, by decree
_FORCE = 100.0  # added to its logit once the request is to end


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: its prompt, how many tokens it will make, and how many it says it may make."""

    prompt: tuple[int, ...]
    output_tokens: int
    max_tokens: int
    is_long: bool

    def params(self, *, knows_length: bool = False) -> SamplingParams:
        """Greedy, and ended by a stop token that is forbidden before `output_tokens` and forced then.

        So the length is known here and, as in real life, not to the scheduler; unless `knows_length` declares it.
        """
        return SamplingParams(
            max_tokens=self.output_tokens if knows_length else self.max_tokens,
            min_tokens=self.output_tokens - 1,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            logit_bias={END_ID: _FORCE},
            stop_token_ids=(END_ID,),
            ignore_eos=True,
        )


@dataclass(frozen=True, slots=True)
class Mix:
    """How the lengths of a workload are distributed, in tokens."""

    short: str
    long: str
    output: str
    long_share: float
    max_short: int
    max_long: int
    max_output: int
    max_tokens: int

    @property
    def longest(self) -> int:
        """Most tokens that one request may come to."""
        return self.max_long + self.max_tokens

    def describe(self) -> str:
        """In words, for the report."""
        return (
            f"{1 - self.long_share:.0%} short prompts ({self.short}, at most {self.max_short} tokens), "
            f"{self.long_share:.0%} long ones ({self.long}); outputs {self.output}, at most {self.max_output}; every "
            f"request declares max_tokens = {self.max_tokens}"
        )


def mix_for(max_context: int) -> Mix:
    """The lengths for a model with that context."""
    scale = min(1.0, max_context / FULL_CONTEXT)

    def size(tokens: int) -> int:
        return max(2, int(tokens * scale))

    return Mix(
        short=f"lognormal:{size(24)}:0.5" if scale < 1 else SHORT_PROMPTS,
        long=f"uniform:{size(192)}:{size(384)}" if scale < 1 else LONG_PROMPTS,
        output=f"lognormal:{size(32)}:0.6" if scale < 1 else OUTPUTS,
        long_share=LONG_SHARE,
        max_short=size(MAX_SHORT),
        max_long=size(MAX_LONG),
        max_output=size(MAX_OUTPUT),
        max_tokens=size(MAX_TOKENS),
    )


def make_requests(mix: Mix, count: int, vocab_size: int, seed: int) -> list[BenchRequest]:
    """`count` requests; the same seed gives the same ones. No two share a prefix, so no prompt is cached."""
    random = np.random.default_rng(seed)

    def lengths(of: Lengths, most: int) -> list[int]:
        sampled: list[int] = np.minimum(of.sample(random, count), most).tolist()
        return sampled

    short = lengths(parse_lengths(mix.short, "short"), mix.max_short)
    long = lengths(parse_lengths(mix.long, "long"), mix.max_long)
    outputs = lengths(parse_lengths(mix.output, "output"), mix.max_output)
    is_long = (random.random(count) < mix.long_share).tolist()
    requests = []
    for i in range(count):
        size = long[i] if is_long[i] else short[i]
        prompt = tuple(random_tokens(random, size, vocab_size))
        requests.append(BenchRequest(prompt, max(2, outputs[i]), mix.max_tokens, is_long[i]))
    return requests


def poisson_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests are due; with another rate the same pattern, faster or slower."""
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    times: list[float] = (np.cumsum(gaps) / rate).tolist()
    return times


def random_tokens(random: np.random.Generator, count: int, vocab_size: int) -> Sequence[int]:
    """Token ids that are not END_ID, all alike likely."""
    ids: list[int] = random.integers(END_ID + 1, vocab_size, count).tolist()
    return ids
