"""The typer application: commands, their options and their help; each command imports what it needs when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pyengine.cli.options import EngineOptions, Model, SamplingOptions, command
from pyengine.cli.simulate_options import DeviceOptions, WorkloadOptions
from pyengine.errors import InvalidRequest

CHAT_MODEL = "smollm2-135m-instruct"
_OUTPUT = "Output"

app = typer.Typer(
    name="pyengine",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Stats = Annotated[bool, typer.Option("--stats", help="Rates and times, on standard error.", rich_help_panel=_OUTPUT)]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Say which model, device and defaults are used, also without a terminal.",
        rich_help_panel=_OUTPUT,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.", rich_help_panel=_OUTPUT)]


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from pyengine.cli.info import package_version

        sys.stdout.write(f"pyengine {package_version()}\n")
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 done; 1 the model, the device or a prompt failed; 2 the command line or an input file is "
    "wrong; 130 Ctrl-C; 141 the reader of the output went away."
)
def pyengine(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run language models on this machine: many prompts at a time, without PyTorch."""


@app.command(
    epilog="Examples:\n\n"
    'pyengine generate "Once upon a time"\n\n'
    'pyengine generate "A fox" "A bear" --temperature 0.8 --seed 7\n\n'
    "pyengine generate --file prompts.jsonl --json > outputs.jsonl\n\n"
    "cat letter.txt | pyengine generate --model ./my-model --max-tokens 100"
)
@command
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="Texts to continue; - reads one from standard input, which is also the default where it is a pipe.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Prompts from a file, - for standard input: one a line, blank lines skipped; or, if its name ends in "
            '.jsonl, one {"prompt": ..., "id": ..., "params": {...}} a line, where prompt is a text or a list of token '
            "ids, and id and params (which come on top of the options) may be left out.",
            show_default=False,
        ),
    ] = None,
    jsonl: Annotated[
        bool | None,
        typer.Option("--jsonl/--lines", help="What FILE holds, whatever its name.", show_default=False),
    ] = None,
    model: Model = None,
    echo: Annotated[
        bool, typer.Option("--echo/--no-echo", help="Show the prompt before its continuation.", rich_help_panel=_OUTPUT)
    ] = True,
    as_json: Json = False,
    stats: Stats = False,
    verbose: Verbose = False,
    *,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> int:
    """Continue texts: one is written as it is generated; several are one batch, written in order, --- between them."""
    from pyengine.cli.prompts import items_from_arguments, items_from_file, refuse_logprobs_of

    if file is None and jsonl is not None:
        option = "--jsonl" if jsonl else "--lines"
        raise InvalidRequest(f"{option} says what FILE holds; add --file FILE.", field="jsonl", value=jsonl)
    if not as_json:
        sampling.refuse_logprobs("without --json no log-probability is shown; add --json.")
    if file is not None and prompts:
        raise InvalidRequest("--file and prompts were both given; give one of them.", field="file", value=file)
    if file is not None:
        items = items_from_file(file, sampling.given(), is_jsonl=jsonl)
    else:
        items = items_from_arguments(prompts or _piped_prompt(), sampling.given())
    if not as_json:
        refuse_logprobs_of(items)
    from pyengine.cli.generate import Presentation, run_generate

    return run_generate(items, model, engine.given(), Presentation(as_json, echo, stats, verbose))


