"""The CUDA backend below the engine: launches that overlap, its ring, graphs on ids that the host has not seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pyengine import Engine, SamplingParams
from pyengine.backends import cuda_steps
from pyengine.backends.base import MAX_PENDING, StepTrace
from pyengine.backends.cuda import CudaBackend
from pyengine.backends.step_inputs import IntArray, LogitsRow, SequenceChunk, StepInputs
from pyengine.errors import EngineClosed
from pyengine.sampling_row import SamplingRow

from ..engine.conftest import write_model
from ..simt.device import simt_device
from ..simt.host_cupy import HostCupy

GREEDY = SamplingRow(SamplingParams(temperature=0.0).with_defaults({}), 0, [], frozenset())
PROMPTS = ([5, 6, 7], [8, 9], [200, 100, 50, 25])


@pytest.fixture
def cupy(simt: ModuleType) -> Iterator[HostCupy]:
    with simt_device(simt) as machine:
        yield machine
        machine.check_guards()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def backend(cupy: HostCupy, folder: Path) -> Iterator[CudaBackend]:
    with Engine(folder, device="simt", kv_cache_memory="512KiB", max_num_seqs=4, max_num_batched_tokens=64) as engine:
        made = engine.model.backend
        assert isinstance(made, CudaBackend)
        yield made


def step_of(chunks: list[SequenceChunk], row: SamplingRow = GREEDY, num_logprobs: int = -1) -> tuple[IntArray, int]:
    rows, end = [], 0
    for chunk in chunks:
        end += len(chunk.token_ids)
        rows.append(LogitsRow(end - 1, row, chunk.start + len(chunk.token_ids), -1, num_logprobs))
    staging, result = StepInputs(16).write(chunks, rows)
    return staging, result.size


def prompt_step() -> tuple[IntArray, int]:
    return step_of([SequenceChunk(prompt, 0, [i]) for i, prompt in enumerate(PROMPTS)])


def decode_step(token_ids: list[int], index: int, num_logprobs: int = -1) -> tuple[IntArray, int]:
    """The one after `index` decode steps; a token id below 0 stands for a row of the launch before."""
    chunks = [
        SequenceChunk([token_id], len(prompt) + index, [i])
        for i, (token_id, prompt) in enumerate(zip(token_ids, PROMPTS, strict=True))
    ]
    return step_of(chunks, num_logprobs=num_logprobs)


def in_lockstep(backend: CudaBackend, steps: int) -> list[list[int]]:
    ids = [backend.launch(*prompt_step(), uses_previous=False).wait()[:3].tolist()]
    for index in range(steps):
        ids.append(backend.launch(*decode_step(ids[-1], index), uses_previous=False).wait()[:3].tolist())
    return ids


def test_a_chain_of_launches_that_the_host_sees_a_step_late_draws_the_same_ids(
    backend: CudaBackend, cupy: HostCupy
) -> None:
    """Through all ways a step is run: eager after eager, eager (logprobs) after graph, graph after eager and graph."""
    expected = in_lockstep(backend, 8)
    assert backend.graph_counts.replayed == 6
    with cupy.no_allocations():
        pending = [backend.launch(*prompt_step(), uses_previous=False)]
        ids = []
        for index in range(8):
            num_logprobs = 2 if index in (3, 6) else -1
            pending.append(backend.launch(*decode_step([-1, -2, -3], index, num_logprobs), uses_previous=True))
            ids.append(pending.pop(0).wait()[:3].tolist())
        ids.append(pending.pop(0).wait()[:3].tolist())
    assert ids == expected
    assert backend.graph_counts.replayed == 12


def test_a_result_is_the_callers_own_and_can_be_asked_for_twice(backend: CudaBackend) -> None:
    first = backend.launch(*prompt_step(), uses_previous=False)
    ids = first.wait().tolist()
    for _ in range(3):
        backend.launch(*step_of([SequenceChunk([9], 0, [0])]), uses_previous=False).wait()
    assert first.wait().tolist() == ids


def test_no_more_than_a_ring_of_launches_may_be_pending(backend: CudaBackend) -> None:
    pending = [backend.launch(*prompt_step(), uses_previous=False) for _ in range(MAX_PENDING)]
    with pytest.raises(RuntimeError, match=f"{MAX_PENDING} steps are pending; wait for the first"):
        backend.launch(*prompt_step(), uses_previous=False)
    results = [one.wait().tolist() for one in reversed(pending)]
    assert results[0][:3] == results[1][:3]
    backend.launch(*prompt_step(), uses_previous=False).wait()


def test_a_step_that_does_not_fit_is_refused_before_anything_is_done(backend: CudaBackend, cupy: HostCupy) -> None:
    expected = in_lockstep(backend, 3)
    backend.launch(*prompt_step(), uses_previous=False)
    wrong_row, _ = decode_step([-1, -2, -4], 0)
    wrong_block, words = step_of([SequenceChunk([5], 0, [10**6])])
    for staging, size, uses_previous in (
        (wrong_row, 6, True),
        (wrong_row, 6, False),
        (wrong_block, words, False),
        (wrong_row[:20], 6, False),
        (prompt_step()[0], 7, False),
    ):
        with pytest.raises(ValueError, match="argument"):
            backend.launch(staging, size, uses_previous=uses_previous)
    # What the launch before drew is what it was, and its place in the ring was not lost.
    after = backend.launch(*decode_step([-1, -2, -3], 0), uses_previous=True)
    assert after.wait()[:3].tolist() == expected[1]


def test_a_step_writes_the_callers_result_and_a_trace(backend: CudaBackend, folder: Path) -> None:
    staging, size = step_of([SequenceChunk([i], i, [0]) for i in range(1)])
    result = np.empty(size + 3, np.int32)
    backend.step(staging, result)
    assert 0 <= result[0] < 320
    with pytest.raises(ValueError, match=r"'result' has 4 bytes; 8 are needed"):
        backend.step(staging, np.empty(size - 1, np.int32))
    with pytest.raises(ValueError, match=r"'result' has .* needed, as int32"):
        backend.step(staging, np.empty(size, np.int64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not hold a step"):
        backend.step(staging[:5], result)
    prompt, rows = [11, 12, 13, 14, 15], []
    rows = [LogitsRow(i, GREEDY, i + 1) for i in range(5)]
    staging, whole = StepInputs(16).write([SequenceChunk(prompt, 0, [1])], rows)
    traces = []
    with Engine(folder, device="cpu", kv_cache_memory="1MiB", num_threads=1) as engine:
        for one in (backend, engine.model.backend):
            traces.append(StepTrace(np.zeros((5, 320), np.float32), np.zeros((3, 5, 64), np.float32)))
            one.step(staging, whole, traces[-1])
    for name in ("logits", "residuals"):
        mine, theirs = (getattr(trace, name) for trace in traces)
        assert np.abs(theirs).max() > 0.5
        np.testing.assert_allclose(mine, theirs, atol=1e-4, rtol=0)


def test_lists_longer_than_ever_make_the_buffers_grow_and_change_nothing(
    backend: CudaBackend, cupy: HostCupy, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    expected = in_lockstep(backend, 2)
    monkeypatch.setattr(cuda_steps, "LIST_WORDS", 0)
    bias = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(300), 1.0)).with_defaults({})
    row = SamplingRow(bias, 0, [], frozenset())
    long = step_of([SequenceChunk([7], 0, [3]), SequenceChunk([9], 0, [4])], row)
    short = step_of([SequenceChunk([7], 0, [3]), SequenceChunk([9], 0, [4])])
    settings = {"kv_cache_memory": "512KiB", "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_context": 64}
    with Engine(folder, device="simt", **settings) as engine:
        tight = engine.model.backend
        allocations = cupy.num_allocations
        results = [tight.launch(*step, uses_previous=False).wait()[:2].tolist() for step in (short, long, long, short)]
        assert cupy.num_allocations == allocations + 1
    assert [backend.launch(*s, uses_previous=False).wait()[:2].tolist() for s in (short, long, long, short)] == results
    assert in_lockstep(backend, 2) == expected


def test_a_closed_backend_takes_no_step_and_can_be_closed_again(backend: CudaBackend, cupy: HostCupy) -> None:
    backend.launch(*prompt_step(), uses_previous=False)  # nobody waits for it
    backend.close()
    backend.close()
    with pytest.raises(EngineClosed):
        backend.launch(*prompt_step(), uses_previous=False)
    assert cupy.used_bytes() == 0
