"""Replay: makes the plans of a recording again, and those that other settings would have led to. It runs no model.

Replayed as it was (recorded clock readings, recorded ends) a recording gives the identical plans. With other settings
plans differ, so recorded durations belong to none of them: then a VirtualEngine gets the recorded arrivals, aborts and
output lengths at their recorded times, and its steps take what a step-time model says. A what-if is the difference of
two such runs, unchanged and changed, so that what the model gets wrong in both is not taken for an effect.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyengine.config import MAX_BATCHED_TOKENS, SchedulerConfig
from pyengine.errors import InvalidRequest, PyEngineError
from pyengine.request import Request
from pyengine.scheduler.clean_state import restore
from pyengine.scheduler.plan import StepPlan
from pyengine.scheduler.recording import (
    Abort,
    Arrival,
    Begin,
    Clear,
    End,
    Event,
    Expect,
    Hold,
    Pause,
    RecordedRequest,
    Recorder,
    Recording,
    RecordingError,
    Wake,
)
from pyengine.scheduler.scheduler import Scheduler
from pyengine.scheduler.step_time import StepTimeModel
from pyengine.scheduler.verdict import Reason
from pyengine.scheduler.virtual import VirtualEngine, device_of

Change = Mapping[str, Any]
"""Settings of SchedulerConfig by name, and "kv_blocks": a factor on num_blocks."""


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A plan as plain data, requests by their keys; two are equal if the plans are.

    Attributes:
        rows: (key, new tokens, computed tokens, whether it samples) of each request, in batch order.
        joined / preempted / refused: keys.
        num_copies: blocks copied before the pass.
    """

    step: int
    rows: tuple[tuple[int, int, int, bool], ...]
    joined: tuple[int, ...]
    preempted: tuple[int, ...]
    refused: tuple[int, ...]
    num_copies: int


