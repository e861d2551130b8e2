"""Bad input gets a typed error with the field, the value and the limit, and hurts nobody else in the batch."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from pyengine import (
    Engine,
    InvalidRequest,
    ModelError,
    NeverFits,
    QueueFull,
    RequestFailed,
    SamplingParams,
)

from .conftest import block_bytes, write_model

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([-1], "prompt"),
        ([5, 320], "prompt"),
        ([5, 2**70], "prompt"),
        ([5, 1.5], "prompt"),
        ([5, True], "prompt"),
        ([5, "6"], "prompt"),
        (b"bytes", "prompt"),
        (7, "prompt"),
        (None, "prompt"),
        ("a lone \ud800 surrogate", "prompt"),
    ],
)
def test_a_bad_prompt_is_refused_and_its_neighbours_are_not_touched(engine: Engine, prompt: Any, field: str) -> None:
    expected = engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    with pytest.raises(InvalidRequest) as refused:
        engine.submit(prompt, GREEDY)
    assert refused.value.field == field
    bad, good = engine.generate([prompt, [5, 6, 7]], GREEDY)
    assert isinstance(bad.error, InvalidRequest)
    assert bad.outputs[0].finish_reason == "error"
    assert good.outputs[0].token_ids == expected
    with pytest.raises(InvalidRequest):
        engine.generate([[5, 6, 7], prompt], GREEDY, on_error="raise")
    assert not engine.has_unfinished
    assert engine._scheduler.num_free_blocks == engine.limits.num_blocks


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias[1]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": 65}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_a_bad_sampling_parameter_is_refused_when_it_is_made(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**settings)
    assert refused.value.field == field
    assert field.split("[")[0] in str(refused.value)


def test_an_unknown_sampling_parameter_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(TypeError, match="top_kk"):
        SamplingParams(top_kk=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="temperature"):
        SamplingParams.from_dict({"top_kk": 3})


@pytest.mark.parametrize("settings", [{"logit_bias": {320: 1.0}}, {"stop_token_ids": [5, 400]}])
def test_token_ids_beyond_the_vocabulary_are_refused_at_submit(engine: Engine, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="320 tokens") as refused:
        engine.submit([5, 6], SamplingParams(**settings))
    assert refused.value.field in settings
    assert refused.value.limit == 319


def test_greedy_by_the_models_default_with_n_above_one_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(n=2).with_defaults({"temperature": 0.0})
    assert refused.value.field == "n"


def test_a_prompt_longer_than_the_context_never_fits_and_says_so_at_once(engine: Engine) -> None:
    with pytest.raises(NeverFits) as refused:
        engine.submit([5] * 512, GREEDY)
    assert (refused.value.need, refused.value.usable, refused.value.unit) == (513, 512, "tokens")
    with pytest.raises(NeverFits):
        engine.submit([5] * 100_000, GREEDY)
    assert not engine.has_unfinished  # nothing waits: it was decided at submit
    long, good = engine.generate([[5] * 600, [5, 6]], GREEDY)
    assert isinstance(long.error, NeverFits)
    assert good.error is None


def test_a_prompt_longer_than_the_pool_never_fits_and_names_both_numbers(model_folder: Path) -> None:
    with Engine(model_folder, kv_cache_memory=2 * block_bytes(model_folder)) as engine:
        with pytest.raises(NeverFits) as refused:
            engine.submit([5] * 33, GREEDY)
        assert (refused.value.need, refused.value.usable, refused.value.unit) == (3, 2, "blocks")
        assert engine.generate([[5] * 32], GREEDY)[0].error is None


def test_a_prompt_of_exactly_the_longest_length_makes_one_token(engine: Engine) -> None:
    output = engine.generate([[5] * 511], GREEDY)[0]
    assert len(output.outputs[0].token_ids) == 1
    assert output.metrics.max_tokens_clamped


def test_duplicate_and_wrong_request_ids_are_refused(engine: Engine) -> None:
    engine.submit([5, 6], GREEDY, request_id="mine")
    for wrong in ("mine", "", 5):
        with pytest.raises(InvalidRequest) as refused:
            engine.submit([5, 6], GREEDY, request_id=wrong)  # type: ignore[arg-type]
        assert refused.value.field == "request_id"
    while engine.has_unfinished:
        engine.step()
    assert engine.submit([5, 6], GREEDY, request_id="mine") == "mine"


def test_a_list_of_params_of_another_length_is_refused_with_both_lengths(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="2 for 3 prompts") as refused:
        engine.generate(["a", "b", "c"], [GREEDY, GREEDY])
    assert refused.value.field == "params"
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        engine.generate("a", {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="on_error"):
        engine.generate("a", GREEDY, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="at least one"):
        engine.generate([], GREEDY)


def test_a_full_queue_refuses_one_more_and_keeps_the_others(model_folder: Path) -> None:
    with Engine(model_folder, kv_cache_memory="4MiB", max_queue=2) as engine:
        ids = [engine.submit([5, 6], GREEDY), engine.submit([7], GREEDY)]
        with pytest.raises(QueueFull) as refused:
            engine.submit([8], GREEDY)
        assert refused.value.limit == 2
        ended = []
        while engine.has_unfinished:
            ended += [event.request_id for event in engine.step() if event.finish_reason == "length"]
        assert sorted(ended) == sorted(ids)
        # generate() feeds the queue as room appears; a request that the queue never holds is another matter.
        outputs = engine.generate([[5, i] for i in range(20)], GREEDY)
        assert [output.error for output in outputs] == [None] * 20
        with pytest.raises(InvalidRequest) as too_many:
            engine.submit([5, 6], SamplingParams(n=3, temperature=1.0))
        assert too_many.value.field == "n"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"device": "gpu"}, "device"),
        ({"device": "cpu:1"}, "device"),
        ({"device": 3}, "device"),
        ({"dtype": "int3"}, "dtype"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_seqs"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens"),
        ({"block_size": 15}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"kv_cache_memory": 0}, "kv_cache_memory"),
        ({"kv_cache_memory": 100}, "kv_cache_memory"),
        ({"kv_cache_memory": -5}, "kv_cache_memory"),
        ({"kv_cache_memory": 1.5}, "kv_cache_memory"),
        ({"kv_cache_memory": "a lot"}, "kv_cache_memory"),
        ({"kv_cache_memory": "900000GiB", "max_num_seqs": 2**16, "max_num_batched_tokens": 2**16}, "kv_cache_memory"),
        ({"max_num_batched_tokens": 2**40}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": 2**31}, "max_num_batched_tokens"),
        ({"block_size": 2**31}, "block_size"),
        ({"num_threads": 2**40}, "num_threads"),
        ({"progress": 5}, "progress"),
        ({"max_context": 513}, "max_context"),
        ({"max_context": 0}, "max_context"),
        ({"num_threads": 0}, "num_threads"),
        ({"num_threads": "2"}, "num_threads"),
        ({"max_queue": 0}, "max_queue"),
    ],
)
def test_a_bad_engine_setting_is_refused_by_name(model_folder: Path, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Engine(model_folder, **settings)
    assert refused.value.field == field
    assert field in str(refused.value)


@pytest.mark.parametrize("model", [5, b"x", ["a"]])
def test_a_model_that_is_no_name_and_no_path_is_refused(model: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Engine(model)
    assert refused.value.field == "model"


def test_errors_can_be_pickled_and_copied(engine: Engine) -> None:
    refused = engine.generate([[5] * 600, [5.5], [5, 6]], GREEDY)  # type: ignore[list-item]
    for output in pickle.loads(pickle.dumps(refused)) + copy.deepcopy(refused):
        assert output.error is None or output.error.args
    error = pickle.loads(pickle.dumps(NeverFits("It is too long.", need=5, usable=3)))
    assert (error.need, error.usable, str(error)) == (5, 3, "It is too long.")


def test_ids_from_text_that_the_model_does_not_have_are_refused_and_hurt_nobody(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = engine.tokenizer.encode
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text: [5, 320] if text == "<extra>" else encode(text))
    bad, good = engine.generate(["<extra>", "the cat"], GREEDY)
    assert isinstance(bad.error, InvalidRequest)
    assert "320 at position 1" in str(bad.error)
    assert good.error is None


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_id_beyond_the_vocabulary_is_refused_at_load(tmp_path: Path, file: str) -> None:
    folder = write_model(tmp_path / "model")
    settings = json.loads((folder / file).read_text()) if file == "config.json" else {}
    (folder / file).write_text(json.dumps({**settings, "eos_token_id": [1, 99999999]}))
    with pytest.raises(ModelError, match="eos_token_id has 99999999"):
        Engine(folder)


def test_stop_strings_are_refused_by_a_model_that_makes_no_text(tmp_path: Path) -> None:
    with Engine(write_model(tmp_path / "bare"), kv_cache_memory="4MiB") as bare:
        with pytest.raises(InvalidRequest) as refused:
            bare.submit([5, 6], SamplingParams(stop="x"))
        assert refused.value.field == "stop"


def test_a_pass_that_the_native_step_refuses_ends_its_requests_and_not_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = engine.model.backend.launch

    def refusing(*args: Any, **kwargs: Any) -> None:
        raise ValueError("argument 'token_ids' is bad")

    monkeypatch.setattr(engine.model.backend, "launch", refusing)
    (refused,) = engine.generate([[5, 6]], GREEDY)
    assert isinstance(refused.error, RequestFailed)
    monkeypatch.setattr(engine.model.backend, "launch", launch)
    assert engine.generate([[5, 6]], GREEDY)[0].error is None
    assert engine._scheduler.num_free_blocks == engine.limits.num_blocks


def test_the_largest_numbers_of_logprobs_work_in_the_smallest_step(engine: Engine) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=64, prompt_logprobs=64, ignore_eos=True)
    output = engine.generate([[5]], params)[0]
    assert output.outputs[0].logprobs is not None
    assert [len(entry.top) for entry in output.outputs[0].logprobs] == [64, 64, 64]


def test_an_unknown_engine_setting_is_refused(model_folder: Path) -> None:
    with pytest.raises(TypeError, match="kv_cache_size"):
        Engine(model_folder, kv_cache_size=5)  # type: ignore[call-arg]


def test_bad_messages_and_a_failing_template_are_refused(engine: Engine) -> None:
    for messages in ("hello", [], [{"role": "user"}], [{"content": "x"}], [5], [{"role": "user", "content": 5}]):
        with pytest.raises(InvalidRequest) as refused:
            engine.chat(messages, GREEDY)  # type: ignore[arg-type]
        assert refused.value.field == "messages"


def test_an_instruction_set_that_is_not_here_is_refused_by_name(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYENGINE_CPU_ISA", "avx99")
    with pytest.raises(InvalidRequest, match="PYENGINE_CPU_ISA") as refused:
        Engine(model_folder)
    assert refused.value.field == "PYENGINE_CPU_ISA"
