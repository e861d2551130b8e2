"""tools/gpu_check.py: a rehearsal on the host, so that the program itself works when a GPU is at hand."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("machine", "ceilings", "kernels", "steps", "overlap", "goals")


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "tools" / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.mark.slow
@pytest.mark.sample
def test_a_rehearsal_writes_every_part(simt: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, ROOT / "tools" / "gpu_check.py", "--rehearse", "--quick", "--out", report]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(report.read_text())
    assert data["failed"] == []
    assert data["machine"]["rehearsal"] is True
    assert set(PARTS) <= set(data)
    assert len(data["kernels"]) == 13
    for case in data["kernels"]:
        assert case["seconds"] > 0
        assert case["share"] > 0
        assert (case["bound"] == "memory") == (case["flops"] == 0)
    assert {(step["batch"], step["context"]) for step in data["steps"]["decode"]} == {
        (1, 20),
        (1, 40),
        (3, 20),
        (3, 40),
    }
    assert data["overlap"]["idle_share"].keys() == {"with", "without"}


def test_what_fails_is_written_down_and_the_next_part_goes_on(gpu_check: ModuleType, tmp_path: Path) -> None:
    report = gpu_check.Report(tmp_path / "folder" / "report.json")

    def broken() -> None:
        raise RuntimeError("no such device")

    report.part("first", broken)
    report.part("second", lambda: {"value": 1})
    data = json.loads((tmp_path / "folder" / "report.json").read_text())
    assert data["failed"] == ["first"]
    assert "no such device" in data["first"]["error"]
    assert data["second"] == {"value": 1}
    assert report.has("second")
    assert not report.has("first")


def test_goals_are_compared_with_the_worst_case_of_their_kind(gpu_check: ModuleType) -> None:
    data: dict[str, Any] = {
        "kernels": [{"case": "attention, decode", "share": 0.9}],
        "steps": {
            "decode": [
                {"batch": 1, "share_of_copy_bandwidth": 0.9},
                {"batch": 1, "share_of_copy_bandwidth": 0.79},
                {"batch": 64, "share_of_copy_bandwidth": 0.99},
            ],
            "prompt": [{"tokens": 512, "share_of_gemm_rate": 0.5}, {"tokens": 2048, "share_of_gemm_rate": 0.71}],
        },
        "overlap": {"idle_share": {"with": 0.06, "without": 0.3}},
    }
    found = gpu_check.measured_goals(data)
    assert {name: goal["reached"] for name, goal in found.items()} == {
        "decode attention": True,
        "decode step at batch 1": False,
        "prompt": True,
        "idle between decode steps": False,
    }
    assert found["decode step at batch 1"]["measured"] == 0.79
