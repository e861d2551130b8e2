"""Properties of IncrementalDetokenizer: what is emitted, when, and that the split into pushes does not matter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from pyengine.text import IncrementalDetokenizer, Tokenizer
from pyengine.text.detokenizer import DecoderKind, byte_level_bytes

from .conftest import ALL_KINDS, BACKENDS, byte_level_backend, make_tokenizer

EXACT_KINDS = ["byte-level", "llama", "gemma", "metaspace-always", "metaspace-never"]
TEXTS = ["the fox", "", " wo", "世界", "naïve café", "a🎉", "👩‍👩‍👧", "\n\n", "e\u0301"]
few = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])

text_strategy = st.one_of(
    st.text(max_size=20),
    st.text(alphabet="the fox wo 🎉👩\u200d👧👍🏽\u0301é世界한글\n", max_size=20),
)


def deltas(
    tokenizer: Tokenizer, prompt: Sequence[int], outputs: Sequence[int], split: Sequence[int] = (), *, skip: bool = True
) -> list[str]:
    """All pieces of text, with the outputs pushed in groups whose sizes are `split` (then one by one)."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    pieces, position = [], 0
    for size in split:
        pieces.append(detokenizer.push(outputs[position : position + size]))
        position += size
    pieces += [detokenizer.push([token_id]) for token_id in outputs[position:]]
    return [*pieces, detokenizer.finish()]


def incomplete_suffix(data: bytes) -> bytes:
    """The longest suffix that is a proper prefix of one UTF-8 character."""
    for length in (3, 2, 1):
        suffix = data[-length:]
        try:
            suffix.decode()
        except UnicodeDecodeError as error:
            if len(suffix) == length and error.start == 0 and error.reason == "unexpected end of data":
                return suffix
    return b""


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], outputs: Sequence[int], *, skip: bool = True) -> str:
    """The definition in the docstring of pyengine.text.detokenizer, by decoding everything."""
    skipped = tokenizer.special_ids if skip else frozenset()
    prompt_bytes, output_bytes = (
        b"".join(tokenizer.token_bytes(i) for i in ids if i not in skipped) for ids in (prompt, outputs)
    )
    if not output_bytes:
        return ""
    tail = incomplete_suffix(prompt_bytes)
    if tokenizer.decoder_plan.kind is DecoderKind.BYTE_LEVEL:
        before = prompt_bytes[: len(prompt_bytes) - len(tail)].decode(errors="replace")
        after = tokenizer.decode([*prompt, *outputs], skip)
    else:
        context = tokenizer.encode("the")[-1:] if len(prompt_bytes) > len(tail) else []
        byte_ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in tail]
        before = tokenizer.decode(context)
        after = tokenizer.decode([*context, *byte_ids, *outputs], skip)
    assert after.startswith(before)
    return after[len(before) :]


def test_half_a_surrogate_at_the_end_of_a_prompt_is_not_the_beginning_of_a_character() -> None:
    tokenizer = make_tokenizer("llama")
    prompt = [tokenizer.token_to_id(f"<0x{byte}>") for byte in ("E2", "ED", "A0")]
    for skip in (True, False):
        for outputs in ([0], tokenizer.encode("the"), [prompt[2]]):
            got = "".join(deltas(tokenizer, prompt, outputs, [], skip=skip))
            assert got == continuation(tokenizer, prompt, outputs, skip=skip)


@pytest.mark.parametrize("kind", EXACT_KINDS)
@few
@given(data=st.data())
def test_deltas_of_random_ids_add_up_to_the_decode_of_all_of_them(kind: str, data: st.DataObject) -> None:
    tokenizer = make_tokenizer(kind)
    # Ids beyond the vocabulary: a model's vocabulary may be padded.
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24)
    outputs = data.draw(ids)
    skip = data.draw(st.booleans())
    split = data.draw(st.lists(st.integers(0, 4), max_size=8))
    assert "".join(deltas(tokenizer, [], outputs, split, skip=skip)) == tokenizer.decode(outputs, skip)


