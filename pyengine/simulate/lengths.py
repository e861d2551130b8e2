"""Lengths of prompts and outputs as random numbers, and how a user writes them. It knows nothing of arrivals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyengine.errors import InvalidRequest
from pyengine.simulate.written_numbers import read_integer, read_number

Integers = npt.NDArray[np.int64]
MAX_TOKENS = 10_000_000
GRAMMAR = (
    "a number of tokens, lognormal:MEDIAN:SIGMA, uniform:LOW:HIGH, or a mix such as "
    "0.9*lognormal:300:1+0.1*uniform:6000:20000"
)


class Lengths(Protocol):
    """A distribution of lengths in tokens, all >= 1."""

    def sample(self, generator: np.random.Generator, count: int) -> Integers:
        """`count` lengths, [count]."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Always `tokens`."""

    tokens: int

    def sample(self, generator: np.random.Generator, count: int) -> Integers:
        return np.full(count, self.tokens, np.int64)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp of a normal one: half are below `median`; the mean is median * exp(sigma^2 / 2)."""

    median: float
    sigma: float

    def sample(self, generator: np.random.Generator, count: int) -> Integers:
        drawn = np.rint(generator.lognormal(math.log(self.median), self.sigma, count))
        return np.clip(drawn, 1, MAX_TOKENS).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from `low` to `high` alike."""

    low: int
    high: int

    def sample(self, generator: np.random.Generator, count: int) -> Integers:
        return generator.integers(self.low, self.high, count, dtype=np.int64, endpoint=True)


@dataclass(frozen=True, slots=True)
class Mix:
    """Each length from one of `parts`, chosen by `weights` (> 0; their sum counts as 1)."""

    weights: tuple[float, ...]
    parts: tuple[Lengths, ...]

    def sample(self, generator: np.random.Generator, count: int) -> Integers:
        shares = np.array(self.weights) / sum(self.weights)
        chosen = generator.choice(len(self.parts), count, p=shares)
        columns = np.stack([part.sample(generator, count) for part in self.parts])
        picked: Integers = columns[chosen, np.arange(count)]
        return picked


def parse_lengths(text: str, field: str) -> Lengths:
    """The distribution that a user wrote as `text`. Raises InvalidRequest naming `field` for anything else."""
    parts = [_parse_part(part, text, field) for part in text.replace(" ", "").split("+")]
    if len(parts) == 1:
        return parts[0][1]
    return Mix(tuple(weight for weight, _ in parts), tuple(part for _, part in parts))


def _parse_part(part: str, text: str, field: str) -> tuple[float, Lengths]:
    weight, star, spec = part.rpartition("*")
    name, *numbers = spec.split(":")
    try:
        share = read_number(weight) if star else 1.0
        if not 0 < share < math.inf:
            raise ValueError
        if not numbers:
            return share, Constant(_tokens(name))
        low, high = numbers
        if name == "uniform" and _tokens(low) <= _tokens(high):
            return share, Uniform(_tokens(low), _tokens(high))
        if name == "lognormal":
            median, sigma = read_number(low), read_number(high)
            if 1 <= median <= MAX_TOKENS and 0 <= sigma <= 5:
                return share, Lognormal(median, sigma)
        raise ValueError
    except ValueError as error:
        raise InvalidRequest(
            f"{field} is {text!r}; write {GRAMMAR}, with lengths from 1 to {MAX_TOKENS:,} and SIGMA from 0 to 5.",
            field=field,
            value=text,
            limit=MAX_TOKENS,
        ) from error


def _tokens(text: str) -> int:
    tokens = read_integer(text)
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(text)
    return tokens
