"""RequestOptions: how one request is to be treated among the others. It says nothing about its text."""

from __future__ import annotations

from dataclasses import dataclass

from pyengine.config import MAX_PRIORITY, MAX_SECONDS, check_number
from pyengine.errors import InvalidRequest

MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Class, tenant and limits of a request. Raises InvalidRequest, naming the field, its value and what is allowed.

    Attributes:
        priority: class, 0 to 9; a smaller one is served first, if the engine's order has classes (all but "fifo").
        tenant: on whose account it runs, for order "fair".
        ttft_limit_ms: longest time to its first token; None: the engine's.
        itl_limit_ms: longest time between two of its tokens; None: the engine's.
        cache_salt: its KV blocks are shared only with requests of the same salt. Give each tenant his own, and nobody
            can find out by the time of an answer what another one asked.
    """

    priority: int = 0
    tenant: str = ""
    ttft_limit_ms: float | None = None
    itl_limit_ms: float | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if (
            isinstance(self.priority, bool)
            or not isinstance(self.priority, int)
            or not 0 <= self.priority <= MAX_PRIORITY
        ):
            raise InvalidRequest(
                f"priority is {self.priority!r}; it must be an integer from 0, which is served first, to "
                f"{MAX_PRIORITY}.",
                field="priority",
                value=self.priority,
                limit=MAX_PRIORITY,
            )
        for name in ("tenant", "cache_salt"):
            check_name(name, getattr(self, name))
        for name in ("ttft_limit_ms", "itl_limit_ms"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0, most=MAX_SECONDS * 1000, also=" or None")


def check_name(field: str, value: object) -> None:
    """Raise InvalidRequest unless `value` is a string of at most MAX_NAME characters that can be written as UTF-8."""
    if not isinstance(value, str) or len(value) > MAX_NAME or any("\ud800" <= c <= "\udfff" for c in value):
        shown = value if not isinstance(value, str) else value[:80]
        raise InvalidRequest(
            f"{field} is {shown!r}; it must be a string of at most {MAX_NAME} characters, and no half of a "
            "surrogate pair.",
            field=field,
            value=shown,
            limit=MAX_NAME,
        )
