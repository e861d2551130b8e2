"""Small cases of every kernel under ThreadSanitizer and AddressSanitizer: no race, nothing outside its memory.

tests/simt/test_sanitizers.py shows that both find what is there to be found, and watches the tests of the ops too.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.simt.build import CannotBuild, build
from tests.simt.watched import environment, prefix, starting_folder

CASES = ("norm", "elements", "rope", "copies", "attention", "products", "sampling")


@cache
def start(sanitizer: str) -> tuple[list[str], dict[str, str]]:
    """How a Python program is started under the sanitizer: what comes before its arguments, and the environment."""
    try:
        return [*prefix(sanitizer), sys.executable], environment(sanitizer, build("_simt", sanitizer))
    except CannotBuild as missing:
        pytest.skip(f"the kernels cannot be watched: {missing}")


def cases() -> list[Any]:
    sampled = {("thread", "attention"), ("thread", "sampling")}
    return [
        pytest.param(sanitizer, case, marks=pytest.mark.sample if (sanitizer, case) in sampled else ())
        for sanitizer in ("thread", "address")
        for case in CASES
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("sanitizer", "case"), cases())
def test_nothing_is_reported(sanitizer: str, case: str) -> None:
    before, env = start(sanitizer)
    command = [*before, "-m", "tests.cuda.watched_cases", case]
    ran = subprocess.run(
        command,
        cwd=starting_folder(),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert (ran.returncode, ran.stdout) == (0, f"{case}: done\n"), ran.stdout[-20000:]
