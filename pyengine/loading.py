"""From a model's name to what an engine needs of it: spec, tokenizer, sampling defaults, a backend with its weights."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from pyengine.backends.base import Backend, Progress
from pyengine.backends.cuda_runtime import CudaRuntime, cuda_is_visible, cuda_runtime, simt_runtime
from pyengine.checkpoint import (
    Checkpoint,
    GenerationDefaults,
    eos_token_ids,
    generation_defaults,
    open_checkpoint,
    resolve_model,
)
from pyengine.errors import InvalidRequest, ModelError
from pyengine.models.spec import DTYPES, DecoderSpec
from pyengine.text import Tokenizer

DEVICES = ("auto", "cpu", "cuda", "cuda:N")
SIMT = "simt"  # the CUDA kernels on the host: for pyengine's own tests (see simt_runtime)

# "0" runs decode steps call by call, for profilers and checkers that cannot look into a graph.
GRAPHS_VARIABLE = "PYENGINE_CUDA_GRAPHS"


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
    deterministic: bool = False,
    progress: Progress | None,
) -> LoadedModel:
    """Find, check and load a model. Raises ModelError, DeviceNotAvailable or InvalidRequest, naming what is wrong."""
    kind, index = check_device(device)
    if not isinstance(deterministic, bool):
        raise InvalidRequest(
            f"deterministic is {deterministic!r}; it must be True or False.", field="deterministic", value=deterministic
        )
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
    runtime = _runtime(kind, index, device)
    resolved = resolve_model(model)
    with open_checkpoint(resolved.folder) as checkpoint:
        spec = _served_spec(checkpoint, dtype, max_context)
        has_tokenizer = (resolved.folder / "tokenizer.json").exists()
        tokenizer = Tokenizer.from_folder(resolved.folder) if has_tokenizer else None
        defaults = generation_defaults(checkpoint.generation_config)
        eos_ids = _eos_ids(checkpoint, tokenizer)
        backend: Backend
        if runtime is None:
            from pyengine.backends.cpu import CpuBackend

            backend = CpuBackend(spec, checkpoint, num_threads=num_threads, progress=progress)
        else:
            from pyengine.backends.cuda import CudaBackend

            uses_graphs = os.environ.get(GRAPHS_VARIABLE) != "0"
            backend = CudaBackend(
                spec, checkpoint, runtime, deterministic=deterministic, uses_graphs=uses_graphs, progress=progress
            )
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


def check_device(device: str) -> tuple[str, int]:
    """The kind of a device ("auto", "cpu", "cuda" or "simt") and its index. Raises InvalidRequest for another name."""
    kind, colon, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    is_known = kind == "cuda" if colon else kind in ("auto", "cpu", "cuda", SIMT)
    if not is_known or (colon and not (number.isascii() and number.isdigit())):
        allowed = ", ".join(DEVICES)
        raise InvalidRequest(
            f"device is {device!r}; it must be one of {allowed}.", field="device", value=device, limit=allowed
        )
    return kind, int(number or 0)


def _runtime(kind: str, index: int, device: str) -> CudaRuntime | None:
    """What runs the CUDA kernels, or None for the CPU backend. Raises DeviceNotAvailable."""
    if kind == SIMT:
        return simt_runtime()
    if kind == "cuda" or (kind == "auto" and cuda_is_visible()):
        return cuda_runtime(device, index)
    return None


def _served_spec(checkpoint: Checkpoint, dtype: str, max_context: int | None) -> DecoderSpec:
    spec = checkpoint.spec
    if max_context is not None:
        if isinstance(max_context, bool) or not isinstance(max_context, int) or max_context < 2:
            raise InvalidRequest(
                f"max_context is {max_context!r}; it must be an integer >= 2.", field="max_context", value=max_context
            )
        spec = dataclasses.replace(spec, max_context=checkpoint.served_context(max_context))
    return spec if dtype == "auto" else dataclasses.replace(spec, dtype=dtype)
