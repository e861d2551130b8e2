#!/usr/bin/env bash
# Builds sdist and wheel (the wheel from the sdist), checks both: tools/release_check.sh [--cuda] [folder]. Needs the extra
# [dev]. With --cuda the CUDA backend is in the wheel, for all architectures, and auditwheel repairs it as for a release.
set -euo pipefail
cuda=false
export PYENGINE_CUDA=OFF
[ "${1:-}" = --cuda ] && { cuda=true; PYENGINE_CUDA=ON; shift; }
out=${1:-dist}
python -m build --outdir "$out" . >"$out.log" 2>&1 || { tail -n 60 "$out.log"; exit 1; }
ls -l "$out"
sdist=$(ls "$out"/*.tar.gz)
wheel=$(ls "$out"/*.whl)
in_sdist=$(tar tzf "$sdist")
in_wheel=$(python -m zipfile -l "$wheel")
for file in CMakeLists.txt csrc/ops.h csrc/build_facts.h.in csrc/decoder.cpp csrc/cuda/CMakeLists.txt csrc/cuda/decide.cmake \
    csrc/cuda/device.h csrc/cuda/ptx.h csrc/simt/CMakeLists.txt csrc/simt/simt.h pyengine/engine.py weights/stories-1m/model.safetensors README.md LICENSE; do
    grep -q "/$file\$" <<<"$in_sdist" || { echo "The sdist lacks $file."; exit 1; }
done
for file in pyengine/engine.py pyengine/py.typed pyengine/weights/stories-1m/model.safetensors; do
    grep -q "^$file " <<<"$in_wheel" || { echo "The wheel lacks $file."; exit 1; }
done
if grep -E '^(tests|tools|csrc|docs)/' <<<"$in_wheel"; then
    echo "The wheel holds files that belong to developers only."
    exit 1
fi
if $cuda; then
    grep -q '^pyengine/_cuda\.' <<<"$in_wheel" || { echo "The wheel lacks the module _cuda."; exit 1; }
fi
if command -v auditwheel >/dev/null; then
    auditwheel show "$wheel"
    if $cuda; then
        rm -rf "$out/repaired"
        auditwheel repair --wheel-dir "$out/repaired" "$wheel"
        wheel=$(ls "$out"/repaired/*.whl)
        if python -m zipfile -l "$wheel" | grep -E 'cudart|cublas|libcuda'; then
            echo "A library of CUDA was taken into the wheel."
            exit 1
        fi
    fi
fi
python tools/measure_install.py --wheel "$wheel"
