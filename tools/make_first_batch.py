"""Makes docs/first-batch.md with its figures: runs `pyengine bench batching` twice, and puts the numbers into the text.

    python tools/make_first_batch.py                    # measures: about ten minutes; the machine should be idle
    python tools/make_first_batch.py --keep             # only the text again, from the numbers of the last time

Needs the extra [bench], and fetches SmolLM2 the first time. Every number of the text is of these two runs; sentences
that compare say what the numbers say, whichever way they fall.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "first-batch.md"
MODEL = "smollm2-135m-instruct"
COMMAND = ["bench", "batching", "--quick", "--model", MODEL]
LOAD = ["--rates", "0.5,0.9,1.1", "--plane", "static fifo fifo-guaranteed best-fit best-fit-guaranteed shortest oracle"]
SMALL_COMMAND = ["bench", "batching", "--quick", "--no-load"]
MOST_BYTES = 400_000  # of all figures
Run = dict[str, Any]


def measure(command: Sequence[str], name: str) -> None:
    """Run the command; keep its numbers as NAME.json and its figures as NAME-*.svg."""
    with tempfile.TemporaryDirectory() as folder:
        files = ["-o", f"{folder}/report.html", "--json", f"{folder}/numbers.json", "--figures", f"{folder}/figures"]
        subprocess.run([sys.executable, "-m", "pyengine", *command, *files], check=True, stdout=subprocess.DEVNULL)
        record = json.loads(Path(folder, "numbers.json").read_text(encoding="utf-8"))
        record["command"] = shlex.join(["pyengine", *command])
        del record["worst"]  # thousands of slices that the figure shows
        FIGURES.mkdir(parents=True, exist_ok=True)
        (FIGURES / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for path in Path(folder, "figures").glob("*.svg"):
            (FIGURES / f"{name}-{path.name}").write_bytes(path.read_bytes())


def ms(seconds: float) -> str:
    """Milliseconds with two or three digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def times(new: float, old: float) -> str:
    """How `new` compares with `old`, in words."""
    if max(new, old) < 1.1 * min(new, old):
        return "about the same"
    return f"{old / new:.1f} times lower" if new < old else f"{new / old:.1f} times higher"


