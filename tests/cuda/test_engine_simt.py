"""The whole engine on the CUDA backend, its kernels run by the host: against the CPU backend, and against itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pyengine import DeviceNotAvailable, Engine, EngineFailed, InvalidRequest, ModelError, RequestOutput, SamplingParams
from pyengine.backends.cuda import CudaBackend
from pyengine.backends.cuda_memory import RESERVE_BYTES

from ..engine.conftest import CONFIG, POISON_TOKEN, write_model
from ..simt.device import simt_device
from ..simt.host_cupy import HostCupy

PLAIN = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"kv_cache_memory": "512KiB", "max_num_seqs": 6, "max_num_batched_tokens": 64}
# Plain ones, which are decoded by graphs, and others.
MANY_PARAMS = (
    PLAIN,
    SamplingParams(max_tokens=7, temperature=0.9, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.3, top_k=40, top_p=0.9, seed=12, logprobs=0, ignore_eos=True),
    SamplingParams(
        max_tokens=6,
        temperature=0.7,
        min_p=0.02,
        seed=13,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logprobs=2,
        ignore_eos=True,
    ),
    SamplingParams(max_tokens=5, temperature=0.0, logit_bias={7: 3.0, 9: -2.0}, min_tokens=3, logprobs=1),
)
LENGTHS = (1, 15, 16, 17, 40)


@pytest.fixture
def cupy(simt: ModuleType) -> Iterator[HostCupy]:
    with simt_device(simt) as machine:
        yield machine
        machine.check_guards()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


def prompts(count: int = len(MANY_PARAMS)) -> list[list[int]]:
    return [[(31 * i + 7 * j) % 297 + 2 for j in range(LENGTHS[i % len(LENGTHS)])] for i in range(count)]


def ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [completion.token_ids for output in outputs for completion in output.outputs]


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """Ids and log-probabilities, to the last bit."""
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [(c.token_ids, c.logprobs) for output in outputs for c in output.outputs]


def cuda_backend(engine: Engine) -> CudaBackend:
    backend = engine.model.backend
    assert isinstance(backend, CudaBackend)
    return backend


# Against the CPU backend ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_of_all_kinds_give_the_ids_of_the_cpu_backend(cupy: HostCupy, folder: Path, overlap: bool) -> None:
    with Engine(folder, device="cpu", num_threads=1, **SETTINGS) as engine:
        expected = engine.generate(prompts(), MANY_PARAMS)
    with Engine(folder, device="simt", overlap=overlap, **SETTINGS) as engine:
        assert "simt" in engine.model.backend.description
        outputs = engine.generate(prompts(), MANY_PARAMS)
    assert ids(outputs) == ids(expected)
    for output, other in zip(outputs, expected, strict=True):
        for mine, theirs in zip(output.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True):
            # fp32 sums of up to 96 products in another order, through 2 layers, in units of the logits (below 16).
            assert mine.logprob == pytest.approx(theirs.logprob, abs=2e-4)
            assert [token_id for token_id, _ in mine.top] == [token_id for token_id, _ in theirs.top]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.03), ("bfloat16", 0.25)])
def test_log_probabilities_of_a_prompt_are_those_of_the_cpu_backend_in_half_precision(
    cupy: HostCupy, folder: Path, dtype: str, tolerance: float
) -> None:
    """The tolerances are 2**-9 and 2**-6 of the largest logits (below 16): some roundings of 11 and 8 bits a layer."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    prompt = [(17 * j) % 297 + 2 for j in range(45)]
    found = []
    for device in ("cpu", "simt"):
        with Engine(folder, device=device, dtype=dtype, max_context=128, **SETTINGS) as engine:
            listed = engine.generate([prompt], params)[0].prompt_logprobs
        assert listed is not None
        found.append(np.array([entry.logprob for entry in listed[1:] if entry is not None]))
    assert found[0].size == 44
    difference = np.abs(found[0] - found[1])
    assert difference.max() < tolerance
    assert difference.max() > 0.0  # else both are the same backend


