"""The client of a benchmark: one thread that submits what is due and calls step(). It measures by its own clock.

Arrivals are open loop: a request is due at its time whether or not earlier ones have ended. One that is due while a
step runs is submitted right after that step, but counts as arrived when it was due. All times are readings of
time.monotonic_ns() in this thread; a token's time is that at which step() returned it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pyengine.bench.workload import BenchRequest
from pyengine.engine import Engine
from pyengine.errors import PyEngineError
from pyengine.request_options import RequestOptions

OnEnded = Callable[[int], None]
Options = Callable[[BenchRequest], RequestOptions | None]
_LONGEST_SLEEP_S = 0.05


@dataclass(slots=True)
class Served:
    """What became of one request. `refusal` is the kind of error if it was refused or failed."""

    asked: BenchRequest
    due_ns: int
    submitted_ns: int = 0
    request_id: str = ""
    token_times_ns: list[int] = field(default_factory=list)
    refusal: str | None = None
    preemptions: int = 0
    recomputed_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """From when it was due to its first token, in seconds."""
        return (self.token_times_ns[0] - self.due_ns) / 1e9

    @property
    def has_finished(self) -> bool:
        """Whether it made all of its tokens."""
        return self.refusal is None and bool(self.token_times_ns)


def serve(
    engine: Engine,
    requests: Sequence[BenchRequest],
    due_s: Sequence[float],
    *,
    knows_lengths: bool = False,
    options: Options | None = None,
    on_ended: OnEnded | None = None,
) -> list[Served]:
    """Submit each request `due_s` seconds from now, run until all have ended, and return what became of them."""
    prepared = [(asked, asked.params(knows_length=knows_lengths)) for asked in requests]
    start_ns = time.monotonic_ns()
    served = [Served(asked, start_ns + round(due * 1e9)) for asked, due in zip(requests, due_s, strict=True)]
    live: dict[str, Served] = {}
    num_submitted = num_ended = 0
    while num_ended < len(served):
        now_ns = time.monotonic_ns()
        while num_submitted < len(served) and served[num_submitted].due_ns <= now_ns:
            one, (asked, params) = served[num_submitted], prepared[num_submitted]
            num_submitted += 1
            one.submitted_ns = now_ns
            try:
                one.request_id = engine.submit(
                    asked.prompt, params, options=options(asked) if options is not None else None
                )
                live[one.request_id] = one
            except PyEngineError as error:
                one.refusal = type(error).__name__
                num_ended += 1
            now_ns = time.monotonic_ns()
        if not live:
            if num_submitted < len(served):
                time.sleep(min(_LONGEST_SLEEP_S, max(0, served[num_submitted].due_ns - now_ns) / 1e9))
            continue
        events = engine.step()
        now_ns = time.monotonic_ns()
        for event in events:
            one = live[event.request_id]
            if event.token_ids:
                one.token_times_ns.append(now_ns)
            if event.finish_reason is not None:
                del live[event.request_id]
                num_ended += 1
                if event.error is not None:
                    one.refusal = type(event.error).__name__
                if event.metrics is not None:
                    one.preemptions = event.metrics.preemptions
                    one.recomputed_tokens = event.metrics.recomputed_tokens
        if on_ended is not None and events:
            on_ended(num_ended)
    return served


def serve_closed(
    engine: Engine,
    requests: Sequence[BenchRequest],
    in_flight: int,
    *,
    knows_lengths: bool = False,
    on_ended: OnEnded | None = None,
) -> list[int]:
    """Keep so many requests in the engine, a new one whenever one ends; returns when each ended, in ns, in order."""
    coming = iter([(asked.prompt, asked.params(knows_length=knows_lengths)) for asked in requests])
    for prompt, params in islice(coming, in_flight):
        engine.submit(prompt, params)
    ends_ns: list[int] = []
    while engine.has_unfinished:
        num_ended = sum(event.finish_reason is not None for event in engine.step())
        ends_ns += [time.monotonic_ns()] * num_ended
        for prompt, params in islice(coming, num_ended):
            engine.submit(prompt, params)
        if on_ended is not None and num_ended:
            on_ended(len(ends_ns))
    return ends_ns
