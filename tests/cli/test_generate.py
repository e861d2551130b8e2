"""`pyengine generate` as a program sees it: what is written where, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyengine import Engine, SamplingParams

PROMPT = "Once upon a time"
SAMPLED = ("--temperature", "0.8", "--seed", "7", "--max-tokens", "12")


@pytest.fixture(scope="module")
def engine(built_in: list[str]) -> Iterator[Engine]:
    with Engine(built_in[-1] if built_in else None) as engine:
        yield engine


def sampled(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "seed": 7, "max_tokens": 12, **changes})


def test_one_prompt_is_written_with_its_continuation_and_nothing_else(
    run: Callable[..., Any], built_in: list[str], engine: Engine
) -> None:
    finished = run("generate", PROMPT, *SAMPLED, *built_in)
    assert finished.out == PROMPT + engine.generate(PROMPT, sampled())[0].text + "\n"
    assert (finished.code, finished.err) == (0, "")


def test_sampling_options_and_no_echo_reach_the_engine(
    run: Callable[..., Any], built_in: list[str], engine: Engine
) -> None:
    token_id = engine.tokenizer.encode(" fox", add_special_tokens=False)[-1]
    params = sampled(top_k=5, min_p=0.1, repetition_penalty=1.2, stop=("e",), logit_bias={token_id: 50.0}, n=2)
    options = ["--top-k", "5", "--min-p", "0.1", "--repetition-penalty", "1.2", "--stop", "e", "--n", "2"]
    finished = run("generate", PROMPT, *SAMPLED, *options, "--logit-bias", f"{token_id}=50", "--no-echo", *built_in)
    expected = engine.generate(PROMPT, params)[0].outputs
    assert finished.out == "---\n".join(f"{completion.text}\n" for completion in expected)
    assert finished.code == 0


def test_a_refused_prompt_fails_alone_and_the_others_come_in_order(
    run: Callable[..., Any], built_in: list[str], engine: Engine
) -> None:
    finished = run("generate", PROMPT, "", "A fox", *SAMPLED, *built_in)
    texts = [output.text for output in engine.generate([PROMPT, "A fox"], sampled())]
    assert finished.out == f"{PROMPT}{texts[0]}\n---\nA fox{texts[1]}\n"
    assert finished.err.startswith("pyengine: error: prompt 1: prompt is empty")
    assert finished.err.count("\n") == 1
    assert finished.code == 1


def test_json_lines_hold_what_the_engine_returns(run: Callable[..., Any], built_in: list[str], engine: Engine) -> None:
    finished = run("generate", PROMPT, "", "A fox", *SAMPLED, "--logprobs", "2", "--json", *built_in)
    records = [json.loads(line) for line in finished.out.splitlines()]
    assert [record["id"] for record in records] == [0, 1, 2]
    assert [record["prompt"] for record in records] == [PROMPT, "", "A fox"]
    expected = engine.generate([PROMPT, "A fox"], sampled(logprobs=2))
    for record, output in zip((records[0], records[2]), expected, strict=True):
        shown, completion = record["outputs"][0], output.outputs[0]
        assert shown["text"] == completion.text
        assert tuple(shown["token_ids"]) == completion.token_ids
        assert shown["finish_reason"] == completion.finish_reason
        assert [entry["logprob"] for entry in shown["logprobs"]] == [e.logprob for e in completion.logprobs or ()]
        assert [len(entry["top"]) for entry in shown["logprobs"]] == [2] * len(completion.token_ids)
        assert record["metrics"]["prompt_tokens"] == len(output.prompt_token_ids)
        assert record["metrics"]["completion_tokens"] == len(completion.token_ids)
        assert record["error"] is None
    assert records[1]["error"]["type"] == "InvalidRequest"
    assert records[1]["error"]["field"] == "prompt"
    assert records[1]["outputs"][0]["finish_reason"] == "error"
    assert (finished.code, finished.err) == (1, "")


def test_json_holds_the_prompts_logprobs_where_asked_for(
    run: Callable[..., Any], built_in: list[str], engine: Engine
) -> None:
    finished = run("generate", PROMPT, "", *SAMPLED, "--prompt-logprobs", "1", "--json", *built_in)
    records = [json.loads(line) for line in finished.out.splitlines()]
    expected = engine.generate(PROMPT, sampled(prompt_logprobs=1))[0]
    shown = records[0]["prompt_logprobs"]
    assert expected.prompt_logprobs is not None
    assert [entry and entry["logprob"] for entry in shown] == [e and e.logprob for e in expected.prompt_logprobs]
    assert records[0]["outputs"][0]["text"] == expected.text
    assert records[1]["error"]["field"] == "prompt"


def test_json_records_of_a_file_bring_ids_and_params_of_their_own(
    run: Callable[..., Any], built_in: list[str], engine: Engine, tmp_path: Path
) -> None:
    ids = engine.tokenizer.encode("A fox")
    records = [{"prompt": ids, "id": "ids"}, {"prompt": PROMPT, "params": {"max_tokens": 3, "stop": "q"}}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(json.dumps(record) for record in records))
    finished = run("generate", "--file", str(file), "--json", *SAMPLED, *built_in)
    shown = [json.loads(line) for line in finished.out.splitlines()]
    assert [record["id"] for record in shown] == ["ids", 1]
    assert shown[0]["outputs"][0]["text"] == engine.generate([ids], sampled())[0].text
    assert shown[1]["outputs"][0]["text"] == engine.generate(PROMPT, sampled(max_tokens=3, stop="q"))[0].text


def test_lines_of_standard_input_are_prompts_with_file_and_else_it_is_one_prompt(
    run: Callable[..., Any], built_in: list[str]
) -> None:
    text = "A fox\r\n\nA “bear”\n"
    as_lines = run("generate", "--file", "-", "--json", "-t", "1", *built_in, stdin=text)
    assert [json.loads(line)["prompt"] for line in as_lines.out.splitlines()] == ["A fox", "A “bear”"]
    as_one = run("generate", "--json", "-t", "1", *built_in, stdin=text)
    assert [json.loads(line)["prompt"] for line in as_one.out.splitlines()] == ["A fox\r\n\nA “bear”"]


def test_stats_and_the_defaults_in_force_go_to_standard_error(
    run: Callable[..., Any], built_in: list[str], engine: Engine
) -> None:
    finished = run("generate", PROMPT, *SAMPLED, "--stats", "--verbose", *built_in)
    assert finished.out == PROMPT + engine.generate(PROMPT, sampled())[0].text + "\n"
    assert engine.model.defaults.origin in finished.err
    assert "tokens/s" in finished.err
    assert "first token" in finished.err
    assert "\x1b" not in finished.err


def test_a_lowered_max_tokens_is_said(run: Callable[..., Any], built_in: list[str], engine: Engine) -> None:
    finished = run("generate", PROMPT, "-t", "100000", "--max-context", "32", *built_in)
    left = 32 - len(engine.tokenizer.encode(PROMPT))
    assert f"max_tokens 100000 was lowered to {left}" in finished.err
    assert finished.code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--temperature", "-1"], "pyengine: error: temperature is -1.0; it must be a number >= 0"),
        (["x", "--file", "y"], "pyengine: error: --file and prompts were both given"),
        (["x", "--dtype", "int8"], "pyengine: error: dtype is 'int8'; it must be one of auto, float32"),
        (["x", "--top-k", "many"], "--top-k"),
        (["x", "--max-tokens", "0"], "pyengine: error: max_tokens is 0; it must be an integer >= 1.\n"),
        (["x", "--logprobs", "2"], "--logprobs is 2, but without --json no log-probability is shown; add --json"),
        (["x", "--prompt-logprobs", "0"], "--prompt-logprobs is 0, but without --json"),
        (["x", "--jsonl"], "--jsonl says what FILE holds; add --file FILE"),
        (["x", "--lines"], "--lines says what FILE holds; add --file FILE"),
    ],
)
def test_a_wrong_command_line_is_named_and_exits_2(
    run: Callable[..., Any], built_in: list[str], arguments: list[str], message: str
) -> None:
    finished = run("generate", *arguments, *built_in)
    assert message in finished.err
    assert "Traceback" not in finished.err
    assert (finished.code, finished.out) == (2, "")


def test_a_wrong_record_is_named_with_its_line_before_anything_runs(
    run: Callable[..., Any], built_in: list[str]
) -> None:
    finished = run(
        "generate", "-f", "-", "--jsonl", *built_in, stdin='{"prompt": "x"}\n{"prompt": "x", "params": {"topp": 1}}'
    )
    assert "standard input, line 2: 'topp' is not a sampling parameter" in finished.err
    assert (finished.code, finished.out) == (2, "")


def test_a_record_that_asks_for_logprobs_needs_json(run: Callable[..., Any], built_in: list[str]) -> None:
    record = '{"prompt": "x", "id": "a", "params": {"logprobs": 1}}'
    finished = run("generate", "-f", "-", "--jsonl", *built_in, stdin=record)
    assert "prompt a: params has logprobs, but without --json" in finished.err
    assert (finished.code, finished.out) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-model"], "There is no model 'no-such-model'"),
        (["--device", "cuda:99"], "device is 'cuda:99'"),
    ],
)
def test_a_model_or_device_that_is_not_there_is_one_line_and_exits_1(
    run: Callable[..., Any], built_in: list[str], arguments: list[str], message: str
) -> None:
    finished = run("generate", "x", *built_in, *arguments)
    assert finished.err.startswith(f"pyengine: error: {message}")
    assert finished.err.count("\n") == 1
    assert (finished.code, finished.out) == (1, "")


def test_a_reader_that_goes_away_ends_it_quietly(
    start: Callable[..., subprocess.Popen[bytes]], chat_model: Path
) -> None:
    reading, writing = os.pipe()
    process = start("generate", "x", "-m", str(chat_model), "--ignore-eos", stdout=writing)
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("arguments", [["generate", "--help"], ["--version"], ["info", "--build"]])
def test_help_and_facts_for_a_reader_that_has_gone_away_end_like_text(
    start: Callable[..., subprocess.Popen[bytes]], arguments: list[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start(*arguments, stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("arguments", [["generate", "x", "-t", "2"], ["generate", "--help"], ["--version"]])
def test_without_a_standard_output_nothing_gets_lost_quietly(
    start: Callable[..., subprocess.Popen[bytes]], built_in: list[str], arguments: list[str]
) -> None:
    options = built_in if arguments[1:2] == ["x"] else []
    process = start(*arguments, *options, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.close(1))
    _, err = process.communicate(timeout=60)
    assert err == b"pyengine: error: Standard output cannot be written: it is closed.\n"
    assert process.returncode == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["generate", "x", "-t", "2"], ["generate", "--help"], ["--version"]])
def test_a_full_disk_is_one_line_and_exits_1(
    start: Callable[..., subprocess.Popen[bytes]], built_in: list[str], arguments: list[str]
) -> None:
    options = built_in if arguments[1:2] == ["x"] else []
    with open("/dev/full", "wb") as full:
        process = start(*arguments, *options, stdout=full.fileno())
        _, err = process.communicate(timeout=60)
    assert err.decode().startswith("pyengine: error: Standard output cannot be written: No space left")
    assert err.count(b"\n") == 1
    assert process.returncode == 1


def test_text_is_utf8_in_every_locale(run: Callable[..., Any], built_in: list[str]) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    finished = run("generate", "“Café”", "-t", "1", *built_in, **plain)
    assert finished.out.startswith("“Café”")
    assert finished.code == 0


def test_a_pipe_gets_control_characters_as_the_model_wrote_them(run: Callable[..., Any], chat_model: Path) -> None:
    escape = escape_token(chat_model)
    finished = run("generate", "x", "-m", str(chat_model), "--logit-bias", f"{escape}=100", "-t", "3", "--no-echo")
    assert finished.out == "\x1b\x1b\x1b\n"


def escape_token(chat_model: Path) -> int:
    vocabulary = json.loads((chat_model / "tokenizer.json").read_text())["model"]["vocab"]
    return int(vocabulary[chr(0x100 + 0x1B)])  # where byte-level vocabularies put the byte 0x1B
