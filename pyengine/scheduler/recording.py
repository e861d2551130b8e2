"""Recording: what came into a scheduler, and when, so that its plans can be made again. It holds no token and no text.

The scheduler is deterministic: with the same settings, calls and clock readings it makes the same plans. So a
recording has the calls and the clock readings, and of a prompt only its length and which of its blocks are the same
as others' (numbers given in the order in which blocks are first seen; the hashes themselves are not written).

`Recorder` keeps the latest calls of a running scheduler in fixed memory. `Recording` is what can be replayed: it
begins at a clean start, a moment at which nobody was waiting or running, with what the scheduler knew then.

A file is JSON lines. The first is the header, then one line a call; times are ns since the line before:

    {"format": "pyengine-recording", "version": 1, "lines": n, "config": {..}, "step_time": {..}, "start_ns": t, ..}
    {"arrive": dt, "requests": [{"key": 7, "prompt": 120, "max_tokens": 50, "outputs": 33, "end": "stop", ..}]}
    {"step": dt, "took": ns, "tokens": [decodes, prefill tokens], "ends": [[7, "stop"]]}    one begins, the oldest ends
    {"abort": dt, "key": 7, "reason": "abort"}
    {"begin": dt, "tokens": [1, 0]} .. {"end": dt}          a step during which something came, or an empty plan
    {"begin": dt, ..} {"expect": dt} {"step": dt, "took": ns, ..}     the second step begins before the first one ends
    {"hold": dt, "key": 7, "until": t}    {"wake": dt, "key": 7}    {"pause": dt, "reason": ..}    {"clear": dt}
"""

from __future__ import annotations

import dataclasses
import json
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyengine.config import SchedulerConfig
from pyengine.errors import PyEngineError
from pyengine.request import Request
from pyengine.scheduler.plan import StepPlan
from pyengine.scheduler.step_time import StepTimeModel

FORMAT = "pyengine-recording"
VERSION = 1
NUM_ROWS = 65_536
MAX_HASHES = 262_144
MAX_BLOCKS = 2**24  # of one request in a file
_STARTS = 32  # a clean start is noted at most once in so many parts of the memory

State = dict[str, Any]
"""What a scheduler knows while nobody is there; JSON-able but for "block_hashes", a list of bytes."""


class RecordingError(PyEngineError, ValueError):
    """A recording cannot be read, or does not reach back far enough; the message says where and why."""


# ---- What is recorded


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request of a recording.

    Attributes:
        key: its number in the order of acceptance, as `Request.arrival_seq` was.
        tenant: a number for each name.
        ttft_limit_ns / itl_limit_ns: its own; None if it had that of the settings, or none.
        num_output_tokens: how many it made until it ended, or until the recording was taken.
        finish_reason: how it ended; None if it had not.
        block_ids: of its full blocks, prompt and output; equal numbers are equal content.
    """

    key: int
    num_prompt_tokens: int
    max_tokens: int
    index: int = 0
    priority: int = 0
    tenant: int = 0
    ttft_limit_ns: int | None = None
    itl_limit_ns: int | None = None
    needs_all_prompt_logits: bool = False
    num_output_tokens: int = 0
    finish_reason: str | None = None
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrival:
    """The sequences of one submit were added."""

    now_ns: int
    requests: tuple[RecordedRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """One was aborted from outside."""

    now_ns: int
    key: int
    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """One was held."""

    now_ns: int
    key: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class Wake:
    """One was woken."""

    now_ns: int
    key: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Starts were paused for `reason`; None: they were resumed."""

    now_ns: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Clear:
    """The prefix cache was cleared."""

    now_ns: int


@dataclass(frozen=True, slots=True)
class Begin:
    """schedule() was called, and this is how large its plan was."""

    now_ns: int
    num_decodes: int
    num_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class Expect:
    """expect() was called for the plan in flight."""

    now_ns: int


@dataclass(frozen=True, slots=True)
class End:
    """commit() was called for the oldest plan in flight; these ended with their token, as the caller said."""

    now_ns: int
    ends: tuple[tuple[int, str], ...]


Event = Arrival | Abort | Hold | Wake | Pause | Clear | Begin | Expect | End


