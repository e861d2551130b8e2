"""What holds for all tests: Ctrl-C works, also where the tests were started in the background of a shell script; and
`simt`, the module that runs the CUDA kernels on the host."""

from __future__ import annotations

import signal
from types import ModuleType

import pytest

from tests.simt.build import CannotBuild, simt_module

# Such a shell starts its background jobs with SIGINT ignored, and every process that a test starts inherits that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def simt(request: pytest.FixtureRequest) -> ModuleType:
    """The extension `_simt`, built from csrc now if its sources have changed. Skips where that is not possible."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled():  # a build takes a while: its message is to be seen
            return simt_module()
    except CannotBuild as missing:
        pytest.skip(f"the CUDA kernels cannot be built for the host: {missing}")
