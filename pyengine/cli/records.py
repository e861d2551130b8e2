"""Outputs as JSON objects, one a line, and the figures of --stats."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from pyengine.cli.terminal import note
from pyengine.errors import PyEngineError
from pyengine.outputs import Completion, RequestMetrics, RequestOutput, TokenLogprobs
from pyengine.text import Tokenizer


def json_line(item_id: Any, prompt: Any, output: RequestOutput, tokenizer: Tokenizer | None) -> str:
    """One output as one line of JSON: id, prompt, outputs, prompt_logprobs where asked for, metrics, error."""
    record: dict[str, Any] = {
        "id": item_id,
        "prompt": prompt,
        "outputs": [_completion(completion, tokenizer) for completion in output.outputs],
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [entry and _token_logprobs(entry, tokenizer) for entry in output.prompt_logprobs]
    metrics = asdict(output.metrics)
    del metrics["arrived_at"]  # a reading of this process's own clock
    record["metrics"] = metrics
    record["error"] = None if output.error is None else error_record(output.error)
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def error_record(error: PyEngineError) -> dict[str, Any]:
    """An error's type, message, and those of its attributes that JSON can hold."""
    record: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    for name in ("field", "value", "limit", "need", "usable", "unit"):
        if hasattr(error, name):
            value = getattr(error, name)
            is_plain = value is None or isinstance(value, (str, int)) or _is_finite_float(value)
            record[name] = value if is_plain else repr(value)
    return record


def note_stats(metrics: Sequence[RequestMetrics], *, num_failed: int, load_s: float, run_s: float) -> None:
    """Write counts, rates and waiting times of a run to standard error."""
    made = sum(entry.completion_tokens for entry in metrics)
    computed = sum(entry.prompt_tokens for entry in metrics)
    cached = sum(entry.cached_tokens for entry in metrics)
    again = sum(entry.recomputed_tokens for entry in metrics)
    gaps = [later - earlier for entry in metrics for times in entry.token_times_s for earlier, later in pairwise(times)]
    failed = f", {num_failed} failed" if num_failed else ""
    note(f"requests        {len(metrics) + num_failed}{failed}")
    note(f"prompt          {computed:,} tokens, {cached:,} of them cached")
    note(f"output          {made:,} tokens in {run_s:.2f} s: {made / run_s if run_s > 0 else 0.0:,.1f} tokens/s")
    note(f"queue           {_median_and_worst([entry.queue_s for entry in metrics])}")
    note(f"first token     {_median_and_worst([e.first_token_s for e in metrics if e.first_token_s is not None])}")
    note(f"between tokens  {_median_and_worst(gaps)}")
    note(f"preemptions     {sum(entry.preemptions for entry in metrics)}, {again:,} tokens computed again")
    note(f"loading         {load_s:.2f} s")


def _median_and_worst(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    return f"median {statistics.median(seconds) * 1e3:.1f} ms, worst {max(seconds) * 1e3:.1f} ms"


def _completion(completion: Completion, tokenizer: Tokenizer | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        record["logprobs"] = [_token_logprobs(entry, tokenizer) for entry in completion.logprobs]
        record["cumulative_logprob"] = _finite(completion.cumulative_logprob)
    return record


def _token_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, Any]:
    def one(token_id: int, logprob: float) -> dict[str, Any]:
        token = None if tokenizer is None else tokenizer.id_to_token(token_id)
        return {"token_id": token_id, "token": token, "logprob": _finite(logprob)}

    return {**one(entry.token_id, entry.logprob), "top": [one(*pair) for pair in entry.top]}


def _finite(value: float | None) -> float | None:
    """JSON has no infinities; a log-probability of minus infinity becomes null."""
    return value if value is not None and math.isfinite(value) else None


def _is_finite_float(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
