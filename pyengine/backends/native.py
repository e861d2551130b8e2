"""Makes the context of a compiled backend: threads and instruction set. It loads no model."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from pyengine.errors import InvalidRequest


def native_context(num_threads: int | None = None, isa: str | None = None) -> Any:
    """The compiled backend's state: threads and instruction set. Raises InvalidRequest for a set that is not here.

    Without `isa` the environment variable PYENGINE_CPU_ISA may name one; otherwise the best one is taken.
    """
    try:
        return import_module("pyengine._cpu").Context(num_threads or 0, isa)
    except ValueError as error:
        wanted = isa or os.environ.get("PYENGINE_CPU_ISA")
        raise InvalidRequest(str(error), field="PYENGINE_CPU_ISA" if isa is None else "isa", value=wanted) from error
