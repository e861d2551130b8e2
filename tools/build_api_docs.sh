#!/usr/bin/env bash
# The API reference from the docstrings: tools/build_api_docs.sh [folder]. A warning is an error.
set -euo pipefail
out=${1:-docs/api}
# pdoc looks into the module itself for what __all__ names: the names that are imported on first use are used first.
python -W error::UserWarning -c '
import sys
import pyengine
from pdoc.__main__ import cli
for name in pyengine.__all__:
    getattr(pyengine, name)
cli(sys.argv[1:])
' --docformat google -o "$out" pyengine
echo "API reference: $out/index.html"
