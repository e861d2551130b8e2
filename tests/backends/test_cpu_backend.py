"""The CPU backend as the engine drives it: launches that use the ids of the one before, and the size of its pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyengine import Engine, SamplingParams
from pyengine.backends.base import Backend
from pyengine.backends.step_inputs import LogitsRow, SequenceChunk, StepInputs
from pyengine.errors import EngineClosed
from pyengine.sampling_row import SamplingRow

from ..engine.conftest import write_model

GREEDY = SamplingRow(SamplingParams(temperature=0.0).with_defaults({}), 0, [], frozenset())


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    with Engine(write_model(tmp_path), kv_cache_memory="1MiB", num_threads=1, max_num_seqs=4) as engine:
        yield engine.model.backend


def step_of(token_ids: list[int], start: int) -> tuple[np.ndarray, int]:
    chunk = SequenceChunk(token_ids, start, [0])
    staging, result = StepInputs(16).write([chunk], [LogitsRow(len(token_ids) - 1, GREEDY, start + len(token_ids))])
    return staging, result.size


def test_a_launch_may_stand_on_the_ids_that_the_one_before_drew(backend: Backend) -> None:
    first = backend.launch(*step_of([5, 6, 7], 0), uses_previous=False).wait()
    second = backend.launch(*step_of([int(first[0])], 3), uses_previous=False).wait()
    backend.launch(*step_of([5, 6, 7], 0), uses_previous=False)
    again = backend.launch(*step_of([-1], 3), uses_previous=True).wait()
    assert again.tolist() == second.tolist()
    staging, size = step_of([5, 6, 7], 0)
    result = np.empty(size, np.int32)
    backend.step(staging, result)
    drawn = result.copy()
    result[:] = 99  # the caller's buffer is the caller's
    assert drawn.tolist() == first.tolist()
    assert backend.launch(*step_of([-1], 3), uses_previous=True).wait().tolist() == second.tolist()


def test_an_id_of_no_row_before_is_refused_and_changes_nothing(backend: Backend) -> None:
    first = backend.launch(*step_of([5, 6, 7], 0), uses_previous=False).wait()
    for token_id, uses_previous in ((-2, True), (-1, False)):
        with pytest.raises(ValueError, match="'token_ids' holds"):
            backend.launch(*step_of([token_id], 3), uses_previous=uses_previous)
    second = backend.launch(*step_of([-1], 3), uses_previous=True).wait()
    assert second.tolist() == backend.launch(*step_of([int(first[0])], 3), uses_previous=False).wait().tolist()


def test_auto_takes_half_of_what_is_free_and_never_more_than_4_gib(backend: Backend) -> None:
    assert backend.auto_kv_bytes(1000) == 500
    assert backend.auto_kv_bytes(100 * 2**30) == 4 * 2**30


def test_a_closed_backend_takes_no_step(backend: Backend) -> None:
    backend.close()
    with pytest.raises(EngineClosed):
        backend.launch(*step_of([5], 0), uses_previous=False)
    backend.close()
