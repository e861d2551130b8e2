"""Engine: what a caller gets for a good request, alone or among others, in time and in full."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from pyengine import Engine, EngineClosed, EngineFailed, InvalidRequest, RequestFailed, SamplingParams, StreamEvent
from pyengine.sampling_row import child_seed

from .conftest import POISON_TOKEN, block_bytes, write_model, write_tokenizer

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def drain(engine: Engine) -> list[StreamEvent]:
    events = []
    while engine.has_unfinished:
        events += engine.step()
    return events


def test_outputs_come_in_the_order_of_the_prompts_with_text_ids_counts_and_times(engine: Engine) -> None:
    outputs = engine.generate(["the cat", [5, 6, 7], "the old house on the hill"], GREEDY)
    assert [output.prompt for output in outputs] == ["the cat", None, "the old house on the hill"]
    for output in outputs:
        (completion,) = output.outputs
        assert len(completion.token_ids) == 8
        assert completion.text == engine.tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == "length"
        metrics = output.metrics
        assert metrics.prompt_tokens == len(output.prompt_token_ids)
        assert metrics.completion_tokens == 8
        assert metrics.first_token_s is not None
        assert metrics.finished_s is not None
        assert list(metrics.token_times_s[0]) == sorted(metrics.token_times_s[0])
        assert len(metrics.token_times_s[0]) == 8
        assert 0 <= metrics.queue_s <= metrics.first_token_s <= metrics.finished_s


def test_one_prompt_and_one_list_of_ids_are_prompts_of_their_own(engine: Engine) -> None:
    assert len(engine.generate("the cat", GREEDY)) == 1
    assert engine.generate([5, 6, 7], GREEDY)[0].prompt_token_ids == (5, 6, 7)


def test_stream_deltas_add_up_to_the_text_and_end_with_exactly_one_finish_reason(engine: Engine) -> None:
    expected = engine.generate("the cat", GREEDY)[0]
    events = list(engine.stream("the cat", GREEDY))
    assert "".join(event.text for event in events) == expected.text
    assert tuple(token for event in events for token in event.token_ids) == expected.outputs[0].token_ids
    assert [event.finish_reason for event in events] == [None] * 7 + ["length"]
    assert events[-1].metrics is not None
    assert events[-1].metrics.completion_tokens == 8


def test_submit_and_step_serve_many_requests_and_each_ends_once(engine: Engine) -> None:
    ids = [engine.submit([5 + i, 6, 7], GREEDY) for i in range(5)]
    events = drain(engine)
    ends = [event.request_id for event in events if event.finish_reason is not None]
    assert sorted(ends) == sorted(ids)
    assert not engine.has_unfinished
    assert engine.step() == []


def test_generate_leaves_the_events_of_submitted_requests_to_step(engine: Engine) -> None:
    submitted = engine.submit([9, 8, 7], GREEDY)
    expected = engine.generate([[9, 8, 7]], GREEDY)[0].outputs[0].token_ids
    events = drain(engine)
    assert {event.request_id for event in events} == {submitted}
    assert tuple(token for event in events for token in event.token_ids) == expected


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_abort_ends_a_request_in_any_state_and_changes_nobody_else(engine: Engine, steps: int) -> None:
    expected = engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    victim, other = engine.submit([4] * 40, GREEDY), engine.submit([5, 6, 7], GREEDY)
    events = [event for _ in range(steps) for event in engine.step()]
    assert engine.abort(victim)
    assert not engine.abort(victim)
    events += drain(engine)
    assert [e.finish_reason for e in events if e.request_id == victim and e.finish_reason] == ["abort"]
    assert tuple(t for e in events if e.request_id == other for t in e.token_ids) == expected
    assert engine._scheduler.num_free_blocks == engine.limits.num_blocks


def test_closing_a_stream_early_frees_its_blocks(engine: Engine) -> None:
    with engine.stream("the cat", GREEDY) as stream:
        next(stream)
    assert engine._scheduler.num_free_blocks == engine.limits.num_blocks
    dropped = engine.stream("the cat", GREEDY)
    next(dropped)
    del dropped
    gc.collect()
    assert not engine.has_unfinished
    assert engine._scheduler.num_free_blocks == engine.limits.num_blocks


def test_a_closed_engine_refuses_work_and_frees_its_memory(model_folder: Path) -> None:
    engine = Engine(model_folder, kv_cache_memory="4MiB")
    rid = engine.submit([5, 6], GREEDY)
    backend = weakref.ref(engine.model.backend)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosed, match="closed"):
        engine.submit([5, 6], GREEDY)
    assert [(e.request_id, e.finish_reason) for e in engine.step()] == [(rid, "abort")]
    del engine
    gc.collect()
    assert backend() is None


def test_dropping_the_last_reference_to_an_engine_frees_it(model_folder: Path) -> None:
    engine = Engine(model_folder, kv_cache_memory="4MiB")
    engine.generate([5, 6, 7], GREEDY)
    alive = weakref.ref(engine)
    del engine
    gc.collect()
    assert alive() is None


def test_n_completions_share_a_prompt_and_equal_requests_with_the_child_seeds(engine: Engine) -> None:
    prompt = [(7 * i) % 300 + 2 for i in range(37)]
    params = SamplingParams(max_tokens=10, temperature=1.2, seed=21, n=4, logprobs=1, ignore_eos=True)
    together = engine.generate([prompt], params)[0]
    assert [completion.index for completion in together.outputs] == [0, 1, 2, 3]
    assert len({completion.token_ids for completion in together.outputs}) == 4
    for completion in together.outputs:
        seed = child_seed(21, completion.index)
        single = SamplingParams(max_tokens=10, temperature=1.2, seed=seed, logprobs=1, ignore_eos=True)
        assert engine.generate([prompt], single)[0].outputs[0].token_ids == completion.token_ids
        assert engine.generate([prompt], single)[0].outputs[0].logprobs == completion.logprobs
    assert together.metrics.completion_tokens == 40
    assert engine._scheduler.num_free_blocks == engine.limits.num_blocks


def test_end_of_sequence_ends_a_completion_and_ignore_eos_goes_on(engine: Engine) -> None:
    force = {1: 100.0}
    ended = engine.generate("the cat", SamplingParams(max_tokens=5, temperature=0.0, logit_bias=force))[0].outputs[0]
    assert (ended.finish_reason, ended.stop_reason, ended.token_ids, ended.text) == ("stop", None, (1,), "")
    ignoring = SamplingParams(max_tokens=5, temperature=0.0, logit_bias=force, ignore_eos=True)
    assert engine.generate("the cat", ignoring)[0].outputs[0].token_ids == (1,) * 5


def test_no_end_before_min_tokens(engine: Engine) -> None:
    params = SamplingParams(max_tokens=9, min_tokens=4, temperature=0.0, logit_bias={1: 100.0, 8: 90.0})
    completion = engine.generate("the cat", params)[0].outputs[0]
    assert completion.token_ids == (8, 8, 8, 8, 1)
    stop_id = SamplingParams(
        max_tokens=9, min_tokens=4, temperature=0.0, logit_bias={8: 100.0, 9: 90.0}, stop_token_ids=[8]
    )
    completion = engine.generate("the cat", stop_id)[0].outputs[0]
    assert (completion.token_ids, completion.stop_reason) == ((9, 9, 9, 9, 8), 8)


def test_a_stop_string_that_spans_tokens_cuts_the_text_before_it(engine: Engine) -> None:
    whole = engine.generate("the cat", GREEDY)[0]
    text = whole.text
    assert len(text) >= 6
    stop = text[2:5]
    begin = text.find(stop)
    output = engine.generate("the cat", SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, stop=[stop]))[0]
    completion = output.outputs[0]
    assert completion.text == text[:begin]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert whole.outputs[0].token_ids[: len(completion.token_ids)] == completion.token_ids
    events = list(engine.stream("the cat", SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, stop=[stop])))
    assert "".join(event.text for event in events) == completion.text


def test_logprobs_are_the_raw_models_and_do_not_change_with_temperature_or_bias(engine: Engine) -> None:
    base = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
    warm = SamplingParams(max_tokens=1, temperature=5.0, seed=1, logprobs=5, logit_bias={3: 2.0}, presence_penalty=1.0)
    (first,), (second,) = (engine.generate([[5, 6, 7]], p)[0].outputs[0].logprobs or () for p in (base, warm))
    assert first.top == second.top
    assert first.token_id == first.top[0][0]
    assert all(logprob <= 0 for _, logprob in first.top)
    assert [pair[1] for pair in first.top] == sorted((pair[1] for pair in first.top), reverse=True)


def test_the_models_defaults_apply_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.25, "top_k": 7, "max_new_tokens": 3, "eos_token_id": [1, 2]}'
    )
    with Engine(folder, kv_cache_memory="4MiB") as engine:
        defaults = engine.default_sampling
        assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.25, 7, 3)
        assert engine.model.eos_ids == {1, 2}
        assert "temperature 0.25" in engine.model.defaults.origin
        assert engine.generate([5, 6])[0].metrics.max_tokens == 3
        assert engine.generate([5, 6], SamplingParams(max_tokens=2))[0].metrics.max_tokens == 2


def test_max_tokens_beyond_the_pool_is_clamped_said_and_hurts_nobody(model_folder: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    small = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    with Engine(model_folder, kv_cache_memory=2 * block_bytes(model_folder)) as engine:
        big, behind = engine.generate([[3] * 31, [4]], [params, small])
    assert big.metrics.max_tokens_clamped
    # 32 tokens have a KV slot; the last token made needs none.
    assert (big.metrics.max_tokens, len(big.outputs[0].token_ids)) == (2, 2)
    assert big.outputs[0].finish_reason == "length"
    assert len(behind.outputs[0].token_ids) == 2
    assert not behind.metrics.max_tokens_clamped


def test_requests_that_outgrow_the_pool_together_all_complete(model_folder: Path) -> None:
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    with Engine(model_folder, kv_cache_memory=9 * block_bytes(model_folder), capacity="optimistic") as engine:
        outputs = engine.generate([[i + 2] * (20 + i) for i in range(8)], params)
        assert engine._scheduler.num_free_blocks == engine.limits.num_blocks
    assert sum(output.metrics.preemptions for output in outputs) > 0
    assert all(len(output.outputs[0].token_ids) == 50 for output in outputs)


def test_a_request_whose_logits_are_not_finite_fails_alone_and_leaves_clean_blocks(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "poisoned", poisoned=True)
    avoid = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logit_bias={POISON_TOKEN: -100.0})
    good = [[5, 6, 7], [8] * 20]
    with Engine(folder, kv_cache_memory=4 * block_bytes(folder)) as engine:
        expected = [output.outputs[0].token_ids for output in engine.generate(good, avoid)]
        for _ in range(3):  # the poisoned request's blocks go to others
            first, bad, second = engine.generate([good[0], [POISON_TOKEN] * 18, good[1]], avoid)
            assert isinstance(bad.error, RequestFailed)
            assert bad.outputs[0].finish_reason == "error"
            assert [first.outputs[0].token_ids, second.outputs[0].token_ids] == expected
            assert engine._scheduler.num_free_blocks == engine.limits.num_blocks


def test_a_fault_in_one_requests_text_ends_that_request_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyengine.completion import CompletionState

    expected = engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    push = CompletionState.push

    def failing(self: CompletionState, *args: Any) -> str:
        if self.prompt_token_ids == (9, 9):
            raise OverflowError("broken text")
        return push(self, *args)

    monkeypatch.setattr(CompletionState, "push", failing)
    bad, good = engine.generate([[9, 9], [5, 6, 7]], GREEDY)
    assert isinstance(bad.error, RequestFailed)
    assert "broken text" in str(bad.error)
    assert good.outputs[0].token_ids == expected
    assert engine._scheduler.num_free_blocks == engine.limits.num_blocks


def test_when_a_pass_fails_every_request_learns_it_and_new_ones_are_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("device lost")

    ids = {engine.submit([5, 6, 7], GREEDY), engine.submit([8], GREEDY)}
    monkeypatch.setattr(engine.model.backend, "launch", broken)
    events = drain(engine)
    assert {event.request_id for event in events} == ids
    for event in events:
        assert event.finish_reason == "error"
        assert isinstance(event.error, EngineFailed)
        assert "device lost" in str(event.error)
    with pytest.raises(EngineFailed, match="device lost"):
        engine.submit([5, 6, 7], GREEDY)
    assert engine.step() == []


def test_chat_renders_the_template_once_with_one_bos(engine: Engine) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    output = engine.chat(messages, GREEDY)
    assert output.prompt_token_ids[0] == 0
    assert output.prompt_token_ids.count(0) == 1
    assert engine.tokenizer.decode(output.prompt_token_ids) == "[user] the cat\n"
    streamed = "".join(event.text for event in engine.stream_chat(messages, GREEDY))
    assert streamed == output.text


def test_a_folder_without_a_tokenizer_takes_ids_and_says_why_text_is_refused(tmp_path: Path) -> None:
    with Engine(write_model(tmp_path / "bare"), kv_cache_memory="4MiB") as engine:
        assert len(engine.generate([[5, 6]], GREEDY)[0].outputs[0].token_ids) == 8
        with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
            engine.submit("the cat")


def test_an_interrupt_in_a_pass_is_raised_after_it_and_loses_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    launch = engine.model.backend.launch

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return launch(*args, **kwargs)

    submitted = engine.submit([5, 6, 7], GREEDY)
    events = engine.step()
    monkeypatch.setattr(engine.model.backend, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[8, 9]], GREEDY)
    monkeypatch.setattr(engine.model.backend, "launch", launch)
    events += drain(engine)
    assert tuple(token for event in events for token in event.token_ids) == expected
    assert {event.request_id for event in events} == {submitted}
    assert engine._scheduler.num_free_blocks == engine.limits.num_blocks
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# One may hit a callback of the garbage collector, where Python reports it and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_moment_leave_the_engine_whole(engine: Engine) -> None:
    expected = engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids

    def interrupt(number: int, frame: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    former = signal.signal(signal.SIGALRM, interrupt)
    rng = random.Random(0)
    num_interrupted = 0
    try:
        for _ in range(150):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, 0.004))
                engine.generate([[5, 6, 7], [8] * 20, [9, 10]], GREEDY)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                num_interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert num_interrupted > 10
    drain(engine)
    assert engine._scheduler.num_free_blocks == engine.limits.num_blocks
    assert engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids == expected


def test_an_engine_in_use_by_a_daemon_thread_does_not_abort_the_process_at_its_end(model_folder: Path) -> None:
    script = f"""
