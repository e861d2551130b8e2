"""How tools/kernel_report.py reads what the CUDA tools print; on short texts of our own, without those tools."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPORT_FILE = Path(__file__).resolve().parents[2] / "tools" / "kernel_report.py"

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4sumsPf' for 'sm_90'
ptxas info    : Function properties for _Z4sumsPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 20.000 ms
ptxas info    : Compiling entry function '_Z5tilesPf' for 'sm_90'
ptxas info    : Function properties for _Z5tilesPf
    48 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 48 bytes cumulative stack size
"""

PTX = """\
.extern .shared .align 128 .b8 raw[];
.visible .entry _Z4sumsPf(
	.param .u64 _Z4sumsPf_param_0
)
.maxntid 32, 4, 1
.minnctaperm 2
{
	// begin inline asm
	// shared 512
	// end inline asm
	// shared 2048
	st.shared.f32 	[%r95], %f303;
	ret;
}
.entry _Z5tilesPf(
	.param .u64 _Z5tilesPf_param_0
)
{
	ret;
}
"""

SASS = """\
	.target	sm_90
	.section	.text._Z4sumsPf,"ax",@progbits
	.sectioninfo	@"SHI_REGISTERS=40"
.text._Z4sumsPf:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x10] ;
        /*0030*/              @UP1 UMOV UR4, URZ ;
        /*0040*/               @P0 STG.E.U16 desc[UR4][R2.64], R4 ;
.L_x_1:
        /*0050*/                   EXIT ;
	.section	.text._Z5tilesPf,"ax",@progbits
.text._Z5tilesPf:
        /*0000*/                   LDGSTS.E.BYPASS.128 [R7], desc[UR6][R2.64] ;
        /*0010*/                   HMMA.16816.F32.BF16 R12, R4, R16, RZ ;
        /*0020*/                   LDL.LU R3, [R1] ;
"""


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_report", REPORT_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def good(report: ModuleType) -> dict[str, Any]:
    """A kernel without a fault, as arguments."""
    opcodes = Counter({"LDG.E.128": 4, "HMMA.16816.F32": 8, "LDGSTS.E.BYPASS.128": 2, "STG.E.64": 2})
    return {"name": "attend<bf16, 64>", "architecture": 86, "registers": 64, "threads": 128, "opcodes": opcodes}


def test_what_ptxas_says_is_read_for_each_kernel(report: ModuleType) -> None:
    assert dict(report.parse_ptxas(PTXAS)) == {
        "_Z4sumsPf": {"stack": 0, "spill_stores": 0, "spill_loads": 0, "registers": 40, "static_shared": 1024},
        "_Z5tilesPf": {"stack": 48, "spill_stores": 16, "spill_loads": 24, "registers": 255, "static_shared": 0},
    }


def test_output_of_ptxas_in_another_form_is_an_error_and_not_zero_registers(report: ModuleType) -> None:
    with pytest.raises(ValueError, match="how many registers _Z4sumsPf uses"):
        list(report.parse_ptxas("Compiling entry function '_Z4sumsPf' for 'sm_90'\n    0 bytes stack frame\n"))


def test_launch_bounds_and_the_largest_shared_are_read_from_the_ptx(report: ModuleType) -> None:
    assert list(report.parse_ptx(PTX)) == [("_Z4sumsPf", 128, 2048), ("_Z5tilesPf", None, 0)]


def test_instructions_are_counted_with_and_without_predicates(report: ModuleType) -> None:
    counted = dict(report.parse_sass(SASS))
    assert counted["_Z4sumsPf"] == Counter({"LDC": 1, "LDG.E.128.CONSTANT": 2, "UMOV": 1, "STG.E.U16": 1, "EXIT": 1})
    assert counted["_Z5tilesPf"]["HMMA.16816.F32.BF16"] == 1


@pytest.mark.parametrize(
    ("opcode", "bits"),
    [
        ("LDG.E", 32),
        ("LDG.E.128.CONSTANT", 128),
        ("LDG.E.U8", 8),
        ("STG.E.S16", 16),
        ("LDG.E.LTC128B", 32),
        ("LDG.E.LTC128B.64.CONSTANT", 64),
        ("LDG.E.ENL2.256", 256),
    ],
)
def test_the_width_of_a_load_is_its_own_and_not_a_cache_hint(report: ModuleType, opcode: str, bits: int) -> None:
    assert report.width_of(opcode) == bits


@pytest.mark.parametrize(
    ("demangled", "short"),
    [
        (
            "void pyengine::cuda::(anonymous namespace)::attend<__nv_bfloat16, 64, (bool)1>(pyengine::cuda::X<float>)",
            "attend<bf16, 64, 1>",
        ),
        (
            "void pyengine::cuda::_GLOBAL__N__1f_9_norm_cu_a::norm<__half, float, a::Tile<16, (int)32> >(int)",
            "norm<f16, f32, Tile<16, 32>>",
        ),
        ("pyengine::cuda::(anonymous namespace)::copy_blocks(float*, int (*)(int))", "copy_blocks"),
    ],
)
def test_names_are_short(report: ModuleType, demangled: str, short: str) -> None:
    assert report.short_name(demangled) == short