@dataclass(frozen=True, slots=True)
class Recording:
    """A clean start, and all that came after it.

    Attributes:
        config: the settings.
        step_time: the step-time model as it was at the end, as data.
        start_ns: the clock at the clean start.
        state: what the scheduler knew then (pyengine.scheduler.clean_state), block hashes and tenants as numbers.
        events: all calls, in their order.
    """

    config: SchedulerConfig
    step_time: Mapping[str, Any]
    start_ns: int
    state: Mapping[str, Any]
    events: tuple[Event, ...]

    def requests(self) -> dict[int, RecordedRequest]:
        """All that arrived, by key."""
        return {
            request.key: request for event in self.events if isinstance(event, Arrival) for request in event.requests
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON lines. Raises RecordingError if a policy is an object of the user's, which has no text."""
        lines = list(_lines(self))
        with open(path, "w", encoding="ascii") as file:
            for line in [_header(self, len(lines)), *lines]:
                file.write(json.dumps(line, separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Read what `save` wrote. Raises RecordingError, naming file, line and value, for anything else."""
        return _Reader(Path(path)).read()


# ---- While the scheduler runs

_ARRIVAL, _ABORT, _HOLD, _WAKE, _PAUSE, _CLEAR, _BEGIN, _EXPECT, _END = range(9)


class _Entry:
    """A request that the recorder knows; `request` is None once it has ended."""

    __slots__ = (
        "finish_reason",
        "hashes",
        "index",
        "is_dropped",
        "itl_limit_ns",
        "key",
        "max_tokens",
        "needs_all_prompt_logits",
        "num_hashes",
        "num_output_tokens",
        "num_prompt_tokens",
        "priority",
        "request",
        "tenant",
        "ttft_limit_ns",
    )

    def __init__(self, request: Request, config: SchedulerConfig) -> None:
        self.request: Request | None = request
        self.key = request.arrival_seq
        self.num_prompt_tokens = request.num_prompt_tokens
        self.max_tokens = request.max_tokens
        self.index = request.index
        self.priority = request.priority
        self.tenant = request.tenant
        self.ttft_limit_ns = _own_limit(request.ttft_limit_ns, config.ttft_limit_ms)
        self.itl_limit_ns = _own_limit(request.itl_limit_ns, config.itl_limit_ms)
        self.needs_all_prompt_logits = request.needs_all_prompt_logits
        self.num_output_tokens = 0
        self.finish_reason: str | None = None
        self.hashes: Sequence[bytes] = request.block_hashes
        self.num_hashes = len(self.hashes)
        self.is_dropped = False

    def settle(self) -> None:
        """Take from the request what changed while it ran."""
        if self.request is not None:
            self.num_output_tokens = self.request.num_output_tokens
            self.finish_reason = self.request.finish_reason
            self.hashes = self.request.block_hashes


@dataclass(frozen=True, slots=True)
class _Start:
    row: int
    now_ns: int
    state: State


class Recorder:
    """The latest calls of one scheduler, in fixed memory; the scheduler tells it of each, after it took effect.

    `state` gives what the scheduler knows (pyengine.scheduler.clean_state); it is called now, and later only while
    nobody is there. Memory: `num_rows` calls, two a step, and `max_hashes` block hashes; the oldest are dropped.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        step_time: StepTimeModel,
        *,
        state: Callable[[], State],
        num_rows: int = NUM_ROWS,
        max_hashes: int = MAX_HASHES,
        start_ns: int = 0,
    ) -> None:
        self._config = config
        self._step_time = step_time
        self._state = state
        self._size = num_rows
        self._max_hashes = max_hashes
        self._kinds = array("b", bytes(num_rows))
        self._times = array("q", bytes(8 * num_rows))
        self._decodes = array("q", bytes(8 * num_rows))
        self._prefill_tokens = array("q", bytes(8 * num_rows))
        self._details: list[Any] = [None] * num_rows
        self._number = 0  # rows ever written
        self._oldest = 0  # the first that is kept
        self._num_hashes = 0
        self._live: dict[Request, _Entry] = {}
        self._num_in_flight = 0
        self._starts: deque[_Start] = deque([_Start(0, start_ns, state())])

    # ---- What the scheduler calls

    def arrived(self, requests: Sequence[Request], now_ns: int) -> None:
        """These were added, the sequences of one submit."""
        entries = tuple(_Entry(request, self._config) for request in requests)
        for request, entry in zip(requests, entries, strict=True):
            self._live[request] = entry
            self._num_hashes += entry.num_hashes
        self._write(_ARRIVAL, now_ns, entries)
        self._keep_hashes_few()

    def aborted(self, request: Request, reason: str, now_ns: int) -> None:
        """One that was not finished was aborted."""
        self._write(_ABORT, now_ns, (request.arrival_seq, reason))
        self._note_start(now_ns)

    def held(self, request: Request, until_ns: int, now_ns: int) -> None:
        """One was held."""
        self._write(_HOLD, now_ns, (request.arrival_seq, until_ns))

    def woken(self, request: Request, now_ns: int) -> None:
        """One that was held was woken."""
        self._write(_WAKE, now_ns, request.arrival_seq)

    def paused(self, reason: str | None, now_ns: int) -> None:
        """Starts were paused, or resumed (None)."""
        self._write(_PAUSE, now_ns, reason)

    def cleared(self, now_ns: int) -> None:
        """The prefix cache was cleared."""
        self._write(_CLEAR, now_ns, None)

    def scheduled(self, plan: StepPlan, now_ns: int) -> None:
        """`plan` was made, empty or not."""
        place = self._write(_BEGIN, now_ns, None)
        self._decodes[place] = plan.num_decode_tokens
        self._prefill_tokens[place] = plan.num_prefill_tokens
        self._num_in_flight += not plan.is_empty
        if not self._live:
            self._note_start(now_ns)

    def expected(self, now_ns: int) -> None:
        """The plan in flight is expected."""
        self._write(_EXPECT, now_ns, None)

    def committed(self, plan: StepPlan, ends: Mapping[int, str], now_ns: int) -> None:
        """`plan` was committed; `ends` as the caller gave them, by place in the plan."""
        detail = tuple((plan.requests[i].arrival_seq, reason) for i, reason in ends.items()) if ends else None
        self._write(_END, now_ns, detail)
        self._num_in_flight -= 1
        if not self._live:
            self._note_start(now_ns)

    def ended(self, request: Request) -> None:
        """`request` is finished, however that came; called before the hook of the call that did it."""
        entry = self._live.pop(request)
        entry.settle()
        entry.request = None
        if not entry.is_dropped:
            self._num_hashes += len(entry.hashes) - entry.num_hashes
            entry.num_hashes = len(entry.hashes)
            self._keep_hashes_few()

    # ---- What can be asked

    @property
    def num_calls(self) -> int:
        """Calls that are kept."""
        return self._number - self._oldest

    def recording(self, key: int | None = None) -> Recording:
        """All that is kept from the oldest clean start on; with `key`, from the last one before that request arrived.

        Raises RecordingError if none is kept.
        """
        start = self._start_before(None if key is None else self._arrival_row(key))
        numbers, tenants = _Numbers(), {"": 0}
        state = _numbered_state(start.state, numbers, tenants)
        events = tuple(self._event(row, numbers, tenants) for row in range(start.row, self._number))
        return Recording(self._config, self._step_time.to_dict(), start.now_ns, state, events)

    def _arrival_row(self, key: int) -> int:
        for row in range(self._oldest, self._number):
            place = row % self._size
            if self._kinds[place] == _ARRIVAL and any(entry.key == key for entry in self._details[place]):
                return row
        raise RecordingError(
            f"The arrival of request number {key} is not among the last {self._number - self._oldest} calls recorded."
        )

    def _start_before(self, row: int | None) -> _Start:
        kept = [start for start in self._starts if start.row >= self._oldest and (row is None or start.row <= row)]
        if kept:
            return kept[0] if row is None else kept[-1]
        raise RecordingError(
            f"The engine was never empty within the last {self._number - self._oldest} calls recorded"
            f"{'' if row is None else ' before the request arrived'}, so they cannot be replayed."
        )

    # ---- The memory

    def _write(self, kind: int, now_ns: int, detail: Any) -> int:
        if self._number - self._oldest == self._size:
            self._drop_oldest()
        place = self._number % self._size
        self._kinds[place] = kind
        self._times[place] = now_ns
        self._details[place] = detail
        self._number += 1
        return place

    def _drop_oldest(self) -> None:
        place = self._oldest % self._size
        if self._kinds[place] == _ARRIVAL:
            for entry in self._details[place]:
                entry.is_dropped = True
                self._num_hashes -= entry.num_hashes
        self._details[place] = None
        self._oldest += 1

    def _keep_hashes_few(self) -> None:
        while self._num_hashes > self._max_hashes and self._oldest < self._number:
            self._drop_oldest()

    def _note_start(self, now_ns: int) -> None:
        """Note a clean start if this is one, and the last one is not recent."""
        if self._live or self._num_in_flight:
            return
        starts = self._starts
        while starts and starts[0].row < self._oldest:
            starts.popleft()
        if starts and self._number - starts[-1].row < self._size // _STARTS:
            return
        starts.append(_Start(self._number, now_ns, self._state()))

    def _event(self, row: int, numbers: _Numbers, tenants: dict[str, int]) -> Event:
        place = row % self._size
        kind, now_ns, detail = self._kinds[place], self._times[place], self._details[place]
        if kind == _BEGIN:
            return Begin(now_ns, self._decodes[place], self._prefill_tokens[place])
        if kind == _EXPECT:
            return Expect(now_ns)
        if kind == _END:
            return End(now_ns, detail or ())
        if kind == _ARRIVAL:
            return Arrival(now_ns, tuple(_recorded(entry, numbers, tenants) for entry in detail))
        if kind == _ABORT:
            return Abort(now_ns, *detail)
        if kind == _HOLD:
            return Hold(now_ns, *detail)
        if kind == _WAKE:
            return Wake(now_ns, detail)
        return Pause(now_ns, detail) if kind == _PAUSE else Clear(now_ns)


class _Numbers:
    """A number for each block hash, in the order in which they are first seen."""

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}

    def of(self, hashes: Iterable[bytes]) -> list[int]:
        known = self._known
        return [known.setdefault(block_hash, len(known)) for block_hash in hashes]


def _recorded(entry: _Entry, numbers: _Numbers, tenants: dict[str, int]) -> RecordedRequest:
    entry.settle()
    return RecordedRequest(
        key=entry.key,
        num_prompt_tokens=entry.num_prompt_tokens,
        max_tokens=entry.max_tokens,
        index=entry.index,
        priority=entry.priority,
        tenant=tenants.setdefault(entry.tenant, len(tenants)),
        ttft_limit_ns=entry.ttft_limit_ns,
        itl_limit_ns=entry.itl_limit_ns,
        needs_all_prompt_logits=entry.needs_all_prompt_logits,
        num_output_tokens=entry.num_output_tokens,
        finish_reason=entry.finish_reason,
        block_ids=tuple(numbers.of(entry.hashes)),
    )


def _numbered_state(state: State, numbers: _Numbers, tenants: dict[str, int]) -> State:
    # Least recently used is first, and a block is before the one that it continues: backwards, chains are in order.
    ids = numbers.of(reversed(state["block_hashes"]))
    service = {str(tenants.setdefault(name, len(tenants))): had for name, had in state["service"].items()}
    return {**state, "block_hashes": ids[::-1], "service": service}


def _own_limit(limit_ns: int | None, default_ms: float | None) -> int | None:
    return None if default_ms is not None and limit_ns == int(default_ms * 1e6) else limit_ns


# ---- The file

_REQUEST_FIELDS = {
    "key": "key",
    "num_prompt_tokens": "prompt",
    "max_tokens": "max_tokens",
    "index": "index",
    "priority": "priority",
    "tenant": "tenant",
    "ttft_limit_ns": "ttft_limit",
    "itl_limit_ns": "itl_limit",
    "needs_all_prompt_logits": "all_logits",
    "num_output_tokens": "outputs",
    "finish_reason": "end",
    "block_ids": "blocks",
}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(RecordedRequest)}


