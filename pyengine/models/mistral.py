"""The Mistral family: Llama's computation, no biases, and one sliding window for all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyengine.models.config_reader import ConfigReader
from pyengine.models.decoder_config import decoder_spec, num_layers_of, optional_window
from pyengine.models.family import Family, llama_tensor_name
from pyengine.models.spec import DecoderSpec

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """A missing sliding_window means 4096, null means none, as in the family's own class."""
    reader = ConfigReader("mistral", config, DEFAULTS)
    reader.refuse_unless("layer_types", (None,))
    reader.refuse_unless("attention_bias", (None, False))
    reader.refuse_unless("mlp_bias", (None, False))
    return decoder_spec(reader, sliding_windows=(optional_window(reader) or 0,) * num_layers_of(reader))


FAMILY = Family("mistral", "MistralForCausalLM", spec_from_config, llama_tensor_name)