def sweep_table(record: Run) -> str:
    """Batch sizes with step time, limit and throughput."""
    lines = [
        "| n | step, ms | of which reading alone, ms | arithmetic alone, ms | tokens/s | between two tokens, p50 ms |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for point in record["batch_sizes"]["points"]:
        least = (ms(point["memory_s"]), ms(point["compute_s"])) if point["memory_s"] is not None else ("-", "-")
        lines.append(
            f"| {point['batch_size']} | {ms(point['step_s'])} | {least[0]} | {least[1]} | "
            f"{point['tokens_per_s']:,.0f} | {ms(point['itl_p50_s'])} |"
        )
    return "\n".join(lines)


def load_table(record: Run, shares: Sequence[float]) -> str:
    """Latencies of the compared policies at these rates."""
    lines = [
        "| rate | policy | TTFT p50, ms | TTFT p99 | between tokens p50 | p99 | mean batch | preempted |",
        "|--:|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for run in record["loads"]:
        if run["rate_share"] in shares:
            lines.append(
                f"| {run['rate_share']:.0%} | {run['policy']} | {ms(run['ttft']['p50'])} | {ms(run['ttft']['p99'])} | "
                f"{ms(run['itl']['p50'])} | {ms(run['itl']['p99'])} | {run['mean_batch']:.1f} | {run['preemptions']} |"
            )
    return "\n".join(lines)


def plane_table(record: Run) -> str:
    """All policies at one rate: medians over the seeds, with least and most."""

    def cell(runs: Sequence[Run], group: str, point: str) -> str:
        values = [run[group][point] for run in runs]
        spread = f" ({ms(min(values))}-{ms(max(values))})" if len(values) > 1 else ""
        return f"{ms(median(values))}{spread}"

    lines = [
        "| policy | TTFT p50, ms | short prompts p99 | long prompts p99 | preempted |",
        "|:--|--:|--:|--:|--:|",
    ]
    for policy, runs in by_policy(record["plane"]).items():
        lines.append(
            f"| {policy} | {cell(runs, 'ttft', 'p50')} | {cell(runs, 'ttft_short', 'p99')} | "
            f"{cell(runs, 'ttft_long', 'p99')} | {median(run['preemptions'] for run in runs):.0f} |"
        )
    return "\n".join(lines)


def by_policy(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run["policy"], []).append(run)
    return groups


def middle(record: Run, policy: str, group: str, point: str) -> float:
    """The median over the runs of the plane, in seconds."""
    return median(run[group][point] for run in by_policy(record["plane"])[policy])


def at(record: Run, policy: str, share: float) -> Run:
    """That policy's run at that rate."""
    return next(run for run in record["loads"] if run["policy"] == policy and run["rate_share"] == share)


def waited_for(run: Run) -> str:
    """The three largest reasons of a run's waiting, and how much there was."""
    whole = sum(run["waiting_s"].values())
    largest = sorted(run["waiting_s"].items(), key=lambda pair: -pair[1])[:3]
    parts = ", ".join(f"{seconds / whole:.0%} `{reason}`" for reason, seconds in largest)
    return f"{whole:.2f} s in all, {parts}"


def compared(record: Run, policy: str, other: str) -> str:
    """A sentence on two policies of the plane."""
    points = (("TTFT p50", "ttft", "p50"), ("short p99", "ttft_short", "p99"), ("long p99", "ttft_long", "p99"))
    parts = [
        f"{title} {times(middle(record, policy, group, point), middle(record, other, group, point))}"
        for title, group, point in points
    ]
    return f"`{policy}` against `{other}`: {', '.join(parts)}"


def reflowed(text: str) -> str:
    """Markdown with paragraphs and list items filled anew; code, tables, headings and figures stay as they are."""
    blocks = []
    for block in text.split("\n\n"):
        items = re.split(r"\n(?=\* |\d\. )", block)
        if block.lstrip("\n").startswith(("    ", "|", "#", "![")):
            blocks.append(block)
            continue
        filled = []
        for item in items:
            mark = re.match(r"(\* |\d\. |> )?", item)
            indent = " " * len(mark[0]) if mark is not None and mark[0] != "> " else "> "
            words = " ".join(item.split())
            filled.append(
                textwrap.fill(words, 124, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
            )
        blocks.append("\n".join(filled))
    return "\n\n".join(blocks).rstrip("\n") + "\n"


def repeated(record: Run, share: float) -> str:
    """How much two runs of the same differ: a policy of the plane, with its run at that rate in the other table."""
    pairs = [
        (policy, at(record, policy, share)["ttft"]["p50"], runs[0]["ttft"]["p50"])
        for policy, runs in by_policy(record["plane"]).items()
        if any(run["policy"] == policy for run in record["loads"]) and share == record["plane_rate"]
    ]
    policy, first, second = max(pairs, key=lambda pair: max(pair[1:]) / min(pair[1:]))
    return (
        f"The same requests and policies at the same rate stand in both tables. Where these differ most, `{policy}`, "
        f"TTFT p50 is {ms(first)} ms in one and {ms(second)} ms in the other, a factor of "
        f"{max(first, second) / min(first, second):.1f}: what is smaller than that may be the machine's doing"
    )


def page(record: Run, small: Run) -> str:
    """The text."""
    line, small_line = record["batch_sizes"]["line"], small["batch_sizes"]["line"]
    points, small_points = record["batch_sizes"]["points"], small["batch_sizes"]["points"]
    first, last = points[0], points[-1]
    best = max(small_points, key=lambda point: point["tokens_per_s"])
    low, high = min(run["rate_share"] for run in record["loads"]), max(run["rate_share"] for run in record["loads"])
    near = min({run["rate_share"] for run in record["loads"]}, key=lambda share: abs(share - record["plane_rate"]))
    setting = record["setting"]
    calm, busy = at(record, "best-fit", low), at(record, "best-fit", near)
    num_runs = len(by_policy(record["plane"])["fifo"])
    runs = f"median of {num_runs} runs with other random numbers (least-most)" if num_runs > 1 else "one run each"
    warning = (
        f"\n> Other programs used {record['others']:.0%} of the processors during the first run and "
        f"{small['others']:.0%} during the second. Times are longer than this machine's own, and p99 most of all: a "
        "thread that loses its processor for some milliseconds stops a whole step.\n"
        if max(record["others"] or 0.0, small["others"] or 0.0) >= 0.05
        else ""
    )
    return f"""# Your first batch

One command measures, on your own machine, what batching does:

    pip install "pyengine-llm[bench]"
    pyengine bench batching              # --quick: one or two minutes instead of six

It runs the real engine with the built-in model and writes `batching.html`, one page with all figures. This page walks
through such a run. The built-in model is tiny ({small["setting"]["parameters"] / 1e6:.0f} million parameters), and
around
so small a pass everything else costs as much as the pass itself. So here a real one is used,
SmolLM2 with {setting["parameters"] / 1e6:.0f} million, and the built-in one where the difference teaches something:

    {record["command"]}
    {small["command"]}

Figures and numbers below are of these two commands on {record["machine"]["device"]}, {record["wall_s"] / 60:.0f}
minutes
in all (`docs/figures/first-batch.json`, `first-batch-built-in.json`); `tools/make_first_batch.py` makes them again.
Yours will differ; the shapes should not.
{warning}
Words: a *step* is one pass of the model over all running requests; each of them gets one token from it. *TTFT* is the
time from when a request was due to its first token. *Between tokens* (ITL) is what a reader sees as speed. p50 is the
median, p99 what one request in a hundred exceeds.

## How does batching improve throughput?

The weights of SmolLM2 are {record["batch_sizes"]["work"]["weight_bytes"] / 1e6:.0f} MB. To make one token, the
processor must read all of them from memory once. To make a token for each of {last["batch_size"]}
sequences in the same step, it must read them once, too. That is the whole trick.

{sweep_table(record)}

![step time, tokens/s and time between tokens against batch size, SmolLM2](figures/first-batch-batch-size.svg)

A step takes about **{ms(line["base_s"])} ms + {ms(line["per_sequence_s"])} ms x n** (off by
{line["mean_error"]:.0%} on average). {last["batch_size"]} sequences take
{last["step_s"] / first["step_s"]:.1f} times as long as one, and give
{last["tokens_per_s"] / first["tokens_per_s"]:.1f} times as many tokens/s. The first term is paid once a step, so
sharing
it pays until n is about {line["base_s"] / line["per_sequence_s"]:.0f}, where both terms are equal; after that each
sequence costs nearly its own share and the curve flattens. The dashed line is what the machine cannot beat: at small n
it is reading the weights, at large n arithmetic.

The built-in model's weights, {small["batch_sizes"]["work"]["weight_bytes"] / 1e6:.0f} MB, fit into the processor's
caches, and reading them takes next to nothing. Its fixed term is mostly the work around the pass: planning in Python,
waking threads. The shape is the same, {ms(small_line["base_s"])} ms + {ms(small_line["per_sequence_s"])} ms x n (off by
{small_line["mean_error"]:.0%}), and its best batch size here is {best["batch_size"]}: {best["tokens_per_s"]:,.0f}
tokens/s against {small_points[0]["tokens_per_s"]:,.0f} alone.

![the same for the built-in model](figures/first-batch-built-in-batch-size.svg)

## Why can it make latency worse?

Three ways, and each has its number.

1. **Longer steps.** Everyone in a batch waits for the whole step. Between two tokens of one SmolLM2 sequence lie
   {ms(first["itl_p50_s"])} ms alone and {ms(last["itl_p50_s"])} ms among {last["batch_size"]}. The machine is
   faster, each
   reader is slower.
2. **Other people's prompts.** A prompt of hundreds of tokens is computed in the same steps in which the others
decode, and
   makes those steps long. Under the load below, with `best-fit` at {busy["rate_share"]:.0%} of the capacity, half
   of the gaps
   between tokens are under {ms(busy["itl"]["p50"])} ms, but one in a hundred is over {ms(busy["itl"]["p99"])} ms.
   `max_num_batched_tokens` (here {setting["max_num_batched_tokens"]}) and `itl_limit_ms` bound this: prompts are
   cut into
   chunks.
3. **Waiting to be let in.** Seats and memory are limited. From {low:.0%} to {high:.0%} of the capacity the p99 of
TTFT with
   `best-fit` goes from {ms(calm["ttft"]["p99"])} to {ms(at(record, "best-fit", high)["ttft"]["p99"])} ms, and
   with `static`
   from {ms(at(record, "static", low)["ttft"]["p99"])} to {ms(at(record, "static", high)["ttft"]["p99"])} ms.

The load: {record["num_requests"]} requests, Poisson arrivals, {setting["workload_in_words"]}. Capacity is what
`best-fit` finishes with {setting["max_num_seqs"] // 2} requests in it all the time:
{record["capacity_requests_per_s"]:.3g} requests/s
({record["capacity_after_requests_per_s"]:.3g} when measured again at the end). The KV pool is small on purpose,
{setting["num_blocks"]} blocks of {setting["block_size"]} tokens: two of the longest requests fill it. With a pool
that nobody
fills, nobody waits for it and the policies are alike.

{load_table(record, sorted({low, near, high}))}

![TTFT and time between tokens against request rate](figures/first-batch-latency.svg)

Above 100 % there is no steady state: the queue grows for as long as the load lasts, so those numbers tell of this
run's length
as much as of the policy.

## How does a scheduler choose a batch?

Each step it asks for every waiting request: is there a seat, are there tokens left in this step, is there memory
for its
tokens, now and later? What it does when the answer is no is the policy.

* **static**: form a batch, run it until its *last* member ends, form the next. Simple, and what a plain loop over
batches
  does. Seats of those who ended early stay empty, and whoever comes later waits for the slowest.
* **continuous, FIFO** (`fifo`): whoever ends leaves at once, and the next in line joins in the next step. If the
first in line
  does not fit, everyone stops behind it, also a small one that would fit.
* **continuous, best fit** (`best-fit`): the first in line that does not fit gets a *reserved start*, computed
from when the
  running requests will end. Others may pass only if that start does not move, and of those the best fitting ones.

Beside this stands *how much memory a request is counted to need*. `optimistic` counts what it has now, lets many
in, and
when memory runs out preempts someone, who is computed again. `guaranteed` counts `max_tokens`, never preempts,
and leaves
room unused. `predicted` counts what recent outputs needed. (`fifo` here is optimistic, as most engines are;
`fifo-predicted` and `best-fit` predict.)

What requests waited for at {near:.0%}, the scheduler's own account:

* `static`: {waited_for(at(record, "static", near))}
* `fifo`: {waited_for(at(record, "fifo", near))}
* `fifo-predicted`: {waited_for(at(record, "fifo-predicted", near))}
* `best-fit`: {waited_for(at(record, "best-fit", near))}

![seconds of waiting by reason against request rate](figures/first-batch-waiting.svg)

`static_batch` is waiting for a batch to end; `behind_head` waiting behind one that does not fit; `kv_now` and
`kv_peak` for
memory, now or when the running ones grow; `would_delay_head` is the promise at work: it would fit, but would move
the
reserved start. `before_submit` and `mid_step` are the step that was running when the request came.

All policies at {record["plane_rate"]:.0%}, {runs}:

{plane_table(record)}

![short prompts' p99 against long prompts' p99](figures/first-batch-plane.svg)

* {compared(record, "fifo", "static")}.
* {compared(record, "best-fit", "fifo")}.
* {compared(record, "best-fit-guaranteed", "fifo-guaranteed")}.
* {compared(record, "shortest", "best-fit")}.

{repeated(record, near)}.
And with {record["num_requests"]} requests a run, about {setting["workload"]["long_share"]:.0%} of them long, a p99 is
nearly the worst single request. `oracle` knows each output's length beforehand; a real scheduler does not, which is why
it is here: it shows what is left to gain.

The requests that waited longest, one row each, coloured by what they waited for:

![the requests that waited longest](figures/first-batch-worst.svg)

Ask the same of any request of your own: `print(engine.explain(request_id))`. To try other loads, pools or
policies without
waiting for a model, measure your machine once and simulate:

    pyengine bench --save-profile mine.json
    pyengine simulate --profile mine.json --policies "static fifo best-fit"
"""


def kept_numbers() -> tuple[Run, Run]:
    """Of the last time: SmolLM2's run and the built-in model's."""
    record, small = (
        json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("first-batch", "first-batch-built-in")
    )
    return record, small


def made_page() -> str:
    """The page from the numbers of the last time."""
    return reflowed(page(*kept_numbers()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep the numbers and figures of the last time")
    parser.add_argument("--seconds", type=float, default=12.0, help="as of pyengine bench batching")
    parser.add_argument("--seeds", type=int, default=1, help="as of pyengine bench batching")
    parser.add_argument("--num-threads", type=int, help="threads of the engine, where the machine is not all free")
    arguments = parser.parse_args()
    if not arguments.keep:
        options = [] if arguments.num_threads is None else ["--num-threads", str(arguments.num_threads)]
        load = ["--seconds", f"{arguments.seconds:g}", "--seeds", str(arguments.seeds), *LOAD]
        measure([*COMMAND, *load, *options], "first-batch")
        measure([*SMALL_COMMAND, *options], "first-batch-built-in")
    record, small = kept_numbers()
    PAGE.write_text(made_page(), encoding="utf-8")
    size = sum(path.stat().st_size for path in FIGURES.glob("first-batch*.svg"))
    print(f"{PAGE.relative_to(ROOT)}; figures {size / 1e3:.0f} kB; others used {record['others']}, {small['others']}")
    if size > MOST_BYTES:
        sys.exit(f"The figures are larger than {MOST_BYTES / 1e3:.0f} kB.")


if __name__ == "__main__":
    main()
