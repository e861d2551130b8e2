"""Everything that only a GPU can show, in one command: builds, tests, measures, writes one JSON report.

    python tools/gpu_check.py [--model qwen3-0.6b] [--out docs/gpu/NAME.json] [--quick]

In a virtual environment with `pip install ".[cuda13,test]"` (or cuda12); torch and transformers, vLLM or SGLang are
compared with where they are installed. What fails is written down, and the next part goes on; the exit status is 0 only
if all tests passed and every part ran.

    build        pyengine from this checkout, for the GPU that is here (PYENGINE_CUDA=AUTO)
    tests        pytest -m gpu; then compute-sanitizer over a part of them, if it is installed
    ceilings     bandwidth of a copy, rate of the best large matrix product
    kernels      each operation's share of the ceiling that binds it
    steps        decode at many batches and contexts, prompts: shares of the ceilings
    overlap      what Python costs a step with and without overlap
    peers        throughput beside other engines, same weights, same run

--rehearse runs the same on the host (tools for developers without a GPU): the figures mean nothing then, and say so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
sys.path.append(str(ROOT))  # last: pyengine is the one that is installed

GOALS = {  # the least share of the measured ceiling; of the idle time the largest share of a step
    "decode attention": 0.85,
    "decode step at batch 1": 0.80,
    "prompt": 0.70,
    "idle between decode steps": 0.05,
}


def measured_goals(data: dict[str, Any]) -> dict[str, dict[str, float | bool]]:
    """Each goal beside the worst case of its kind that was measured; of prompts, those of 2,048 tokens or more."""
    kernels = {case["case"]: case["share"] for case in data["kernels"]}
    single = [step["share_of_copy_bandwidth"] for step in data["steps"]["decode"] if step["batch"] == 1]
    prompts = data["steps"]["prompt"]
    long_prompts = [prompt for prompt in prompts if prompt["tokens"] >= 2048] or prompts
    measured = {
        "decode attention": kernels["attention, decode"],
        "decode step at batch 1": min(single),
        "prompt": min(prompt["share_of_gemm_rate"] for prompt in long_prompts),
        "idle between decode steps": data["overlap"]["idle_share"]["with"],
    }
    return {
        name: {"goal": GOALS[name], "measured": value, "reached": (value <= GOALS[name]) == name.startswith("idle")}
        for name, value in measured.items()
    }


class Report:
    """The parts' results by name, written after each part, so that an interrupted run leaves what it has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"failed": []}

    def part(self, name: str, run: Callable[[], Any]) -> Any:
        print(f"== {name}", flush=True)
        begin = time.perf_counter()
        try:
            self.data[name] = run()
        except Exception as error:
            self.data[name] = {"error": str(error), "traceback": traceback.format_exc()}
            self.data["failed"].append(name)
            print(f"   failed: {error}", flush=True)
        self.data.setdefault("part_seconds", {})[name] = time.perf_counter() - begin
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")
        return self.data[name]

    def has(self, name: str) -> bool:
        return name in self.data and name not in self.data["failed"]


