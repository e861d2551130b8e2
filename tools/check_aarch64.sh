#!/usr/bin/env bash
# check_aarch64.sh: compiles the CPU ops for 64-bit ARM and runs their checks (tests/ops/aarch64) in an emulator; and the
# engine that runs CUDA kernels on the host (csrc/simt), whose kernels (tests/simt/kernels) must do there what they do
# here.
#
#   tools/check_aarch64.sh           cross-compile, run under qemu with the oldest ARMv8 core
#   tools/check_aarch64.sh native    the same programs on this machine, every instruction set it has
#
# Needs cmake, and for the first form Debian's packages g++-aarch64-linux-gnu and qemu-user. The build folder is kept in
# $PYENGINE_CHECK_BUILD (default: build/op_checks_*) for quick repeats. The engine needs CUDA's headers, below $CUDA_HOME
# (default: /usr/local/cuda), and is left out without them.
set -euo pipefail

root="$(cd "$(dirname "$0")/.." && pwd)"
mode="${1:-aarch64}"
build="${PYENGINE_CHECK_BUILD:-$root/build/op_checks_$mode}"
options=(-DPYENGINE_WERROR=ON)
runner=()
case "$mode" in
  native) ;;
  aarch64)
    for program in aarch64-linux-gnu-g++ qemu-aarch64; do
      if ! command -v "$program" >/dev/null; then
        echo "check_aarch64: $program is missing (apt-get install g++-aarch64-linux-gnu qemu-user)" >&2
        exit 2
      fi
    done
    options+=(-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++)
    runner=(qemu-aarch64 -cpu cortex-a53)
    ;;
  *)
    echo "usage: $0 [native]" >&2
    exit 2
    ;;
esac

cmake -S "$root/tests/ops/aarch64" -B "$build" "${options[@]}" >/dev/null
cmake --build "$build" --parallel 2

failed=0
for source in "$root"/tests/ops/aarch64/check_*.cpp; do
  name="$(basename "$source" .cpp)"
  echo "== $name"
  "${runner[@]}" "$build/$name" || failed=1
done

# Builds check_engine in folder $1 with the further options of CMake, and prints the program's path.
build_engine() {
  local folder="$1"
  shift
  cmake -S "$root/tests/simt/standalone" -B "$folder" -DPYENGINE_WERROR=ON -DCUDA_INCLUDE="$cuda/include" "$@" >/dev/null
  cmake --build "$folder" --parallel 2 >/dev/null
  echo "$folder/check_engine"
}

cuda="${CUDA_HOME:-/usr/local/cuda}"
if [ ! -e "$cuda/include/cuda_bf16.h" ]; then
  echo "== check_engine: left out, $cuda has no CUDA headers (set CUDA_HOME)"
else
  echo "== check_engine"
  here="$(build_engine "$build/engine_here")"
  "$here" >"$build/engine_here.txt"
  if [ "$mode" = aarch64 ]; then
    there="$(build_engine "$build/engine" "${options[@]}" -DCMAKE_EXE_LINKER_FLAGS=-static)"
    "${runner[@]}" "$there" >"$build/engine.txt"
    diff "$build/engine_here.txt" "$build/engine.txt" || failed=1
  fi
fi

if [ "$failed" -ne 0 ]; then
  echo "check_aarch64: FAILED" >&2
fi
exit "$failed"
