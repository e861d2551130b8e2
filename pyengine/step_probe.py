"""A few passes before any request comes, to find what this machine takes for the smallest of them."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from statistics import median

from pyengine.backends.base import Backend
from pyengine.backends.step_inputs import LogitsRow, SequenceChunk, StepInputs
from pyengine.config import SchedulerConfig
from pyengine.errors import InvalidRequest
from pyengine.request import Request
from pyengine.sampling_params import SamplingParams
from pyengine.sampling_row import SamplingRow
from pyengine.scheduler import Scheduler

NUM_STEPS = 9


def decode_step_ms(backend: Backend, inputs: StepInputs, settings: SchedulerConfig) -> float:
    """Median time of a pass with one decode in ms; `backend` is started, and nothing else runs on it."""
    settings = dataclasses.replace(settings, itl_limit_ms=None, ttft_limit_ms=None, max_batch_wait_ms=0)
    scheduler = Scheduler(settings, records_calls=False)
    max_tokens, _ = scheduler.clamp_max_tokens(1, NUM_STEPS)
    request = Request("probe", [0], max_tokens)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0).with_defaults({})
    row = SamplingRow(params, 0, (0,), frozenset())
    scheduler.add([request])
    while not request.is_finished:
        plan = scheduler.schedule()
        position = plan.num_computed[0]
        chunk = SequenceChunk(request.token_ids[position:], position, request.block_table)
        staging, result = inputs.write([chunk], [LogitsRow(0, row, position + 1, -1, -1)], plan.copies)
        backend.step(staging, result)
        token_id = int(StepInputs.read(result, 1).token_ids[0])
        row.append(token_id)
        scheduler.commit(plan, [token_id])
    gaps = [later - earlier for earlier, later in pairwise(request.token_times_ns)]
    return median(gaps) / 1e6 if gaps else 0.0


def check_itl_limit(limit_ms: float, backend: Backend, inputs: StepInputs, settings: SchedulerConfig) -> None:
    """Raise InvalidRequest for a limit that not even a pass with one decode keeps, as measured now."""
    measured_ms = decode_step_ms(backend, inputs, settings)
    if measured_ms > limit_ms:
        raise InvalidRequest(
            f"itl_limit_ms is {limit_ms:g}; a pass with a single decode takes {measured_ms:.2f} ms here, so that no "
            "batch can keep it. Raise it.",
            field="itl_limit_ms",
            value=limit_ms,
            limit=measured_ms,
        )
