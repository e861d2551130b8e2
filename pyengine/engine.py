"""Engine: the public face. It turns prompts into requests, runs step after step, and returns text as it is made.

The loop is `schedule -> launch -> commit`: Scheduler.schedule() plans a pass, the backend runs it, Scheduler.commit()
takes the tokens. On a device of its own the next pass is planned and launched before the tokens of the last one are
here (`overlap`). Which requests share a pass is decided in pyengine.scheduler alone.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import secrets
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from types import TracebackType
from typing import Any, Literal

from pyengine.backends.base import Pending, Progress, StepLimits
from pyengine.backends.step_inputs import LogitsRow, SequenceChunk, StepInputs, StepResult
from pyengine.completion import CompletionState, EndRules
from pyengine.config import SchedulerConfig
from pyengine.errors import EngineClosed, EngineFailed, InvalidRequest, PyEngineError, QueueFull, RequestFailed
from pyengine.interrupts import UninterruptedLock
from pyengine.kv_memory import check_kv_cache_memory, plan_kv_blocks
from pyengine.loading import LoadedModel, load_model
from pyengine.outputs import RequestMetrics, RequestOutput, StreamEvent, TokenLogprobs, refused_output
from pyengine.request import PENDING, Request
from pyengine.request_options import RequestOptions, check_name
from pyengine.sampling_params import SamplingParams
from pyengine.sampling_row import SamplingRow, child_seed
from pyengine.scheduler import Batching, Capacity, Order, Packing, Reason, Scheduler, StepPlan, Victim
from pyengine.scheduler.explanation import Explanation
from pyengine.scheduler.recording import RecordingError
from pyengine.scheduler.replay import Change, changed_config, likely_changes
from pyengine.scheduler.replay import what_if as run_what_ifs
from pyengine.scheduler.stats import EngineStats
from pyengine.scheduler.trace import save_trace
from pyengine.step_probe import check_itl_limit, measured_step_time
from pyengine.text import Tokenizer

MAX_CALLS_REPLAYED_UNASKED = 20_000  # two a step: about a second of simulation for each what-if
IDLE_SLEEP_S = 0.005  # at a time, while everyone waits for something other than a pass
MAX_THREADS = 4096  # more than any machine has; beyond its processors a number changes nothing

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class _Sequence:
    """One completion in flight: what the scheduler, the sampler and the text layer each keep of it."""

    owner: _Submitted
    request: Request
    row: SamplingRow
    state: CompletionState
    has_ended: bool = False  # its last event was given out


@dataclass(slots=True, eq=False)
class _Submitted:
    """One accepted prompt. `events` is None when its events go to Engine.step(), else a queue of its own."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    options: RequestOptions
    arrived_at: float
    events: deque[StreamEvent] | None
    sequences: list[_Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: PyEngineError | None = None

    @property
    def is_finished(self) -> bool:
        return all(sequence.has_ended for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class _Flight:
    """A pass that the device was given: its plan, its rows of logits, for each of them the place of its request in the
    plan, and the result to come."""

    plan: StepPlan
    rows: list[LogitsRow]
    owners: list[int]
    pending: Pending

    def row_of(self) -> dict[Request, int]:
        """The row whose token each request that samples gets."""
        requests = self.plan.requests
        return {requests[i]: r for r, i in enumerate(self.owners) if self.rows[r].target < 0}


_Delta = tuple[_Sequence, str, tuple[int, ...], tuple[TokenLogprobs, ...] | None]


@dataclass(slots=True)
class _TakenResults:
    """What a pass gave: each request's token, who ended and how, how each completion grew, which requests failed."""

    token_ids: list[int | None]
    finish_reasons: dict[int, str] = field(default_factory=dict)
    deltas: list[_Delta] = field(default_factory=list)
    failures: list[tuple[_Submitted, RequestFailed]] = field(default_factory=list)


class _PlanRefused(Exception):
    """The native step refused a plan before it ran."""


class Engine:
    """Generates text with one model, many requests at a time.

    Args:
        model: a folder as Hugging Face has it, the name of a built-in model, or a hub id. None: the built-in model.
        device: "auto", "cpu", "cuda" or "cuda:N". "auto": a GPU where this build has the CUDA backend, CuPy is
            installed and a device is visible, else the CPU.
        dtype: "auto" (the checkpoint's), "float32", "float16" or "bfloat16" for the weights.
        max_num_seqs: most sequences in one pass.
        max_num_batched_tokens: most tokens in one pass; longer prompts are computed in chunks. Must be >= max_num_seqs.
        kv_cache_memory: for the KV pool: bytes, a string such as "1GiB", a fraction of the free memory as a float in
            (0, 1), or "auto" (room for max_num_seqs full contexts; of the free memory at most half and 4 GiB on a CPU,
            nine tenths on a GPU).
        block_size: tokens in one KV block, a multiple of 16.
        max_context: most tokens of one sequence, prompt and output. None: what the model was made for.
        batching, order, packing, capacity, capacity_quantile, watermark, victim, prefix_caching, itl_limit_ms,
        ttft_limit_ms, max_queue, max_batch_wait_ms, aging_barrier_s, bypass_budget, window, priority_promotion_s: how
            requests are chosen for a pass, as SchedulerConfig has them.
        overlap: plan and launch a pass before the tokens of the last one are here, so that the device never waits for
            Python. A request that ends with a token that was not known yet computes one token in vain. None: on a GPU.
        deterministic: on a GPU too, an answer is the same bits in any company, with any cutting of prompts, after any
            preemption. Costs speed there; the CPU is always so.
        num_threads: threads of the CPU backend. None: every processor this process may use.
        progress: called with the fraction of the weights that is loaded, 0 to 1.

    Raises:
        ModelError: the model cannot be used; the message names file, tensor or setting.
        DeviceNotAvailable: the device is not there.
        InvalidRequest: a setting is out of bounds.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 1024,
        kv_cache_memory: int | float | str = "auto",
        block_size: int = 16,
        max_context: int | None = None,
        batching: str | Batching = "continuous",
        order: str | Order = "fifo",
        packing: str | Packing = "best_fit",
        capacity: str | type[Capacity] = "predicted",
        capacity_quantile: float = 0.8,
        watermark: float = 0.01,
        victim: str | Victim = "cheapest",
        prefix_caching: bool = True,
        itl_limit_ms: float | None = None,
        ttft_limit_ms: float | None = None,
        max_queue: int | None = None,
        max_batch_wait_ms: float = 0,
        aging_barrier_s: float = 10,
        bypass_budget: float = 4,
        window: int = 64,
        priority_promotion_s: float = 30,
        overlap: bool | None = None,
        deterministic: bool = False,
        num_threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._lock = UninterruptedLock()
        self._closed = False
        self._failure: BaseException | None = None
        self._pending: list[StreamEvent] = []
        self._live: dict[str, _Submitted] = {}
        # Requests of streams that were dropped. The garbage collector may run in the middle of anything, so it only
        # leaves a note here; the next call from outside carries it out.
        self._dropped: deque[_Submitted] = deque()
        self._next_id = 0
        _check_num_threads(num_threads)
        _check_overlap(overlap)
        check_kv_cache_memory(kv_cache_memory)
        settings = SchedulerConfig(
            num_blocks=1,
            max_context=2,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            batching=batching,
            order=order,
            packing=packing,
            capacity=capacity,
            capacity_quantile=capacity_quantile,
            watermark=watermark,
            victim=victim,
            prefix_caching=prefix_caching,
            itl_limit_ms=itl_limit_ms,
            ttft_limit_ms=ttft_limit_ms,
            max_queue=max_queue,
            max_batch_wait_ms=max_batch_wait_ms,
            aging_barrier_s=aging_barrier_s,
            bypass_budget=bypass_budget,
            window=window,
            priority_promotion_s=priority_promotion_s,
        )
        self._model: LoadedModel = load_model(
            model,
            device=device,
            dtype=dtype,
            max_context=max_context,
            num_threads=num_threads,
            deterministic=deterministic,
            progress=progress,
        )
        limits = plan_kv_blocks(
            kv_cache_memory, self._model.backend, settings, max_context=self._model.spec.max_context
        )
        self._model.backend.start(limits)
        self._limits: StepLimits = limits
        self._inputs = StepInputs(block_size)
        settings = dataclasses.replace(settings, num_blocks=limits.num_blocks, max_context=self._model.spec.max_context)
        step_time = None
        if itl_limit_ms is not None or ttft_limit_ms is not None:
            step_time = measured_step_time(self._model.backend, self._inputs, settings)
        if itl_limit_ms is not None and step_time is not None:
            check_itl_limit(itl_limit_ms, step_time)
        self._scheduler = Scheduler(settings, step_time=step_time, model_id=self._model.name)
        self._overlaps: bool = self._model.backend.is_asynchronous if overlap is None else overlap
        self._flight: _Flight | None = None  # with overlap: the pass whose tokens were not taken yet
        _open_engines.add(self)

    # What it is ------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> LoadedModel:
        """The loaded model: name, spec, tokenizer, sampling defaults, end-of-sequence ids."""
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises InvalidRequest when its folder has none."""
        if self._model.tokenizer is None:
            raise InvalidRequest(
                f"Model {self._model.name!r} has no tokenizer.json; give prompts as token ids.", field="prompt"
            )
        return self._model.tokenizer

    @property
    def limits(self) -> StepLimits:
        """Sizes in force: tokens and sequences of a pass, context, block size and blocks of the KV pool."""
        return self._limits

    @property
    def default_sampling(self) -> SamplingParams:
        """SamplingParams() with this model's defaults filled in."""
        return SamplingParams().with_defaults(self._model.defaults.values)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is waiting or running, or an event was not fetched yet."""
        with self._lock:
            self._abort_dropped()
            return bool(self._live) or bool(self._pending)

    # Submit, step, abort ---------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> str:
        """Accept one prompt (text or token ids) and return its id; its events come from `step()`.

        Raises InvalidRequest, NeverFits, QueueFull, TTFTUnreachable, EngineClosed or EngineFailed; nothing is queued
        then.
        """
        return self._submit(prompt, params, request_id=request_id, options=options, events=None).request_id

    def step(self) -> list[StreamEvent]:
        """Run one pass and return what it added to each completion, oldest first.

        Each completion of an accepted request has exactly one event with a finish_reason, its last.
        """
        with self._lock:
            if not self._pending:
                self._advance()
            events, self._pending = self._pending, []
            return events

    def abort(self, request_id: str) -> bool:
        """End a request now, whatever its state; its events end with finish_reason "abort".

        Returns False when no such request is waiting or running (it never was, or it has ended). Nobody else changes.
        """
        with self._lock:
            submitted = self._live.get(request_id)
            if submitted is None:
                return False
            self._end(submitted, "abort", None)
            return True

    def _abort(self, submitted: _Submitted) -> None:
        """End this very request if it has not ended; its id may be another's by now."""
        with self._lock:
            self._end(submitted, "abort", None)

    # Pause -----------------------------------------------------------------------------------------------------------

    def pause(self, *, drain: bool = False) -> None:
        """Let no request start until `resume`; those that run go on. `drain` only names the reason that others wait."""
        with self._lock:
            self._scheduler.pause(Reason.DRAIN if drain else Reason.PAUSED)

    def resume(self) -> None:
        """Let requests start again."""
        with self._lock:
            self._scheduler.resume()

    # Why, and how well -----------------------------------------------------------------------------------------------

    def explain(
        self, request_id: str, index: int = 0, *, what_if: bool | Change | Sequence[Change] = True
    ) -> Explanation:
        """Why a request waited: the latest with this id, running or ended; print it, or take its data.

        Args:
            index: which of its n completions.
            what_if: other settings, such as `{"kv_blocks": 1.15, "max_num_seqs": 128}`, or a list of these, of which a
                replay is to tell by how much earlier it would have started. True: a few that are likely to matter, if
                the replay is short. False: none. It rests on the step-time model, which has to have seen some steps.

        Of an id that is not known, or no more, the answer says so. Raises InvalidRequest for changes that are none.
        """
        changes = _as_changes(what_if)
        with self._lock:
            log = self._scheduler.log
            answers = log.explain_id(request_id, time.monotonic_ns())
            answer = next((one for one in answers if one.index == index), None)
            if answer is None:
                raise InvalidRequest(
                    f"index is {index!r}; request {request_id!r} has {len(answers)} completions.",
                    field="index",
                    value=index,
                    limit=len(answers) - 1,
                )
            key, recorder = log.key_of(request_id, index), self._scheduler.recorder
            if (not changes and what_if is not True) or key is None or recorder is None:
                return answer
            for change in changes:
                changed_config(self._scheduler.config, change)
            if what_if is True and (answer.queue_ns == 0 or recorder.num_calls > MAX_CALLS_REPLAYED_UNASKED):
                return answer
            try:
                recording = recorder.recording(key)
            except RecordingError as error:
                return dataclasses.replace(answer, notes=(*answer.notes, f"No what-ifs: {error}"))
        # Others may go on while this is simulated.
        found = run_what_ifs(recording, key, changes or likely_changes(recording.config))
        problems = {one.problem for one in found}
        if len(problems) == 1 and None not in problems:
            return dataclasses.replace(answer, notes=(*answer.notes, f"No what-ifs: {problems.pop()}"))
        return dataclasses.replace(answer, what_ifs=tuple(found))

    def stats(self) -> EngineStats:
        """The fleet: what all waiting was for, how full batch and KV pool are, what preemption costs, step times."""
        with self._lock:
            scheduler = self._scheduler
            return scheduler.log.stats(
                time.monotonic_ns(), step_model=scheduler.step_time.summary(), policy_faults=scheduler.policy_faults
            )

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what the decision log still holds in the Chrome trace format, as Perfetto opens it."""
        with self._lock:
            save_trace(self._scheduler.log, path, time.monotonic_ns())

    def save_recording(self, path: str | os.PathLike[str]) -> None:
        """Write the recent calls as JSON lines that replay to the same plans. There is no text in it, and no token id.

        Raises RecordingError if the engine was never idle within what is kept.
        """
        with self._lock:
            recorder = self._scheduler.recorder
            assert recorder is not None
            recording = recorder.recording()
        recording.save(path)

    # Generate, stream, chat ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | None = None,
        on_error: Literal["return", "raise"] = "return",
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of prompts (text or token ids) in one continuous batch.

        Args:
            prompts: a text, a list of token ids, or a list of these.
            params: for all, or one for each prompt.
            options: class, tenant and limits, for all.
            on_error: "return": a refused prompt appears in its place with finish_reason "error" and `error` set;
                "raise": its error is raised and the others are aborted.

        Returns:
            one RequestOutput a prompt, in the order given.
        """
        if on_error not in ("return", "raise"):
            raise InvalidRequest(
                f"on_error is {on_error!r}; it must be 'return' or 'raise'.", field="on_error", value=on_error
            )
        listed = _as_prompts(prompts)
        each = _as_params(params, len(listed))
        accepted: list[_Submitted | RequestOutput] = []
        try:
            for prompt, one in zip(listed, each, strict=True):
                accepted.append(self._submit_or_report(prompt, one, options, raises=on_error == "raise"))
            waiting = deque(item for item in accepted if isinstance(item, _Submitted))
            while waiting:
                if waiting[0].is_finished:
                    done = waiting.popleft()
                    if done.error is not None and on_error == "raise":
                        raise done.error
                    continue
                self._advance()
                for item in waiting:
                    if item.events:
                        item.events.clear()
        finally:
            for submitted in accepted:
                if isinstance(submitted, _Submitted):
                    self._abort(submitted)
        return [self._output(item) if isinstance(item, _Submitted) else item for item in accepted]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, options: RequestOptions | None = None
    ) -> EventStream:
        """Complete one prompt; iterate over its events as they are made. Closing the iterator aborts the request."""
        return EventStream(self, self._submit(prompt, params, request_id=None, options=options, events=deque()))

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: RequestOptions | None = None,
        **template_variables: Any,
    ) -> RequestOutput:
        """Answer a conversation, [{"role": ..., "content": ...}, ...], rendered with the model's chat template."""
        token_ids = self.tokenizer.apply_chat_template(messages, tools=tools, **template_variables)
        return self.generate([token_ids], params, options=options, on_error="raise")[0]

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: RequestOptions | None = None,
        **template_variables: Any,
    ) -> EventStream:
        """As `chat`, but iterate over the answer as it is made."""
        token_ids = self.tokenizer.apply_chat_template(messages, tools=tools, **template_variables)
        return self.stream(token_ids, params, options=options)

    # Close -----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what is running and give all memory back. Closing twice is harmless."""
        with self._lock:
            if self._closed:
                return
            for submitted in list(self._live.values()):
                self._end(submitted, "abort", None)
            self._closed = True
            self._flight = None
            if self._failure is not None:
                traceback.clear_frames(self._failure.__traceback__)  # they would keep the backend's memory
            self._model.backend.close()

    def __enter__(self) -> Engine:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Inside: from a prompt to requests -------------------------------------------------------------------------------

    def _submit_or_report(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None, *, raises: bool
    ) -> Any:
        """The accepted request, or the output of a refused one. While the queue is full, passes are run."""
        try:
            while True:
                try:
                    return self._submit(prompt, params, request_id=None, options=options, events=deque())
                except QueueFull:
                    self._advance()
        except (EngineClosed, EngineFailed):
            raise
        except PyEngineError as error:
            if raises:
                raise
            return refused_output(prompt, error)

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        request_id: str | None,
        options: RequestOptions | None,
        events: deque[StreamEvent] | None,
    ) -> _Submitted:
        with self._lock:
            self._check_open()
            self._abort_dropped()
            if params is not None and not isinstance(params, SamplingParams):
                raise InvalidRequest(
                    f"params is a {type(params).__name__}; it must be a SamplingParams.", field="params", value=params
                )
            if options is not None and not isinstance(options, RequestOptions):
                raise InvalidRequest(
                    f"options is a {type(options).__name__}; it must be a RequestOptions.",
                    field="options",
                    value=options,
                )
            full = (params or SamplingParams()).with_defaults(self._model.defaults.values)
            self._check_against_model(full)
            text, token_ids = self._tokenize(prompt)
            submitted = _Submitted(
                self._claim_id(request_id),
                text,
                tuple(token_ids),
                full,
                options or RequestOptions(),
                time.monotonic(),
                events,
            )
            self._add_sequences(submitted)
            self._live[submitted.request_id] = submitted
            return submitted

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("The engine is closed; make a new one.")
        if self._failure is not None:
            raise EngineFailed(f"The engine failed and takes no new work: {self._failure}") from self._failure

    def _claim_id(self, request_id: str | None) -> str:
        if request_id is None:
            while True:
                self._next_id += 1
                if f"req-{self._next_id}" not in self._live:
                    return f"req-{self._next_id}"
        check_name("request_id", request_id)
        if not request_id:
            raise InvalidRequest("request_id is empty; leave it out, or name it.", field="request_id", value=request_id)
        if request_id in self._live:
            raise InvalidRequest(
                f"request_id {request_id!r} is in use by a request that has not ended.",
                field="request_id",
                value=request_id,
            )
        return request_id

    def _check_against_model(self, params: SamplingParams) -> None:
        if params.stop and self._model.tokenizer is None:
            raise InvalidRequest(
                f"stop is {params.stop!r}, but model {self._model.name!r} has no tokenizer.json and so makes no text.",
                field="stop",
                value=params.stop,
            )
        size = self._model.spec.vocab_size
        for name in ("logit_bias", "stop_token_ids"):
            for token_id in getattr(params, name):
                if token_id >= size:
                    raise InvalidRequest(
                        f"{name} has the token id {token_id}; the vocabulary has {size} tokens.",
                        field=name,
                        value=token_id,
                        limit=size - 1,
                    )

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("prompt is empty; it needs at least one character.", field="prompt", value=prompt)
            token_ids = self.tokenizer.encode(prompt)
            self._check_token_ids(token_ids)
            return prompt, token_ids
        listed: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # an array of ids
        if not isinstance(listed, Sequence) or isinstance(listed, (bytes, bytearray)):
            raise InvalidRequest(
                f"prompt is a {type(prompt).__name__}; it must be a string or a list of token ids.", field="prompt"
            )
        if not listed:
            raise InvalidRequest("prompt has no tokens; it needs at least one.", field="prompt", value=prompt, limit=1)
        self._check_token_ids(listed)
        return None, [int(token_id) for token_id in listed]

    def _check_token_ids(self, token_ids: Sequence[Any]) -> None:
        size = self._model.spec.vocab_size
        for position, token_id in enumerate(token_ids):
            if isinstance(token_id, bool) or not isinstance(token_id, Integral) or not 0 <= int(token_id) < size:
                raise InvalidRequest(
                    f"prompt has {token_id!r} at position {position}; token ids are integers from 0 to {size - 1}.",
                    field="prompt",
                    value=token_id,
                    limit=size - 1,
                )

    def _add_sequences(self, submitted: _Submitted) -> None:
        params, options, prompt = submitted.params, submitted.options, submitted.prompt_token_ids
        max_tokens, is_clamped = self._scheduler.clamp_max_tokens(len(prompt), params.max_tokens)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        eos_ids = frozenset[int]() if params.ignore_eos else self._model.eos_ids
        rules = EndRules(eos_ids, frozenset(params.stop_token_ids))
        for index in range(params.n):
            request = Request(
                submitted.request_id,
                prompt,
                max_tokens,
                index=index,
                max_tokens_clamped=is_clamped,
                priority=options.priority,
                tenant=options.tenant,
                cache_salt=options.cache_salt,
                ttft_limit_ns=_ns_of(options.ttft_limit_ms),
                itl_limit_ns=_ns_of(options.itl_limit_ms),
                needs_all_prompt_logits=params.prompt_logprobs is not None and index == 0,
            )
            row = SamplingRow(params, child_seed(seed, index), prompt, rules.all_ids)
            state = CompletionState(index, params, rules, self._model.tokenizer, prompt)
            sequence = _Sequence(submitted, request, row, state)
            request.payload = sequence
            submitted.sequences.append(sequence)
        if params.prompt_logprobs is not None:
            submitted.prompt_logprobs = [None]
        self._scheduler.add([sequence.request for sequence in submitted.sequences])

    # Inside: one step ------------------------------------------------------------------------------------------------

    def _abort_dropped(self) -> None:
        while self._dropped:
            self._abort(self._dropped.popleft())

    def _advance(self) -> None:
        """One pass; its events go where each request wants them. If nobody may start yet, a short sleep instead."""
        sleep_s = 0.0
        with self._lock:
            self._abort_dropped()
            if not self._live and self._flight is None:
                return
            try:
                sleep_s = self._step()
            except Exception as error:
                self._fail(error)
        if sleep_s > 0.0:
            time.sleep(sleep_s)  # others may submit meanwhile

    def _step(self) -> float:
        """Returns how long there is nothing to do, in seconds."""
        last = self._flight
        if last is not None and self._needs_tokens(last):
            self._land(last)
            last = None
        if last is not None:
            self._scheduler.expect(last.plan)
        plan = self._scheduler.schedule()
        for request, error in plan.refused:
            self._end(request.payload.owner, "error", error)
        flight, refusal = None, None
        if not plan.is_empty:
            try:
                flight = self._launch(plan, last)
            except _PlanRefused as error:
                refusal = error
        if last is not None:
            self._land(last)
        if refusal is not None:
            self._give_up(plan, refusal)
        self._flight = flight
        if flight is not None and not self._overlaps:
            self._land(flight)
        return self._idle_s() if plan.is_empty and last is None and self._live else 0.0

    @staticmethod
    def _needs_tokens(flight: _Flight) -> bool:
        """Whether the next draw of one of its rows depends on the token that is not here yet."""
        return any(row.target < 0 and row.sampling.depends_on_output for row in flight.rows)

    def _land(self, flight: _Flight) -> None:
        """Wait for the tokens of a pass and give them out."""
        self._flight = None
        result = StepInputs.read(flight.pending.wait(), len(flight.rows))
        taken = self._take_results(flight.plan, flight.rows, flight.owners, result)
        self._scheduler.commit(flight.plan, taken.token_ids, taken.finish_reasons)
        for event in taken.deltas:
            self._emit(*event)
        for submitted, failure in taken.failures:
            self._end(submitted, "error", failure)
        for sequence, *_ in taken.deltas:
            if sequence.owner.is_finished:
                self._live.pop(sequence.owner.request_id, None)

    def _idle_s(self) -> float:
        """How long to sleep before it makes sense to plan again. Raises RuntimeError if it never will."""
        wake_ns = self._scheduler.next_wake_ns()
        if wake_ns is None and not self._scheduler.is_paused:
            raise RuntimeError("the scheduler found nothing to run although requests are waiting")
        if wake_ns is None:
            return IDLE_SLEEP_S
        return min(IDLE_SLEEP_S, max(0.0, (wake_ns - time.monotonic_ns()) / 1e9))

    def _launch(self, plan: StepPlan, last: _Flight | None) -> _Flight:
        """Give `plan` to the device, behind `last`, whose tokens it may name by their rows: -1 - row."""
        rows, owners = self._logits_rows(plan)
        row_of = {} if last is None else last.row_of()
        chunks = []
        for request, start, count in zip(plan.requests, plan.num_computed, plan.num_new_tokens, strict=True):
            token_ids = request.token_ids[start : start + count]
            if token_ids[-1] == PENDING:
                token_ids[-1] = -1 - row_of[request]
            chunks.append(SequenceChunk(token_ids, start, request.block_table))
        staging, result = self._inputs.write(chunks, rows, plan.copies)
        try:
            pending = self._model.backend.launch(staging, result.size, uses_previous=last is not None)
        except ValueError as error:  # the binding checks a plan before it touches anything
            raise _PlanRefused(str(error)) from error
        return _Flight(plan, rows, owners, pending)

    def _give_up(self, plan: StepPlan, error: Exception) -> None:
        """End the requests of a pass that was refused before it ran; the others and the engine go on."""
        for request in plan.requests:
            failure = RequestFailed(f"Request {request.request_id!r} failed: its pass was refused: {error}")
            failure.__cause__ = error
            self._end(request.payload.owner, "error", failure)
        self._scheduler.commit(plan, [None] * len(plan.requests))

    def _logits_rows(self, plan: StepPlan) -> tuple[list[LogitsRow], list[int]]:
        """The rows of logits this pass needs, and for each the index of its request in the plan."""
        rows: list[LogitsRow] = []
        owners: list[int] = []
        first = 0
        for i, (request, count) in enumerate(zip(plan.requests, plan.num_new_tokens, strict=True)):
            sequence: _Sequence = request.payload
            start = plan.num_computed[i]
            if sequence.state.index == 0 and sequence.owner.prompt_logprobs is not None:
                for position in self._prompt_positions(sequence, start, count):
                    target = request.token_ids[position + 1]
                    wanted = sequence.owner.params.prompt_logprobs
                    rows.append(LogitsRow(first + position - start, sequence.row, position + 1, target, wanted or 0))
                    owners.append(i)
            if plan.samples[i]:
                wanted = sequence.owner.params.logprobs
                num_logprobs = -1 if wanted is None else wanted
                rows.append(LogitsRow(first + count - 1, sequence.row, start + count, -1, num_logprobs))
                owners.append(i)
            first += count
        return rows, owners

    @staticmethod
    def _prompt_positions(sequence: _Sequence, start: int, count: int) -> range:
        """Positions of this chunk whose successor is a prompt token with no log-probability reported yet."""
        known = sequence.owner.prompt_logprobs
        assert known is not None
        return range(max(start, len(known) - 1), min(start + count, sequence.request.num_prompt_tokens - 1))

    def _take_results(
        self, plan: StepPlan, rows: list[LogitsRow], owners: list[int], result: StepResult
    ) -> _TakenResults:
        taken = _TakenResults([None] * len(plan.requests))
        token_ids = result.token_ids.tolist()
        for r, (row, i) in enumerate(zip(rows, owners, strict=True)):
            sequence: _Sequence = plan.requests[i].payload
            if sequence.request.is_finished:  # aborted since the plan was made, or failed in an earlier row
                continue
            try:
                if token_ids[r] < 0:
                    raise RequestFailed(f"the logits of position {row.position} hold no finite value to choose from")
                if row.target >= 0:
                    assert sequence.owner.prompt_logprobs is not None
                    sequence.owner.prompt_logprobs.append(_logprobs(result, r, row.num_logprobs))
                    continue
                logprobs = _logprobs(result, r, row.num_logprobs) if row.num_logprobs >= 0 else None
                text = sequence.state.push(token_ids[r], logprobs, sequence.request.max_tokens)
            except Exception as error:  # a fault in one row ends that request, not the batch
                self._scheduler.abort(sequence.request, "error")
                failure = RequestFailed(f"Request {sequence.owner.request_id!r} failed: {error}.")
                failure.__cause__ = error
                taken.failures.append((sequence.owner, failure))
                continue
            sequence.row.append(token_ids[r])
            taken.token_ids[i] = token_ids[r]
            if sequence.state.finish_reason is not None:
                taken.finish_reasons[i] = sequence.state.finish_reason
            taken.deltas.append((sequence, text, (token_ids[r],), None if logprobs is None else (logprobs,)))
        return taken

    # Inside: ends and events -----------------------------------------------------------------------------------------

    def _emit(
        self,
        sequence: _Sequence,
        text: str,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> None:
        submitted, state = sequence.owner, sequence.state
        sequence.has_ended = is_last = state.finish_reason is not None
        event = StreamEvent(
            submitted.request_id,
            state.index,
            text,
            token_ids,
            logprobs,
            state.finish_reason,
            state.stop_reason,
            self._metrics(submitted) if is_last else None,
            submitted.error if is_last else None,
            self._output(submitted) if submitted.is_finished else None,
        )
        (self._pending if submitted.events is None else submitted.events).append(event)

    def _end(self, submitted: _Submitted, reason: Literal["abort", "error"], error: PyEngineError | None) -> None:
        """End every completion of one request that has not ended; the others of the batch are not touched."""
        if submitted.is_finished:
            return
        submitted.error = error
        for sequence in submitted.sequences:
            if not sequence.has_ended:
                self._scheduler.abort(sequence.request, reason)
                self._emit_end(sequence, reason)
        if self._live.get(submitted.request_id) is submitted:
            del self._live[submitted.request_id]

    def _emit_end(self, sequence: _Sequence, reason: str) -> None:
        try:
            text = sequence.state.end(reason)
        except Exception as error:  # the text layer failed on this request; it ends all the same
            sequence.state.finish_reason = reason
            sequence.owner.error = sequence.owner.error or RequestFailed(f"The last text could not be made: {error}")
            text = ""
        self._emit(sequence, text)

    def _fail(self, error: BaseException) -> None:
        """A pass failed as a whole: every request gets that error, and new ones are refused."""
        self._failure = error
        self._flight = None
        for submitted in list(self._live.values()):
            failure = EngineFailed(f"The pass that request {submitted.request_id!r} was part of failed: {error}")
            failure.__cause__ = error
            self._end(submitted, "error", failure)

    def _metrics(self, submitted: _Submitted) -> RequestMetrics:
        requests = [sequence.request for sequence in submitted.sequences]
        now_ns = time.monotonic_ns()
        arrival_ns = requests[0].arrival_ns
        times = tuple(tuple((t - arrival_ns) / 1e9 for t in request.token_times_ns) for request in requests)
        first = min((t[0] for t in times if t), default=None)
        ends = [now_ns if request.finished_ns is None else request.finished_ns for request in requests]
        return RequestMetrics(
            arrived_at=submitted.arrived_at,
            queue_s=requests[0].queue_ns_at(now_ns) / 1e9,
            first_token_s=first,
            finished_s=(max(ends) - arrival_ns) / 1e9 if submitted.is_finished else None,
            token_times_s=times,
            prompt_tokens=len(submitted.prompt_token_ids),
            cached_tokens=requests[0].num_cached_tokens,
            completion_tokens=sum(len(sequence.state.token_ids) for sequence in submitted.sequences),
            preemptions=sum(request.num_preemptions for request in requests),
            recomputed_tokens=sum(request.num_recomputed_tokens for request in requests),
            max_tokens=requests[0].max_tokens,
            max_tokens_clamped=requests[0].max_tokens_clamped,
        )

    def _output(self, submitted: _Submitted) -> RequestOutput:
        known = submitted.prompt_logprobs
        return RequestOutput(
            submitted.request_id,
            submitted.prompt,
            submitted.prompt_token_ids,
            tuple(sequence.state.completion() for sequence in submitted.sequences),
            submitted.is_finished,
            self._metrics(submitted),
            prompt_logprobs=None if known is None else tuple(known),
            error=submitted.error,
        )


class EventStream(Iterator[StreamEvent]):
    """The events of one request. Closing it, or dropping the last reference to it, aborts a request that still runs."""

    def __init__(self, engine: Engine, submitted: _Submitted) -> None:
        self._engine = engine
        self._submitted = submitted

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._submitted.request_id

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended (events may still be waiting to be taken)."""
        return self._submitted.is_finished

    @property
    def output(self) -> RequestOutput:
        """Everything so far, as `generate` would return it."""
        return self._engine._output(self._submitted)

    def __next__(self) -> StreamEvent:
        events = self._submitted.events
        assert events is not None
        while not events:
            if self._submitted.is_finished:
                raise StopIteration
            self._engine._advance()
        return events.popleft()

    def close(self) -> None:
        """Abort the request if it has not ended."""
        self._engine._abort(self._submitted)

    def __enter__(self) -> EventStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        submitted = getattr(self, "_submitted", None)  # None where __init__ did not run, as in a failed copy
        if submitted is not None and not submitted.is_finished:
            self._engine._dropped.append(submitted)


# A thread that is inside a native step when the interpreter ends would abort the process: engines are closed before.
_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_open_engines() -> None:
    for engine in list(_open_engines):
        engine.close()


def _logprobs(result: StepResult, r: int, num_logprobs: int) -> TokenLogprobs:
    top = zip(result.top_ids[r, :num_logprobs].tolist(), result.top_logprobs[r, :num_logprobs].tolist(), strict=True)
    return TokenLogprobs(
        int(result.token_ids[r]), float(result.logprobs[r]), tuple(pair for pair in top if pair[0] >= 0)
    )


def _as_changes(what_if: Any) -> list[Change]:
    if isinstance(what_if, bool):
        return []
    listed = [what_if] if isinstance(what_if, Mapping) else what_if
    if not isinstance(listed, Sequence) or not all(isinstance(one, Mapping) and one for one in listed):
        raise InvalidRequest(
            f"what_if is {what_if!r}; it must be True, False, settings with their values, or a list of these.",
            field="what_if",
            value=what_if,
        )
    return list(listed)


def _ns_of(milliseconds: float | None) -> int | None:
    return None if milliseconds is None else int(milliseconds * 1e6)


def _check_overlap(overlap: Any) -> None:
    if overlap is not None and not isinstance(overlap, bool):
        raise InvalidRequest(f"overlap is {overlap!r}; it must be True, False or None.", field="overlap", value=overlap)


def _check_num_threads(num_threads: int | None) -> None:
    if num_threads is not None and (
        isinstance(num_threads, bool) or not isinstance(num_threads, int) or not 1 <= num_threads <= MAX_THREADS
    ):
        raise InvalidRequest(
            f"num_threads is {num_threads!r}; it must be an integer from 1 to {MAX_THREADS} or None.",
            field="num_threads",
            value=num_threads,
            limit=MAX_THREADS,
        )


def _as_prompts(prompts: Any) -> list[Prompt]:
    """A list of prompts, whichever of the accepted forms was given."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidRequest(
            f"prompts is a {type(prompts).__name__}; it must be a string, a list of token ids, or a list of these.",
            field="prompts",
        )
    if not prompts:
        raise InvalidRequest("prompts is an empty list; it needs at least one prompt.", field="prompts", value=prompts)
    if all(isinstance(item, Integral) for item in prompts):
        return [prompts]
    return list(prompts)


def _as_params(params: Any, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise InvalidRequest(
            f"params is a {type(params).__name__}; it must be a SamplingParams or a list of them.", field="params"
        )
    if len(params) != count:
        raise InvalidRequest(
            f"params is a list of {len(params)} for {count} prompts; give one for all, or one for each.",
            field="params",
            value=len(params),
            limit=count,
        )
    return list(params)
