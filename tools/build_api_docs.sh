#!/usr/bin/env bash
# The API reference from the docstrings: tools/build_api_docs.sh [folder]. A warning is an error.
set -euo pipefail
out=${1:-docs/api}
python -W error::UserWarning -m pdoc --docformat google -o "$out" pyengine
echo "API reference: $out/index.html"
