"""Policies: the object behind each axis of the scheduler's settings, a built-in one or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyengine.errors import InvalidRequest, PolicyFault
from pyengine.scheduler.capacity import Capacity, check_capacity_class


def make_policy(
    field: str, chosen: Any, built_in: Mapping[str, Callable[..., Any]], base: type[Any] = object, *args: Any
) -> Any:
    """A built-in policy by its name, or the user's own, derived from `base`: an object, or a class to make one of.

    Raises InvalidRequest for what is not derived from `base`, PolicyFault if the user's class cannot be called.
    """
    if isinstance(chosen, str):
        return built_in[chosen](*args)
    if base is Capacity:
        check_capacity_class(chosen)
    if not (issubclass(chosen, base) if isinstance(chosen, type) else isinstance(chosen, base)):
        raise InvalidRequest(
            f"{field} is {chosen!r}; one of your own must be derived from pyengine.scheduler.{base.__name__}.",
            field=field,
            value=chosen,
            limit=tuple(built_in),
        )
    if not isinstance(chosen, type):
        return chosen
    try:
        return chosen(*args)
    except Exception as error:
        name = str(getattr(chosen, "name", chosen))
        raise PolicyFault(f"{field} {name!r} cannot be made: {error!r}", policy=name) from error