def test_completions_of_one_prompt_share_its_blocks_and_each_copies_the_last_one(cupy: HostCupy, folder: Path) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=3, ignore_eos=True)
    expected = []
    for device in ("cpu", "simt"):
        with Engine(folder, device=device, **SETTINGS) as engine:
            expected.append(ids(engine.generate([prompts()[3]], params)))
    assert expected[0] == expected[1]
    assert len(set(expected[0])) == 3


def test_a_row_without_a_finite_logit_fails_alone(cupy: HostCupy, tmp_path: Path) -> None:
    with Engine(write_model(tmp_path, poisoned=True), device="simt", **SETTINGS) as engine:
        expected = ids(engine.generate([[5, 6]], PLAIN))
        poisoned, healthy = engine.generate([[5, POISON_TOKEN], [5, 6]], PLAIN)
    assert "no finite value" in str(poisoned.error)
    assert ids([healthy]) == expected


def test_a_prefix_in_the_cache_and_a_sliding_window_change_no_id(cupy: HostCupy, tmp_path: Path) -> None:
    config = {**CONFIG, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20}
    folder = write_model(tmp_path, config)
    prompt = prompts()[4]
    with Engine(folder, device="cpu", num_threads=1, **SETTINGS) as engine:
        expected = ids(engine.generate([prompt], PLAIN))
    with Engine(folder, device="simt", **SETTINGS) as engine:
        assert ids(engine.generate([prompt], PLAIN)) == expected
        again = engine.generate([prompt], PLAIN)
    assert ids(again) == expected
    assert again[0].metrics.cached_tokens == 32


# Against itself ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_company_changes_no_bit(cupy: HostCupy, folder: Path, deterministic: bool) -> None:
    """Also without `deterministic`, because the kernels and the stand-in for cuBLAS treat a row by itself."""
    with Engine(folder, device="simt", deterministic=deterministic, **SETTINGS) as engine:
        alone = [
            answers(engine.generate([prompt], params)) for prompt, params in zip(prompts(), MANY_PARAMS, strict=True)
        ]
    with Engine(folder, device="simt", deterministic=deterministic, **SETTINGS) as engine:
        together = answers(engine.generate(prompts(), MANY_PARAMS))
    assert together == list(itertools.chain(*alone))


@pytest.mark.parametrize("budget", [6, 17])
def test_deterministic_chunks_change_no_bit_whatever_the_matrix_library_does(
    cupy: HostCupy, folder: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setenv("SIMT_ROWS_MATTER", "few")  # the library sums in another order for few rows
    found = {}
    for tokens, deterministic in itertools.product((64, budget), (False, True)):
        settings = {**SETTINGS, "max_num_batched_tokens": tokens}
        with Engine(folder, device="simt", deterministic=deterministic, **settings) as engine:
            assert ("deterministic" in engine.model.backend.description) == deterministic
            params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, ignore_eos=True)
            found[tokens, deterministic] = answers(engine.generate(prompts(), params))
    assert found[64, True] == found[budget, True]
    assert found[64, False] != found[budget, False]


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_changes_no_bit_of_a_deterministic_answer(cupy: HostCupy, folder: Path, overlap: bool) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.1, seed=3, presence_penalty=0.5, logprobs=1, ignore_eos=True)
    few = [[(17 * i + j) % 297 + 2 for j in range(12 + i)] for i in range(3)]
    settings = {**SETTINGS, "device": "simt", "deterministic": True, "capacity": "optimistic", "max_context": 64}
    with Engine(folder, **settings) as roomy:
        expected = answers(roomy.generate(few, params))
        block_bytes = roomy.model.backend.kv_block_bytes(16)
    with Engine(folder, **{**settings, "kv_cache_memory": 6 * block_bytes}, overlap=overlap) as tight:
        outputs = tight.generate(few, params)
    assert max(output.metrics.preemptions for output in outputs) >= 1
    assert answers(outputs) == expected


