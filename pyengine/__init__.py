"""pyengine: an LLM inference engine without PyTorch. The public names; heavy modules are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyengine.errors import (
    DeadlinePassed,
    DeviceNotAvailable,
    EngineClosed,
    EngineFailed,
    InvalidRequest,
    ModelError,
    NeverFits,
    PolicyFault,
    PyEngineError,
    QueueFull,
    RequestFailed,
    TTFTUnreachable,
)
from pyengine.outputs import Completion, RequestMetrics, RequestOutput, StreamEvent, TokenLogprobs
from pyengine.request_options import RequestOptions
from pyengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pyengine.engine import Engine

__all__ = [
    "Completion",
    "DeadlinePassed",
    "DeviceNotAvailable",
    "Engine",
    "EngineClosed",
    "EngineFailed",
    "InvalidRequest",
    "ModelError",
    "NeverFits",
    "PolicyFault",
    "PyEngineError",
    "QueueFull",
    "RequestFailed",
    "RequestMetrics",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "StreamEvent",
    "TTFTUnreachable",
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
