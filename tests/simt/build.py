"""Builds `_simt` (csrc/simt: the CUDA kernels as C++, run on the host) once for each state of the sources.

The module lies in a cache folder outside the source tree, under a name that is a hash of everything it is made from, so
that a second run of the tests finds it ready and two runs at once build it once; the object files stay there too, so
that a change recompiles only what it touches. `python -m tests.simt.build` builds it and prints its path; the
environment variable PYENGINE_SIMT names a module that is to be used instead.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
KERNELS = Path(__file__).resolve().parent / "kernels"  # of _simt_checks, which tests the engine itself
KEPT_FOLDERS = 16  # the older ones, of other states of the sources, are deleted


class CannotBuild(Exception):
    """Something that the build needs is not installed; the text says what."""


class BuildFailed(Exception):
    """The sources do not compile; the text ends with what the compiler said."""


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pyengine" / "simt"


def find_program(name: str) -> str:
    """A program beside the Python in use (installed with the extra [test]) or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise CannotBuild(f"{name} is not installed; pip install 'pyengine-llm[test]' brings it.")
    return found


def find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if found := shutil.which(name):
            return found
    raise CannotBuild("No C++ compiler was found (CXX, c++, g++ or clang++).")


def find_pybind11() -> str:
    try:
        import pybind11
    except ImportError:
        raise CannotBuild("pybind11 is not installed; pip install 'pyengine-llm[test]' brings it.") from None
    return pybind11.get_cmake_dir()


def source_files(module: str) -> list[Path]:
    """What the module is made from (csrc/simt/CMakeLists.txt), and perhaps a little more."""
    if module == "_simt":
        files = [p for p in CSRC.rglob("*") if not p.is_relative_to(CSRC / "cpu")]
    else:  # the engine, and the headers that its kernels share with csrc/cuda
        files = [*(CSRC / "simt").iterdir(), *(CSRC / "cuda").glob("*.h"), CSRC / "ops.h", *KERNELS.iterdir()]
    return sorted(p for p in files if p.is_file())


def hash_of(sources: list[Path], settings: list[str]) -> str:
    digest = hashlib.sha256()
    for setting in settings:
        digest.update(setting.encode() + b"\0")
    for path in sources:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock that ends with the process, however it ends."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def run(command: list[str], log: Path) -> None:
    with log.open("a") as file:
        code = subprocess.call(command, stdout=file, stderr=subprocess.STDOUT)
    if code == 0:
        return
    text = log.read_text(errors="replace")
    if "No CUDA headers were found" in text:
        raise CannotBuild("No CUDA headers were found: set CUDA_HOME, or pip install 'pyengine-llm[test]' on Linux.")
    raise BuildFailed(f"{' '.join(command)} failed; {log} has all of it.\n{text[-6000:]}")


def build(module: str = "_simt", sanitizer: str = "") -> Path:
    """The path of the extension, built now unless it is there.

    `module`: "_simt", or "_simt_checks" with the kernels that test the engine. `sanitizer`: "thread" or "address" watch
    the kernels; such a module can only be loaded where the sanitizer's library was loaded first.

    Raises CannotBuild where something is missing, BuildFailed where the sources do not compile.
    """
    if platform.system() != "Linux":
        raise CannotBuild("The kernels run on the host on Linux only: elsewhere there are no CUDA headers.")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    compiler, cmake, ninja, pybind11 = find_compiler(), find_program("cmake"), find_program("ninja"), find_pybind11()
    cuda_home = os.environ.get("CUDA_HOME", "") + ":" + os.environ.get("CUDA_PATH", "")
    cuda_home = os.environ.get("CUDA_HOME", "") + ":" + os.environ.get("CUDA_PATH", "")
    settings = [sanitizer, suffix, sys.prefix, compiler, cmake, pybind11, cuda_home, str(ROOT)]
    root = cache_folder()
    root.mkdir(parents=True, exist_ok=True)
    name = module + suffix
    path = built_path(root, module, name, settings)
    if path.exists():
        os.utime(path.parent)
        return path
    work = root / f"objects-{hash_of([], settings)}"
    with locked(work.with_suffix(".lock")):
        path = built_path(root, module, name, settings)
        if path.exists():  # another process has built it meanwhile
            return path
        say(f"Building {name} from {ROOT} in {root}: its sources are new or have changed.")
        started = time.monotonic()
        remove_old_builds(root)
        options = {
            "CMAKE_CXX_COMPILER": compiler,
            "CMAKE_MAKE_PROGRAM": ninja,
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11,
            "SIMT_SANITIZER": sanitizer,
            "SIMT_CHECKS": str(KERNELS),
        }
        compile_module(cmake, work, module, options)
        while (now := built_path(root, module, name, settings)) != path:  # somebody changed them while we compiled
            path = now
            compile_module(cmake, work, module, options)
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_name(f"{name}.{os.getpid()}")
        shutil.copy(work / name, unfinished)
        os.replace(unfinished, path)
        say(f"Built in {time.monotonic() - started:.0f} s.")
    return path


def compile_module(cmake: str, work: Path, module: str, options: dict[str, str]) -> None:
    work.mkdir(exist_ok=True)
    log = work / "build.log"
    log.unlink(missing_ok=True)
    configure = [cmake, "-S", str(CSRC / "simt"), "-B", str(work), "-G", "Ninja"]
    run(configure + [f"-D{key}={value}" for key, value in options.items()], log)
    run([cmake, "--build", str(work), "--target", module], log)


def built_path(root: Path, module: str, name: str, settings: list[str]) -> Path:
    return root / f"{module}-{hash_of(source_files(module), settings)}" / name


def remove_old_builds(root: Path) -> None:
    folders = sorted((p for p in root.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime, reverse=True)
    for folder in folders[KEPT_FOLDERS:]:
        if time.time() - folder.stat().st_mtime > 3600:  # none that somebody may be building
            shutil.rmtree(folder, ignore_errors=True)


def load(module: str, path: Path) -> ModuleType:
    """Imports the extension at `path` under its own name, once a process."""
    if (loaded := sys.modules.get(module)) is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(module, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not an extension module of this Python.")
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    sys.modules[module] = extension
    return extension


def simt_module() -> ModuleType:
    """`_simt`: the one that PYENGINE_SIMT names, or the one of the sources as they are."""
    named = os.environ.get("PYENGINE_SIMT")
    return load("_simt", Path(named) if named else build())


def checks_module() -> ModuleType:
    return load("_simt_checks", build("_simt_checks"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--module", choices=["_simt", "_simt_checks"], default="_simt")
    parser.add_argument("--sanitizer", choices=["thread", "address"], default="")
    arguments = parser.parse_args()
    print(build(arguments.module, arguments.sanitizer))


if __name__ == "__main__":
    main()
