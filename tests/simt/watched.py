"""Runs a program while a sanitizer watches the CUDA kernels: builds `_simt` for it, and starts Python with its library.

    python -m tests.simt.watched thread -m pytest -q tests/cuda/test_norm.py
    python -m tests.simt.watched address -m pytest -q tests/cuda

ThreadSanitizer knows every CUDA thread as a thread of its own and names both lines of a race; AddressSanitizer names
the line that leaves its memory. The exit status is not 0 where it had something to report.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from .build import ROOT, CannotBuild, build, find_compiler

REPORTED = 66  # exit status of a program that ran to its end under ThreadSanitizer, with reports
LIBRARIES = {"thread": "libtsan.so", "address": "libasan.so"}


def library(name: str) -> str:
    path = subprocess.run([find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    if not os.path.isabs(found := path.stdout.strip()):
        raise CannotBuild(f"The compiler has no {name}: the sanitizers need GCC with its sanitizer libraries.")
    return found


def environment(sanitizer: str, module: Path | None) -> dict[str, str]:
    """What a program must be started with; `module` is its `_simt`."""
    # AddressSanitizer looks for the functions that throw when it starts, and Python itself does not bring them.
    env = dict(os.environ, LD_PRELOAD=f"{library(LIBRARIES[sanitizer])} {library('libstdc++.so')}")
    env["TSAN_OPTIONS"] = f"exitcode={REPORTED}:ignore_noninstrumented_modules=1"
    env["ASAN_OPTIONS"] = "detect_leaks=0"  # Python's own
    if module is not None:
        env["PYENGINE_SIMT"] = str(module)
    return env


def prefix(sanitizer: str) -> list[str]:
    """What goes before the command line: ThreadSanitizer may need addresses that are not random."""
    env, nothing = environment(sanitizer, None), [sys.executable, "-c", "pass"]
    setarch = shutil.which("setarch")
    answer = ""
    for before in [], [setarch, os.uname().machine, "-R"] if setarch else []:
        started = subprocess.run([*before, *nothing], env=env, capture_output=True, text=True)
        if started.returncode == 0:
            return before
        answer = started.stderr.strip()
    raise CannotBuild(f"Python does not start under the {sanitizer} sanitizer here: {answer[:300]}")


@cache
def starting_folder() -> Path:
    """Where programs of the tests are started: `tests` can be imported there, and pyengine is the installed one.

    In the checkout itself its sources, which have no extension modules, would be found first.
    """
    folder = Path(tempfile.mkdtemp(prefix="pyengine-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("tests", "csrc", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sanitizer", choices=sorted(LIBRARIES))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of python")
    given = parser.parse_args()
    before = prefix(given.sanitizer)
    env = environment(given.sanitizer, build("_simt", given.sanitizer))  # compiled before, not under, the sanitizer
    return subprocess.run([*before, sys.executable, *given.arguments], env=env, cwd=starting_folder()).returncode


if __name__ == "__main__":
    sys.exit(main())
