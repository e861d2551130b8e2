"""The tokenizer of a Hugging Face model folder: text to ids and back; it keeps nothing about requests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyengine.errors import InvalidRequest, ModelError
from pyengine.text.detokenizer import DecoderPlan, piece_of_token, plan_decoder, token_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from pyengine.text.chat_template import ChatTemplate

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Classes whose Hugging Face fast tokenizer (transformers 4) builds the post-processor from add_bos_token and
# add_eos_token whatever tokenizer.json says, with the default of add_bos_token. DeepSeek and many Llama and Mistral
# folders depend on it. For every other class tokenizer.json decides.
_ADD_BOS_DEFAULT = {
    "CodeLlamaTokenizer": True,
    "CohereTokenizer": True,
    "GPTNeoXTokenizer": False,
    "GemmaTokenizer": True,
    "LlamaTokenizer": True,
}


class Tokenizer:
    """Encodes text as the Hugging Face fast tokenizer of the same folder does, and decodes ids.

    Attributes:
        vocab_size: largest token id + 1, added tokens included. The model's vocabulary may be larger (padding).
        bos_token_id: id of the `bos_token` of tokenizer_config.json, or None.
        eos_token_id: id of the `eos_token` of tokenizer_config.json, or None.
        special_ids: the ids that `skip_special_tokens` leaves out.
        special_tokens: name -> text of the named special tokens, as chat templates see them.
        adds_bos: whether `encode` puts the BOS token before a text.
        decoder_plan: how the decoder is streamed; for `IncrementalDetokenizer`.
        source: where the tokenizer came from, for error messages.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        source: str = "tokenizer",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._backend = backend
        self._chat_sources = dict(chat_templates or {})
        self._chat_templates: dict[str, ChatTemplate] = {}
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        self.decoder_plan: DecoderPlan = plan_decoder(_decoder_state(backend))
        self._pieces: dict[int, str | int | None] = {}
        self._bytes: dict[int, bytes] = {}
        # Also shows at load whether the post-processor works at all.
        self.adds_bos = self.encode("")[:1] == [self.bos_token_id]

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and the chat template of a model folder.

        Only tokenizer.json must be there. Truncation and padding stored in it are switched off.

        Raises:
            ModelError: a file is missing, unreadable, or contradicts another; the message names it.
        """
        path = Path(path)
        backend = _load_backend(path / "tokenizer.json")
        config = _read_json_object(path / "tokenizer_config.json")
        special_map = _read_json_object(path / "special_tokens_map.json")
        special_tokens = _special_tokens(config, special_map, path)
        _add_missing_tokens(backend, config, special_tokens, path)
        backend.encode_special_tokens = config.get("split_special_tokens") is True
        _set_post_processor(backend, config, special_tokens, path)
        return cls(backend, special_tokens=special_tokens, chat_templates=_chat_sources(path, config), source=str(path))

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """Token ids of `text`.

        Special tokens written in the text become their ids, as in Hugging Face.

        Args:
            text: any text without lone surrogates; may be empty.
            add_special_tokens: whether the post-processor runs (BOS for Llama, nothing for Qwen2).
            field: what an error calls the text.

        Raises:
            InvalidRequest: `text` is not a string or has a lone surrogate; the message gives its position.
            ModelError: the tokenizer itself fails on the text (for example, it has no token for unknown words).
        """
        _check_text(text, field)
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            if not _is_library_failure(error):
                raise
            raise ModelError(f"The tokenizer in {self.source} cannot encode this text: {error}.") from error
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids without a token decode to nothing.

        No "clean up of tokenization spaces" is applied: it would change what a byte-level model said (transformers 5
        ignores that setting for BPE for the same reason).
        """
        known = [int(token_id) for token_id in ids if 0 <= token_id < self.vocab_size]
        text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (such as "Ġthe" or "▁the"), or None for an id without a token."""
        if not 0 <= token_id < self.vocab_size:
            return None
        token: str | None = self._backend.id_to_token(int(token_id))
        return token

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds inside a text; b"" for an id without a token. Special tokens give their name."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self.id_to_token(token_id)
            data = b"" if token is None else token_bytes(self.decoder_plan, token)
            self._bytes[token_id] = data
        return data

    def token_piece(self, token_id: int) -> str | int | None:
        """For `IncrementalDetokenizer`: the text a token adds, or the byte it stands for; None without a token."""
        try:
            return self._pieces[token_id]
        except KeyError:
            token = self.id_to_token(token_id)
            piece = None if token is None else piece_of_token(self.decoder_plan, token)
            self._pieces[token_id] = piece
            return piece

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder brought a chat template."""
        return bool(self._chat_sources)

    def chat_template(self, name: str | None = None, *, has_tools: bool = False) -> ChatTemplate:
        """The chat template called `name`; without one, "tool_use" if there are tools and it exists, else "default".

        Raises:
            InvalidRequest: there is no such template (field `messages`, or `template_name`).
            ModelError: the template does not compile.
        """
        if not self._chat_sources:
            raise InvalidRequest(
                f"The model in {self.source} has no chat template, so `messages` cannot be turned into a prompt; "
                "use a chat model, or give a text prompt.",
                field="messages",
            )
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._chat_sources else "default"
        if name not in self._chat_sources:
            raise InvalidRequest(
                f"The model in {self.source} has no chat template called {name!r}; it has "
                f"{', '.join(sorted(self._chat_sources))}.",
                field="template_name",
                value=name,
                limit=sorted(self._chat_sources),
            )
        if name not in self._chat_templates:
            from pyengine.text.chat_template import ChatTemplate

            self._chat_templates[name] = ChatTemplate(
                self._chat_sources[name], **self.special_tokens, source_name=f"{name} chat template of {self.source}"
            )
        return self._chat_templates[name]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_name: str | None = None,
        **extra: Any,
    ) -> str:
        """The prompt text of a conversation; arguments and errors as in `ChatTemplate.render`."""
        template = self.chat_template(template_name, has_tools=bool(tools))
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **extra)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_name: str | None = None,
        **extra: Any,
    ) -> list[int]:
        """The prompt ids of a conversation.

        The template writes the special tokens, BOS included; nothing is added to them, as in Hugging Face.
        """
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, template_name=template_name, **extra
        )
        return self.encode(text, add_special_tokens=False, field="messages")


