"""How much memory a CPU process may still take, and aligned NumPy buffers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

ALIGNMENT = 128


def aligned_empty(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Uninitialised bytes whose address is a multiple of 128. Pages are taken from the system when first touched."""
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + num_bytes]


def available_memory() -> int:
    """Bytes that can be allocated without swapping: what the system says, or less where a control group limits us."""
    return max(0, min(_system_available(), _cgroup_available()))


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_available() -> int:
    """What a control group leaves; its page cache counts as free, because the system gives that back on demand."""
    groups = (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for folder, limit_name, used_name, cache_name in groups:
        try:
            limit = (Path(folder) / limit_name).read_text().strip()
            if limit == "max":
                continue
            used = int((Path(folder) / used_name).read_text())
            stat = dict(line.split() for line in (Path(folder) / "memory.stat").read_text().splitlines())
            return int(limit) - used + int(stat.get(cache_name, 0))
        except (OSError, ValueError):
            continue  # this version of control groups is not mounted here
    return 2**62
