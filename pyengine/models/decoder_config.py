"""Builds the DecoderSpec of a Llama-shaped decoder from a read config; a family says only where it differs."""

from __future__ import annotations

from pyengine.models.config_reader import ConfigReader
from pyengine.models.rope_config import rope_spec, served_context
from pyengine.models.spec import DTYPES, DecoderSpec

MAX_LAYERS = 4096

# HF's names of activations -> ours.
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def decoder_spec(
    reader: ConfigReader,
    *,
    sliding_windows: tuple[int, ...],
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderSpec:
    """The spec of a Llama-shaped decoder; what a family does differently comes in as arguments."""
    hidden_size = reader.integer("hidden_size", high=2**20)
    num_heads = reader.integer("num_attention_heads", high=2**14)
    num_kv_heads = num_heads if reader.value("num_key_value_heads") is None else reader.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise reader.refuse("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads, {num_heads}")
    head_dim = _head_dim(reader, hidden_size, num_heads)
    rope = rope_spec(reader, head_dim)
    return DecoderSpec(
        family=reader.family,
        vocab_size=reader.integer("vocab_size", high=2**24),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size", high=2**24),
        num_layers=num_layers_of(reader),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps", 0.0, 1.0),
        activation=reader.choice("hidden_act", ACTIVATION_NAMES),
        rope=rope,
        attention_scale=head_dim**-0.5,
        sliding_windows=sliding_windows,
        max_context=served_context(rope, reader.integer("max_position_embeddings")),
        tied_head=reader.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        dtype=_dtype(reader),
    )


def _head_dim(reader: ConfigReader, hidden_size: int, num_heads: int) -> int:
    if reader.value("head_dim") is not None:
        return reader.integer("head_dim", high=2**14)
    if hidden_size % num_heads:
        raise reader.refuse("hidden_size", hidden_size, f"a multiple of num_attention_heads, {num_heads}")
    return hidden_size // num_heads


def _dtype(reader: ConfigReader) -> str:
    """`dtype`, else the older `torch_dtype`, else float32 (what HF's classes are built in)."""
    for key in ("dtype", "torch_dtype"):
        value = reader.value(key)
        if value is not None:
            name = value.removeprefix("torch.") if isinstance(value, str) else value
            if name not in DTYPES:
                raise reader.refuse(key, value, "one of " + ", ".join(DTYPES))
            return str(name)
    return "float32"


def layer_windows(reader: ConfigReader, window: int | None, sliding_by_default: tuple[bool, ...]) -> tuple[int, ...]:
    """Keys each layer's queries see (0: all), from `layer_types` where it is given, else from `sliding_by_default`."""
    kinds = reader.value("layer_types")
    if kinds is None:
        return tuple((window or 0) if slides else 0 for slides in sliding_by_default)
    if not isinstance(kinds, list) or len(kinds) != len(sliding_by_default):
        raise reader.refuse("layer_types", kinds, f"a list with one entry for each of {len(sliding_by_default)} layers")
    windows = []
    for number, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.refuse(f"layer_types[{number}]", kind, "full_attention or sliding_attention")
        if kind == "sliding_attention" and window is None:
            raise reader.refuse(f"layer_types[{number}]", kind, "full_attention where no sliding window is in use")
        windows.append(window or 0 if kind == "sliding_attention" else 0)
    return tuple(windows)


def optional_window(reader: ConfigReader) -> int | None:
    """`sliding_window`: keys that a query sees, itself included; None where the config switches it off."""
    return None if reader.value("sliding_window") is None else reader.integer("sliding_window")


def windows_after(reader: ConfigReader) -> tuple[int, ...]:
    """Qwen's rule: with use_sliding_window, layers from max_window_layers on slide, unless layer_types says which."""
    num_layers = num_layers_of(reader)
    window = optional_window(reader) if reader.flag("use_sliding_window") else None
    first_sliding = reader.integer("max_window_layers", low=0)
    return layer_windows(reader, window, tuple(n >= first_sliding for n in range(num_layers)))


def num_layers_of(reader: ConfigReader) -> int:
    return reader.integer("num_hidden_layers", high=MAX_LAYERS)