def _header(recording: Recording, num_lines: int) -> dict[str, Any]:
    config = dataclasses.asdict(recording.config)
    for name, value in config.items():
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise RecordingError(f"{name} is {value!r}, a policy of your own; a file can only name built-in ones.")
    state = {**recording.state, "block_hashes": _runs(recording.state["block_hashes"][::-1])}
    return {
        "format": FORMAT,
        "version": VERSION,
        "lines": num_lines,
        "config": config,
        "step_time": recording.step_time,
        "start_ns": recording.start_ns,
        "state": state,
    }


def _lines(recording: Recording) -> Iterator[dict[str, Any]]:
    last_ns = recording.start_ns
    begun: Begin | None = None
    for event in recording.events:
        if isinstance(event, End) and begun is not None:
            ends = {"ends": event.ends} if event.ends else {}
            yield {"step": begun.now_ns - last_ns, "took": event.now_ns - begun.now_ns, **_tokens(begun), **ends}
            begun, last_ns = None, event.now_ns
            continue
        if begun is not None:
            yield {"begin": begun.now_ns - last_ns, **_tokens(begun)}
            last_ns = begun.now_ns
        begun = event if isinstance(event, Begin) else None
        if begun is None:
            yield _line(event, event.now_ns - last_ns)
            last_ns = event.now_ns
    if begun is not None:
        yield {"begin": begun.now_ns - last_ns, **_tokens(begun)}