def plan_record(plan: StepPlan, key_of: Mapping[Request, int]) -> PlanRecord:
    """`plan` as data."""
    columns = zip(plan.requests, plan.num_new_tokens, plan.num_computed, plan.samples, strict=True)
    return PlanRecord(
        plan.step,
        tuple((key_of[request], new, computed, samples) for request, new, computed, samples in columns),
        tuple(key_of[request] for request in plan.joined),
        tuple(key_of[request] for request in plan.preempted),
        tuple(key_of[request] for request, _ in plan.refused),
        len(plan.copies),
    )


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay gave.

    Attributes:
        plans: all plans, in order; of a replay as it was, the empty ones too.
        requests: by key, with all their times.
        diverged: how the plans differ from the recorded ones, which ended the replay there; None: they do not, or
            were not to be compared.
    """

    plans: list[PlanRecord]
    requests: dict[int, Request]
    diverged: str | None = None


def replay(
    recording: Recording,
    *,
    config_changes: Change | None = None,
    durations: str | StepTimeModel = "recorded",
) -> ReplayResult:
    """Run `recording` again: as it was, or with `durations` a step-time model and perhaps other settings.

    Raises InvalidRequest for settings that are refused, ValueError for changes with recorded durations, and
    RecordingError for a policy of the user's that is an object.
    """
    config = changed_config(recording.config, config_changes or {})
    if isinstance(durations, StepTimeModel):
        run = _VirtualRun(recording, config, durations)
        run.finish()
        return ReplayResult(run.plans, run.requests)
    if durations != "recorded":
        raise ValueError(f"durations is {durations!r}; it must be 'recorded' or a StepTimeModel.")
    if config != recording.config:
        raise ValueError("With other settings plans differ, so that recorded durations are of no use: give a model.")
    return _ExactRun(recording).result()


# ---- What-ifs


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What one change would have done to one request; negative is earlier.

    Attributes:
        change: the settings changed.
        start_delta_ns / first_token_delta_ns: by how much later it would have started, and had its first token.
        problem: why there is no answer, as a sentence; then both are None.
    """

    change: Change
    start_delta_ns: int | None = None
    first_token_delta_ns: int | None = None
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able data."""
        return {
            "change": dict(self.change),
            "start_delta_ns": self.start_delta_ns,
            "first_token_delta_ns": self.first_token_delta_ns,
            "problem": self.problem,
        }

    def __str__(self) -> str:
        change = ", ".join(
            f"{value - 1:+.0%} KV blocks" if name == "kv_blocks" else f"{name} = {value!r}"
            for name, value in self.change.items()
        )
        if self.start_delta_ns is None:
            return f"{change}: not known. {self.problem}"
        delta_s = abs(self.start_delta_ns) / 1e9
        if delta_s < 0.0005:
            return f"{change}: no earlier"
        return f"{change}: started {delta_s:.3f} s {'earlier' if self.start_delta_ns < 0 else 'later'}"


def likely_changes(config: SchedulerConfig) -> list[Change]:
    """Changes that are worth asking for when nothing is known: more of each resource, and nobody passing."""
    changes: list[Change] = [
        {"kv_blocks": 1.15},
        {"kv_blocks": 2.0},
        {"max_num_batched_tokens": min(2 * config.max_num_batched_tokens, MAX_BATCHED_TOKENS)},
    ]
    if 2 * config.max_num_seqs <= config.max_num_batched_tokens:
        changes.append({"max_num_seqs": 2 * config.max_num_seqs})
    if config.packing == "best_fit":
        changes.append({"packing": "none"})
    return changes


def what_if(
    source: Recording | Recorder, key: int, changes: Sequence[Change], *, model: StepTimeModel | None = None
) -> list[WhatIf]:
    """For each of `changes`, how much earlier or later the request with this key would have started.

    `model` is by default the recording's. Requests that had not ended are taken to go on to max_tokens, and the
    request itself not to have been aborted. Each answer costs a simulation from the last moment before its arrival at
    which the engine was empty up to its first token; all share the unchanged one.
    """
    try:
        recording = source.recording(key) if isinstance(source, Recorder) else source
        model = _fitted(recording, model)
        unchanged = _first_times(recording, recording.config, model, key)
    except PyEngineError as error:
        return [WhatIf(change, problem=str(error)) for change in changes]
    return [_what_if(recording, model, key, change, unchanged) for change in changes]


def changed_config(config: SchedulerConfig, change: Change) -> SchedulerConfig:
    """`config` with the settings in `change`. Raises InvalidRequest for one that is unknown or refused."""
    names = {field.name for field in dataclasses.fields(config)}
    values = dict(change)
    if "kv_blocks" in values:
        factor = values.pop("kv_blocks")
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1e6:
            raise InvalidRequest(
                f"kv_blocks is {factor!r}; it must be a factor > 0, such as 1.15.", field="kv_blocks", value=factor
            )
        values["num_blocks"] = max(1, round(config.num_blocks * factor))
    for name, value in values.items():
        if name not in names:
            allowed = ("kv_blocks", *sorted(names))
            raise InvalidRequest(
                f"{name} is no setting; there are {', '.join(allowed)}.", field=name, value=value, limit=allowed
            )
    return dataclasses.replace(config, **values)


def _what_if(
    recording: Recording, model: StepTimeModel, key: int, change: Change, unchanged: tuple[int, int]
) -> WhatIf:
    try:
        config = changed_config(recording.config, change)
        started_ns, first_token_ns = _first_times(recording, config, model, key)
    except PyEngineError as error:
        return WhatIf(change, problem=str(error))
    return WhatIf(change, started_ns - unchanged[0], first_token_ns - unchanged[1])


def _fitted(recording: Recording, model: StepTimeModel | None) -> StepTimeModel:
    if model is None:
        model = StepTimeModel.from_dict(recording.step_time)
    if not model.is_fitted:
        raise RecordingError(
            f"The step-time model has seen only {model.num_observed} steps, too few, or too few with prompts, to "
            "tell what other settings would have led to."
        )
    return model


def _first_times(recording: Recording, config: SchedulerConfig, model: StepTimeModel, key: int) -> tuple[int, int]:
    """When the request starts and has its first token, in a virtual run. Raises PyEngineError if it never does."""
    run = _VirtualRun(recording, config, model, key)
    run.finish()
    request = run.requests.get(key)
    if request is None:
        raise RecordingError(f"Request number {key} is not in the recording.")
    for refused, error, _ in run.engine.refused:
        if refused is request:
            raise error
    if request.started_ns is None or request.first_token_ns is None:
        raise RecordingError(f"Request number {key} gets no first token in the replay.")
    return request.started_ns, request.first_token_ns


# ---- The two ways to run it


def _check_policies(config: SchedulerConfig) -> None:
    """Raise RecordingError for a policy that is an object: a replay would change what the live engine knows."""
    for name in ("batching", "order", "packing", "capacity", "victim"):
        policy = getattr(config, name)
        if not isinstance(policy, (str, type)):
            raise RecordingError(f"{name} is {policy!r}, an object of your own that is in use; give its class instead.")


def _request_of(recorded: RecordedRequest, config: SchedulerConfig) -> Request:
    if recorded.num_prompt_tokens >= config.max_context:
        raise RecordingError(
            f"Request number {recorded.key} has {recorded.num_prompt_tokens} prompt tokens; the context of the "
            f"recording is {config.max_context}."
        )
    request = Request(
        f"#{recorded.key}",
        [0] * recorded.num_prompt_tokens,
        recorded.max_tokens,
        index=recorded.index,
        priority=recorded.priority,
        tenant=str(recorded.tenant),
        ttft_limit_ns=recorded.ttft_limit_ns,
        itl_limit_ns=recorded.itl_limit_ns,
        needs_all_prompt_logits=recorded.needs_all_prompt_logits,
    )
    request.block_hashes = _hashes(recorded.block_ids)
    request.has_known_hashes = True
    return request


def _hashes(numbers: Iterable[int]) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in numbers]


def _restore(scheduler: Scheduler, recording: Recording) -> None:
    restore(scheduler, {**recording.state, "block_hashes": _hashes(recording.state["block_hashes"])})


class _Run:
    """What both ways have in common: requests by key, and calls that are no step."""

    def __init__(self, recording: Recording, config: SchedulerConfig) -> None:
        _check_policies(config)
        self.recording = recording
        self.config = config
        self.plans: list[PlanRecord] = []
        self.requests: dict[int, Request] = {}
        self.key_of: dict[Request, int] = {}

    def make(self, arrival: Arrival) -> list[Request]:
        requests = [_request_of(recorded, self.config) for recorded in arrival.requests]
        for recorded, request in zip(arrival.requests, requests, strict=True):
            self.requests[recorded.key] = request
            self.key_of[request] = recorded.key
        return requests

    def known(self, key: int) -> Request:
        if key not in self.requests:
            raise RecordingError(f"Request number {key} is named before it arrives.")
        return self.requests[key]


class _ExactRun(_Run):
    """As it was: each call at its place, with its clock reading."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording, recording.config)
        self._now_ns = recording.start_ns
        step_time = StepTimeModel.from_dict(recording.state["step_time"])
        self._scheduler = Scheduler(
            recording.config, clock=lambda: self._now_ns, step_time=step_time, records_calls=False
        )
        self._plans: deque[StepPlan] = deque()  # in flight, the oldest first
        self._num_expected = 0
        _restore(self._scheduler, recording)

    def result(self) -> ReplayResult:
        diverged = None
        for event in self.recording.events:
            self._now_ns = event.now_ns
            try:
                diverged = self._do(event)
            except PyEngineError as error:
                diverged = f"A recorded call is refused: {error}"
            if diverged is not None:
                break
        return ReplayResult(self.plans, self.requests, diverged)

    def _do(self, event: Event) -> str | None:
        """Make one call; returns how it differs from the recorded one."""
        scheduler = self._scheduler
        if isinstance(event, Begin):
            return self._begin(event)
        if isinstance(event, Expect):
            return self._expect(event)
        if isinstance(event, End):
            return self._end(event)
        if isinstance(event, Arrival):
            scheduler.add(self.make(event))
        elif isinstance(event, Abort):
            scheduler.abort(self.known(event.key), event.reason)
        elif isinstance(event, Hold):
            scheduler.hold(self.known(event.key), "recorded", event.until_ns)
        elif isinstance(event, Wake):
            scheduler.wake(self.known(event.key))
        elif isinstance(event, Pause):
            _pause(scheduler, event)
        else:
            scheduler.clear_prefix_cache()
        return None

    def _begin(self, event: Begin) -> str | None:
        if len(self._plans) > self._num_expected:
            return f"Step {self._plans[-1].step} is begun twice without an end."
        plan = self._scheduler.schedule()
        self.plans.append(plan_record(plan, self.key_of))
        if not plan.is_empty:
            self._plans.append(plan)
        made, recorded = (
            (plan.num_decode_tokens, plan.num_prefill_tokens),
            (event.num_decodes, event.num_prefill_tokens),
        )
        if made != recorded:
            return f"Step {plan.step} has {made} decode and prefill tokens; recorded are {recorded}."
        return None

    def _expect(self, event: Expect) -> str | None:
        if self._num_expected or not self._plans:
            return f"At {event.now_ns} ns a step is expected that was not begun, or before the last one ended."
        self._scheduler.expect(self._plans[0])
        self._num_expected = 1
        return None

    def _end(self, event: End) -> str | None:
        if not self._plans:
            return f"At {event.now_ns} ns a step ends that was not begun."
        plan, self._num_expected = self._plans.popleft(), 0
        places = {request: i for i, request in enumerate(plan.requests)} if event.ends else {}
        ends = {}
        for key, reason in event.ends:
            place = places.get(self.known(key))
            if place is None:
                return f"Request number {key} ends with step {plan.step}, but is not in it."
            ends[place] = reason
        self._scheduler.commit(plan, [0] * len(plan.requests), ends)
        return None


