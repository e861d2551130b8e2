"""Weights are mapped and packed once: loading and running a real model takes little more than its weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ..process_memory import PEAK_BYTES

SCRIPT = (
    PEAK_BYTES
    + """
import json
from pyengine import Engine, SamplingParams
from pyengine.checkpoint import open_checkpoint, resolve_model

folder = resolve_model("smollm2-135m-instruct").folder
engine = Engine(folder, kv_cache_memory="64MiB", num_threads=2)
engine.generate([[5] * 1500, [7] * 300], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
limits = engine.limits
print(json.dumps({
    "peak": peak_bytes(),
    "weights": open_checkpoint(folder).num_bytes,
    "kv": engine.model.backend.kv_block_bytes(limits.block_size) * limits.num_blocks,
}))
"""
)


@pytest.mark.network
@pytest.mark.skipif(not os.environ.get("PYENGINE_NETWORK_TESTS"), reason="set PYENGINE_NETWORK_TESTS=1 to fetch it")
def test_peak_memory_is_at_most_a_quarter_more_than_the_weights_beside_the_kv_pool_and_150_mb() -> None:
    # Converting the model, where it is not in the cache yet, happens in a process of its own.
    resolve = "from pyengine.checkpoint import resolve_model; resolve_model('smollm2-135m-instruct')"
    subprocess.run([sys.executable, "-c", resolve], check=True, cwd=os.path.sep)
    shown = subprocess.run([sys.executable, "-c", SCRIPT], check=True, cwd=os.path.sep, capture_output=True, text=True)
    measured = json.loads(shown.stdout)
    assert measured["weights"] > 250e6
    assert measured["peak"] <= 1.25 * measured["weights"] + measured["kv"] + 150e6, measured
