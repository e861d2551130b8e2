"""Measures how small pyengine is: wheel size, installed size of a CPU environment, time of `import pyengine`.

    python tools/measure_install.py --wheel dist/pyengine_llm-*.whl
    path/to/fresh/venv/bin/python tools/measure_install.py --environment

Exits non-zero when the wheel or the environment is larger than its limit; times are printed only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

WHEEL_LIMIT_MB = 60  # with the kernels of all GPU architectures inside
ENVIRONMENT_LIMIT_MB = 200
NOT_OURS = ("pip", "setuptools", "_distutils_hack", "distutils-precedence.pth")


def size_of(path: Path) -> int:
    """Bytes of a file or of everything below a folder."""
    if path.is_symlink() or path.is_file():
        return path.lstat().st_size
    return sum(size_of(child) for child in path.iterdir())


def installed_sizes() -> dict[str, int]:
    """Bytes of each top-level entry of site-packages, pip and setuptools left out."""
    site = Path(sysconfig.get_paths()["purelib"])
    sizes: dict[str, int] = {}
    for entry in site.iterdir():
        if not any(entry.name == name or entry.name.startswith(f"{name}-") for name in NOT_OURS):
            sizes[entry.name] = size_of(entry)
    return sizes


def import_seconds(statement: str, runs: int = 7) -> tuple[float, float]:
    """Median wall time of a fresh interpreter that runs `statement`, and of one that runs nothing."""

    def median(code: str) -> float:
        times = []
        for _ in range(runs):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, cwd=os.path.sep)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    return median(statement), median("pass")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="a built wheel")
    parser.add_argument("--environment", action="store_true", help="the environment this Python runs in")
    arguments = parser.parse_args()
    if not arguments.wheel and not arguments.environment:
        parser.error("give --wheel, --environment or both")
    if arguments.wheel:
        wheel_mb = arguments.wheel.stat().st_size / 1e6
        print(f"wheel {arguments.wheel.name}: {wheel_mb:.2f} MB (limit {WHEEL_LIMIT_MB} MB)")
        if wheel_mb > WHEEL_LIMIT_MB:
            return 1
    if not arguments.environment:
        return 0
    sizes = installed_sizes()
    total = sum(sizes.values()) / 1e6
    print(f"environment without pip and setuptools: {total:.1f} MB (limit {ENVIRONMENT_LIMIT_MB} MB)")
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:8]:
        print(f"  {size / 1e6:7.1f} MB  {name}")
    for statement in ("import pyengine", "from pyengine import Engine"):
        loaded, empty = import_seconds(statement)
        print(
            f"{statement}: {loaded - empty:.3f} s more than an empty interpreter ({loaded:.3f} against {empty:.3f} s)"
        )
    return 0 if total <= ENVIRONMENT_LIMIT_MB else 1


if __name__ == "__main__":
    sys.exit(main())