@app.command(
    epilog="Examples:\n\n"
    "pyengine chat\n\n"
    'pyengine chat "What is the capital of France?" --temperature 0\n\n'
    'cat report.txt | pyengine chat --system "Summarize what the user writes."'
)
@command
def chat(
    question: Annotated[
        str | None,
        typer.Argument(
            help="Answer this and leave; - reads it from standard input, which is also the default where it is a pipe.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="The system message.", show_default=False)
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="A built-in name, a Hugging Face folder, or a hub id. A name that is not on this machine yet is "
            "fetched first.",
        ),
    ] = CHAT_MODEL,
    stats: Stats = False,
    verbose: Verbose = False,
    *,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> int:
    """Talk with a chat model. Ctrl-C stops an answer, Ctrl-D leaves."""
    from pyengine.cli.prompts import argument_text, read_stdin

    sampling.refuse_logprobs("a chat shows no log-probabilities; use pyengine generate --json.")
    params = sampling.params()
    if params.n > 1:
        raise InvalidRequest(f"--n is {params.n}; a chat has one answer at a time.", field="n", value=params.n, limit=1)
    if question is None and not _is_stdin_terminal():
        question = "-"
    if question is not None:
        question = read_stdin() if question == "-" else argument_text(question)
        if not question.strip():
            raise InvalidRequest("The question is empty.", field="question", value=question)
    system = argument_text(system) if system is not None else None
    from pyengine.cli.chat import run_chat

    return run_chat(question, model, system, params, engine.given(), stats=stats, verbose=verbose)


@app.command(
    epilog="Examples:\n\npyengine info\n\npyengine info ./my-model --dtype float32\n\npyengine info --build --json"
)
@command
def info(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A built-in name, a Hugging Face folder, or a hub id. Default: the built-in model. A name that is not "
            "on this machine yet is fetched first.",
            show_default=False,
        ),
    ] = None,
    build: Annotated[
        bool, typer.Option("--build", help="Show what this build of pyengine is, instead of a model.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="Count as if served in it: auto, float32, float16 or bfloat16.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> int:
    """Show what a model is and what fits into this machine's memory. Loads no weights, but fetches a named model."""
    from pyengine.cli.info import run_build_info, run_info

    if build:
        if model is not None:
            raise InvalidRequest("--build shows no model; leave MODEL out.", field="model", value=model)
        if dtype is not None:
            raise InvalidRequest("--build shows no model; leave --dtype out.", field="dtype", value=dtype)
        return run_build_info(as_json=as_json)
    return run_info(model, dtype=dtype, as_json=as_json)


@app.command(
    epilog="Examples:\n\n"
    "pyengine simulate --rate 10 --seeds 5\n\n"
    "pyengine simulate trace.csv --profile h100-8b --policies 'static fifo best-fit best-fit,capacity_quantile=0.5'\n\n"
    "pyengine simulate --replicas 8 --router least-work --rate 60 --figures figures --figure-format html"
)
@command
def simulate(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            help="A CSV file with the columns arrival_s, prompt_tokens, output_tokens and, where wanted, tenant, "
            "priority, prefix_id, prefix_tokens, max_tokens. Without one, requests are made at random.",
            show_default=False,
        ),
    ] = None,
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            "-p",
            metavar="POLICIES",
            help="What to compare, separated by spaces: presets (--list shows them), settings such as "
            "order=shortest,packing=best_fit, or both: best-fit,capacity_quantile=0.5.",
        ),
    ] = "fifo best-fit",
    show_list: Annotated[bool, typer.Option("--list", help="Show the built-in profiles and policies.")] = False,
    long_from: Annotated[
        int | None,
        typer.Option(help="A prompt of so many tokens counts as long. Default: 4096.", rich_help_panel=_OUTPUT),
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", help="Processes for runs beside each other.", rich_help_panel=_OUTPUT)
    ] = 1,
    figures: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Draw figures into it. Needs the extra [bench].",
            rich_help_panel=_OUTPUT,
            show_default=False,
        ),
    ] = None,
    figure_format: Annotated[
        str, typer.Option(metavar="FORMAT", help="png, svg or html (one page).", rich_help_panel=_OUTPUT)
    ] = "png",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.", rich_help_panel=_OUTPUT)] = False,
    *,
    workload: WorkloadOptions,
    device: DeviceOptions,
) -> int:
    """Compare scheduler policies on a simulated device: the real scheduler, a virtual clock, no model."""
    from pyengine.cli.simulate import Report, list_names, run_simulate

    if show_list:
        return list_names(as_json=as_json)
    report = Report(as_json, figures, figure_format)
    return run_simulate(trace, policies, workload, device, report, long_from=long_from, jobs=jobs)


bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")


