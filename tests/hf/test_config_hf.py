"""Defaults of missing config keys, sliding windows and tensor names against Hugging Face's own classes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pyengine.models import FAMILIES, Family, llama, mistral, qwen2, qwen3, role_shapes

torch = pytest.importorskip("torch", reason="needs the extra [hf-test]")
transformers = pytest.importorskip("transformers", reason="needs the extra [hf-test]")
pytestmark = pytest.mark.hf

DEFAULTS = {family.FAMILY.name: family.DEFAULTS for family in (llama, mistral, qwen2, qwen3)}
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def hf_config(family: Family, **values: Any) -> Any:
    return transformers.CONFIG_MAPPING[family.name](**values)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_defaults_are_those_of_the_hf_class(family: Family) -> None:
    reference = hf_config(family).to_dict()
    for key, value in DEFAULTS[family.name].items():
        if key == "sliding_window" and "use_sliding_window" in reference:
            continue  # HF forgets the number while the window is switched off
        assert reference[key] == value, key


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_saved_hf_config_gives_the_same_spec_as_its_keys(family: Family) -> None:
    saved = hf_config(family, **TINY).to_dict()
    saved["architectures"] = [family.architecture]
    ours = family.spec_from_config({**TINY, "architectures": [family.architecture]})
    assert dataclasses.replace(family.spec_from_config(saved), dtype=ours.dtype) == ours


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("bias", [False, True])
def test_names_and_shapes_are_those_of_the_hf_model(family: Family, bias: bool) -> None:
    extra = {"attention_bias": bias} if family.name in ("llama", "qwen3") else {}
    extra |= {"mlp_bias": bias} if family.name == "llama" else {}
    with torch.device("meta"):
        model = getattr(transformers, family.architecture)(hf_config(family, **TINY, **extra))
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    spec = family.spec_from_config({**TINY, **extra})
    assert {family.tensor_name(role): shape for role, shape in role_shapes(spec).items()} == expected


@pytest.mark.parametrize("family", [qwen2.FAMILY, qwen3.FAMILY], ids=lambda family: family.name)
@pytest.mark.parametrize("first", [0, 1, 3])
def test_windows_begin_at_the_layer_where_hf_begins_them(family: Family, first: int) -> None:
    values = {**TINY, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": first}
    reference = hf_config(family, **values).layer_types
    windows = family.spec_from_config(values).sliding_windows
    assert [window == 8 for window in windows] == [kind == "sliding_attention" for kind in reference]
