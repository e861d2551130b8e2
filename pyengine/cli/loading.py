"""From a command's options to an engine that is ready, with a bar while it loads and a line on what is in force."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Loading an engine would import these; here they are imported while Ctrl-C still ends the process (see cli.main).
import tokenizers  # noqa: F401

import pyengine._cpu
import pyengine.backends.cpu
import pyengine.backends.cuda
import pyengine.backends.cuda_module  # noqa: F401
from pyengine.cli.fetching import found_model
from pyengine.cli.terminal import loading_bar, note
from pyengine.engine import Engine


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and how long it took to load, in seconds."""

    engine: Engine
    load_s: float


@contextmanager
def loaded_engine(model: str | None, settings: Mapping[str, Any], *, verbose: bool) -> Iterator[LoadedEngine]:
    """The engine; closed at the end. What it uses is said on a terminal, or where `verbose` asks for it."""
    started = time.monotonic()
    name = found_model(model).name  # first, because a model that has to be fetched shows a bar of its own
    with loading_bar(f"Loading {name}") as progress:
        engine = Engine(model, progress=progress, **settings)
    with engine:
        if verbose or sys.stderr.isatty():
            note(f"{engine.model.name} on {engine.model.backend.description}; {engine.model.defaults.origin}")
        yield LoadedEngine(engine, time.monotonic() - started)
