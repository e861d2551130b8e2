"""What a user can ask of a running engine: why a request waited, how full it is, its trace and its recording."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pyengine import DeadlinePassed, Engine, InvalidRequest, RequestOptions, SamplingParams, TTFTUnreachable
from pyengine.scheduler.recording import Recording, RecordingError
from pyengine.scheduler.replay import replay

from .conftest import block_bytes

LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture
def busy(model_folder: Path) -> Engine:
    """An engine with 12 blocks that has served 20 requests, most of which had to wait."""
    engine = Engine(model_folder, kv_cache_memory=12 * block_bytes(model_folder), max_num_batched_tokens=64)
    for i in range(20):
        engine.submit([i + 2] * (20 + i), LONG, request_id=f"r{i}")
    while engine.has_unfinished:
        engine.step()
    return engine


def test_the_parts_of_a_wait_sum_to_the_queue_time_of_the_metrics(model_folder: Path) -> None:
    with Engine(model_folder, kv_cache_memory=12 * block_bytes(model_folder)) as engine:
        outputs = engine.generate([[i + 2] * 30 for i in range(8)], LONG)
        for output in outputs:
            answer = engine.explain(output.request_id, what_if=False)
            assert sum(answer.wait_ns.values()) == answer.queue_ns
            assert answer.queue_s == output.metrics.queue_s
            assert answer.finish_reason == "length"
            json.dumps(answer.to_dict())


def test_what_ifs_come_from_a_replay_of_what_happened(busy: Engine) -> None:
    answer = busy.explain("r19", what_if=[{"kv_blocks": 4.0}, {"max_num_seqs": 1}])
    assert answer.num_prompt_tokens == 39
    more, fewer = answer.what_ifs
    assert more.to_dict()["start_delta_ns"] < 0
    assert fewer.to_dict()["start_delta_ns"] > 0
    assert "+300% KV blocks: started" in str(answer)
    assert {"kv_blocks": 1.15} in [one.to_dict()["change"] for one in busy.explain("r19").what_ifs]


@pytest.mark.parametrize(
    ("what_if", "message"),
    [
        ([{"no_such": 1}], "no_such is no setting"),
        ({"kv_blocks": -1}, "kv_blocks is -1"),
        ([{"max_num_seqs": 0}], "max_num_seqs is 0"),
        (5, "what_if is 5"),
        (None, "what_if is None"),
        ([{}], "what_if is"),
        ("kv_blocks", "what_if is 'kv_blocks'"),
    ],
)
def test_a_what_if_that_is_none_is_refused_with_its_value(busy: Engine, what_if: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        busy.explain("r19", what_if=what_if)  # type: ignore[arg-type]


def test_one_change_needs_no_list(busy: Engine) -> None:
    (answer,) = busy.explain("r19", what_if={"kv_blocks": 4.0}).what_ifs
    assert answer.to_dict()["start_delta_ns"] < 0


def test_an_explanation_is_json_able_as_a_dataclass_too(busy: Engine) -> None:
    json.dumps(dataclasses.asdict(busy.explain("r19", what_if=False)))


def test_who_was_ended_for_its_limit_is_told_why(model_folder: Path) -> None:
    with Engine(model_folder, max_num_seqs=1, max_num_batched_tokens=64) as engine:
        engine.submit([3] * 20, LONG, request_id="first")
        engine.step()
        engine.submit([4] * 20, LONG, request_id="late", options=RequestOptions(ttft_limit_ms=1e-3))
        events = []
        while engine.has_unfinished:
            events += engine.step()
        (last,) = [event for event in events if event.request_id == "late"]
        assert isinstance(last.error, DeadlinePassed)
        assert "its limit on the first token is 1e-06 s" in str(engine.explain("late"))


def test_a_paused_engine_starts_nobody_and_says_so(model_folder: Path) -> None:
    with Engine(model_folder) as engine:
        engine.pause()
        engine.submit([3] * 20, LONG, request_id="a")
        assert engine.step() == []
        assert "paused" in str(engine.explain("a"))
        engine.resume()
        while engine.has_unfinished:
            engine.step()
        assert engine.explain("a").finish_reason == "length"


def test_company_is_waited_for_only_as_long_as_a_deadline_allows(model_folder: Path) -> None:
    with Engine(model_folder, max_batch_wait_ms=60_000) as engine:
        options = RequestOptions(ttft_limit_ms=2_000)
        (output,) = engine.generate([[3] * 20], SamplingParams(max_tokens=1, temperature=0.0), options=options)
        assert output.outputs[0].finish_reason == "length"


def test_a_limit_that_even_an_idle_engine_cannot_keep_is_refused_for_good(model_folder: Path) -> None:
    with Engine(model_folder, ttft_limit_ms=1e-3) as engine:
        with pytest.raises(TTFTUnreachable, match="can never be kept") as caught:
            engine.submit([3] * 20, LONG)
        assert caught.value.retry_after_s is None
        options = RequestOptions(itl_limit_ms=1e-6, ttft_limit_ms=1e6)
        with pytest.raises(InvalidRequest, match="itl_limit_ms is 1e-06; a pass with a single decode takes"):
            engine.submit([3] * 20, LONG, options=options)


@pytest.mark.parametrize("name", ["", "\ud800x", "x" * 300, 7])
def test_an_id_that_cannot_be_shown_is_refused(model_folder: Path, name: object) -> None:
    with Engine(model_folder) as engine, pytest.raises(InvalidRequest, match="request_id"):
        engine.submit([3] * 20, LONG, request_id=name)  # type: ignore[arg-type]


def test_an_unknown_id_is_answered_and_an_unknown_completion_refused(busy: Engine) -> None:
    assert busy.explain("nobody").state == "unknown"
    with pytest.raises(InvalidRequest, match="index is 1; request 'r3' has 1 completions"):
        busy.explain("r3", 1)


def test_stats_share_all_waiting_out_among_the_reasons(busy: Engine) -> None:
    stats = busy.stats()
    assert stats.num_ended == 20
    assert sum(stats.wait_ns.values()) == stats.queue_ns > 0
    assert stats.decode_tokens + 20 == 20 * 40
    json.dumps(stats.to_dict())


def test_the_trace_has_a_track_for_each_request(busy: Engine, tmp_path: Path) -> None:
    busy.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert {f"r{i}" for i in range(20)} <= names


def test_a_recording_replays_to_the_plans_that_were_run(busy: Engine, tmp_path: Path) -> None:
    busy.save_recording(tmp_path / "calls.jsonl")
    recording = Recording.load(tmp_path / "calls.jsonl")
    result = replay(recording)
    assert len(result.plans) == busy.stats().num_steps
    for key, request in result.requests.items():
        answer = busy.explain(f"r{key}", what_if=False)
        assert (request.queue_ns, request.num_preemptions) == (answer.queue_ns, answer.num_preemptions)
    assert len(result.requests) == 20


def test_a_recording_of_another_version_is_refused(busy: Engine, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    busy.save_recording(path)
    path.write_text(path.read_text().replace('"version":1', '"version":99', 1))
    with pytest.raises(RecordingError, match="99"):
        Recording.load(path)
