"""Tests of the parts of the peer benchmark that compute: limits, ratios, prompts, GGUF, failing workers; no timing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from pyengine.checkpoint.gguf_file import in_hf_rotary_order
from pyengine.models import llama

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import bench_peers  # noqa: E402
from peers import limits, report, tables, worker  # noqa: E402
from peers.gguf_writer import in_gguf_rotary_order, write_gguf  # noqa: E402

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MACHINE = limits.Ceilings(read_gb_s=83.0, dot_gflop_s=1075.0, fp32_gflop_s=525.0)
PLAN = report.Plan(batches=(1, 32), steps=64, rounds=2, threads=2)


def measured_report(**rates: dict[str, list[float]]) -> report.Report:
    ceilings = [MACHINE, MACHINE]
    peers = [report.Peer(name.replace("_", "."), rates=values) for name, values in rates.items()]
    return report.Report("m", PLAN, peers, ceilings, report.limits_of(SMOLLM2, PLAN, ceilings), 0.03)


def test_sizes_are_those_of_the_published_model() -> None:
    sizes = limits.sizes_of(SMOLLM2)
    norms = 61 * 576
    assert sizes.layer_parameters + sizes.head_parameters + norms == 134_515_008
    assert sizes.kv_bytes_per_token == 23_040


def test_decode_is_bound_by_memory_when_few_and_by_arithmetic_when_many_sequences_share_a_step() -> None:
    sizes = limits.sizes_of(SMOLLM2)
    one, many = (limits.decode_limit(sizes, batch, 192, MACHINE) for batch in (1, 32))
    assert one.overlapped == pytest.approx(83e9 / (2 * 134.48e6 + 192 * 23_040), rel=1e-3)
    assert many.overlapped == pytest.approx(1075e9 / (2 * 134.48e6), rel=1e-3)
    assert one.serial < one.overlapped


def test_prefill_counts_the_head_for_one_token_only() -> None:
    sizes = limits.Sizes(layer_parameters=1000, head_parameters=10**6, kv_bytes_per_token=0)
    machine = limits.Ceilings(read_gb_s=1e9, dot_gflop_s=1e-9, fp32_gflop_s=1e-9)  # arithmetic alone counts
    assert limits.prefill_limit(sizes, 1000, machine).overlapped == pytest.approx(1000 / (2 * (10**6 + 10**6)))


def test_a_round_that_is_slow_for_all_does_not_change_the_ratio() -> None:
    assert limits.paired_ratio([20.0, 2.0, 30.0], [10.0, 1.0, 15.0]) == 2.0


@pytest.mark.parametrize(
    ("a", "b", "shared"), [([1, 2, 3], [1, 2, 4], 2), ([1], [1, 2], 1), ([], [1], 0), ([5], [6], 0)]
)
def test_common_prefix_ends_where_tokens_differ(a: list[int], b: list[int], shared: int) -> None:
    assert limits.common_prefix(a, b) == shared


def test_a_goal_takes_the_worst_figure_and_the_best_peer() -> None:
    rates = {
        "pyengine": {"decode 1": [12.0], "decode 32": [90.0]},
        "llama.cpp": {"decode 1": [10.0], "decode 32": [30.0]},
        "openvino": {"decode 1": [8.0], "decode 32": [60.0]},
    }
    goal = limits.Goal("both", ("decode 1", "decode 32"), None, 1.2)
    assert limits.lowest_ratio(goal, rates) == pytest.approx(1.2)
    assert limits.lowest_ratio(limits.Goal("x", ("decode 32",), "openvino", 1.0), rates) == pytest.approx(1.5)


def test_a_goal_against_a_peer_that_is_not_there_is_not_measured() -> None:
    goal = limits.Goal("x", ("decode 1",), "llama.cpp", 1.0)
    assert limits.lowest_ratio(goal, {"pyengine": {"decode 1": [1.0]}}) is None
    assert limits.lowest_ratio(goal, {"llama.cpp": {"decode 1": [1.0]}}) is None


def test_prompts_have_the_asked_length_and_differ_between_sequences_and_rounds() -> None:
    prompts = bench_peers.Prompts(list(range(220)))
    assert len(prompts.request("prefill", 64, 0)["prompt"]) == report.PREFILL_TOKENS
    first, second = (prompts.request("decode 32", 64, n)["prompts"] for n in (0, 40))
    assert {len(prompt) for prompt in first + second} == {report.DECODE_PROMPT_TOKENS}
    assert len({tuple(prompt) for prompt in first + second}) == 64


def test_every_worker_begins_as_often_as_the_others() -> None:
    plan = report.Plan(batches=(1, 4, 8), steps=1, rounds=3, threads=1)  # 4 figures
    firsts = [order[0] for _, _, order in bench_peers.turns(["a", "b", "c"], plan)]  # type: ignore[list-item]
    assert sorted(firsts) == sorted("abc" * 4)


def test_q_and_k_rows_survive_the_way_to_gguf_and_back() -> None:
    spec = llama.spec_from_config(TINY)
    rows = np.arange(16 * 16, dtype=np.float32).reshape(16, 16)
    there = in_gguf_rotary_order(rows, spec.num_heads)
    assert not np.array_equal(there, rows)
    assert np.array_equal(in_hf_rotary_order("layers.0.q", there, spec), rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gguf_file_holds_the_folders_weights_and_the_templates_fields(tmp_path: Path, dtype: str) -> None:
    gguf = pytest.importorskip("gguf")
    from pyengine.checkpoint import open_checkpoint
    from pyengine.checkpoint.safetensors_files import write_safetensors
    from pyengine.models.spec import role_shapes

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    shapes = {
        llama.FAMILY.tensor_name(role): shape for role, shape in role_shapes(llama.spec_from_config(TINY)).items()
    }
    random = np.random.default_rng(3)
    halves = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    stored = [(name, (values.view(np.uint32) >> 16).astype(np.uint16)) for name, values in halves.items()]
    write_safetensors(
        folder / "model.safetensors", {name: ("BF16", shape) for name, shape in shapes.items()}, iter(stored)
    )
    template = gguf.GGUFWriter(tmp_path / "template.gguf", "llama")
    template.add_block_count(2)
    template.add_token_list(["a", "b"])
    template.add_file_type(3)
    for write in (template.write_header_to_file, template.write_kv_data_to_file, template.write_tensors_to_file):
        write()
    template.close()

    write_gguf(folder, tmp_path / "template.gguf", dtype, tmp_path / "out.gguf")

    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert reader.fields["llama.block_count"].contents() == 2
    assert reader.fields["general.file_type"].contents() != 3
    made = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    assert len(made) == len(shapes)
    tolerance = 0 if dtype == "bfloat16" else 2**-11
    with open_checkpoint(folder) as checkpoint:
        down = (checkpoint.tensor("layers.1.down").array.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(made["blk.1.ffn_down.weight"], down, rtol=tolerance)
    assert [path.name for path in tmp_path.glob("*partial*")] == []


def test_a_peer_without_its_package_gets_a_row_that_says_what_to_install(tmp_path: Path) -> None:
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')  # -S: without site-packages
    bare.chmod(0o755)
    peer = report.Peer("transformers")
    setup = {"folder": "", "gguf_bfloat16": None, "gguf_float16": None, "threads": 1, "max_seqs": 1, "context": 640}
    assert bench_peers.started(peer.name, str(bare), PLAN, setup, bench_peers.Prompts([1]), peer) is None
    assert peer.problem is not None
    assert "not installed (torch): pip install torch transformers" in peer.problem


@pytest.mark.parametrize("python", ["/nonexistent/python", "/bin/false"])
def test_a_peer_whose_interpreter_does_not_run_gets_a_row_with_the_reason(python: str) -> None:
    peer = report.Peer("transformers")
    assert bench_peers.started(peer.name, python, PLAN, {}, bench_peers.Prompts([1]), peer) is None
    assert peer.problem


def test_a_worker_counts_everything_but_pip_and_setuptools(tmp_path: Path) -> None:
    for name, size in (("numpy/core.so", 70), ("pip/x.py", 500), ("pip-1.dist-info/RECORD", 40), ("a.py", 3)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    assert worker.installed_bytes(tmp_path) == 73


def test_tables_and_json_show_measured_and_missing_peers_alike(capsys: pytest.CaptureFixture[str]) -> None:
    figures = ("prefill", "decode 1", "decode 32")
    made = measured_report(
        pyengine={f: [300.0, 310.0] for f in figures}, llama_cpp={f: [100.0, 100.0] for f in figures}
    )
    made.peers.append(report.Peer("openvino", problem="not installed: pip install openvino-genai"))
    tables.show(made)
    shown = capsys.readouterr().out
    assert "3.05" in shown
    assert "pip install openvino-genai" in shown
    values = json.loads(json.dumps(report.as_json(made)))
    assert values["ratios"]["llama.cpp"]["decode 32"] == pytest.approx(3.05)
    assert {goal["goal"]: goal["ratio"] for goal in values["goals"]}["decode, every batch"] is None


@pytest.mark.parametrize(("load", "warns"), [(0.02, False), (0.6, True)])
def test_figures_from_a_busy_machine_carry_a_warning(
    load: float, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    made = measured_report(pyengine={f: [300.0, 310.0] for f in PLAN.figures})
    made.others_load = load
    tables.show(made)
    assert ("repeat this when it is quiet" in capsys.readouterr().out) == warns


@pytest.mark.parametrize(
    "arguments", [["--peers", "nobody"], ["--python", "llama.cpp"], ["--batches", "1,x"], ["--rounds", "0"]]
)
def test_a_command_line_that_makes_no_sense_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_peers.parsed_arguments(arguments)
    assert arguments[0] in capsys.readouterr().err
