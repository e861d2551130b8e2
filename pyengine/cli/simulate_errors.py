"""Errors of `pyengine simulate` under the names of the options that the user typed. What is an error, others say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pyengine.cli.simulate_options import DeviceOptions
from pyengine.errors import InvalidRequest
from pyengine.simulate.experiment import Experiment

# Arguments that do not have the name of their option.
_OPTION_OF = {"num_requests": "requests", "num_users": "users", "num_prefixes": "prefixes", "num_tenants": "tenants"}
_SETTINGS = ("num_blocks", "max_num_seqs", "max_num_batched_tokens")


def option(name: str) -> str:
    """The option that sets the argument `name`."""
    return "--" + _OPTION_OF.get(name, name).replace("_", "-")


@contextmanager
def naming_options() -> Iterator[None]:
    """Begin with the option what begins with an argument's name, "num_users is 0; .."; leave other errors alone."""
    try:
        yield
    except InvalidRequest as error:
        text = str(error)
        if not text.startswith(f"{error.field} is "):
            raise
        renamed = option(error.field) + text[len(error.field) :]
        raise _retold(error, renamed, _OPTION_OF.get(error.field, error.field)) from error


@contextmanager
def all_from(name: str) -> Iterator[None]:
    """Every error inside is one of the option `name`, and begins with it."""
    try:
        yield
    except InvalidRequest as error:
        text = str(error)
        begins = text.startswith((f"{name} is ", f"{name} has ", f"{name} sets "))
        raise _retold(error, option(name) + (text[len(name) :] if begins else f": {text}"), error.field) from error


def check_settings(experiment: Experiment, device: DeviceOptions) -> None:
    """Raise InvalidRequest for settings that the scheduler does not take, naming the options that they are from."""
    try:
        experiment.check()
    except InvalidRequest as error:
        text = str(error)
        # A setting that a policy makes itself is not the option's, even if the option was typed as well.
        set_by_policies = {name for policy in experiment.policies for name in policy.settings}
        for name in _SETTINGS:
            if getattr(device, name) is not None and name not in set_by_policies:
                text = re.sub(rf"\b{name}\b", option(name), text)
        raise _retold(error, text if text != str(error) else f"--policies: {text}", error.field) from error


def _retold(error: InvalidRequest, text: str, field: str) -> InvalidRequest:
    return InvalidRequest(text, field=field, value=error.value, limit=error.limit)