# (architecture, threads, registers, shared bytes) -> blocks a multiprocessor, as NVIDIA's cuda_occupancy.h has it.
@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((80, 128, 40, 0), 12),
        ((80, 160, 128, 8704), 3),
        ((80, 256, 56, 20000), 4),
        ((86, 128, 40, 0), 12),
        ((86, 384, 168, 70000), 1),
        ((90, 1024, 64, 0), 1),
        ((90, 1024, 80, 0), 0),
        ((90, 32, 16, 0), 32),
        ((120, 256, 56, 20000), 4),
    ],
)
def test_occupancy_is_what_nvidias_calculator_says(
    report: ModuleType, shape: tuple[int, int, int, int], blocks: int
) -> None:
    architecture, threads, registers, shared_bytes = shape
    machine = report.MULTIPROCESSORS[architecture]
    share = report.occupancy(machine, threads=threads, registers=registers, shared_bytes=shared_bytes)
    assert share == blocks * threads / 32 / machine.warps


def test_a_kernel_without_a_fault_passes(report: ModuleType, good: dict[str, Any]) -> None:
    assert report.problems([report.Kernel(**good)], {"attend": ("HMMA", "LDGSTS.128", "LDG.128")}) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"spill_stores": 4, "spill_loads": 8}, "spills registers (4 bytes out, 8 in)"),
        ({"stack": 32}, "uses local memory (a stack frame of 32 bytes)"),
        ({"opcodes": Counter({"HMMA.16816": 1, "LDGSTS.E.128": 1, "LDL": 1})}, "uses local memory"),
        ({"opcodes": Counter({"FFMA": 1, "LDGSTS.E.128": 1})}, "attend<bf16, 64> for sm_86 has no HMMA"),
        ({"opcodes": Counter({"HMMA.16816": 1, "LDGSTS.E.64": 1})}, "has no LDGSTS.128"),
        ({"threads": None}, "has no __launch_bounds__"),
        ({"dynamic_shared": 100 * 1024}, "takes 102400 bytes of shared memory; a block can have 101376"),
        ({"name": "renamed<bf16, 64>"}, "No kernel is called attend"),
    ],
)
def test_each_fault_is_found(report: ModuleType, good: dict[str, Any], change: dict[str, Any], problem: str) -> None:
    (found,) = report.problems([report.Kernel(**{**good, **change})], {"attend": ("HMMA", "LDGSTS.128")})
    assert problem in found


def test_fp32_has_no_tensor_cores_but_must_copy_all_the_same(report: ModuleType, good: dict[str, Any]) -> None:
    plain = {**good, "name": "attend<f32, 64>", "opcodes": Counter({"FFMA": 1, "LDGSTS.E.128": 1})}
    assert report.problems([report.Kernel(**plain)], {"attend": ("HMMA", "LDGSTS.128")}) == []
    assert len(report.problems([report.Kernel(**{**plain, "opcodes": Counter()})], {"attend": ("LDGSTS",)})) == 1


def test_a_row_spans_the_variants_of_a_kernel(report: ModuleType, good: dict[str, Any]) -> None:
    other = {**good, "name": "attend<f32, 64>", "registers": 80, "opcodes": Counter({"LDG.E": 1, "STG.E": 1})}
    text = report.tables([report.Kernel(**good), report.Kernel(**other)], details=False)
    assert text.splitlines()[0] == "### sm_86"
    cells = [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]]
    assert cells == [
        "`attend` ()", "2", "128", "64 to 80", "0", "50 % to 67 %", "128, 32", "64, 32", "1 of 2", "1 of 2", "0", "0",
    ]  # fmt: skip
    details = report.tables([report.Kernel(**good), report.Kernel(**other)], details=True)
    assert "| `attend<f32, 64>` | 1 |" in details


def test_accesses_that_may_go_anywhere_are_counted_and_marked(report: ModuleType, good: dict[str, Any]) -> None:
    kernel = report.Kernel(**{**good, "opcodes": Counter({"LDG.E.128": 1, "LDS.64": 1, "ST.E.64": 1, "STL": 1})})
    cells = [cell.strip() for cell in report.row("attend", [kernel]).split("|")]
    assert cells[7:9] == ["128", "64 (generic)"]


def test_the_tables_go_between_the_markers_and_nowhere_else(report: ModuleType) -> None:
    document = f"Before\n{report.BEGIN}\nold\n{report.END}\nAfter\n"
    assert report.replace_between_markers(document, "new\n") == f"Before\n{report.BEGIN}\nnew\n{report.END}\nAfter\n"
    with pytest.raises(SystemExit, match="must have one line"):
        report.replace_between_markers("no markers", "new\n")
