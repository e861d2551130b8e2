"""Where prompts come from: arguments, a file of lines or JSON records, or standard input. Read whole, then checked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}: not valid JSON ({error}).", field="file", value=line[:80]) from error
    if not isinstance(record, dict) or "prompt" not in record:
        raise InvalidRequest(
            f'{where}: it must be an object with a prompt, for example {{"prompt": "Once"}}.', field="file"
        )
    for key in record:
        if key not in _RECORD_KEYS:
            raise InvalidRequest(
                f"{where}: {key!r} is not known; a record has {', '.join(_RECORD_KEYS)}.", field=key, value=record[key]
            )
    own = record.get("params", {})
    if not isinstance(own, dict):
        raise InvalidRequest(f"{where}: params is {own!r}; it must be an object.", field="params", value=own)
    if isinstance(own.get("logit_bias"), dict):  # the keys of a JSON object are always text
        own = {**own, "logit_bias": {_as_int(key): value for key, value in own["logit_bias"].items()}}
    try:
        params = SamplingParams.from_dict({**given, **own})
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error}", field=error.field, value=error.value, limit=error.limit) from error
    return PromptItem(record.get("id", index), record["prompt"], params)


def _as_int(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() else key
