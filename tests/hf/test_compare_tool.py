"""tools/compare_hf.py as its users meet it: what it prints, and its exit codes."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from .comparison import compare_hf
from .conftest import FolderOf

NAME = "qwen3 gqa 128 tied"


def needs_hf() -> None:
    pytest.importorskip("torch", reason="needs the extra [hf-test]")
    pytest.importorskip("transformers", reason="needs the extra [hf-test]")


@pytest.mark.hf
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_that_agrees_gives_a_row_for_each_layer_and_exit_code_0(
    dtype: str, folder_of: FolderOf, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_hf()
    assert compare_hf.main([str(folder_of(NAME)), "--dtype", dtype]) == 0
    printed = capsys.readouterr().out
    for label in ("embedding", "layer 0", "layer 1", "layer 2", "logits", "KL(reference || pyengine)", "OK:"):
        assert label in printed
    assert ("KL(reference || transformers)" in printed) == (dtype != "float32")


@pytest.mark.hf
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_difference_beyond_the_tolerance_gives_exit_code_1(
    dtype: str, folder_of: FolderOf, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_hf()
    arguments = [str(folder_of(NAME)), "--dtype", dtype, "--prompt-ids", "5,6,7,8,9,300", "--tolerance", "1e-9"]
    assert compare_hf.main(arguments) == 1
    assert "BEYOND THE TOLERANCE" in capsys.readouterr().out


@pytest.mark.hf
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "Hello"], "has no tokenizer.json; use --prompt-ids"),
        (["--prompt-ids", "1,301"], "give integers from 0 to 300"),
        (["--prompt-ids", ",".join(["1"] * 449)], "The input has 449 tokens; 1 to 448 are possible"),
    ],
)
def test_an_input_that_cannot_be_compared_gives_a_sentence_and_exit_code_2(
    arguments: list[str], message: str, folder_of: FolderOf, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_hf()
    assert compare_hf.main([str(folder_of(NAME)), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.hf
def test_a_model_that_is_not_there_gives_a_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    needs_hf()
    assert compare_hf.main(["./no-such-model"]) == 2
    assert "There is no model './no-such-model'" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_is_named_together_with_the_extra_that_brings_it(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("torch", "transformers") if package == "torch" else ("transformers",):
        monkeypatch.setitem(sys.modules, name, None)
    if package == "transformers":
        monkeypatch.setitem(sys.modules, "torch", sys)
    assert compare_hf.main(["anything"]) == 2
    message = capsys.readouterr().err
    assert package in message
    assert "pyengine-llm[hf-test]" in message


@pytest.mark.parametrize("arguments", [["m", "--tolerance", "-1"], ["m", "--chunk", "0"], ["m", "--dtype", "int8"], []])
def test_bad_arguments_are_refused_with_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        compare_hf.main(arguments)
    assert stopped.value.code == 2


def test_a_difference_that_is_not_a_number_is_beyond_every_tolerance() -> None:
    reference = np.ones((2, 3), np.float32)
    assert compare_hf.relative_difference(reference, np.full_like(reference, np.nan)) == np.inf


def test_divergence_of_a_distribution_known_by_hand() -> None:
    p, q = np.log(np.float32([[0.5, 0.5]])), np.log(np.float32([[0.25, 0.75]]))
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert compare_hf.mean_kl(p, q) == pytest.approx(expected, rel=1e-6)
    assert compare_hf.mean_kl(p, p) == 0.0
