"""Small cases of every kernel under ThreadSanitizer and AddressSanitizer: no race, nothing outside its memory.

tests/simt/test_sanitizers.py shows that both find what is there to be found, and watches the tests of the ops too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from tests.simt.build import CannotBuild, build
from tests.simt.watched import environment, prefix, starting_folder

CASES = ("norm", "elements", "rope", "copies", "attention", "products", "sampling")


def run_cases(before: list[str], env: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Exit status and output."""
    command = [*before, "-m", "tests.cuda.watched_cases", *arguments]
    ran = subprocess.run(
        command,
        cwd=starting_folder(),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    return ran.returncode, ran.stdout[-20000:]


def test_the_cases_pass_without_a_sanitizer_too(simt: ModuleType) -> None:
    env = dict(os.environ, PYENGINE_SIMT=str(simt.__file__))
    expected = "".join(f"{case}: done\n" for case in CASES)
    assert run_cases([sys.executable], env, "--order", "forward") == (0, expected)


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
    assert run_cases(before, env, case) == (0, f"{case}: done\n")
