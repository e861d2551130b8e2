"""Makes small faults in the CUDA kernels, one at a time, and counts how many the tests find. Needs no GPU.

    python tools/mutate_kernels.py [--sample 2 --seed 1] [--only decode] [--folder kept] [--list]

Each fault is one that is easily made and hard to see: a barrier dropped, a page or a mask off by one, a copy used
before it is there, a lane that has another's place. The kernels run on the host (csrc/simt), in forward and reverse
order of threads; only the tests of the operation in question are run. Needs the extra [test] and what tests/simt needs.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Fault:
    """`old` occurs once in csrc/cuda/`file` and becomes `new`; tests/cuda/`tests` must find it, of a long file those
    that `keyword` selects."""

    name: str
    file: str
    tests: str
    old: str
    new: str
    keyword: str = ""


PROMPT, DECODE, TILE = "attention_prompt.cu", "attention_decode.cu", "attention_tile.h"
ATTENTION, GEMM, ROPE = "test_attention.py", "test_gemm.py", "test_rope_and_store.py"

FAULTS = (
    # Prompt attention
    Fault(
        "prompt: nobody waits for the tile that is fetched",
        PROMPT,
        ATTENTION,
        "        cp_async_wait<0>();\n",
        "        cp_async_wait<1>();\n",
    ),
    Fault(
        "prompt: the barrier before a tile is used is dropped",
        PROMPT,
        ATTENTION,
        "        __syncthreads();  // the tile is there for all, and all are done with the one that is fetched over\n",
        "",
    ),
    Fault(
        "prompt: keys and values of one tile too few",
        PROMPT,
        ATTENTION,
        "if (base + kKeys < end) fetch(base + kKeys);",
        "if (base + 2 * kKeys < end) fetch(base + kKeys);",
    ),
    Fault(
        "prompt: a key beyond the last row is read",
        PROMPT,
        ATTENTION,
        "const bool seen = key >= first && key < end;",
        "const bool seen = key >= first && key <= end;",
    ),
    Fault(
        "prompt: the mask is off by one",
        PROMPT,
        ATTENTION,
        "exists ? past + token : -1",
        "exists ? past + token + 1 : -1",
    ),
    Fault(
        "prompt: a tile that needs a mask gets none",
        PROMPT,
        ATTENTION,
        "if (base + kKeys > lowest + 1 || base",
        "if (base + kKeys > lowest + 2 || base",
    ),
    Fault(
        "prompt: pages are looked up one key late",
        PROMPT,
        ATTENTION,
        "table[key / job.block_size] * job.block_elements",
        "table[(key + 1) / job.block_size] * job.block_elements",
    ),
    Fault(
        "prompt: heads of a group change places",
        PROMPT,
        ATTENTION,
        "(kv_head * job.group + r % job.group) * kHeadDim",
        "(kv_head * job.group + (r + 1) % job.group) * kHeadDim",
    ),
    Fault(
        "prompt: the window is one key too wide",
        "attention.h",
        ATTENTION,
        "max(0, position + 1 - window)",
        "max(0, position - window)",
    ),
    # What both kernels of attention share
    Fault(
        "tile: a warp's top score is that of half of its lanes",
        TILE,
        ATTENTION,
        "        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));\n",
        "",
    ),
    Fault(
        "tile: sums are not made relative to the new top",
        TILE,
        ATTENTION,
        "fmaf(state.sum[half], old, sum)",
        "state.sum[half] + sum",
    ),
    Fault(
        "tile: lanes read the other half of the keys",
        TILE,
        ATTENTION,
        "2 * depth + lane / 8 % 2));\n            multiply_add<T>(scores",
        "2 * depth + lane / 16));\n            multiply_add<T>(scores",
    ),
    Fault(
        "tile: values of the wrong lines",
        TILE,
        ATTENTION,
        "Lines::at(step * 16 + lane % 16, 2 * pair + lane / 16)",
        "Lines::at(step * 16 + lane % 8, 2 * pair + lane / 16)",
    ),
    Fault(
        "tile: a column of the mask is its neighbour",
        TILE,
        ATTENTION,
        "base + t * 8 + lane % 4 * 2 + c % 2",
        "base + t * 8 + lane % 4 * 2 + c / 2",
    ),
    # Decode attention
    Fault(
        "decode: a buffer is used before it is filled",
        DECODE,
        ATTENTION,
        "            cp_async_wait<kRing - 1>();\n            __syncwarp();\n            add_values",
        "            cp_async_wait<kRing>();\n            __syncwarp();\n            add_values",
    ),
    Fault(
        "decode: a buffer is filled while lanes still read it",
        DECODE,
        ATTENTION,
        "            __syncwarp();\n            fetch(2 * step + kRing);",
        "            fetch(2 * step + kRing);",
    ),
    Fault(
        "decode: the barrier before splits are summed is dropped",
        DECODE,
        ATTENTION,
        "        __syncthreads();\n        for (int i = threadIdx.x; i < heads * kHeadDim",
        "        for (int i = threadIdx.x; i < heads * kHeadDim",
    ),
    Fault(
        "decode: the last key is not seen",
        DECODE,
        ATTENTION,
        "high[2] = {end - 1, end - 1}",
        "high[2] = {end - 2, end - 2}",
    ),
    Fault(
        "decode: blocks are looked up anew too late",
        DECODE,
        ATTENTION,
        "if (turn % 64 == 0) {",
        "if (turn % 128 == 0) {",
    ),
    Fault(
        "decode: a split is merged with the weight of the first",
        DECODE,
        ATTENTION,
        "exp2_approximate((states[i].x - top) * job.scale)",
        "exp2_approximate((states[0].x - top) * job.scale)",
    ),
    Fault(
        "decode: one split too few is merged",
        DECODE,
        ATTENTION,
        "        for (int i = 0; i < count; i++) {\n            const float weight",
        "        for (int i = 0; i < count - 1; i++) {\n            const float weight",
    ),
    # Matrix products
    Fault(
        "gemm: a stage is used before it is there",
        "gemm_kernel.cu",
        GEMM,
        "cp_async_wait<Tile::kStages - 2>();",
        "cp_async_wait<Tile::kStages - 1>();",
    ),
    Fault(
        "gemm: the barrier of a stage is dropped",
        "gemm_kernel.cu",
        GEMM,
        "        __syncthreads();  // the stage is there for all, and all are done with the one that is fetched over\n",
        "",
    ),
    Fault(
        "gemm: what lies beyond k is multiplied",
        "gemm_kernel.cu",
        GEMM,
        "const int present = max(0, min(8, depth - chunk * 8));",
        "const int present = depth > chunk * 8 ? 8 : 0;",
    ),
    Fault(
        "gemm: a row beyond the last is written",
        "gemm_kernel.cu",
        GEMM,
        "if (r >= job.rows) continue;\n            const float* const sum",
        "if (r > job.rows) continue;\n            const float* const sum",
    ),
    Fault(
        "gemm: lines lie one chunk off in shared memory",
        "gemm_kernel.cu",
        GEMM,
        "place_of(line, 2 * depth + lane / 16)",
        "place_of(line + 1, 2 * depth + lane / 16)",
    ),
    # The others
    Fault(
        "norm: the sums of the warps are read before they are written",
        "norm.cu",
        "test_norm.py",
        "    __syncthreads();\n    squares = warp_sum(lane <",
        "    squares = warp_sum(lane <",
    ),
    Fault(
        "rope: a head's sum is that of half of its lanes",
        ROPE.replace("test_", "").replace(".py", ".cu"),
        ROPE,
        "for (int step = job.lanes / 2; step; step /= 2)",
        "for (int step = job.lanes / 4; step; step /= 2)",
    ),
    Fault(
        "rope: the turn goes the other way",
        ROPE.replace("test_", "").replace(".py", ".cu"),
        ROPE,
        "fmaf(a, cos, -(b * sin))",
        "fmaf(a, cos, b * sin)",
    ),
    Fault(
        "rope: values go where keys are",
        ROPE.replace("test_", "").replace(".py", ".cu"),
        ROPE,
        "(is_key ? 0 : job.values_offset)",
        "(is_key ? 0 : job.values_offset - job.block_size * job.head_dim)",
    ),
    Fault(
        "copy: a pair that must wait does not",
        "copy_blocks.cu",
        "test_copy_blocks.py",
        "a.destination == b.source ||",
        "",
    ),
    Fault(
        "embed: a previous id is its neighbour's",
        "embed.cu",
        "test_embed.py",
        "job.previous_ids[-1 - id]",
        "job.previous_ids[-id]",
    ),
    Fault(
        "sample: the list is read before it is sorted",
        "sample.cu",
        "test_sampling.py",
        "            if (max(stride, last_stride) > 32)\n                __syncthreads();\n            else\n"
        "                __syncwarp();\n",
        "",
    ),
    Fault(
        "sample: the carry of a sum of weights is lost",
        "sample.cu",
        "test_sampling.py",
        "static_cast<unsigned>(weight >> 32) + (before + low < low)",
        "static_cast<unsigned>(weight >> 32)",
    ),
)


def check(fault: Fault) -> str | None:
    """What is wrong with `fault` itself; None: nothing."""
    number = (ROOT / "csrc" / "cuda" / fault.file).read_text().count(fault.old)
    if number != 1:
        return f"{fault.name}: the text to be replaced occurs {number} times in {fault.file}"
    return f"{fault.name}: the replacement changes nothing" if fault.old == fault.new else None


class Copy:
    """A copy of the sources in which faults are made, one after another: only what a fault touches is compiled anew.
    The tests are the copy's, and so is what they build; pyengine is the one in use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis", "*.so", "weights")
        for name in ("csrc", "tests"):
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        for name in ("pyproject.toml", "CMakeLists.txt"):
            shutil.copy(ROOT / name, folder)
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        for name in ("PYENGINE_SIMT", "PYTEST_ADDOPTS", "SIMT_ORDER"):
            self.environment.pop(name, None)
        probe = "import tests.simt.build as build, pyengine._cpu; print(build.CSRC)"
        command = [sys.executable, "-c", probe]
        asked = subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True)
        if asked.stdout.strip() != str(folder / "csrc"):
            raise RuntimeError(f"the copy's sources are not what would be built: {asked.stdout}{asked.stderr}")

    def run(self, tests: list[str], keyword: str = "") -> tuple[bool, str]:
        """Whether the tests fail, and the first that does or the last line that they said."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
        command += ["-m", "not slow and not gpu", "-k", keyword, *(f"tests/cuda/{test}" for test in tests)]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            said, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return True, "the tests do not end"
        lines = said.strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        if "BuildFailed" in said or "cannot be built" in said or process.returncode > 1:
            raise RuntimeError(f"the tests did not run:\n{said[-3000:]}")
        if process.returncode < 0:
            return True, f"the tests are ended by signal {-process.returncode}"
        return process.returncode != 0, (failed or lines[-1:])[0]

    def run_with(self, fault: Fault) -> tuple[bool, str]:
        path = self.folder / "csrc" / "cuda" / fault.file
        text = path.read_text()
        path.write_text(text.replace(fault.old, fault.new))
        try:
            return self.run([fault.tests], fault.keyword)
        finally:
            path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, help="so many at random; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", help="those whose name or file has this in it")
    parser.add_argument("--folder", type=Path, help="where the copy is made and kept, for the next run to build upon")
    parser.add_argument("--list", action="store_true", help="only print the faults")
    args = parser.parse_args()
    problems = [problem for problem in map(check, FAULTS) if problem is not None]
    if problems:
        print("\n".join(problems))
        return 2
    faults = [fault for fault in FAULTS if args.only is None or args.only in fault.name or args.only in fault.file]
    if args.sample is not None:
        faults = random.Random(args.seed).sample(faults, min(args.sample, len(faults)))
    if args.list:
        print("\n".join(f"{fault.file:20} {fault.name}" for fault in faults))
        return 0
    survived = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        copy = Copy(folder)
        begin = time.monotonic()
        fails, said = copy.run(sorted({fault.tests for fault in faults}))
        if fails:
            print(f"The tests fail without any fault: {said}")
            return 2
        print(f"{len(faults)} faults; to build and test without one takes {time.monotonic() - begin:.0f} s", flush=True)
        for fault in faults:
            begin = time.monotonic()
            found, said = copy.run_with(fault)
            print(
                f"{'killed' if found else 'SURVIVED':9} {time.monotonic() - begin:4.0f} s  {fault.name}: {said}",
                flush=True,
            )
            if not found:
                survived.append(fault)
    print(f"{len(faults) - len(survived)} of {len(faults)} found")
    for fault in survived:
        print(f"survived: {fault.name} ({fault.file})")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
