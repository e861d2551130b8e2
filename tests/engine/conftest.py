"""A tiny random model with a real tokenizer, small enough that hundreds of steps take a second."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from pyengine import Engine
from pyengine.models import family_of, role_shapes, spec_from_config

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 1,
    "bos_token_id": 0,
}
POISON_TOKEN = 319


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE with two special tokens: <s> = 0, put before every text, and </s> = 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the cat and the dog ran to the old house on the hill"] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(folder: Path, config: dict[str, Any] = CONFIG, *, seed: int = 0, poisoned: bool = False) -> Path:
    """Random float32 weights, scaled so that logits spread over several units.

    In a poisoned model the embedding of POISON_TOKEN is NaN: whoever has it in its prompt has no finite logit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    family, arrays = family_of(config), {}
    for role, shape in role_shapes(spec_from_config(config)).items():
        if len(shape) == 1:
            value = rng.uniform(0.5, 1.5, shape)
        else:
            value = rng.standard_normal(shape) * (1.0 if role == "embedding" else 2.0 / np.sqrt(shape[-1]))
        arrays[family.tensor_name(role)] = value.astype(np.float32)
    if poisoned:
        arrays[family.tensor_name("embedding")][POISON_TOKEN] = np.nan
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("tiny"))
    write_tokenizer(folder)
    return folder


@pytest.fixture
def engine(model_folder: Path) -> Iterator[Engine]:
    with Engine(model_folder, kv_cache_memory="16MiB", num_threads=1) as made:
        yield made


def block_bytes(folder: Path) -> int:
    """Bytes of one KV block of the tiny model (float32)."""
    with Engine(folder, kv_cache_memory="1MiB", num_threads=1) as made:
        return made.model.backend.kv_block_bytes(16)
