"""StepTimeModel learns what a step costs, is not wrecked by outliers, and keeps its word about margins."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from pyengine.scheduler.step_time import COEFFICIENTS, StepFeatures, StepTimeModel, chunk_pairs

TRUE = (5e6, 30_000.0, 10_000.0, 35.0, 2.0)


def features_of(rng: random.Random) -> StepFeatures:
    decodes = rng.randint(0, 64)
    chunk = rng.choice([0, 0, 0, rng.randint(1, 1000)])
    return StepFeatures(chunk, decodes, decodes * rng.randint(10, 3000), chunk_pairs(chunk, rng.randint(0, 4000)))


def taught(steps: int, *, noise: float = 0.0, outlier_rate: float = 0.0, seed: int = 1) -> StepTimeModel:
    rng = random.Random(seed)
    device, model = StepTimeModel(TRUE), StepTimeModel()
    for _ in range(steps):
        features = features_of(rng)
        duration = device.predict(features) * (1 + noise * rng.random())
        if rng.random() < outlier_rate:
            duration *= 100
        model.observe(features, round(duration))
    return model


def worst_error(model: StepTimeModel, scale: float = 1.0) -> float:
    rng = random.Random(99)
    device = StepTimeModel(TRUE)
    tried = [features_of(rng) for _ in range(200)]
    return max(abs(model.predict(f) / (scale * device.predict(f)) - 1) for f in tried)


def test_exact_durations_are_learned() -> None:
    model = taught(400)
    assert model.is_fitted
    assert worst_error(model) < 0.01
    assert model.coefficients == pytest.approx(TRUE, rel=0.05)


def test_noise_is_averaged_and_the_margin_covers_its_quantile() -> None:
    rng = random.Random(7)
    model = taught(2000, noise=0.3)
    assert worst_error(model, scale=1.15) < 0.05
    device = StepTimeModel(TRUE)
    covered = 0
    for _ in range(2000):
        features = features_of(rng)
        covered += device.predict(features) * (1 + 0.3 * rng.random()) <= model.upper(features)
    assert 0.96 <= covered / 2000 <= 0.995


@pytest.mark.parametrize("steps", [150, 1000])
def test_outliers_are_not_in_the_margin(steps: int) -> None:
    model = taught(steps, noise=0.05, outlier_rate=0.04)
    assert 0.0 < max(model.margins) < 0.2


@pytest.mark.parametrize("seed", range(3))
def test_steps_a_hundred_times_too_long_do_not_wreck_it(seed: int) -> None:
    model = taught(1000, noise=0.05, outlier_rate=0.01, seed=seed)
    assert worst_error(model) < 0.15
    assert max(model.margins) < 0.2


def test_a_slow_first_step_is_forgiven() -> None:
    model = StepTimeModel()
    device, rng = StepTimeModel(TRUE), random.Random(3)
    for i in range(300):
        features = features_of(rng)
        model.observe(features, device.predict(features) * (50 if i == 0 else 1))
    assert worst_error(model) < 0.05


@pytest.mark.parametrize("scale", [0.3, 10.0])
def test_a_lasting_change_of_the_device_is_followed(scale: float) -> None:
    model, device, rng = taught(1000), StepTimeModel(TRUE), random.Random(5)
    for _ in range(6000):
        features = features_of(rng)
        model.observe(features, round(scale * device.predict(features)))
    assert worst_error(model, scale) < 0.05


def test_features_on_one_line_still_give_predictions_on_that_line() -> None:
    model = StepTimeModel()
    for length in range(500):
        model.observe(StepFeatures(0, 8, 8 * (100 + length), 0), 6_000_000 + 300 * length)
    assert all(c >= 0 for c in model.coefficients)
    assert not model.is_fitted, "no prefill was ever seen"
    assert model.predict(StepFeatures(0, 8, 8 * 650, 0)) == pytest.approx(6_000_000 + 300 * 550, rel=0.01)


def test_coefficients_are_never_negative_where_the_data_fall() -> None:
    model, rng = StepTimeModel(), random.Random(2)
    for _ in range(300):
        decodes = rng.randint(1, 60)
        model.observe(StepFeatures(16, decodes, decodes * 100, chunk_pairs(16, 0)), 9_000_000 - 50_000 * decodes)
    assert min(model.coefficients) >= 0.0
    assert model.predict(StepFeatures(16, 30, 3000, chunk_pairs(16, 0))) == pytest.approx(7_500_000, rel=0.1)


def test_prefill_cost_survives_a_long_phase_of_decodes() -> None:
    model, device = taught(500), StepTimeModel(TRUE)
    for step in range(20_000):
        features = StepFeatures(0, 30, 30_000 + step % 500, 0)
        model.observe(features, device.predict(features))
    features = StepFeatures(500, 30, 30_000, chunk_pairs(500, 0))
    assert model.predict(features) == pytest.approx(device.predict(features), rel=0.1)


def test_the_largest_chunk_is_the_largest_that_stays_within_the_limit() -> None:
    model, rng = taught(600, noise=0.2), random.Random(11)
    for _ in range(300):
        decodes, context, most = rng.randint(0, 64), rng.randint(0, 8000), rng.randint(0, 2000)
        kv_tokens, limit_ns = decodes * 500, rng.randint(1, 60_000_000)
        chunk = model.largest_chunk(limit_ns, decodes, kv_tokens, context, most)
        assert 0 <= chunk <= most

        def upper(x: int, decodes: int = decodes, kv_tokens: int = kv_tokens, context: int = context) -> int:
            return model.upper(StepFeatures(x, decodes, kv_tokens, chunk_pairs(x, context)))

        assert chunk == 0 or upper(chunk) <= limit_ns
        assert chunk == most or upper(chunk + 1) > limit_ns - 2
        assert all(upper(a) <= upper(b) for a, b in pairwise([1, 10, 100, 1000]))


def test_a_model_goes_on_identically_after_a_round_trip_through_json() -> None:
    rng = random.Random(4)
    model = taught(333, noise=0.2)
    other = StepTimeModel.from_dict(json.loads(json.dumps(model.to_dict())))
    for _ in range(200):
        features, duration = features_of(rng), rng.randint(1, 10**8)
        model.observe(features, duration)
        other.observe(features, duration)
    assert other.to_dict() == model.to_dict()


def test_given_coefficients_predict_from_the_beginning() -> None:
    model = StepTimeModel(TRUE)
    assert model.is_fitted
    assert model.predict(StepFeatures(100, 10, 1000, 0)) == 5_000_000 + 3_000_000 + 100_000 + 35_000
    assert model.upper(StepFeatures(100)) == model.predict(StepFeatures(100))
    only = {"coefficients": dict(zip(COEFFICIENTS, TRUE, strict=True))}
    assert StepTimeModel.from_dict(only).coefficients == TRUE


def test_a_clock_that_stood_still_teaches_nothing() -> None:
    model = taught(100)
    before = model.to_dict()
    model.observe(StepFeatures(10, 1, 1, 55), 0)
    assert model.to_dict() == before


@pytest.mark.parametrize("bad", [(1.0,), (1.0, 2.0, 3.0, 4.0, -1.0), (1.0, 2.0, 3.0, 4.0, float("nan"))])
def test_coefficients_that_cannot_be_are_refused(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="5 finite numbers >= 0"):
        StepTimeModel(bad)


def test_data_that_are_no_model_are_refused() -> None:
    with pytest.raises(ValueError, match="no step-time model"):
        StepTimeModel.from_dict({"coefficients": {"base_ns": 1}})
