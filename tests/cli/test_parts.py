"""Parts of the command line that need no process: options, prompt files, interrupts, raw text."""

from __future__ import annotations

import dataclasses
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyengine import Engine, InvalidRequest, SamplingParams
from pyengine.cli import fetching
from pyengine.cli.options import EngineOptions, SamplingOptions
from pyengine.cli.process import InterruptRequest
from pyengine.cli.prompts import items_from_file
from pyengine.cli.terminal import shown_text

ELSEWHERE = Path(__file__).parent
OURS = ("pyengine", "numpy", "tokenizers", "jinja2", "typer")


def names(options: type) -> set[str]:
    return {field.name for field in dataclasses.fields(options)}


def test_every_sampling_parameter_has_an_option() -> None:
    wanted = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names(SamplingOptions) - {"show_special_tokens"} == wanted - {"skip_special_tokens"}
    assert SamplingOptions().params() == SamplingParams()
    assert SamplingOptions(show_special_tokens=True).params() == SamplingParams(skip_special_tokens=False)


def test_every_engine_setting_has_an_option() -> None:
    wanted = set(inspect.signature(Engine.__init__).parameters)
    assert names(EngineOptions) == wanted - {"self", "model", "progress"}
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
        (b'{"prompt": "a", "params": null}', "line 1: params is null; it must be an object"),
        (b'{"prompt": null}', "line 1: prompt is null; it must be a text or a list of token ids"),
        (b'{"prompt": "a"}\n{"prompt": "a", "prompt": "b"}', 'line 2: the key "prompt" is there twice'),
        (b'{"prompt": "a", "params": {"n": 1, "n": 2}}', 'line 1: the key "n" is there twice'),
        (b'{"prompt": "a", "id": NaN}', "line 1: JSON has no NaN"),
        (b'{"prompt": "a", "id": 1e999}', "line 1: 1e999 is too large a number"),
        (b'{"prompt": "a", "params": {"top_k": true}}', "line 1: top_k is true; it must be an integer >= 0."),
        (b'{"prompt": "a", "params": {"ignore_eos": null}}', "ignore_eos is null; it must be true or false."),
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


@pytest.mark.parametrize("module", ["typer", "pyengine.engine"])
def test_ctrl_c_while_modules_are_imported_ends_the_process_at_once(module: str, chat_model: Path) -> None:
    code = f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["pyengine", "generate", "x", "-t", "2", "-m", {str(chat_model)!r}]
from pyengine.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ELSEWHERE, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_nothing_is_imported_any_more_once_ctrl_c_raises(chat_model: Path) -> None:
    code = f"""
import signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL and name.partition(".")[0] in {OURS}:
            sys.stderr.write(name + chr(10))
sys.argv = ["pyengine", "chat", "x", "-t", "2", "-m", {str(chat_model)!r}]
from pyengine.cli import main
sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.SIG_DFL)
main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ELSEWHERE, capture_output=True, text=True, check=True)
    assert done.stderr == "(ended after 2 tokens, the limit)\n"


def test_an_ignored_ctrl_c_stays_ignored_and_one_at_the_very_end_changes_nothing() -> None:
    code = """
import atexit, os, signal, sys
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv = ["pyengine", "--version"]
from pyengine.cli import main
main()
"""
    for prepared in ("", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"):
        done = subprocess.run([sys.executable, "-c", prepared + code], cwd=ELSEWHERE, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.startswith(b"pyengine ")


def test_a_model_that_is_fetched_is_announced_line_by_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(model: str, *, progress: Callable[[str, float | None], None]) -> None:
        for what, part in (("Fetching", None), ("Converting", 0.0), ("Converting", 0.5), ("Building", None)):
            progress(what, part)

    monkeypatch.setattr(fetching, "resolve_model", resolve)
    fetching.found_model("owner/model")
    shown = capsys.readouterr()
    assert shown.err == "pyengine: Fetching ...\npyengine: Converting ...\npyengine: Building ...\n"
    assert shown.out == ""


def test_shown_text_has_no_control_characters_but_tab_and_newline() -> None:
    everything = "".join(map(chr, range(0x300)))
    shown = shown_text(everything)
    assert len(shown) == len(everything)
    assert [c for c in shown if (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0) and c not in "\t\n"] == []
    assert shown[0x20:0x7F] == everything[0x20:0x7F]
    assert shown[0xA0:] == everything[0xA0:]
