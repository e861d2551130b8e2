"""The functions of tools/compare_hf.py, which is no package, for the tests beside this file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TOOL_FILE = Path(__file__).resolve().parents[2] / "tools" / "compare_hf.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_hf", TOOL_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


compare_hf = _load()
OurModel = compare_hf.OurModel
load_hf = compare_hf.load_hf
hf_forward = compare_hf.hf_forward
relative_difference = compare_hf.relative_difference
mean_kl = compare_hf.mean_kl
LOGITS_TOLERANCE = compare_hf.LOGITS_TOLERANCE
KL_RATIO_TOLERANCE = compare_hf.KL_RATIO_TOLERANCE
