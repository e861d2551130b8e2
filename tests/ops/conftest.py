"""Fixtures of the op tests: every instruction set this machine can run."""

from __future__ import annotations

import pytest

from pyengine import _cpu


@pytest.fixture(params=_cpu.ops.supported_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """The name of an instruction set; a test that takes it runs once for each."""
    return request.param
