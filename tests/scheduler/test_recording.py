"""A recorder keeps the latest calls in fixed memory; it holds no text, and a damaged file is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyengine.config import SchedulerConfig
from pyengine.request import Request
from pyengine.scheduler import Scheduler
from pyengine.scheduler.clean_state import capture, restore
from pyengine.scheduler.recording import (
    Abort,
    Arrival,
    Begin,
    Clear,
    End,
    Hold,
    Pause,
    RecordedRequest,
    Recorder,
    Recording,
    RecordingError,
    Wake,
)
from pyengine.scheduler.step_time import StepTimeModel

CONFIG = SchedulerConfig(num_blocks=20, max_context=200)
STATE: dict[str, Any] = {"step": 3, "block_hashes": [9, 5, 4, 3], "service": {"0": 5}}
EVENTS = (
    Arrival(1000, (RecordedRequest(0, 40, 7, num_output_tokens=7, finish_reason="length", block_ids=(3, 4, 10)),)),
    Begin(1010, 0, 40),
    End(2000, ((0, "stop"),)),
    Begin(2001, 1, 0),
    Arrival(
        2500,
        (
            RecordedRequest(1, 3, 2, tenant=1, priority=-1, itl_limit_ns=5),
            RecordedRequest(2, 3, 2, index=1, ttft_limit_ns=9, needs_all_prompt_logits=True),
        ),
    ),
    Hold(2500, 1, 99_999),
    End(3000, ()),
    Abort(3001, 2, "abort"),
    Wake(3002, 1),
    Pause(3003, "DRAIN"),
    Pause(3003, None),
    Clear(3004),
    Begin(3005, 0, 0),
    Begin(3006, 0, 3),
)


def written(path: Path) -> list[str]:
    Recording(CONFIG, StepTimeModel().to_dict(), 500, STATE, EVENTS).save(path)
    return path.read_text().splitlines()


def test_every_call_is_the_same_after_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    written(path)
    loaded = Recording.load(path)
    assert loaded == Recording(CONFIG, StepTimeModel().to_dict(), 500, STATE, EVENTS)
    assert set(loaded.requests()) == {0, 1, 2}


def test_a_steady_step_takes_one_short_line(tmp_path: Path) -> None:
    events = tuple(e for i in range(100) for e in (Begin(i * 10_000_000, 60, 0), End(i * 10_000_000 + 9_000_000, ())))
    Recording(CONFIG, StepTimeModel().to_dict(), 0, STATE, events).save(tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert len(lines) == 101
    assert max(map(len, lines[1:])) < 60


def change_header(**values: Any) -> Callable[[list[str]], None]:
    def change(lines: list[str]) -> None:
        lines[0] = json.dumps({**json.loads(lines[0]), **values})

    return change


def set_line(place: int, text: str) -> Callable[[list[str]], None]:
    def change(lines: list[str]) -> None:
        lines[place] = text

    return change


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (change_header(version=2), r"line 1: version is 2; this version of pyengine reads 1"),
        (change_header(format="other"), r"line 1: format is 'other'"),
        (change_header(config={"num_blocks": 0, "max_context": 9}), r"line 1: config is .*num_blocks is 0"),
        (change_header(config={"colour": 1}), r"line 1: config is .*colour"),
        (change_header(start_ns=-1), r"line 1: start_ns is -1"),
        (change_header(step_time={}), r"line 1: step_time or state"),
        (change_header(state=None), r"line 1: step_time or state"),
        (lambda lines: lines.pop(), r"line 1: 13 lines are announced, 12 follow: the file was cut"),
        (lambda lines: lines.clear(), r"is empty"),
        (set_line(2, '{"step": 1, "took'), r"line 3: .*is not JSON"),
        (set_line(2, "[]"), r"line 3: .*is not an object"),
        (set_line(2, '{"jump":1}'), r"line 3: 'jump' is no call"),
        (set_line(2, '{"step":-5,"took":1,"tokens":[0,0]}'), r"line 3: step is -5; it must be an integer >= 0"),
        (set_line(2, '{"step":5,"took":"x","tokens":[0,0]}'), r"line 3: took is 'x'"),
        (set_line(2, '{"step":5,"took":1,"tokens":[0]}'), r"line 3: tokens is \[0\]"),
        (set_line(2, '{"step":5,"took":1,"tokens":[0,1],"ends":[3]}'), r"line 3: an end is 3"),
        (set_line(1, '{"arrive":5,"requests":[{"key":0,"prompt":4}]}'), r"line 2: request .* has no max_tokens"),
        (set_line(1, '{"arrive":5,"requests":[{"key":0,"text":"Hi"}]}'), r"line 2: a request has text = 'Hi'"),
        (set_line(1, '{"arrive":5,"requests":[{"key":0,"priority":true}]}'), r"line 2: a request has priority = True"),
        (set_line(1, '{"arrive":5,"requests":[{"blocks":[1]}]}'), r"line 2: blocks is \[1\]"),
        (set_line(1, '{"arrive":5,"requests":[{"blocks":[1,99999999999]}]}'), r"line 2: blocks is .* more than"),
        (set_line(5, '{"abort":5,"key":1,"reason":7}'), r"line 6: reason is 7; it must be text"),
    ],
)
def test_a_damaged_file_is_refused_with_line_and_value(
    damage: Callable[[list[str]], None], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    lines = written(path)
    damage(lines)
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(RecordingError, match=said) as caught:
        Recording.load(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\x93NUMPY")
    with pytest.raises(RecordingError, match="is no recording"):
        Recording.load(tmp_path / "a.jsonl")


def recorder_of(scheduler: Scheduler, **sizes: int) -> Recorder:
    return Recorder(scheduler.config, scheduler.step_time, state=lambda: capture(scheduler), **sizes)


def run_one(scheduler: Scheduler, recorder: Recorder, prompt: list[int], steps: int = 3) -> Request:
    """A request from its arrival to its end, and what the scheduler would say to the recorder."""
    request = Request("secret name", prompt, steps, tenant="secret tenant", cache_salt="secret salt")
    scheduler.add([request])
    recorder.arrived([request], 0)
    for _ in range(steps):
        plan = scheduler.schedule()
        recorder.scheduled(plan, 0)
        scheduler.commit(plan, [1])
        if request.is_finished:
            recorder.ended(request)
        recorder.committed(plan, {}, 0)
    return request


def test_memory_is_fixed_and_the_oldest_is_dropped() -> None:
    scheduler = Scheduler(CONFIG, clock=lambda: 0)
    recorder = recorder_of(scheduler, num_rows=70, max_hashes=30)
    for i in range(200):
        run_one(scheduler, recorder, [i] * 33)
        recording = recorder.recording()
        assert len(recording.events) <= 70
        assert sum(len(request.block_ids) for request in recording.requests().values()) <= 30
        assert len(recorder._starts) <= 36
    assert 190 in recording.requests()
    with pytest.raises(RecordingError, match="number 3 is not among the last"):
        recorder.recording(3)


def test_a_recording_has_no_text_no_token_and_no_hash_and_says_which_blocks_are_equal(tmp_path: Path) -> None:
    scheduler = Scheduler(CONFIG, clock=lambda: 0)
    recorder = recorder_of(scheduler)
    first = run_one(scheduler, recorder, [7777] * 40)
    run_one(scheduler, recorder, [7777] * 32 + [8888] * 20)
    recording = recorder.recording()
    one, other = recording.requests().values()
    assert one.block_ids[:2] == other.block_ids[:2]
    assert not set(one.block_ids[2:]) & set(other.block_ids[2:])
    recording.save(tmp_path / "a.jsonl")
    text = (tmp_path / "a.jsonl").read_text()
    for secret in ("secret", "7777", "8888", first.block_hashes[0].hex()):
        assert secret not in text


def test_a_policy_of_the_users_cannot_be_written_and_that_is_said(tmp_path: Path) -> None:
    class Mine:
        name = "mine"

        def key(self, request: Request) -> tuple[int, ...]:
            return (request.arrival_seq,)

    config = SchedulerConfig(num_blocks=20, max_context=200, order=Mine)
    with pytest.raises(RecordingError, match=r"order is .*Mine.*a policy of your own"):
        Recording(config, StepTimeModel().to_dict(), 0, STATE, ()).save(tmp_path / "a.jsonl")


def test_the_state_of_an_empty_scheduler_is_the_same_after_it_is_restored() -> None:
    config = SchedulerConfig(num_blocks=20, max_context=200, order="fair", capacity="predicted")
    scheduler = Scheduler(config, clock=lambda: 0)
    recorder = recorder_of(scheduler)
    for i in range(20):
        run_one(scheduler, recorder, [i % 3] * 50, steps=2 + i)
    state = capture(scheduler)
    assert state["block_hashes"]
    assert state["service"]
    assert len(state["output_lengths"]) == 20
    other = Scheduler(config, clock=lambda: 0, step_time=StepTimeModel.from_dict(state["step_time"]))
    restore(other, state)
    assert capture(other) == state
    other.check()
    smaller = Scheduler(SchedulerConfig(num_blocks=2, max_context=30), clock=lambda: 0)
    restore(smaller, state)
    assert capture(smaller)["block_hashes"] == state["block_hashes"][-2:]
    scheduler.add([Request("r", [1], 1)])
    with pytest.raises(RuntimeError, match="has no requests"):
        capture(scheduler)
