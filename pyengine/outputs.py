"""What the engine gives back: completions, their log-probabilities, times and counts. Plain data."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pyengine.errors import PyEngineError

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the raw model (before temperature and filters), never positive.

    Attributes:
        token_id: the token that stands there.
        logprob: its natural log-probability.
        top: the most likely tokens as (token id, logprob), most likely first, ties by lower id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times (seconds since arrival unless named `_at`, which is `time.monotonic` seconds) and counts of one request.

    Attributes:
        arrived_at: when it was accepted.
        queue_s: all time in which it was accepted and not running (waiting, preempted, held).
        first_token_s: from arrival to the first token of any completion; None before it.
        token_times_s: for each completion, the time from arrival to each of its tokens.
        prompt_tokens / cached_tokens / completion_tokens: counts; cached ones were not computed again.
        preemptions: how often one of its sequences lost its KV blocks; recomputed_tokens is what that cost.
        max_tokens: the limit in force, after clamping.
        max_tokens_clamped: whether the limit asked for was lowered to what context and KV pool hold.
    """

    arrived_at: float
    queue_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None
    token_times_s: tuple[tuple[float, ...], ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    max_tokens: int = 0
    max_tokens_clamped: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated sequence.

    `token_ids` holds every token made, the one that ended the completion included; `text` leaves out the
    end-of-sequence or stop token and everything from a matched stop string on.
    `stop_reason` is the matched stop string or token id, None for the model's own end of sequence.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt. A refused request has one completion with finish_reason "error" and `error` set."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: PyEngineError | None = None

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.outputs[0].text if self.outputs else ""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """What one step added to one completion: deltas, and exactly one event with a finish_reason for each completion.

    `metrics` comes with a completion's last event, `output`, the whole answer, with the request's last event.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    metrics: RequestMetrics | None = None
    error: PyEngineError | None = field(default=None, compare=False)
    output: RequestOutput | None = None


def refused_output(prompt: Any, error: PyEngineError) -> RequestOutput:
    """The answer to a prompt that was not accepted, whatever it was."""
    is_ids = not isinstance(prompt, str) and isinstance(prompt, Sequence) and all(isinstance(i, int) for i in prompt)
    return RequestOutput(
        request_id="",
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=tuple(prompt) if is_ids else (),
        outputs=(Completion(0, "", (), finish_reason="error"),),
        finished=True,
        metrics=RequestMetrics(arrived_at=time.monotonic()),
        error=error,
    )
