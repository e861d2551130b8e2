"""The machine a run happens on: its ceilings, and how busy others keep it. No engine is known here."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers.limits import Ceilings

SOURCE = Path(__file__).resolve().parent.parent / "ceilings.cpp"


def built_ceilings(folder: Path) -> Path:
    """The compiled program of tools/ceilings.cpp. Raises RuntimeError if there is no compiler."""
    compiler = os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler found: the machine's ceilings cannot be measured")
    program = folder / "ceilings"
    command = [compiler, "-O3", "-std=gnu++17", "-march=native", "-pthread", str(SOURCE), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def measured_ceilings(program: Path, threads: int) -> Ceilings:
    """One run of the program."""
    output = subprocess.run([str(program), str(threads)], check=True, capture_output=True, text=True).stdout
    values = json.loads(output)
    return Ceilings(values["read_gb_s"], values["bf16_dot_gflop_s"] or values["fp32_gflop_s"], values["fp32_gflop_s"])


def busy_seconds() -> float | None:
    """CPU time that all processes have used, and that a hypervisor took; None where it cannot be read."""
    try:
        user, nice, system, _, _, interrupts, soft, stolen = map(
            int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        )
    except (OSError, ValueError):
        return None
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int) -> float:
    """CPU time of one process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class OthersLoad:
    """Share of the processors that others than one process used while it was at work, once for each piece of work."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def during(self, pid: int, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `work` gives; the load meanwhile is noted."""
        begin, busy = time.perf_counter(), busy_seconds()
        if busy is None:
            return work()
        own = process_seconds(pid)
        result = work()
        wall = time.perf_counter() - begin
        others = (busy_seconds() or 0.0) - busy - (process_seconds(pid) - own)
        self.shares.append(max(0.0, others) / wall / (os.cpu_count() or 1))
        return result

    @property
    def median(self) -> float | None:
        """None where it cannot be read."""
        return statistics.median(self.shares) if self.shares else None
