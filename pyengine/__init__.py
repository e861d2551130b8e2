"""pyengine: an LLM inference engine without PyTorch. The public names; heavy modules are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyengine.errors import (
    DeviceNotAvailable,
    EngineClosed,
    EngineFailed,
    InvalidRequest,
    ModelError,
    NeverFits,
    PyEngineError,
    QueueFull,
    RequestFailed,
)
from pyengine.outputs import Completion, RequestMetrics, RequestOutput, StreamEvent, TokenLogprobs
from pyengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pyengine.engine import Engine

__all__ = [
    "Completion",
    "DeviceNotAvailable",
    "Engine",
    "EngineClosed",
    "EngineFailed",
    "InvalidRequest",
    "ModelError",
    "NeverFits",
    "PyEngineError",
    "QueueFull",
    "RequestFailed",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamEvent",
    "TokenLogprobs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from pyengine.engine import Engine

        value: Any = Engine
    elif name == "__version__":
        from importlib.metadata import version

        value = version("pyengine-llm")
    else:
        raise AttributeError(f"module 'pyengine' has no attribute {name!r}")
    globals()[name] = value  # found directly from now on
    return value
