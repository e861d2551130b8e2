"""A small device and small workloads that are still too much for it at times."""

from __future__ import annotations

from typing import Any

import pytest

from pyengine.scheduler.step_time import COEFFICIENTS
from pyengine.simulate.cluster import Setup
from pyengine.simulate.lengths import Mix, Uniform
from pyengine.simulate.profiles import DeviceProfile
from pyengine.simulate.workload import Generator

SETTINGS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 256}


def small_profile(num_blocks: int = 64) -> DeviceProfile:
    return DeviceProfile(
        name="small",
        origin="made up",
        note="",
        step_time=dict(zip(COEFFICIENTS, (5e6, 30_000.0, 10_000.0, 35.0, 0.0), strict=True)),
        kv_bytes_per_token=0,
        num_blocks=num_blocks,
        block_size=16,
        max_context=1024,
    )


def small_generator(**changes: Any) -> Generator:
    values: dict[str, Any] = {
        "arrivals": "gamma",
        "num_requests": 120,
        "prompt": Mix((0.9, 0.1), (Uniform(10, 60), Uniform(300, 600))),
        "output": Uniform(1, 60),
        "rate": 25.0,
    }
    return Generator(**{**values, **changes})


@pytest.fixture
def setup() -> Setup:
    return Setup(small_profile(), max_tokens=200, long_from=300)
