"""Workloads: which requests arrive when, made from a seed or read from a file. They know nothing of who serves them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from pyengine.errors import InvalidRequest
from pyengine.simulate.lengths import Lengths

ARRIVALS = ("poisson", "gamma", "on-off", "closed")
_FIRST_PREFIX_ID = 1 << 30  # token ids of shared prefixes; those of requests, 1 and on, stay below


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a workload: what a client asks for, and what only the model would know.

    Attributes:
        arrival_ns: when it arrives; in a closed loop, how long its user thinks before sending it.
        output_tokens: how many tokens it will make, >= 1. No scheduler sees it, but an oracle.
        segments: its prompt as runs of one token id each, (token id, length). Two prompts share a prefix where these
            are equal from the front.
        prefix_keys: names of its leading segments that others may share, shortest first; a router may look at them.
        max_tokens: the limit that its client declares; None: the run's own.
        user: who sends it, in a closed loop.
    """

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    segments: tuple[tuple[int, int], ...]
    prefix_keys: tuple[int, ...] = ()
    max_tokens: int | None = None
    tenant: str = ""
    priority: int = 0
    user: int = 0

    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        token_ids: list[int] = []
        for token_id, length in self.segments:
            token_ids.extend(repeat(token_id, length))
        return token_ids


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival; or, with `num_users`, a closed loop.

    In a closed loop each user sends its next request, in the order they have here, a thinking time after its last one
    ended. Lengths and thinking times are drawn beforehand, so that every policy meets the same ones.
    """

    name: str
    requests: tuple[SimRequest, ...]
    num_users: int = 0

    @property
    def is_closed(self) -> bool:
        """Whether a user waits for its answer before it sends more."""
        return self.num_users > 0


@dataclass(frozen=True, slots=True)
class Generator:
    """How a random workload is made. Raises InvalidRequest, naming field and value.

    Attributes:
        arrivals: "poisson"; "gamma": gaps with coefficient of variation `cv`; "on-off": Poisson in bursts of `on_s`
            seconds with silence of `off_s` between them, both exponential, `rate` on average; "closed": `num_users`
            users, each of whom thinks for `think_s` on average (exponential) between answer and next request.
        rate: requests a second, on average (not for "closed").
        num_requests: how many.
        prompt, output: distributions of the lengths in tokens.
        num_prefixes: prompts begin with one of so many shared prefixes, all alike likely; 0: nothing is shared.
        prefix_share: the part of such a prompt, in [0, 1], that is the shared prefix.
        num_tenants: requests belong to one of so many tenants, all alike likely; 1: to one without a name.
    """

    arrivals: str
    num_requests: int
    prompt: Lengths
    output: Lengths
    rate: float = 1.0
    cv: float = 2.0
    on_s: float = 10.0
    off_s: float = 10.0
    num_users: int = 16
    think_s: float = 5.0
    num_prefixes: int = 0
    prefix_share: float = 0.5
    num_tenants: int = 1

    def __post_init__(self) -> None:
        if self.arrivals not in ARRIVALS:
            allowed = ", ".join(ARRIVALS)
            raise _refused("arrivals", self.arrivals, f"one of {allowed}", allowed)
        for name in ("rate", "cv", "on_s", "off_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise _refused(name, getattr(self, name), "a number > 0", 0)
        if not 0 <= self.think_s < math.inf:
            raise _refused("think_s", self.think_s, "a number >= 0", 0)
        if not 0 <= self.prefix_share <= 1:
            raise _refused("prefix_share", self.prefix_share, "a number from 0 to 1", 1)
        for name, low in (("num_requests", 1), ("num_users", 1), ("num_tenants", 1), ("num_prefixes", 0)):
            if getattr(self, name) < low:
                raise _refused(name, getattr(self, name), f"an integer >= {low}", low)

    def workload(self, seed: int) -> Workload:
        """The workload of a seed: always the same one."""
        random = np.random.default_rng(seed)
        count = self.num_requests
        arrivals_ns = self._arrivals_ns(random)
        prompts = self.prompt.sample(random, count).tolist()
        outputs = self.output.sample(random, count).tolist()
        prefixes = random.integers(0, max(1, self.num_prefixes), count).tolist()
        tenants = random.integers(0, self.num_tenants, count).tolist()
        is_closed = self.arrivals == "closed"
        requests = []
        for i in range(count):
            prefix = prefixes[i] if self.num_prefixes else None
            shared = math.floor(self.prefix_share * prompts[i]) if self.num_prefixes else 0
            segments, keys = prompt_segments(i, prompts[i], prefix, shared)
            requests.append(
                SimRequest(
                    arrivals_ns[i],
                    prompts[i],
                    outputs[i],
                    segments,
                    keys,
                    tenant=f"tenant-{tenants[i]}" if self.num_tenants > 1 else "",
                    user=i % self.num_users if is_closed else 0,
                )
            )
        return Workload(self.name(), tuple(requests), min(self.num_users, count) if is_closed else 0)

    def name(self) -> str:
        """In words, for a table's title."""
        if self.arrivals == "closed":
            return f"{self.num_requests} requests of {self.num_users} users who think {self.think_s:g} s"
        how = {
            "poisson": "Poisson",
            "gamma": f"Gamma, CV {self.cv:g}",
            "on-off": f"{self.on_s:g} s on, {self.off_s:g} s off",
        }
        return f"{self.num_requests} requests, {self.rate:g}/s ({how[self.arrivals]})"

    def _arrivals_ns(self, random: np.random.Generator) -> list[int]:
        count = self.num_requests
        if self.arrivals == "closed":
            return _ns(random.exponential(self.think_s, count))
        if self.arrivals == "on-off":
            return _ns(_on_off(random, count, self.rate, self.on_s, self.off_s))
        # A Gamma distribution of shape k has coefficient of variation 1 / sqrt(k); shape 1 is the exponential one.
        shape = 1.0 if self.arrivals == "poisson" else self.cv**-2
        gaps = random.gamma(shape, 1 / (shape * self.rate), count)
        return _ns(np.cumsum(gaps))


