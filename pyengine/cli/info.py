"""`pyengine info`: what a model is and how much of it fits into memory, or what this build is. Loads no weights."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pyengine.backends.memory import available_memory
from pyengine.backends.native import native_context
from pyengine.checkpoint import Checkpoint, eos_token_ids, generation_defaults, open_checkpoint
from pyengine.cli.fetching import found_model
from pyengine.cli.terminal import TextOutput
from pyengine.errors import InvalidRequest
from pyengine.models.rope import longest_context
from pyengine.models.spec import DTYPES, DecoderSpec
from pyengine.text import Tokenizer

_ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
_NATIVE_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a model takes, in bytes, and what fits beside it in the memory that is free now.

    Attributes:
        kv_tokens: tokens of keys and values that fit beside the weights (workspaces, tens of MB, are not counted).
        full_contexts: sequences of full length that these tokens are.
    """

    weight_bytes: int
    kv_dtype: str
    kv_bytes_per_token: int
    free_bytes: int
    kv_tokens: int
    full_contexts: float


def memory_need(spec: DecoderSpec, *, kv_dtype: str, free_bytes: int) -> MemoryNeed:
    """What a model of this spec takes when it is served in `spec.dtype`."""
    weight_bytes = spec.num_parameters() * _ITEMSIZES[spec.dtype]
    per_token = spec.kv_bytes_per_token(_ITEMSIZES[kv_dtype])
    tokens = max(0, free_bytes - weight_bytes) // per_token
    return MemoryNeed(weight_bytes, kv_dtype, per_token, free_bytes, tokens, tokens / spec.max_context)


def run_info(model: str | None, *, dtype: str | None, as_json: bool) -> int:
    """Write what the model is. Returns 0; raises ModelError or InvalidRequest."""
    record = model_record(model, dtype or "auto")
    TextOutput().write(json.dumps(record, ensure_ascii=False) + "\n" if as_json else _model_lines(record))
    return 0


def run_build_info(*, as_json: bool) -> int:
    """Write what this build is. Returns 0."""
    record = build_record()
    if as_json:
        TextOutput().write(json.dumps(record) + "\n")
        return 0
    isas = ", ".join(record["instruction_sets"])
    rows = [
        ("pyengine", record["version"]),
        ("backends", ", ".join(record["backends"])),
        ("compiler", record["compiler"]),
        ("CUDA", _cuda_words(record["cuda"])),
        ("instruction sets", f"{isas} (of this build, usable here); in use: {record['instruction_set']}"),
        ("threads", record["threads"]),
        ("Python", f"{record['python']} on {record['platform']}"),
        ("NumPy", record["numpy"]),
    ]
    TextOutput().write(_lines(rows))
    return 0


def package_version() -> str:
    """The installed version; says so where pyengine runs from its source tree without being installed."""
    try:
        return version("pyengine-llm")
    except PackageNotFoundError:
        return "unknown (not installed)"


def build_record() -> dict[str, Any]:
    """Version, backends that are compiled in and what with, instruction sets, and what they run on.

    `cuda` has `built`, and where it is True the toolkit's version and the architectures in CMake's words ("90-real" is
    code for one, "120-virtual" is PTX for that one and newer ones), else the reason that CMake gave.
    """
    native = import_module("pyengine._cpu")
    facts = json.loads(native.build)
    cuda = _cuda_record(facts["cuda"])
    context = native_context()
    return {
        "version": package_version(),
        "backends": ["cpu", "cuda"] if cuda["built"] else ["cpu"],
        "compiler": facts["compiler"],
        "cuda": cuda,
        "instruction_sets": list(native.ops.supported_isas()),
        "instruction_set": context.isa,
        "threads": context.num_threads,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "numpy": version("numpy"),
    }


def _cuda_record(decision: str) -> dict[str, Any]:
    """What the module _cuda says of itself. `decision` is what was decided when _cpu was built."""
    native = import_module("pyengine.backends.cuda_module").native
    if native is None:
        reason = decision.removeprefix("not built: ")
        return {"built": False, "reason": "its module was removed" if reason == decision else reason}
    facts = json.loads(native.build)
    return {"built": True, "toolkit": facts["cuda_toolkit"], "architectures": facts["architectures"].split()}


def _cuda_words(cuda: dict[str, Any]) -> str:
    if not cuda["built"]:
        return f"not built: {cuda['reason']}"
    names = [
        f"PTX of {name.removesuffix('-virtual')}" if name.endswith("-virtual") else name.removesuffix("-real")
        for name in cuda["architectures"]
    ]
    return f"compiled with toolkit {cuda['toolkit']} for {', '.join(names)}"