# Graphs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_plain_decode_steps_are_replayed_as_graphs_and_give_the_same_bits(
    cupy: HostCupy, simt: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    params = [dataclasses.replace(PLAIN, max_tokens=3 + 4 * i, temperature=0.5 * i, seed=i) for i in range(5)]
    monkeypatch.setenv("PYENGINE_CUDA_GRAPHS", "0")
    with Engine(folder, device="simt", overlap=overlap, **SETTINGS) as engine:
        expected = answers(engine.generate(prompts(), params))
        assert cuda_backend(engine).graph_counts.replayed == cuda_backend(engine).graph_counts.captured == 0
    monkeypatch.delenv("PYENGINE_CUDA_GRAPHS")
    with Engine(folder, device="simt", overlap=overlap, **SETTINGS) as engine:
        before = simt.simt.graph_launches()
        assert answers(engine.generate(prompts(), params)) == expected
        counts = dataclasses.replace(cuda_backend(engine).graph_counts)
        # Decodes of 5, 4, ... 1 sequences, four steps each or so: those of 5 fill up to 6 rows, those of 3 to 4.
        assert counts.captured >= 3
        assert counts.replayed >= 6
        assert simt.simt.graph_launches() - before == counts.captured + counts.replayed
        assert answers(engine.generate(prompts(), params)) == expected
        assert cuda_backend(engine).graph_counts.captured <= counts.captured + 1


def test_a_graph_follows_a_pass_with_more_rows_than_sequences(cupy: HostCupy, folder: Path) -> None:
    """Planned ahead, the first decode step takes its token from row 44 of a prompt with log-probabilities."""
    params = dataclasses.replace(PLAIN, prompt_logprobs=0)
    few = [[(17 * j) % 297 + 2 for j in range(45)], [5, 6]]
    found = []
    for overlap in (False, True):
        with Engine(folder, device="simt", overlap=overlap, **{**SETTINGS, "max_num_seqs": 2}) as engine:
            found.append(ids(engine.generate(few, params)))
            assert cuda_backend(engine).graph_counts.replayed > 0
    assert found[0] == found[1]


def test_rows_that_fill_a_graph_touch_no_block_of_a_sequence(cupy: HostCupy, folder: Path) -> None:
    """Five rows in a graph of six, the pool full to the last block: what the sixth writes must be seen by nobody."""
    few = [[(31 * i + 7 * j) % 297 + 2 for j in range(20)] for i in range(5)]
    params = dataclasses.replace(PLAIN, max_tokens=28)
    settings = {**SETTINGS, "max_context": 48}
    with Engine(folder, device="cpu", num_threads=1, **settings) as engine:
        expected = ids(engine.generate(few, params))
        settings["kv_cache_memory"] = 15 * engine.model.backend.kv_block_bytes(16)
    with Engine(folder, device="simt", capacity="guaranteed", **settings) as engine:
        assert engine.limits.num_blocks == 15
        outputs = engine.generate(few, params)
        assert cuda_backend(engine).graph_counts.replayed >= 20
    assert ids(outputs) == expected
    assert max(output.metrics.preemptions for output in outputs) == 0


# Memory --------------------------------------------------------------------------------------------------------------


def test_nothing_is_allocated_inside_a_step_and_everything_is_given_back(cupy: HostCupy, folder: Path) -> None:
    with Engine(folder, device="simt", **SETTINGS) as engine:
        assert cuda_backend(engine).weight_bytes < cupy.used_bytes()
        with cupy.no_allocations():
            engine.generate(prompts(), MANY_PARAMS)
            engine.generate([prompts()[4]], SamplingParams(max_tokens=2, prompt_logprobs=64, logprobs=64))
    assert cupy.used_bytes() == 0
    del engine
    assert cupy.pinned_bytes() == 0


def test_what_is_allocated_is_what_was_counted(cupy: HostCupy, folder: Path) -> None:
    with Engine(folder, device="simt", **SETTINGS) as engine:
        backend = cuda_backend(engine)
        pool = backend.kv_block_bytes(16) * engine.limits.num_blocks
        counted = backend.weight_bytes + backend.workspace_bytes(engine.limits) + pool
        assert cupy.used_bytes() == pytest.approx(counted, abs=64)


