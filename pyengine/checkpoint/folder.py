"""A model folder as it is downloaded: config, generation defaults, and weights by role, mapped and fully checked."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.checkpoint.safetensors_files import WEIGHT_DTYPES, MappedFile, StoredTensor, read_header
from pyengine.errors import InvalidRequest, ModelError
from pyengine.models import family_of
from pyengine.models.rope import longest_context
from pyengine.models.spec import DecoderSpec, role_shapes

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Tensors that old exports carry and that are computed from the config instead.
IGNORED_TENSORS = re.compile(r"\.rotary_emb\.inv_freq$")
_COMPARE_ROWS = 4096


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor of a checkpoint, still on disk until it is touched.

    Attributes:
        array: read-only values in the checkpoint's own type; bfloat16 as uint16 with the same bits.
        dtype: "float32", "float16" or "bfloat16".
    """

    array: npt.NDArray[Any]
    dtype: str
    shape: tuple[int, ...]
    _file: MappedFile
    _stored: StoredTensor

    def release(self) -> None:
        """Give the tensor's pages back; its values stay valid and would be read from disk again."""
        self._file.release(self._stored)


class Checkpoint:
    """An opened model folder. Tensors are mapped, not read; `TensorView.release` after use keeps memory small.

    Attributes:
        folder: where it lies.
        config: config.json, as it is.
        generation_config: generation_config.json, as it is; None if there is none.
        spec: what the model computes.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None,
        spec: DecoderSpec,
        tensors: Mapping[str, StoredTensor],
    ) -> None:
        self.folder = folder
        self.config = config
        self.generation_config = generation_config
        self.spec = spec
        self._tensors = dict(tensors)
        self._files: dict[Path, MappedFile] = {}

    @property
    def roles(self) -> tuple[str, ...]:
        """Every role that `tensor` answers: exactly those of role_shapes(spec)."""
        return tuple(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights as they are stored."""
        return sum(stored.num_bytes for stored in self._tensors.values())

    def tensor(self, role: str) -> TensorView:
        """The tensor of a role such as "layers.3.q". KeyError for a role the model does not have."""
        stored = self._tensors[role]
        if stored.file not in self._files:
            self._files[stored.file] = MappedFile(stored.file)
        file = self._files[stored.file]
        return TensorView(file.array(stored), WEIGHT_DTYPES[stored.dtype][0], stored.shape, file, stored)

    def served_context(self, max_context: int) -> int:
        """The longest sequence to serve, in tokens, as the user wants it: `max_context` itself if the model can do it.

        Raises:
            InvalidRequest: it is below 1 or beyond `longest_context` of the model's rope.
        """
        longest = longest_context(self.spec.rope, self.spec.max_context)
        if isinstance(max_context, bool) or not isinstance(max_context, int) or not 1 <= max_context <= longest:
            raise InvalidRequest(
                f"max_context is {max_context!r}; this model allows an integer from 1 to {longest}.",
                field="max_context",
                value=max_context,
                limit=longest,
            )
        return max_context

    def close(self) -> None:
        """Let go of the mappings; arrays handed out before stay valid until they are gone themselves."""
        self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder. Everything about the weights but their values is checked here, before any is read.

    A tied head: where config.json says that embedding and head are tied, one of the two tensors is enough; if both are
    there and differ, the head is used as it is, as HF does.

    Raises:
        ModelError: naming the file, the tensor or the key, what was found and what was expected.
    """
    folder = Path(path)
    if not os.path.isdir(folder):
        raise ModelError(f"{folder} is not a folder; a model folder holds config.json and *.safetensors.")
    config = read_json_object(folder / "config.json", _why_no_config(folder))
    generation_path = folder / "generation_config.json"
    generation_config = read_json_object(generation_path) if os.path.lexists(generation_path) else None
    family = family_of(config)
    spec = family.spec_from_config(config)
    stored = _all_tensors(folder)
    names = {role: family.tensor_name(role) for role in role_shapes(replace(spec, tied_head=False))}
    if spec.tied_head:
        spec, names = _with_tied_head(spec, names, stored)
    if config.get("dtype") is None and config.get("torch_dtype") is None and names["embedding"] in stored:
        stored_dtype = stored[names["embedding"]].dtype
        spec = replace(spec, dtype=WEIGHT_DTYPES.get(stored_dtype, (spec.dtype, ""))[0])
    return Checkpoint(folder, config, generation_config, spec, _tensors_by_role(folder, spec, names, stored))


def read_json_object(path: Path, hint: str = "") -> dict[str, Any]:
    """A JSON file that must hold an object. Raises ModelError if it is missing, unreadable or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        _refuse_link_to_nothing(path)
        raise ModelError(f"{path} is missing{hint}.") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; it must hold a JSON object.")
    return value


