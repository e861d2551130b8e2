"""Logits of every prompt position against Hugging Face's, for every family, in float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .comparison import LOGITS_TOLERANCE, OurModel, hf_forward, load_hf, relative_difference
from .conftest import FolderOf
from .tiny_models import TINY_MODELS, TinyModel, prompts

pytest.importorskip("torch", reason="needs the extra [hf-test]")
pytest.importorskip("transformers", reason="needs the extra [hf-test]")
pytestmark = pytest.mark.hf


@pytest.fixture(scope="module")
def reference(name: str, folder_of: FolderOf) -> Any:
    return load_hf(folder_of(name), "float32")


@pytest.fixture(scope="module")
def ours(name: str, folder_of: FolderOf) -> Iterator[Any]:
    with OurModel(folder_of(name), "float32") as model:
        yield model


def test_logits_and_every_layer_agree_at_every_position(reference: Any, ours: Any, tiny: TinyModel) -> None:
    for prompt in prompts(tiny):
        expected, got = hf_forward(reference, prompt), ours.forward(prompt)
        assert expected.logits.std() > 1.0, "flat logits would prove nothing"
        assert relative_difference(expected.logits, got.logits) <= LOGITS_TOLERANCE
        for layer in range(len(expected.residuals)):
            assert relative_difference(expected.residuals[layer], got.residuals[layer]) <= LOGITS_TOLERANCE, layer


def test_a_prompt_computed_in_chunks_has_the_same_logits(
    name: str, folder_of: FolderOf, ours: Any, tiny: TinyModel
) -> None:
    longest = max(prompts(tiny), key=len)
    with OurModel(folder_of(name), "float32", max_tokens=37) as chunked:
        assert np.array_equal(chunked.forward(longest).logits, ours.forward(longest).logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["llama mha 80 biases", "qwen2 gqa 64 tied", "qwen3 mqa 64 yarn biases"], scope="module"
)
def test_a_checkpoint_in_16_bits_is_widened_exactly(name: str, dtype: str, folder_of: FolderOf) -> None:
    folder, prompt = folder_of(name, dtype), prompts(TINY_MODELS[name])[0]
    with OurModel(folder, "float32") as model:
        got = model.forward(prompt)
    expected = hf_forward(load_hf(folder, "float32"), prompt)
    assert relative_difference(expected.logits, got.logits) <= LOGITS_TOLERANCE


NEUTRAL = {
    "llama mqa 64 linear": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "llama gqa 64 llama3 tied": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "llama gqa 32 yarn odd sizes": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "qwen3 mqa 64 yarn biases": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "smollm2 shape": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "llama mqa 80 gelu": {"hidden_act": "gelu"},
    "mistral gqa 64 window": {"sliding_window": None},
    "mistral mha 128 window of 1 block": {"sliding_window": 17},
    "qwen2 mha 32 window from layer 1": {"layer_types": ["sliding_attention"] * 3},
}


@pytest.mark.parametrize("name", NEUTRAL, scope="module")
def test_the_agreement_would_notice_an_option_that_is_ignored(name: str, folder_of: FolderOf, tmp_path: Path) -> None:
    """The same weights with the option changed give other logits, beyond the tolerance; most by a factor of 10^4."""
    shutil.copytree(folder_of(name), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_scaling", "rope_theta") if "rope_parameters" in NEUTRAL[name] else ():
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps({**config, **NEUTRAL[name]}))
    prompt = max(prompts(TINY_MODELS[name]), key=len)
    with OurModel(folder_of(name)) as right, OurModel(tmp_path) as wrong:
        difference = relative_difference(right.forward(prompt).logits, wrong.forward(prompt).logits)
    assert difference > 3 * LOGITS_TOLERANCE


def test_dynamic_rope_beyond_the_trained_length_agrees_for_an_input_of_the_served_length(folder_of: FolderOf) -> None:
    name = "llama gqa 128 dynamic"
    length = 2 * 448  # as far as its factor reaches
    prompt = np.random.default_rng(5).integers(0, 301, length).tolist()
    with OurModel(folder_of(name), max_context=length) as model:
        got = model.forward(prompt)
    expected = hf_forward(load_hf(folder_of(name), "float32"), prompt)
    assert relative_difference(expected.logits, got.logits) <= LOGITS_TOLERANCE
