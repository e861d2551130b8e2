"""Parts of the command line that need no process: options, prompt files, interrupts, raw text."""

from __future__ import annotations

import dataclasses
import inspect
import os
import signal
from pathlib import Path

import pytest

from pyengine import Engine, InvalidRequest, SamplingParams
from pyengine.cli.options import EngineOptions, SamplingOptions
from pyengine.cli.process import InterruptRequest
from pyengine.cli.prompts import items_from_file
from pyengine.cli.terminal import shown_text


def names(options: type) -> set[str]:
    return {field.name for field in dataclasses.fields(options)}


def test_every_sampling_parameter_has_an_option() -> None:
    wanted = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names(SamplingOptions) - {"show_special_tokens"} == wanted - {"skip_special_tokens"}
    assert SamplingOptions().params() == SamplingParams()
    assert SamplingOptions(show_special_tokens=True).params() == SamplingParams(skip_special_tokens=False)


def test_every_engine_setting_has_an_option() -> None:
    wanted = set(inspect.signature(Engine.__init__).parameters)
    # A queue limit would only refuse what the command itself submits.
    assert names(EngineOptions) == wanted - {"self", "model", "progress", "max_queue"}
    assert EngineOptions().given() == {}
    assert EngineOptions(kv_cache_memory="0.5").given() == {"kv_cache_memory": 0.5}
    assert EngineOptions(kv_cache_memory="1GiB", num_threads=2).given() == {"kv_cache_memory": "1GiB", "num_threads": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \n", "has no prompts"),
        (b"{", "line 1: not valid JSON"),
        (b'{"prompt": "a"}\n\n[1]', "line 3: it must be an object with a prompt"),
        (b'{"prompt": "a", "temperature": 1}', "line 1: 'temperature' is not known; a record has prompt, id, params"),
        (b'{"prompt": "a", "params": 3}', "line 1: params is 3; it must be an object"),
        (b'{"prompt": "a", "params": {"top_p": 2}}', "line 1: top_p is 2"),
        (b'{"prompt": "\xff"}', "is not UTF-8: the byte 0xFF at position 12"),
    ],
)
def test_a_wrong_prompt_file_is_refused_with_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest) as caught:
        items_from_file(str(file), {}, is_jsonl=None)
    assert message in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"absent\.txt cannot be read: No such file"):
        items_from_file(str(tmp_path / "absent.txt"), {}, is_jsonl=None)


@pytest.mark.parametrize("bias", ["7", "a=1", "7=x"])
def test_a_wrong_logit_bias_is_refused(bias: str) -> None:
    with pytest.raises(InvalidRequest, match=f"--logit-bias is '{bias}'; write a token id and a number"):
        SamplingOptions(logit_bias=[bias]).params()


def test_params_of_a_record_come_on_top_of_those_for_all(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('{"prompt": "a", "params": {"top_p": 0.5, "logit_bias": {"3": 1.5}}}\n', encoding="utf-8-sig")
    (item,) = items_from_file(str(file), {"top_p": 0.1, "seed": 3}, is_jsonl=True)
    assert item.params == SamplingParams(top_p=0.5, logit_bias={3: 1.5}, seed=3)
    assert items_from_file(str(file), {}, is_jsonl=None)[0].prompt == file.read_text("utf-8-sig").rstrip()


def test_the_first_ctrl_c_is_a_request_and_the_second_one_raises() -> None:
    former = signal.getsignal(signal.SIGINT)
    with InterruptRequest() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is former


def test_shown_text_has_no_control_characters_but_tab_and_newline() -> None:
    everything = "".join(map(chr, range(0x300)))
    shown = shown_text(everything)
    assert len(shown) == len(everything)
    assert [c for c in shown if (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0) and c not in "\t\n"] == []
    assert shown[0x20:0x7F] == everything[0x20:0x7F]
    assert shown[0xA0:] == everything[0xA0:]
