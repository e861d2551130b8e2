"""The Qwen3 family (dense): RMS norm on every head's query and key, head size of its own, sliding windows as Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyengine.models.config_reader import ConfigReader
from pyengine.models.decoder_config import decoder_spec, windows_after
from pyengine.models.family import Family, llama_tensor_name
from pyengine.models.spec import DecoderSpec

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """attention_bias, where set, covers q, k, v and the output projection."""
    reader = ConfigReader("qwen3", config, DEFAULTS)
    reader.refuse_unless("mlp_bias", (None, False))
    return decoder_spec(
        reader,
        sliding_windows=windows_after(reader),
        qkv_bias=reader.flag("attention_bias"),
        o_bias=reader.flag("attention_bias"),
        qk_norm=True,
    )


FAMILY = Family("qwen3", "Qwen3ForCausalLM", spec_from_config, llama_tensor_name)
