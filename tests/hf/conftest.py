"""Folders of tiny models, made once a session, and Hugging Face's own greedy completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .tiny_models import TINY_MODELS, TinyModel, save_tiny_model

FolderOf = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def quiet_hf() -> Iterator[None]:
    """No bars and notes of transformers in the report; models this small are fastest without torch's threads."""
    try:
        import torch
        import transformers
    except ImportError:  # every module here skips by itself, with the reason
        yield
        return
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """(name of a tiny model, dtype of its checkpoint) -> its folder."""
    made: dict[tuple[str, str], Path] = {}

    def folder(name: str, dtype: str = "float32") -> Path:
        if (name, dtype) not in made:
            path = tmp_path_factory.mktemp(name.replace(" ", "-"))
            save_tiny_model(TINY_MODELS[name], path, dtype)
            made[name, dtype] = path
        return made[name, dtype]

    return folder


@pytest.fixture(params=TINY_MODELS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    """Each tiny model in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def tiny(name: str) -> TinyModel:
    return TINY_MODELS[name]


@dataclass(frozen=True)
class GreedyPath:
    """Greedy tokens of transformers, and at each step by how much the best logit beats the second."""

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]


def hf_greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> GreedyPath:
    """What transformers' generate() answers when nothing ends a completion but its length."""
    import torch

    settings = {"do_sample": False, "max_new_tokens": max_tokens, "repetition_penalty": 1.0, "pad_token_id": 0}
    ids = torch.tensor([list(prompt)])
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True, **settings
        )
    best = [step[0].float().topk(2).values for step in output.logits]
    margins = tuple(float(first - second) for first, second in best)
    return GreedyPath(tuple(output.sequences[0, len(prompt) :].tolist()), margins)
