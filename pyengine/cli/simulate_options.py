"""The options of `pyengine simulate`, as data: one dataclass field is one option. What a value may be, others say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

_WORKLOAD, _DEVICE = "Workload", "Device"


def _option(panel: str, help_text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=False, metavar=metavar)


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Which requests arrive when. None: not given."""

    requests: Annotated[
        int | None, _option(_WORKLOAD, "How many requests. Default: 2000; with TRACE all it has.", "--requests", "-n")
    ] = None
    arrivals: Annotated[
        str | None, _option(_WORKLOAD, "poisson, gamma, on-off or closed. Default: poisson.", metavar="KIND")
    ] = None
    rate: Annotated[float | None, _option(_WORKLOAD, "Requests a second, on average. Default: 8.")] = None
    cv: Annotated[
        float | None, _option(_WORKLOAD, "gamma: coefficient of variation of the gaps; 1 is Poisson. Default: 2.")
    ] = None
    on_s: Annotated[float | None, _option(_WORKLOAD, "on-off: mean seconds of a burst. Default: 10.")] = None
    off_s: Annotated[float | None, _option(_WORKLOAD, "on-off: mean seconds of silence. Default: 10.")] = None
    users: Annotated[int | None, _option(_WORKLOAD, "closed: how many wait for their answers. Default: 16.")] = None
    think_s: Annotated[
        float | None, _option(_WORKLOAD, "closed: mean seconds between an answer and the next request. Default: 5.")
    ] = None
    prompt_tokens: Annotated[
        str | None,
        _option(
            _WORKLOAD,
            "Lengths of prompts: a number, lognormal:MEDIAN:SIGMA, uniform:LOW:HIGH, or a mix. Default: "
            "0.9*lognormal:300:1+0.1*uniform:6000:20000.",
            metavar="LENGTHS",
        ),
    ] = None
    output_tokens: Annotated[
        str | None, _option(_WORKLOAD, "The same for outputs. Default: lognormal:180:0.64.", metavar="LENGTHS")
    ] = None
    max_tokens: Annotated[
        int | None,
        _option(_WORKLOAD, "The limit that requests declare, if they do not make more. Default: 2048."),
    ] = None
    prefixes: Annotated[
        int | None, _option(_WORKLOAD, "Prompts begin with one of so many shared prefixes. Default: 0, nothing shared.")
    ] = None
    prefix_share: Annotated[
        float | None,
        _option(
            _WORKLOAD,
            "The part of a prompt that is the shared prefix, where the trace has no prefix_tokens. Default: 0.5.",
        ),
    ] = None
    tenants: Annotated[int | None, _option(_WORKLOAD, "Requests belong to so many tenants. Default: 1.")] = None
    speed: Annotated[float | None, _option(_WORKLOAD, "TRACE: arrivals so many times as fast. Default: 1.")] = None
    seed: Annotated[int | None, _option(_WORKLOAD, "The first seed. Default: 0.", "--seed", "-s")] = None
    seeds: Annotated[
        int | None, _option(_WORKLOAD, "How many seeds; figures are then medians with their range. Default: 1.")
    ] = None


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What serves them. None: not given."""

    profile: Annotated[
        str | None,
        _option(
            _DEVICE,
            "A file that pyengine bench saved, or a built-in profile (--list shows them). Default: example.",
            metavar="PROFILE",
        ),
    ] = None
    replicas: Annotated[int | None, _option(_DEVICE, "So many of it, each with a scheduler. Default: 1.")] = None
    router: Annotated[
        str | None,
        _option(
            _DEVICE,
            "Which replica gets a request: round-robin, least-work or prefix-affinity. Default: round-robin.",
            metavar="ROUTER",
        ),
    ] = None
    num_blocks: Annotated[int | None, _option(_DEVICE, "KV blocks. Default: the profile's.")] = None
    jitter: Annotated[
        float | None, _option(_DEVICE, "Random part of a step's time, such as 0.05. Default: 0, exactly the profile's.")
    ] = None
    max_num_seqs: Annotated[int | None, _option(_DEVICE, "Most sequences in one pass. Default: 256.")] = None
    max_num_batched_tokens: Annotated[int | None, _option(_DEVICE, "Most tokens in one pass. Default: 2048.")] = None

    def settings(self) -> dict[str, int]:
        """Settings of the scheduler that were given, and the defaults of simulations."""
        given = {
            "num_blocks": self.num_blocks,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        defaults = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
        return {**defaults, **{name: value for name, value in given.items() if value is not None}}