def test_a_device_that_is_too_small_says_what_is_needed_and_what_to_lower(simt: ModuleType, folder: Path) -> None:
    with simt_device(simt, total_bytes=RESERVE_BYTES + 2**17), pytest.raises(ModelError, match=r"weights need .* free"):
        Engine(folder, device="simt", **SETTINGS)
    with simt_device(simt, total_bytes=RESERVE_BYTES + 3 * 2**20) as cupy:
        with pytest.raises(InvalidRequest, match=r"its workspaces need .* are free. Lower it or max_num_seqs"):
            Engine(folder, device="simt", **SETTINGS)
        assert cupy.used_bytes() == 0
    settings = {**SETTINGS, "kv_cache_memory": "30MiB", "max_num_seqs": 64}
    machine = simt_device(simt, total_bytes=RESERVE_BYTES + 20 * 2**20)
    with machine, pytest.raises(InvalidRequest, match=r"kv_cache_memory is '30MiB', .* bytes are free"):
        Engine(folder, device="simt", **settings)


def test_an_automatic_pool_takes_nine_tenths_of_what_is_free(cupy: HostCupy, folder: Path) -> None:
    with Engine(folder, device="simt", **{**SETTINGS, "kv_cache_memory": "auto"}) as engine:
        backend = cuda_backend(engine)
        assert backend.auto_kv_bytes(1000) == 900
        assert engine.limits.num_blocks == 6 * 512 // 16  # all seats


# A device that fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["launch", "synchronize"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 2, 5])
def test_an_error_of_the_device_ends_every_request_once_and_the_engine_takes_no_more(
    cupy: HostCupy, simt: ModuleType, folder: Path, at: str, overlap: bool, steps: int
) -> None:
    with Engine(folder, device="simt", overlap=overlap, **SETTINGS) as engine:
        for prompt in prompts(3):
            engine.submit(prompt, dataclasses.replace(PLAIN, max_tokens=20))
        for _ in range(steps):
            engine.step()
        simt.simt.fail_next("cudaErrorIllegalAddress", at)
        events = []
        for _ in range(10):
            events += engine.step()
        ends = [event for event in events if event.finish_reason is not None]
        assert [event.finish_reason for event in ends] == ["error"] * 3
        for event in ends:
            assert isinstance(event.error, EngineFailed)
            assert "cudaErrorIllegalAddress" in str(event.error)
            assert "an illegal memory access was encountered" in str(event.error)
        assert not engine.has_unfinished
        with pytest.raises(EngineFailed, match=r"takes no new work: .*cudaErrorIllegalAddress"):
            engine.submit([5], PLAIN)
        with pytest.raises(EngineFailed):
            engine.generate([[5]], PLAIN)
        engine.close()
    assert cupy.used_bytes() == 0


def test_no_engine_can_be_made_on_a_device_that_has_failed_and_nothing_is_kept(
    cupy: HostCupy, simt: ModuleType, folder: Path
) -> None:
    with Engine(folder, device="simt", **SETTINGS) as engine:
        simt.simt.fail_next("cudaErrorECCUncorrectable", "launch")
        assert "cudaErrorECCUncorrectable" in str(engine.generate([[5]], PLAIN)[0].error)
    with pytest.raises(RuntimeError, match="uncorrectable ECC error"):
        Engine(folder, device="simt", **SETTINGS)
    assert cupy.used_bytes() == 0


def test_head_sizes_and_vocabularies_that_no_kernel_has_are_refused_at_load(cupy: HostCupy, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"head_dim is 48; the CUDA backend handles head sizes 16, 32"):
        Engine(write_model(tmp_path / "heads", {**CONFIG, "head_dim": 48}), device="simt")
    large = {**CONFIG, "vocab_size": 2**19 + 1, "hidden_size": 8, "tie_word_embeddings": True}
    with pytest.raises(ModelError, match=r"vocab_size is 524289; the CUDA backend handles at most 524288"):
        Engine(write_model(tmp_path / "words", large), device="simt")


def test_a_device_that_only_tests_have_is_gone_with_them(folder: Path) -> None:
    with pytest.raises(DeviceNotAvailable, match="for pyengine's own tests only"):
        Engine(folder, device="simt")
