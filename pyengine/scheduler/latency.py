"""Latency: how many prompt tokens a step may carry beside its decodes, and when a first token can be expected."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pyengine.scheduler.step_time import StepFeatures, StepTimeModel, chunk_pairs
from pyengine.scheduler.verdict import Reason

FLOOR_STEPS = 8


class Budget(NamedTuple):
    """Prompt tokens of one step.

    Attributes:
        tokens: most of them, >= 0.
        bound_by: why there are not more: TOKEN_BUDGET or LATENCY_LIMIT.
        is_forced: whether the prefill floor raised them above what the latency limit leaves.
    """

    tokens: int
    bound_by: Reason
    is_forced: bool = False


class Latency(Protocol):
    """Bounds the length of a step through its prompt tokens; decodes are never held back."""

    def budget(
        self, num_decodes: int, kv_tokens: int, limit_ns: int | None, head_context: int, has_prefills: bool = True
    ) -> Budget:
        """Most prompt tokens of a step.

        Args:
            num_decodes: requests that decode in it, and so wait for it.
            kv_tokens: tokens with KV of these.
            limit_ns: the tightest inter-token limit among them; None: none.
            head_context: tokens with KV of the request whose prompt is computed first.
            has_prefills: whether anyone has prompt tokens to compute.
        """
        ...

    def prefill_budget(self, num_decodes: int) -> int:
        """`budget` without limits, as a number."""
        ...


class NoLimit:
    """Whatever max_num_batched_tokens leaves."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_num_batched_tokens = max_num_batched_tokens

    def budget(
        self, num_decodes: int, kv_tokens: int, limit_ns: int | None, head_context: int, has_prefills: bool = True
    ) -> Budget:
        return Budget(self._max_num_batched_tokens - num_decodes, Reason.TOKEN_BUDGET)

    def prefill_budget(self, num_decodes: int) -> int:
        return self._max_num_batched_tokens - num_decodes


class StepTimeLimit:
    """Keeps a step within the tightest inter-token limit, by the upper estimate of a step-time model.

    It binds only where somebody decodes: nobody else waits for the step to end.

    * The model is asked before it is fitted, too. As what a chunk costs must not be extrapolated far, a step gets at
      most twice the prompt tokens that any step had before, from one block on. Given coefficients are believed.
    * Where the decodes alone take as long as the limit, there would be no prompt tokens for ever. So every FLOOR_STEPS
      steps that have prompts to compute get one block of tokens together. A step that this pushes over the limit is
      counted in `num_forced_steps`.
    """

    def __init__(self, max_num_batched_tokens: int, block_size: int, model: StepTimeModel) -> None:
        self._max_num_batched_tokens = max_num_batched_tokens
        self._block_size = block_size
        self._model = model
        self._floor_steps = 0
        self._floor_tokens = 0
        self.num_forced_steps = 0

    def budget(
        self, num_decodes: int, kv_tokens: int, limit_ns: int | None, head_context: int, has_prefills: bool = True
    ) -> Budget:
        room = self._max_num_batched_tokens - num_decodes
        if limit_ns is None or num_decodes == 0 or not has_prefills:
            self._floor_steps = self._floor_tokens = 0
            return Budget(room, Reason.TOKEN_BUDGET)
        tokens = self._within(limit_ns, num_decodes, kv_tokens, head_context, room)
        self._floor_steps += 1
        self._floor_tokens += tokens
        floor = min(self._block_size, room)
        is_forced = self._floor_steps == FLOOR_STEPS and self._floor_tokens < self._block_size and tokens < floor
        if is_forced:
            tokens = floor
            self.num_forced_steps += 1
        if self._floor_tokens >= self._block_size or self._floor_steps == FLOOR_STEPS:
            self._floor_steps = self._floor_tokens = 0
        return Budget(tokens, Reason.LATENCY_LIMIT if tokens < room else Reason.TOKEN_BUDGET, is_forced)

    def prefill_budget(self, num_decodes: int) -> int:
        return self._max_num_batched_tokens - num_decodes

    def _within(self, limit_ns: int, num_decodes: int, kv_tokens: int, context: int, room: int) -> int:
        model = self._model
        most = room
        if not model.is_given:
            most = min(room, max(self._block_size, 2 * model.largest_prefill_seen))
        if not model.has_estimate:
            return most
        return model.largest_chunk(limit_ns, num_decodes, kv_tokens, context, most)


def estimate_ttft_ns(
    model: StepTimeModel,
    *,
    num_prompt_tokens: int,
    num_cached_tokens: int = 0,
    num_tokens_ahead: int,
    tokens_per_step: int,
    num_decodes: int,
    kv_tokens: int,
    steps_until_room: int = 0,
) -> int | None:
    """Expected time to the first token of a request that is submitted now, in ns; None while the model is not fitted.

    The prompts ahead and then its own are computed at `tokens_per_step`, beside the decodes of now; and it does not
    start before a seat and its blocks are expected to be free. All these steps cost what their decodes cost, and the
    prompt tokens what they cost, wherever the steps' ends fall.

    Args:
        num_prompt_tokens / num_cached_tokens: its own, and how many of these need not be computed.
        num_tokens_ahead: prompt tokens that are to be computed before: running prefills and those first in order.
        tokens_per_step: prompt tokens that a step gets; >= 1.
        num_decodes / kv_tokens: the requests that decode now, and their tokens with KV.
        steps_until_room: steps until its seat and its blocks are expected to be free.
    """
    if not model.is_fitted:
        return None
    num_own = max(1, num_prompt_tokens - num_cached_tokens)
    steps_before = max(-(-num_tokens_ahead // tokens_per_step), steps_until_room)
    steps = steps_before + -(-num_own // tokens_per_step)
    without_prompts = model.predict(StepFeatures(0, num_decodes, kv_tokens, 0))
    prompts = StepFeatures(num_own + num_tokens_ahead, 0, 0, chunk_pairs(num_own, num_cached_tokens))
    return steps * without_prompts + model.predict(prompts) - model.predict(StepFeatures())


def retry_after_ns(estimate_ns: int, limit_ns: int) -> int:
    """How long to wait before a request with this limit on its first token can be expected to meet it.

    What is ahead now is worked off as time goes by, if nobody else comes.
    """
    return max(0, estimate_ns - limit_ns)
