"""What CMake decides about the CUDA backend (csrc/cuda/decide.cmake), on made-up machines: scripts stand for nvcc and
nvidia-smi."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

DECIDE = Path(__file__).resolve().parents[2] / "csrc" / "cuda" / "decide.cmake"
REPORT = """
set(Python_EXECUTABLE "@PYTHON@")
set(CMAKE_CXX_COMPILER /usr/bin/the-c++)
include(@DECIDE@)
if(why_not)
  message("NOT: ${why_not}")
else()
  message("BUILT: ${CMAKE_CUDA_ARCHITECTURES} | ${nvcc} | ${link_flag} | ${host_compiler}")
endif()
"""
WHEELS_OF_THE_COMPILER = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl"


def cmake_program() -> str:
    beside = Path(sys.executable).with_name("cmake")
    found = str(beside) if beside.exists() else shutil.which("cmake")
    if found is None:
        pytest.skip("cmake is not installed; pip install 'pyengine-llm[test]' brings it.")
    return found


@dataclass
class Machine:
    """A folder that is all of PATH, and environment variables."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def add_program(self, path: Path, script: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def add_gpu(self, *lines: str) -> None:
        """nvidia-smi, which answers with lines such as "9.0, 580.65.06"."""
        self.add_program(self.folder / "bin" / "nvidia-smi", "printf '%s\\n' " + " ".join(f"'{x}'" for x in lines))

    def add_nvcc(
        self,
        version: str = "13.0.88",
        architectures: str = "75 80 86 89 90 100 120",
        *,
        root: str = "toolkit",
        complaint: str = "",
    ) -> Path:
        """nvcc in root/bin. With a complaint it compiles nothing."""
        codes = " ".join(f"sm_{name}" for name in architectures.split())
        compiles = f"echo '{complaint}' >&2; exit 1" if complaint else "exit 0"
        script = (
            f"case $1 in --version) echo 'Cuda compilation tools, release {version[:4]}, V{version}';; "
            f"--list-gpu-code) printf '%s\\n' {codes};; *) {compiles};; esac"
        )
        return self.add_program(self.folder / root / "bin" / "nvcc", script)

    def decide(self, **settings: str) -> str:
        """What the report above prints, or the error of CMake on one line."""
        script = self.folder / "report.cmake"
        script.write_text(REPORT.replace("@DECIDE@", str(DECIDE)).replace("@PYTHON@", sys.executable))
        options = [f"-D{name}={value}" for name, value in {"CMAKE_SYSTEM_NAME": "Linux", **settings}.items()]
        path = f"{self.folder / 'bin'}:/usr/bin:/bin"
        done = subprocess.run(
            [cmake_program(), *options, "-P", str(script)],
            cwd=self.folder,
            env={"PATH": path, **self.environment},
            capture_output=True,
            text=True,
        )
        assert (done.returncode == 0) == ("CMake Error" not in done.stderr)
        return " ".join((done.stdout + done.stderr).split())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.add_program(tmp_path / "bin" / "nvidia-smi", "exit 9")  # a driver without a GPU hides any real one
    machine.environment["CUDACXX"] = str(tmp_path / "toolkit" / "bin" / "nvcc")
    return machine


def test_without_a_gpu_only_on_builds_and_auto_says_how(machine: Machine) -> None:
    nvcc = machine.add_nvcc()
    assert machine.decide() == (
        "NOT: no NVIDIA GPU is visible (nvidia-smi names none); PYENGINE_CUDA=ON builds it nevertheless"
    )
    assert machine.decide(PYENGINE_CUDA="ON") == (
        f"BUILT: 80-real;86-real;89-real;90-real;100-real;120-real;120-virtual | {nvcc} | | /usr/bin/the-c++"
    )
    assert machine.decide(PYENGINE_CUDA="OFF") == "NOT: PYENGINE_CUDA is OFF"


def test_auto_builds_for_the_gpus_that_are_visible(machine: Machine) -> None:
    machine.add_nvcc("12.8.93")
    machine.add_gpu("8.9, 550.54.14", "9.0, 550.54.14", "8.9, 550.54.14")
    assert machine.decide().startswith("BUILT: 89-real;90-real |")
    assert machine.decide(PYENGINE_CUDA_ARCHITECTURES="80-real;90").startswith("BUILT: 80-real;90 |")


def test_a_compiler_of_a_newer_generation_than_the_driver_builds_nothing_that_could_run(machine: Machine) -> None:
    machine.add_nvcc("13.0.88")
    machine.add_gpu("9.0, 570.86.10")
    assert "the driver (570) is older than the CUDA compiler (13.0.88)" in machine.decide()
    machine.add_gpu("9.0, 580.65.06")
    assert machine.decide().startswith("BUILT: 90-real |")


