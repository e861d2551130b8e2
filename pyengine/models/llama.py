"""The Llama family: Llama 1 to 3.x and what shares its class (SmolLM2 and many others)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyengine.models.config_reader import ConfigReader
from pyengine.models.decoder_config import decoder_spec, layer_windows, num_layers_of
from pyengine.models.family import Family, llama_tensor_name
from pyengine.models.spec import DecoderSpec

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Optional biases on all four attention projections together and on the MLP; every layer sees everything."""
    reader = ConfigReader("llama", config, DEFAULTS)
    reader.refuse_unless("sliding_window", (None,))
    return decoder_spec(
        reader,
        sliding_windows=layer_windows(reader, None, (False,) * num_layers_of(reader)),
        qkv_bias=reader.flag("attention_bias"),
        o_bias=reader.flag("attention_bias"),
        mlp_bias=reader.flag("mlp_bias"),
    )


FAMILY = Family("llama", "LlamaForCausalLM", spec_from_config, llama_tensor_name)
