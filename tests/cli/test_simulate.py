"""`pyengine simulate` from the outside: tables, JSON, errors and what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyengine.cli.simulate import run_simulate
from pyengine.errors import InvalidRequest

Run = Callable[..., Any]
TRACE = "arrival_s,prompt_tokens,output_tokens,region\n" + "".join(
    f"{i / 10},{50 + i},{5 + i % 7},x\n" for i in range(40)
)


def test_policies_stand_beside_each_other_in_a_table(run: Run) -> None:
    finished = run("simulate", "-n", "60", "--rate", "20", "--policies", "fifo q:best-fit,capacity_quantile=0.5")
    assert (finished.code, finished.err) == (0, "")
    lines = finished.out.splitlines()
    assert lines[0] == "workload  60 requests, 20/s (Poisson)"
    assert lines[1] == "device    example (made up), simulated"
    assert lines[3].split() == ["fifo", "q"]
    assert lines[4].startswith("TTFT p50 [s]")


def test_json_has_the_runs_the_summary_and_everything_to_repeat_them(run: Run, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    arguments = ("simulate", str(tmp_path / "trace.csv"), "--speed", "2", "--json", "-p", "fifo oracle", "-j", "2")
    finished = run(*arguments, "--profile", "h100-8b", "--replicas", "2", "--router", "least-work")
    assert finished.code == 0
    assert finished.err.endswith("trace.csv: not used: region\n")
    record = json.loads(finished.out)
    assert record["workload"] == "trace.csv, 2 times as fast"
    assert (record["device"]["name"], record["device"]["origin"]) == ("h100-8b", "paper")
    assert (record["replicas"], record["router"]) == (2, "least-work")
    assert [entry["policy"] for entry in record["summary"]] == ["fifo", "oracle"]
    assert [entry["num_finished"] for entry in record["runs"]] == [40, 40]
    assert record["runs"][0]["device"] == "h100-8b (paper profile)"
    assert record["settings"]["num_blocks"] == record["device"]["num_blocks"]
    assert record["never_fit"] == []


def test_names_can_be_listed(run: Run) -> None:
    shown = run("simulate", "--list").out
    assert "h200-8b" in shown
    assert "Computed, not measured" in shown
    assert "best-fit-guaranteed" in shown
    assert set(json.loads(run("simulate", "--list", "--json").out)) == {"profiles", "policies"}


def test_a_fault_in_a_trace_is_one_line_and_exit_code_2(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n1,five,5\n")
    finished = run("simulate", str(tmp_path / "t.csv"))
    message = "t.csv, line 3, column prompt_tokens: 'five' is not an integer number of tokens."
    assert (finished.code, finished.out, finished.err) == (2, "", f"pyengine: error: {message}\n")


def simulated(trace: str | None = None, policies: str = "fifo", **given: Any) -> int:
    from pyengine.cli.simulate import Report
    from pyengine.cli.simulate_options import DeviceOptions, WorkloadOptions

    names = ("profile", "replicas", "router", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "jitter")
    device = {name: given.pop(name) for name in names if name in given}
    jobs, figure_format = given.pop("jobs", 1), given.pop("figure_format", None)
    long_from = given.pop("long_from", None)
    return run_simulate(
        trace,
        policies,
        WorkloadOptions(**given),
        DeviceOptions(**device),
        Report(False, "figures" if figure_format else None, figure_format or "png"),
        long_from=long_from,
        jobs=jobs,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cv": 3.0}, "--cv is 3.0, but that says nothing with --arrivals poisson"),
        ({"arrivals": "closed", "rate": 3.0}, "--rate is 3.0, but that says nothing with --arrivals closed"),
        ({"arrivals": "regular"}, "--arrivals is 'regular'; it must be one of poisson"),
        ({"speed": 2.0}, "--speed is 2.0, but there is no TRACE"),
        ({"prefix_share": 0.2}, "--prefix-share is 0.2, but nothing is shared"),
        ({"trace": "t.csv", "seeds": 3}, "--seeds is 3, but TRACE says what arrives when"),
        ({"seeds": 0}, "--seeds is 0; it must be an integer >= 1"),
        ({"seed": -1}, "--seed is -1; it must be an integer >= 0"),
        ({"replicas": 0}, "--replicas is 0; it must be an integer >= 1"),
        ({"router": "best"}, "--router is 'best'; it must be one of round-robin, least-work, prefix-affinity"),
        ({"jobs": 0}, "--jobs is 0"),
        ({"profile": "gpu"}, "--profile is 'gpu'; it must be a file or one of"),
        ({"figure_format": "gif"}, "--figure-format is 'gif'"),
        ({"policies": "order=random"}, "--policies: Policy order=random: order is 'random'"),
        ({"policies": "zz"}, "--policies has 'zz'; it must be one of static"),
        ({"policies": "fifo,colour=3"}, "--policies sets 'colour'; the settings are"),
        ({"policies": "fifo fifo"}, "--policies: The policy fifo is there twice"),
        ({"policies": "fifo,window=x"}, "--policies: window is 'x'"),
        ({"profile": "none.json"}, "--profile: The profile 'none.json' cannot be read"),
        ({"arrivals": "closed", "users": 0}, "--users is 0; it must be an integer >= 1"),
        ({"requests": 0}, "--requests is 0; it must be an integer >= 1"),
        ({"tenants": 0}, "--tenants is 0; it must be an integer >= 1"),
        ({"prefixes": -1}, "--prefixes is -1; it must be an integer >= 0"),
        ({"arrivals": "on-off", "on_s": 0.0}, "--on-s is 0.0; it must be a number > 0"),
        ({"prompt_tokens": "many"}, "--prompt-tokens is 'many'; write a number"),
        ({"prompt_tokens": "1_0"}, "--prompt-tokens is '1_0'; write a number"),
        ({"policies": "fifo,window=1_0"}, "--policies: window is '1_0'"),
        ({"policies": "fifo,watermark=nan"}, "--policies: watermark is 'nan'"),
        ({"max_tokens": 0}, "--max-tokens is 0; it must be an integer >= 1"),
        ({"long_from": -1}, "--long-from is -1; it must be an integer >= 0"),
        ({"jitter": 2.0}, "--jitter is 2.0; it must be a number from 0 to 1"),
        ({"num_blocks": 0}, "Policy fifo: --num-blocks is 0"),
        ({"max_num_batched_tokens": 9}, "Policy fifo: max_num_seqs is 256, more than --max-num-batched-tokens 9"),
        ({"policies": "fifo,num_blocks=0", "num_blocks": 5}, "--policies: Policy fifo,num_blocks=0: num_blocks is 0"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_runs(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        simulated(**given)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("name", "value"), [("speed", 0.0), ("requests", 0), ("prefix_share", 2.0)])
def test_options_of_a_trace_are_named_as_they_were_typed(tmp_path: Path, name: str, value: float) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    with pytest.raises(InvalidRequest) as caught:
        simulated(str(tmp_path / "t.csv"), **{name: value})
    assert str(caught.value).startswith(f"--{name.replace('_', '-')} is {value}; it must be ")
    assert caught.value.field == name


def test_prompts_that_can_never_fit_are_warned_of_with_the_line_of_the_first(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = ("0,32,3", "", "1,33,3", "2,900,3", "3,40,3")
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    arguments = ("simulate", str(path), "--num-blocks", "2")
    finished = run(*arguments, "--policies", "fifo", "--json")
    assert finished.code == 0
    assert finished.err == (
        f"warning: {path}: 3 of 4 prompts can never fit and are refused: the device takes up to 32 tokens; the first, "
        "line 4, has 33.\n"
    )
    record = json.loads(finished.out)
    assert record["never_fit"] == [
        {
            "policies": ["fifo"],
            "most_tokens": 32,
            "num_prompts": 3,
            "num_requests": 4,
            "first": 1,
            "first_tokens": 33,
            "first_line": 4,
        }
    ]
    assert record["runs"][0]["refusals"] == {"NeverFits": 3}
    both = run(*arguments, "--policies", "fifo big:fifo,num_blocks=50")
    first, second = both.err.splitlines()
    assert first.startswith(f"warning: {path}: 3 of 4 prompts can never fit with fifo and are refused")
    assert second.startswith(f"warning: {path}: 1 of 4 prompts can never fit with big and are refused")
    assert second.endswith("up to 800 tokens; the first, line 5, has 900.")


def test_showing_help_imports_no_simulation() -> None:
    code = (
        "import sys\nfrom pyengine.cli import main\nsys.argv = ['pyengine', 'simulate', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nprint('\\n'.join(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    modules = set(done.stdout.split("\n"))
    assert "--policies" in done.stdout
    assert modules & {"numpy", "matplotlib", "pyengine.simulate", "pyengine.scheduler"} == set()
