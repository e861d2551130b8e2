"""Turns token ids into text as they are generated; it neither stores the ids nor looks for stop strings.

What is emitted is the *continuation* of the prompt. With D the tokenizer's `decode`:

    continuation(prompt, outputs) = D(context + tail + outputs) minus its prefix D(context)

where `tail` is the incomplete UTF-8 character at the end of the prompt (nearly always none), and `context` is what of
the prompt decides how later text is decoded: nothing if the prompt has no text of its own, else any ordinary text. If
the outputs have no text of their own (only skipped special tokens, say), the continuation is empty. So a decoder that
strips the first space of a whole text (Llama 1 and 2, Mistral) does not strip the space of a first generated token that
follows a prompt. For a prompt of complete characters and well-formed output this is D(prompt + outputs) minus
D(prompt). Ids without a token (padded vocabularies) decode to nothing.

Hold-back: an incomplete UTF-8 character is held until it is complete, certainly ill-formed (then U+FFFD, at once), or
the end. With byte-fallback tokens (`<0xE2>`) D turns a whole run of adjacent byte tokens into U+FFFD as soon as one of
them is ill-formed; a well-formed run is therefore held until a token that is not a byte follows it.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyengine.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER_BYTES = 4
# Ids that a window keeps as context, and the most it holds back, for decoders without a streaming form of their own.
_WINDOW_CONTEXT_IDS = 8
_WINDOW_HELD_IDS = 16
_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")

_incremental_utf8 = codecs.getincrementaldecoder("utf-8")


class DecoderKind(Enum):
    """How a tokenizer's decoder can be streamed."""

    BYTE_LEVEL = "byte_level"  # every token is bytes: GPT-2, Llama 3, Qwen
    PIECES = "pieces"  # every token is text or one byte: Llama 1 and 2, Mistral, Gemma
    WINDOW = "window"  # anything else: decoded again over a short window


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """A tokenizer.json decoder, reduced to what streaming needs.

    Attributes:
        kind: which stream decodes it.
        replacements: (old, new) applied to every token, in order.
        has_byte_tokens: whether tokens like `<0xE2>` mean one byte.
        strip_char: the character stripped from the start of the whole text.
        strip_count: how many of them at most.
        metaspace: the mark that Metaspace drops from the first token instead of turning it into a space, or None.
    """

    kind: DecoderKind
    replacements: tuple[tuple[str, str], ...] = ()
    has_byte_tokens: bool = False
    strip_char: str = " "
    strip_count: int = 0
    metaspace: str | None = None


def plan_decoder(decoder: dict[str, Any] | None) -> DecoderPlan:
    """Reduces the `decoder` entry of a tokenizer.json; what it does not know becomes a WINDOW plan."""
    window = DecoderPlan(DecoderKind.WINDOW)
    if decoder is None:
        return window
    steps = _flatten(decoder)
    replacements: list[tuple[str, str]] = []
    metaspace: str | None = None
    while steps and steps[0]["type"] in ("Replace", "Metaspace"):
        step = steps.pop(0)
        if step["type"] == "Metaspace":
            if replacements or metaspace is not None:
                return window
            if step.get("prepend_scheme", "always") != "never":
                metaspace = step["replacement"]
            replacements.append((step["replacement"], " "))
        elif "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        else:
            return window
    names = [step["type"] for step in steps]
    if names and names[0] == "ByteLevel" and names[1:] in ([], ["Fuse"]) and metaspace is None:
        return DecoderPlan(DecoderKind.BYTE_LEVEL, replacements=tuple(replacements))
    has_byte_tokens = names[:1] == ["ByteFallback"]
    rest = steps[1:] if has_byte_tokens else steps
    strip_char, strip_count = " ", 0
    if [step["type"] for step in rest] == ["Fuse", "Strip"]:
        if rest[1]["stop"] != 0:
            return window
        strip_char, strip_count = rest[1]["content"], rest[1]["start"]
    elif [step["type"] for step in rest] not in ([], ["Fuse"]):
        return window
    return DecoderPlan(
        DecoderKind.PIECES, tuple(replacements), has_byte_tokens, strip_char, strip_count, metaspace=metaspace
    )


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level BPE alphabet (Radford et al., 2019): printable Latin-1 stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if chr(byte) not in alphabet)
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token with any character outside the alphabet stands for its own UTF-8."""
    try:
        return bytes([_BYTE_OF_CHARACTER[char] for char in token])
    except KeyError:
        return token.encode()


def piece_of_token(plan: DecoderPlan, token: str) -> str | int:
    """The text of a token of a PIECES plan, or the value of the one byte it stands for."""
    for old, new in plan.replacements:
        token = token.replace(old, new)
    if plan.has_byte_tokens:
        match = _BYTE_TOKEN.fullmatch(token)
        if match is not None:
            return int(match[1], 16)
    return token


def token_bytes(plan: DecoderPlan, token: str) -> bytes:
    """The bytes that a token stands for inside a text (not at its start); for WINDOW plans, the token's own UTF-8."""
    if plan.kind is DecoderKind.WINDOW:
        return token.encode()
    piece = piece_of_token(plan, token)
    if plan.kind is DecoderKind.BYTE_LEVEL:
        assert isinstance(piece, str)
        return byte_level_bytes(piece)
    return bytes([piece]) if isinstance(piece, int) else piece.encode()


