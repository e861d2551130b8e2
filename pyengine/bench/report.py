"""One HTML page with all figures and numbers of the lesson on batching; it needs no other file and no network."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping

from pyengine.bench.batching import Lesson
from pyengine.bench.figures import IN_WORDS
from pyengine.bench.tables import Table, tables

BUSY = 0.05  # of the processors: from here on the report says that others disturbed it

HEADINGS = {
    "batch-size": "Batch size",
    "latency": "Latency against request rate",
    "waiting": "What requests waited for",
    "plane": "Short prompts against long ones",
    "worst": "The requests that waited longest",
}
TEXTS = {
    "batch-size": (
        "Every sequence decodes, nobody arrives. A step costs something whatever its size (the weights are read once, "
        "the host plans once) and something for each sequence; the line is fitted to that. While the fixed part is "
        "the larger one, another sequence is nearly free, and tokens/s grow with the batch; after that they stop "
        "growing, and each sequence merely waits longer for its next token. The dashed line is the least that this "
        "machine needs: the larger of reading weights and KV at its read bandwidth, and of multiplying at its peak; "
        "both were measured in this run. Step times and times between tokens are by the client's clock around step()."
    ),
    "latency": (
        "Requests arrive at random (Poisson), at the same moments and with the same lengths for every policy; only "
        "faster or slower. Times are by the client's clock, from when a request was due, whether or not it could be "
        "submitted then: a request that is due while a step runs is submitted after it. A rate above the capacity has "
        "no steady state: its waits grow for as long as it lasts."
    ),
    "waiting": (
        "Seconds of waiting of all requests of a run together. The reasons are the scheduler's own account, by its "
        "clock, from when a request was submitted; only before_submit is by the client's. Each panel has its own "
        "scale."
    ),
    "plane": (
        "One point a policy; left and below is better. Whiskers: least and most of the runs. fair and priority are "
        "told which prompts are long (another tenant, a lower class); deadline is given looser limits for long ones; "
        "oracle knows how long each output will be. The others know nothing of it."
    ),
    "worst": (
        "One row a request, from when it was due: what it waited for, its prompt, its tokens. From the trace that "
        "engine.save_trace() writes."
    ),
}


def html_page(lesson: Lesson, figures: Mapping[str, bytes]) -> str:
    """The page; `figures` are SVG by name, as draw_all makes them."""
    shown = tables(lesson)
    setting = lesson.setting
    title = f"Batching: {setting['model']} on {lesson.machine['device']}"
    parts = [
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
        f"<title>{html.escape(title)}</title>",
        "<style>body{font-family:sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;line-height:1.45}"
        "svg{max-width:100%;height:auto}table{border-collapse:collapse;font-size:.85rem;margin:.5rem 0}"
        "td,th{padding:.15rem .6rem;text-align:right;border-bottom:1px solid #ddd}"
        "td:first-child,th:first-child{text-align:left}caption{text-align:left;font-weight:bold}"
        ".warning{background:#fff3cd;padding:.6rem}</style>",
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(text)}</p>" for text in about(lesson)),
    ]
    warning = disturbance(lesson)
    if warning is not None:
        parts.append(f'<p class="warning">{html.escape(warning)}</p>')
    for name, svg in figures.items():
        parts.append(f'<h2 id="{name}">{html.escape(HEADINGS[name])}</h2>')
        parts.append(f"<p>{html.escape(TEXTS[name])}</p>")
        text = svg.decode()
        parts.append(f'<figure id="figure-{name}">{_own_ids(text[text.index("<svg") :], name)}</figure>')
        if name == "waiting":
            parts.append(_reasons(lesson))
        if name in shown:
            parts.append(_html(shown[name]))
    return "\n".join(parts) + "\n</html>\n"


def about(lesson: Lesson) -> list[str]:
    """What was run and with which settings, in sentences."""
    setting, plan = lesson.setting, lesson.plan
    texts = [
        f"{setting['model']} ({setting['parameters'] / 1e6:,.0f} million parameters, {setting['dtype']}) on "
        f"{lesson.machine['device']}, {lesson.machine['platform']}, Python {lesson.machine['python']}; it took "
        f"{lesson.wall_s / 60:.1f} minutes."
    ]
    if lesson.capacity is None:
        return texts
    again = "" if lesson.capacity_after is None else f" ({lesson.capacity_after:.1f} when measured again at the end)"
    return [
        *texts,
        f"Under load the engine has max_num_seqs = {setting['max_num_seqs']}, max_num_batched_tokens = "
        f"{setting['max_num_batched_tokens']}, window = {setting['window']} and a KV pool of "
        f"{setting['num_blocks']} blocks of {setting['block_size']} tokens (kv_cache_memory = "
        f"{setting['kv_cache_memory']:,} bytes). The pool is that "
        "small on purpose, two of the longest requests fill it: with a pool that nobody fills all policies are alike.",
        f"{lesson.num_requests} requests a run: {setting['workload_in_words']}. A request's true length is known to "
        "the client alone: a stop token is forbidden before it and forced then. Prompts are random tokens; no two "
        "share a prefix. Each run has a fresh engine that first serves a few other requests, which are not counted.",
        f"Capacity: {lesson.capacity:.1f} requests/s, which best-fit finishes with {setting['max_num_seqs'] // 2} "
        f"requests in it all the time{again}. Rates are parts of it; the plane is at {plan.plane_rate:.0%}, the worst "
        "requests at the nearest rate.",
    ]


def disturbance(lesson: Lesson) -> str | None:
    """A sentence, if others used the processors meanwhile."""
    if lesson.others is None or lesson.others < BUSY:
        return None
    return (
        f"Other programs used {lesson.others:.0%} of all processors' time during this run, so times are longer, and "
        "p99 much longer, than this machine's own. Run it again when it is idle."
    )


def _reasons(lesson: Lesson) -> str:
    names = sorted({reason for run in lesson.loads for reason in run.waiting_s})
    rows = tuple((name, IN_WORDS.get(name, "")) for name in names)
    return _html(Table("The reasons: it waits for", ("reason", ""), rows)).replace(
        "<td>", '<td style="text-align:left">'
    )


def _html(table: Table) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(row(cells, "td") for cells in table.rows)
    return f"<table><caption>{html.escape(table.title)}</caption>\n{row(table.columns, 'th')}\n{body}</table>"


def _own_ids(svg: str, name: str) -> str:
    """The same figure with ids that no other figure of the page has."""
    return re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
