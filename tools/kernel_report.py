"""Compiles the CUDA kernels and reports what each of them takes of a GPU. Needs nvcc and nvdisasm, no GPU.

    python tools/kernel_report.py                     a table an architecture, a row a kernel
    python tools/kernel_report.py --details --files csrc/cuda/norm.cu     a row for each instantiation
    python tools/kernel_report.py --check             also: exit code 1 for spills, local memory, missing tensor cores
    python tools/kernel_report.py --write             also: the tables of docs/kernels.md are made anew

Registers, stack and spills are ptxas's own words (-Xptxas -v); threads a block and dynamic shared memory stand in the
PTX (.maxntid, and a comment that shared_storage() of csrc/cuda/device.h leaves); instructions are nvdisasm's; occupancy
is computed here. It says how kernels are built, not how fast they are.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CSRC = REPOSITORY / "csrc"
DOCUMENT = REPOSITORY / "docs" / "kernels.md"
BEGIN, END = "<!-- kernel report: begin -->", "<!-- kernel report: end -->"

# What must be found in the machine code of a kernel, by its name; of the instantiations for fp32, only what no tensor
# core does. A name that no kernel has is an error, so that a renamed kernel cannot slip out.
REQUIRED: dict[str, tuple[str, ...]] = {
    "attend_decode": ("HMMA", "LDGSTS.128"),
    "attend_prompt": ("HMMA", "LDGSTS.128"),
    "multiply_on_tensor_cores": ("HMMA", "LDGSTS.128"),
}
TENSOR_CORE_ONLY = ("HMMA",)
# Run once at load, or by a test: spills would cost nobody anything.
COLD: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one multiprocessor has (CUDA programming guide, technical specifications by compute capability)."""

    warps: int
    blocks: int
    shared_bytes: int
    shared_bytes_of_block: int
    registers: int = 65536
    reserved_shared_bytes: int = 1024  # of each block, the system's


MULTIPROCESSORS = {
    80: Multiprocessor(64, 32, 164 * 1024, 163 * 1024),
    86: Multiprocessor(48, 16, 100 * 1024, 99 * 1024),
    89: Multiprocessor(48, 24, 100 * 1024, 99 * 1024),
    90: Multiprocessor(64, 32, 228 * 1024, 227 * 1024),
    100: Multiprocessor(64, 32, 228 * 1024, 227 * 1024),
    120: Multiprocessor(48, 24, 100 * 1024, 99 * 1024),
}


