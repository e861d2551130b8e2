"""Routers: which of several replicas gets a request. They see what a front end sees: no output's length beforehand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

import numpy as np

from pyengine.simulate.workload import SimRequest

_FIRST_GUESS_TOKENS = 256.0  # of an output, before any has ended
_MEAN_WEIGHT = 0.01  # of one more output in the moving mean


class Load:
    """What was sent to each replica and has not ended, in tokens: prompts, and outputs at the mean of those that ended.

    Attributes:
        tokens: [num_replicas].
    """

    def __init__(self, num_replicas: int) -> None:
        self.tokens = np.zeros(num_replicas)
        self._mean_output = _FIRST_GUESS_TOKENS

    def least(self) -> int:
        """The replica with the least; of equal ones the first."""
        return int(self.tokens.argmin())

    def sent(self, request: SimRequest, replica: int) -> float:
        """Count a request in; returns what it counts, to be given to `ended`."""
        counted = request.prompt_tokens + self._mean_output
        self.tokens[replica] += counted
        return counted

    def ended(self, replica: int, counted: float, output_tokens: int | None) -> None:
        """Count a request out that made `output_tokens`; None: it was refused."""
        self.tokens[replica] -= counted
        if output_tokens is not None:
            self._mean_output += _MEAN_WEIGHT * (output_tokens - self._mean_output)


class Router(Protocol):
    """Sends each request to a replica as it arrives."""

    name: str

    def choose(self, request: SimRequest, load: Load) -> int:
        """The index of a replica."""
        ...


class RoundRobin:
    """Each in turn, whatever it has to do."""

    name = "round-robin"

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimRequest, load: Load) -> int:
        chosen = self._next
        self._next = (chosen + 1) % len(load.tokens)
        return chosen


class LeastWork:
    """The replica with the fewest unfinished tokens."""

    name = "least-work"

    def choose(self, request: SimRequest, load: Load) -> int:
        return load.least()


class PrefixAffinity:
    """The fewest unfinished tokens, less those of the prompt that it got before and may still have in its cache.

    So a request follows its prefix until its home has more to do than others by more than the prefix would save. What
    a replica has evicted meanwhile is not known here.
    """

    name = "prefix-affinity"

    def __init__(self) -> None:
        self._sent: dict[int, set[int]] = {}  # replicas that got a prompt with this prefix

    def choose(self, request: SimRequest, load: Load) -> int:
        keys = request.prefix_keys
        work = load.tokens.copy()
        shared = list(accumulate(length for _, length in request.segments[: len(keys)]))
        counted: set[int] = set()
        for key, num_tokens in zip(reversed(keys), reversed(shared), strict=True):
            for replica in self._sent.get(key, ()):
                if replica not in counted:
                    counted.add(replica)
                    work[replica] -= num_tokens
        chosen = int(work.argmin())
        for key in keys:
            self._sent.setdefault(key, set()).add(chosen)
        return chosen


ROUTERS: dict[str, Callable[[], Router]] = {
    RoundRobin.name: RoundRobin,
    LeastWork.name: LeastWork,
    PrefixAffinity.name: PrefixAffinity,
}
