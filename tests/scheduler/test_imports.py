"""The scheduler runs without arrays, tokenizers, models or devices."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("numpy", "tokenizers", "safetensors", "jinja2", "pyengine.models", "pyengine.backends", "pyengine.text")


def test_the_scheduler_imports_no_array_library_no_tokenizer_and_no_model() -> None:
    code = f"import sys, pyengine.scheduler; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
