"""`native`: the extension module with the CUDA kernels; None in a build without it. Needs no driver to be imported."""

from __future__ import annotations

from importlib import import_module
from typing import Any

native: Any = None
try:
    native = import_module("pyengine._cuda")
except ModuleNotFoundError as error:
    if error.name != "pyengine._cuda":
        raise