@bench.callback(
    invoke_without_command=True,
    epilog="Examples:\n\n"
    "pyengine bench batching --quick\n\n"
    "pyengine bench --save-profile mine.json && pyengine simulate --profile mine.json",
)
def bench_profile(
    context: typer.Context,
    save_profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Measure how long steps take with this model on this machine, and write the profile that "
            "pyengine simulate --profile reads.",
            show_default=False,
        ),
    ] = None,
    model: Model = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the weights: auto, float32, float16 or bfloat16. Default: auto.", show_default=False),
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option(help="Threads. Default: every processor we may use.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure.")] = 30.0,
) -> None:
    """Measure the engine on this machine: what batching gives and what it costs, and a profile for simulations."""
    from pyengine.cli.process import exit_code_of

    if context.invoked_subcommand is not None:
        if save_profile is not None:
            raise typer.BadParameter(
                "it is a command of its own; leave the other one out.", param_hint="--save-profile"
            )
        return
    if save_profile is None:
        raise typer.BadParameter("name a command or give --save-profile FILE.")
    settings = {"dtype": dtype, "num_threads": num_threads}

    def run() -> int:
        from pyengine.cli.bench import run_save_profile

        given = {name: value for name, value in settings.items() if value is not None}
        return run_save_profile(model, given, save_profile, seconds)

    raise typer.Exit(exit_code_of(run))


@bench.command(
    epilog="Examples:\n\n"
    "pyengine bench batching --quick\n\n"
    "pyengine bench batching --model smollm2-135m-instruct --seconds 30 --json numbers.json\n\n"
    "Figures need the extra [bench]: pip install 'pyengine-llm[bench]'."
)
@command
def batching(
    model: Model = None,
    quick: Annotated[bool, typer.Option("--quick", help="One or two minutes instead of five to eight.")] = False,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The report, one HTML page.", rich_help_panel=_OUTPUT)
    ] = "batching.html",
    numbers: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="All numbers.", rich_help_panel=_OUTPUT, show_default=False),
    ] = None,
    figures: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="The figures as SVG files too.", rich_help_panel=_OUTPUT, show_default=False
        ),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="The largest batch. Default: 64; quick: 32.", show_default=False)
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="PARTS",
            help="Request rates, as parts of the capacity that is measured. Default: 0.3,0.5,0.7,0.8,0.9,1.0,1.1; "
            "quick: 0.4,0.7,0.9,1.1.",
            show_default=False,
        ),
    ] = None,
    load: Annotated[
        bool, typer.Option("--load/--no-load", help="Requests that arrive at random, or only the batch sizes.")
    ] = True,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            "-p",
            metavar="POLICIES",
            help="Compared at each rate; written as for pyengine simulate. Default: static fifo fifo-predicted "
            "best-fit.",
            show_default=False,
        ),
    ] = None,
    plane: Annotated[
        str | None,
        typer.Option(
            metavar="POLICIES", help="Compared at 90 % of the capacity. Default: twelve of them.", show_default=False
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="How long the requests of one run take to come at the full rate. Default: 3; quick: 1.5.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Runs of each policy at 90 %. Default: 3; quick: 1.", show_default=False),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", "-s", help="The first seed. Default: 0.", show_default=False)
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda. Default: auto.", show_default=False)] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the weights: auto, float32, float16 or bfloat16. Default: auto.", show_default=False),
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option(help="Threads. Default: every processor we may use.", show_default=False)
    ] = None,
) -> int:
    """Show what batching does on this machine: speed, latency, waiting and its reasons, for several policies."""
    from pyengine.cli.bench import Files, plan_from, run_batching

    plan = plan_from(
        quick=quick,
        max_batch=max_batch,
        rates=rates,
        policies=policies,
        plane=plane,
        seconds=seconds,
        with_load=load,
        seeds=seeds,
        seed=seed,
    )
    settings = {"device": device, "dtype": dtype, "num_threads": num_threads}
    given = {name: value for name, value in settings.items() if value is not None}
    return run_batching(model, given, plan, Files(output, numbers, figures))


def _piped_prompt() -> list[str]:
    if _is_stdin_terminal():
        raise InvalidRequest(
            'There is no prompt: give one, for example pyengine generate "Once upon a time", or --file, or a pipe.',
            field="prompt",
        )
    return ["-"]


def _is_stdin_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
