"""A few passes before any request comes, so that limits on latency are kept from the first one on."""

from __future__ import annotations

import dataclasses

from pyengine.backends.base import Backend
from pyengine.backends.step_inputs import LogitsRow, SequenceChunk, StepInputs
from pyengine.config import SchedulerConfig
from pyengine.errors import InvalidRequest
from pyengine.request import Request
from pyengine.sampling_params import SamplingParams
from pyengine.sampling_row import SamplingRow
from pyengine.scheduler import Scheduler
from pyengine.scheduler.step_time import StepFeatures, StepTimeModel

# Prompts that come while earlier ones decode: steps with and without prompt tokens, with few and with more decodes.
PROMPT_LENGTHS = (16, 256, 48, 128, 32, 192, 16, 64, 96, 256, 128)
OUTPUT_LENGTH = 24
STEPS_BETWEEN = 3


def measured_step_time(backend: Backend, inputs: StepInputs, settings: SchedulerConfig) -> StepTimeModel:
    """A step-time model that knows this machine; `backend` is started, and nothing else runs on it."""
    model = StepTimeModel()
    settings = dataclasses.replace(
        settings,
        order="fifo",
        packing="none",
        capacity="guaranteed",
        victim="cheapest",
        batching="continuous",
        prefix_caching=False,
        itl_limit_ms=None,
        ttft_limit_ms=None,
        max_queue=None,
        max_batch_wait_ms=0,
    )
    scheduler = Scheduler(settings, step_time=model, records_calls=False)
    most = min(settings.max_context - 1, settings.num_blocks * settings.block_size, settings.max_num_batched_tokens)
    for i, length in enumerate(PROMPT_LENGTHS):
        prompt = [i] * min(length, most)
        max_tokens, _ = scheduler.clamp_max_tokens(len(prompt), OUTPUT_LENGTH)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0).with_defaults({})
        row = SamplingRow(params, 0, prompt, frozenset())
        scheduler.add([Request(f"probe-{i}", prompt, max_tokens, payload=row)])
        for _ in range(STEPS_BETWEEN):
            _step(scheduler, backend, inputs)
    while scheduler.has_unfinished:
        _step(scheduler, backend, inputs)
    model.solve()
    return model


def check_itl_limit(limit_ms: float, model: StepTimeModel) -> None:
    """Raise InvalidRequest for a limit that not even a pass with one decode keeps, as measured."""
    measured_ms = model.predict(StepFeatures(decode_seqs=1)) / 1e6
    if measured_ms > limit_ms:
        raise InvalidRequest(
            f"itl_limit_ms is {limit_ms:g}; a pass with a single decode takes {measured_ms:.2f} ms here, so that no "
            "batch can keep it. Raise it.",
            field="itl_limit_ms",
            value=limit_ms,
            limit=measured_ms,
        )


def _step(scheduler: Scheduler, backend: Backend, inputs: StepInputs) -> None:
    plan = scheduler.schedule()
    if plan.is_empty:
        return
    chunks, rows, sampling = [], [], []
    end = 0
    for i, (request, start, count) in enumerate(
        zip(plan.requests, plan.num_computed, plan.num_new_tokens, strict=True)
    ):
        chunks.append(SequenceChunk(request.token_ids[start : start + count], start, request.block_table))
        end += count
        if plan.samples[i]:
            rows.append(LogitsRow(end - 1, request.payload, start + count, -1, -1))
            sampling.append(i)
    staging, result = inputs.write(chunks, rows, plan.copies)
    backend.step(staging, result)
    sampled = StepInputs.read(result, len(rows)).token_ids.tolist()
    token_ids: list[int | None] = [None] * len(plan.requests)
    for i, token_id in zip(sampling, sampled, strict=True):
        # Weights that give no finite logits are found when a request meets them; here only the time counts.
        token_ids[i] = max(token_id, 0)
        plan.requests[i].payload.append(token_ids[i])
    scheduler.commit(plan, token_ids)
