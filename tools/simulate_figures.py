"""Makes the tables of docs/simulation.md: seeded, so the same each time. It measures no real device.

    python tools/simulate_figures.py                                  # all that needs no trace
    python tools/simulate_figures.py tight pareto --jobs 2 --figures figures
    python tools/simulate_figures.py azure mooncake --traces FOLDER   # CSV files as `pyengine simulate` reads them

tight     a small KV pool, loose max_tokens: packing and prediction against strict order, and an oracle
pareto    the same workload over the settings of best fit: what is bought with what
heads     reserved starts with capacity "guaranteed", until 10,000 heads were blocked
limits    time between tokens under a limit, at parts of the load that the device can just carry under it
azure     Azure LLM inference trace 2023, conversation and code (Splitwise, ISCA 2024; CC-BY-4.0)
mooncake  Mooncake conversation trace (FAST 2025; Apache-2.0); routers, with its own hashes of shared prefixes
speed     simulated requests for each second of processor time, and many replicas
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyengine.simulate.cluster import Setup
from pyengine.simulate.experiment import Experiment
from pyengine.simulate.figures import save_figures
from pyengine.simulate.lengths import parse_lengths
from pyengine.simulate.policies import Policy, parse_policies
from pyengine.simulate.profiles import EXAMPLE, find_profile
from pyengine.simulate.results import RunResult, by_policy, spread
from pyengine.simulate.table import table
from pyengine.simulate.trace_file import read_trace
from pyengine.simulate.workload import Generator, SimRequest, Workload, scaled

SETTINGS: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
LONG = "0.1*uniform:6000:20000"
PROMPTS = f"0.9*lognormal:300:1+{LONG}"
CHAT_PROMPTS = f"0.9*uniform:50:400+{LONG}"
OUTPUTS = "lognormal:180:0.64"  # mean 221
TIGHT = Generator("gamma", 2000, parse_lengths(PROMPTS, "prompts"), parse_lengths(OUTPUTS, "outputs"), rate=8.0, cv=2.0)
CHAT = replace(TIGHT, prompt=parse_lengths(CHAT_PROMPTS, "prompts"))
SETUP = Setup(EXAMPLE, max_tokens=2048)
COMPARED = (
    "static fifo-no-reserve fifo fifo-predicted best-fit q0.5:best-fit,capacity_quantile=0.5 best-fit-guaranteed "
    "shortest oracle"
)
HASH_BLOCK = 512  # tokens of one hash id in the Mooncake traces


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    traces: Path | None
    seeds: tuple[int, ...]
    jobs: int
    figures: Path | None


def show(name: str, results: Sequence[RunResult], options: Options) -> None:
    """Print the table of one comparison, and draw it if figures are wanted."""
    text = table(results, 150)
    print(text, flush=True)
    if options.figures is not None:
        save_figures(results, options.figures / name, "html", text)
        save_figures(results, options.figures / name, "png", text)


def tight(options: Options) -> None:
    """The tight pool with two kinds of short prompts, and how it compares with what is aimed at."""
    for name, load, prompts in (("tight", TIGHT, PROMPTS), ("chat", CHAT, CHAT_PROMPTS)):
        print(f"prompts {prompts}")
        experiment = Experiment(load, tuple(parse_policies(COMPARED)), SETUP, SETTINGS, seeds=options.seeds)
        results = experiment.run_all(options.jobs)
        show(name, results, options)
        runs = by_policy(results)
        policies = ("fifo-no-reserve", "fifo", "best-fit", "oracle")
        print(f"{'':<16}" + "".join(f"{policy:>16}" for policy in policies))
        for aim, wanted in AIMS.items():
            values = "".join(f"{median(runs[policy], aim):>16.3f}" for policy in policies)
            print(f"{aim:<16}{values}   aim: {wanted}")
        print(flush=True)


AIMS = {
    "ttft_p50": "best-fit at most 1/4 of fifo",
    "ttft_short_p99": "best-fit at most 1/2 of fifo",
    "ttft_long_p99": "best-fit not above fifo",
    "preemptions": "near zero",
}


def pareto(options: Options) -> None:
    """The settings of best fit against each other, and whether one keeps what is aimed at.

    * marks those that no other beats in all three times. Below, of those that halve the short p99 of fifo without
    reserve, the one with the lowest long p99.
    """
    policies = [replace(parse_policies("fifo-no-reserve")[0], name="fifo")]
    for quantile in (0.1, 0.5, 0.8):
        for barrier in (3, 6, 10):
            for bypass in (0.3, 2):
                settings = {"capacity_quantile": quantile, "aging_barrier_s": barrier, "bypass_budget": bypass}
                policies.append(Policy(f"q={quantile} barrier={barrier} bypass={bypass}", settings))
    policies.append(parse_policies("oracle")[0])
    for name, load in (("tight", TIGHT), ("chat", CHAT)):
        for num_tokens in (512, 2048):
            settings = {**SETTINGS, "max_num_batched_tokens": num_tokens}
            results = Experiment(load, tuple(policies), SETUP, settings, seeds=options.seeds).run_all(options.jobs)
            points = {policy: tuple(median(runs, aim) for aim in AIMS) for policy, runs in by_policy(results).items()}
            print(f"{name}, max_num_batched_tokens={num_tokens}")
            print(f"{'policy':<34}{'TTFT p50':>10}{'short p99':>11}{'long p99':>10}{'preempted':>11}")
            for policy, point in points.items():
                others = [other for other_name, other in points.items() if other_name != "oracle"]
                mark = "" if any(beats(other, point) for other in others) else "  *"
                print(f"{policy:<34}{point[0]:>10.3f}{point[1]:>11.2f}{point[2]:>10.2f}{point[3]:>11.0f}{mark}")
            fifo, oracle = points.pop("fifo"), points.pop("oracle")
            halved = [(point[2], policy) for policy, point in points.items() if point[1] <= fifo[1] / 2]
            best = min(halved, default=None)
            print(f"lowest long p99 with short p99 halved: {'none' if best is None else best[1]}", end="")
            if best is not None:
                point = points[best[1]]
                ratios = [f"{a / b:.2f}" for a, b in zip(point[:3], fifo[:3], strict=True)]
                print(f"; against fifo: p50 x {ratios[0]}, short p99 x {ratios[1]}, long p99 x {ratios[2]}", end="")
            print(f"; oracle's long p99 x {oracle[2] / fifo[2]:.2f}\n", flush=True)
            if options.figures is not None:
                save_figures(results, options.figures / f"pareto-{name}-{num_tokens}", "png", "")


def beats(other: Sequence[float], point: Sequence[float]) -> bool:
    """Whether `other` is nowhere worse in the first three columns, and somewhere better."""
    return other[:3] != point[:3] and all(a <= b for a, b in zip(other[:3], point[:3], strict=True))


def heads(options: Options) -> None:
    """Late heads where nobody is ever preempted: zero, over at least 10,000 blocked ones."""
    (policy,) = parse_policies("best-fit-guaranteed")
    blocked = passed = moved = preempted = seed = 0
    while blocked < 10_000:
        result = Experiment(replace(TIGHT, rate=6.0), (policy,), SETUP, SETTINGS, seeds=(seed,)).run_all()[0]
        blocked += result.blocked_heads
        passed += result.passed_heads
        moved += result.moved_starts
        preempted += result.preemptions
        seed += 1
    print(f"guaranteed, {seed} runs: {blocked:,} heads were blocked and {passed:,} of them passed;")
    print(f"{moved} reserved starts moved to later, {preempted} preemptions\n", flush=True)


def limits(options: Options) -> None:
    """ITL under limits of 40, 20 and 12 ms at 60, 70 and 80 % of what the device carries under each, 5 % jitter."""
    names = ("limit", "carries", "load", "ITL p50", "ITL p99", "over", "TTFT p50", "TTFT p99")
    print("".join(f"{name:>10}" for name in names))
    for limit_ms in (None, 40, 20, 12):
        policy = Policy("limit", {"itl_limit_ms": limit_ms})
        for jitter in (0.0, 0.05):
            setup = replace(SETUP, jitter=jitter)
            flood = replace(TIGHT, arrivals="poisson", rate=1000.0, num_requests=600)
            carried = Experiment(flood, (policy,), setup, SETTINGS).run_all()[0].requests_per_s
            for load in (0.6, 0.7, 0.8):
                source = replace(TIGHT, arrivals="poisson", rate=load * carried)
                runs = Experiment(source, (policy,), setup, SETTINGS, seeds=options.seeds).run_all(options.jobs)
                over = "-" if limit_ms is None else f"{100 * median(runs, 'itl_over_limit'):.2f} %"
                label = "none" if limit_ms is None else f"{limit_ms} ms"
                label += "" if jitter == 0 else " ~"
                itl = "".join(f"{1e3 * median(runs, name):>10.2f}" for name in ("itl_p50", "itl_p99"))
                ttft = "".join(f"{median(runs, name):>10.2f}" for name in ("ttft_p50", "ttft_p99"))
                print(f"{label:>10}{carried:>8.2f}/s{100 * load:>8.0f} %{itl}{over:>10}{ttft}", flush=True)
    print("~: steps with 5 % jitter. ITL in ms, TTFT in s.\n")


def azure(options: Options) -> None:
    """Conversation and code, sped up until the pool is tight or the device is nearly full."""
    for name, speed, long_from in (
        ("azure2023_conv_first2000.csv", 2.5, 2000),
        ("azure2023_code_first2000.csv", 2.0, 4096),
    ):
        workload = scaled(read_trace(trace(options, name)).workload, speed)
        setup = replace(SETUP, long_from=long_from)
        policies = tuple(parse_policies("static fifo best-fit q0.5:best-fit,capacity_quantile=0.5 shortest oracle"))
        show(name.split(".")[0], Experiment(workload, policies, setup, SETTINGS).run_all(options.jobs), options)


def mooncake(options: Options) -> None:
    """Long prompts on twelve paper devices: policies, then routers with the prefixes that the trace's hashes tell."""
    profile = find_profile("l40s-8b")
    workload = read_trace(trace(options, "mooncake_conversation_first10min.csv")).workload
    setup = Setup(profile, num_replicas=12, long_from=20_000)
    policies = tuple(parse_policies("fifo best-fit q0.5:best-fit,capacity_quantile=0.5 oracle"))
    results = Experiment(workload, policies, setup, SETTINGS, router="least-work").run_all(options.jobs)
    show("mooncake", results, options)
    hashed = read_hash_ids(trace(options, "mooncake_conversation_first1000_hash_ids.jsonl"))
    (policy,) = parse_policies("best-fit")
    results = []
    for router in ("round-robin", "least-work", "prefix-affinity"):
        named = replace(policy, name=router)
        results += Experiment(hashed, (named,), setup, SETTINGS, router=router).run_all()
    show("mooncake-routers", results, options)


