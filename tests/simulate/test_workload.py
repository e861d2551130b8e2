"""Workloads: the same seed makes the same one, and it is what its parameters say."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pyengine.errors import InvalidRequest
from pyengine.simulate.lengths import Constant, Lognormal, Uniform, parse_lengths
from pyengine.simulate.workload import Generator, scaled
from tests.simulate.conftest import small_generator


def gaps_of(generator: Generator, seed: int = 0) -> list[float]:
    times = [request.arrival_ns for request in generator.workload(seed).requests]
    assert times == sorted(times)
    return [(later - earlier) / 1e9 for earlier, later in pairwise([0, *times])]


def test_a_seed_makes_the_same_workload_and_another_seed_another() -> None:
    generator = small_generator(num_prefixes=3, num_tenants=2)
    assert generator.workload(4) == generator.workload(4)
    assert generator.workload(4) != generator.workload(5)


@pytest.mark.parametrize(
    ("arrivals", "cv", "expected_cv"), [("poisson", 2.0, 1.0), ("gamma", 0.5, 0.5), ("gamma", 3.0, 3.0)]
)
def test_gaps_have_the_rate_and_the_coefficient_of_variation_asked_for(
    arrivals: str, cv: float, expected_cv: float
) -> None:
    gaps = gaps_of(small_generator(arrivals=arrivals, cv=cv, rate=8.0, num_requests=20_000))
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / 8, rel=0.1)
    assert statistics.stdev(gaps) / mean == pytest.approx(expected_cv, rel=0.1)


def test_on_off_has_the_rate_on_average_and_silences_between_bursts() -> None:
    gaps = gaps_of(small_generator(arrivals="on-off", rate=10.0, on_s=2.0, off_s=8.0, num_requests=20_000))
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.15)
    bursts = sum(gap > 1.0 for gap in gaps)  # 50 a second while on: only a silence is that long
    silence_s = sum(gap for gap in gaps if gap > 1.0)
    assert silence_s / sum(gaps) == pytest.approx(0.8, rel=0.1)
    assert silence_s / bursts == pytest.approx(9.0, rel=0.2)  # exponential of mean 8, those above 1


def test_lengths_follow_their_distribution() -> None:
    random = np.random.default_rng(0)
    lengths = parse_lengths("0.9*lognormal:300:1+0.1*uniform:6000:20000", "prompt_tokens").sample(random, 50_000)
    is_long = lengths >= 6000
    assert is_long.mean() == pytest.approx(0.1, abs=0.01)
    assert np.median(lengths[~is_long]) == pytest.approx(300, rel=0.05)
    assert np.median(lengths[is_long]) == pytest.approx(13_000, rel=0.05)
    assert lengths.min() >= 1
    assert parse_lengths("7", "n") == Constant(7)
    assert parse_lengths("uniform:3:3", "n") == Uniform(3, 3)
    assert parse_lengths("lognormal:9:0.5", "n") == Lognormal(9, 0.5)


@pytest.mark.parametrize(
    "text",
    ["", "0", "1.5", "uniform:5", "uniform:9:3", "normal:1:2", "lognormal:0:1", "lognormal:9:x", "-1*5", "0*5", "5+"],
)
def test_lengths_that_cannot_be_are_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt_tokens is .*lognormal:MEDIAN:SIGMA") as caught:
        parse_lengths(text, "prompt_tokens")
    assert caught.value.value == text


def test_prompts_of_one_prefix_begin_with_the_same_tokens_and_no_others_do() -> None:
    requests = small_generator(num_prefixes=2, prefix_share=0.5).workload(0).requests
    for one, other in pairwise(requests):
        first, second = one.prompt(), other.prompt()
        assert len(first) == one.prompt_tokens
        shared = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
        is_same_prefix = one.prefix_keys == other.prefix_keys
        assert shared == (min(one.prompt_tokens, other.prompt_tokens) // 2 if is_same_prefix else 0)


def test_a_closed_loop_deals_its_requests_to_its_users() -> None:
    workload = small_generator(arrivals="closed", num_users=7, think_s=2.0, num_requests=7000).workload(0)
    assert workload.num_users == 7
    assert {request.user for request in workload.requests} == set(range(7))
    assert statistics.fmean(request.arrival_ns for request in workload.requests) == pytest.approx(2e9, rel=0.1)


def test_a_workload_can_be_cut_and_sped_up() -> None:
    workload = small_generator().workload(0)
    faster = scaled(workload, 2.0, 10)
    assert [request.arrival_ns for request in faster.requests] == [
        round(request.arrival_ns / 2) for request in workload.requests[:10]
    ]
    assert "2 times as fast" in faster.name
    with pytest.raises(InvalidRequest, match="speed is 0"):
        scaled(workload, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrivals": "uniform"}, "arrivals is 'uniform'; it must be one of poisson, gamma, on-off, closed"),
        ({"rate": 0}, "rate is 0; it must be a number > 0"),
        ({"cv": float("nan")}, "cv is nan"),
        ({"think_s": -1.0}, "think_s is -1.0; it must be a number >= 0"),
        ({"num_requests": 0}, "num_requests is 0; it must be an integer >= 1"),
        ({"prefix_share": 1.5}, "prefix_share is 1.5; it must be a number from 0 to 1"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        small_generator(**changes)