def model_record(model: str | None, dtype: str) -> dict[str, Any]:
    """Everything that is shown about a model, as JSON has it."""
    if dtype not in ("auto", *DTYPES):
        allowed = ", ".join(("auto", *DTYPES))
        raise InvalidRequest(
            f"dtype is {dtype!r}; it must be one of {allowed}.", field="dtype", value=dtype, limit=allowed
        )
    resolved = found_model(model)
    with open_checkpoint(resolved.folder) as checkpoint:
        has_tokenizer = (resolved.folder / "tokenizer.json").exists()
        tokenizer = Tokenizer.from_folder(resolved.folder) if has_tokenizer else None
        served = checkpoint.spec if dtype == "auto" else replace(checkpoint.spec, dtype=dtype)
        kv_dtype = _kv_dtype(served.dtype)
        defaults = generation_defaults(checkpoint.generation_config)
        return {
            "name": resolved.name,
            "folder": str(resolved.folder),
            "architecture": _architecture(checkpoint.spec),
            "parameters": served.num_parameters(),
            "stored_dtype": checkpoint.spec.dtype,
            "stored_bytes": checkpoint.num_bytes,
            "dtype": served.dtype,
            "context": served.max_context,
            "longest_context": longest_context(served.rope, served.max_context),
            "memory": asdict(memory_need(served, kv_dtype=kv_dtype, free_bytes=available_memory())),
            "eos_token_ids": _eos_ids(checkpoint, tokenizer),
            "sampling_defaults": dict(defaults.values),
            "sampling_defaults_origin": defaults.origin,
            "sampling_settings_not_applied": list(defaults.not_applied),
            "tokenizer": has_tokenizer,
            "chat_template": tokenizer is not None and tokenizer.has_chat_template,
        }


def _kv_dtype(weights_dtype: str) -> str:
    """In which type the native step keeps keys and values."""
    native_name = native_context(1).activation_types(_NATIVE_NAMES[weights_dtype])[2]
    return next(name for name, native in _NATIVE_NAMES.items() if native == native_name)


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> list[int]:
    of_tokenizer = tokenizer.eos_token_id if tokenizer is not None else None
    return sorted(eos_token_ids(checkpoint.config, checkpoint.generation_config, of_tokenizer))


def _architecture(spec: DecoderSpec) -> dict[str, Any]:
    windows = sorted({window for window in spec.sliding_windows if window})
    return {
        "family": spec.family,
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocabulary": spec.vocab_size,
        "activation": spec.activation,
        "rope": spec.rope.kind,
        "rope_base": spec.rope.base,
        "sliding_windows": windows,
        "tied_head": spec.tied_head,
        "qk_norm": spec.qk_norm,
    }


def _model_lines(record: dict[str, Any]) -> str:
    shape, memory = record["architecture"], record["memory"]
    rows = [
        ("model", record["name"]),
        ("folder", record["folder"]),
        ("architecture", f"{shape['family']}, {shape['layers']} layers of {shape['hidden_size']}"),
        ("attention", _attention_words(shape)),
        ("feed-forward", f"{shape['intermediate_size']}, {shape['activation']}"),
        ("vocabulary", f"{shape['vocabulary']:,} tokens, {'tied' if shape['tied_head'] else 'separate'} head"),
        ("parameters", f"{record['parameters']:,}"),
        ("weights", f"{_size(memory['weight_bytes'])} in {record['dtype']}, stored as {record['stored_dtype']}"),
        ("context", f"{record['context']:,} tokens"),
        ("KV per token", f"{memory['kv_bytes_per_token']:,} bytes in {memory['kv_dtype']}"),
        ("free memory", f"{_size(memory['free_bytes'])}, {_fit_words(memory)}"),
        ("end tokens", ", ".join(str(token_id) for token_id in record["eos_token_ids"]) or "none"),
        ("sampling", record["sampling_defaults_origin"]),
        ("chat template", "yes" if record["chat_template"] else "no"),
    ]
    if not record["tokenizer"]:
        rows.append(("tokenizer", "none: prompts must be token ids"))
    return _lines(rows)


def _attention_words(shape: dict[str, Any]) -> str:
    words = f"{shape['heads']} heads, {shape['kv_heads']} of keys and values, {shape['head_dim']} wide"
    words += f"; rope {shape['rope']}, base {shape['rope_base']:g}"
    if shape["sliding_windows"]:
        words += f"; sliding window {', '.join(str(window) for window in shape['sliding_windows'])}"
    return words + ("; Q/K norm" if shape["qk_norm"] else "")


def _fit_words(memory: dict[str, Any]) -> str:
    if memory["free_bytes"] < memory["weight_bytes"]:
        return "too little for the weights"
    contexts = memory["full_contexts"]
    shown = f"{contexts:,.0f}" if contexts >= 10 else f"{contexts:.1f}"
    return f"room for {memory['kv_tokens']:,} tokens beside the weights: {shown} full contexts"


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} bytes"


def _lines(rows: list[tuple[str, Any]]) -> str:
    width = max(len(label) for label, _ in rows) + 2
    return "".join(f"{label:<{width}}{value}\n" for label, value in rows)
