"""Converts a GGUF file of a Llama-shaped model into a Hugging Face folder in bfloat16; runs no model from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.checkpoint.progress import ProgressCallback
from pyengine.checkpoint.safetensors_files import write_safetensors
from pyengine.errors import ModelError
from pyengine.models import llama
from pyengine.models.spec import DecoderSpec, role_shapes

GLOBAL_TENSORS = {"embedding": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
LAYER_TENSORS = {
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a special token


def convert_llama_gguf(gguf_file: Path, folder: Path, progress: ProgressCallback) -> None:
    """Write config, weights, tokenizer and generation config of a GGUF file into a folder that exists and is empty.

    Handled: architecture `llama` without rope scaling, tokenizer `gpt2` with the splitting rule `smollm`; quantised
    tensors are expanded. Weights are rounded to bfloat16, ties to even.

    Raises:
        ModelError: if the file is not one, or is of another kind, or lacks a tensor.
    """
    import gguf

    progress("Reading the GGUF file", None)
    try:
        reader = gguf.GGUFReader(gguf_file)
    except (ValueError, OSError, IndexError) as error:
        raise ModelError(f"{gguf_file} is not a readable GGUF file: {error}.") from error
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    metadata = {name: fields[name].contents() for name in fields}
    _check_kind(gguf_file, metadata)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = hf_config(metadata, tied_head=GLOBAL_TENSORS["head"] not in tensors)
    spec = llama.spec_from_config(config)
    names = {role: gguf_tensor_name(role) for role in role_shapes(spec)}
    missing = [name for name in names.values() if name not in tensors]
    if missing or len(tensors) != len(names):
        extra = sorted(set(tensors) - set(names.values()))
        raise ModelError(f"{gguf_file}: tensors missing: {missing[:3]}, not known: {extra[:3]}.")

    def weights() -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for done, (role, name) in enumerate(names.items()):
            progress("Converting weights", done / len(names))
            tensor = tensors[name]
            values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(role_shapes(spec)[role])
            yield llama.FAMILY.tensor_name(role), to_bfloat16(in_hf_rotary_order(role, values, spec))

    layout = {llama.FAMILY.tensor_name(role): ("BF16", shape) for role, shape in role_shapes(spec).items()}
    write_safetensors(folder / "model.safetensors", layout, weights())
    progress("Building tokenizer", None)
    write_tokenizer(metadata, folder)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {key: config[key] for key in special if key in config})
    _write_json(folder / "config.json", config)


def _check_kind(gguf_file: Path, metadata: Mapping[str, Any]) -> None:
    handled = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "llama.rope.scaling.type": None,
    }
    for key, value in handled.items():
        if metadata.get(key) != value:
            raise ModelError(f"{gguf_file}: {key} is {metadata.get(key)!r}; only {value!r} can be converted.")


def hf_config(metadata: Mapping[str, Any], tied_head: bool) -> dict[str, Any]:
    """config.json of a GGUF's metadata."""

    def shortest(value: float) -> float:
        """The decimal number that a float32 was written as."""
        return float(str(np.float32(value)))

    config: dict[str, Any] = {
        "architectures": [llama.FAMILY.architecture],
        "model_type": llama.FAMILY.name,
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest(metadata["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied_head,
        "torch_dtype": "bfloat16",
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if token_id is not None:
            config[f"{ours}_token_id"] = token_id
    return config


def gguf_tensor_name(role: str) -> str:
    """A role of role_shapes -> the tensor's name in a GGUF file. KeyError if it has none."""
    if not role.startswith("layers."):
        return GLOBAL_TENSORS[role]
    _, layer, name = role.split(".")
    return f"blk.{layer}.{LAYER_TENSORS[name]}"


def in_hf_rotary_order(role: str, values: npt.NDArray[Any], spec: DecoderSpec) -> npt.NDArray[Any]:
    """Rows of q and k as HF orders them.

    GGUF keeps the two numbers that are rotated together side by side, row 2 i and 2 i + 1 of a head; HF keeps them half
    a head apart, row i and i + head_dim / 2.
    """
    name = role.rpartition(".")[2]
    if name not in ("q", "k"):
        return values
    heads = spec.num_heads if name == "q" else spec.num_kv_heads
    pairs = values.reshape(heads, spec.head_dim // 2, 2, values.shape[1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def to_bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The upper halves of finite float32 numbers, rounded to nearest, ties to even, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE that splits every digit off before it splits words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "additional_special_tokens": special,
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if token_id is not None:
            settings[f"{ours}_token"] = tokens[token_id]
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
