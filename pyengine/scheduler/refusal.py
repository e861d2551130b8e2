"""Refusal: who may not come in, or may wait no longer, and what he is told. It changes nothing."""

from __future__ import annotations

from pyengine.config import MAX_PRIORITY, SchedulerConfig
from pyengine.errors import DeadlinePassed, InvalidRequest, NeverFits, QueueFull, TTFTUnreachable
from pyengine.kv_cache.blocks import num_blocks_for
from pyengine.request import Request
from pyengine.scheduler.latency import retry_after_ns
from pyengine.scheduler.step_time import StepFeatures, StepTimeModel


def clamp_max_tokens(config: SchedulerConfig, num_prompt_tokens: int, max_tokens: int | None) -> tuple[int, bool]:
    """The limit that a prompt of this length gets, and whether it is lower than the one asked for (None: no limit).

    An empty pool holds num_blocks * block_size tokens; the last output token needs no KV.
    Raises NeverFits if not even one token can be made.
    """
    if num_prompt_tokens >= config.max_context:
        raise NeverFits(
            f"The prompt has {num_prompt_tokens} tokens and needs room for one more; the context is "
            f"{config.max_context} tokens.",
            need=num_prompt_tokens + 1,
            usable=config.max_context,
            unit="tokens",
        )
    needed = num_blocks_for(num_prompt_tokens, config.block_size)
    if needed > config.num_blocks:
        raise NeverFits(
            f"The prompt of {num_prompt_tokens} tokens needs {needed} KV blocks of {config.block_size} tokens; "
            f"the whole pool has {config.num_blocks}. Give the KV cache more memory or shorten the prompt.",
            need=needed,
            usable=config.num_blocks,
        )
    most = min(config.max_context - num_prompt_tokens, config.num_blocks * config.block_size - num_prompt_tokens + 1)
    if max_tokens is None:
        return most, False
    return min(max_tokens, most), max_tokens > most


def check_new(config: SchedulerConfig, request: Request, first: Request) -> None:
    """Raise InvalidRequest or NeverFits for what cannot run here, ValueError for one that is not like `first`."""
    if request.arrival_seq >= 0 or request.is_finished:
        raise ValueError(f"{request!r} was added before.")
    if request.num_prompt_tokens < 1:
        raise InvalidRequest("The prompt is empty; it must have at least one token.", field="prompt", limit=1)
    if request.token_ids != first.token_ids or request.cache_salt != first.cache_salt:
        raise ValueError(f"{request!r} has another prompt or salt than the others of its submit.")
    if not 0 <= request.priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority is {request.priority!r}; it must be an integer from 0, which is served first, to "
            f"{MAX_PRIORITY}.",
            field="priority",
            value=request.priority,
            limit=MAX_PRIORITY,
        )
    most, _ = clamp_max_tokens(config, request.num_prompt_tokens, None)
    if not 1 <= request.max_tokens <= most:
        raise InvalidRequest(
            f"max_tokens is {request.max_tokens}; with a prompt of {request.num_prompt_tokens} tokens it must be "
            f"from 1 to {most}.",
            field="max_tokens",
            value=request.max_tokens,
            limit=most,
        )


def check_never_too_many(limit: int, num_new: int) -> None:
    """Raise InvalidRequest for more sequences in a submit than a queue of this limit ever holds."""
    if num_new > limit:
        raise InvalidRequest(
            f"n is {num_new}; max_queue is {limit}, so that the completions of one prompt never find room.",
            field="n",
            value=num_new,
            limit=limit,
        )


def queue_full(limit: int, num_waiting: int, num_new: int, estimate_ns: int | None) -> QueueFull:
    """`num_new` more find no room; one that came last would have its first token in `estimate_ns`."""
    return QueueFull(
        f"{num_waiting} requests wait and {num_new} more were submitted; max_queue is {limit}.",
        limit=limit,
        retry_after_s=None if estimate_ns is None else estimate_ns / 1e9 / max(1, num_waiting),
    )


def check_itl(step_time: StepTimeModel, limit_ns: int | None) -> None:
    """Raise InvalidRequest for a limit that not even a pass with one request alone keeps, if that is known."""
    if limit_ns is None or not step_time.is_fitted:
        return
    alone_ns = step_time.predict(StepFeatures(decode_seqs=1))
    if alone_ns > limit_ns:
        raise InvalidRequest(
            f"itl_limit_ms is {limit_ns / 1e6:g}; a pass with a single decode takes {alone_ns / 1e6:.2f} ms.",
            field="itl_limit_ms",
            value=limit_ns / 1e6,
            limit=alone_ns / 1e6,
        )


def check_ttft(limit_ns: int, estimate_ns: int | None, is_idle: bool) -> None:
    """Raise TTFTUnreachable if the first token is expected later; `is_idle`: nobody else is there."""
    if estimate_ns is None or estimate_ns <= limit_ns:
        return
    if is_idle:
        retry_s, hint = None, "Nothing else runs, so that it can never be kept: raise it."
    else:
        retry_s = retry_after_ns(estimate_ns, limit_ns) / 1e9
        hint = f"Try again in {retry_s:.3g} s."
    raise TTFTUnreachable(
        f"The first token is expected in {estimate_ns / 1e9:.3g} s; ttft_limit_ms is {limit_ns / 1e6:g}. {hint}",
        limit_s=limit_ns / 1e9,
        estimate_s=estimate_ns / 1e9,
        retry_after_s=retry_s,
    )


def started_too_late(request: Request, limit_ns: int, now_ns: int) -> DeadlinePassed:
    """The limit on the first token of `request` has passed, and it has not started."""
    limit_s, waited_s = limit_ns / 1e9, (now_ns - request.arrival_ns) / 1e9
    return DeadlinePassed(
        f"Request {request.request_id!r} waited {waited_s:.3f} s without being started; its limit on the first token "
        f"is {limit_s:g} s.",
        limit_s=limit_s,
        waited_s=waited_s,
    )


def held_too_long(request: Request, until_ns: int, now_ns: int) -> DeadlinePassed:
    """`request` was held until the last moment at which it might be."""
    waited_s = (now_ns - request.queued_since_ns) / 1e9
    return DeadlinePassed(
        f"Request {request.request_id!r} was held for {waited_s:.3f} s, and may not be held any longer.",
        limit_s=(until_ns - request.queued_since_ns) / 1e9,
        waited_s=waited_s,
    )
