"""Rounding in 16 bits: no farther from the float32 model than Hugging Face in the same 16 bits."""

from __future__ import annotations

import numpy as np
import pytest

from .comparison import KL_RATIO_TOLERANCE, OurModel, hf_forward, load_hf, mean_kl
from .conftest import FolderOf
from .tiny_models import TINY_MODELS, prompts

pytest.importorskip("torch", reason="needs the extra [hf-test]")
pytest.importorskip("transformers", reason="needs the extra [hf-test]")
pytestmark = pytest.mark.hf

CASES = [(name, "bfloat16") for name in TINY_MODELS] + [
    ("llama mha 80 biases", "float16"),
    ("mistral gqa 64 window", "float16"),
    ("qwen3 gqa 128 tied", "float16"),
]


@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_divergence_from_the_float32_model_is_not_larger_than_that_of_hf(
    case: str, dtype: str, folder_of: FolderOf
) -> None:
    folder, listed = folder_of(case), prompts(TINY_MODELS[case])
    exact, rounded = load_hf(folder, "float32"), load_hf(folder, dtype, "sdpa")
    with OurModel(folder, dtype) as model:
        ours = np.concatenate([model.forward(prompt).logits for prompt in listed])
    reference = np.concatenate([hf_forward(exact, prompt).logits for prompt in listed])
    theirs = np.concatenate([hf_forward(rounded, prompt).logits for prompt in listed])
    assert mean_kl(reference, ours) <= KL_RATIO_TOLERANCE * mean_kl(reference, theirs)
