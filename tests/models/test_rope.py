"""Rope: how a config is read, and that each kind's frequencies follow its formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pyengine.errors import ModelError
from pyengine.models import RopeSpec, spec_from_config
from pyengine.models.rope import longest_context, rope_frequencies, rope_tables

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
ULP = 2.0**-23


def rope_of(max_position_embeddings: int = 1024, **config: Any) -> RopeSpec:
    return spec_from_config(
        {
            "model_type": "llama",
            "hidden_size": 256,
            "num_attention_heads": 4,
            "max_position_embeddings": max_position_embeddings,
            **config,
        }
    ).rope


def plain(base: float, dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([base ** (-2 * i / dim) for i in range(dim // 2)])


def test_plain_frequencies_are_powers_of_the_base() -> None:
    for base, dim in ((10000.0, 64), (500000.0, 128), (1e6, 80)):
        frequencies, factor = rope_frequencies(RopeSpec(base, dim), 4096)
        assert frequencies.dtype == np.float32
        assert factor == 1.0
        np.testing.assert_allclose(frequencies, plain(base, dim), rtol=1.5e-6)  # the exponent is float32, as in HF


def test_linear_divides_every_frequency() -> None:
    frequencies, factor = rope_frequencies(rope_of(rope_scaling={"type": "linear", "factor": 4.0}), 1024)
    np.testing.assert_array_equal(frequencies * 4, rope_frequencies(rope_of(), 1024)[0])
    assert factor == 1.0


def test_dynamic_scales_nothing_up_to_the_trained_length_and_the_base_beyond() -> None:
    rope = rope_of(rope_scaling={"type": "dynamic", "factor": 2.0})
    for served in (16, 1024):
        np.testing.assert_array_equal(rope_frequencies(rope, served)[0], rope_frequencies(rope_of(), served)[0])
    base = 10000.0 * (2.0 * 1536 / 1024 - 1.0) ** (64 / 62)
    np.testing.assert_allclose(rope_frequencies(rope, 1536)[0], plain(base, 64), rtol=1.5e-6)


def test_llama3_keeps_short_waves_slows_long_ones_and_blends_between() -> None:
    rope = rope_of(131072, rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **LLAMA3})
    frequencies, factor = rope_frequencies(rope, 131072)
    unscaled = plain(500000.0, 64)
    expected = []
    for frequency in unscaled:
        turns = 8192 * frequency / (2 * math.pi)
        blend = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        expected.append(blend * frequency + (1 - blend) * frequency / 8.0)
    np.testing.assert_allclose(frequencies, expected, rtol=3e-6)
    assert factor == 1.0
    assert frequencies[0] == np.float32(1.0)
    np.testing.assert_allclose(frequencies[-1], unscaled[-1] / 8, rtol=3e-6)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("betas", [(32.0, 1.0), (16.0, 2.0)])
def test_yarn_blends_by_the_turns_over_the_trained_length(truncate: bool, betas: tuple[float, float]) -> None:
    given = {**YARN, "beta_fast": betas[0], "beta_slow": betas[1], "truncate": truncate}
    rope = rope_of(131072, rope_theta=1e6, rope_scaling={"rope_type": "yarn", **given})
    frequencies, _ = rope_frequencies(rope, 131072)
    low, high = (64 * math.log(32768 / (beta * 2 * math.pi)) / (2 * math.log(1e6)) for beta in betas)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    expected = []
    for i, frequency in enumerate(plain(1e6, 64)):
        slowed = min(max((i - low) / (high - low), 0.0), 1.0)
        expected.append(slowed * frequency / 4 + (1 - slowed) * frequency)
    np.testing.assert_allclose(frequencies, expected, rtol=3e-6)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 0.75}, 0.75),
        ({"mscale": 0.7, "mscale_all_dim": 1.2}, (0.07 * math.log(4) + 1) / (0.12 * math.log(4) + 1)),
        ({"mscale": 0.7}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_multiplies_cos_and_sin_by_its_attention_factor(given: dict[str, float], expected: float) -> None:
    rope = rope_of(rope_scaling={"rope_type": "yarn", **YARN, **given})
    assert rope_frequencies(rope, 1024)[1] == pytest.approx(expected, rel=1e-12)
    cos, sin = rope_tables(rope, 4, 1024)
    np.testing.assert_array_equal(cos[0], np.full(32, expected, np.float32))
    np.testing.assert_array_equal(sin[0], np.zeros(32, np.float32))


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths() -> None:
    given = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}
    assert rope_of(2048, rope_scaling=given).parameters == {"factor": 4.0, "original_max_position_embeddings": 512}


def test_tables_hold_cos_and_sin_of_float32_angles() -> None:
    rope = rope_of()
    frequencies, _ = rope_frequencies(rope, 1024)
    cos, sin = rope_tables(rope, 300, 1024)
    assert (cos.shape, cos.dtype, sin.dtype) == ((300, 32), np.float32, np.float32)
    for position in (0, 1, 7, 299):
        angles = [float(np.float32(position) * frequency) for frequency in frequencies]
        np.testing.assert_allclose(cos[position], [math.cos(a) for a in angles], atol=ULP / 2)
        np.testing.assert_allclose(sin[position], [math.sin(a) for a in angles], atol=ULP / 2)


def test_a_row_of_the_tables_does_not_depend_on_how_many_there_are() -> None:
    rope = RopeSpec(10000.0, 8)
    long_cos, long_sin = rope_tables(rope, 10000, 10000)
    short_cos, short_sin = rope_tables(rope, 9001, 9001)
    np.testing.assert_array_equal(long_cos[:9001], short_cos)
    np.testing.assert_array_equal(long_sin[:9001], short_sin)


def test_the_older_and_the_newer_section_mean_the_same() -> None:
    old = rope_of(rope_theta=500000.0, rope_scaling={"type": "llama3", **LLAMA3})
    new = rope_of(rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3})
    assert old == new
    assert (old.base, old.kind) == (500000.0, "llama3")


def test_a_top_level_trained_length_has_priority() -> None:
    rope = rope_of(original_max_position_embeddings=256, rope_scaling={"type": "yarn", **YARN})
    assert rope.parameters is not None
    assert rope.parameters["original_max_position_embeddings"] == 256


def test_a_partial_rotary_factor_rotates_the_first_dimensions() -> None:
    assert rope_of(partial_rotary_factor=0.25).rotary_dim == 16
    assert rope_of(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}).rotary_dim == 32


@pytest.mark.parametrize(
    ("scaling", "trained", "context", "longest"),
    [
        (None, 1024, 1024, 1024),
        ({"type": "linear", "factor": 4.0}, 1024, 1024, 4096),
        ({"type": "dynamic", "factor": 2.0}, 1024, 1024, 2048),
        ({"type": "llama3", **LLAMA3}, 131072, 131072, 131072),
        ({"type": "yarn", **YARN}, 32768, 131072, 131072),
        ({"type": "yarn", **YARN}, 131072, 131072, 131072),
        ({"type": "yarn", "factor": 4.0}, 1024, 4096, 4096),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}, 8192, 8192, 8192),
    ],
)
def test_the_context_is_the_configs_and_yarn_stretches_a_trained_length(
    scaling: Any, trained: int, context: int, longest: int
) -> None:
    spec = spec_from_config({"model_type": "llama", "max_position_embeddings": trained, "rope_scaling": scaling})
    assert spec.max_context == context
    assert longest_context(spec.rope, spec.max_context) == longest


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"type": "longrope", "factor": 4.0}, ["rope_type", "longrope", "llama3", "yarn"]),
        ({"rope_type": ["yarn"]}, ["rope_type", "yarn"]),
        ({"type": "linear"}, ["factor", "missing", "linear"]),
        ({"type": "dynamic"}, ["factor", "missing", "dynamic"]),
        ({"type": "yarn"}, ["rope_scaling.factor", "missing", "yarn"]),
        ({"type": "yarn", "factor": None}, ["rope_scaling.factor", "missing", "yarn"]),
        ({"type": "yarn", "original_max_position_embeddings": 512}, ["rope_scaling.factor", "missing", "yarn"]),
        ({"type": "yarn", "factor": None, "original_max_position_embeddings": 2048}, ["factor", "0.5"]),
        ({"type": "llama3", **LLAMA3, "factor": None}, ["factor", "missing", "llama3"]),
        ({"type": "linear", "factor": 0.5}, ["factor", "0.5", "from 1"]),
        ({"type": "linear", "factor": "4"}, ["factor", "'4'"]),
        ({"type": "dynamic", "factor": float("inf")}, ["factor", "inf"]),
        ({"type": "default", "mrope_section": [16, 24, 24]}, ["mrope_section"]),
        ({"type": "llama3", "factor": 8.0}, ["low_freq_factor"]),
        ({"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, ["high_freq_factor", "low_freq_factor"]),
        ({"type": "yarn", **YARN, "truncate": "no"}, ["truncate", "'no'"]),
        ({"type": "yarn", **YARN, "long_factor": [1.0]}, ["long_factor"]),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}, ["layer type"]),
        ([4.0], ["rope_scaling", "[4.0]"]),
    ],
)
def test_a_rope_that_is_not_known_is_refused_by_name(scaling: Any, words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        rope_of(rope_scaling=scaling)
    assert all(word in str(caught.value) for word in words), str(caught.value)
