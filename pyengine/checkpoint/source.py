"""From what a user calls a model to a folder on disk: built-in names, paths, hub ids; reads no weights."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from pyengine.checkpoint import smollm2
from pyengine.checkpoint.folder import INDEX_FILE, WEIGHTS_FILE, read_json_object
from pyengine.checkpoint.progress import ProgressCallback
from pyengine.errors import ModelError

BUILT_IN = "stories-1m"
NAMES = (BUILT_IN, smollm2.NAME)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]
# Other layouts of the same weights, and everything in sub-folders.
_HUB_NOT = ["*/*", "consolidated*"]
_SHOWN_CHARACTERS = 200  # of a path that may be absurdly long


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A folder with a model in it, and what to call it."""

    folder: Path
    name: str


def resolve_model(
    name_or_path: str | os.PathLike[str] | None = None, *, progress: ProgressCallback | None = None
) -> ResolvedModel:
    """Find a model: None or a built-in name, a folder, or an id "owner/name" of the Hugging Face hub.

    A name that is built in wins over a folder of the same name in the working directory (write ./name for that). A hub
    id is taken from the hub's local cache if it is complete there, else downloaded.

    Args:
        progress: called with (what, part done or None); None shows a bar if standard error is a terminal.

    Raises:
        ModelError: nothing of that name, or it cannot be fetched; the message says what was tried.
    """
    if name_or_path is None or name_or_path == BUILT_IN:
        return ResolvedModel(built_in_folder(), BUILT_IN)
    if name_or_path == smollm2.NAME:
        return ResolvedModel(smollm2.smollm2_folder(progress), smollm2.NAME)
    text = os.fspath(name_or_path)
    path = _expanded(text)
    mode = _mode_of(path) if text else None
    if mode is not None and stat.S_ISDIR(mode):
        return ResolvedModel(path, path.resolve().name)
    if mode is not None:
        kind = "GGUF files are not loaded directly" if path.suffix == ".gguf" else "a single file is not a model"
        raise ModelError(f"{path} is a file: {kind}; give the folder that holds config.json and *.safetensors.")
    if isinstance(name_or_path, str) and _HUB_ID.fullmatch(text):
        return ResolvedModel(_hub_folder(text, progress), text)
    if text and path.is_symlink():
        raise ModelError(f"{path} is a link to nothing: {os.readlink(path)} does not exist.")
    raise ModelError(
        f"There is no model {text!r}: it is neither a built-in name ({', '.join(NAMES)}), nor a folder that exists, "
        f"nor an id of the form owner/name."
    )


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ModelError(f"There is no model {text!r}: nobody's home folder is {text.split('/')[0]}.") from error


def _mode_of(path: Path) -> int | None:
    """What lies at a path, as os.stat says it; None for nothing. Raises ModelError if that cannot be found out."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null character
        return None
    except OSError as error:
        shown = str(path) if len(str(path)) <= _SHOWN_CHARACTERS else f"{str(path)[:_SHOWN_CHARACTERS]}..."
        raise ModelError(f"The model {shown} cannot be read: {error.strerror or error}.") from error


def built_in_folder() -> Path:
    """The folder of the built-in model inside the installed package. Raises ModelError if the package lacks it."""
    folder = Path(__file__).resolve().parent.parent / "weights" / BUILT_IN
    if not (folder / "config.json").is_file():
        raise ModelError(f"The built-in model is not where it should be, {folder}; reinstall pyengine-llm.")
    return folder


def _hub_folder(model_id: str, progress: ProgressCallback | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                model_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_NOT, local_files_only=local_files_only
            )
        )

    tried = f"there is no folder {model_id}, it is not complete in the hub's local cache"
    try:
        folder = snapshot(local_files_only=True)
        if _is_complete(folder):
            return folder
    except LocalEntryNotFoundError:
        pass  # not in the local cache: it has to be downloaded
    if progress is not None:
        progress(f"Fetching {model_id} from the Hugging Face hub", None)
    try:
        return snapshot(local_files_only=False)
    except Exception as error:  # the hub's client passes on whatever its transport raises
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"The model {model_id!r} cannot be loaded: {tried}, and downloading it failed ({reason}). "
            f"Without a network, give the path of a folder or the name {BUILT_IN}, which is always there."
        ) from error


def _is_complete(folder: Path) -> bool:
    """Whether a local snapshot has config, tokenizer and all weights; hub snapshots may be partial."""
    if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
        return False
    if (folder / WEIGHTS_FILE).is_file():
        return True
    if not (folder / INDEX_FILE).is_file():
        return False
    weight_map = read_json_object(folder / INDEX_FILE).get("weight_map")
    return isinstance(weight_map, dict) and all((folder / str(file)).is_file() for file in weight_map.values())
