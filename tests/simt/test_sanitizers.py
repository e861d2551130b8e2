"""Races and overruns of kernels, as the sanitizers report them: known ones in kernels made for that; none in ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .build import CannotBuild, build
from .watched import REPORTED, environment, prefix, starting_folder

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]

RUN_CHECKS = """
import sys
import numpy as np
from tests.simt.build import Path, load
checks = load("_simt_checks", Path(sys.argv[1]))
for check in sys.argv[2:]:
    name, blocks, threads = check.split()
    try:
        checks.run(name, np.arange(4096, dtype=np.float32), int(blocks), int(threads))
    except RuntimeError as error:
        print(f"RuntimeError of {name}: {error}")
print("ran to its end")
"""


class Watched:
    def __init__(self, sanitizer: str) -> None:
        try:
            self.before = prefix(sanitizer)
            self.module = build("_simt_checks", sanitizer)
            self.env = environment(sanitizer, None)
        except CannotBuild as missing:
            pytest.skip(f"the kernels cannot be watched: {missing}")

    def run(self, *checks: str, order: str = "forward") -> tuple[int, str]:
        """Exit status and output of checks, each "name blocks threads"."""
        command = [*self.before, sys.executable, "-c", RUN_CHECKS, str(self.module), *checks]
        env = dict(self.env, SIMT_ORDER=order)
        ran = subprocess.run(
            command,
            env=env,
            cwd=starting_folder(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return ran.returncode, ran.stdout


@pytest.fixture(scope="module")
def thread_sanitizer() -> Watched:
    return Watched("thread")


@pytest.fixture(scope="module")
def address_sanitizer() -> Watched:
    return Watched("address")


def line_of(source: str, text: str) -> str:
    """`file:line` of the only line of a kernel that contains the text."""
    lines = (ROOT / "tests/simt/kernels" / source).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if text in line]
    return f"{source}:{number}"


@pytest.mark.sample
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_both_lines_of_a_race_inside_a_block_are_named(thread_sanitizer: Watched, order: str) -> None:
    status, output = thread_sanitizer.run("reverse_values_without_barrier 1 64", order=order)
    assert status == REPORTED
    assert "data race" in output
    assert line_of("memory.cu", "shared.last[threadIdx.x] = values[threadIdx.x];") in output
    assert line_of("memory.cu", "values[threadIdx.x] = shared.last[blockDim.x - 1 - threadIdx.x];") in output


@pytest.mark.parametrize("order", ["forward", "reverse", "7"])
def test_a_race_between_blocks_is_reported(thread_sanitizer: Watched, order: str) -> None:
    status, output = thread_sanitizer.run("count_blocks_without_atomics 3 1", order=order)
    assert status == REPORTED
    assert line_of("memory.cu", "values[0] += 1;") in output


CORRECT = [
    "all_instructions 1 64",
    "reverse_values 1 64",
    "count_threads 3 1024",
    "fresh_shared_memory 12 64",
    "some_threads_end_early 1 64",
    "async_copy 1 32",
    "multiply_bf16 1 32",
    "multiply_f16 1 32",
    "known_values 1 1",
    "indices 1 1",
]


@pytest.mark.parametrize("order", ["forward", "reverse", "7"])
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_correct_kernels_are_not_reported(sanitizer: str, order: str, request: pytest.FixtureRequest) -> None:
    watched: Watched = request.getfixturevalue(f"{sanitizer}_sanitizer")
    status, output = watched.run(*CORRECT, order=order)
    assert (status, output) == (0, "ran to its end\n")


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_errors_of_the_engine_are_only_that(sanitizer: str, request: pytest.FixtureRequest) -> None:
    watched: Watched = request.getfixturevalue(f"{sanitizer}_sanitizer")
    names = ["half_a_warp_shuffles", "shuffle_from_absent_lane", "misaligned_load", "half_a_warp_shuffles"]
    status, output = watched.run(*[f"{name} 1 32" for name in names], "reverse_values 1 64")
    assert status == 0, output
    assert [line.split(":")[0] for line in output.splitlines() if not line.startswith(" ")] == [
        *[f"RuntimeError of {name}" for name in names],
        "ran to its end",
    ]


@pytest.mark.sample
def test_the_line_of_an_overrun_is_named(address_sanitizer: Watched) -> None:
    status, output = address_sanitizer.run("write_behind_values 1 32")
    assert status != 0
    assert "heap-buffer-overflow" in output
    assert line_of("memory.cu", "values[count + threadIdx.x] = 1;") in output


def test_an_overrun_of_shared_memory_is_named(address_sanitizer: Watched) -> None:
    status, output = address_sanitizer.run("write_behind_shared_memory 1 32")
    assert status != 0
    assert line_of("memory.cu", "shared[sizeof(Shared) / sizeof(float) + threadIdx.x] = values[0];") in output


# ---- our own kernels -----------------------------------------------------------------------------------------------

OPS = [
    path.name
    for path in sorted((ROOT / "tests/cuda").glob("test_*.py"))
    if not path.name.startswith(("test_engine", "test_cublas", "test_sanitizers"))  # which watch no op of their own
]


@pytest.mark.parametrize("tests", OPS)
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_the_tests_of_the_ops_find_nothing_to_report(sanitizer: str, tests: str) -> None:
    command = [sys.executable, "-m", "tests.simt.watched", sanitizer, "-m", "pytest", "-q", "-x", f"tests/cuda/{tests}"]
    ran = subprocess.run(command, cwd=starting_folder(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ran.returncode == 0, ran.stdout[-20000:]
