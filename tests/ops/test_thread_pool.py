"""The thread pool: every item once, never more threads than asked for or than the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from pyengine import _cpu

PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.mark.parametrize("threads", (1, 2, 3, 8))
def test_every_item_is_visited_exactly_once(threads: int) -> None:
    context = _cpu.Context(threads, oversubscribe=True)
    for num_items in (0, 1, 2, 3, 63, 64, 65, 1000):
        for grain in (1, 2, 7, 64, 5000):
            visits, owners = context.test_parallel_for(num_items, grain)
            assert (visits == 1).all(), (num_items, grain)
            assert ((owners >= 0) & (owners < threads)).all()


def test_many_short_loops_after_sleeps_of_all_lengths_lose_nothing() -> None:
    context = _cpu.Context(4, oversubscribe=True)
    for i in range(600):
        visits, _ = context.test_parallel_for(50, 1)
        assert (visits == 1).all()
        if i % 20 == 0:
            time.sleep(0.0001 * (i % 7))


@pytest.mark.skipif(PROCESSORS < 2, reason="one processor")
def test_a_long_loop_is_shared() -> None:
    context = _cpu.Context(2)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        _, owners = context.test_parallel_for(2_000_000, 1)
        if len(np.unique(owners)) == 2:
            return
    pytest.fail("the second thread never took a piece")


def test_never_more_threads_than_processors() -> None:
    assert _cpu.Context(PROCESSORS + 5).num_threads == PROCESSORS
    assert _cpu.Context(0).num_threads == PROCESSORS
    assert _cpu.Context(1).num_threads == 1
    assert "1 thread" in _cpu.Context(1).description


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_still_computes_and_exits() -> None:
    script = """
import os
from pyengine import _cpu
context = _cpu.Context(2, oversubscribe=True)
context.test_parallel_for(100, 1)
child = os.fork()
visits, _ = context.test_parallel_for(1000, 1)
assert (visits == 1).all()
del context
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60, cwd=os.path.sep)
