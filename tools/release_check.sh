#!/usr/bin/env bash
# Builds sdist and wheel (the wheel from the sdist), checks both: tools/release_check.sh [folder]. Needs the extra [dev].
set -euo pipefail
out=${1:-dist}
python -m build --outdir "$out" . >"$out.log" 2>&1 || { tail -n 60 "$out.log"; exit 1; }
ls -l "$out"
sdist=$(ls "$out"/*.tar.gz)
wheel=$(ls "$out"/*.whl)
in_sdist=$(tar tzf "$sdist")
in_wheel=$(python -m zipfile -l "$wheel")
for file in CMakeLists.txt csrc/ops.h csrc/decoder.cpp pyengine/engine.py weights/stories-1m/model.safetensors README.md LICENSE; do
    grep -q "/$file\$" <<<"$in_sdist" || { echo "The sdist lacks $file."; exit 1; }
done
for file in pyengine/engine.py pyengine/py.typed pyengine/weights/stories-1m/model.safetensors; do
    grep -q "^$file " <<<"$in_wheel" || { echo "The wheel lacks $file."; exit 1; }
done
if grep -E '^(tests|tools|csrc|docs)/' <<<"$in_wheel"; then
    echo "The wheel holds files that belong to developers only."
    exit 1
fi
if command -v auditwheel >/dev/null; then
    auditwheel show "$wheel"
fi
python tools/measure_install.py --wheel "$wheel"
