"""Rope frequencies and tables of every kind against Hugging Face's, over head sizes and bases."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from pyengine.models import spec_from_config
from pyengine.models.rope import rope_frequencies, rope_tables

torch = pytest.importorskip("torch", reason="needs the extra [hf-test]")
transformers = pytest.importorskip("transformers", reason="needs the extra [hf-test]")
pytestmark = pytest.mark.hf

SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn with attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 0.8,
    },
    "yarn with everything": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
    },
}


def config_of(scaling: dict[str, Any] | None, head_dim: int, theta: float) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4 * head_dim,
        "num_attention_heads": 4,
        "max_position_embeddings": 8192,
        "rope_theta": theta,
        "rope_scaling": copy.deepcopy(scaling),
    }


def hf_rope(config: dict[str, Any]) -> Any:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(config)))


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0, 1e6])
@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_agree_to_the_last_bit(kind: str, head_dim: int, theta: float) -> None:
    config = config_of(SCALINGS[kind], head_dim, theta)
    spec, reference = spec_from_config(config), hf_rope(config)
    frequencies, attention_factor = rope_frequencies(spec.rope, spec.max_context)
    difference = frequencies.view(np.int32) - reference.inv_freq.numpy().view(np.int32)
    assert np.abs(difference).max() <= 1  # units in the last place: torch's power is not always the nearest float
    assert attention_factor == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("kind", SCALINGS)
def test_tables_agree(kind: str) -> None:
    config = config_of(SCALINGS[kind], 64, 500000.0)
    spec, reference = spec_from_config(config), hf_rope(config)
    cos, sin = rope_tables(spec.rope, 4096, spec.max_context)
    expected = [t[0, :, :32].numpy() for t in reference(torch.zeros(1, 1), torch.arange(4096)[None])]
    np.testing.assert_allclose(cos, expected[0], atol=2.5e-7)
    np.testing.assert_allclose(sin, expected[1], atol=2.5e-7)


def test_dynamic_beyond_the_trained_length_is_what_hf_has_for_a_sequence_of_that_length() -> None:
    config = config_of(SCALINGS["dynamic"], 64, 10000.0)
    spec, reference = spec_from_config(config), hf_rope(config)
    cos, sin = rope_tables(spec.rope, 12000, 12000)
    expected = [t[0, :, :32].numpy() for t in reference(torch.zeros(1, 1), torch.arange(12000)[None])]
    # HF computes the base from a tensor here and rounds it to float32; at position 12000 that is 12000 roundings far.
    np.testing.assert_allclose(cos, expected[0], atol=12000 * 2.0**-23)
    np.testing.assert_allclose(sin, expected[1], atol=12000 * 2.0**-23)
