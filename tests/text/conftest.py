"""Small tokenizers of every kind that real models use, trained or built in the process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from pyengine.text import Tokenizer

CORPUS = [
    "Once upon a time there was a little fox who lived in the forest.",
    "The little fox said: “I wish I could fly!” and looked at the sky.",
    "你好世界。 こんにちは 안녕하세요 Привет мир, naïve café déjà vu.",
    "It's 12345 o'clock; don't, won't, can't, they've, we're -- done.\n\n\tNew line.",
    "👩‍👩‍👧 🎉🎉 👍🏽 e\u0301 ok",
] * 3


def byte_level_backend() -> Backend:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it; all 256 bytes are tokens, and few characters are merged."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    # Not special, and with a space and a letter outside the byte-level alphabet.
    backend.add_tokens([AddedToken("<think er>"), AddedToken("名前")])
    return backend


def llama_backend(*, strip: bool = True, normalizer: bool = True) -> Backend:
    """BPE over SentencePiece marks with byte fallback, as Llama 1 and 2 and Mistral (strip) and Gemma have it."""
    vocab: dict[str, int] = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for char in sorted(set("▁" + "".join(CORPUS[:2]).replace(" ", "▁") + "é世界\n")):
        vocab.setdefault(char, len(vocab))
    for left, right in [
        ("▁", "t"),
        ("▁t", "h"),
        ("▁th", "e"),
        ("▁", "▁"),
        ("o", "n"),
        ("l", "i"),
        ("▁", "w"),
        ("▁w", "o"),
    ]:
        merges.append((left, right))
        vocab.setdefault(left + right, len(vocab))
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    return backend


def metaspace_backend(prepend_scheme: str) -> Backend:
    """Unigram with a Metaspace decoder, as SentencePiece models without byte fallback have it."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_piece_backend() -> Backend:
    """WordPiece, whose decoder joins words with spaces and cleans up before punctuation."""
    words = ["[UNK]", "[CLS]", "the", "little", "fox", "##es", "##s", "do", "n't", ".", ",", "said", "ca", "'", "##é"]
    backend = Backend(models.WordPiece(vocab={word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[CLS]", special=True)])
    return backend


def suffix_backend() -> Backend:
    """BPE with an end-of-word mark, as GPT-1 has it: the last token of a text decodes unlike the others."""
    vocab = {token: index for index, token in enumerate(["a", "b", "a</w>", "b</w>", "é</w>", "c"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], end_of_word_suffix="</w>"))
    backend.decoder = decoders.BPEDecoder("</w>")
    return backend


BACKENDS: dict[str, Callable[[], Backend]] = {
    "byte-level": byte_level_backend,
    "llama": llama_backend,
    "gemma": lambda: llama_backend(strip=False, normalizer=False),
    "metaspace-always": lambda: metaspace_backend("always"),
    "metaspace-never": lambda: metaspace_backend("never"),
    "word-piece": word_piece_backend,
    "end-of-word": suffix_backend,
}
ALL_KINDS = list(BACKENDS)
_TOKENIZERS: dict[str, Tokenizer] = {}


def make_tokenizer(kind: str) -> Tokenizer:
    """The tokenizer of one kind, built once."""
    if kind not in _TOKENIZERS:
        _TOKENIZERS[kind] = Tokenizer(BACKENDS[kind](), source=kind)
    return _TOKENIZERS[kind]


FolderWriter = Callable[..., Path]


@pytest.fixture
def write_folder(tmp_path: Path) -> FolderWriter:
    """Writes a model folder's tokenizer files: a backend (or its JSON), tokenizer_config.json and others by name."""

    def write(backend: Backend | dict[str, Any], config: dict[str, Any] | None = None, **files: str) -> Path:
        state = backend if isinstance(backend, dict) else json.loads(backend.to_str())
        (tmp_path / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return tmp_path

    return write