def _check_text(text: object, field: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"{field} must be a string, not {type(text).__name__}.", field=field, value=text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{field} has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; "
            "text must be well-formed Unicode.",
            field=field,
            value=error.start,
        ) from error


def _is_library_failure(error: BaseException) -> bool:
    """Whether `error` is one of the tokenizers library, which raises bare Exception, or a panic outside Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _load_backend(file: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    if not file.is_file():
        raise ModelError(f"{file} is missing; a model folder needs a tokenizer.json (a Hugging Face fast tokenizer).")
    try:
        return Backend.from_file(str(file))
    except BaseException as error:
        if not _is_library_failure(error):
            raise
        raise ModelError(f"{file} is not a usable tokenizer.json: {error}.") from error


def _decoder_state(backend: Backend) -> dict[str, Any] | None:
    if backend.decoder is None:
        return None
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return state


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}.") from error


def _read_json_object(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object, not {type(value).__name__}.")
    return value


def _token_text(entry: Any) -> str | None:
    """The text of a token that is written as a string or as an AddedToken object; None if it is neither."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _special_tokens(config: dict[str, Any], special_map: dict[str, Any], folder: Path) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        file, entry = "tokenizer_config.json", config.get(name)
        if name not in config:
            file, entry = "special_tokens_map.json", special_map.get(name)
        if entry is None:
            continue
        text = _token_text(entry)
        if text is None:
            raise ModelError(f"{folder / file}: {name} must be a string or an object with `content`, not {entry!r}.")
        tokens[name] = text
    return tokens


def _add_missing_tokens(
    backend: Backend, config: dict[str, Any], special_tokens: Mapping[str, str], folder: Path
) -> None:
    """Adds what tokenizer_config.json declares and tokenizer.json lacks, and marks the named tokens as special."""
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, entry in _declared_tokens(config, folder):
        content = _token_text(entry)
        if content is None or content in known:
            continue
        flags = {key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
        special = bool(entry.get("special", False))
        backend.add_tokens([AddedToken(content, special=special, **flags)])
        if backend.token_to_id(content) != token_id:
            raise ModelError(
                f"{folder / 'tokenizer_config.json'}: added_tokens_decoder gives {content!r} the id {token_id}, but "
                f"by tokenizer.json it has the id {backend.token_to_id(content)}."
            )
        known.add(content)
    in_vocabulary = [
        content
        for content in dict.fromkeys(special_tokens.values())
        if content not in known and backend.token_to_id(content) is not None
    ]
    backend.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in in_vocabulary])


def _declared_tokens(config: dict[str, Any], folder: Path) -> list[tuple[int, dict[str, Any]]]:
    declared = config.get("added_tokens_decoder", {})
    try:
        return sorted((int(token_id), dict(entry)) for token_id, entry in declared.items())
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must map ids to token objects: {error}."
        ) from error


def _set_post_processor(
    backend: Backend, config: dict[str, Any], special_tokens: Mapping[str, str], folder: Path
) -> None:
    """Makes `add_bos_token` and `add_eos_token` hold where Hugging Face's fast tokenizer makes them hold.

    That is for the classes in _ADD_BOS_DEFAULT. For other classes tokenizer.json decides, unless it has no
    post-processor at all and the settings ask for a token.
    """
    class_name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if class_name not in _ADD_BOS_DEFAULT and backend.post_processor is not None:
        return
    add_bos = bool(config.get("add_bos_token", _ADD_BOS_DEFAULT.get(class_name, False)))
    add_eos = bool(config.get("add_eos_token", False))
    if not add_bos and not add_eos and backend.post_processor is None:
        return
    from tokenizers.processors import TemplateProcessing

    template, tokens = ["$A"], []
    for wanted, name, position in ((add_bos, "bos_token", 0), (add_eos, "eos_token", 2)):
        if not wanted:
            continue
        token = special_tokens.get(name)
        token_id = None if token is None else backend.token_to_id(token)
        if token is None or token_id is None:
            if f"add_{name}" not in config:
                continue
            raise ModelError(
                f"{folder / 'tokenizer_config.json'}: add_{name} is true, but {name} is {token!r}, which is no token "
                "of tokenizer.json."
            )
        template.insert(position, token)
        tokens.append((token, token_id))
    backend.post_processor = TemplateProcessing(single=template, pair=None, special_tokens=tokens)


def _chat_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template name -> source. A template file outranks the entry of tokenizer_config.json, as in Hugging Face."""
    sources = _named_templates(config.get("chat_template"), folder / "tokenizer_config.json")
    json_file = folder / "chat_template.json"
    sources |= _named_templates(_read_json_object(json_file).get("chat_template"), json_file)
    if (folder / "chat_template.jinja").exists():
        sources["default"] = _read_text(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = _read_text(file)
    return sources


def _named_templates(entry: Any, file: Path) -> dict[str, str]:
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        named = {
            item["name"]: item["template"]
            for item in entry
            if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
        }
        if len(named) == len(entry):
            return named
    raise ModelError(f"{file}: chat_template must be a string or a list of objects with `name` and `template`.")
