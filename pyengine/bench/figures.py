"""The figures of the lesson on batching, drawn with matplotlib (the extra [bench]). No figure computes a result."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from importlib import import_module
from statistics import median
from typing import Any

from pyengine.bench.batching import Lesson
from pyengine.bench.load import BEFORE_SUBMIT, LoadResult, Slice, WorstRequest
from pyengine.scheduler.explanation import WAITS_FOR
from pyengine.scheduler.verdict import Reason
from pyengine.simulate.figures import load_matplotlib

# Reasons that look for the same resource have related colours: the pool red, the head purple, the step blue.
COLOURS = {
    BEFORE_SUBMIT: "#b0b0b0",
    "mid_step": "#7f7f7f",
    "max_seqs": "#17becf",
    "token_budget": "#1f77b4",
    "latency_limit": "#6baed6",
    "kv_now": "#d62728",
    "kv_peak": "#ff9896",
    "would_delay_head": "#9467bd",
    "bypass_budget": "#c5b0d5",
    "aging_barrier": "#5b3a8c",
    "behind_head": "#8c564b",
    "priority": "#e377c2",
    "tenant_share": "#f7b6d2",
    "shared_prefix_pending": "#bcbd22",
    "preempted": "#000000",
    "held": "#dbdb8d",
    "static_batch": "#ff7f0e",
    "batch_wait": "#ffbb78",
    "paused": "#c49c94",
    "drain": "#c7c7c7",
    "prefill": "#2ca02c",
    "decode": "#c7e9c0",
}
_OTHER_COLOUR = "#eeeeee"
_RESOLUTION = 300  # of the longest life in the figure: shorter stretches are not drawn
IN_WORDS = {
    BEFORE_SUBMIT: "due while a step ran: the client could not submit it yet",
    **{reason.value: text for reason, (text, _) in WAITS_FOR.items()},
    "prefill": "its prompt is being computed",
    "decode": "it makes tokens",
}
_ORDER = {name: place for place, name in enumerate([BEFORE_SUBMIT, *(reason.value for reason in Reason)])}


def draw_all(lesson: Lesson) -> dict[str, bytes]:
    """Every figure as SVG, by name. Raises MissingExtra."""
    matplotlib = load_matplotlib()
    figures: dict[str, Callable[[Lesson], Any]] = {
        "batch-size": batch_size_figure,
        "latency": latency_figure,
        "waiting": waiting_figure,
        "plane": plane_figure,
        "worst": worst_figure,
    }
    if not lesson.loads:
        figures = {"batch-size": batch_size_figure}
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters stay letters, which keeps the files small
        return {name: _svg(draw(lesson)) for name, draw in figures.items()}


def batch_size_figure(lesson: Lesson) -> Any:
    """(a) step time with the fitted line and the limit; tokens/s; inter-token latency; all against batch size."""
    figure, axes = _new_figure(1, 3, 4.0)
    sizes = lesson.sizes
    x = [point.batch_size for point in sizes.points]
    line = [sizes.line.at(size) for size in x]
    least = [
        max(p.memory_s, p.compute_s) if p.memory_s is not None and p.compute_s is not None else None
        for p in sizes.points
    ]
    has_limit = all(value is not None for value in least)
    limit = [value or 0.0 for value in least]

    axis = axes[0][0]
    axis.plot(x, [p.step_s * 1e3 for p in sizes.points], "o", color="C0", label="measured, median")
    axis.plot(
        x,
        [value * 1e3 for value in line],
        "-",
        color="C0",
        alpha=0.6,
        label=f"{sizes.line.base_s * 1e3:.3g} ms + {sizes.line.per_sequence_s * 1e3:.3g} ms x n",
    )
    if has_limit:
        axis.plot(x, [value * 1e3 for value in limit], "--", color="C7", label="least this machine needs")
    axis.set_ylabel("step time [ms]")

    axis = axes[0][1]
    axis.plot(x, [p.tokens_per_s for p in sizes.points], "o-", color="C2", label="measured")
    axis.plot(
        x, [size / value for size, value in zip(x, line, strict=True)], "-", color="C0", alpha=0.6, label="the line's"
    )
    if has_limit:
        axis.plot(
            x,
            [size / value for size, value in zip(x, limit, strict=True)],
            "--",
            color="C7",
            label="this machine's limit",
        )
    axis.set_ylabel("tokens/s, all sequences")

    axis = axes[0][2]
    axis.plot(x, [p.itl_p50_s * 1e3 for p in sizes.points], "o-", color="C3", label="p50")
    axis.plot(x, [p.itl_p99_s * 1e3 for p in sizes.points], "s:", color="C3", alpha=0.6, label="p99")
    axis.set_ylabel("time between tokens of one sequence [ms]")
    for axis in axes[0]:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(x, [str(size) for size in x])
        axis.xaxis.set_minor_locator(import_module("matplotlib.ticker").NullLocator())
        axis.set_xlabel("batch size n")
        _finish(axis)
    return figure


def latency_figure(lesson: Lesson) -> Any:
    """(b) p50 and p99 of TTFT and of the time between tokens, against the request rate."""
    figure, axes = _new_figure(2, 2, 3.4)
    for row, (name, title) in enumerate((("ttft", "time to first token"), ("itl", "time between tokens"))):
        for column, point in enumerate(("p50", "p99")):
            axis = axes[row][column]
            for number, (policy, runs) in enumerate(_by_policy(lesson.loads).items()):
                known = [(run.rate, getattr(getattr(run, name), point)) for run in runs]
                known = [(rate, value * 1e3) for rate, value in known if value is not None]
                axis.plot(*zip(*known, strict=True), "o-", color=f"C{number}", label=policy)
            axis.axvline(lesson.capacity or 0.0, color="C7", linestyle=":", linewidth=1)
            axis.set_yscale("log")
            axis.set_ylabel(f"{title}, {point} [ms]")
            axis.set_xlabel("requests/s (dotted: capacity)")
            _finish(axis, legend=row == 0 and column == 0)
    return figure


def waiting_figure(lesson: Lesson) -> Any:
    """(c) stacked seconds of waiting by reason against the request rate; one panel a policy, one scale for all."""
    groups = _by_policy(lesson.loads)
    columns = min(2, len(groups))
    figure, axes = _new_figure(-(-len(groups) // columns), columns, 3.0)
    flat = [axis for row in axes for axis in row]
    reasons = _sorted_reasons(reason for run in lesson.loads for reason in run.waiting_s)
    for axis, (policy, runs) in zip(flat, groups.items(), strict=False):
        labels = [f"{run.rate_share:.0%}" for run in runs]
        bottoms = [0.0] * len(runs)
        for reason in reasons:
            heights = [run.waiting_s.get(reason, 0.0) for run in runs]
            boxes = [
                (place - 0.4, place + 0.4, bottom, bottom + height)
                for place, (bottom, height) in enumerate(zip(bottoms, heights, strict=True))
                if height
            ]
            if boxes:
                axis.add_patch(_rectangles(boxes, COLOURS.get(reason, _OTHER_COLOUR)))
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axis.set_xlim(-0.6, len(runs) - 0.4)
        axis.set_ylim(0, 1.05 * max(bottoms) or 1.0)
        axis.set_xticks(range(len(runs)), labels)
        axis.set_title(f"{policy} (its own scale)", fontsize=10)
        axis.set_xlabel("request rate, part of the capacity")
        axis.set_ylabel("seconds of waiting, all requests")
        axis.grid(axis="y", alpha=0.3)
    for axis in flat[len(groups) :]:
        axis.set_visible(False)
    _legend_of(figure, reasons)
    return figure


def plane_figure(lesson: Lesson) -> Any:
    """(d) p99 of TTFT of short prompts against that of long ones: medians over the runs, with least and most."""
    figure, axes = _new_figure(1, 1, 5.2, width=8.0)
    axis = axes[0][0]
    markers = "os^Dv<>PX*hd"
    for number, (policy, runs) in enumerate(_by_policy(lesson.plane).items()):
        short = [run.ttft_short.p99 * 1e3 for run in runs if run.ttft_short.p99 is not None]
        long = [run.ttft_long.p99 * 1e3 for run in runs if run.ttft_long.p99 is not None]
        if not short or not long:
            continue
        x, y = median(short), median(long)
        axis.errorbar(
            x,
            y,
            xerr=[[x - min(short)], [max(short) - x]],
            yerr=[[y - min(long)], [max(long) - y]],
            marker=markers[number % len(markers)],
            color=f"C{number % 10}",
            label=policy,
            linestyle="none",
            elinewidth=0.6,
            capsize=2,
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("time to first token of short prompts, p99 [ms]")
    axis.set_ylabel("of long prompts, p99 [ms]")
    _finish(axis)
    return figure


def worst_figure(lesson: Lesson) -> Any:
    """(e) the requests that waited longest, a row each, from when they were due; by policy, one scale for all."""
    chosen = _to_compare(lesson)
    figure, axes = _new_figure(1, max(1, len(chosen)), 6.4, sharex=True)
    seen: set[str] = set()
    lives = [one.slices[-1].end_s - one.slices[0].start_s for requests in chosen.values() for one in requests]
    finest_s = max(lives, default=0.0) / _RESOLUTION
    for axis, (policy, requests) in zip(axes[0], chosen.items(), strict=False):
        boxes: dict[str, list[tuple[float, float, float, float]]] = {}
        for row, request in enumerate(requests):
            origin_s = request.slices[0].start_s
            for part in _visible(request.slices, finest_s):
                left, right = (part.start_s - origin_s) * 1e3, (part.end_s - origin_s) * 1e3
                boxes.setdefault(part.what, []).append((left, right, row - 0.45, row + 0.45))
        for what, of_it in boxes.items():
            axis.add_patch(_rectangles(of_it, COLOURS.get(what, _OTHER_COLOUR)))
        seen.update(boxes)
        axis.autoscale_view()
        axis.set_xlim(left=0)
        axis.set_ylim(len(requests) - 0.5, -0.5)
        axis.set_title(policy, fontsize=10)
        axis.set_xlabel("ms since it was due")
        axis.grid(axis="x", alpha=0.3)
    axes[0][0].set_ylabel("the requests that waited longest, worst first")
    _legend_of(figure, [*_sorted_reasons(seen - {"prefill", "decode"}), "prefill", "decode"])
    return figure


def _to_compare(lesson: Lesson) -> dict[str, tuple[WorstRequest, ...]]:
    """At most three policies: the last ones, which are the continuous ones."""
    names = list(lesson.worst)[-3:]
    return {name: lesson.worst[name] for name in names}


def _by_policy(results: Sequence[LoadResult]) -> dict[str, list[LoadResult]]:
    groups: dict[str, list[LoadResult]] = {}
    for result in results:
        groups.setdefault(result.policy, []).append(result)
    return groups


def _sorted_reasons(reasons: Any) -> list[str]:
    return sorted(set(reasons), key=lambda reason: _ORDER.get(reason, len(_ORDER)))


def _new_figure(rows: int, columns: int, row_height: float, *, width: float = 11.0, sharex: bool = False) -> Any:
    module = import_module("matplotlib.figure")
    figure = module.Figure(figsize=(width, rows * row_height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=sharex)


def _visible(slices: Sequence[Slice], finest_s: float) -> list[Slice]:
    """Without those too short to be seen, which count to the one before them; adjacent ones of a kind are one."""
    kept: list[Slice] = []
    for part in slices:
        if kept and (part.what == kept[-1].what or part.end_s - part.start_s < finest_s):
            kept[-1] = Slice(kept[-1].start_s, part.end_s, kept[-1].what)
        else:
            kept.append(part)
    return kept


def _rectangles(boxes: Sequence[tuple[float, float, float, float]], colour: str) -> Any:
    """Many rectangles (left, right, low, high) of a colour as one path, which keeps the file small."""
    path = import_module("matplotlib.path").Path
    corners: list[tuple[float, float]] = []
    codes: list[int] = []
    for left, right, low, high in boxes:
        corners += [(left, low), (right, low), (right, high), (left, high), (left, low)]
        codes += [path.MOVETO, path.LINETO, path.LINETO, path.LINETO, path.CLOSEPOLY]
    return import_module("matplotlib.patches").PathPatch(path(corners, codes), facecolor=colour, linewidth=0)


def _legend_of(figure: Any, names: Sequence[str]) -> None:
    patch = import_module("matplotlib.patches").Patch
    handles = [patch(color=COLOURS.get(name, _OTHER_COLOUR), label=name) for name in names]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8)


def _finish(axis: Any, *, legend: bool = True) -> None:
    axis.grid(alpha=0.3)
    ticker = import_module("matplotlib.ticker")
    for side in (axis.xaxis, axis.yaxis):
        if side.get_scale() == "log" and isinstance(side.get_major_locator(), ticker.LogLocator):
            side.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            side.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            side.set_minor_locator(ticker.NullLocator())
    if legend and axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8)


def _svg(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
