"""config.json -> DecoderSpec for every family: defaults, differences, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest

from pyengine.errors import ModelError
from pyengine.models import FAMILIES, family_of, role_shapes, spec_from_config

SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
ARCHITECTURES = {family.name: family.architecture for family in FAMILIES}


def small(family: str = "llama", **changes: Any) -> dict[str, Any]:
    return {"architectures": [ARCHITECTURES[family]], "model_type": family, **SMALL, **changes}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_config_without_sizes_takes_the_family_defaults(family: Any) -> None:
    spec = spec_from_config({"architectures": [family.architecture]})
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.head_dim) == (4096, 32, 32, 128)
    assert (spec.norm_eps, spec.activation, spec.tied_head, spec.rope.base) == (1e-6, "silu", False, 10000.0)
    assert spec.num_kv_heads == {"mistral": 8}.get(family.name, 32)
    assert spec.max_context == {"llama": 2048, "mistral": 131072}.get(family.name, 32768)
    assert spec.sliding_windows == ((4096,) * 32 if family.name == "mistral" else (0,) * 32)
    assert spec.dtype == "float32"


def test_the_model_type_alone_is_enough() -> None:
    assert family_of({"model_type": "qwen3"}).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_role_has_its_own_tensor_name(family: str) -> None:
    config = small(family, attention_bias=True) if family in ("llama", "qwen3") else small(family)
    shapes = role_shapes(spec_from_config(config))
    names = [family_of(config).tensor_name(role) for role in shapes]
    assert len(set(names)) == len(shapes)
    assert "model.layers.2.self_attn.q_proj.weight" in names
    assert ("model.layers.0.self_attn.q_proj.bias" in names) == (family != "mistral")
    assert ("model.layers.0.self_attn.o_proj.bias" in names) == (family in ("llama", "qwen3"))
    assert ("model.layers.0.self_attn.k_norm.weight" in names) == (family == "qwen3")


def test_sizes_biases_and_head_size_reach_the_spec() -> None:
    spec = spec_from_config(small(attention_bias=True, mlp_bias=True, head_dim=32, torch_dtype="bfloat16"))
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm) == (True, True, True, False)
    assert (spec.head_dim, spec.rope.rotary_dim, spec.attention_scale) == (32, 32, 32**-0.5)
    assert spec.dtype == "bfloat16"
    shapes = role_shapes(spec)
    assert shapes["layers.2.q"] == (128, 64)
    assert shapes["layers.0.k_bias"] == (64,)
    assert shapes["layers.1.down_bias"] == (64,)


@pytest.mark.parametrize("missing", ["absent", "null"])
def test_without_kv_heads_every_head_has_its_own(missing: str) -> None:
    config = small(num_key_value_heads=None)
    if missing == "absent":
        del config["num_key_value_heads"]
    assert spec_from_config(config).num_kv_heads == 4


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["float16", "torch.float16"])
def test_both_names_of_the_dtype_are_read(key: str, name: str) -> None:
    assert spec_from_config(small(**{key: name})).dtype == "float16"


@pytest.mark.parametrize(("window", "expected"), [(None, 0), (17, 17)])
def test_the_window_of_mistral_holds_for_all_layers(window: int | None, expected: int) -> None:
    assert spec_from_config(small("mistral", sliding_window=window)).sliding_windows == (expected,) * 3


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, (0, 0, 0)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, (0, 0, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28}, (0, 0, 0)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (0, 0, 0)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, 0, 8),
        ),
        ({"layer_types": ["full_attention"] * 3}, (0, 0, 0)),
    ],
)
def test_windows_of_qwen_follow_switch_first_layer_and_layer_types(
    family: str, changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert spec_from_config(small(family, **changes)).sliding_windows == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"model_type": "mamba"}, ["mamba", "llama", "mistral"]),
        ({}, ["None", "llama"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures", "list"]),
        ({"architectures": [7]}, ["architectures", "[7]"]),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "mistral"}, ["mistral", "llama"]),
    ],
)
def test_an_unknown_architecture_is_refused_and_the_known_ones_are_listed(
    config: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_config(config)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "hidden_size", 0),
        ("llama", "hidden_size", -64),
        ("llama", "hidden_size", "64"),
        ("llama", "hidden_size", 64.0),
        ("llama", "hidden_size", True),
        ("llama", "hidden_size", None),
        ("llama", "hidden_size", 66),
        ("llama", "hidden_size", 2**40),
        ("llama", "num_hidden_layers", 10**9),
        ("llama", "num_attention_heads", 0),
        ("llama", "num_key_value_heads", 3),
        ("llama", "num_key_value_heads", 8),
        ("llama", "head_dim", 15),
        ("llama", "head_dim", -16),
        ("llama", "rms_norm_eps", -1e-6),
        ("llama", "rms_norm_eps", float("nan")),
        ("llama", "rms_norm_eps", "1e-6"),
        ("llama", "hidden_act", "quick_gelu"),
        ("llama", "hidden_act", None),
        ("llama", "tie_word_embeddings", "yes"),
        ("llama", "attention_bias", 1),
        ("llama", "torch_dtype", "float8_e4m3fn"),
        ("llama", "dtype", 16),
        ("llama", "max_position_embeddings", 0),
        ("llama", "rope_theta", -1.0),
        ("llama", "rope_theta", "10000"),
        ("llama", "partial_rotary_factor", 1.5),
        ("llama", "partial_rotary_factor", 0.0),
        ("llama", "partial_rotary_factor", 0.3125),
        ("llama", "sliding_window", 128),
        ("llama", "layer_types", ["sliding_attention"] * 3),
        ("llama", "rope_interleaved", True),
        ("llama", "quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("llama", "attn_logit_softcapping", 50.0),
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "clip_qkv", 8.0),
        ("llama", "logits_scaling", 8.0),
        ("llama", "embedding_multiplier", 12.0),
        ("llama", "residual_multiplier", 0.22),
        ("llama", "num_local_experts", 8),
        ("llama", "n_routed_experts", 64),
        ("llama", "moe_intermediate_size", 1024),
        ("llama", "no_rope_layers", [1, 1, 0]),
        ("llama", "is_encoder_decoder", True),
        ("mistral", "sliding_window", 0),
        ("mistral", "sliding_window", "4096"),
        ("mistral", "attention_bias", True),
        ("mistral", "layer_types", ["full_attention"] * 3),
        ("qwen2", "use_sliding_window", None),
        ("qwen2", "max_window_layers", -1),
        ("qwen2", "attention_bias", False),
        ("qwen2", "layer_types", ["full_attention"] * 2),
        ("qwen2", "layer_types", "full_attention"),
        ("qwen3", "layer_types", ["full_attention", "chunked_attention", "full_attention"]),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("qwen3", "num_experts", 128),
        ("qwen3", "mlp_bias", True),
    ],
)
def test_a_value_that_cannot_be_computed_is_refused_with_key_and_value(family: str, key: str, value: Any) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_config(small(family, **{key: value}))
    message = str(caught.value)
    assert key in message
    culprits = [value, *value] if isinstance(value, list) else [value]
    assert any(repr(culprit) in message for culprit in culprits)
    assert "must be" in message or "only" in message


@pytest.mark.parametrize(
    "harmless",
    [
        {"pretraining_tp": 2},
        {"attention_dropout": 0.1},
        {"use_cache": False},
        {"rope_interleaved": False},
        {"quantization_config": None},
        {"num_experts": 0},
        {"attn_logit_softcapping": None},
        {"_name_or_path": "x", "transformers_version": "5.0.0", "initializer_range": 0.02},
        {"sliding_window": None},
        {"layer_types": ["full_attention"] * 3},
    ],
)
def test_what_changes_no_number_is_let_through(harmless: dict[str, Any]) -> None:
    assert spec_from_config(small(**harmless)) == spec_from_config(small())


@pytest.mark.parametrize(
    ("name", "ours"),
    [("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu")],
)
def test_activations_are_known_by_their_checkpoint_names(name: str, ours: str) -> None:
    assert spec_from_config(small(hidden_act=name)).activation == ours
