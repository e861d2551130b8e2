"""tools/roofline.py: its counts by hand, and the page that shows them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def roofline() -> ModuleType:
    spec = importlib.util.spec_from_file_location("roofline", ROOT / "tools" / "roofline.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["roofline"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_that_the_tool_prints(roofline: ModuleType) -> None:
    assert roofline.PAGE.read_text() == roofline.page_with(roofline.text())


def test_a_decode_step_of_llama_3_8b_by_hand(roofline: ModuleType) -> None:
    model, step = roofline.MODELS[0], roofline.Step("", 1, 1, 1000)
    found = {cost.op: cost for cost in roofline.costs(model, step)}
    down = found["gemm down"]
    assert down.bytes == 32 * 2 * (4096 * 14336 + 14336 + 4096)
    assert down.flops == 32 * 2 * 4096 * 14336
    # Keys and values of 8 heads of 128 in 32 layers: 131,072 bytes a token; the query and the result beside them.
    assert found["attention"].bytes == 1000 * 131_072 + 32 * 2 * 2 * 4096
    assert found["attention"].flops == 32 * 4 * 4096 * 1000
    parameters = sum(cost.flops for op, cost in found.items() if op.startswith("gemm")) / 2
    assert parameters == 8_030_261_248 - 128256 * 4096 - 65 * 4096  # all but the embedding and the norms' weights


def test_a_prompt_reads_keys_once_for_each_tile_and_computes_half_of_the_square(roofline: ModuleType) -> None:
    model, step = roofline.MODELS[0], roofline.Step("", 1, 512, 512)
    cost = roofline.attention(model, step)
    assert cost.flops == 32 * 4 * 4096 * sum(range(1, 513))
    # 16 query tokens of 4 heads a tile, 32 tiles, each over 256.5 keys on average.
    assert cost.bytes == 32 * (2 * 2 * 1024 * 256.5 * 32 + 2 * 2 * 512 * 4096)


def test_the_limit_is_the_slower_of_moving_and_computing(roofline: ModuleType) -> None:
    gpu = roofline.GPU("one", 1e9, 100.0, 1000.0)
    assert roofline.Cost("", 1, 50, 100).limit_s(gpu) == 0.5
    assert roofline.Cost("", 1, 50, 2000).limit_s(gpu) == 2.0
