"""`pyengine bench`: benchmarks of the real engine, their report, and this machine's profile for `pyengine simulate`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyengine.bench.batching import QUICK, Lesson, Plan, measure_batching
from pyengine.bench.device import SETTINGS, measure_device
from pyengine.cli.fetching import found_model
from pyengine.cli.loading import loaded_engine
from pyengine.cli.process import DONE
from pyengine.cli.terminal import RunsBar, TextOutput, note
from pyengine.errors import InvalidRequest
from pyengine.simulate.figures import load_matplotlib
from pyengine.simulate.policies import parse_policies

PIPE_WIDTH = 150
MAX_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Files:
    """Where the results go: the page, the numbers, and a folder for the figures; None: not wanted."""

    page: str
    numbers: str | None
    figures: str | None


def plan_from(
    *,
    quick: bool,
    max_batch: int | None,
    rates: str | None,
    policies: str | None,
    plane: str | None,
    seconds: float | None,
    with_load: bool,
    seeds: int | None,
    seed: int | None,
) -> Plan:
    """The plan that the options describe. Raises InvalidRequest."""
    given: dict[str, Any] = {
        "max_batch": max_batch,
        "rates": None if rates is None else _rates(rates),
        "compared": None if policies is None else tuple(parse_policies(policies)),
        "plane": None if plane is None else tuple(parse_policies(plane)),
        "seconds": seconds,
        "with_load": with_load,
        "seeds": seeds,
        "seed": seed,
    }
    return replace(QUICK if quick else Plan(), **{name: value for name, value in given.items() if value is not None})


def run_batching(model: str | None, engine_settings: Mapping[str, Any], plan: Plan, files: Files) -> int:
    """Measure, show the tables, write the report. Returns the exit code; raises MissingExtra before anything runs."""
    load_matplotlib()
    for wanted in (files.page, files.numbers):
        if wanted is not None:
            _check_writable(Path(wanted))
    found_model(model)  # one that has to be fetched shows a bar of its own
    with _bar("Measuring") as on_progress:
        lesson = measure_batching(model, engine_settings, plan, on_progress)
    from pyengine.bench.report import disturbance
    from pyengine.bench.tables import as_text, tables

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    TextOutput().write(as_text(list(tables(lesson).values()), width))
    for path in save(lesson, files):
        note(str(path))
    warning = disturbance(lesson)
    if warning is not None:
        note(f"pyengine: {warning}")
    return DONE


def save(lesson: Lesson, files: Files) -> list[Path]:
    """Write what is wanted; returns the files. Raises InvalidRequest for one that cannot be written."""
    from pyengine.bench.figures import draw_all
    from pyengine.bench.report import html_page

    drawn = draw_all(lesson)
    contents: dict[Path, bytes] = {Path(files.page): html_page(lesson, drawn).encode()}
    if files.numbers is not None:
        contents[Path(files.numbers)] = (json.dumps(lesson.record(), allow_nan=False) + "\n").encode()
    if files.figures is not None:
        contents.update({Path(files.figures) / f"{name}.svg": svg for name, svg in drawn.items()})
    for path, content in contents.items():
        _write(path, content)
    return list(contents)


def run_save_profile(model: str | None, engine_settings: Mapping[str, Any], path: str, seconds: float) -> int:
    """Measure this machine's step times with that model, and write the profile that `pyengine simulate` reads."""
    if not 0 < seconds <= MAX_SECONDS:
        raise InvalidRequest(
            f"--seconds is {seconds:g}; it must be a number above 0, at most {MAX_SECONDS:g}.",
            field="seconds",
            value=seconds,
            limit=MAX_SECONDS,
        )
    _check_writable(Path(path))
    settings = {**SETTINGS, **engine_settings}
    with loaded_engine(model, settings, verbose=False) as loaded, _bar("Measuring") as on_progress:
        measured = measure_device(
            loaded.engine,
            seconds,
            seed=0,
            on_progress=lambda part: on_progress(part, "steps of several shapes"),
        )
    _write(Path(path), measured.profile.to_json().encode())
    lines = [f"{measured.profile.name}"]
    for name, value in measured.profile.step_time.items():
        lines.append(f"  {name:<24}{value:>14,.4g}")
    lines.append(f"  off by {measured.mean_error:.1%} on average over {len(measured.shapes)} shapes of steps")
    TextOutput().write("\n".join(lines) + "\n")
    note(path)
    return DONE


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(sorted({float(part) for part in text.replace(",", " ").split()}))
    except ValueError as error:
        raise InvalidRequest(
            f"--rates is {text!r}; write parts of the measured capacity, for example 0.5,0.9.",
            field="rates",
            value=text,
        ) from error


def _check_writable(path: Path) -> None:
    """Fail before the measurement, not after it."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {str(folder)!r}"
        raise InvalidRequest(f"{str(path)!r} cannot be written: {why}.", field="file", value=str(path))


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise InvalidRequest(
            f"{str(path)!r} cannot be written: {error.strerror or error}.", field="file", value=str(path)
        ) from error


@contextmanager
def _bar(what: str) -> Iterator[Callable[[float, str], None]]:
    """A bar over everything where standard error is a terminal; else a line when something else begins."""
    if not sys.stderr.isatty():
        yield lambda part, run: None
        return
    bar = RunsBar(what, 1000)
    try:
        yield lambda part, run: bar.update(round(part * 1000), run)
    finally:
        bar.hide()
