"""The options that commands share, as data: one dataclass field is one option. What a value may be, the engine says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from pyengine.cli.process import exit_code_of
from pyengine.errors import InvalidRequest
from pyengine.sampling_params import SamplingParams

_SAMPLING, _END, _ENGINE, _SCHEDULER = "Sampling", "Length and end", "Engine", "Scheduler"

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A built-in name, a Hugging Face folder, or a hub id. A name that is not on this machine yet is fetched "
        "first.",
        show_default=False,
    ),
]


def _option(panel: str, help_text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=False, metavar=metavar)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """One option for each field of SamplingParams. None: not given, so the model's default or the neutral value."""

    max_tokens: Annotated[
        int | None,
        _option(
            _END,
            "Most tokens to make. Default: the model's own, else as many as context and KV pool hold.",
            "--max-tokens",
            "-t",
        ),
    ] = None
    min_tokens: Annotated[int | None, _option(_END, "No end before this many tokens.")] = None
    stop: Annotated[
        list[str] | None, _option(_END, "End before this text. May be given several times.", metavar="TEXT")
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, _option(_END, "End at this token id. May be given several times.", "--stop-token-id")
    ] = None
    ignore_eos: Annotated[bool, _option(_END, "Go on after the end-of-sequence token.", "--ignore-eos")] = False
    n: Annotated[int | None, _option(_SAMPLING, "Completions for each prompt. Default: 1.", "--n", "-n")] = None
    temperature: Annotated[float | None, _option(_SAMPLING, "0 is greedy. Default: the model's own, else 1.")] = None
    top_k: Annotated[int | None, _option(_SAMPLING, "Keep the k most likely tokens; 0 keeps all.")] = None
    top_p: Annotated[
        float | None, _option(_SAMPLING, "Keep the smallest set of most likely tokens with this mass, in (0, 1].")
    ] = None
    min_p: Annotated[
        float | None, _option(_SAMPLING, "Keep tokens at least this times as likely as the most likely one.")
    ] = None
    repetition_penalty: Annotated[
        float | None, _option(_SAMPLING, "Above 1: less of what stands in prompt or output.")
    ] = None
    presence_penalty: Annotated[
        float | None, _option(_SAMPLING, "Subtracted from the logits of tokens in the output, -2 to 2.")
    ] = None
    frequency_penalty: Annotated[
        float | None, _option(_SAMPLING, "Subtracted for each time a token is in the output, -2 to 2.")
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        _option(_SAMPLING, "Add to a token's logit, -100 to 100. May be given several times.", metavar="ID=VALUE"),
    ] = None
    seed: Annotated[
        int | None, _option(_SAMPLING, "The same seed gives the same text. Default: a fresh one.", "--seed", "-s")
    ] = None
    logprobs: Annotated[
        int | None, _option(_SAMPLING, "With --json: log-probabilities of each token and of so many likely ones.")
    ] = None
    prompt_logprobs: Annotated[
        int | None, _option(_SAMPLING, "With --json: the same for the tokens of the prompt.")
    ] = None
    show_special_tokens: Annotated[
        bool, _option(_SAMPLING, "Keep special tokens in the text.", "--show-special-tokens")
    ] = False

    def given(self) -> dict[str, Any]:
        """Names and values of what was given, as SamplingParams has them. Raises InvalidRequest."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in values.items() if value is not None and value != []}
        if "logit_bias" in given:
            given["logit_bias"] = _parsed_bias(given["logit_bias"])
        given["skip_special_tokens"] = not given.pop("show_special_tokens")
        return given

    def refuse_logprobs(self, why: str) -> None:
        """Raise InvalidRequest if --logprobs or --prompt-logprobs was given."""
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                raise InvalidRequest(f"--{name.replace('_', '-')} is {value}, but {why}", field=name, value=value)

    def params(self) -> SamplingParams:
        """The sampling parameters that were given. Raises InvalidRequest."""
        return SamplingParams(**self.given())


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One option for each setting of Engine but its model. None: the engine's own default."""

    device: Annotated[str | None, _option(_ENGINE, "auto, cpu or cuda. Default: auto.")] = None
    dtype: Annotated[
        str | None,
        _option(_ENGINE, "Of the weights: auto (as stored), float32, float16 or bfloat16. Default: auto."),
    ] = None
    max_num_seqs: Annotated[int | None, _option(_ENGINE, "Most sequences in one pass. Default: 64.")] = None
    max_num_batched_tokens: Annotated[
        int | None, _option(_ENGINE, "Most tokens in one pass; longer prompts are computed in chunks. Default: 1024.")
    ] = None
    kv_cache_memory: Annotated[
        str | None,
        _option(
            _ENGINE,
            "Size of the KV pool: bytes, such as 1GiB, a part of the free memory, such as 0.5, or auto.",
            metavar="SIZE",
        ),
    ] = None
    block_size: Annotated[int | None, _option(_ENGINE, "Tokens in one KV block. Default: 16.")] = None
    max_context: Annotated[
        int | None, _option(_ENGINE, "Most tokens of a sequence, prompt and output. Default: the model's own.")
    ] = None
    overlap: Annotated[
        bool | None,
        _option(
            _ENGINE,
            "Launch a pass before the tokens of the last one are here. Default: on a GPU.",
            "--overlap/--no-overlap",
        ),
    ] = None
    deterministic: Annotated[
        bool | None,
        _option(
            _ENGINE,
            "On a GPU too, the same bits in any batch; slower there. Default: off.",
            "--deterministic/--no-deterministic",
        ),
    ] = None
    num_threads: Annotated[int | None, _option(_ENGINE, "Threads. Default: every processor we may use.")] = None
    batching: Annotated[
        str | None,
        _option(_SCHEDULER, "continuous, or static: form a batch, run it, form the next. Default: continuous."),
    ] = None
    order: Annotated[
        str | None,
        _option(_SCHEDULER, "Who is first: fifo, priority, fair (by tenant), deadline or shortest. Default: fifo."),
    ] = None
    packing: Annotated[
        str | None,
        _option(
            _SCHEDULER,
            "When the first does not fit: none, nobody passes, or best_fit, those who do not delay it. "
            "Default: best_fit.",
        ),
    ] = None
    capacity: Annotated[
        str | None,
        _option(
            _SCHEDULER,
            "Who fits: guaranteed, nobody is ever preempted; predicted, by recent output lengths; optimistic, by the "
            "present. Default: predicted.",
        ),
    ] = None
    capacity_quantile: Annotated[
        float | None,
        _option(_SCHEDULER, "predicted: the part of recent outputs that is covered, in (0, 1]. Default: 0.8."),
    ] = None
    watermark: Annotated[
        float | None,
        _option(_SCHEDULER, "Unless guaranteed: the part of the pool that a start leaves free. Default: 0.01."),
    ] = None
    victim: Annotated[
        str | None, _option(_SCHEDULER, "Who is preempted: cheapest to compute again, or latest. Default: cheapest.")
    ] = None
    prefix_caching: Annotated[
        bool | None,
        _option(
            _SCHEDULER,
            "Keep KV for later requests that begin with the same tokens. Default: yes.",
            "--prefix-caching/--no-prefix-caching",
        ),
    ] = None
    itl_limit_ms: Annotated[
        float | None, _option(_SCHEDULER, "Longest time between two tokens; prompt chunks are cut to keep it.")
    ] = None
    ttft_limit_ms: Annotated[
        float | None, _option(_SCHEDULER, "Longest time to the first token; what cannot keep it is refused.")
    ] = None
    max_queue: Annotated[int | None, _option(_SCHEDULER, "Most requests that wait. Default: no limit.")] = None
    max_batch_wait_ms: Annotated[
        float | None, _option(_SCHEDULER, "Wait so long for company before a pass begins. Default: 0.")
    ] = None
    aging_barrier_s: Annotated[
        float | None, _option(_SCHEDULER, "best_fit: nobody passes one that has waited so long. Default: 10.")
    ] = None
    bypass_budget: Annotated[
        float | None,
        _option(_SCHEDULER, "best_fit: prompt tokens that may pass one, in multiples of its own. Default: 4."),
    ] = None
    window: Annotated[int | None, _option(_SCHEDULER, "Waiting requests that a step examines. Default: 64.")] = None
    priority_promotion_s: Annotated[
        float | None, _option(_SCHEDULER, "A waiting request moves up one class each time. Default: 30.")
    ] = None

    def given(self) -> dict[str, Any]:
        """Names and values of what was given, as Engine has them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in values.items() if value is not None}
        if "kv_cache_memory" in given:
            given["kv_cache_memory"] = _number_or_text(given["kv_cache_memory"])
        return given


def command(function: Callable[..., int]) -> Callable[..., None]:
    """Make a typer command of a function: each parameter that is an options dataclass stands for its fields.

    The function returns the exit code; errors and Ctrl-C are turned into theirs (see exit_code_of).
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if inspect.isclass(hint) and is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += _parameters_of(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        options = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        code = exit_code_of(lambda: function(**values, **options))
        raise typer.Exit(code)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameters_of(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(group)
    ]


def _parsed_bias(entries: Sequence[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for entry in entries:
        token_id, _, value = entry.partition("=")
        try:
            bias[int(token_id)] = float(value)
        except ValueError as error:
            raise InvalidRequest(
                f"--logit-bias is {entry!r}; write a token id and a number, for example 15=-2.5.",
                field="logit_bias",
                value=entry,
            ) from error
    return bias


def _number_or_text(size: str) -> float | str:
    """A part of the free memory such as "0.5" as a number; anything else stays text for the engine to read."""
    try:
        number = float(size)
    except ValueError:
        return size
    return number if 0.0 < number < 1.0 else size
