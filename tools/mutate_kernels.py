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
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IGNORED = frozenset({"__pycache__", ".hypothesis", ".pytest_cache"})


@dataclass(frozen=True, slots=True)
class Fault:
    """`old` occurs once in csrc/cuda/`file` and becomes `new`; tests/cuda/`tests` must find it."""

    name: str
    file: str
    tests: str
    old: str
    new: str


PROMPT, DECODE, TILE = "attention_prompt.cu", "attention_decode.cu", "attention_tile.h"
ATTENTION, SAMPLING = "test_attention.py", "test_sampling.py"


def faults_in(file: str, tests: str, *faults: tuple[str, str, str]) -> list[Fault]:
    """Of (name, old, new)."""
    return [Fault(name, file, tests, old, new) for name, old, new in faults]


FAULTS = (
    *faults_in(
        PROMPT,
        ATTENTION,
        (
            "prompt: nobody waits for the tile that is fetched",
            "        cp_async_wait<0>();\n",
            "        cp_async_wait<1>();\n",
        ),
        (
            "prompt: the barrier before a tile is used is dropped",
            "__syncthreads();  // the tile is there",
            "// the tile is there",
        ),
        (
            "prompt: keys and values of one tile too few",
            "if (base + kKeys < end) fetch(base + kKeys);",
            "if (base + 2 * kKeys < end) fetch(base + kKeys);",
        ),
        (
            "prompt: the key behind the last one is fetched, and may be NaN",
            "const bool seen = key >= first && key < end;",
            "const bool seen = key >= first && key <= end;",
        ),
        ("prompt: the mask is off by one", "exists ? past + token : -1", "exists ? past + token + 1 : -1"),
        ("prompt: the mask of the window is off by one", "? job.window : INT32_MAX", "? job.window + 1 : INT32_MAX"),
        (
            "prompt: a tile that needs a mask gets none",
            "if (base + kKeys > lowest + 1 || base",
            "if (base + kKeys > lowest + 2 || base",
        ),
        (
            "prompt: pages are looked up one key late",
            "table[key / job.block_size] * job.block_elements",
            "table[(key + 1) / job.block_size] * job.block_elements",
        ),
        (
            "prompt: a head has the query of the next one of its group",
            "(query_start + token) * job.q_stride + element_of(r)",
            "(query_start + token) * job.q_stride + element_of(r + 1)",
        ),
        (
            "prompt: a row behind the last one is written",
            "        if (r >= num_rows) continue;\n",
            "        if (r > num_rows) continue;\n",
        ),
        (
            "prompt: a sequence that begins inside a tile gets none of its own",
            "job.query_start[seq] * job.group / rows + seq;",
            "(job.query_start[seq] * job.group + rows - 1) / rows;",
        ),
    ),
    *faults_in(
        "attention.h",
        ATTENTION,
        ("attention: the window is one key too wide", "max(0, position + 1 - window)", "max(0, position - window)"),
        (
            "decode: a split more than there are keys for",
            "max(1, (keys + size - 1) / size)",
            "keys / size + 1",
        ),
    ),
    *faults_in(
        "attention.cpp",
        ATTENTION,
        (
            "decode: a window that begins inside a page has no room for its last split",
            "int64_t{shape.window} + kPageKeys - 1)",
            "int64_t{shape.window})",
        ),
    ),
    *faults_in(
        TILE,
        ATTENTION,
        (
            "tile: a warp's top score is that of half of its lanes",
            "        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));\n",
            "",
        ),
        ("tile: sums are not made relative to the new top", "fmaf(state.sum[half], old, sum)", "state.sum[half] + sum"),
        (
            "tile: lanes read the other half of the keys",
            "2 * depth + lane / 8 % 2));\n            multiply_add<T>(scores",
            "2 * depth + lane / 16));\n            multiply_add<T>(scores",
        ),
        (
            "tile: values of the wrong lines",
            "Lines::at(step * 16 + lane % 16, 2 * pair + lane / 16)",
            "Lines::at(step * 16 + lane % 8, 2 * pair + lane / 16)",
        ),
        (
            "tile: a column of the mask is its neighbour",
            "base + t * 8 + lane % 4 * 2 + c % 2",
            "base + t * 8 + lane % 4 * 2 + c / 2",
        ),
        (
            "tile: the second row of a lane has the first one's queries",
            "load_pair(r % 2 ? lower : upper, column, paired)",
            "load_pair(r / 2 ? lower : upper, column, paired)",
        ),
    ),
    *faults_in(
        DECODE,
        ATTENTION,
        (
            "decode: a buffer is used before it is filled",
            "            cp_async_wait<kRing - 1>();\n            __syncwarp();\n            add_values",
            "            cp_async_wait<kRing>();\n            __syncwarp();\n            add_values",
        ),
        (
            "decode: a warp's last step is lost unless it is full",
            "(end - warp_begin + kWarps * kKeys - 1) / (kWarps * kKeys)",
            "(end - warp_begin) / (kWarps * kKeys)",
        ),
        (
            "decode: the barrier before splits are summed is dropped",
            "        __syncthreads();\n        for (int i = threadIdx.x; i < heads * kHeadDim",
            "        for (int i = threadIdx.x; i < heads * kHeadDim",
        ),
        (
            "decode: the next item's keys come while the sums are read",
            "        __syncthreads();  // the next item's keys come where the sums were\n",
            "",
        ),
        ("decode: the last key is not seen", "last[2] = {end - 1, end - 1}", "last[2] = {end - 2, end - 2}"),
        ("decode: keys before the window are seen", "max(begin, splits.first)", "begin"),
        ("decode: blocks are looked up anew too late", "if (turn % 64 == 0) {", "if (turn % 128 == 0) {"),
        (
            "decode: sequences beyond a warp's begin at the wrong split",
            "            before += total;\n",
            "",
        ),
        (
            "decode: a warp without keys counts as one with scores of 0",
            "exp2_approximate((shared.top[w][head] - reference) * job.scale)",
            "exp2_approximate((reference_score(shared.top[w][head]) - reference) * job.scale)",
        ),
        (
            "decode: a split is merged with the weight of the first",
            "exp2_approximate((states[i].x - top) * job.scale)",
            "exp2_approximate((states[0].x - top) * job.scale)",
        ),
        (
            "decode: one split too few is merged",
            "        for (int i = 0; i < count; i++) {\n            const float weight",
            "        for (int i = 0; i < count - 1; i++) {\n            const float weight",
        ),
    ),
    *faults_in(
        "attention_fp32.cu",
        ATTENTION,
        (
            "fp32: queries are read before they are there",
            "query[dim] = q[dim];\n    __syncwarp();\n",
            "query[dim] = q[dim];\n",
        ),
        ("fp32: the token itself is not seen", "min(kKeys, position + 1 - base)", "min(kKeys, position - base)"),
        (
            "fp32: the last elements of an odd head are not written",
            "if (dim < job.head_dim) out[dim]",
            "if (dim + 16 < job.head_dim) out[dim]",
        ),
    ),
    *faults_in(
        "gemm_kernel.cu",
        "test_gemm.py",
        (
            "gemm: a stage is used before it is there",
            "cp_async_wait<Tile::kStages - 2>();",
            "cp_async_wait<Tile::kStages - 1>();",
        ),
        (
            "gemm: the barrier of a stage is dropped",
            "__syncthreads();  // the stage is there",
            "// the stage is there",
        ),
        (
            "gemm: what lies beyond k is multiplied",
            "const int present = max(0, min(8, depth - chunk * 8));",
            "const int present = depth > chunk * 8 ? 8 : 0;",
        ),
        (
            "gemm: a row beyond the last is written",
            "if (r >= job.rows) continue;\n            const float* const sum",
            "if (r > job.rows) continue;\n            const float* const sum",
        ),
        (
            "gemm: a column beyond an odd number of them is written",
            "const bool both = c + 1 < job.columns;",
            "const bool both = c < job.columns;",
        ),
        (
            "gemm: lines lie one chunk off in shared memory",
            "place_of(line, 2 * depth + lane / 16)",
            "place_of(line + 1, 2 * depth + lane / 16)",
        ),
        (
            "gemm: a column has its neighbour's bias",
            "job.bias && both ? job.bias[c + 1]",
            "job.bias && both ? job.bias[c]",
        ),
        (
            "gemm: rows at odd addresses are read 16 bytes at a time",
            "job.aligned_x = begins_at_multiples_of(x, 16);",
            "job.aligned_x = true;",
        ),
        (
            "gemm fp32: tiles are overwritten while they are read",
            "sums[i][j]);\n        }\n        __syncthreads();\n",
            "sums[i][j]);\n        }\n",
        ),
    ),
    *faults_in(
        "gemm.cpp",
        "test_gemm.py",
        (
            "gemm: the padding of packed rows keeps what was there",
            "    if (row_bytes < packed_row_bytes)",
            "    if (row_bytes > packed_row_bytes)",
        ),
    ),
    *faults_in(
        "norm.cu",
        "test_norm.py",
        (
            "norm: the sums of the warps are read before they are written",
            "    __syncthreads();\n    squares = warp_sum(lane <",
            "    squares = warp_sum(lane <",
        ),
        (
            "norm: half of the warps' sums are summed",
            "lane < static_cast<int>(blockDim.x / 32) ?",
            "lane < static_cast<int>((blockDim.x + 32) / 64) ?",
        ),
        (
            "norm: what lies behind an odd row is summed with it",
            "        for (int i = at; i < min(at + 4, job.cols); i++) {\n            float x",
            "        for (int i = at; i < at + 4; i++) {\n            float x",
        ),
    ),
    *faults_in(
        "rope_and_store.cu",
        "test_rope_and_store.py",
        (
            "rope: a head's sum is that of half of its lanes",
            "for (int step = job.lanes / 2; step; step /= 2)",
            "for (int step = job.lanes / 4; step; step /= 2)",
        ),
        ("rope: the turn goes the other way", "fmaf(a, cos, -(b * sin))", "fmaf(a, cos, b * sin)"),
        (
            "rope: values go where keys are",
            "(is_key ? 0 : job.values_offset)",
            "(is_key ? 0 : job.values_offset - job.block_size * job.head_dim)",
        ),
        ("rope: the last token of a page goes to the next", "slot / job.block_size", "(slot + 1) / job.block_size"),
        (
            "rope: a head of an odd number of chunks takes the next one's first",
            "    const bool has_second = part.second < job.head_dim;\n    Pack",
            "    const bool has_second = part.second <= job.head_dim;\n    Pack",
        ),
    ),
    *faults_in(
        "copy_blocks.cu",
        "test_copy_blocks.py",
        ("copy: a pair that must wait does not", "a.destination == b.source ||", ""),
        (
            "copy: threads do not agree whether a pair must wait",
            "return __syncthreads_or(found);",
            "return found;",
        ),
        (
            "copy: a unit beyond the block is copied",
            "job.block_units) to[first",
            "job.block_units + 1) to[first",
        ),
    ),
    *faults_in(
        "embed.cu",
        "test_embed.py",
        ("embed: a previous id is its neighbour's", "job.previous_ids[-1 - id]", "job.previous_ids[-id]"),
        ("embed: the end of an odd row is written four at a time", "at + 4 <= job.cols", "at < job.cols"),
    ),
    *faults_in(
        "gather.cu",
        "test_gather.py",
        ("gather: a unit beyond the row is copied", "if (at < job.cols) job.out", "if (at <= job.cols) job.out"),
    ),
    *faults_in(
        "activation.cu",
        "test_activation.py",
        ("activation: NaN is lost", "return x < 0.0f ? 0.0f : x;", "return fmaxf(x, 0.0f);"),
        (
            "activation: an element beyond the row is written",
            "    const int at = blockIdx.y * blockDim.x + threadIdx.x;\n    if (at >= job.cols) return;",
            "    const int at = blockIdx.y * blockDim.x + threadIdx.x;\n    if (at > job.cols) return;",
        ),
    ),
    *faults_in(
        "sample.cu",
        SAMPLING,
        (
            "sample: the list is read before it is sorted",
            "            if (max(stride, last_stride) > 32)\n                __syncthreads();\n            else\n"
            "                __syncwarp();\n",
            "",
        ),
        (
            "sample: warps wait for themselves only while they sort in common",
            "if (max(stride, last_stride) > 32)",
            "if (stride > 32)",
        ),
        (
            "sample: the carry of a sum of weights is lost",
            "static_cast<unsigned>(weight >> 32) + (before + low < low)",
            "static_cast<unsigned>(weight >> 32)",
        ),
        (
            "sample: the warps' results are read before they are there",
            "of_warp;\n    __syncthreads();\n",
            "of_warp;\n",
        ),
        (
            "sample: the warps' results are overwritten before they are read",
            "    __syncthreads();  // the last ones have been read\n",
            "",
        ),
        ("sample: of equal logits the last counts", "if (l[j] > best) best", "if (l[j] >= best) best"),
        (
            "sample: one token more than top-p asks for",
            "(sum += amount_at(i)) < wanted",
            "(sum += amount_at(i)) <= wanted",
        ),
        ("sample: a token at the edge of min-p is lost", "if (z >= min_z) best", "if (z > min_z) best"),
        (
            "sample: the list overflows by one",
            "if (place < kListed) shared.list[place]",
            "if (place <= kListed) shared.list[place]",
        ),
        (
            "sample: the mask is off by one token",
            "if (allowed >> j & 1) continue;",
            "if (allowed >> (j ^ 1) & 1) continue;",
        ),
        (
            "sample: a bias comes before the penalty of the same token",
            "        logits[id] = penalised(logit, rows.penalty_counts[i], repetition, presence, frequency);\n    }\n"
            "    __syncthreads();\n",
            "        logits[id] = penalised(logit, rows.penalty_counts[i], repetition, presence, frequency);\n    }\n",
        ),
        (
            "sample: a random number's group is its neighbour's",
            "static_cast<uint32_t>(first) / kGroup, position",
            "static_cast<uint32_t>(first) / kGroup + 1, position",
        ),
        (
            "sample: a log-probability is that of the penalised logit",
            "(overwritten ? raw() : row.logits)[token_id]",
            "row.logits[token_id]",
        ),
        (
            "sample: the list has stale ranks behind its end",
            "    for (int i = length + threadIdx.x; i < size; i += blockDim.x) shared.list[i] = 0;\n",
            "",
        ),
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
        self.limit_s: float | None = None  # of the tests
        wanted = ["pyproject.toml", "CMakeLists.txt"]
        for name in ("csrc", "tests"):
            files = (path.relative_to(ROOT) for path in (ROOT / name).rglob("*") if path.is_file())
            wanted += [str(file) for file in files if not IGNORED.intersection(file.parts)]
        for name in ("csrc", "tests"):
            for path in (folder / name).rglob("*"):
                if path.is_file() and str(path.relative_to(folder)) not in wanted:
                    path.unlink()
        for name in wanted:
            source, path = ROOT / name, folder / name
            # Only what differs, and with the time of now: what was compiled from a fault is compiled again.
            if not path.exists() or path.read_bytes() != source.read_bytes():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(source.read_bytes())
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        for name in ("PYENGINE_SIMT", "PYTEST_ADDOPTS", "SIMT_ORDER"):
            self.environment.pop(name, None)
        probe = "import tests.simt.build as build, pyengine._cpu; print(build.CSRC)"
        command = [sys.executable, "-c", probe]
        asked = subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True)
        if asked.stdout.strip() != str(folder / "csrc"):
            raise RuntimeError(f"the copy's sources are not what would be built: {asked.stdout}{asked.stderr}")

    def build(self) -> str:
        """The path of the kernels as they are now."""
        command = [sys.executable, "-m", "tests.simt.build"]
        built = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        if built.returncode != 0:
            raise RuntimeError(f"the kernels were not built:\n{built.stderr[-3000:]}")
        return built.stdout.strip()

    def run(self, tests: list[str]) -> tuple[bool, str]:
        """Whether the tests fail, and the first that does or the last line that they said."""
        environment = {**self.environment, "PYENGINE_SIMT": self.build()}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
        command += ["-m", "not slow and not gpu", *(f"tests/cuda/{test}" for test in tests)]
        try:
            ran = subprocess.run(
                command,
                cwd=self.folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=self.limit_s,
            )
        except subprocess.TimeoutExpired:
            return True, "the tests do not end"
        if ran.returncode < 0:
            return True, f"the tests are ended by signal {-ran.returncode}"
        if ran.returncode > 1:
            raise RuntimeError(f"the tests did not run:\n{ran.stdout[-3000:]}")
        lines = ran.stdout.strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return ran.returncode != 0, (failed or lines[-1:])[0]

    def run_with(self, fault: Fault) -> tuple[bool, str]:
        path = self.folder / "csrc" / "cuda" / fault.file
        text = path.read_text()
        path.write_text(text.replace(fault.old, fault.new))
        try:
            return self.run([fault.tests])
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
    faults = [fault for fault in FAULTS if args.only is None or args.only in fault.name or args.only in fault.file]
    if args.sample is not None:
        faults = random.Random(args.seed).sample(faults, min(args.sample, len(faults)))
    if args.list:
        print("\n".join(f"{fault.file:20} {fault.name}" for fault in faults))
        return 0
    problems = [problem for problem in map(check, faults) if problem is not None]
    if problems:
        print("\n".join(problems))
        return 2
    survived = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        copy = Copy(folder)
        begin = time.monotonic()
        copy.build()
        built = time.monotonic()
        fails, said = copy.run(sorted({fault.tests for fault in faults}))
        if fails:
            print(f"The tests fail without any fault: {said}")
            return 2
        took = time.monotonic() - built
        copy.limit_s = 60 + 2 * took
        print(f"{len(faults)} faults; to build takes {built - begin:.0f} s, to test {took:.0f} s", flush=True)
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
