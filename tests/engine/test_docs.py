"""The examples of docs/scheduling.md run as they stand there."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import pyengine

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = re.findall(r"```python\n(.*?)```", (DOCS / "scheduling.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("example", [text for text in EXAMPLES if "Engine(" in text])
def test_an_example_with_an_engine_serves_a_request(example: str) -> None:
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(example, names)
        engine: pyengine.Engine = names["engine"]
        outputs = engine.generate(["One day"] * 3, pyengine.SamplingParams(max_tokens=3, temperature=0.0))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3, 3]
    engine.close()


def test_there_are_examples_of_each_kind() -> None:
    assert sum("class " in text for text in EXAMPLES) == 3
    assert any("engine.explain" in text for text in EXAMPLES)