def read_hash_ids(path: Path) -> Workload:
    """A Mooncake trace: each hash id stands for the prompt's next 512 tokens and all before them."""
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        record = json.loads(line)
        left, segments, keys = record["input_length"], [], record["hash_ids"]
        for key in keys:
            segments.append((key, min(HASH_BLOCK, left)))
            left -= segments[-1][1]
        if left:
            segments.append(((1 << 30) + number, left))
        requests.append(
            SimRequest(
                record["timestamp"] * 1_000_000,
                record["input_length"],
                max(1, record["output_length"]),
                tuple(segment for segment in segments if segment[1]),
                tuple(keys),
            )
        )
    return Workload(path.name, tuple(requests))


def speed(options: Options) -> None:
    """Requests for each second of one processor, and 100 replicas for a minute."""
    for text in ("fifo", "best-fit", "no-cache:best-fit,prefix_caching=false"):
        (policy,) = parse_policies(text)
        started = time.process_time()
        result = Experiment(TIGHT, (policy,), SETUP, SETTINGS).run_all()[0]
        used = time.process_time() - started
        per_step = 1e6 * used / result.num_steps
        print(f"{policy.name:<10}{TIGHT.num_requests / used:>8,.0f} requests/s, {per_step:.0f} us a step")
    crowd = replace(TIGHT, arrivals="poisson", rate=600.0, num_requests=36_000)
    setup = replace(SETUP, num_replicas=100)
    started = time.process_time()
    result = Experiment(crowd, tuple(parse_policies("best-fit")), setup, SETTINGS, router="least-work").run_all()[0]
    used = time.process_time() - started
    print(f"100 replicas, {result.makespan_s:.0f} s: {result.num_steps:,} steps, {result.num_requests:,} requests,")
    print(f"{used:.1f} s of one processor: {result.num_requests / used:,.0f} requests/s\n")


def median(runs: Sequence[RunResult], name: str) -> float:
    """One figure over the seeds."""
    value = spread(runs, name)
    return float("nan") if value is None else value.median


def trace(options: Options, name: str) -> Path:
    """The path of a trace. Exits if there is none."""
    if options.traces is None or not (options.traces / name).is_file():
        sys.exit(f"{name} is needed; give its folder with --traces.")
    return options.traces / name


SECTIONS: dict[str, Callable[[Options], None]] = {
    "tight": tight,
    "pareto": pareto,
    "heads": heads,
    "limits": limits,
    "azure": azure,
    "mooncake": mooncake,
    "speed": speed,
}


def main() -> None:
    """Make the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--traces", type=Path, help="folder of the trace files")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--figures", type=Path, help="folder for figures (needs the extra [bench])")
    given = parser.parse_args()
    without_traces = [name for name in SECTIONS if given.traces is not None or name not in ("azure", "mooncake")]
    options = Options(given.traces, tuple(range(given.seeds)), given.jobs, given.figures)
    for name in given.sections or without_traces:
        if name not in SECTIONS:
            parser.error(f"there is no section {name}")
        print(f"## {name}\n")
        SECTIONS[name](options)


if __name__ == "__main__":
    main()