@dataclass(slots=True)
class Kernel:
    """One instantiation of a kernel, for one architecture. Sizes in bytes; `threads` is None without launch bounds."""

    name: str
    file: str = ""
    architecture: int = 0
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    static_shared: int = 0
    dynamic_shared: int = 0
    threads: int | None = None
    opcodes: Counter[str] = field(default_factory=Counter)  # whole: "LDG.E.128.CONSTANT"

    @property
    def base_name(self) -> str:
        return self.name.split("<")[0]

    @property
    def is_fp32(self) -> bool:
        return re.search(r"<f32\b", self.name) is not None

    def uses(self, instruction: str) -> bool:
        """Whether an instruction is there: "HMMA", or with its width, "LDG.128"."""
        name, _, width = instruction.partition(".")
        return any(
            opcode.split(".")[0] == name and (not width or width_of(opcode) == int(width)) for opcode in self.opcodes
        )

    def widths(self, *names: str) -> set[int]:
        """How many bits the instructions of these names move at a time."""
        return {width_of(opcode) for opcode in self.opcodes if opcode.split(".")[0] in names}

    def occupancy(self) -> float | None:
        """The share of a multiprocessor's warps that can be resident at once; None without launch bounds."""
        if self.threads is None:
            return None
        return occupancy(
            MULTIPROCESSORS[self.architecture],
            threads=self.threads,
            registers=self.registers,
            shared_bytes=self.static_shared + self.dynamic_shared,
        )


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def occupancy(machine: Multiprocessor, *, threads: int, registers: int, shared_bytes: int) -> float:
    """Resident warps over the most there can be. Registers are given out by 256 a warp, a quarter of the multiprocessor
    holds whole warps only, shared memory by 128 bytes."""
    warps = -(-threads // 32)
    blocks = min(machine.blocks, machine.warps // warps)
    if registers:
        registers_of_warp = round_up(registers * 32, 256)
        resident_warps = machine.registers // 4 // registers_of_warp * 4
        blocks = min(blocks, resident_warps // warps)
    taken = round_up(shared_bytes + machine.reserved_shared_bytes, 128)
    return min(blocks, machine.shared_bytes // taken) * warps / machine.warps


def width_of(opcode: str) -> int:
    """Bits that a load or store moves for a thread: "LDG.E.128" has 128, "LDG.E.U8" 8, "LDG.E" 32."""
    widths = [int(bits) for bits in re.findall(r"\.[US]?(8|16|32|64|128|256)(?=\.|$)", opcode)]
    return widths[-1] if widths else 32


def parse_ptxas(text: str) -> Iterator[tuple[str, dict[str, int]]]:
    """(mangled name, what `ptxas -v` says of it), for each kernel in its output."""
    patterns = {
        "stack": r"(\d+) bytes stack frame",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
        "registers": r"Used (\d+) registers",
        "static_shared": r"(\d+)(?:\+\d+)? bytes smem",
    }
    parts = re.split(r"Compiling entry function '([^']+)' for '[^']+'", text)
    for name, said in zip(parts[1::2], parts[2::2], strict=True):
        found = {key: re.search(pattern, said) for key, pattern in patterns.items()}
        if found["registers"] is None:
            raise ValueError(f"ptxas does not say how many registers {name} uses.")
        yield name, {key: int(match[1]) if match else 0 for key, match in found.items()}


def parse_ptx(text: str) -> Iterator[tuple[str, int | None, int]]:
    """(mangled name, most threads a block, bytes of Shared) of each kernel in a PTX file."""
    parts = re.split(r"\.entry\s+(\w+)", text)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        bound = re.search(r"\.maxntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", body)
        threads = None
        if bound:
            threads = int(bound[1]) * int(bound[2] or 1) * int(bound[3] or 1)
        yield name, threads, max((int(size) for size in re.findall(r"// shared (\d+)", body)), default=0)


def parse_sass(text: str) -> Iterator[tuple[str, Counter[str]]]:
    """(mangled name, how often each instruction stands in it) of each kernel in the output of `nvdisasm -c`."""
    parts = re.split(r"^\s*\.section\s+\.text\.(\w+),.*$", text, flags=re.MULTILINE)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        opcodes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", body, flags=re.MULTILINE)
        yield name, Counter(opcodes)


def short_name(demangled: str) -> str:
    """A kernel's name without namespaces, return type and parameters, element types as the sources call them."""
    name = demangled.replace("(anonymous namespace)", "anonymous").removeprefix("void ")
    name = re.sub(r"\((?:unsigned )?(?:int|long|bool|short|char)\)", "", name)  # casts in front of constants
    depth, end = 0, len(name)
    for position, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            end = position
            break
    name = re.sub(r"\b(?:\w+::)+", "", name[:end])
    for long, short in {"__nv_bfloat16": "bf16", "__half": "f16", "float": "f32"}.items():
        name = re.sub(rf"\b{long}\b", short, name)
    return name.replace("> >", ">>").strip()


def find_tool(name: str) -> str:
    """nvcc or nvdisasm: $CUDA_HOME, the path, /usr/local/cuda, then NVIDIA's wheels in the Python in use."""
    folders = [Path(home) / "bin" for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    wheels = [Path(sysconfig.get_paths()[key]) / "nvidia" / "cu13" / "bin" for key in ("purelib", "platlib")]
    override = os.environ.get("CUDACXX") if name == "nvcc" else None
    for found in (
        override,
        *(str(folder / name) for folder in folders),
        shutil.which(name),
        f"/usr/local/cuda/bin/{name}",
        *(str(folder / name) for folder in wheels),
    ):
        if found and shutil.which(found):
            return found
    raise SystemExit(f"{name} was not found. pip install 'pyengine-llm[cuda-build]' brings it, so does a CUDA toolkit.")


def run(command: Sequence[str]) -> str:
    """What a command prints, errors included. Ends the program with it where the command fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed:\n{done.stdout}")
    return done.stdout


def demangle(names: Iterable[str]) -> list[str]:
    mangled = list(names)
    return run(["c++filt", *mangled]).splitlines() if mangled else []


def compile_kernels(source: Path, architecture: int, *, nvcc: str, nvdisasm: str) -> list[Kernel]:
    """The kernels of one file, compiled for one architecture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cubin = folder / "kernels.cubin"
        # The PTX is kept beside it: one compilation tells everything.
        said = run(
            [nvcc, "-std=c++17", "-O3", "-DNDEBUG", f"-arch=sm_{architecture}", "-cubin", "-Xptxas", "-v", "-keep",
             "-keep-dir", str(folder), f"-I{CSRC}", str(source), "-o", str(cubin)]
        )  # fmt: skip
        kernels = {
            mangled: Kernel("", source.name, architecture, **resources) for mangled, resources in parse_ptxas(said)
        }
        if kernels:
            for ptx in folder.glob("*.ptx"):
                for mangled, threads, shared in parse_ptx(ptx.read_text()):
                    kernels[mangled].threads, kernels[mangled].dynamic_shared = threads, shared
            for mangled, opcodes in parse_sass(run([nvdisasm, "-c", str(cubin)])):
                if mangled in kernels:  # else a function that is called, not a kernel
                    kernels[mangled].opcodes = opcodes
        for kernel, demangled in zip(kernels.values(), demangle(kernels), strict=True):
            kernel.name = short_name(demangled)
    return sorted(kernels.values(), key=lambda kernel: kernel.name)


def problems(kernels: Sequence[Kernel], required: dict[str, tuple[str, ...]] | None = None) -> list[str]:
    """What must not be, a sentence each."""
    found = []
    for kernel in kernels:
        where = f"{kernel.name} for sm_{kernel.architecture}"
        machine = MULTIPROCESSORS[kernel.architecture]
        shared = kernel.static_shared + kernel.dynamic_shared
        if shared > machine.shared_bytes_of_block:
            found.append(
                f"{where} takes {shared} bytes of shared memory; a block can have {machine.shared_bytes_of_block}."
            )
        if kernel.base_name in COLD:
            continue
        if kernel.spill_stores or kernel.spill_loads:
            found.append(f"{where} spills registers ({kernel.spill_stores} bytes out, {kernel.spill_loads} in).")
        elif kernel.stack or kernel.uses("LDL") or kernel.uses("STL"):
            found.append(f"{where} uses local memory (a stack frame of {kernel.stack} bytes).")
        if kernel.threads is None:
            found.append(f"{where} has no __launch_bounds__: nothing keeps its registers within what a block can have.")
    required = REQUIRED if required is None else required
    for name, instructions in required.items():
        named = [kernel for kernel in kernels if kernel.base_name == name]
        if not named:
            found.append(f"No kernel is called {name}.")
        for kernel in named:
            for instruction in instructions:
                needless = kernel.is_fp32 and instruction.split(".")[0] in TENSOR_CORE_ONLY
                if not needless and not kernel.uses(instruction):
                    found.append(f"{kernel.name} for sm_{kernel.architecture} has no {instruction}.")
    return found


def span(values: Iterable[float], form: str = "{:.0f}") -> str:
    low, high = min(values := list(values)), max(values)
    first, last = form.format(low), form.format(high)
    return first if first == last else f"{first} to {last}"


def row(name: str, kernels: Sequence[Kernel]) -> str:
    """One line of the table, of one or more instantiations of a kernel."""

    def widths(*names: str) -> str:
        found = set[int]().union(*(kernel.widths(*names) for kernel in kernels))
        # A generic access is one of which the compiler could not see that it goes to global memory.
        generic = any(kernel.widths(names[1]) for kernel in kernels)
        return (", ".join(str(width) for width in sorted(found, reverse=True)) or "none") + " (generic)" * generic

    def users(instruction: str) -> str:
        count = sum(kernel.uses(instruction) for kernel in kernels)
        return "no" if not count else "yes" if count == len(kernels) else f"{count} of {len(kernels)}"

    occupancies = [value for kernel in kernels if (value := kernel.occupancy()) is not None]
    threads = [kernel.threads for kernel in kernels if kernel.threads is not None]
    cells = [
        name,
        str(len(kernels)),
        span(threads) if threads else "free",
        span(kernel.registers for kernel in kernels),
        span((kernel.static_shared + kernel.dynamic_shared) / 1024 for kernel in kernels),
        span((100 * value for value in occupancies), "{:.0f} %") if occupancies else "",
        widths("LDG", "LD"),
        widths("STG", "ST"),
        users("LDGSTS"),
        users("HMMA"),
        span(kernel.spill_stores + kernel.spill_loads for kernel in kernels),
        span(kernel.stack for kernel in kernels),
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| kernel | variants | threads | registers | shared KiB | occupancy | load bits | store bits | async copies | "
    "tensor cores | spilled bytes | stack bytes |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def tables(kernels: Sequence[Kernel], *, details: bool) -> str:
    """Markdown: a heading and a table for each architecture."""
    parts = []
    ordered = sorted(kernels, key=lambda kernel: (kernel.architecture, kernel.file, kernel.name))
    for architecture, of_architecture in groupby(ordered, key=lambda kernel: kernel.architecture):
        lines = [f"### sm_{architecture}\n", HEAD]
        for (file, base), group in groupby(of_architecture, key=lambda kernel: (kernel.file, kernel.base_name)):
            members = list(group)
            if details:
                lines += [row(f"`{member.name}`", [member]) for member in members]
            else:
                lines.append(row(f"`{base}` ({file})", members))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def replace_between_markers(document: str, text: str) -> str:
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise SystemExit(f"The document must have one line {BEGIN} and one line {END}.")
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n{text}{END}{rest.split(END)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", default="80,90,120", help="which, separated by commas (%(default)s)")
    parser.add_argument("--files", nargs="+", type=Path, help="some .cu files instead of all in csrc/cuda")
    parser.add_argument("--details", action="store_true", help="a row for each instantiation")
    parser.add_argument("--check", action="store_true", help="exit code 1 where something must not be")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {DOCUMENT.relative_to(REPOSITORY)}")
    parser.add_argument("--jobs", type=int, default=1, help="compilations at a time (%(default)s)")
    arguments = parser.parse_args()
    architectures = [int(name) for name in arguments.architectures.split(",")]
    if unknown := [name for name in architectures if name not in MULTIPROCESSORS]:
        parser.error(f"--architectures: {unknown[0]} is not one of {', '.join(map(str, MULTIPROCESSORS))}")
    nvcc, nvdisasm = find_tool("nvcc"), find_tool("nvdisasm")
    sources = arguments.files or sorted((CSRC / "cuda").glob("*.cu"))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        compiled = pool.map(
            lambda task: compile_kernels(*task, nvcc=nvcc, nvdisasm=nvdisasm),
            [(source, architecture) for architecture in architectures for source in sources],
        )
        kernels = [kernel for of_file in compiled for kernel in of_file]
    version = re.search(r"release [\d.]+, V([\d.]+)", run([nvcc, "--version"]))
    text = f"Compiled by nvcc {version[1] if version else 'of unknown version'}.\n\n"
    text += tables(kernels, details=arguments.details)
    print(text)
    if arguments.write:
        DOCUMENT.write_text(replace_between_markers(DOCUMENT.read_text(), text))
    if not arguments.check:
        return 0
    # Some files alone cannot have all the kernels that must be somewhere.
    found = problems(kernels, {} if arguments.files else None)
    print("\n".join(found) or f"{len(kernels)} kernels: nothing that must not be.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