def _incomplete_end(data: bytes) -> bytes:
    """The incomplete UTF-8 character at the end of `data`; not what can never become one."""
    utf8 = _incremental_utf8("replace")
    utf8.decode(data)
    pending = utf8.getstate()[0]
    # Python waits for the third byte of a surrogate, which UTF-8 does not have.
    return b"" if pending[:1] == b"\xed" and pending[1:2] >= b"\xa0" else pending


class _Stream(ABC):
    """Ids in, text out; the prompt's ids first, whose text is dropped."""

    @abstractmethod
    def start(self, prompt_token_ids: Sequence[int]) -> None: ...

    @abstractmethod
    def push(self, ids: Iterable[int]) -> str: ...

    @abstractmethod
    def finish(self) -> str: ...


class _ByteLevelStream(_Stream):
    """One UTF-8 state machine over the bytes of all tokens; one U+FFFD per maximal subpart (Unicode 16, 3.9.6)."""

    __slots__ = ("_bytes_of", "_has_output", "_skip", "_utf8")

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skip = skip
        self._utf8 = _incremental_utf8("replace")
        self._has_output = False

    def start(self, prompt_token_ids: Sequence[int]) -> None:
        # UTF-8 resynchronises at every lead byte: the last three bytes decide what is incomplete.
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skip:
                tail = self._bytes_of(token_id) + tail
            if len(tail) >= _LONGEST_CHARACTER_BYTES - 1:
                break
        self._utf8.decode(_incomplete_end(tail[-(_LONGEST_CHARACTER_BYTES - 1) :]))

    def push(self, ids: Iterable[int]) -> str:
        data = b"".join([self._bytes_of(token_id) for token_id in ids if token_id not in self._skip])
        self._has_output |= bool(data)
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True) if self._has_output else ""


