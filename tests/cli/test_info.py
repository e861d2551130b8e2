"""`pyengine info`, `--version`, `--help`, and what starting the command imports."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pyengine
from pyengine.backends import cuda_module
from pyengine.checkpoint import resolve_model
from pyengine.checkpoint.safetensors_files import read_header
from pyengine.cli.info import build_record, memory_need, model_record, run_build_info
from pyengine.errors import InvalidRequest
from pyengine.models import spec_from_config

ELSEWHERE = Path(__file__).parent


def imported_by(statement: str) -> set[str]:
    """Which modules a fresh interpreter has imported after a statement."""
    code = f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ELSEWHERE, capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n"))


def test_info_counts_what_the_checkpoint_holds(run: Callable[..., Any], built_in: list[str]) -> None:
    folder = resolve_model(built_in[-1] if built_in else None).folder
    config = json.loads((folder / "config.json").read_text())
    tensors = read_header(folder / "model.safetensors").values()
    record = json.loads(run("info", "--json", *built_in[1:]).out)
    assert record["parameters"] == sum(math.prod(tensor.shape) for tensor in tensors)
    assert record["stored_bytes"] == sum(tensor.num_bytes for tensor in tensors)
    assert record["context"] == config["max_position_embeddings"]
    assert record["architecture"]["layers"] == config["num_hidden_layers"]
    assert record["eos_token_ids"] != []
    assert record["sampling_defaults_origin"].startswith("generation_config.json")
    assert record["chat_template"] is False
    memory = record["memory"]
    assert memory["kv_tokens"] * memory["kv_bytes_per_token"] <= memory["free_bytes"] - memory["weight_bytes"]
    assert memory["full_contexts"] == pytest.approx(memory["kv_tokens"] / record["context"])


def test_info_counts_in_the_dtype_asked_for(run: Callable[..., Any], chat_model: Path) -> None:
    record = json.loads(run("info", str(chat_model), "--json", "--dtype", "bfloat16").out)
    assert (record["stored_dtype"], record["dtype"]) == ("float32", "bfloat16")
    assert record["stored_bytes"] == 4 * record["parameters"]
    assert record["memory"]["weight_bytes"] == 2 * record["parameters"]
    assert record["chat_template"] is True
    with pytest.raises(InvalidRequest, match="dtype is 'int8'; it must be one of auto, float32"):
        model_record(str(chat_model), "int8")


def test_info_for_people_shows_the_same_numbers(run: Callable[..., Any], chat_model: Path) -> None:
    record = model_record(str(chat_model), "auto")
    shown = run("info", str(chat_model)).out
    assert re.search(rf"^parameters +{record['parameters']:,}$", shown, re.MULTILINE)
    assert re.search(r"^context +65,536 tokens$", shown, re.MULTILINE)
    assert re.search(rf"^KV per token +{record['memory']['kv_bytes_per_token']:,} bytes", shown, re.MULTILINE)
    assert re.search(r"^chat template +yes$", shown, re.MULTILINE)


def test_what_fits_is_what_is_left_beside_the_weights() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "bfloat16"}
    spec = spec_from_config({**config, "max_position_embeddings": 1000})
    need = memory_need(spec, kv_dtype="bfloat16", free_bytes=2 * spec.num_parameters() + 2500 * 384 + 1)
    assert need.kv_bytes_per_token == 2 * 3 * 2 * 16 * 2  # keys and values, layers, heads, width, bytes
    assert (need.kv_tokens, need.full_contexts) == (2500, 2.5)
    assert memory_need(spec, kv_dtype="bfloat16", free_bytes=10).kv_tokens == 0


def test_info_of_the_build_names_the_instruction_set_in_use(run: Callable[..., Any]) -> None:
    known = build_record()["instruction_sets"]
    record = json.loads(run("info", "--build", "--json", PYENGINE_CPU_ISA=known[0]).out)
    assert (record["instruction_set"], record["instruction_sets"]) == (known[0], known)
    assert record["backends"] == (["cpu", "cuda"] if record["cuda"]["built"] else ["cpu"])
    assert record["python"] == sys.version.split()[0]
    assert f"in use: {known[-1]}" in run("info", "--build").out


def test_info_of_the_build_says_why_a_backend_is_not_there(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert re.search(r"^compiler +\w+ \d+\.", run("info", "--build").out, re.MULTILINE)
    monkeypatch.setattr(cuda_module, "native", None)
    cuda = build_record()["cuda"]
    assert (cuda["built"], list(cuda)) == (False, ["built", "reason"])
    assert cuda["reason"]
    assert not cuda["reason"].startswith("not built")


def test_info_of_the_build_asks_the_cuda_module_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"compiler": "GNU 14.2", "cuda_toolkit": "12.8.93", "architectures": "80-real 120-real 120-virtual"}
    monkeypatch.setattr(cuda_module, "native", SimpleNamespace(build=json.dumps(facts)))
    record = build_record()
    assert record["backends"] == ["cpu", "cuda"]
    assert record["cuda"] == {
        "built": True,
        "toolkit": "12.8.93",
        "architectures": ["80-real", "120-real", "120-virtual"],
    }
    run_build_info(as_json=False)
    assert "compiled with toolkit 12.8.93 for 80, 120, PTX of 120\n" in capsys.readouterr().out


def test_version_is_the_installed_one(run: Callable[..., Any]) -> None:
    finished = run("--version")
    try:
        expected = pyengine.__version__
    except ImportError:  # PackageNotFoundError: not installed, run from the source tree
        expected = "unknown (not installed)"
    assert finished.out == f"pyengine {expected}\n"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--help"], ["generate", "chat", "info", "Exit codes"]),
        (["generate", "--help"], ["--max-tokens", "--kv-cache-memory", "Sampling", "Examples"]),
    ],
)
def test_help_shows_options_and_examples_and_no_colours_in_a_pipe(
    run: Callable[..., Any], arguments: list[str], parts: list[str]
) -> None:
    finished = run(*arguments)
    assert [part for part in parts if part not in finished.out] == []
    assert "\x1b" not in finished.out
    assert finished.code == 0


def test_importing_the_package_or_showing_help_loads_nothing_heavy() -> None:
    heavy = {"numpy", "tokenizers", "jinja2", "pyengine.engine", "pyengine._cpu"}
    assert imported_by("import pyengine") & (heavy | {"typer", "rich"}) == set()
    shown = imported_by("from pyengine.cli import main; sys.argv = ['pyengine', '--help']; main()")
    assert "typer" in shown
    assert shown & heavy == set()


def test_info_loads_no_weights(chat_model: Path) -> None:
    shown = imported_by(f"from pyengine.cli import main; sys.argv = ['pyengine', 'info', {str(chat_model)!r}]; main()")
    assert "pyengine.checkpoint.folder" in shown
    assert shown & {"pyengine.engine", "pyengine.loading", "pyengine.backends.cpu"} == set()