import threading, time
from pyengine import Engine, SamplingParams
engine = Engine({str(model_folder)!r}, kv_cache_memory="16MiB")
params = SamplingParams(max_tokens=400, ignore_eos=True)
threading.Thread(target=lambda: engine.generate([[i + 2] for i in range(64)], params), daemon=True).start()
time.sleep(0.1)
"""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script], check=True, cwd=os.path.sep, timeout=60)


def test_times_of_a_request_stand_still_once_it_has_ended(engine: Engine) -> None:
    quick = SamplingParams(max_tokens=1, temperature=0.0)
    long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    first, second = engine.generate([[5, 6], [7, 8]], [quick, long])
    assert first.metrics.finished_s == first.metrics.token_times_s[0][-1]
    assert second.metrics.finished_s == second.metrics.token_times_s[0][-1]
    stream = engine.stream([5, 6], quick)
    (event,) = list(stream)
    assert event.metrics == stream.output.metrics


def test_closing_a_stream_whose_id_is_in_use_again_leaves_the_new_request_alone(engine: Engine) -> None:
    with engine.stream([5, 6], SamplingParams(max_tokens=1)) as stream:
        list(stream)
        again = engine.submit([5, 6, 7], GREEDY, request_id=stream.request_id)
    assert [event.finish_reason for event in drain(engine) if event.request_id == again][-1] == "length"


def test_a_closed_engine_cannot_be_entered_again(model_folder: Path) -> None:
    engine = Engine(model_folder, kv_cache_memory="4MiB")
    engine.close()
    with pytest.raises(EngineClosed), engine:
        pass


def test_the_last_event_of_a_request_and_no_other_carries_the_whole_answer(engine: Engine) -> None:
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=2, n=3, ignore_eos=True, prompt_logprobs=1)
    events = list(engine.stream([5, 6, 7], params))
    assert [event.output is not None for event in events] == [False] * (len(events) - 1) + [True]
    output = events[-1].output
    assert output is not None
    assert output.finished
    assert output.outputs == engine.generate([[5, 6, 7]], params)[0].outputs
    assert output.prompt_logprobs is not None


def test_prompt_logprobs_of_preempted_requests_come_once_and_unchanged(model_folder: Path) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    prompts = [[(17 * i + j) % 300 + 2 for j in range(20 + i)] for i in range(6)]
    with Engine(model_folder, kv_cache_memory="16MiB") as roomy:
        expected = [output.prompt_logprobs for output in roomy.generate(prompts, params)]
    with Engine(model_folder, kv_cache_memory=12 * block_bytes(model_folder), capacity="optimistic") as tight:
        outputs = tight.generate(prompts, params)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    assert [output.prompt_logprobs for output in outputs] == expected
    assert [len(known or ()) for known in expected] == [len(prompt) for prompt in prompts]


def test_the_time_in_the_queue_is_what_a_request_waited_for_the_only_seat(model_folder: Path) -> None:
    with Engine(model_folder, kv_cache_memory="4MiB", max_num_seqs=1) as engine:
        ids = [engine.submit([5, 6], GREEDY), engine.submit([7, 8], GREEDY)]
        first, second = (engine._live[request_id].sequences[0].request for request_id in ids)
        ends = [event for event in drain(engine) if event.finish_reason is not None]
    assert [event.request_id for event in ends] == ids
    assert first.finished_ns is not None
    assert second.started_ns is not None
    assert second.started_ns >= first.finished_ns
    metrics = ends[1].metrics
    assert metrics is not None
    assert metrics.queue_s == (second.started_ns - second.arrival_ns) / 1e9 > 0
