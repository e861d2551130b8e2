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
from pyengine.errors import DeviceNotAvailable, InvalidRequest
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
    if dtype not in ("auto", *DTYPES):
        allowed = ", ".join(("auto", *DTYPES))
        raise InvalidRequest(
            f"dtype is {dtype!r}; it must be one of {allowed}.", field="dtype", value=dtype, limit=allowed
        )
    resolved = resolve_model(model)
    checkpoint = open_checkpoint(resolved.folder)
    spec = _served_spec(checkpoint, dtype, max_context)
    tokenizer = Tokenizer.from_folder(resolved.folder) if (resolved.folder / "tokenizer.json").exists() else None
    defaults = generation_defaults(checkpoint.generation_config)
    eos_ids = eos_token_ids(
        checkpoint.config, checkpoint.generation_config, tokenizer.eos_token_id if tokenizer else None
    )
    from pyengine.backends.cpu import CpuBackend

    backend = CpuBackend(spec, checkpoint, num_threads=num_threads, progress=progress)
    checkpoint.close()
    return LoadedModel(resolved.name, spec, tokenizer, defaults, eos_ids, backend)


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
