"""Numbers as people write them: not 1_0, digits of other scripts or line breaks, which int() and float() take."""

from __future__ import annotations

import re

_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def read_integer(text: str) -> int:
    """The integer that `text` is; raises ValueError if it is none."""
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{text!r} is not an integer.")
    return int(text)


def read_number(text: str) -> float:
    """The decimal number that `text` is; raises ValueError if it is none."""
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is not a number.")
    return float(text)
