"""From a model's name to what an engine needs of it: spec, tokenizer, sampling defaults, a backend with its weights."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from pyengine.backends.base import Backend, Progress
from pyengine.checkpoint import (
    Checkpoint,
    GenerationDefaults,
    eos_token_ids,
    generation_defaults,
    open_checkpoint,
    resolve_model,
)
from pyengine.errors import DeviceNotAvailable, InvalidRequest, ModelError
from pyengine.models.spec import DTYPES, DecoderSpec
from pyengine.text import Tokenizer

DEVICES = ("auto", "cpu", "cuda", "cuda:N")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        name: as the user gave it, or the built-in model's.
        defaults: sampling defaults from the model's generation_config.json (see SamplingParams.with_defaults).
        eos_ids: every token that ends a sequence: of config, generation_config and tokenizer together.
        tokenizer: None when the folder has none; prompts are then token ids.
    """

    name: str
    spec: DecoderSpec
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    eos_ids: frozenset[int]
    backend: Backend


def load_model(
    model: str | os.PathLike[str] | None,
    *,
    device: str,
    dtype: str,
    max_context: int | None,
    num_threads: int | None,
    progress: Progress | None,
) -> LoadedModel:
    """Find, check and load a model. Raises ModelError, DeviceNotAvailable or InvalidRequest, naming what is wrong."""
    check_device(device)
    if model is not None and not (isinstance(model, str) or hasattr(model, "__fspath__")):
        raise InvalidRequest(
            f"model is a {type(model).__name__}; it must be a name, a path or None.", field="model", value=model
        )
    if progress is not None and not callable(progress):
        raise InvalidRequest(
            f"progress is {progress!r}; it must be callable or None.", field="progress", value=progress
        )
    if dtype not in ("auto", *DTYPES):
        allowed = ", ".join(("auto", *DTYPES))
        raise InvalidRequest(
            f"dtype is {dtype!r}; it must be one of {allowed}.", field="dtype", value=dtype, limit=allowed
        )
    from pyengine.backends.cpu import CpuBackend

    resolved = resolve_model(model)
    with open_checkpoint(resolved.folder) as checkpoint:
        spec = _served_spec(checkpoint, dtype, max_context)
        has_tokenizer = (resolved.folder / "tokenizer.json").exists()
        tokenizer = Tokenizer.from_folder(resolved.folder) if has_tokenizer else None
        defaults = generation_defaults(checkpoint.generation_config)
        eos_ids = _eos_ids(checkpoint, tokenizer)
        backend = CpuBackend(spec, checkpoint, num_threads=num_threads, progress=progress)
    return LoadedModel(resolved.name, spec, tokenizer, defaults, eos_ids, backend)


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every end-of-sequence id. A tokenizer may know tokens that the model does not have: they never end anything."""
    size = checkpoint.spec.vocab_size
    of_tokenizer = tokenizer.eos_token_id if tokenizer is not None else None
    if of_tokenizer is not None and of_tokenizer >= size:
        of_tokenizer = None
    ids = eos_token_ids(checkpoint.config, checkpoint.generation_config, of_tokenizer)
    if ids and max(ids) >= size:
        raise ModelError(
            f"{checkpoint.folder}: eos_token_id has {max(ids)} in config.json or generation_config.json; "
            f"the vocabulary has {size} tokens."
        )
    return ids


def check_device(device: str) -> None:
    """Raise unless `device` can be used here: InvalidRequest for an unknown name, DeviceNotAvailable otherwise."""
    kind, _, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind not in ("auto", "cpu", "cuda") or (number and (kind != "cuda" or not number.isdigit())):
        allowed = ", ".join(DEVICES)
        raise InvalidRequest(
            f"device is {device!r}; it must be one of {allowed}.", field="device", value=device, limit=allowed
        )
    if kind == "cuda":
        raise DeviceNotAvailable(
            f"device is {device!r}, but this version of pyengine has no CUDA backend; use device='cpu'."
        )


def _served_spec(checkpoint: Checkpoint, dtype: str, max_context: int | None) -> DecoderSpec:
    spec = checkpoint.spec
    if max_context is not None:
        if isinstance(max_context, bool) or not isinstance(max_context, int) or max_context < 2:
            raise InvalidRequest(
                f"max_context is {max_context!r}; it must be an integer >= 2.", field="max_context", value=max_context
            )
        spec = dataclasses.replace(spec, max_context=checkpoint.served_context(max_context))
    return spec if dtype == "auto" else dataclasses.replace(spec, dtype=dtype)
