"""The trace of a step: it changes no result, and arrays that do not fit are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pyengine import SamplingParams
from pyengine.backends.base import StepLimits, StepTrace
from pyengine.backends.step_inputs import LogitsRow, SequenceChunk, StepInputs
from pyengine.loading import load_model
from pyengine.sampling_row import SamplingRow

from .conftest import FolderOf

pytest.importorskip("torch", reason="needs the extra [hf-test]")
pytest.importorskip("transformers", reason="needs the extra [hf-test]")
pytestmark = pytest.mark.hf

TOKENS = list(range(40, 60))
VOCAB, HIDDEN, LAYERS = 301, 96, 3


@pytest.fixture(scope="module")
def backend(folder_of: FolderOf) -> Iterator[Any]:
    folder = folder_of("qwen2 gqa 64 tied")
    loaded = load_model(folder, device="cpu", dtype="auto", max_context=None, num_threads=None, progress=None)
    loaded.backend.start(StepLimits(max_tokens=64, max_seqs=1, max_context=64, block_size=16, num_blocks=4))
    yield loaded.backend
    loaded.backend.close()


def written(rows: list[int]) -> tuple[Any, Any]:
    row = SamplingRow(SamplingParams(temperature=0.0).with_defaults({}), 0, (), ())
    wanted = [LogitsRow(i, row, i + 1, num_logprobs=3) for i in rows]
    return StepInputs(16).write([SequenceChunk(TOKENS, 0, [2, 0])], wanted)


def floats(*shape: int) -> Any:
    return np.full(shape, np.nan, np.float32)


def test_a_traced_step_gives_the_same_bits_as_one_that_is_not(backend: Any) -> None:
    everything = list(range(len(TOKENS)))
    staging, plain = written(everything)
    backend.step(staging, plain)
    staging, traced = written(everything)
    trace = StepTrace(floats(len(TOKENS), VOCAB), floats(LAYERS + 1, len(TOKENS), HIDDEN))
    backend.step(staging, traced, trace)
    assert np.array_equal(plain, traced)
    assert np.array_equal(trace.logits.argmax(-1), traced[: len(TOKENS)])
    assert np.isfinite(trace.logits).all()
    assert np.isfinite(trace.residuals).all()


def test_logits_alone_may_be_of_any_rows(backend: Any) -> None:
    staging, result = written([19, 3])
    trace = StepTrace(floats(2, VOCAB))
    backend.step(staging, result, trace)
    assert np.array_equal(trace.logits.argmax(-1), result[:2])


@pytest.mark.parametrize(
    ("rows", "logits", "residuals", "message"),
    [
        ([19], (2, VOCAB), None, r"'logits' has a wrong shape; \[1, 301\] is needed"),
        ([19], (1, VOCAB + 1), None, r"'logits' has a wrong shape"),
        ([19], (1, VOCAB), (LAYERS + 1, 20, HIDDEN), "'residuals' needs a step with one row of logits for each token"),
        (list(range(20))[::-1], (20, VOCAB), (LAYERS + 1, 20, HIDDEN), "'residuals' needs a step with one row"),
        (list(range(20)), (20, VOCAB), (LAYERS, 20, HIDDEN), r"'residuals' has a wrong shape; \[4, 20, 96\] is needed"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    backend: Any, rows: list[int], logits: tuple[int, ...], residuals: tuple[int, ...] | None, message: str
) -> None:
    staging, result = written(rows)
    trace = StepTrace(floats(*logits), None if residuals is None else floats(*residuals))
    with pytest.raises(ValueError, match=message):
        backend.step(staging, result, trace)


def test_an_array_that_cannot_be_written_is_refused(backend: Any) -> None:
    staging, result = written([19])
    logits = floats(1, VOCAB)
    logits.flags.writeable = False
    with pytest.raises(ValueError, match="'logits' is read-only"):
        backend.step(staging, result, StepTrace(logits))
