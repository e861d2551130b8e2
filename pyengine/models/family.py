"""What a model family is: names, how its config is read, and where its checkpoint keeps each tensor; no model data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyengine.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Family:
    """One entry of the registry.

    Attributes:
        name: config.json's `model_type`.
        architecture: config.json's `architectures[0]`.
        spec_from_config: the whole config.json -> DecoderSpec; raises ModelError.
        tensor_name: a role of `role_shapes` -> the tensor's name in the checkpoint.
    """

    name: str
    architecture: str
    spec_from_config: Callable[[Mapping[str, Any]], DecoderSpec]
    tensor_name: Callable[[str], str]


# The layout that all families here share. Left: the role, right: the checkpoint's name.
GLOBAL_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}


def llama_tensor_name(role: str) -> str:
    """Checkpoint name of a role, e.g. "layers.3.q" -> "model.layers.3.self_attn.q_proj.weight". KeyError if unknown."""
    if not role.startswith("layers."):
        return GLOBAL_NAMES[role]
    _, layer, name = role.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[name]}"