def _refuse_link_to_nothing(path: Path) -> None:
    """Raise ModelError for a symbolic link whose target is gone, as copies of a hub's cache have them."""
    if path.is_symlink() and not os.path.exists(path):
        raise ModelError(f"{path} is a link to nothing: {os.readlink(path)} does not exist.")


def _why_no_config(folder: Path) -> str:
    if (folder / "adapter_config.json").exists():
        return "; this folder holds an adapter, which has to be merged into its base model first"
    if any(folder.glob("*.gguf")):
        return "; GGUF files are not read directly, only Hugging Face folders are"
    return "; a model folder holds config.json, *.safetensors and tokenizer.json"


def _all_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name, from the single file or from the shards of the index."""
    if os.path.exists(folder / WEIGHTS_FILE):
        return read_header(folder / WEIGHTS_FILE)
    if not os.path.exists(folder / INDEX_FILE):
        _refuse_link_to_nothing(folder / WEIGHTS_FILE)
        _refuse_link_to_nothing(folder / INDEX_FILE)
        raise ModelError(_why_no_weights(folder))
    index = folder / INDEX_FILE
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is {weight_map!r}; it must be an object of tensor names and files.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or PurePosixPath(file).name != file or "\\" in file:
            raise ModelError(
                f"{index}: tensor {name} is said to be in {file!r}; it must be the name of a file beside it."
            )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not os.path.isfile(folder / shard)]
    if missing:
        _refuse_link_to_nothing(folder / missing[0])
        raise ModelError(f"{folder} lacks {_listed(missing)} of the {len(shards)} files that {INDEX_FILE} names.")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in read_header(folder / shard).items():
            if weight_map.get(name, shard) == shard:
                tensors[name] = tensor
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        where = ", ".join(sorted({weight_map[name] for name in absent}))
        raise ModelError(f"{index} names {_listed(absent)}, which is not in {where}.")
    return tensors


def _why_no_weights(folder: Path) -> str:
    message = f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}"
    pickled = sorted(p.name for suffix in ("*.bin", "*.pt", "*.pth") for p in folder.glob(suffix))
    others = sorted(p.name for suffix in ("*.safetensors", "*.gguf") for p in folder.glob(suffix))
    if pickled:
        return (
            f"{message}, but {_listed(pickled)}: pickled weights can run any code and need torch to be read; "
            f"convert them to safetensors, for example with save_pretrained of transformers."
        )
    return f"{message}, but {_listed(others)}, which is another layout." if others else f"{message}."


def _with_tied_head(
    spec: DecoderSpec, names: dict[str, str], stored: Mapping[str, StoredTensor]
) -> tuple[DecoderSpec, dict[str, str]]:
    embedding, head = stored.get(names["embedding"]), stored.get(names["head"])
    if embedding is not None and head is not None and not _same_values(embedding, head):
        return replace(spec, tied_head=False), names
    if embedding is None and head is not None:
        names = {**names, "embedding": names["head"]}
    return spec, names


def _same_values(left: StoredTensor, right: StoredTensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape) or left.dtype not in WEIGHT_DTYPES:
        return False
    files = MappedFile(left.file), MappedFile(right.file)
    views = files[0].array(left), files[1].array(right)
    rows = left.shape[0] if left.shape else 0
    same = all(
        np.array_equal(views[0][n : n + _COMPARE_ROWS], views[1][n : n + _COMPARE_ROWS])
        for n in range(0, rows, _COMPARE_ROWS)
    )
    files[0].release(left)
    files[1].release(right)
    return same


def _tensors_by_role(
    folder: Path, spec: DecoderSpec, names: Mapping[str, str], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    shapes = role_shapes(spec)
    missing = [names[role] for role in shapes if names[role] not in stored]
    if missing:
        hint = "; config.json says that the head is not tied to the embedding" if names["head"] in missing else ""
        raise ModelError(f"{folder}: {_listed(missing)} is missing from the weights{hint}.")
    expected = {names[role] for role in shapes} | ({names["head"], names["embedding"]} if spec.tied_head else set())
    unexpected = sorted(name for name in stored if name not in expected and not IGNORED_TENSORS.search(name))
    if unexpected:
        raise ModelError(
            f"{folder}: the weights hold {_listed(unexpected)}, which a {spec.family} model of this config.json "
            f"does not have; without it the model would be run half right."
        )
    for role, shape in shapes.items():
        tensor = stored[names[role]]
        if tensor.dtype not in WEIGHT_DTYPES:
            raise ModelError(
                f"{tensor.file}: tensor {tensor.name} has dtype {tensor.dtype}; "
                f"expected one of {', '.join(WEIGHT_DTYPES)}."
            )
        if tensor.shape != shape:
            raise ModelError(
                f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}; "
                f"by config.json it must be {list(shape)}."
            )
    return {role: stored[names[role]] for role in shapes}


def _listed(names: list[str], most: int = 3) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
