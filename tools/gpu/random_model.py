"""Folders with random bf16 weights in the shape of known models: a step's time depends on the shape alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.checkpoint.safetensors_files import write_safetensors
from pyengine.models import family_of, role_shapes, spec_from_config

_COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40960,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "tiny": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}


def write_random_model(shape: str, folder: Path) -> dict[str, Any]:
    """Write config.json and model.safetensors of `shape` (a name of SHAPES) into `folder`; returns the config."""
    config = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    family, spec = family_of(config), spec_from_config(config)
    shapes = {family.tensor_name(role): size for role, size in role_shapes(spec).items()}
    rng = np.random.default_rng(0)
    # One block of numbers, used again and again: drawing eight billion would take longer than all that is measured.
    pattern = (rng.standard_normal(1 << 20).astype(np.float32) * 0.02).view(np.uint32)
    bits = (pattern >> 16).astype(np.uint16)

    def values() -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for name, size in shapes.items():
            if len(size) == 1:
                yield name, np.full(size, 0x3F80, np.uint16)  # 1.0
            else:
                yield name, np.resize(bits, size)

    write_safetensors(folder / "model.safetensors", {name: ("BF16", size) for name, size in shapes.items()}, values())
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return config