def _tokens(begin: Begin) -> dict[str, Any]:
    return {"tokens": (begin.num_decodes, begin.num_prefill_tokens)}


def _line(event: Event, dt: int) -> dict[str, Any]:
    if isinstance(event, Arrival):
        return {"arrive": dt, "requests": [_request_line(request) for request in event.requests]}
    if isinstance(event, Abort):
        return {"abort": dt, "key": event.key, "reason": event.reason}
    if isinstance(event, Hold):
        return {"hold": dt, "key": event.key, "until": event.until_ns}
    if isinstance(event, Wake):
        return {"wake": dt, "key": event.key}
    if isinstance(event, Pause):
        return {"pause": dt, "reason": event.reason}
    if isinstance(event, Expect):
        return {"expect": dt}
    if isinstance(event, End):
        return {"end": dt, "ends": event.ends}
    return {"clear": dt}


def _request_line(request: RecordedRequest) -> dict[str, Any]:
    line = {}
    for name, short in _REQUEST_FIELDS.items():
        value = getattr(request, name)
        if value != _DEFAULTS[name]:
            line[short] = _runs(value) if name == "block_ids" else value
    return line


def _runs(ids: Sequence[int]) -> list[int]:
    """`ids` as runs of consecutive numbers: first, count, first, count, and so on."""
    runs: list[int] = []
    for number in ids:
        if runs and number == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [number, 1]
    return runs


