"""The fleet view adds up: all waiting by reason, and what batch and pool had."""

from __future__ import annotations

import json

import pytest

from pyengine.config import SchedulerConfig
from pyengine.scheduler.stats import LACKS
from pyengine.scheduler.verdict import Reason, Verdict

from .driven_log import MS, DrivenLog, one_step


def test_all_waiting_by_reason_is_the_sum_over_requests_ended_and_live() -> None:
    driven = DrivenLog(num_ended=1)
    requests = [driven.arrive(f"r{i}") for i in range(4)]
    driven.begin()
    driven.log.waits(requests[0], Verdict(Reason.KV_PEAK, 3, 2))
    driven.log.rest_waits(Reason.BEHIND_HEAD, requests[0])
    driven.at(10)
    driven.end(requests[0], "abort")
    driven.end(requests[1], "abort")
    driven.begin()
    driven.start(requests[2])
    driven.log.rest_waits(Reason.MAX_SEQS)
    driven.plan()
    driven.at(15)
    stats = driven.log.stats(driven.now_ns)
    assert stats.wait_ns == {Reason.BEHIND_HEAD: 30 * MS, Reason.KV_PEAK: 10 * MS, Reason.MAX_SEQS: 5 * MS}
    assert stats.queue_ns == sum(request.queue_ns_at(driven.now_ns) for request in requests) == 45 * MS
    assert sum(stats.wait_share.values()) == pytest.approx(1)
    assert (stats.num_requests, stats.num_ended, stats.num_running, stats.num_waiting) == (4, 2, 1, 1)
    assert stats.hint.startswith("89% of all waiting was for KV blocks")


def test_batch_fill_and_kv_use_are_means_over_steps_and_what_is_now() -> None:
    config = SchedulerConfig(num_blocks=40, max_context=1024, max_num_seqs=4, max_num_batched_tokens=100)
    driven = DrivenLog(config)
    request = driven.arrive("A", num_tokens=30)
    driven.begin()
    driven.start(request)
    driven.plan(free=20, cached=10, reserved=4, bound_by=Reason.TOKEN_BUDGET)
    driven.commit()
    one_step(driven, 1, free=18, cached=10, reserved=2)
    one_step(driven, 1, free=16, cached=16, reserved=0)
    stats = driven.log.stats()
    assert (stats.num_steps, stats.decode_tokens, stats.prefill_tokens) == (3, 2, 30)
    assert stats.tokens_per_step == pytest.approx(32 / 3)
    assert stats.token_fill == pytest.approx(0.32 / 3)
    assert (stats.sequences_per_step, stats.seat_fill) == (1, 0.25)
    assert stats.bound_steps == {Reason.TOKEN_BUDGET: 1}
    assert stats.kv_now is not None
    assert stats.kv_mean is not None
    now, mean = stats.kv_now, stats.kv_mean
    assert (now.used, now.cached, now.free, now.reserved) == (8, 16, 16, 0)
    assert (mean.used, mean.cached, mean.free, mean.reserved) == (10, 12, 18, 2)


def test_recompute_tax_and_cache_hits_count_ended_and_live_requests_that_started() -> None:
    driven = DrivenLog(num_ended=1)
    requests = [driven.arrive(name, num_tokens=20) for name in "ABC"]
    for request in requests[:2]:
        request.num_cached_tokens = 8
        driven.begin()
        driven.start(request)
    driven.plan()
    driven.commit()
    requests[1].num_recomputed_tokens = 5
    driven.end(requests[0])
    stats = driven.log.stats()
    assert (stats.cached_tokens, stats.prompt_tokens, stats.cache_hit_rate) == (16, 40, 0.4)
    assert (stats.recomputed_tokens, stats.recompute_tax) == (5, 5 / 40)


def test_step_times_and_the_error_of_their_prediction() -> None:
    driven = DrivenLog()
    driven.begin()
    driven.start(driven.arrive("A"))
    driven.plan()
    driven.now_ns += 10 * MS
    driven.commit()
    one_step(driven, 20, predicted_ns=18 * MS)
    one_step(driven, 20, predicted_ns=24 * MS)
    driven.begin()
    driven.plan(predicted_ns=1000 * MS)  # not back yet: not counted
    times = driven.log.stats(step_model={"c0": 1.5}).step_times
    assert (times.num_steps, times.num_predicted) == (3, 2)
    assert times.mean_s == pytest.approx(0.050 / 3)
    assert (times.p50_s, times.p99_s) == (0.020, 0.020)
    assert times.mean_error == pytest.approx(6 / 40)
    assert times.bias == pytest.approx(2 / 40)
    assert times.p95_error_s == 0.004
    assert driven.log.stats(step_model={"c0": 1.5}).step_model == {"c0": 1.5}


def test_stats_are_json_and_text_from_the_very_beginning() -> None:
    driven = DrivenLog()
    empty = driven.log.stats()
    assert (empty.kv_now, empty.kv_mean, empty.step_times.mean_s, empty.hint) == (
        None,
        None,
        None,
        "Nobody has waited.",
    )
    assert "0 requests" in str(empty)
    request = driven.arrive("A")
    driven.at(4)
    driven.begin()
    driven.start(request)
    driven.plan()
    driven.at(5)
    driven.commit()
    data = json.loads(json.dumps(driven.log.stats().to_dict()))
    assert data["wait_ns"] == {"mid_step": 4 * MS}
    assert data["wait_share"] == {"mid_step": 1.0}
    assert data["kv_now"] == {"used": 26, "cached": 4, "free": 10, "reserved": 3}
    assert data["step_times"]["num_steps"] == 1
    text = str(driven.log.stats())
    assert "mid_step" in text
    assert "26 used (mean 26)" in text
    assert "100% of all waiting was for the step that runs" in text


def test_every_reason_is_a_lack_of_exactly_one_thing() -> None:
    reasons = [reason for _, _, group in LACKS for reason in group]
    assert len(reasons) == len(set(reasons))
    assert set(reasons) == set(Reason)