def output_of(*command: str) -> str:
    """What a command prints, or why there is nothing."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return (done.stdout + done.stderr).strip()


def describe_machine(is_rehearsal: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rehearsal": is_rehearsal,
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": output_of("git", "rev-parse", "HEAD"),
        "changed_files": output_of("git", "status", "--short"),
        "gpu": output_of("nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv"),
    }
    if not is_rehearsal:
        import cupy

        found["cupy"] = cupy.__version__
        found["cuda_driver"] = cupy.cuda.runtime.driverGetVersion()
    return found


def build() -> dict[str, str]:
    environment = {**os.environ, "PYENGINE_CUDA": os.environ.get("PYENGINE_CUDA", "AUTO")}
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return {"info": output_of(sys.executable, "-m", "pyengine", "info", "--build")}


def run_pytest(mark: str, *more: str, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-m", mark, "-p", "no:cacheprovider", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    lines = done.stdout.strip().splitlines()
    result = {"command": " ".join(command), "summary": lines[-1] if lines else "", "tail": lines[-60:]}
    if done.returncode:
        print("\n".join(lines[-60:]))
        raise RuntimeError(f"{result['command']} exited with {done.returncode}: {result['summary']}")
    return result


def run_sanitizer() -> dict[str, Any]:
    if shutil.which("compute-sanitizer") is None:
        return {"skipped": "compute-sanitizer is not installed"}
    found = {}
    for tool in ("memcheck", "racecheck", "synccheck"):
        prefix = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "77", "--target-processes", "all")
        found[tool] = run_pytest("gpu", "tests/cuda", "-k", "not engine", prefix=prefix)
    return found


def copy_seconds(cupy: Any, num_bytes: int) -> float:
    """Seconds of one copy on the device, by events."""
    source, target = cupy.zeros(num_bytes, "u1"), cupy.zeros(num_bytes, "u1")
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    target.data.copy_from_device_async(source.data, num_bytes, cupy.cuda.Stream.null)
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3


def peers(folder: Path, device: str, steps: int) -> dict[str, Any]:
    """Prefill and decode of each engine that is installed, in processes of their own, one after another."""
    from bench_peers import PeerFailed, Worker

    numbers = [i % 997 + 2 for i in range(512)]
    found: dict[str, Any] = {}
    for name in ("pyengine", "transformers", "vllm", "sglang"):
        worker = Worker(name, sys.executable, threads=os.cpu_count() or 1)
        try:
            setup = {
                "folder": str(folder),
                "gguf_bfloat16": None,
                "gguf_float16": None,
                "threads": os.cpu_count() or 1,
                "max_seqs": 64,
                "context": 1024,
                "device": device,
            }
            version = worker.ask("load", **setup)["version"]
            rates: dict[str, float] = {}
            for _ in range(2):  # the first turn warms up
                rates["prefill_tokens_per_s"] = 512 / worker.ask("prefill", prompt=numbers)["seconds"]
                for batch in (1, 16, 64):
                    prompts = [numbers[i : i + 128] for i in range(batch)]
                    answer = worker.ask("decode", prompts=prompts, steps=steps)
                    rates[f"decode_{batch}_tokens_per_s"] = batch * steps / answer["seconds"]
            found[name] = {"version": version, **rates}
        except PeerFailed as failure:
            found[name] = {"not run": str(failure)}
        finally:
            worker.close()
    if "not run" in found["pyengine"]:
        raise RuntimeError(found["pyengine"]["not run"])
    return found


def idle_share(passes: Any, overlap: dict[str, Any], batch: int, context: int) -> dict[str, float]:
    """The part of a decode step in which the device has nothing to do, with and without overlap."""
    device_seconds = passes.decode_seconds(batch, context)
    return {name: max(0.0, 1 - device_seconds / run["seconds_per_step"]) for name, run in overlap.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape of tools/gpu/random_model.py")
    parser.add_argument("--out", type=Path, help="the report; default: docs/gpu/<GPU>.json")
    parser.add_argument("--quick", action="store_true", help="fewer batches and contexts, no peers, no sanitizer")
    parser.add_argument("--no-build", action="store_true", help="measure what is installed")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--rehearse", action="store_true", help="on the host, tiny: shows that this program works")
    args = parser.parse_args()
    gpu = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()[0]
    name = "rehearsal" if args.rehearse else gpu.lower().replace(" ", "-")
    report = Report(args.out or ROOT / "docs" / "gpu" / f"{name}.json")

    report.part("machine", lambda: describe_machine(args.rehearse))
    if not args.rehearse and not args.no_build:
        report.part("build", build)
    if not args.rehearse and not args.no_tests:
        report.part("tests", lambda: run_pytest("gpu"))
        if not args.quick:
            report.part("compute-sanitizer", run_sanitizer)

    from gpu.measure import Measurements, device_of_tests

    with device_of_tests() if args.rehearse else contextlib.nullcontext(), tempfile.TemporaryDirectory() as folder:
        measurements = Measurements(Path(folder), "tiny" if args.rehearse else args.model, args.rehearse, args.quick)
        report.part("ceilings", lambda: measurements.ceilings(copy_seconds))
        if report.has("ceilings"):
            report.part("kernels", measurements.kernels)
            report.part("steps", measurements.steps)
        report.part("overlap", lambda: measurements.overlap(idle_share))
        measurements.close()
        if all(map(report.has, ("kernels", "steps", "overlap"))):
            report.part("goals", lambda: measured_goals(report.data))
        if not args.quick:
            device = "cpu" if args.rehearse else "cuda"
            report.part("peers", lambda: peers(measurements.folder, device, 8 if args.rehearse else 128))
    print(f"written: {report.path}; failed: {', '.join(report.data['failed']) or 'nothing'}")
    return 1 if report.data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
