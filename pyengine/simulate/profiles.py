"""Device profiles: how long a step takes on a device and how much KV it holds; measured, or computed from a datasheet.

The paper profiles are a roofline: with P parameters, bytes per parameter b, bandwidth B and arithmetic rate F,

    base           P * b / (u * B) + host time        each step reads all weights once
    prefill token  2 * P / (v * F)                    a multiplication and an addition for each parameter
    decode         2 * P / (v * F)
    KV token       kv_bytes_per_token / (u * B)       decodes read the KV of all their tokens
    pair           4 * layers * heads * head_dim / (v * F)    scores and their weighted sum

summed, not the larger of reading and computing, so at most twice too slow where the two would overlap. `u` and `v` are
the parts of the datasheet's figures that good kernels reach. Nothing here was measured, and each such profile says so.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyengine.errors import InvalidRequest
from pyengine.scheduler.step_time import COEFFICIENTS, StepTimeModel

FORMAT = "pyengine device profile"
VERSION = 1
ORIGINS = ("measured", "paper", "made up")
BANDWIDTH_REACHED = 0.8
ARITHMETIC_REACHED = 0.5
HOST_NS = 1e6
MEMORY_USED = 0.9


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A model on a device. Raises InvalidRequest, naming the field, for what cannot be one.

    Attributes:
        name: what it is called in tables.
        origin: "measured" on a real device, "paper": computed from a datasheet, or "made up" for an example.
        note: where the figures come from, in a sentence.
        step_time: coefficients of StepTimeModel by name, in ns.
        kv_bytes_per_token: of the model's keys and values; 0 where unknown.
        num_blocks, block_size: the KV pool.
        max_context: most tokens of one sequence.
    """

    name: str
    origin: str
    note: str
    step_time: Mapping[str, float]
    kv_bytes_per_token: int
    num_blocks: int
    block_size: int
    max_context: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise _refused("name", self.name, "a text")
        if self.origin not in ORIGINS:
            raise _refused("origin", self.origin, f"one of {', '.join(ORIGINS)}")
        if not isinstance(self.note, str):
            raise _refused("note", self.note, "a text")
        for field, low in (("kv_bytes_per_token", 0), ("num_blocks", 1), ("block_size", 1), ("max_context", 2)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise _refused(field, value, f"an integer >= {low}")
        if not isinstance(self.step_time, Mapping) or set(self.step_time) != set(COEFFICIENTS):
            raise _refused("step_time", self.step_time, f"an object with {', '.join(COEFFICIENTS)}")
        for field, value in self.step_time.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise _refused(f"step_time.{field}", value, "a number >= 0, in ns")
        if not any(self.step_time.values()):
            raise _refused("step_time", dict(self.step_time), "more than zeros: a step takes time")

    @property
    def title(self) -> str:
        """Name and origin, as every table and figure shows them."""
        return self.name if self.origin == "measured" else f"{self.name} ({_ORIGIN_WORDS[self.origin]})"

    def model(self) -> StepTimeModel:
        """A step-time model of its own with these coefficients."""
        return StepTimeModel([float(self.step_time[name]) for name in COEFFICIENTS])

    def to_json(self) -> str:
        """As JSON text; from_json reads it."""
        values = {**asdict(self), "step_time": dict(self.step_time)}
        return json.dumps({"format": FORMAT, "version": VERSION, **values}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "device profile") -> DeviceProfile:
        """Read what to_json wrote. Raises InvalidRequest, naming `where` and the field."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidRequest(f"{where} is not JSON: {error}.", field="profile", value=where) from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise InvalidRequest(
                f"{where} is no device profile: an object with format {FORMAT!r} is needed.",
                field="format",
                value=where,
                limit=FORMAT,
            )
        version = data.pop("version", None)
        if version != VERSION:
            raise InvalidRequest(
                f"{where} has version {version!r}; this pyengine reads version {VERSION}.",
                field="version",
                value=version,
                limit=VERSION,
            )
        known = cls.__dataclass_fields__
        for field in (*known, *data):
            if field not in data or field not in known:
                what = "is missing" if field not in data else "is not known"
                raise InvalidRequest(f"{where}: the field {field} {what}.", field=field)
        try:
            return cls(**data)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error}", field=error.field, value=error.value) from error


_ORIGIN_WORDS = {"paper": "paper profile", "made up": "made up"}


@dataclass(frozen=True, slots=True)
class GPU:
    """Datasheet figures: memory in bytes, its bandwidth in bytes/s, dense bfloat16 arithmetic in FLOP/s."""

    label: str
    memory: float
    bandwidth: float
    arithmetic: float


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A decoder: what a step's cost depends on. Two bytes a parameter and a KV element."""

    label: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


GPUS = {
    "b200": GPU("B200 SXM", 180e9, 7.7e12, 2250e12),
    "h200": GPU("H200 SXM", 141e9, 4.8e12, 989e12),
    "h100": GPU("H100 SXM", 80e9, 3.35e12, 989e12),
    "a100": GPU("A100 SXM 80 GB", 80e9, 2.039e12, 312e12),
    "l40s": GPU("L40S", 48e9, 0.864e12, 362e12),
    "l4": GPU("L4", 24e9, 0.3e12, 121e12),
}
MODEL_SIZES = {
    "1b": ModelSize("Llama 3.2 1B", 1.24e9, 16, 32, 8, 64, 131072),
    "8b": ModelSize("Llama 3.1 8B", 8.03e9, 32, 32, 8, 128, 131072),
    "32b": ModelSize("Qwen3 32B", 32.8e9, 64, 64, 8, 128, 40960),
}
EXAMPLE = DeviceProfile(
    name="example",
    origin="made up",
    note="A tight pool for examples: 5 ms + 0.03 ms/prefill token + 0.01 ms/decode + 0.035 us/KV token.",
    step_time=dict(zip(COEFFICIENTS, (5e6, 0.03e6, 0.01e6, 35.0, 0.0), strict=True)),
    kv_bytes_per_token=0,
    num_blocks=4096,
    block_size=16,
    max_context=32768,
)


def paper_profile(gpu: GPU, size: ModelSize, name: str, block_size: int = 16) -> DeviceProfile | None:
    """The roofline profile of the module's formulas; None if the weights leave no room for a context."""
    per_token = size.kv_bytes_per_token
    weights = 2 * size.parameters
    num_blocks = int(MEMORY_USED * gpu.memory - weights) // (per_token * block_size)
    if num_blocks * block_size < 4096:
        return None
    bytes_ns = 1e9 / (BANDWIDTH_REACHED * gpu.bandwidth)
    flop_ns = 1e9 / (ARITHMETIC_REACHED * gpu.arithmetic)
    token_ns = 2 * size.parameters * flop_ns
    coefficients = (
        weights * bytes_ns + HOST_NS,
        token_ns,
        token_ns,
        per_token * bytes_ns,
        4 * size.layers * size.heads * size.head_dim * flop_ns,
    )
    return DeviceProfile(
        name=name,
        origin="paper",
        note=(
            f"Computed, not measured: {size.label} in bfloat16 on {gpu.label}, {BANDWIDTH_REACHED:.0%} of "
            f"{gpu.bandwidth / 1e12:g} TB/s and {ARITHMETIC_REACHED:.0%} of {gpu.arithmetic / 1e12:g} TFLOP/s."
        ),
        step_time=dict(zip(COEFFICIENTS, (float(f"{value:.6g}") for value in coefficients), strict=True)),
        kv_bytes_per_token=per_token,
        num_blocks=num_blocks,
        block_size=block_size,
        max_context=size.max_context,
    )


def built_in_profiles() -> dict[str, DeviceProfile]:
    """All profiles that have a name: the example, and each GPU with each model size that it holds."""
    profiles = {EXAMPLE.name: EXAMPLE}
    for gpu_name, gpu in GPUS.items():
        for size_name, size in MODEL_SIZES.items():
            name = f"{gpu_name}-{size_name}"
            profile = paper_profile(gpu, size, name)
            if profile is not None:
                profiles[name] = profile
    return profiles


def find_profile(name_or_path: str) -> DeviceProfile:
    """A built-in profile by its name, else the one in that file. Raises InvalidRequest."""
    built_in = built_in_profiles()
    if name_or_path in built_in:
        return built_in[name_or_path]
    path = Path(name_or_path)
    if re.fullmatch(r"[a-z0-9-]+", name_or_path) and not path.exists():
        raise InvalidRequest(
            f"profile is {name_or_path!r}; it must be a file or one of {', '.join(built_in)}.",
            field="profile",
            value=name_or_path,
            limit=tuple(built_in),
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"The profile {name_or_path!r} cannot be read: {getattr(error, 'strerror', None) or error}.",
            field="profile",
            value=name_or_path,
        ) from error
    return DeviceProfile.from_json(text, path.name)


def _refused(field: str, value: Any, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is {value!r}; it must be {wanted}.", field=field, value=value, limit=wanted)