def prompt_segments(
    number: int, prompt_tokens: int, prefix: int | None, shared_tokens: int
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Segments and prefix keys of the prompt of request `number`, whose first `shared_tokens` are those of `prefix`."""
    own = number + 1
    if prefix is None or shared_tokens == 0:
        return ((own, prompt_tokens),), ()
    shared_id = _FIRST_PREFIX_ID + prefix
    segments = ((shared_id, shared_tokens), (own, prompt_tokens - shared_tokens))
    return (segments if shared_tokens < prompt_tokens else segments[:1]), (shared_id,)


def scaled(workload: Workload, speed: float, num_requests: int | None = None) -> Workload:
    """The first requests of a workload, arriving (or thought about) `speed` times as fast."""
    if not 0 < speed < math.inf:
        raise _refused("speed", speed, "a number > 0", 0)
    if num_requests is not None and num_requests < 1:
        raise _refused("requests", num_requests, "an integer >= 1", 1)
    kept: Sequence[SimRequest] = workload.requests[:num_requests]
    if speed != 1:
        kept = [_moved(request, round(request.arrival_ns / speed)) for request in kept]
    name = workload.name if speed == 1 else f"{workload.name}, {speed:g} times as fast"
    return Workload(name, tuple(kept), workload.num_users)


def _moved(request: SimRequest, arrival_ns: int) -> SimRequest:
    return SimRequest(
        arrival_ns,
        request.prompt_tokens,
        request.output_tokens,
        request.segments,
        request.prefix_keys,
        request.max_tokens,
        request.tenant,
        request.priority,
        request.user,
    )


def _on_off(random: np.random.Generator, count: int, rate: float, on_s: float, off_s: float) -> npt.NDArray[np.float64]:
    """Arrival times: Poisson in time that counts only while on, then the silences are put in between."""
    busy = np.cumsum(random.exponential(on_s / ((on_s + off_s) * rate), count))
    ends: list[float] = []  # of the bursts, in busy time
    silences: list[float] = []
    end = 0.0
    while end <= busy[-1]:
        end += random.exponential(on_s)
        ends.append(end)
        silences.append(random.exponential(off_s))
    before = np.concatenate(([0.0], np.cumsum(silences)))
    times: npt.NDArray[np.float64] = busy + before[np.searchsorted(ends, busy)]
    return times


def _ns(seconds: npt.NDArray[np.float64]) -> list[int]:
    values: list[int] = np.rint(seconds * 1e9).astype(np.int64).tolist()
    return values


def _refused(name: str, value: object, wanted: str, limit: object) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value!r}; it must be {wanted}.", field=name, value=value, limit=limit)