class _PieceStream(_Stream):
    """Text tokens pass through; a run of byte tokens becomes text only as a whole (see the module's docstring)."""

    __slots__ = (
        "_at_first_token",
        "_has_output",
        "_plan",
        "_run",
        "_run_is_ill_formed",
        "_skip",
        "_strip_left",
        "_tokenizer",
        "_utf8",
    )

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._plan = tokenizer.decoder_plan
        self._skip = skip
        self._strip_left = self._plan.strip_count
        self._at_first_token = self._plan.metaspace is not None
        self._run = bytearray()
        self._run_is_ill_formed = False
        self._has_output = False
        self._utf8 = _incremental_utf8("strict")

    def start(self, prompt_token_ids: Sequence[int]) -> None:
        for token_id in prompt_token_ids:
            if not self._strip_left and not self._at_first_token:
                break
            self.push([token_id])
        self._strip(self._end_run())
        self._has_output = False
        tail = self._incomplete_tail(prompt_token_ids)
        self._run += tail
        self._utf8.decode(tail)

    def _incomplete_tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(prompt_token_ids):
            piece = self._piece(token_id)
            if piece is None:
                continue
            if isinstance(piece, str) or len(tail) == _LONGEST_CHARACTER_BYTES - 1:
                break
            tail = bytes([piece]) + tail
        return _incomplete_end(tail)

    def _piece(self, token_id: int) -> str | int | None:
        return None if token_id in self._skip else self._tokenizer.token_piece(token_id)

    def push(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        for token_id in ids:
            piece = self._piece(token_id)
            if piece is None:
                continue
            self._has_output = True
            if self._at_first_token:
                piece = self._without_mark(token_id)
                self._at_first_token = False
            if isinstance(piece, int):
                parts.append(self._push_byte(piece))
            else:
                parts.append(self._end_run())
                parts.append(piece)
        return self._strip("".join(parts))

    def _without_mark(self, token_id: int) -> str | int:
        token = self._tokenizer.id_to_token(token_id)
        assert token is not None
        assert self._plan.metaspace is not None
        return piece_of_token(self._plan, token.replace(self._plan.metaspace, ""))

    def _push_byte(self, byte: int) -> str:
        if self._run_is_ill_formed:
            return _REPLACEMENT
        self._run.append(byte)
        try:
            self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            # No later byte can mend it: every byte of this run, past and to come, is a U+FFFD.
            self._run_is_ill_formed = True
            return _REPLACEMENT * len(self._run)
        return ""

    def _end_run(self) -> str:
        if not self._run:
            return ""
        if self._run_is_ill_formed:
            text = ""
        elif self._utf8.getstate()[0]:
            text = _REPLACEMENT * len(self._run)
        else:
            text = self._run.decode()
        self._run.clear()
        self._run_is_ill_formed = False
        self._utf8.reset()
        return text

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._plan.strip_char):
                self._strip_left = 0
            else:
                text = text[1:]
                self._strip_left -= 1
        return text

    def finish(self) -> str:
        return self._strip(self._end_run()) if self._has_output else ""


class _WindowStream(_Stream):
    """Decodes the last few ids with and without the new ones and emits the difference; for any local decoder.

    Exact where a token's text depends only on a few tokens before it (WordPiece, CTC, `</w>` suffixes, no decoder).
    """

    __slots__ = ("_context", "_decode", "_held", "_skip")

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._decode = tokenizer.decode
        self._skip = skip
        self._context: list[int] = []
        self._held: list[int] = []

    def _known(self, ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in ids if token_id not in self._skip]

    def start(self, prompt_token_ids: Sequence[int]) -> None:
        context: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skip:
                context.append(token_id)
            if len(context) == _WINDOW_CONTEXT_IDS:
                break
        self._context = context[::-1]

    def push(self, ids: Iterable[int]) -> str:
        self._held += self._known(ids)
        return self._emit(at_end=False)

    def _emit(self, *, at_end: bool) -> str:
        if not self._held:
            return ""
        before = self._decode(self._context, skip_special_tokens=False)
        after = self._decode(self._context + self._held, skip_special_tokens=False)
        is_final = at_end or len(self._held) >= _WINDOW_HELD_IDS
        if not is_final and (after.endswith(_REPLACEMENT) or not after.startswith(before)):
            return ""
        self._context = (self._context + self._held)[-_WINDOW_CONTEXT_IDS:]
        self._held = []
        common = len(before)
        while not after.startswith(before[:common]):
            common -= 1
        return after[common:]

    def finish(self) -> str:
        return self._emit(at_end=True)


_STREAMS: dict[DecoderKind, type[_ByteLevelStream] | type[_PieceStream] | type[_WindowStream]] = {
    DecoderKind.BYTE_LEVEL: _ByteLevelStream,
    DecoderKind.PIECES: _PieceStream,
    DecoderKind.WINDOW: _WindowStream,
}


class IncrementalDetokenizer:
    """The text of one growing output, emitted as it becomes certain.

    The concatenation of all pushes and of `finish` is the continuation defined in the module's docstring, however the
    ids are split into pushes. Amortised O(1) per token; construction reads a few tokens at each end of the prompt.

    Args:
        tokenizer: the tokenizer of the model that generates.
        prompt_token_ids: the prompt; none of its text is ever emitted.
        skip_special_tokens: whether special tokens decode to nothing, as in `Tokenizer.decode`.
    """

    __slots__ = ("_stream",)

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._stream: _Stream = _STREAMS[tokenizer.decoder_plan.kind](tokenizer, skip)
        self._stream.start(prompt_token_ids)

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next generated ids; returns the text that they made certain, often one token's, sometimes ""."""
        return self._stream.push(ids)

    def finish(self) -> str:
        """The text still held back, when no more ids will come; an incomplete last character as in `decode`: U+FFFD."""
        return self._stream.finish()
