"""Code for scripts that tests run in a process of their own: the most memory that process has had resident.

`ru_maxrss` would not do: on Linux a new process inherits the value of the one that started it.
"""

from __future__ import annotations

PEAK_BYTES = """
def peak_bytes():
    import resource, sys
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
"""
