"""What a step costs in the scheduler: schedule() + commit() on one core, without a model.

    python tools/bench_scheduler.py [--steps 400] [--running 64 256 1024 4096] [--json FILE]

"steady": everybody decodes, nobody comes or goes. "churning": each request makes 200 tokens, so that one in 200 ends
in each step and another one takes its place, while a quarter as many as run are waiting. "no log" is the same without
decision log and recording; steps with and without take turns, so that both see the same machine. The garbage collector
runs as it does in an engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps measured for each row")
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024, 4096], help="requests running")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    args = parser.parse_args()
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
