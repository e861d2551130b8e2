"""Policies: named sets of scheduler settings to be compared, and how a user writes his own. They decide nothing."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pyengine.config import SchedulerConfig
from pyengine.errors import InvalidRequest
from pyengine.simulate.written_numbers import read_integer, read_number

LENGTHS = ("declared", "known")
# Where they come from is the device and the workload; a policy may set the others.
_NOT_A_POLICY = frozenset({"max_context", "block_size"})
_COMMON_ENGINE: dict[str, Any] = {"order": "fifo", "packing": "none", "capacity": "optimistic"}
# What the most used engines do: nothing is left free for growth, and the latest arrival is preempted.
_NO_RESERVE: dict[str, Any] = {**_COMMON_ENGINE, "watermark": 0.0, "victim": "latest"}
_PACKED: dict[str, Any] = {"order": "fifo", "packing": "best_fit", "capacity": "predicted"}

PRESETS: dict[str, dict[str, Any]] = {
    "static": {**_COMMON_ENGINE, "batching": "static"},
    "fifo": _COMMON_ENGINE,
    "fifo-no-reserve": _NO_RESERVE,
    "fifo-guaranteed": {**_COMMON_ENGINE, "capacity": "guaranteed"},
    "fifo-predicted": {**_COMMON_ENGINE, "capacity": "predicted"},
    "best-fit": _PACKED,
    "best-fit-guaranteed": {**_PACKED, "capacity": "guaranteed"},
    "priority": {**_PACKED, "order": "priority"},
    "fair": {**_PACKED, "order": "fair"},
    "deadline": {**_PACKED, "order": "deadline"},
    "shortest": {**_PACKED, "order": "shortest"},
    "oracle": {**_PACKED, "capacity": "guaranteed", "lengths": "known"},
}


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of SchedulerConfig under a name.

    `knows_lengths` makes it an oracle: max_tokens of each request is the length that it will have.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    knows_lengths: bool = False

    def config(self, base: Mapping[str, Any]) -> SchedulerConfig:
        """The scheduler's configuration: `base` with these settings on top. Raises InvalidRequest."""
        try:
            return SchedulerConfig(**{**base, **self.settings})
        except InvalidRequest as error:
            raise InvalidRequest(
                f"Policy {self.name}: {error}", field=error.field, value=error.value, limit=error.limit
            ) from error


def parse_policies(text: str) -> list[Policy]:
    """The policies in `text`, separated by spaces or semicolons: each a preset, settings, or a preset with settings.

        fifo best-fit best-fit,capacity_quantile=0.5 order=shortest,packing=none tight:best-fit,num_blocks=1024

    A name before a colon is what tables show. Raises InvalidRequest for unknown presets and settings, and if two
    policies have the same name.
    """
    policies = [_parse(part) for part in text.replace(";", " ").split()]
    if not policies:
        raise InvalidRequest("There is no policy to simulate; name one.", field="policies", value=text)
    names = [policy.name for policy in policies]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"The policy {name} is there twice.", field="policies", value=name)
    return policies


def _parse(text: str) -> Policy:
    label, _, rest = text.rpartition(":")
    settings: dict[str, Any] = {}
    for place, item in enumerate(rest.split(",")):
        key, equals, value = item.partition("=")
        if equals:
            settings[key] = _value(key, value)
        elif place == 0 and key in PRESETS:
            settings.update(PRESETS[key])
        elif key in PRESETS:
            raise InvalidRequest(
                f"The policy {text!r} has the preset {key} behind a comma; policies are separated by spaces.",
                field="policies",
                value=text,
            )
        else:
            raise InvalidRequest(
                f"policies has {key!r}; it must be one of {', '.join(PRESETS)}, or settings such as order=fifo.",
                field="policies",
                value=key,
                limit=tuple(PRESETS),
            )
    lengths = settings.pop("lengths", "declared")
    return Policy(label or rest, settings, lengths == "known")


def setting_types() -> dict[str, tuple[Any, ...]]:
    """The settings that a policy may have, and the types of their values."""
    hints = typing.get_type_hints(SchedulerConfig)
    kinds = {}
    for entry in fields(SchedulerConfig):
        hint = hints[entry.name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        if entry.name not in _NOT_A_POLICY:
            # Any: a name, or in Python an object of the user's own.
            kinds[entry.name] = typing.get_args(hint) if is_union else (str,) if hint is Any else (hint,)
    return kinds


def _value(key: str, text: str) -> Any:
    if key == "lengths":
        if text not in LENGTHS:
            raise _not_read(key, text, f"one of {', '.join(LENGTHS)}")
        return text
    kinds = setting_types().get(key)
    if kinds is None:
        known = ", ".join(sorted([*setting_types(), "lengths"]))
        raise InvalidRequest(f"policies sets {key!r}; the settings are {known}.", field=key, value=text, limit=known)
    if text.lower() == "none" and type(None) in kinds:
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind, read in ((int, read_integer), (float, read_number)):
        if kind in kinds:
            try:
                return read(text)
            except ValueError:
                continue  # the next kind may be right; if none is, the error below says what is allowed
    if str in kinds:
        return text
    wanted = " or ".join("none" if kind is type(None) else kind.__name__ for kind in kinds)
    raise _not_read(key, text, f"of type {wanted}")


def _not_read(key: str, text: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{key} is {text!r}; it must be {wanted}.", field=key, value=text, limit=wanted)