def _pause(scheduler: Scheduler, event: Pause) -> None:
    if event.reason is None:
        scheduler.resume()
    else:
        scheduler.pause(Reason[event.reason])


class _VirtualRun(_Run):
    """With a model for the device: calls that are no step, at their times. With `until`, up to its first token."""

    def __init__(
        self, recording: Recording, config: SchedulerConfig, model: StepTimeModel, until: int | None = None
    ) -> None:
        super().__init__(recording, config)
        self._until = until
        self._device = device_of(model)
        self.engine = VirtualEngine(
            config,
            self._step_time if until is None else self._device,
            start_ns=recording.start_ns,
            keep_steps=False,
            scheduler_step_time=StepTimeModel.from_dict(recording.state["step_time"]),
        )
        _restore(self.engine.scheduler, recording)

    def finish(self) -> None:
        engine, target = self.engine, None
        for event in self.recording.events:
            if isinstance(event, (Begin, Expect, End)):
                continue
            if isinstance(event, Arrival):
                requests = self.make(event)
                engine.arrive(event.now_ns, requests, [_true_length(recorded) for recorded in event.requests])
                if self._until is not None:
                    target = self.requests.get(self._until)
                continue
            engine.run_until(event.now_ns, target)
            if target is not None and (target.token_times_ns or target.is_finished):
                return
            self._do(event)
        engine.run_until(math.inf, target)

    def _step_time(self, plan: StepPlan) -> int:
        self.plans.append(plan_record(plan, self.key_of))
        return self._device(plan)

    def _do(self, event: Event) -> None:
        scheduler = self.engine.scheduler
        if isinstance(event, Abort):
            request = self.known(event.key)
            if event.key != self._until and request.arrival_seq >= 0:
                self.engine.abort(request, event.reason)
        elif isinstance(event, Hold):
            request = self.known(event.key)
            if request.state.value == "waiting" and request.arrival_seq >= 0:
                scheduler.hold(request, "recorded", event.until_ns)
        elif isinstance(event, Wake):
            scheduler.wake(self.known(event.key))
        elif isinstance(event, Pause):
            _pause(scheduler, event)
        elif isinstance(event, Clear):
            scheduler.clear_prefix_cache()
        self.engine.look_again()


def _true_length(recorded: RecordedRequest) -> int:
    """How many output tokens it makes if nobody stops it; at most max_tokens, where that is not known."""
    if recorded.finish_reason in ("stop", "error") and recorded.num_output_tokens:
        return recorded.num_output_tokens
    return recorded.max_tokens
