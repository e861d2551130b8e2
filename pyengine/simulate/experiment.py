"""Experiments: each policy with each seed, in this process or in several. They do not say which policy is better."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyengine.errors import InvalidRequest
from pyengine.simulate.cluster import Setup, simulate
from pyengine.simulate.policies import Policy
from pyengine.simulate.results import RunResult
from pyengine.simulate.routers import ROUTERS
from pyengine.simulate.workload import Generator, Workload

OnRunProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class NeverFit:
    """Prompts that not even an empty device takes: each is refused as it arrives.

    Attributes:
        policies: whose context and pool this is about.
        most_tokens: the longest prompt that fits there.
        num_prompts: how many are longer, over all seeds, out of `num_requests`.
        first: the first of them, as its place in the workload, from 0; `first_tokens`: its length.
    """

    policies: tuple[str, ...]
    most_tokens: int
    num_prompts: int
    num_requests: int
    first: int
    first_tokens: int


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to run. Raises InvalidRequest for a router without a name here, or fewer than one replica.

    Attributes:
        source: one workload for all, or a generator that makes one from each seed.
        settings: of SchedulerConfig, beneath those of the policies.
        seeds: of the generator; one run of a policy for each. Ignored with a workload.
    """

    source: Workload | Generator
    policies: tuple[Policy, ...]
    setup: Setup
    settings: Mapping[str, Any]
    router: str = "round-robin"
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            allowed = ", ".join(ROUTERS)
            raise InvalidRequest(
                f"router is {self.router!r}; it must be one of {allowed}.",
                field="router",
                value=self.router,
                limit=allowed,
            )
        for name, value, least in (
            ("replicas", self.setup.num_replicas, 1),
            ("max_tokens", self.setup.max_tokens, 1),
            ("long_from", self.setup.long_from, 0),
        ):
            if value < least:
                raise InvalidRequest(
                    f"{name} is {value}; it must be an integer >= {least}.", field=name, value=value, limit=least
                )
        if not 0 <= self.setup.jitter <= 1:
            raise InvalidRequest(
                f"jitter is {self.setup.jitter}; it must be a number from 0 to 1.",
                field="jitter",
                value=self.setup.jitter,
                limit=1,
            )

    @property
    def runs(self) -> list[tuple[Policy, int | None]]:
        """Each policy with each seed; None for a workload that is given."""
        seeds: Sequence[int | None] = self.seeds if isinstance(self.source, Generator) else (None,)
        return [(policy, seed) for policy in self.policies for seed in seeds]

    @property
    def num_requests(self) -> int:
        """Requests of one run."""
        return self.source.num_requests if isinstance(self.source, Generator) else len(self.source.requests)

    def base_settings(self) -> dict[str, Any]:
        """Settings of SchedulerConfig for device and workload, with `settings` on top.

        Prefixes are cached where the workload has any. Where it has none only a preempted request could find anything,
        its own blocks, and to look would take a quarter of the time.
        """
        source, profile = self.source, self.setup.profile
        if isinstance(source, Generator):
            has_prefixes = source.num_prefixes > 0
        else:
            has_prefixes = any(request.prefix_keys for request in source.requests)
        defaults = {
            "num_blocks": profile.num_blocks,
            "block_size": profile.block_size,
            "max_context": profile.max_context,
            "prefix_caching": has_prefixes,
        }
        return {**defaults, **self.settings}

    def check(self) -> None:
        """Raise InvalidRequest if a policy is not one that the scheduler has."""
        for policy in self.policies:
            policy.config(self.base_settings())

    def never_fit(self) -> list[NeverFit]:
        """The prompts that can never fit, one entry for all policies with the same room; empty if all fit."""
        policies: dict[int, list[str]] = {}
        for policy in self.policies:
            config = policy.config(self.base_settings())
            # A context needs room for one token of output, whose KV a pool need not hold.
            most = min(config.max_context - 1, config.num_blocks * config.block_size)
            policies.setdefault(most, []).append(policy.name)
        source = self.source
        workloads = [source.workload(seed) for seed in self.seeds] if isinstance(source, Generator) else [source]
        found = []
        num_requests = sum(len(workload.requests) for workload in workloads)
        for most, names in policies.items():
            longer = [
                (place, request.prompt_tokens)
                for workload in workloads
                for place, request in enumerate(workload.requests)
                if request.prompt_tokens > most
            ]
            if longer:
                found.append(NeverFit(tuple(names), most, len(longer), num_requests, *longer[0]))
        return found

    def run_one(self, policy: Policy, seed: int | None, on_progress: Callable[[int], None] | None = None) -> RunResult:
        """One run; `on_progress` gets how many requests have ended."""
        source = self.source
        workload = source.workload(seed or 0) if isinstance(source, Generator) else source
        return simulate(
            workload,
            policy.config(self.base_settings()),
            self.setup,
            ROUTERS[self.router](),
            policy=policy.name,
            seed=seed,
            knows_lengths=policy.knows_lengths,
            on_progress=on_progress,
        )

    def run_all(self, jobs: int = 1, on_progress: OnRunProgress | None = None) -> list[RunResult]:
        """All runs, in the order of `runs`; `on_progress` gets a run's place in it and its requests that have ended."""
        self.check()
        tell = on_progress or _tell_nobody
        runs = self.runs
        if jobs == 1 or len(runs) == 1:
            return [self.run_one(policy, seed, partial(tell, place)) for place, (policy, seed) in enumerate(runs)]
        results: dict[int, RunResult] = {}
        with ProcessPoolExecutor(min(jobs, len(runs)), initializer=_end_at_interrupt) as pool:
            places = {pool.submit(self.run_one, *run): place for place, run in enumerate(runs)}
            try:
                for future in as_completed(places):
                    results[places[future]] = future.result()
                    tell(places[future], self.num_requests)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [results[place] for place in range(len(runs))]


def _tell_nobody(place: int, num_done: int) -> None:
    pass


def _end_at_interrupt() -> None:
    """Let Ctrl-C end a worker silently; it is the process that started it who reports."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
