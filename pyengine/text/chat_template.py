"""Turns a conversation into prompt text with the model's Jinja template; it does not encode.

The environment is the one that templates on the Hugging Face hub are written for: `trim_blocks`, `lstrip_blocks`,
loop controls, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `{% generation %}`. The sandbox keeps a
template from the interpreter; the limits below end the loops and repetitions that a broken template runs into. They are
no defence against a template written to exhaust memory: it comes with the model, from whoever the weights come from.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyengine.errors import InvalidRequest, ModelError

MAX_OUTPUT_CHARACTERS = 16 * 1024 * 1024
# What all range() of one rendering may count together, and the length that `*` may repeat a sequence to.
MAX_COUNT = 1_000_000
# The largest integer power, in bits of its result.
MAX_POWER_BITS = 4096
# How deep a message or a tool may nest.
MAX_DEPTH = 64

_TEMPLATE_FILE = "<template>"


class _GenerationBlock(Extension):
    """Renders the body of `{% generation %}...{% endgeneration %}`, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedSandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox, with a bound on the results of `*` and `**`."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, where the result has a bounded size."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_POWER_BITS:
                raise SecurityError(f"a power is larger than the limit of {MAX_POWER_BITS} bits")
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(count, int):
                    _check_count(len(sequence) * count)
        return super().call_binop(context, operator, left, right)


def _check_count(count: int) -> None:
    if count > MAX_COUNT:
        raise SecurityError(f"a repetition is longer than the limit of {MAX_COUNT}")


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bounded_range() -> Callable[..., range]:
    """A `range` whose lengths sum to at most MAX_COUNT over one rendering, so that nested loops end too."""
    left = MAX_COUNT

    def bounded(*args: int) -> range:
        nonlocal left
        numbers = range(*args)
        # numbers[-1:] of a huge range is cheap, while len() overflows.
        if numbers and abs(numbers[-1] - numbers[0]) // abs(numbers.step) >= left:
            raise SecurityError(f"the loops count further than the limit of {MAX_COUNT}")
        left -= len(numbers)
        return numbers

    return bounded


def _environment() -> _BoundedSandbox:
    environment = _BoundedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.globals.pop("lipsum")  # generates text in any amount
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _to_json
    return environment


