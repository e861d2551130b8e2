"""`pyengine simulate`: scheduler policies against each other on a simulated device. It loads no model."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from pyengine.cli.process import DONE, take_interrupts
from pyengine.cli.simulate_errors import all_from, check_settings, naming_options, option
from pyengine.cli.simulate_options import DeviceOptions, WorkloadOptions
from pyengine.cli.terminal import RunsBar, TextOutput, note
from pyengine.errors import InvalidRequest
from pyengine.simulate.cluster import DEFAULT_LONG_FROM, DEFAULT_MAX_TOKENS, Setup
from pyengine.simulate.experiment import Experiment, NeverFit
from pyengine.simulate.figures import FORMATS, load_matplotlib, save_figures
from pyengine.simulate.lengths import parse_lengths
from pyengine.simulate.policies import PRESETS, parse_policies
from pyengine.simulate.profiles import DeviceProfile, built_in_profiles, find_profile
from pyengine.simulate.results import RunResult, summary
from pyengine.simulate.table import table
from pyengine.simulate.trace_file import read_trace
from pyengine.simulate.workload import Generator, Workload, scaled

DEFAULT_REQUESTS = 2000
DEFAULT_RATE = 8.0
DEFAULT_PROMPTS = "0.9*lognormal:300:1+0.1*uniform:6000:20000"
DEFAULT_OUTPUTS = "lognormal:180:0.64"
PIPE_WIDTH = 120

# Options that say something only about some arrivals; the others refuse them.
_ONLY_FOR = {
    "rate": ("poisson", "gamma", "on-off"),
    "cv": ("gamma",),
    "on_s": ("on-off",),
    "off_s": ("on-off",),
    "users": ("closed",),
    "think_s": ("closed",),
}
_NOT_WITH_TRACE = ("arrivals", *_ONLY_FOR, "prompt_tokens", "output_tokens", "prefixes", "tenants", "seed", "seeds")


@dataclass(frozen=True, slots=True)
class Report:
    """How the results are shown: as JSON or as a table; figures where `figures` is a folder."""

    as_json: bool
    figures: str | None
    figure_format: str


def run_simulate(
    trace: str | None,
    policies: str,
    workload: WorkloadOptions,
    device: DeviceOptions,
    report: Report,
    *,
    long_from: int | None,
    jobs: int,
) -> int:
    """Simulate and report; returns the exit code. Raises InvalidRequest, and MissingExtra for figures."""
    if jobs < 1:
        raise InvalidRequest(f"--jobs is {jobs}; it must be an integer >= 1.", field="jobs", value=jobs, limit=1)
    with naming_options():
        if report.figures is not None:
            _check_figures(report.figure_format)
        source, lines = _trace(trace, workload) if trace is not None else (_generator(workload), None)
        with all_from("policies"):
            compared = tuple(parse_policies(policies))
        experiment = Experiment(
            source=source,
            policies=compared,
            setup=_setup(workload, device, long_from),
            settings=device.settings(),
            router="round-robin" if device.router is None else device.router,
            seeds=_seeds(workload),
        )
    check_settings(experiment, device)
    take_interrupts()
    never_fit = experiment.never_fit()
    _warn(never_fit, lines, trace)
    with _progress(experiment, jobs) as on_progress:
        results = experiment.run_all(jobs, on_progress)
    shown = table(results, shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH)
    if report.as_json:
        TextOutput().write(json.dumps(_record(experiment, results, never_fit, lines), allow_nan=False) + "\n")
    else:
        TextOutput().write(shown)
    if report.figures is not None:
        for path in save_figures(results, report.figures, report.figure_format, shown):
            note(f"{path}")
    return DONE


def list_names(*, as_json: bool) -> int:
    """Show the built-in profiles and policies."""
    profiles = built_in_profiles()
    if as_json:
        named = {name: json.loads(profile.to_json()) for name, profile in profiles.items()}
        TextOutput().write(json.dumps({"profiles": named, "policies": PRESETS}) + "\n")
        return DONE
    lines = ["profiles"]
    for name, profile in profiles.items():
        lines.append(f"  {name:<12}{profile.num_blocks * profile.block_size:>11,} KV tokens   {profile.note}")
    lines.append("policies")
    for name, settings in PRESETS.items():
        lines.append(f"  {name:<20}{','.join(f'{key}={value}' for key, value in settings.items())}")
    TextOutput().write("\n".join(lines) + "\n")
    return DONE


def _check_figures(figure_format: str) -> None:
    """Fail before the simulation, not after it."""
    if figure_format not in FORMATS:
        allowed = ", ".join(FORMATS)
        raise InvalidRequest(
            f"figure_format is {figure_format!r}; it must be one of {allowed}.",
            field="figure_format",
            value=figure_format,
            limit=allowed,
        )
    load_matplotlib()


def _setup(workload: WorkloadOptions, device: DeviceOptions, long_from: int | None) -> Setup:
    with all_from("profile"):
        profile = find_profile("example" if device.profile is None else device.profile)
    return Setup(
        profile=profile,
        num_replicas=1 if device.replicas is None else device.replicas,
        max_tokens=DEFAULT_MAX_TOKENS if workload.max_tokens is None else workload.max_tokens,
        long_from=DEFAULT_LONG_FROM if long_from is None else long_from,
        jitter=device.jitter or 0.0,
    )


def _trace(path: str, options: WorkloadOptions) -> tuple[Workload, tuple[int, ...]]:
    """The workload of a trace, and on which line of the file each request is."""
    for name in _NOT_WITH_TRACE:
        _refuse(name, getattr(options, name), "TRACE says what arrives when")
    read = read_trace(path, 0.5 if options.prefix_share is None else options.prefix_share)
    if read.ignored_columns:
        note(f"{path}: not used: {', '.join(read.ignored_columns)}")
    speed = 1.0 if options.speed is None else options.speed
    return scaled(read.workload, speed, options.requests), read.lines


def _generator(options: WorkloadOptions) -> Generator:
    arrivals = options.arrivals or "poisson"
    _refuse("speed", options.speed, "there is no TRACE; give --rate")
    for name, kinds in _ONLY_FOR.items():
        if arrivals not in kinds:
            _refuse(name, getattr(options, name), f"that says nothing with --arrivals {arrivals}")
    if not options.prefixes:
        _refuse("prefix_share", options.prefix_share, "nothing is shared; add --prefixes")
    given: dict[str, Any] = {
        "cv": options.cv,
        "on_s": options.on_s,
        "off_s": options.off_s,
        "num_users": options.users,
        "think_s": options.think_s,
        "num_prefixes": options.prefixes,
        "prefix_share": options.prefix_share,
        "num_tenants": options.tenants,
    }
    return Generator(
        arrivals,
        DEFAULT_REQUESTS if options.requests is None else options.requests,
        parse_lengths(options.prompt_tokens or DEFAULT_PROMPTS, "prompt_tokens"),
        parse_lengths(options.output_tokens or DEFAULT_OUTPUTS, "output_tokens"),
        DEFAULT_RATE if options.rate is None else options.rate,
        **{name: value for name, value in given.items() if value is not None},
    )


def _seeds(options: WorkloadOptions) -> tuple[int, ...]:
    first, count = options.seed or 0, 1 if options.seeds is None else options.seeds
    if first < 0:
        raise InvalidRequest(f"--seed is {first}; it must be an integer >= 0.", field="seed", value=first, limit=0)
    if count < 1:
        raise InvalidRequest(f"--seeds is {count}; it must be an integer >= 1.", field="seeds", value=count, limit=1)
    return tuple(range(first, first + count))


def _refuse(name: str, value: object, why: str) -> None:
    if value is not None:
        raise InvalidRequest(f"{option(name)} is {value}, but {why}.", field=name, value=value)


def _warn(never_fit: list[NeverFit], lines: tuple[int, ...] | None, trace: str | None) -> None:
    """Say which prompts are going to be refused because they are too long for the device."""
    for found in never_fit:
        where = f"request {found.first + 1}" if lines is None else f"line {lines[found.first]}"
        whose = f" with {', '.join(found.policies)}" if len(never_fit) > 1 else ""
        note(
            f"warning: {'' if trace is None else f'{trace}: '}{found.num_prompts:,} of {found.num_requests:,} prompts "
            f"can never fit{whose} and are refused: the device takes up to {found.most_tokens:,} tokens; the first, "
            f"{where}, has {found.first_tokens:,}."
        )


@contextmanager
def _progress(experiment: Experiment, jobs: int) -> Iterator[Callable[[int, int], None] | None]:
    """A bar over all runs where standard error is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    runs = experiment.runs
    finished = [0] * len(runs)
    bar = RunsBar("Simulating", len(runs) * experiment.num_requests)

    def show(place: int, num_done: int) -> None:
        finished[place] = num_done
        policy, seed = runs[place]
        bar.update(sum(finished), policy.name if seed is None or jobs > 1 else f"{policy.name}, seed {seed}")

    try:
        yield show
    finally:
        bar.hide()


def _record(
    experiment: Experiment, results: list[RunResult], never_fit: list[NeverFit], lines: tuple[int, ...] | None
) -> dict[str, Any]:
    profile: DeviceProfile = experiment.setup.profile
    return {
        "workload": results[0].workload,
        "device": json.loads(profile.to_json()),
        "replicas": experiment.setup.num_replicas,
        "router": experiment.router,
        "settings": dict(experiment.base_settings()),
        "policies": {policy.name: dict(policy.settings) for policy in experiment.policies},
        "never_fit": [
            {**asdict(found), "first_line": None if lines is None else lines[found.first]} for found in never_fit
        ],
        "summary": summary(results),
        "runs": [result.record() for result in results],
    }
