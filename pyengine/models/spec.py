"""DecoderSpec: a decoder-only transformer described as data; families produce it, the native step consumes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding.

    Attributes:
        base: theta.
        rotary_dim: how many of a head's dimensions are rotated (halves rotated, as in HF's rotate_half).
        kind: "default", "linear", "dynamic", "llama3" or "yarn".
        parameters: what the kind needs, under HF's names (factor, original_max_position_embeddings, beta_fast, ...).
    """

    base: float
    rotary_dim: int
    kind: str = "default"
    parameters: Mapping[str, float | bool] | None = None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Sizes and options of one model; every field is honoured by the native decoder or refused at load.

    Attributes:
        sliding_windows: per layer, how many keys a query sees, itself included; 0 means all before it.
        max_context: most tokens (prompt and output) of one sequence.
        attention_scale: what scores are multiplied with (1 / sqrt(head_dim) unless the family says otherwise).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    rope: RopeSpec
    attention_scale: float
    sliding_windows: tuple[int, ...]
    max_context: int
    tied_head: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "bfloat16"

    def kv_bytes_per_token(self, kv_itemsize: int) -> int:
        """Bytes of keys and values that one token keeps over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * kv_itemsize

    def num_parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        h, i = self.hidden_size, self.intermediate_size
        layer = h * (q + 2 * kv) + q * h + 3 * h * i + 2 * h
        layer += (q + 2 * kv) * self.qkv_bias + h * self.o_bias + (2 * i + h) * self.mlp_bias
        layer += 2 * self.head_dim * self.qk_norm
        return self.num_layers * layer + h + self.vocab_size * h * (1 if self.tied_head else 2)


# Roles of tensors. A family maps its checkpoint's names to these; `{layer}` is a layer number. A role that a spec does
# not use is absent. Weights are [out, in] row-major as in the checkpoint; q, k, v and gate, up stay separate here.
GLOBAL_ROLES = ("embedding", "final_norm", "head")
LAYER_ROLES = (
    "attention_norm",
    "q",
    "k",
    "v",
    "o",
    "q_bias",
    "k_bias",
    "v_bias",
    "o_bias",
    "q_norm",
    "k_norm",
    "mlp_norm",
    "gate",
    "up",
    "down",
    "gate_bias",
    "up_bias",
    "down_bias",
)


def role_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Every role of this model -> the shape its tensor must have; layer roles as "layers.{n}.{role}"."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    h, i = spec.hidden_size, spec.intermediate_size
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm": (h,),
        "q": (q, h),
        "k": (kv, h),
        "v": (kv, h),
        "o": (h, q),
        "mlp_norm": (h,),
        "gate": (i, h),
        "up": (i, h),
        "down": (h, i),
    }
    if spec.qkv_bias:
        layer.update(q_bias=(q,), k_bias=(kv,), v_bias=(kv,))
    if spec.o_bias:
        layer["o_bias"] = (h,)
    if spec.mlp_bias:
        layer.update(gate_bias=(i,), up_bias=(i,), down_bias=(h,))
    if spec.qk_norm:
        layer.update(q_norm=(spec.head_dim,), k_norm=(spec.head_dim,))
    shapes: dict[str, tuple[int, ...]] = {"embedding": (spec.vocab_size, h), "final_norm": (h,)}
    if not spec.tied_head:
        shapes["head"] = (spec.vocab_size, h)
    for n in range(spec.num_layers):
        shapes.update({f"layers.{n}.{role}": shape for role, shape in layer.items()})
    return shapes
