"""A report as tables for a terminal or a file."""

from __future__ import annotations

import statistics
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from peers.limits import common_prefix, goals_of, lowest_ratio, paired_ratio
from peers.report import DECODE_PROMPT_TOKENS, PREFILL_TOKENS, Report

MOST_OTHERS_LOAD = 0.05


def show(report: Report) -> None:
    """Tables on standard output."""
    plan, ours = report.plan, next((p for p in report.peers if p.name == "pyengine"), None)
    # A table in a file or a pipe is meant to be kept whole.
    console = Console(width=None if sys.stdout.isatty() else 150)

    def table(title: str, *columns: str) -> Table:
        console.print(f"\n{title}", style="bold", highlight=False)
        made = Table()
        for n, column in enumerate(columns):
            made.add_column(column, justify="right" if n else "left")
        return made

    title = (
        f"{report.model}, bfloat16, {plan.threads} threads: tokens/s, median of {plan.rounds} rounds "
        f"(prompt {PREFILL_TOKENS}; decode {DECODE_PROMPT_TOKENS} + {plan.steps})"
    )
    speeds = table(title, "", *plan.figures, "load s", "peak MB", "installed MB", "same tokens")
    for peer in report.peers:
        if peer.problem is not None:
            speeds.add_row(peer.name, *(["-"] * (len(plan.figures) + 4)))
            continue
        same = "" if ours is None or ours is peer else f"{common_prefix(ours.tokens, peer.tokens)}/{len(peer.tokens)}"
        cells = [f"{statistics.median(peer.rates[f]):,.0f}" for f in plan.figures]
        sizes = [f"{peer.peak_bytes / 1e6:,.0f}", f"{peer.installed_bytes / 1e6:,.0f}"]
        speeds.add_row(peer.name, *cells, f"{peer.load_s:.1f}", *sizes, same)
    for name, part in (("limit, overlapped", "overlapped"), ("limit, not overlapped", "serial")):
        cells = [f"{statistics.median(getattr(x, part) for x in report.limits[f]):,.0f}" for f in plan.figures]
        speeds.add_row(name, *cells, "", "", "", "", style="dim")
    console.print(speeds)
    for peer in report.peers:
        note = peer.problem or peer.version
        console.print(
            f"  {peer.name}: {note}", style="yellow" if peer.problem else "dim", highlight=False, soft_wrap=True
        )

    parts = table("Part of the overlapped limit", "", *plan.figures)
    for name, rates in report.rates.items():
        pairs = {f: zip(rates[f], report.limits[f], strict=True) for f in plan.figures}
        parts.add_row(name, *(f"{statistics.median(r / x.overlapped for r, x in pairs[f]):.0%}" for f in plan.figures))
    console.print(parts)

    if "pyengine" in report.rates:
        ratios = table("pyengine's speed / the peer's (median of the ratios of each round)", "", *plan.figures)
        for name, rates in report.rates.items():
            if name != "pyengine":
                values = [paired_ratio(report.rates["pyengine"][f], rates[f]) for f in plan.figures]
                ratios.add_row(name, *(f"{value:.2f}" for value in values))
        console.print(ratios)
        show_goals(report, table("Goals", "", "against", "wanted", "reached", ""), console)
    show_machine(report, console)


def show_goals(report: Report, goals: Any, console: Any) -> None:
    """The goals and what was reached, lowest ratio of each."""
    for goal in goals_of(report.plan.batches):
        ratio = lowest_ratio(goal, report.rates)
        reached = ("-", "not measured") if ratio is None else (f"{ratio:.2f}", "yes" if ratio >= goal.factor else "no")
        goals.add_row(goal.text, goal.peer or "best peer", f"{goal.factor:.1f}", *reached)
    console.print(goals)


def show_machine(report: Report, console: Any) -> None:
    """The ceilings of each round and how busy others were."""
    for n, c in enumerate(report.ceilings, 1):
        text = f"round {n}: read {c.read_gb_s:.0f} GB/s, dot products {c.dot_gflop_s:,.0f} GFLOP/s"
        console.print(text, style="dim", highlight=False)
    if report.others_load is None:
        return
    text = f"others' share of the processors, median: {report.others_load:.0%}"
    if report.others_load <= MOST_OTHERS_LOAD:
        console.print(text, style="dim", highlight=False)
    else:
        console.print(f"{text}. The machine was busy: repeat this when it is quiet.", style="yellow", highlight=False)
