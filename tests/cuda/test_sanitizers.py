"""Small cases of every kernel under ThreadSanitizer and AddressSanitizer: no race, nothing outside its memory.

tests/simt/test_sanitizers.py shows that both find what is there to be found, and watches the tests of the ops too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simt.build import CannotBuild, build
from tests.simt.watched import environment, prefix

ROOT = Path(__file__).resolve().parents[2]
CASES = ("norm", "elements", "rope", "copies", "attention", "products", "sampling")


@pytest.fixture(scope="module", params=["thread", "address"])
def start(request: pytest.FixtureRequest) -> tuple[list[str], dict[str, str]]:
    """How a Python program is started under the sanitizer: what comes before its arguments, and the environment."""
    try:
        return [*prefix(request.param), sys.executable], environment(request.param, build("_simt", request.param))
    except CannotBuild as missing:
        pytest.skip(f"the kernels cannot be watched: {missing}")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_reported(start: tuple[list[str], dict[str, str]], case: str) -> None:
    before, env = start
    command = [*before, "-m", "tests.cuda.watched_cases", case]
    ran = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert (ran.returncode, ran.stdout) == (0, f"{case}: done\n"), ran.stdout[-20000:]
