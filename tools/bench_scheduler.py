"""What a step costs in the scheduler: schedule() + commit() on one core, without a model.

    python tools/bench_scheduler.py [--steps 400] [--running 64 256 1024 4096] [--json FILE]
    python tools/bench_scheduler.py --engine [MODEL]      tokens/s of an engine with and without decision log

"steady": everybody decodes, nobody comes or goes. "churning": each request makes 200 tokens, so that one in 200 ends
in each step and another one takes its place, while a quarter as many as run are waiting. "no log" is the same without
decision log and recording; steps with and without take turns, so that both see the same machine. The garbage collector
runs as it does in an engine.

`--engine` runs 16 requests on 8 seats, prompts of 32 tokens and outputs of 8 to 48, with and without it in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

from pyengine import Engine, SamplingParams
from pyengine.config import SchedulerConfig
from pyengine.request import Request
from pyengine.scheduler import Scheduler
from pyengine.scheduler.decision_log import DecisionLog

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 200
WARM_UP_STEPS = 40


@dataclass(frozen=True)
class Row:
    load: str
    running: int
    schedule_us: float
    commit_us: float
    median_us: float
    p99_us: float


class Load:
    """A scheduler that is kept at `running` requests."""

    def __init__(self, running: int, *, churns: bool, logs: bool) -> None:
        self.running = running
        self.churns = churns
        self.output_tokens = OUTPUT_TOKENS if churns else 1 << 14
        context = PROMPT_TOKENS + self.output_tokens + 1
        num_blocks = (running + running // 4 + 8) * (context // 16 + 2)
        config = SchedulerConfig(
            num_blocks=num_blocks if churns else running * 200,
            max_context=context,
            max_num_seqs=running,
            max_num_batched_tokens=running + 2048,
            capacity="predicted" if churns else "optimistic",
            watermark=0.0,
        )
        self.scheduler = Scheduler(config, log=DecisionLog(config, enabled=logs), records_calls=logs)
        self.number = 0

    def arrive(self, count: int, spread: bool = False) -> None:
        for _ in range(count):
            self.number += 1
            # Lengths are spread at first, so that from then on as many end in each step.
            limit = 1 + self.number * 7919 % self.output_tokens if spread else self.output_tokens
            tokens = [self.number * 31 % 50_000 + i for i in range(PROMPT_TOKENS)]
            self.scheduler.add([Request(str(self.number), tokens, limit)])

    def fill(self) -> None:
        self.arrive(self.running, spread=self.churns)
        while self.scheduler.num_waiting:
            self.step()

    def step(self) -> tuple[int, int]:
        """One step; ns of schedule() and of commit()."""
        begun = time.perf_counter_ns()
        plan = self.scheduler.schedule()
        planned = time.perf_counter_ns()
        tokens = [7] * len(plan.requests)
        ready = time.perf_counter_ns()
        self.scheduler.commit(plan, tokens)
        done = time.perf_counter_ns()
        return planned - begun, done - ready


def measure(load_name: str, running: int, num_steps: int, *, churns: bool) -> list[Row]:
    """With and without log, step by step in turns."""
    loads = {name: Load(running, churns=churns, logs=not name.endswith("no log")) for name in (load_name, "no log")}
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in loads}
    for load in loads.values():
        load.fill()
    for number in range(WARM_UP_STEPS + num_steps):
        for name, load in loads.items():
            if churns:
                load.arrive(load.running + load.running // 4 - load.scheduler.num_running - load.scheduler.num_waiting)
            taken = load.step()
            if number >= WARM_UP_STEPS:
                times[name].append(taken)
    return [_row(name, running, of_steps) for name, of_steps in times.items()]


def _row(name: str, running: int, times: list[tuple[int, int]]) -> Row:
    schedule, commit = zip(*times, strict=True)
    both = sorted(a + b for a, b in times)
    return Row(
        name,
        running,
        statistics.median(schedule) / 1e3,
        statistics.median(commit) / 1e3,
        statistics.median(both) / 1e3,
        both[int(0.99 * len(both))] / 1e3,
    )


def measure_engine(model: str | None, num_rounds: int) -> None:
    """Print what the log costs a real engine: the median over rounds of the ratio of the two."""
    engines = [Engine(model, max_num_seqs=8) for _ in range(2)]
    engines[1]._scheduler.log.enabled = False
    engines[1]._scheduler.recorder = None
    limits = [8 + 37 * i % 41 for i in range(16)]
    params = [SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True) for limit in limits]
    rates: list[list[float]] = [[], []]
    for number in range(num_rounds + 1):
        prompts = [[5 + (7 * i + 13 * number + j) % 200 for j in range(32)] for i in range(16)]
        for which in (0, 1) if number % 2 else (1, 0):
            begun = time.perf_counter()
            engines[which].generate(prompts, params)
            if number > 0:  # the first one warms up
                rates[which].append(sum(limits) / (time.perf_counter() - begun))
    ratios = sorted(without / with_log for with_log, without in zip(*rates, strict=True))
    quarter = len(ratios) // 4
    print(f"with log {statistics.median(rates[0]):,.0f} tokens/s, without {statistics.median(rates[1]):,.0f}")
    print(f"ratio {statistics.median(ratios):.3f}, half of {len(ratios)} rounds within ", end="")
    print(f"{ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps measured for each row")
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024, 4096], help="requests running")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    parser.add_argument(
        "--engine", metavar="MODEL", nargs="?", const="", help="what the log costs an engine (built-in model)"
    )
    parser.add_argument("--rounds", type=int, default=40, help="of --engine")
    args = parser.parse_args()
    if args.engine is not None:
        measure_engine(args.engine or None, args.rounds)
        return 0
    rows = []
    print(f"{'load':<10} {'running':>8} {'schedule':>10} {'commit':>10} {'median':>10} {'p99':>10}  us")
    for running in args.running:
        for name, churns in (("steady", False), ("churning", True)):
            for row in measure(name, running, args.steps, churns=churns):
                rows.append(row)
                print(
                    f"{row.load:<10} {row.running:>8} {row.schedule_us:>10.1f} {row.commit_us:>10.1f} "
                    f"{row.median_us:>10.1f} {row.p99_us:>10.1f}",
                    flush=True,
                )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
