"""Tiny random models of every family, made with Hugging Face's classes and saved as folders; no tokenizer, no test."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB_SIZE = 301  # no multiple of anything that a kernel likes
MAX_CONTEXT = 448
PROMPT_LENGTHS = (1, 2, 7, 16, 33, 65, 150, 300)


@dataclass(frozen=True)
class TinyModel:
    """A family, a shape, and the seed of its weights.

    Attributes:
        architecture: transformers' class.
        heads: (query heads, KV heads, head size).
        rope: transformers' rope_scaling.
        values: further keys of the config.
        seed: of weights and prompts. Chosen so that no greedy step is nearly a tie (the tests assert that).
    """

    architecture: str
    heads: tuple[int, int, int]
    hidden_size: int = 96
    intermediate_size: int = 160
    num_layers: int = 3
    tied: bool = False
    rope: Mapping[str, Any] | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 7.0, "original_max_position_embeddings": 64}

TINY_MODELS: Mapping[str, TinyModel] = {
    "llama mha 32": TinyModel(LLAMA, (4, 4, 32), hidden_size=128),
    "llama mha 80 biases": TinyModel(LLAMA, (2, 2, 80), values={"attention_bias": True, "mlp_bias": True}),
    "llama mqa 64 linear": TinyModel(LLAMA, (4, 1, 64), rope={"rope_type": "linear", "factor": 4.0}, seed=3),
    "llama gqa 128 dynamic": TinyModel(LLAMA, (4, 2, 128), rope={"rope_type": "dynamic", "factor": 2.0}, seed=1),
    "llama gqa 64 llama3 tied": TinyModel(LLAMA, (6, 2, 64), tied=True, rope=LLAMA3_ROPE, seed=1),
    "llama gqa 32 yarn odd sizes": TinyModel(LLAMA, (6, 3, 32), hidden_size=102, intermediate_size=173, rope=YARN_ROPE),
    "llama mqa 80 gelu": TinyModel(LLAMA, (3, 1, 80), values={"hidden_act": "gelu_pytorch_tanh"}),
    "smollm2 shape": TinyModel(
        LLAMA, (9, 3, 64), hidden_size=576, intermediate_size=1536, num_layers=2, tied=True, values={"rope_theta": 1e5}
    ),
    "mistral gqa 64 window": TinyModel(MISTRAL, (4, 2, 64), values={"sliding_window": 24}),
    "mistral mha 128 window of 1 block": TinyModel(MISTRAL, (2, 2, 128), values={"sliding_window": 16}, seed=3),
    "qwen2 gqa 64 tied": TinyModel(QWEN2, (4, 2, 64), tied=True),
    "qwen2 mha 32 window from layer 1": TinyModel(
        QWEN2, (3, 3, 32), values={"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    ),
    "qwen3 gqa 128 tied": TinyModel(QWEN3, (4, 2, 128), tied=True, values={"head_dim": 128}),
    "qwen3 mqa 64 yarn biases": TinyModel(QWEN3, (3, 1, 64), rope=YARN_ROPE, values={"attention_bias": True}),
}


def hf_config(tiny: TinyModel) -> Any:
    """The config, without special tokens."""
    import transformers

    num_heads, num_kv_heads, head_dim = tiny.heads
    config_class = getattr(transformers, tiny.architecture).config_class
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tiny.tied,
        "rope_theta": 10000.0,
        "rope_scaling": None if tiny.rope is None else dict(tiny.rope),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return config_class(**{**values, **tiny.values})


def save_tiny_model(tiny: TinyModel, folder: Path, dtype: str = "float32") -> None:
    """Make the weights, round them to `dtype`, and save the folder."""
    import torch
    import transformers

    torch.manual_seed(tiny.seed)
    model = getattr(transformers, tiny.architecture)(hf_config(tiny))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, tiny)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def _fill(name: str, parameter: Any, tiny: TinyModel) -> None:
    """Random values at which everything matters: peaked attention, layers larger than the embedding, wide logits.

    With the usual small initialisation a model of this size repeats its last token whatever its layers compute.
    """
    if name.endswith("norm.weight"):
        parameter.uniform_(0.6, 1.6)
    elif name.endswith("bias"):
        parameter.normal_(0.0, 0.4)
    elif "embed_tokens" in name:
        parameter.normal_(0.0, 6.0 / math.sqrt(tiny.hidden_size) if tiny.tied else 1.0)
    else:
        gain = {"q_proj": 1.4, "k_proj": 1.4, "o_proj": 3.0, "gate_proj": 1.5, "down_proj": 2.0, "lm_head": 6.0}
        part = name.split(".")[-2]
        parameter.normal_(0.0, gain.get(part, 1.0) / math.sqrt(parameter.shape[1]))


def prompts(tiny: TinyModel) -> list[list[int]]:
    """One prompt of random ids for each of PROMPT_LENGTHS, shuffled."""
    import numpy as np

    rng = np.random.default_rng(tiny.seed)
    lengths = rng.permutation(PROMPT_LENGTHS)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]
