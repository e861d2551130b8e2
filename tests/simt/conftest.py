"""`checks`: the extension with the kernels of tests/simt/kernels, which test the engine itself."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from .build import CannotBuild, checks_module


@pytest.fixture(scope="session")
def built_checks(request: pytest.FixtureRequest) -> ModuleType:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled():
            return checks_module()
    except CannotBuild as missing:
        pytest.skip(f"the engine's kernels cannot be built: {missing}")


@pytest.fixture
def checks(built_checks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """_simt_checks, in forward order, and with a device that is as good as new before and after."""
    monkeypatch.delenv("SIMT_ORDER", raising=False)
    built_checks.simt.reset()
    yield built_checks
    built_checks.simt.reset()