def _ids(runs: Sequence[int]) -> list[int]:
    return [number for i in range(0, len(runs), 2) for number in range(runs[i], runs[i] + runs[i + 1])]


class _Reader:
    """Reads one file; any surprise is a RecordingError with file, line and value."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._number = 0
        self._now_ns = 0

    def read(self) -> Recording:
        try:
            with open(self._path, encoding="ascii", errors="strict") as file:
                lines = file.read().splitlines()
        except UnicodeDecodeError as error:
            raise RecordingError(f"{self._path} is no recording: byte {error.start} is not ASCII.") from error
        if not lines:
            raise RecordingError(f"{self._path} is empty; a recording begins with a header.")
        header = self._parse(lines[0])
        config = self._check_header(header, len(lines) - 1)
        self._now_ns = self._int(header, "start_ns")
        try:
            StepTimeModel.from_dict(header["step_time"])
            state = {**header["state"], "block_hashes": _ids(header["state"]["block_hashes"])[::-1]}
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise self._error(f"step_time or state cannot be read ({error})") from error
        events: list[Event] = []
        for line in lines[1:]:
            self._number += 1
            self._read_line(self._parse(line), events)
        return Recording(config, header["step_time"], header["start_ns"], state, tuple(events))

    def _check_header(self, header: dict[str, Any], num_lines: int) -> SchedulerConfig:
        if header.get("format") != FORMAT:
            raise self._error(f"format is {header.get('format')!r}; a recording has {FORMAT!r}")
        if header.get("version") != VERSION:
            raise self._error(f"version is {header.get('version')!r}; this version of pyengine reads {VERSION}")
        if header.get("lines") != num_lines:
            raise self._error(f"{header.get('lines')!r} lines are announced, {num_lines} follow: the file was cut")
        try:
            return SchedulerConfig(**header["config"])
        except (KeyError, TypeError, PyEngineError) as error:
            raise self._error(f"config is {header.get('config')!r}, which is refused: {error}") from error

    def _parse(self, text: str) -> dict[str, Any]:
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise self._error(f"{_short(text)} is not JSON ({error.msg} at column {error.colno})") from error
        if not isinstance(line, dict) or not line:
            raise self._error(f"{_short(text)} is not an object with a call")
        return line

    def _read_line(self, line: dict[str, Any], events: list[Event]) -> None:
        kind = next(iter(line))
        dt = self._int(line, kind)
        self._now_ns += dt
        now_ns = self._now_ns
        if kind == "arrive":
            requests = self._list(line, "requests")
            events.append(Arrival(now_ns, tuple(self._request(request) for request in requests)))
        elif kind == "step":
            self._now_ns += self._int(line, "took")
            events.append(self._begin(line, now_ns))
            events.append(End(self._now_ns, self._ends(line)))
        elif kind == "begin":
            events.append(self._begin(line, now_ns))
        elif kind == "expect":
            events.append(Expect(now_ns))
        elif kind == "end":
            events.append(End(now_ns, self._ends(line)))
        elif kind == "abort":
            events.append(Abort(now_ns, self._int(line, "key"), self._text(line, "reason")))
        elif kind == "hold":
            events.append(Hold(now_ns, self._int(line, "key"), self._int(line, "until")))
        elif kind == "wake":
            events.append(Wake(now_ns, self._int(line, "key")))
        elif kind == "pause":
            events.append(Pause(now_ns, None if line.get("reason") is None else self._text(line, "reason")))
        elif kind == "clear":
            events.append(Clear(now_ns))
        else:
            raise self._error(f"{kind!r} is no call that a recording has")

    def _begin(self, line: dict[str, Any], now_ns: int) -> Begin:
        tokens = self._list(line, "tokens")
        if len(tokens) != 2 or not all(_is_count(value) for value in tokens):
            raise self._error(f"tokens is {tokens!r}; it must be two integers >= 0")
        return Begin(now_ns, tokens[0], tokens[1])

    def _ends(self, line: dict[str, Any]) -> tuple[tuple[int, str], ...]:
        ends = self._list(line, "ends") if "ends" in line else []
        for end in ends:
            if not (isinstance(end, list) and len(end) == 2 and _is_count(end[0]) and isinstance(end[1], str)):
                raise self._error(f"an end is {end!r}; it must be a key and a reason")
        return tuple((key, reason) for key, reason in ends)

    def _request(self, line: Any) -> RecordedRequest:
        values: dict[str, Any] = {}
        known = {short: name for name, short in _REQUEST_FIELDS.items()}
        for short, value in line.items() if isinstance(line, dict) else ():
            name = known.get(short)
            if name == "block_ids":
                if not isinstance(value, list) or len(value) % 2 or not all(_is_count(n) for n in value):
                    raise self._error(f"blocks is {_short(value)}; it must be pairs of integers >= 0")
                if sum(value[1::2]) > MAX_BLOCKS:
                    raise self._error(f"blocks is {_short(value)}, more than {MAX_BLOCKS} blocks")
                value = tuple(_ids(value))
            elif name == "finish_reason":
                value = self._text(line, short)
            elif name == "needs_all_prompt_logits":
                value = bool(value)
            elif name is not None and name != "priority":
                value = self._int(line, short)
            if name is None or (name == "priority" and (isinstance(value, bool) or not isinstance(value, int))):
                raise self._error(f"a request has {short} = {_short(value)}, which no request of a recording has")
            values[name] = value
        missing = [short for name, short in _REQUEST_FIELDS.items() if name in _REQUIRED and name not in values]
        if missing:
            raise self._error(f"request {_short(line)} has no {', '.join(missing)}")
        return RecordedRequest(**values)

    def _int(self, line: dict[str, Any], name: str) -> int:
        value: Any = line.get(name)
        if not _is_count(value):
            raise self._error(f"{name} is {_short(value)}; it must be an integer >= 0")
        return int(value)

    def _text(self, line: dict[str, Any], name: str) -> str:
        value = line.get(name)
        if not isinstance(value, str):
            raise self._error(f"{name} is {_short(value)}; it must be text")
        return value

    def _list(self, line: dict[str, Any], name: str) -> list[Any]:
        value = line.get(name)
        if not isinstance(value, list):
            raise self._error(f"{name} is {_short(value)}; it must be a list")
        return value

    def _error(self, what: str) -> RecordingError:
        return RecordingError(f"{self._path}, line {self._number + 1}: {what}.")


_REQUIRED = ("key", "num_prompt_tokens", "max_tokens")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
