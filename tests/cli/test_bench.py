"""`pyengine bench` from the outside: tables, the report, the numbers, errors. No test looks at how fast anything is."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyengine.bench.load import BEFORE_SUBMIT
from pyengine.cli.bench import Files, plan_from, run_batching
from pyengine.errors import InvalidRequest
from pyengine.scheduler.verdict import Reason
from pyengine.simulate.figures import MissingExtra

Run = Callable[..., Any]
SMALL = ("--max-batch", "2", "--rates", "0.8,1.5", "-p", "static best-fit", "--plane", "fifo deadline")
FIGURES = ("batch-size", "latency", "waiting", "plane", "worst")


@pytest.fixture(scope="module")
def finished(run: Run, built_in: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """One small run of the whole command, and its folder."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("bench")
    files = ("-o", f"{folder}/r.html", "--json", f"{folder}/n.json", "--figures", f"{folder}/figures")
    finished = run("bench", "batching", "--quick", "--seconds", "0.05", *SMALL, *files, *built_in)
    assert finished.code == 0, finished.err
    return finished, folder


def test_tables_of_all_numbers_are_printed(finished: tuple[Any, Path]) -> None:
    shown, _ = finished
    for title in ("Decode steps: ", "Latency against request rate", "Seconds of waiting", "All policies at 90%"):
        assert title in shown.out
    assert re.search(r"^ static +80% ", shown.out, re.MULTILINE)


def test_the_report_is_one_page_with_every_figure_and_needs_nothing_else(finished: tuple[Any, Path]) -> None:
    page = (finished[1] / "r.html").read_text(encoding="utf-8")
    for name in FIGURES:
        assert f'<figure id="figure-{name}"><svg' in page
    assert not re.search(r'(src|href)="(?!#)', page.replace("xlink:href", "href")), "it refers to other files"
    ids = re.findall(r' id="([^"]+)"', page)
    for target in set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page)):
        assert target in ids
    for text in ("kv_cache_memory = ", "Poisson", "client&#x27;s clock", "The pool is that small on purpose"):
        assert text in page


def test_figures_come_as_files_too(finished: tuple[Any, Path]) -> None:
    for name in FIGURES:
        assert b"<svg" in (finished[1] / "figures" / f"{name}.svg").read_bytes()


def test_the_numbers_are_all_there_and_name_their_policies_and_reasons(finished: tuple[Any, Path]) -> None:
    record = json.loads((finished[1] / "n.json").read_text(encoding="utf-8"))
    assert (record["format"], record["version"]) == ("pyengine bench batching", 1)
    sizes = record["batch_sizes"]
    assert [point["batch_size"] for point in sizes["points"]] == [1, 2]
    assert set(sizes["line"]) == {"base_s", "per_sequence_s", "mean_error"}
    assert sizes["ceilings"]["read_bytes_per_s"] > 0
    assert [(run["policy"], run["rate_share"]) for run in record["loads"]] == [
        ("static", 0.8),
        ("best-fit", 0.8),
        ("static", 1.5),
        ("best-fit", 1.5),
    ]
    assert [run["policy"] for run in record["plane"]] == ["fifo", "deadline"]
    assert set(record["policies"]) == {"static", "best-fit", "fifo", "deadline"}
    reasons = {reason.value for reason in Reason} | {BEFORE_SUBMIT}
    for run in record["loads"] + record["plane"]:
        assert run["num_finished"] + sum(run["refusals"].values()) == run["num_requests"] == record["num_requests"]
        assert set(run["waiting_s"]) <= reasons
        assert run["ttft"]["p50"] <= run["ttft"]["p99"]
    assert set(record["worst"]) == {"static", "best-fit"}
    for requests in record["worst"].values():
        for request in requests:
            assert {what for _, _, what in request["slices"]} <= reasons | {"prefill", "decode"}
    assert record["setting"]["num_blocks"] == 64


def test_without_load_only_batch_sizes_are_measured(run: Run, built_in: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "r.html"
    shown = run("bench", "batching", "--quick", "--no-load", "--max-batch", "1", "-o", str(page), *built_in)
    assert shown.code == 0, shown.err
    assert "Latency" not in shown.out
    assert "figure-batch-size" in page.read_text(encoding="utf-8")
    assert "figure-plane" not in page.read_text(encoding="utf-8")


def test_a_saved_profile_can_be_simulated_with(run: Run, built_in: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    saved = run("bench", "--save-profile", str(path), "--seconds", "0.1", *built_in)
    assert saved.code == 0, saved.err
    assert "ns_per_decode_seq" in saved.out
    sizes = ("--prompt-tokens", "50", "--output-tokens", "10", "--max-tokens", "20")
    simulated = run("simulate", "--profile", str(path), "-n", "20", *sizes)
    assert simulated.code == 0, simulated.err
    assert "simulated" in simulated.out


def test_without_matplotlib_nothing_is_measured_and_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    measured = []
    monkeypatch.setattr("pyengine.cli.bench.measure_batching", lambda *arguments: measured.append(arguments))
    with pytest.raises(MissingExtra, match=r"pyengine-llm\[bench\]"):
        run_batching(None, {}, plan(), Files(str(tmp_path / "r.html"), None, None))
    assert not measured


def plan(**given: Any) -> Any:
    names = ("max_batch", "rates", "policies", "plane", "seconds", "seeds", "seed")
    return plan_from(quick=True, with_load=True, **{**dict.fromkeys(names), **given})


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("rates", {"rates": "0.5,fast"}),
        ("rates", {"rates": "-1"}),
        ("rates", {"rates": ""}),
        ("max_batch", {"max_batch": 0}),
        ("seconds", {"seconds": 1e9}),
        ("policies", {"policies": "best"}),
        ("policies", {"plane": "fifo fifo"}),
    ],
)
def test_bad_options_are_refused_by_name(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan(**given)
    assert refused.value.field == field


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = run("bench", "batching", "-o", str(tmp_path / "missing" / "r.html"))
    assert (shown.code, shown.out) == (2, "")
    assert "there is no folder" in shown.err
    shown = run("bench", "--save-profile", str(tmp_path))
    assert (shown.code, shown.out) == (2, "")
    assert "it is a folder" in shown.err
    shown = run("bench", "--save-profile", str(tmp_path / "p.json"), "--seconds", "0")
    assert (shown.code, shown.out) == (2, "")
    assert "--seconds is 0" in shown.err


def test_a_profile_and_a_command_are_not_both_taken(run: Run) -> None:
    shown = run("bench", "--save-profile", "p.json", "batching")
    assert (shown.code, shown.out) == (2, "")
    assert "--save-profile" in shown.err