class ChatTemplate:
    """One compiled chat template.

    Args:
        source: the Jinja source.
        bos_token: text of the BOS token; as every special token, undefined in the template if None.
        eos_token: text of the EOS token.
        source_name: where the template comes from, for error messages.
        special_tokens: further special tokens that templates may name, such as `pad_token`.

    Raises:
        ModelError: the source does not compile; the message has Jinja's message and the line.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        source_name: str = "chat template",
        **special_tokens: str | None,
    ) -> None:
        self.source = source
        self.source_name = source_name
        named = {"bos_token": bos_token, "eos_token": eos_token, **special_tokens}
        self._special_tokens = {name: text for name, text in named.items() if text is not None}
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._variables = meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
        except TemplateSyntaxError as error:
            raise ModelError(f"The {source_name} does not compile: line {error.lineno}: {error.message}.") from error
        except (TemplateError, RecursionError, SyntaxError, ValueError, TypeError) as error:
            raise ModelError(f"The {source_name} does not compile: {error}.") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt text of a conversation, at most MAX_OUTPUT_CHARACTERS long.

        Args:
            messages: dicts with `role` and `content`: a string, or a list of {"type": "text", "text": ...} parts,
                which are joined. A message with `tool_calls` needs no content. Other keys go to the template as they
                are; a key whose value is None counts as missing.
            add_generation_prompt: whether the prompt ends where the assistant's answer begins.
            tools: JSON schemas of the tools the model may call.
            extra: further variables that this template reads, such as `enable_thinking`.

        Raises:
            InvalidRequest: a message is malformed, or the template refuses the conversation or goes beyond a limit
                (field `messages`); a tool is malformed or the template reads none (field `tools`); the template reads
                no such variable (field: its name).
        """
        if tools and "tools" not in self._variables:
            raise InvalidRequest(f"The {self.source_name} does not handle tools.", field="tools", value=tools)
        return self._render(
            {
                "documents": None,
                **self._special_tokens,
                **self._checked_extra(extra),
                "messages": check_messages(messages),
                "tools": None if tools is None else _check_tools(tools),
                "add_generation_prompt": bool(add_generation_prompt),
                "range": _bounded_range(),
            }
        )

    def _checked_extra(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in extra.items():
            if name not in self._variables:
                readable = sorted(self._variables)
                raise InvalidRequest(
                    f"{name} is not a variable of the {self.source_name}; it reads {', '.join(readable)}.",
                    field=name,
                    value=value,
                    limit=readable,
                )
        return {name: _plain(value, name, field=name) for name, value in extra.items()}

    def _render(self, variables: dict[str, Any]) -> str:
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(variables):
                length += len(part)
                if length > MAX_OUTPUT_CHARACTERS:
                    raise SecurityError(f"the text is longer than the limit of {MAX_OUTPUT_CHARACTERS} characters")
                parts.append(part)
        except Exception as error:  # a template may raise anything that the expressions in it can raise
            line = _template_line(error)
            where = "" if line is None else f" at line {line}"
            detail = str(error) or type(error).__name__
            raise InvalidRequest(f"The {self.source_name} failed{where}: {detail}", field="messages") from error
        return "".join(parts)


def _template_line(error: Exception) -> int | None:
    """Line of the template, the innermost one, at which it failed."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _TEMPLATE_FILE]
    return lines[-1] if lines else None


def check_messages(messages: object) -> list[dict[str, Any]]:
    """The conversation in plain JSON types, with every content a string.

    Raises:
        InvalidRequest: naming the index of the message and what is wrong with it (field `messages`).
    """
    if not isinstance(messages, (list, tuple)):
        raise _invalid(f"messages must be a list of dicts, not {type(messages).__name__}.", messages)
    if not messages:
        raise _invalid("messages is empty; a conversation needs at least one message.", messages)
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _invalid(text: str, value: object) -> InvalidRequest:
    return InvalidRequest(text, field="messages", value=value)


def _check_message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _invalid(f"{name} must be a dict with `role` and `content`, not {type(message).__name__}.", message)
    plain: dict[str, Any] = _plain({key: value for key, value in message.items() if value is not None}, name)
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise _invalid(f"{name} needs a `role` that is a non-empty string, not {role!r}.", role)
    if "content" not in plain:
        if "tool_calls" in plain:
            return plain
        raise _invalid(f"{name} has no `content`.", message)
    plain["content"] = _joined_content(plain["content"], f"{name}.content")
    return plain


def _joined_content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(f"{name} must be a string or a list of text parts, not {type(content).__name__}.", content)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise _invalid(
                f"{name}[{index}] must be a text part, {{'type': 'text', 'text': str}}; {kind!r} is not handled.", part
            )
        texts.append(part["text"])
    return "".join(texts)


def _check_tools(tools: object) -> list[Any]:
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequest("tools must be a list of JSON schemas (dicts).", field="tools", value=tools)
    plain: list[Any] = _plain(tools, "tools", field="tools")
    return plain


def _plain(value: Any, name: str, *, field: str = "messages", depth: int = 0) -> Any:
    """A copy in plain JSON types, so that a template never holds an object with methods of its own."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{name} nests deeper than {MAX_DEPTH} levels.", field=field, limit=MAX_DEPTH)
    if value is None or isinstance(value, bool):
        return value
    for scalar in (str, int, float):
        if isinstance(value, scalar):
            return scalar(value) if scalar is not str else str.__str__(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{name}[{index}]", field=field, depth=depth + 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            str.__str__(key): _plain(item, f"{name}.{key}", field=field, depth=depth + 1) for key, item in value.items()
        }
    raise InvalidRequest(
        f"{name} must be made of strings, numbers, booleans, lists, and dicts with string keys, not "
        f"{type(value).__name__}.",
        field=field,
        value=value,
    )
