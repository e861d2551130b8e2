"""What is shown of the results: the table, the summary over seeds, and figures."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from pyengine.errors import InvalidRequest
from pyengine.simulate.cluster import Setup
from pyengine.simulate.experiment import Experiment
from pyengine.simulate.figures import FORMATS, MissingExtra, load_matplotlib, save_figures
from pyengine.simulate.policies import parse_policies
from pyengine.simulate.results import FIGURES, RunResult, figure, summary
from pyengine.simulate.table import table
from tests.simulate.conftest import SETTINGS, small_generator, small_profile


@pytest.fixture(scope="module")
def results() -> list[RunResult]:
    setup = Setup(small_profile(), max_tokens=200, long_from=300)
    policies = tuple(parse_policies("fifo best-fit"))
    return Experiment(small_generator(num_requests=60), policies, setup, SETTINGS, seeds=(0, 1, 2)).run_all()


def test_the_summary_has_median_least_and_most_of_each_figure(results: list[RunResult]) -> None:
    records = summary(results)
    assert [(record["policy"], record["runs"]) for record in records] == [("fifo", 3), ("best-fit", 3)]
    for name in FIGURES:
        values = [figure(result, name) for result in results[:3]]
        if name == "itl_over_limit":
            assert values == [None] * 3, "there is no limit"
            assert records[0][name] is None
            continue
        low, median, high = sorted(value for value in values if value is not None)
        assert records[0][name] == {"median": median, "low": low, "high": high}, name


def test_the_table_has_a_column_for_each_policy_and_says_where_its_figures_come_from(results: list[RunResult]) -> None:
    lines = table(results).splitlines()
    assert lines[1] == "device    small (made up), simulated"
    assert lines[2] == "seeds     3: median (least to most)"
    header = next(line for line in lines if "best-fit" in line)
    assert header.split() == ["fifo", "best-fit"]
    (row,) = [line for line in lines if line.startswith("TTFT p50 [s]")]
    values = sorted(result.ttft.p50 or 0 for result in results[:3])
    assert f"{values[1]:.3f} ({values[0]:.3f} to {values[2]:.3f})" in row or f"{values[1]:.2f} (" in row
    assert any(line.startswith("  < 300 tokens p99") for line in lines)
    assert any(line.startswith("waiting: mid_step") for line in lines)


def test_policies_that_do_not_fit_beside_each_other_come_below(results: list[RunResult]) -> None:
    narrow = table(results, 60).splitlines()
    assert max(map(len, narrow)) <= 60
    assert len([line for line in narrow if line.startswith("TTFT p50")]) == 2
    assert len([line for line in table(results, 200).splitlines() if line.startswith("TTFT p50")]) == 1


@pytest.mark.parametrize("file_format", FORMATS)
def test_figures_are_files_of_the_format_asked_for(results: list[RunResult], tmp_path: Path, file_format: str) -> None:
    pytest.importorskip("matplotlib")
    paths = save_figures(results, tmp_path / "new" / "folder", file_format, "a <table>")
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>"}
    assert len(paths) == (1 if file_format == "html" else 3)
    for path in paths:
        assert path.read_bytes().startswith(starts[file_format])
    if file_format == "html":
        text = paths[0].read_text(encoding="utf-8")
        assert text.count("<svg") == 3
        assert "a &lt;table&gt;" in text
        assert "small (made up)" in text


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *rest: Any) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    monkeypatch.setattr(sys.modules["pyengine.simulate.figures"], "import_module", refuse)
    with pytest.raises(MissingExtra, match=r'pip install "pyengine-llm\[bench\]"'):
        load_matplotlib()


def test_an_unknown_format_and_a_place_that_cannot_be_written_are_refused(
    results: list[RunResult], tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="figure_format is 'gif'; it must be one of png, svg, html"):
        save_figures(results, tmp_path, "gif", "")
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot be written"):
        save_figures(results, tmp_path / "file" / "folder", "svg", "")
