"""The latency limit keeps steps short, lets prompts make progress, and says which limit bound a step."""

from __future__ import annotations

import random

import pytest

from pyengine.scheduler.latency import FLOOR_STEPS, NoLimit, StepTimeLimit, estimate_ttft_ns, retry_after_ns
from pyengine.scheduler.step_time import StepFeatures, StepTimeModel, chunk_pairs
from pyengine.scheduler.verdict import Reason

MODEL = StepTimeModel((5e6, 30_000.0, 10_000.0, 35.0, 1.0))
MAX_TOKENS, BLOCK = 512, 16


def limit_of(model: StepTimeModel = MODEL) -> StepTimeLimit:
    return StepTimeLimit(MAX_TOKENS, BLOCK, model)


def test_without_a_limit_or_without_decodes_only_the_token_budget_binds() -> None:
    for latency in (limit_of(), NoLimit(MAX_TOKENS)):
        assert latency.budget(12, 1000, None, 0) == (500, Reason.TOKEN_BUDGET, False)
        assert latency.budget(0, 0, 1, 0) == (512, Reason.TOKEN_BUDGET, False)


def test_a_step_is_filled_up_to_the_limit_and_not_beyond() -> None:
    tokens, bound_by, is_forced = limit_of().budget(10, 5000, 12_000_000, 300)
    assert (bound_by, is_forced) == (Reason.LATENCY_LIMIT, False)
    assert MODEL.upper(StepFeatures(tokens, 10, 5000, chunk_pairs(tokens, 300))) <= 12_000_000
    assert MODEL.upper(StepFeatures(tokens + 1, 10, 5000, chunk_pairs(tokens + 1, 300))) > 12_000_000
    assert limit_of().budget(10, 5000, 60_000_000, 300).bound_by is Reason.TOKEN_BUDGET


def test_under_a_limit_that_leaves_nothing_prompts_get_one_block_every_eight_steps_and_it_is_counted() -> None:
    latency = limit_of()
    budgets = [latency.budget(10, 1000, 5_000_001, 0) for _ in range(3 * FLOOR_STEPS)]
    assert [budget.tokens for budget in budgets] == ([0] * (FLOOR_STEPS - 1) + [BLOCK]) * 3
    assert [budget.is_forced for budget in budgets] == [budget.tokens > 0 for budget in budgets]
    assert latency.num_forced_steps == 3
    assert all(budget.bound_by is Reason.LATENCY_LIMIT for budget in budgets)


@pytest.mark.parametrize("seed", range(5))
def test_in_any_sixteen_steps_with_prompts_at_least_a_block_is_given(seed: int) -> None:
    rng, latency = random.Random(seed), limit_of()
    given = [latency.budget(10, 1000, rng.choice([1, 5_170_000, 5_300_000]), 0).tokens for _ in range(400)]
    for first in range(len(given) - 2 * FLOOR_STEPS):
        assert sum(given[first : first + 2 * FLOOR_STEPS]) >= BLOCK


def test_the_floor_takes_no_more_than_the_token_budget_leaves() -> None:
    latency = StepTimeLimit(20, BLOCK, MODEL)
    assert max(latency.budget(17, 1000, 1, 0).tokens for _ in range(FLOOR_STEPS)) == 3
    assert max(latency.budget(20, 1000, 1, 0).tokens for _ in range(FLOOR_STEPS)) == 0


def test_steps_without_prompts_do_not_count_towards_the_floor() -> None:
    latency = limit_of()
    for _ in range(3 * FLOOR_STEPS):
        assert not latency.budget(10, 1000, 1, 0, has_prefills=False).is_forced
    assert latency.num_forced_steps == 0
    assert latency.budget(10, 1000, 1, 0).tokens == 0


def test_an_unknown_device_is_tried_with_chunks_that_at_most_double() -> None:
    model, limit_ns = StepTimeModel(), 14_000_000
    latency, chunks, over = limit_of(model), [], 0
    rng = random.Random(1)
    for step in range(300):
        kv_tokens = 1000 + 10 * step
        chunk = latency.budget(10, kv_tokens, limit_ns, 0).tokens
        assert chunk <= max(BLOCK, 2 * max(chunks, default=0))
        chunks.append(chunk)
        features = StepFeatures(chunk, 10, kv_tokens, chunk_pairs(chunk, 0))
        duration_ns = round(MODEL.predict(features) * (1 + 0.05 * rng.random()))
        over += duration_ns > limit_ns
        model.observe(features, duration_ns)
    assert chunks[:2] == [BLOCK, 2 * BLOCK]
    assert model.is_fitted
    assert over <= 0.08 * 300
    best = MODEL.largest_chunk(limit_ns, 10, 4000, 0, MAX_TOKENS)
    assert 0.6 * best <= chunks[-1] <= best


def test_the_estimate_of_a_first_token_is_exact_where_the_model_is() -> None:
    step_ns = MODEL.predict(StepFeatures(100, 5, 2000, chunk_pairs(100, 0)))
    known = {"num_prompt_tokens": 100, "tokens_per_step": 128, "num_decodes": 5, "kv_tokens": 2000}
    assert estimate_ttft_ns(MODEL, num_tokens_ahead=0, **known) == step_ns
    behind = estimate_ttft_ns(MODEL, num_tokens_ahead=256, **known)
    assert behind == step_ns + 2 * MODEL.predict(StepFeatures(128, 5, 2000, 0))
    no_room = estimate_ttft_ns(MODEL, num_tokens_ahead=256, steps_until_room=7, **known)
    assert no_room is not None
    assert behind is not None
    assert no_room - behind == 5 * MODEL.predict(StepFeatures(0, 5, 2000, 0))
    assert (retry_after_ns(no_room, behind), retry_after_ns(behind, no_room)) == (no_room - behind, 0)
    cached = estimate_ttft_ns(MODEL, num_tokens_ahead=0, num_cached_tokens=99, **known)
    assert cached == MODEL.predict(StepFeatures(1, 5, 2000, chunk_pairs(1, 99)))


def test_no_estimate_is_made_before_the_model_is_fitted() -> None:
    assert (
        estimate_ttft_ns(
            StepTimeModel(), num_prompt_tokens=1, num_tokens_ahead=0, tokens_per_step=1, num_decodes=0, kv_tokens=0
        )
        is None
    )
