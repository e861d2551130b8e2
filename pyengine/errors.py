"""The typed errors a user can meet; each message is a sentence with the name, the value and the limit."""

from __future__ import annotations

from typing import Any


class PyEngineError(Exception):
    """Base of every error that pyengine raises on purpose. It can be pickled and copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[PyEngineError], args: tuple[Any, ...], state: dict[str, Any]) -> PyEngineError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidRequest(PyEngineError, ValueError):
    """A value given by the caller is refused; nothing was queued and nobody else is affected.

    Attributes:
        field: name of the argument, as the caller wrote it.
        value: what was given (may be None when it is too large to keep).
        limit: the bound or the set of allowed values, where there is one.
    """

    def __init__(self, message: str, *, field: str, value: Any = None, limit: Any = None) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.limit = limit


class NeverFits(PyEngineError):
    """A request that not even an empty engine could hold; found at submit, never by waiting.

    Attributes:
        need: KV blocks (or tokens, as `unit` says) that the request needs.
        usable: what an empty engine offers, in the same unit.
        unit: "blocks" or "tokens".
    """

    def __init__(self, message: str, *, need: int, usable: int, unit: str = "blocks") -> None:
        super().__init__(message)
        self.need = need
        self.usable = usable
        self.unit = unit


class QueueFull(PyEngineError):
    """The waiting queue holds `limit` requests already.

    Attributes:
        retry_after_s: when there may be room, by the present pace; None where it is not known.
    """

    def __init__(self, message: str, *, limit: int, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_s = retry_after_s


class TTFTUnreachable(PyEngineError):
    """At submit: the first token is not expected within the request's limit; nothing was queued.

    Attributes:
        limit_s: the limit, in seconds from now.
        estimate_s: when the first token is expected.
        retry_after_s: when the load is expected to be low enough; None: never, nothing else runs.
    """

    def __init__(self, message: str, *, limit_s: float, estimate_s: float, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.limit_s = limit_s
        self.estimate_s = estimate_s
        self.retry_after_s = retry_after_s


class DeadlinePassed(PyEngineError):
    """A request waited longer than its limit allows, and was ended before it started.

    Attributes:
        limit_s / waited_s: the limit, and how long it had waited.
    """

    def __init__(self, message: str, *, limit_s: float, waited_s: float) -> None:
        super().__init__(message)
        self.limit_s = limit_s
        self.waited_s = waited_s


class PolicyFault(PyEngineError):
    """A scheduling policy given by the user broke its rules; the engine went on without it.

    Attributes:
        policy: its name.
    """

    def __init__(self, message: str, *, policy: str) -> None:
        super().__init__(message)
        self.policy = policy


class ModelError(PyEngineError):
    """A checkpoint, its configuration, tokenizer or template cannot be used; the message names what and where."""


class DeviceNotAvailable(PyEngineError):
    """The device asked for is not there; the message says what to install."""


class EngineClosed(PyEngineError):
    """The engine was closed; it accepts no more work."""


class EngineFailed(PyEngineError):
    """A step failed as a whole (for example a device error); the engine refuses new work and says why."""


class RequestFailed(PyEngineError):
    """One accepted request could not go on (for example: no finite logit); the others were not touched."""
