"""The numbers of the lesson on batching as tables: rows of text, shown with rich on a terminal or as HTML."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pyengine.bench.batch_size import BatchSizePoint
from pyengine.bench.batching import Lesson
from pyengine.bench.load import LoadResult


@dataclass(frozen=True, slots=True)
class Table:
    """A title, the names of the columns, and rows of as many cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(lesson: Lesson) -> dict[str, Table]:
    """One table for each figure that has numbers of its own, by the figure's name."""
    if not lesson.loads:
        return {"batch-size": _batch_sizes(lesson)}
    return {
        "batch-size": _batch_sizes(lesson),
        "latency": _loads("Latency against request rate", lesson.loads),
        "waiting": _waiting(lesson),
        "plane": _plane(lesson),
    }


def as_text(shown: Sequence[Table], width: int) -> str:
    """For a terminal of that width."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None)
    for table in shown:
        drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for place, column in enumerate(table.columns):
            drawn.add_column(column, justify="left" if place == 0 else "right")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _batch_sizes(lesson: Lesson) -> Table:
    line = lesson.sizes.line

    def row(point: BatchSizePoint) -> tuple[str, ...]:
        known = point.memory_s is not None and point.compute_s is not None
        least_s = max(point.memory_s or 0.0, point.compute_s or 0.0)
        return (
            str(point.batch_size),
            _ms(point.step_s),
            _ms(line.at(point.batch_size)),
            _ms(point.memory_s),
            _ms(point.compute_s),
            f"{least_s / point.step_s:.0%}" if known else "-",
            f"{point.tokens_per_s:,.0f}",
            _ms(point.itl_p50_s),
            _ms(point.itl_p99_s),
        )

    return Table(
        f"Decode steps: {line.base_s * 1e3:.3g} ms + {line.per_sequence_s * 1e3:.3g} ms x n, off by "
        f"{line.mean_error:.0%} on average",
        ("n", "step ms", "line ms", "reading ms", "arithmetic ms", "of limit", "tokens/s", "ITL p50 ms", "ITL p99 ms"),
        tuple(map(row, lesson.sizes.points)),
    )


def _loads(title: str, results: Sequence[LoadResult]) -> Table:
    return Table(
        title,
        (
            "policy",
            "rate",
            "requests/s",
            "TTFT p50 ms",
            "p99 ms",
            "short p99",
            "long p99",
            "ITL p50 ms",
            "p99 ms",
            "tokens/s",
            "batch",
            "KV used",
            "preempted",
        ),
        tuple(
            (
                run.policy,
                f"{run.rate_share:.0%}",
                f"{run.rate:.1f}",
                _ms(run.ttft.p50),
                _ms(run.ttft.p99),
                _ms(run.ttft_short.p99),
                _ms(run.ttft_long.p99),
                _ms(run.itl.p50),
                _ms(run.itl.p99),
                f"{run.output_tokens_per_s:,.0f}",
                f"{run.mean_batch:.1f}",
                f"{run.kv_used:.0%}",
                str(run.preemptions),
            )
            for run in results
        ),
    )


def _waiting(lesson: Lesson) -> Table:
    reasons = sorted({reason for run in lesson.loads for reason in run.waiting_s})
    return Table(
        "Seconds of waiting of all requests together, by reason",
        ("policy", "rate", *reasons),
        tuple(
            (
                run.policy,
                f"{run.rate_share:.0%}",
                *(f"{run.waiting_s[reason]:.2f}" if reason in run.waiting_s else "" for reason in reasons),
            )
            for run in lesson.loads
        ),
    )


def _plane(lesson: Lesson) -> Table:
    groups: dict[str, list[LoadResult]] = {}
    for run in lesson.plane:
        groups.setdefault(run.policy, []).append(run)

    def middle(values: Sequence[float | None]) -> str:
        known = [value for value in values if value is not None]
        if not known:
            return "-"
        shown = _ms(median(known))
        return shown if len(known) == 1 else f"{shown} ({_ms(min(known))}-{_ms(max(known))})"

    return Table(
        f"All policies at {lesson.plan.plane_rate:.0%} of the capacity"
        + (f": median of {lesson.plan.seeds} runs (least-most)" if lesson.plan.seeds > 1 else ""),
        ("policy", "TTFT p50 ms", "short p99 ms", "long p99 ms", "ITL p99 ms", "preempted", "refused"),
        tuple(
            (
                policy,
                middle([run.ttft.p50 for run in runs]),
                middle([run.ttft_short.p99 for run in runs]),
                middle([run.ttft_long.p99 for run in runs]),
                middle([run.itl.p99 for run in runs]),
                f"{sum(run.preemptions for run in runs) / len(runs):.0f}",
                str(sum(sum(run.refusals.values()) for run in runs)),
            )
            for policy, runs in groups.items()
        ),
    )


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
