"""Figures of a comparison, drawn with matplotlib (the extra [bench]): PNG, SVG or one HTML page. No figure computes."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pyengine.errors import InvalidRequest, PyEngineError
from pyengine.simulate.results import RunResult, by_policy, spread

FORMATS = ("png", "svg", "html")
TITLES = {
    "ttft": "Time to first token: what part of the requests had waited no longer",
    "waiting": "Seconds of waiting, by reason",
    "plane": "Short prompts against long ones, p99 of the time to first token",
}


class MissingExtra(PyEngineError):
    """An optional package is not installed; the message says which extra has it."""


def load_matplotlib() -> Any:
    """matplotlib, set to draw without a screen. Raises MissingExtra."""
    try:
        matplotlib = import_module("matplotlib")
    except ImportError as error:
        raise MissingExtra(
            'Figures need matplotlib, which is in the extra [bench]: pip install "pyengine-llm[bench]".'
        ) from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "pyengine"  # the same figure, the same file
    return matplotlib


def save_figures(results: Sequence[RunResult], folder: str | Path, file_format: str, table: str) -> list[Path]:
    """Draw all figures into `folder`, which is made; returns the files. With "html" it is one, with `table` in it.

    Raises MissingExtra, and InvalidRequest for an unknown format or a folder that cannot be written.
    """
    if file_format not in FORMATS:
        allowed = ", ".join(FORMATS)
        raise InvalidRequest(
            f"figure_format is {file_format!r}; it must be one of {allowed}.",
            field="figure_format",
            value=file_format,
            limit=allowed,
        )
    load_matplotlib()
    drawn = {"ttft": ttft_figure(results), "waiting": waiting_figure(results), "plane": plane_figure(results)}
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if file_format == "html":
            path = folder / "simulation.html"
            path.write_text(_page(results, drawn, table), encoding="utf-8")
            return [path]
        paths = []
        for name, figure in drawn.items():
            paths.append(folder / f"{name}.{file_format}")
            paths[-1].write_bytes(_image(figure, file_format))
        return paths
    except OSError as error:
        raise InvalidRequest(
            f"The figures cannot be written to {str(folder)!r}: {error.strerror or error}.",
            field="figures",
            value=str(folder),
        ) from error


def ttft_figure(results: Sequence[RunResult]) -> Any:
    """Cumulative distributions of TTFT: short and long prompts beside each other; one line a policy and seed."""
    figure, axes = _new_figure(results, 2)
    groups = (("ttft_short_curve", "prompts < {:,} tokens"), ("ttft_long_curve", "prompts >= {:,} tokens"))
    for axis, (name, title) in zip(axes, groups, strict=True):
        for number, (policy, runs) in enumerate(by_policy(results).items()):
            for i, run in enumerate(runs):
                curve = getattr(run, name)
                if curve:
                    label = policy if i == 0 else None
                    axis.plot(
                        curve, range(len(curve)), color=f"C{number % 10}", label=label, alpha=1.0 if i == 0 else 0.4
                    )
        axis.set_xscale("log")
        axis.set_xlabel("time to first token [s]")
        axis.set_title(title.format(results[0].long_from), fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("% of requests")
    _legend(axes[0])
    return figure


def waiting_figure(results: Sequence[RunResult]) -> Any:
    """Stacked bars: for each policy the mean over its runs of the seconds that all requests waited, by reason."""
    figure, (axis,) = _new_figure(results, 1)
    groups = by_policy(results)
    reasons = sorted({reason for result in results for reason in result.waiting_s})
    bottoms = [0.0] * len(groups)
    for number, reason in enumerate(reasons):
        heights = [sum(run.waiting_s.get(reason, 0.0) for run in runs) / len(runs) for runs in groups.values()]
        axis.bar(list(groups), heights, bottom=bottoms, label=reason, color=f"C{number % 10}")
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axis.set_ylabel("seconds of waiting, all requests")
    axis.tick_params(axis="x", rotation=20)
    axis.grid(axis="y", alpha=0.3)
    _legend(axis)
    return figure


def plane_figure(results: Sequence[RunResult]) -> Any:
    """One point a policy at its medians, with whiskers from its least to its most; left and below is better."""
    figure, (axis,) = _new_figure(results, 1)
    for number, (policy, runs) in enumerate(by_policy(results).items()):
        short, long = spread(runs, "ttft_short_p99"), spread(runs, "ttft_long_p99")
        if short is None or long is None:
            continue
        axis.errorbar(
            short.median,
            long.median,
            xerr=[[short.median - short.low], [short.high - short.median]],
            yerr=[[long.median - long.low], [long.high - long.median]],
            marker="o",
            capsize=3,
            color=f"C{number % 10}",
            label=policy,
            linestyle="none",
        )
    axis.set_xlabel(f"p99 of prompts < {results[0].long_from:,} tokens [s]")
    axis.set_ylabel("p99 of the longer ones [s]")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    _legend(axis)
    return figure


def _new_figure(results: Sequence[RunResult], num_axes: int) -> tuple[Any, Sequence[Any]]:
    """A figure with its axes side by side; what was simulated stands above them."""
    module = import_module("matplotlib.figure")
    figure = module.Figure(figsize=(5.0 * max(num_axes, 1.5), 4.2), layout="constrained")
    first = results[0]
    replicas = f", {first.num_replicas} replicas" if first.num_replicas > 1 else ""
    figure.suptitle(f"{first.workload}\nsimulated on {first.device}{replicas}", fontsize=9)
    return figure, figure.subplots(1, num_axes, squeeze=False)[0]


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8)


def _image(figure: Any, file_format: str) -> bytes:
    buffer = io.BytesIO()
    metadata = {"Date": None} if file_format == "svg" else None
    figure.savefig(buffer, format=file_format, dpi=150, metadata=metadata)
    return buffer.getvalue()


def _page(results: Sequence[RunResult], drawn: dict[str, Any], table: str) -> str:
    parts = [
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
        f"<title>Simulation: {html.escape(results[0].workload)}</title>",
        "<style>body{font-family:sans-serif;max-width:75rem;margin:2rem auto}svg{max-width:100%;height:auto}</style>",
        "<h1>Simulation</h1>",
        f"<pre>{html.escape(table)}</pre>",
    ]
    for name, figure in drawn.items():
        svg = _image(figure, "svg").decode()
        parts.append(f"<h2>{html.escape(TITLES[name])}</h2>\n{svg[svg.index('<svg') :]}")
    return "\n".join(parts) + "\n</html>\n"
