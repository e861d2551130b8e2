"""docs/first-batch.md is what its tool makes of the numbers beside it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_first_batch", ROOT / "tools" / "make_first_batch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_says_what_its_numbers_say(tool: ModuleType) -> None:
    assert tool.made_page() == (ROOT / "docs" / "first-batch.md").read_text(encoding="utf-8")


def test_every_figure_of_the_page_is_there_and_small(tool: ModuleType) -> None:
    page = (ROOT / "docs" / "first-batch.md").read_text(encoding="utf-8")
    figures = re.findall(r"!\[[^]]+\]\((figures/[^)]+)\)", page)
    assert len(figures) == 6
    assert sum((ROOT / "docs" / path).stat().st_size for path in figures) <= tool.MOST_BYTES


@pytest.mark.parametrize(
    ("new", "old", "words"),
    [(1.0, 3.0, "3.0 times lower"), (3.0, 1.5, "2.0 times higher"), (1.0, 1.05, "about the same")],
)
def test_a_comparison_says_which_way_it_falls(tool: ModuleType, new: float, old: float, words: str) -> None:
    assert tool.times(new, old) == words


def test_filling_changes_no_table_no_code_and_no_word(tool: ModuleType) -> None:
    text = "A " + "word " * 40 + "\n\n| a |\n|--|\n| b |\n\n    code  x\n\n1. one\n   two\n2. three\n"
    filled = tool.reflowed(text)
    assert filled.split() == text.split()
    assert "| a |\n|--|\n| b |" in filled
    assert "    code  x" in filled
    assert "1. one two\n2. three\n" in filled
    assert max(map(len, filled.splitlines())) <= 124
