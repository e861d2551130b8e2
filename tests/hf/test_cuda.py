"""The CUDA backend against Hugging Face, every family: on a GPU if there is one, and with its kernels on the host."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.simt.device import simt_device

from .comparison import (
    KL_RATIO_TOLERANCE,
    LOGITS_TOLERANCE,
    OurModel,
    hf_forward,
    load_hf,
    mean_kl,
    relative_difference,
)
from .conftest import FolderOf
from .tiny_models import TinyModel, prompts

pytest.importorskip("torch", reason="needs the extra [hf-test]")
pytest.importorskip("transformers", reason="needs the extra [hf-test]")
pytestmark = pytest.mark.hf

LONGEST_ON_THE_HOST = 70  # tokens; two tiles of keys and a bit


@pytest.fixture(params=["simt", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda":
        cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'pyengine-llm[cuda13]'")
        if not cupy.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU and its driver")
        yield "cuda"
        return
    native: ModuleType = request.getfixturevalue("simt")
    with simt_device(native):
        yield "simt"


def chosen(tiny: TinyModel, device: str) -> list[list[int]]:
    """All prompts, or on the host those that it computes in seconds."""
    return [p for p in prompts(tiny) if device == "cuda" or len(p) in (1, 16, 33, 65)]


def test_logits_and_every_layer_agree_in_fp32(device: str, name: str, folder_of: FolderOf, tiny: TinyModel) -> None:
    reference = load_hf(folder_of(name), "float32")
    with OurModel(folder_of(name), "float32", device=device, max_tokens=40) as ours:
        for prompt in chosen(tiny, device):
            expected, got = hf_forward(reference, prompt), ours.forward(prompt)
            assert relative_difference(expected.logits, got.logits) <= LOGITS_TOLERANCE
            for layer in range(len(expected.residuals)):
                assert relative_difference(expected.residuals[layer], got.residuals[layer]) <= LOGITS_TOLERANCE, layer


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_as_close_to_fp32_as_those_of_hugging_face(
    device: str, dtype: str, name: str, folder_of: FolderOf, tiny: TinyModel
) -> None:
    """By the divergence from the exact distribution: ours is of the size of transformers' in the same type."""
    prompt = max(chosen(tiny, device), key=len)
    exact = hf_forward(load_hf(folder_of(name, dtype), "float32"), prompt)
    theirs = hf_forward(load_hf(folder_of(name, dtype), dtype), prompt)
    with OurModel(folder_of(name, dtype), dtype, device=device, max_tokens=40) as ours:
        got: Any = ours.forward(prompt)
    assert mean_kl(exact.logits, got.logits) <= KL_RATIO_TOLERANCE * mean_kl(exact.logits, theirs.logits)
