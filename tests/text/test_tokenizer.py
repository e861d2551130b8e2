"""Properties of Tokenizer: the settings of a model folder that decide ids, bytes and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers.processors import ByteLevel, TemplateProcessing

from pyengine.errors import InvalidRequest, ModelError
from pyengine.text import Tokenizer

from .conftest import ALL_KINDS, FolderWriter, byte_level_backend, llama_backend, make_tokenizer

BOS = {"bos_token": "<s>", "eos_token": "</s>"}


def load(write_folder: FolderWriter, config: dict[str, Any] | None, *, post: Any = None, **files: str) -> Tokenizer:
    backend = llama_backend()
    if post is not None:
        backend.post_processor = post
    return Tokenizer.from_folder(write_folder(backend, config, **files))


def template(single: str) -> TemplateProcessing:
    return TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])


# What the fast tokenizers of transformers 4.57 give for the same folders.
@pytest.mark.parametrize("class_name", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("post", ["template", "byte-level", "none"])
@pytest.mark.parametrize("flag", [True, False, None])
def test_add_bos_token_holds_for_llama_classes_and_tokenizer_json_decides_for_others(
    write_folder: FolderWriter, class_name: str | None, post: str, flag: bool | None
) -> None:
    config: dict[str, Any] = dict(BOS)
    if class_name is not None:
        config["tokenizer_class"] = class_name
    if flag is not None:
        config["add_bos_token"] = flag
    processor = {"template": template("<s> $A"), "byte-level": ByteLevel(trim_offsets=False), "none": None}[post]
    tokenizer = load(write_folder, config, post=processor)
    if class_name in ("LlamaTokenizer", "LlamaTokenizerFast"):
        expected = flag is not False
    else:
        # Without any post-processor the setting is the only word on the matter.
        expected = post == "template" or (post == "none" and flag is True)
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    assert plain[0] != 1
    assert tokenizer.encode("the fox") == ([1, *plain] if expected else plain)
    assert tokenizer.adds_bos is expected
    assert tokenizer.encode("") == ([1] if expected else [])


def test_add_eos_token_appends_eos(write_folder: FolderWriter) -> None:
    tokenizer = load(write_folder, {**BOS, "tokenizer_class": "LlamaTokenizer", "add_eos_token": True})
    ids = tokenizer.encode("the")
    assert (ids[0], ids[-1]) == (1, 2)


def test_add_bos_token_without_a_bos_token_is_a_model_error_only_when_asked_for(write_folder: FolderWriter) -> None:
    assert not load(write_folder, {"tokenizer_class": "LlamaTokenizer"}).adds_bos
    with pytest.raises(ModelError, match="add_bos_token is true"):
        load(write_folder, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True})


def test_named_tokens_come_from_the_config_and_then_from_the_special_tokens_map(write_folder: FolderWriter) -> None:
    special_map = {"special_tokens_map.json": json.dumps({"bos_token": "</s>", "eos_token": {"content": "</s>"}})}
    tokenizer = load(write_folder, {"bos_token": {"content": "<s>"}}, **special_map)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_folder_with_only_tokenizer_json_loads_without_named_tokens(write_folder: FolderWriter) -> None:
    tokenizer = load(write_folder, None)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.adds_bos) == (None, None, False)
    assert tokenizer.special_ids == {0, 1, 2}


def test_vocab_size_counts_added_tokens_and_gaps(write_folder: FolderWriter) -> None:
    backend = llama_backend()
    before = Tokenizer(backend).vocab_size
    backend.add_tokens(["<new>"])
    assert Tokenizer(backend).vocab_size == before + 1


def test_special_tokens_written_in_the_text_become_their_ids() -> None:
    tokenizer = make_tokenizer("llama")
    assert tokenizer.encode("<s>the</s>", add_special_tokens=False)[::2] == [1, 2]


def test_split_special_tokens_keeps_them_as_text(write_folder: FolderWriter) -> None:
    tokenizer = load(write_folder, {**BOS, "split_special_tokens": True})
    assert 2 not in tokenizer.encode("the</s>")


def test_a_token_declared_only_in_the_config_is_added_at_its_id(write_folder: FolderWriter) -> None:
    size = llama_backend().get_vocab_size()
    entry = {"content": "<|tool|>", "special": True, "normalized": False, "lstrip": False}
    tokenizer = load(write_folder, {**BOS, "added_tokens_decoder": {str(size): entry}})
    assert tokenizer.encode("<|tool|>")[-1] == size
    assert size in tokenizer.special_ids
    with pytest.raises(ModelError, match=r"<\|tool\|>.*id 9999"):
        load(write_folder, {**BOS, "added_tokens_decoder": {"9999": entry}})


def test_a_named_token_that_is_a_plain_word_of_the_vocabulary_becomes_special(write_folder: FolderWriter) -> None:
    tokenizer = load(write_folder, {"eos_token": "▁the"})
    assert tokenizer.eos_token_id in tokenizer.special_ids


def test_truncation_and_padding_of_the_file_are_switched_off(write_folder: FolderWriter) -> None:
    backend = llama_backend()
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.from_folder(write_folder(backend))
    plain = Tokenizer(llama_backend())
    text = "the little fox"
    assert tokenizer.encode(text) == plain.encode(text)
    assert 2 < len(plain.encode(text)) < 50


@pytest.mark.parametrize(("text", "position"), [("\ud800", 0), ("ab\udfffc", 2), ("🎉\ud83c", 1)])
def test_a_lone_surrogate_is_refused_with_its_position(text: str, position: int) -> None:
    with pytest.raises(InvalidRequest, match=f"at character {position}") as caught:
        make_tokenizer("byte-level").encode(text)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"]])
def test_text_that_is_no_string_is_refused(text: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a string"):
        make_tokenizer("byte-level").encode(text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_byte_level_ids_decode_to_the_text_and_their_bytes_concatenate_to_it(text: str) -> None:
    tokenizer = make_tokenizer("byte-level")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode() == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40).filter(lambda text: "▁" not in text and "<" not in text))
def test_byte_fallback_bytes_concatenate_to_the_text(text: str) -> None:
    tokenizer = make_tokenizer("gemma")
    ids = tokenizer.encode(text.replace(" ", "▁"))
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode() == text


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_an_id_without_a_token_has_no_bytes_and_decodes_to_nothing(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    for token_id in (tokenizer.vocab_size, 2**31, 2**70, -1):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.id_to_token(token_id) is None
        assert tokenizer.decode([token_id], skip_special_tokens=False) == ""


def test_skip_special_tokens_leaves_out_exactly_the_special_ids() -> None:
    tokenizer = make_tokenizer("byte-level")
    bos = tokenizer.token_to_id("<|bos|>")
    word = tokenizer.token_to_id("<think er>")
    assert bos in tokenizer.special_ids
    assert word not in tokenizer.special_ids
    assert tokenizer.decode([bos, word]) == "<think er>"
    assert tokenizer.decode([bos, word], skip_special_tokens=False) == "<|bos|><think er>"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {}}', '{"version": "1.0", "model": {"type": "Odd"}}', "\0"])
def test_a_broken_tokenizer_json_is_a_model_error_that_names_it(write_folder: FolderWriter, text: str) -> None:
    folder = write_folder({})
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a usable"):
        Tokenizer.from_folder(folder)


def test_a_post_processor_that_names_an_undefined_token_is_a_model_error_at_load(write_folder: FolderWriter) -> None:
    backend = llama_backend()
    backend.post_processor = template("<s> $A")
    state = json.loads(backend.to_str())
    state["post_processor"]["special_tokens"] = {}
    with pytest.raises(ModelError, match="cannot encode"):
        Tokenizer.from_folder(write_folder(state, BOS))


def test_a_missing_tokenizer_json_is_a_model_error_that_names_it(write_folder: FolderWriter) -> None:
    folder = write_folder({})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.json"])
@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000])
def test_a_broken_settings_file_is_a_model_error_that_names_it(
    write_folder: FolderWriter, name: str, text: str
) -> None:
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load(write_folder, {}, **{name: text})


@pytest.mark.parametrize(
    "config",
    [{"eos_token": 2}, {"bos_token": ["<s>"]}, {"added_tokens_decoder": []}, {"added_tokens_decoder": {"x": {}}}],
)
def test_settings_of_another_shape_are_a_model_error(write_folder: FolderWriter, config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load(write_folder, config)


def test_a_text_that_the_model_has_no_token_for_is_a_typed_error(write_folder: FolderWriter) -> None:
    backend = byte_level_backend()
    state = json.loads(backend.to_str())
    state["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    state["added_tokens"] = []
    tokenizer_folder = write_folder(state)
    with pytest.raises(ModelError, match="cannot encode"):
        Tokenizer.from_folder(tokenizer_folder).encode("b")


def test_importing_the_package_loads_neither_tokenizers_nor_jinja2() -> None:
    code = "import pyengine.text, sys; print(sorted({'tokenizers', 'jinja2', 'numpy'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_added_tokens_with_spaces_are_found_in_text() -> None:
    backend = llama_backend()
    backend.add_tokens([AddedToken("two words", normalized=False)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_to_id("two words") in tokenizer.encode("the two words")
