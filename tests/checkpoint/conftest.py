"""Tiny checkpoints of every family, written as they come from the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pyengine.models import family_of, role_shapes, spec_from_config

TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
Arrays = dict[str, np.ndarray[Any, Any]]
Write = Callable[..., Path]


@pytest.fixture
def tiny_config() -> Callable[..., dict[str, Any]]:
    """A config.json of a family (by its architecture) with changes."""

    def make(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
        return {"architectures": [architecture], **TINY, **changes}

    return make


@pytest.fixture
def tiny_arrays() -> Callable[[Mapping[str, Any]], Arrays]:
    """Random float32 tensors of a config, by their checkpoint names."""

    def make(config: Mapping[str, Any]) -> Arrays:
        generator = np.random.default_rng(1)
        family = family_of(config)
        shapes = role_shapes(spec_from_config(config))
        return {
            family.tensor_name(role): generator.standard_normal(shape, np.float32) for role, shape in shapes.items()
        }

    return make


@pytest.fixture
def write_folder(tmp_path: Path) -> Write:
    """Write a folder; more than one entry of `shards` makes an indexed checkpoint."""

    def write(config: Mapping[str, Any], *shards: Arrays, generation: Mapping[str, Any] | None = None) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        if len(shards) == 1:
            save_file(shards[0], folder / "model.safetensors")
            return folder
        weight_map = {}
        for number, arrays in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            save_file(arrays, folder / name)
            weight_map.update(dict.fromkeys(arrays, name))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return write
