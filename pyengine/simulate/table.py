"""The table of policies against each other, as plain text: a column for each policy, a row for each figure."""

from __future__ import annotations

from collections.abc import Sequence

from pyengine.simulate.results import RunResult, Spread, by_policy, spread, spread_of

_TTFT = ("p50", "p90", "p99")


def table(results: Sequence[RunResult], width: int = 120) -> str:
    """What was simulated, then the table; with several seeds each cell is the median (least to most).

    Policies that do not fit into `width` columns beside each other come below.
    """
    groups = by_policy(results)
    rows = _rows(results, groups)
    label_width = max(len(label) for label, _ in rows)
    widths = [max(len(row[1][i]) for row in rows) + 2 for i in range(len(groups))]
    lines = _title(results)
    first = 0
    while first < len(groups):
        last = first + 1
        while last < len(groups) and label_width + sum(widths[first : last + 1]) <= width:
            last += 1
        lines.append("")
        for label, cells in rows:
            shown = "".join(f"{cells[i]:>{widths[i]}}" for i in range(first, last))
            lines.append(f"{label:<{label_width}}{shown}".rstrip())
        first = last
    return "\n".join(lines) + "\n"


def _title(results: Sequence[RunResult]) -> list[str]:
    first = results[0]
    lines = [f"workload  {first.workload}", f"device    {first.device}, simulated"]
    if first.num_replicas > 1:
        lines[1] += f"; {first.num_replicas} replicas, router {first.router}"
    num_seeds = len({result.seed for result in results})
    if num_seeds > 1:
        lines.append(f"seeds     {num_seeds}: median (least to most)")
    return lines


def _rows(results: Sequence[RunResult], groups: dict[str, list[RunResult]]) -> list[tuple[str, list[str]]]:
    long_from = results[0].long_from
    rows = [("", list(groups))]

    def add(label: str, name: str, unit: str) -> None:
        rows.append((label, [_cell(spread(runs, name), unit) for runs in groups.values()]))

    names = [("TTFT", "ttft"), (f"  < {long_from:,} tokens", "ttft_short"), (f"  >= {long_from:,}", "ttft_long")]
    for label, group in names:
        if any(getattr(result, group).count for result in results):
            for point in _TTFT:
                add(f"{label} {point} [s]", f"{group}_{point}", "s")
    for point in ("p50", "p99"):
        add(f"ITL {point} [ms]", f"itl_{point}", "ms")
    if any(result.itl_over_limit is not None for result in results):
        add("ITL over its limit [%]", "itl_over_limit", "%")
    add("output tokens/s", "output_tokens_per_s", "")
    add("requests in a step", "mean_batch", "mean")
    add("preemptions", "preemptions", "")
    add("recomputed tokens", "recomputed_tokens", "")
    if any(result.cached_tokens for result in results):
        add("cached prompt tokens", "cached_tokens", "")
    if any(result.blocked_heads for result in results):
        add("promised starts", "blocked_heads", "")
        add("  passed by others", "passed_heads", "")
        add("  moved to later", "moved_starts", "")
    add("refused", "refused", "")
    for reason in sorted({reason for result in results for reason in result.waiting_s}):
        spreads = [spread_of([run.waiting_s.get(reason, 0.0) for run in runs]) for runs in groups.values()]
        rows.append((f"waiting: {reason} [s]", [_cell(value, "") for value in spreads]))
    return rows


def _cell(value: Spread | None, unit: str) -> str:
    if value is None:
        return "-"
    median = _number(value.median, unit)
    if value.low == value.high:
        return median
    return f"{median} ({_number(value.low, unit)} to {_number(value.high, unit)})"


def _number(value: float, unit: str) -> str:
    if unit == "ms":
        value *= 1e3
    if unit == "%":
        return f"{100 * value:.2f}"
    if not unit:
        return f"{value:,.0f}"
    if unit == "mean":
        return f"{value:.1f}"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"
