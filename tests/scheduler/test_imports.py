"""The scheduler runs without tokenizers, models or devices; NumPy on the host is all it needs."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("cupy", "tokenizers", "safetensors", "jinja2", "pyengine.models", "pyengine.backends", "pyengine.text")


def test_the_scheduler_imports_no_device_no_tokenizer_and_no_model() -> None:
    code = f"import sys, pyengine.scheduler; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