@pytest.mark.parametrize("kind", EXACT_KINDS)
@few
@given(data=st.data())
def test_deltas_after_a_prompt_add_up_to_the_continuation(kind: str, data: st.DataObject) -> None:
    tokenizer = make_tokenizer(kind)
    random_ids = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24)
    prompt = data.draw(st.one_of(random_ids, st.sampled_from(TEXTS).map(tokenizer.encode)))
    prompt = prompt[: data.draw(st.integers(0, len(prompt)))]
    outputs = data.draw(random_ids)
    skip = data.draw(st.booleans())
    got = "".join(deltas(tokenizer, prompt, outputs, data.draw(st.lists(st.integers(0, 4), max_size=8)), skip=skip))
    assert got == continuation(tokenizer, prompt, outputs, skip=skip)


@pytest.mark.parametrize("kind", EXACT_KINDS)
@few
@given(prompt_text=text_strategy, output_text=text_strategy)
def test_decode_of_prompt_and_output_is_the_decode_of_the_prompt_and_then_the_deltas(
    kind: str, prompt_text: str, output_text: str
) -> None:
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.encode(prompt_text)
    outputs = tokenizer.encode(output_text)
    whole = tokenizer.decode([*prompt, *outputs])
    assert whole == tokenizer.decode(prompt) + "".join(deltas(tokenizer, prompt, outputs))


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
@few
@given(text=text_strategy.filter(lambda text: "\ufffd" not in text))
def test_well_formed_output_never_shows_a_replacement_character(kind: str, text: str) -> None:
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.encode("the")
    pieces = deltas(tokenizer, prompt, tokenizer.encode(text))
    assert "\ufffd" not in "".join(pieces)


@few
@given(text=text_strategy)
def test_byte_level_text_is_emitted_with_the_token_that_completes_its_last_character(text: str) -> None:
    tokenizer = make_tokenizer("byte-level")
    outputs = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    received, emitted = b"", ""
    for token_id in outputs:
        received += tokenizer.token_bytes(token_id)
        emitted += detokenizer.push([token_id])
        assert emitted == received.decode(errors="ignore")


@few
@given(data=st.data(), cut=st.integers(1, 3))
def test_a_character_begun_in_the_prompt_is_emitted_whole_and_nothing_before_it(data: st.DataObject, cut: int) -> None:
    for kind in ("byte-level", "llama"):
        tokenizer = make_tokenizer(kind)
        byte_ids = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
        character = data.draw(st.sampled_from("🎉👍한ñ"))
        ids = [byte_ids[bytes([byte])] for byte in character.encode()]
        cut = min(cut, len(ids) - 1)
        prompt = [*tokenizer.encode("the"), *ids[:cut]]
        assert "".join(deltas(tokenizer, prompt, [*ids[cut:], *tokenizer.encode(" the")[-1:]])) == character + " the"


@pytest.mark.parametrize("kind", ["word-piece", "end-of-word"])
@few
@given(data=st.data())
def test_decoders_without_a_streaming_form_agree_with_decode_too(kind: str, data: st.DataObject) -> None:
    tokenizer = make_tokenizer(kind)
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=24)
    outputs, split = data.draw(ids), data.draw(st.lists(st.integers(0, 4), max_size=8))
    assert "".join(deltas(tokenizer, [], outputs, split)) == tokenizer.decode(outputs)
    prompt = [2, *data.draw(ids)]
    whole = tokenizer.decode([*prompt, *outputs])
    assert whole == tokenizer.decode(prompt) + "".join(deltas(tokenizer, prompt, outputs, split))


def test_the_first_token_after_a_prompt_keeps_its_space_and_without_a_prompt_loses_it() -> None:
    tokenizer = make_tokenizer("llama")
    the = tokenizer.token_to_id("▁the")
    bos = tokenizer.token_to_id("<s>")
    assert the is not None
    assert bos is not None
    assert deltas(tokenizer, tokenizer.encode("fox"), [the])[0] == " the"
    assert deltas(tokenizer, [bos, *tokenizer.encode("fox")], [the, the])[:2] == [" the", " the"]
    assert deltas(tokenizer, [bos], [the, the])[:2] == ["the", " the"]
    assert deltas(tokenizer, [], [the])[0] == "the"


def test_a_prompt_of_bytes_alone_does_not_leak() -> None:
    tokenizer = make_tokenizer("llama")
    prompt = [3 + byte for byte in b"Hi "]
    assert deltas(tokenizer, prompt, [3 + ord("!"), tokenizer.encode("the")[-1]]) == ["", "! the", ""]


