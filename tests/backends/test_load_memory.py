"""Loading takes little more than the packed weights, also where they are converted to another dtype."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..engine.conftest import CONFIG, write_model
from ..process_memory import PEAK_BYTES

SCRIPT = (
    PEAK_BYTES
    + """
import sys
import numpy, pyengine.engine
from pyengine import Engine

before = peak_bytes()
engine = Engine(sys.argv[1], dtype=sys.argv[2], kv_cache_memory="1MiB", max_num_batched_tokens=16, max_num_seqs=4)
print(peak_bytes() - before, engine.model.backend.weight_bytes)
"""
)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 MB of float32 in two tensors."""
    config = {**CONFIG, "vocab_size": 78125, "hidden_size": 256, "num_hidden_layers": 1}
    return write_model(tmp_path_factory.mktemp("wide"), config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_peak_is_at_most_a_quarter_more_than_the_weights_and_some_slices(wide_model: Path, dtype: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(wide_model), dtype]
    shown = subprocess.run(command, check=True, cwd="/", capture_output=True, text=True).stdout.split()
    growth, weights = int(shown[0]), int(shown[1])
    assert weights >= 78e6
    assert growth >= weights
    assert growth <= 1.25 * weights + 80e6
