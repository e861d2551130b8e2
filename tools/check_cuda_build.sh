#!/usr/bin/env bash
# Compiles the CUDA backend for two architectures with warnings as errors and looks at what came out. Needs no GPU.
#
#   tools/check_cuda_build.sh [--required] [FOLDER]
#
# FOLDER keeps the build (default: a temporary one). The compiler is the one of CUDACXX, CUDA_HOME, the path,
# /usr/local/cuda or the Python in use; where there is none, NVIDIA's wheels are installed into FOLDER. Where that fails too the check is
# skipped, or fails with --required. Needs the extra [dev]; PYENGINE_CUDA_ARCHITECTURES (default "80-real;90-real") and
# JOBS (default: all processors) may be set.
set -euo pipefail
cd "$(dirname "$0")/.."
required=false
[ "${1:-}" = --required ] && { required=true; shift; }
folder=${1:-$(mktemp -d)}
[ -n "${1:-}" ] || trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder"
architectures=${PYENGINE_CUDA_ARCHITECTURES:-80-real;90-real}
jobs=${JOBS:-$(nproc)}

fail() { echo "check_cuda_build: $*" >&2; exit 1; }
skip() {
    $required && fail "$*"
    printf '%s\n' "*********************************************************************" \
        "* SKIPPED: the CUDA backend was not compiled." "* $*" \
        "*********************************************************************" >&2
    exit 0
}

wheels=
in_python=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/nvidia/cu13/bin/nvcc
nvcc=$(command -v "${CUDACXX:-${CUDA_HOME:+$CUDA_HOME/bin/}nvcc}" || command -v nvcc || command -v /usr/local/cuda/bin/nvcc ||
    command -v "$in_python" || true)
if [ -z "$nvcc" ]; then
    wheels=$folder/compiler
    echo "No CUDA compiler on this machine: NVIDIA's wheels are used."
    [ -x "$wheels/nvidia/cu13/bin/nvcc" ] || tools/install_cuda_toolkit.sh wheels "$wheels" >"$folder/log" 2>&1 ||
        { tail -n 5 "$folder/log"; skip "No CUDA compiler is installed, and its wheels cannot be."; }
    nvcc=$wheels/nvidia/cu13/bin/nvcc
fi

cmake -S . -B "$folder/build" -G Ninja -DPYENGINE_CUDA=ON -DPYENGINE_WERROR=ON "-DPYENGINE_CUDA_ARCHITECTURES=$architectures" \
    "-DPYENGINE_CUDA_WHEELS=$wheels" "-DPython_EXECUTABLE=$(command -v python)" \
    "-Dpybind11_DIR=$(python -m pybind11 --cmakedir)" >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
grep 'pyengine:' "$folder/log"
cmake --build "$folder/build" --target _cuda -j "$jobs" >"$folder/log" 2>&1 || { tail -n 80 "$folder/log"; exit 1; }
if grep -n 'warning' "$folder/log"; then
    fail "the compiler warns."
fi
module=$(ls "$folder"/build/csrc/cuda/_cuda*.so)

# Without a driver, a GPU or cuBLAS it must load all the same: it is what tells a user which of them is missing.
python - "$module" "$architectures" <<'EOF'
import importlib.util
import json
import sys

spec = importlib.util.spec_from_file_location("_cuda", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
facts = json.loads(module.build)
assert facts["architectures"].split() == sys.argv[2].split(";"), facts
print(f"_cuda loads: {facts}")
EOF
needed=$(readelf -d "$module" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
for library in $needed; do
    case $library in
        libstdc++.so.* | libm.so.* | libgcc_s.so.* | libc.so.* | libdl.so.* | librt.so.* | libpthread.so.* | ld-linux*) ;;
        *) fail "_cuda is linked to $library; cudart is to be static, cuBLAS and the driver opened at run time." ;;
    esac
done
exported=$(nm -DC --defined-only "$module" | grep -E ' (cu|__cuda|pyengine::)' || true)
[ -z "$exported" ] || fail "_cuda shows names to other libraries: $exported"
echo "_cuda is linked to: $(echo $needed); $(stat -c %s "$module") bytes"

# The same kernels once more, one architecture at a time, for what ptxas and the disassembler say.
if ! python -c 'import sys; sys.path.insert(0, "tools"); import kernel_report; kernel_report.find_tool("nvdisasm")' 2>/dev/null; then
    [ -x "$folder/disassembler/nvidia/cu13/bin/nvdisasm" ] ||
        python -m pip install -q --disable-pip-version-check --target "$folder/disassembler" 'nvidia-cuda-nvdisasm>=13.2' \
            >"$folder/log" 2>&1 || { tail -n 5 "$folder/log"; skip "nvdisasm is not installed, and its wheel cannot be."; }
    export PATH="$PATH:$folder/disassembler/nvidia/cu13/bin"
fi
numbers=$(sed 's/-[a-z]*//g; s/;/,/g' <<<"$architectures")
CUDACXX=$nvcc python tools/kernel_report.py --check --jobs "$jobs" --architectures "$numbers"
