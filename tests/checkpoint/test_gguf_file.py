"""Conversion of a GGUF file: weights in HF's order, a tokenizer that splits digits, a folder that opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from pyengine.checkpoint import eos_token_ids, open_checkpoint
from pyengine.checkpoint.gguf_file import convert_llama_gguf, gguf_tensor_name, to_bfloat16
from pyengine.errors import ModelError
from pyengine.models import llama, role_shapes

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["2 0", "2 6", "20 26", "h i", "Ġ hi"]
TOKENS = [*SPECIAL, *LETTERS, "20", "26", "2026", "hi", "Ġhi"]
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


def hf_weights(**changes: Any) -> Arrays:
    """Random weights by role, in HF's order."""
    generator = np.random.default_rng(0)
    spec = llama.spec_from_config({**SIZES, "tie_word_embeddings": True, **changes})
    return {role: generator.standard_normal(shape, np.float32) for role, shape in role_shapes(spec).items()}


def side_by_side(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """HF's rows of q or k in GGUF's order: row j and j + half of a head become neighbours, written as a loop."""
    size = rows.shape[0] // heads
    order = [head * size + j + part * size // 2 for head in range(heads) for j in range(size // 2) for part in (0, 1)]
    return rows[order]


def write_gguf(path: Path, weights: Arrays, **changes: Any) -> Path:
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_vocab_size(SIZES["vocab_size"])
    writer.add_context_length(128)
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if "rope_scaling" in changes:
        writer.add_rope_scaling_type(changes["rope_scaling"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for role, values in weights.items():
        name = role.rpartition(".")[2]
        heads = {"q": SIZES["num_attention_heads"], "k": SIZES["num_key_value_heads"]}.get(name)
        stored = side_by_side(values, heads) if heads else values
        if name == "up":  # one kind of tensor is quantised, to see that it is expanded
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_tensor_name(role), gguf.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_tensor_name(role), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, Arrays]:
    weights = hf_weights()
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_llama_gguf(write_gguf(tmp_path / "m.gguf", weights), folder, lambda what, part: None)
    return folder, weights


def test_weights_come_out_in_hf_order_rounded_to_bfloat16(converted: tuple[Path, Arrays]) -> None:
    folder, weights = converted
    checkpoint = open_checkpoint(folder)
    for role, values in weights.items():
        view = checkpoint.tensor(role)
        assert view.dtype == "bfloat16"
        if role.endswith(".up"):
            expanded = (view.array.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_allclose(expanded, values, atol=np.abs(values).max() / 127)
        else:
            np.testing.assert_array_equal(view.array, to_bfloat16(values))


def test_sizes_and_numbers_come_out_as_they_were_written(converted: tuple[Path, Arrays]) -> None:
    checkpoint = open_checkpoint(converted[0])
    spec = checkpoint.spec
    assert (spec.norm_eps, spec.rope.base, spec.max_context, spec.head_dim) == (1e-5, 100000.0, 128, 8)
    assert (spec.tied_head, spec.dtype) == (True, "bfloat16")
    assert eos_token_ids(checkpoint.config, checkpoint.generation_config) == {2}


def test_a_separate_head_stays_separate(tmp_path: Path) -> None:
    weights = hf_weights(tie_word_embeddings=False)
    convert_llama_gguf(write_gguf(tmp_path / "m.gguf", weights), tmp_path, lambda what, part: None)
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.spec.tied_head
    np.testing.assert_array_equal(checkpoint.tensor("head").array, to_bfloat16(weights["head"]))


def test_digits_are_split_one_by_one_though_merges_would_join_them(converted: tuple[Path, Arrays]) -> None:
    tokenizer = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    assert tokenizer.encode("hi hi2026 2").tokens == ["hi", "Ġhi", "2", "0", "2", "6", "Ġ", "2"]
    text = "Zażółć 123 🎉\n  hi <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_are_single_ids_with_their_numbers(converted: tuple[Path, Arrays]) -> None:
    tokenizer = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    assert tokenizer.encode("".join(SPECIAL)).ids == [0, 1, 2]
    assert [tokenizer.token_to_id(token) for token in TOKENS] == list(range(len(TOKENS)))
    assert tokenizer.decode([1, tokenizer.token_to_id("hi"), 2]) == "hi"


def test_bfloat16_rounds_to_nearest_ties_to_even() -> None:
    def value(bits: int) -> float:
        return float(np.array([bits], np.uint32).view(np.float32)[0])

    given = [value(0x3F800000), value(0x3F807FFF), value(0x3F808000), value(0x3F818000), value(0x3F808001), -0.0]
    expected = [0x3F80, 0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x8000]
    assert to_bfloat16(np.array(given, np.float32)).tolist() == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "gemma"}, ["general.architecture", "gemma", "llama"]),
        ({"pre": "llama-bpe"}, ["tokenizer.ggml.pre", "llama-bpe", "smollm"]),
        ({"rope_scaling": gguf.RopeScalingType.YARN}, ["llama.rope.scaling.type", "yarn"]),
    ],
)
def test_another_kind_of_file_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", hf_weights(), **changes)
    with pytest.raises(ModelError) as caught:
        convert_llama_gguf(path, tmp_path, lambda what, part: None)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_and_an_unknown_tensor_are_refused_by_name(tmp_path: Path) -> None:
    weights = hf_weights()
    del weights["layers.1.v"]
    with pytest.raises(ModelError, match=r"blk\.1\.attn_v\.weight"):
        convert_llama_gguf(write_gguf(tmp_path / "m.gguf", weights), tmp_path, lambda what, part: None)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all, but long enough to be read as one"])
def test_what_is_not_gguf_is_a_model_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="not a readable GGUF"):
        convert_llama_gguf(tmp_path / "m.gguf", tmp_path, lambda what, part: None)