@pytest.mark.parametrize("capability", ["7.5", "13.1"])
def test_auto_leaves_out_a_gpu_that_is_too_old_or_unknown_to_the_compiler(machine: Machine, capability: str) -> None:
    machine.add_nvcc()
    machine.add_gpu(f"{capability}, 580.65.06")
    name = capability.replace(".", "")
    assert machine.decide().startswith(f"NOT: the GPU's architecture ({name}) is older than 80, or unknown")


def test_on_without_a_compiler_is_one_sentence_that_says_what_to_install(machine: Machine) -> None:
    said = machine.decide(PYENGINE_CUDA="ON")
    assert "PYENGINE_CUDA is ON, but no CUDA compiler was found: install a CUDA toolkit 12.x or 13.x" in said
    assert f"pip install {WHEELS_OF_THE_COMPILER}." in said
    machine.add_gpu("9.0, 580.65.06")
    assert machine.decide().startswith("NOT: no CUDA compiler was found: install")


def test_on_takes_the_architectures_that_the_compiler_has(machine: Machine) -> None:
    machine.add_nvcc("12.4.131", "70 80 86 89 90")
    assert machine.decide(PYENGINE_CUDA="ON").startswith("BUILT: 80-real;86-real;89-real;90-real;90-virtual |")
    said = machine.decide(PYENGINE_CUDA="ON", PYENGINE_CUDA_ARCHITECTURES="80-real;120")
    assert (
        "PYENGINE_CUDA_ARCHITECTURES has 120: the kernels need 80 or newer, and the compiler (12.4.131) knows" in said
    )
    assert "has 70-real" in machine.decide(PYENGINE_CUDA="ON", PYENGINE_CUDA_ARCHITECTURES="70-real")


def test_a_compiler_that_cannot_compile_does_not_end_the_build_of_the_cpu_backend(machine: Machine) -> None:
    machine.add_nvcc(complaint="sh: 1: cicc: not found")
    machine.add_gpu("9.0, 580.65.06")
    said = machine.decide()
    assert "does not compile a small program (sh: 1: cicc: not found)" in said
    assert "NOT: the CUDA compiler" in said
    assert "PYENGINE_CUDA is ON, but the CUDA compiler" in machine.decide(PYENGINE_CUDA="ON")


def test_a_compiler_of_cuda_11_is_refused(machine: Machine) -> None:
    machine.add_nvcc("11.8.89")
    assert "is version 11.8.89: install a CUDA toolkit 12.x or 13.x" in machine.decide(PYENGINE_CUDA="ON")


def test_the_wheels_are_found_where_they_are_said_to_be_and_their_lib_folder_is_named(machine: Machine) -> None:
    nvcc = machine.add_nvcc(root="site/nvidia/cu13")
    library = machine.folder / "site" / "nvidia" / "cu13" / "lib"
    library.mkdir()
    (library / "libcudart_static.a").touch()
    expected = f"| {nvcc} | -L{library} |"
    for folder in (machine.folder / "site", machine.folder / "site" / "nvidia" / "cu13"):
        assert expected in machine.decide(PYENGINE_CUDA="ON", PYENGINE_CUDA_WHEELS=str(folder))
    said = machine.decide(PYENGINE_CUDA="ON", PYENGINE_CUDA_WHEELS=str(library))
    assert "has neither nvidia/cu13/bin/nvcc nor bin/nvcc" in said


def test_the_lib_folder_is_found_behind_a_script_that_calls_the_compiler(machine: Machine) -> None:
    root = machine.folder / "site" / "nvidia" / "cu13"
    (root / "lib").mkdir(parents=True)
    (root / "lib" / "libcudart_static.a").touch()
    nvcc = machine.add_nvcc()
    nvcc.write_text(nvcc.read_text().replace("case $1 in", f"case $1 in --dryrun) echo '#$ TOP={root}/bin/..' >&2;;"))
    assert f"| {nvcc} | -L{root}/lib |" in machine.decide(PYENGINE_CUDA="ON")


def test_a_compiler_on_the_path_comes_before_those_in_usual_places_and_cuda_home_before_it(machine: Machine) -> None:
    del machine.environment["CUDACXX"]
    on_path = machine.add_nvcc(root=".")
    assert f"| {on_path} |" in machine.decide(PYENGINE_CUDA="ON")
    machine.environment["CUDA_HOME"] = str(machine.folder / "home")
    at_home = machine.add_nvcc(root="home")
    assert f"| {at_home} |" in machine.decide(PYENGINE_CUDA="ON")


def test_settings_that_mean_nothing_are_refused(machine: Machine) -> None:
    assert "PYENGINE_CUDA is 'MAYBE'; it must be AUTO, ON or OFF." in machine.decide(PYENGINE_CUDA="MAYBE")


def test_only_linux_has_the_backend(machine: Machine) -> None:
    machine.add_nvcc()
    machine.add_gpu("9.0, 580.65.06")
    assert machine.decide(CMAKE_SYSTEM_NAME="Darwin") == "NOT: the CUDA backend is for Linux, this is Darwin"
