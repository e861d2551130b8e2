"""Where prompts come from: arguments, a file of lines or JSON records, or standard input. Read whole, then checked."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyengine.cli.process import as_json, plain_message
from pyengine.errors import InvalidRequest
from pyengine.sampling_params import SamplingParams

JSONL_SUFFIXES = (".jsonl", ".ndjson")
_RECORD_KEYS = ("prompt", "id", "params")


@dataclass(frozen=True, slots=True)
class PromptItem:
    """One prompt to complete.

    Attributes:
        id: the record's own, else the position from 0.
        prompt: text or token ids.
    """

    id: Any
    prompt: str | list[int]
    params: SamplingParams


def items_from_arguments(arguments: Sequence[str], given: Mapping[str, Any]) -> list[PromptItem]:
    """One item for each argument; "-" stands for all of standard input. Raises InvalidRequest."""
    params = SamplingParams(**given)
    texts = [read_stdin() if text == "-" else argument_text(text) for text in arguments]
    return [PromptItem(number, text, params) for number, text in enumerate(texts)]


def items_from_file(file: str, given: Mapping[str, Any], *, is_jsonl: bool | None) -> list[PromptItem]:
    """One item for each line that is not blank; "-" reads standard input.

    Args:
        given: sampling parameters by name; a JSON record's own `params` come on top of them.
        is_jsonl: None: as the file's name ends.

    Raises:
        InvalidRequest: the file cannot be read, or a line is wrong; the message has its number.
    """
    if file == "-":
        text, name = read_stdin(), "standard input"
    else:
        text, name = _read_file(Path(file)), file
    if is_jsonl is None:
        is_jsonl = file.lower().endswith(JSONL_SUFFIXES)
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InvalidRequest(f"{name} has no prompts: every line is blank.", field="file", value=file)
    if not is_jsonl:
        params = SamplingParams(**given)
        return [PromptItem(index, line, params) for index, (_, line) in enumerate(lines)]
    return [_item_of_record(line, index, f"{name}, line {number}", given) for index, (number, line) in enumerate(lines)]


def refuse_logprobs_of(items: Sequence[PromptItem]) -> None:
    """Raise InvalidRequest for a record that asks for log-probabilities, which only --json shows."""
    for item in items:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(item.params, name) is not None:
                raise InvalidRequest(
                    f"prompt {item.id}: params has {name}, but without --json no log-probability is shown; add --json.",
                    field=name,
                    value=getattr(item.params, name),
                )


def read_stdin() -> str:
    """All of standard input, as one prompt, without the newline that ends its last line. Raises InvalidRequest."""
    data = sys.stdin.buffer.read() if sys.stdin is not None else b""
    return _decoded(data, "standard input").removesuffix("\n").removesuffix("\r")


def argument_text(argument: str) -> str:
    """An argument as UTF-8, also where the locale made Python read it as ASCII."""
    if argument.isascii() or not any("\udc80" <= character <= "\udcff" for character in argument):
        return argument
    return os.fsencode(argument).decode("utf-8", "surrogateescape")


def _read_file(path: Path) -> str:
    try:
        return _decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}.", field="file", value=str(path)) from error


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{name} is not UTF-8: the byte 0x{data[error.start]:02X} at position {error.start}.",
            field="file",
            value=error.start,
        ) from error


def _item_of_record(line: str, index: int, where: str, given: Mapping[str, Any]) -> PromptItem:
    try:
        record = json.loads(
            line, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite_number
        )
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where}: not valid JSON ({error}).", field="file", value=line[:80]) from error
    except ValueError as error:
        raise InvalidRequest(f"{where}: {error}.", field="file", value=line[:80]) from error
    if not isinstance(record, dict) or "prompt" not in record:
        raise InvalidRequest(
            f'{where}: it must be an object with a prompt, for example {{"prompt": "Once"}}.', field="file"
        )
    for key in record:
        if key not in _RECORD_KEYS:
            raise InvalidRequest(
                f"{where}: {key!r} is not known; a record has {', '.join(_RECORD_KEYS)}.", field=key, value=record[key]
            )
    prompt = record["prompt"]
    if not isinstance(prompt, (str, list)):
        raise InvalidRequest(
            f"{where}: prompt is {as_json(prompt)}; it must be a text or a list of token ids.",
            field="prompt",
            value=prompt,
        )
    own = record.get("params", {})
    if not isinstance(own, dict):
        raise InvalidRequest(f"{where}: params is {as_json(own)}; it must be an object.", field="params", value=own)
    if isinstance(own.get("logit_bias"), dict):  # the keys of a JSON object are always text
        own = {**own, "logit_bias": {_as_int(key): value for key, value in own["logit_bias"].items()}}
    try:
        params = SamplingParams.from_dict({**given, **own})
    except InvalidRequest as error:
        message = f"{where}: {plain_message(error)}"
        raise InvalidRequest(message, field=error.field, value=error.value, limit=error.limit) from error
    return PromptItem(record.get("id", index), prompt, params)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a key that is there twice: one of its values would be ignored."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {as_json(key)} is there twice")
        found[key] = value
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large a number")
    return value


def _as_int(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() else key