def test_added_tokens_outside_the_byte_level_alphabet_stand_for_their_own_text() -> None:
    tokenizer = make_tokenizer("byte-level")
    outputs = [tokenizer.token_to_id(token) for token in ("<think er>", "名前")]
    assert [tokenizer.token_bytes(token_id).decode() for token_id in outputs] == ["<think er>", "名前"]
    assert (
        deltas(tokenizer, [], outputs)
        == ["<think er>", "名前", ""]
        == [*map(tokenizer.decode, ([i] for i in outputs)), ""]
    )


def test_an_incomplete_character_is_held_by_a_decoder_without_a_streaming_form_too() -> None:
    backend = byte_level_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("fox", "cat")])
    tokenizer = Tokenizer(backend)
    assert tokenizer.decoder_plan.kind is DecoderKind.WINDOW
    byte_ids = {byte_level_bytes(tokenizer.id_to_token(i) or ""): i for i in reversed(range(tokenizer.vocab_size))}
    outputs = [byte_ids[bytes([byte])] for byte in "🎉!".encode()]
    assert deltas(tokenizer, tokenizer.encode("a"), outputs) == ["", "", "", "🎉", "!", ""]
    # Bytes that never become a character do not hold the text for ever.
    assert "\ufffd" in "".join(deltas(tokenizer, [], [byte_ids[b"\x80"]] * 40)[:-1])


def test_certainly_ill_formed_bytes_are_emitted_at_once() -> None:
    byte_level, llama = make_tokenizer("byte-level"), make_tokenizer("llama")
    lone = [i for i in range(byte_level.vocab_size) if byte_level.token_bytes(i) == b"\x80"]
    assert deltas(byte_level, [], lone * 5) == ["\ufffd"] * 5 + [""]
    lone = [i for i in range(llama.vocab_size) if llama.token_bytes(i) == b"\x80"]
    assert deltas(llama, [], lone * 5) == ["\ufffd"] * 5 + [""]


def test_an_ill_formed_byte_turns_the_whole_byte_fallback_run_into_replacements_as_decode_does() -> None:
    tokenizer = make_tokenizer("llama")
    run = [3 + byte for byte in [*"é".encode(), 0xE2, 0x28, 0x41]]
    pieces = deltas(tokenizer, [], [*run, tokenizer.encode("the")[-1]])
    assert pieces == ["", "", "", "\ufffd" * 4, "\ufffd", " the", ""]
    assert "".join(pieces) == tokenizer.decode([*run, tokenizer.encode("the")[-1]])


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_an_incomplete_last_character_is_one_flush_at_the_end(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    byte_ids = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    outputs = [byte_ids[bytes([byte])] for byte in "🎉".encode()[:3]]
    pieces = deltas(tokenizer, tokenizer.encode("the"), outputs)
    assert pieces[:-1] == ["", "", ""]
    assert pieces[-1] == tokenizer.decode([*tokenizer.encode("the"), *outputs])[len("the") :] != ""


def test_ids_without_a_token_emit_nothing_and_change_nothing() -> None:
    for kind in ALL_KINDS:
        tokenizer = make_tokenizer(kind)
        strange = [tokenizer.vocab_size, 2**40, -1]
        outputs = [2, 2]
        plain = "".join(deltas(tokenizer, [], outputs, skip=False))
        assert "".join(deltas(tokenizer, strange, [*strange, 2, *strange, 2], skip=False)) == plain != ""


class CountingTokenizer(Tokenizer):
    """Counts the ids that it is asked about."""

    looked_up = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.looked_up += 1
        return super().token_bytes(token_id)

    def token_piece(self, token_id: int) -> str | int | None:
        self.looked_up += 1
        return super().token_piece(token_id)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        ids = list(ids)
        self.looked_up += len(ids)
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_work_per_token_does_not_grow_with_the_output_or_the_prompt(kind: str) -> None:
    tokenizer = CountingTokenizer(BACKENDS[kind]())
    prompt = tokenizer.encode("the fox a b")[:1] * 50_000
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    assert tokenizer.looked_up <= 10
    for index in range(2000):
        detokenizer.push([2 + index % 4])
    assert tokenizer.looked_up <= 10 + 2000 * 20
