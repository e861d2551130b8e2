"""A world for the scheduler: a clock, an exact ledger of waiting, and a device whose KV cache holds checkable values.

The device computes no numbers. The KV of a token is a fingerprint of all tokens up to it, so a read of a slot that
was overwritten, never written or copied wrongly is found; the next token is a function of that fingerprint, so any
token lost, doubled or computed from a wrong context changes the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

from pyengine.config import SchedulerConfig
from pyengine.kv_cache.block_hashes import extend_hashes, root_hash
from pyengine.request import LEGAL_MOVES, QUEUED_STATES, Request, RequestState
from pyengine.scheduler import Scheduler, StepPlan
from pyengine.scheduler.capacity import Guaranteed
from pyengine.scheduler.decision_log import DecisionLog
from pyengine.scheduler.step_time import StepTimeModel

VOCABULARY = 50
MAX_OUTPUTS = 300

# What most engines do: strict arrival order, a start when the present tokens fit, nothing kept of those that ended.
COMMON_RULE: dict[str, Any] = {"packing": "none", "capacity": "optimistic", "prefix_caching": False}


def fingerprints(token_ids: Sequence[int]) -> list[int]:
    """For each position, a number that depends on all the tokens up to it."""
    return list(accumulate(token_ids, lambda value, token: (value * 1_000_003 + token + 1) % (1 << 61), initial=0))[1:]


def next_token(last_fingerprint: int, index: int) -> int:
    return (last_fingerprint + 7 * index) % VOCABULARY


@lru_cache(maxsize=4096)
def expected_output(prompt: tuple[int, ...], index: int, count: int) -> list[int]:
    """What a request makes when it runs alone and nothing goes wrong."""
    tokens = list(prompt)
    value = fingerprints(tokens)[-1]
    for _ in range(count):
        tokens.append(next_token(value, index))
        value = (value * 1_000_003 + tokens[-1] + 1) % (1 << 61)
    return tokens[len(prompt) :]


@dataclass
class Row:
    request: Request
    tokens: list[int]
    table: list[int]
    num_computed: int
    num_new: int
    samples: bool


class Device:
    """KV slots by block. Inputs are read when a step is issued; it runs later, whatever was aborted meanwhile."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.kv: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]

    def read_inputs(self, plan: StepPlan) -> list[Row]:
        columns = zip(plan.requests, plan.num_computed, plan.num_new_tokens, plan.samples, strict=True)
        return [
            Row(request, list(request.token_ids), list(request.block_table), computed, new, samples)
            for request, computed, new, samples in columns
        ]

    def blocks_written(self, rows: list[Row], copies: list[tuple[int, int]]) -> list[int]:
        written = {destination for _, destination in copies}
        for row in rows:
            first, last = row.num_computed, row.num_computed + row.num_new - 1
            written.update(row.table[first // self.block_size : last // self.block_size + 1])
        return sorted(written)

    def run(self, rows: list[Row], copies: list[tuple[int, int]]) -> list[int | None]:
        for source, destination in copies:
            self.kv[destination] = list(self.kv[source])
        for row in rows:
            values = fingerprints(row.tokens)
            for position in range(row.num_computed, row.num_computed + row.num_new):
                self.kv[row.table[position // self.block_size]][position % self.block_size] = values[position]
        return [self._sample(row) for row in rows]

    def _sample(self, row: Row) -> int | None:
        count = row.num_computed + row.num_new
        values = fingerprints(row.tokens[:count])
        stored = [slot for block in row.table for slot in self.kv[block]]
        assert stored[:count] == values, f"{row.request!r} reads a wrong KV"
        return next_token(values[-1], row.request.index) if row.samples else None


Before = dict[Request, tuple[RequestState, int]]  # state and computed tokens of each before the step


@dataclass
class InFlight:
    plan: StepPlan
    rows: list[Row]


@dataclass
class World:
    """One scheduler with everything around it. Every method leaves the invariants checked where they can break."""

    config: SchedulerConfig
    now_ns: int = 0
    requests: list[Request] = field(default_factory=list)
    waited_ns: dict[Request, int] = field(default_factory=dict)
    in_flight: InFlight | None = None
    steps: int = 0
    step_time: StepTimeModel | None = None
    is_logged: bool = True

    def __post_init__(self) -> None:
        log = DecisionLog(self.config, enabled=self.is_logged, num_steps=512, num_records=4096)
        self.scheduler = self.make_scheduler(log)
        self.device = Device(self.config.num_blocks, self.config.block_size)
        self.last_states: dict[Request, RequestState] = {}

    def make_scheduler(self, log: DecisionLog) -> Scheduler:
        return Scheduler(self.config, clock=lambda: self.now_ns, step_time=self.step_time, log=log)

    def advance_clock(self, nanoseconds: int) -> None:
        """Let time pass."""
        self.now_ns += nanoseconds
        for request in self.requests:
            if request.state in QUEUED_STATES:
                self.waited_ns[request] += nanoseconds

    def make(self, prompt: list[int], max_tokens: int | None, n: int = 1, **fields: Any) -> list[Request]:
        limit, clamped = self.scheduler.clamp_max_tokens(len(prompt), max_tokens)
        name = f"r{len(self.requests)}"
        return [Request(name, prompt, limit, index=i, max_tokens_clamped=clamped, **fields) for i in range(n)]

    def submit(self, prompt: list[int], max_tokens: int | None, n: int = 1, **fields: Any) -> list[Request]:
        made = self.make(prompt, max_tokens, n, **fields)
        assert made[0].max_tokens <= MAX_OUTPUTS
        self.scheduler.add(made)
        for request in made:
            self.requests.append(request)
            self.waited_ns[request] = 0
            self.last_states[request] = RequestState.WAITING
        return made

    def issue(self) -> StepPlan:
        """schedule(), and read the inputs of the pass."""
        before = {request: (request.state, request.num_computed_tokens) for request in self.requests}
        plan = self.scheduler.schedule()
        self.steps += 1
        if not plan.is_empty:
            self.in_flight = InFlight(plan, self.device.read_inputs(plan))
        self.check_plan(plan, before)
        self.check_order(plan)
        self.check_guarantee(plan)
        return plan

    def finish_step(self, ends: dict[Request, str] | None = None) -> None:
        """Run the pass in flight and commit it; `ends` are the requests that end with this token, and how."""
        assert self.in_flight is not None
        plan, rows = self.in_flight.plan, self.in_flight.rows
        self.check_writes()
        ends = ends or {}
        tokens = self.device.run(rows, plan.copies)
        finish_reasons = {i: ends[row.request] for i, row in enumerate(rows) if row.samples and row.request in ends}
        finished_before = {request: list(request.token_ids) for request in self.requests if request.is_finished}
        self.in_flight = None
        self.scheduler.commit(plan, tokens, finish_reasons)
        for request, tokens_before in finished_before.items():
            assert request.token_ids == tokens_before, "a late result reached a request that had ended"
        for row in rows:
            if row.request not in finished_before:
                assert row.request.num_tokens == len(row.tokens) + row.samples

    def step(self, ends: dict[Request, str] | None = None) -> StepPlan:
        plan = self.issue()
        if not plan.is_empty:
            self.finish_step(ends)
        return plan

    def drain(self) -> None:
        """Run until nobody is left, within a bound on steps that a finite load must keep."""
        if self.in_flight is not None:
            self.finish_step()
        tokens = sum(r.num_prompt_tokens + r.max_tokens for r in self.requests if not r.is_finished)
        bound = self.steps + 20 + 8 * tokens
        while self.scheduler.has_unfinished:
            self.advance_clock(1000)
            plan = self.step()
            assert not plan.is_empty, "somebody waits, and nothing runs"
            assert self.steps <= bound, "a finite load does not end"
            self.check_everything()

    # ---- The properties

    def check_everything(self) -> None:
        self.check_structures()
        self.check_tables()
        self.check_waits()
        self.check_moves()
        self.check_outputs()
        self.check_writes()

    def check_structures(self) -> None:
        """One container each, refcount = number of tables, free + held + fenced = pool."""
        self.scheduler.check()
        live = [request for request in self.requests if not request.is_finished]
        assert set(live) == set(self.scheduler.unfinished())
        if not live and self.in_flight is None:
            assert self.scheduler.num_free_blocks == self.config.num_blocks

    def check_tables(self) -> None:
        """len(table) * block_size >= tokens with KV or planned, and < known tokens + block_size."""
        for request in self.requests:
            room = len(request.block_table) * self.config.block_size
            if request.state in (RequestState.PREFILL, RequestState.DECODE):
                assert request.num_computed_tokens <= room < request.num_tokens + self.config.block_size
            else:
                assert room == 0
                assert request.num_computed_tokens == 0
            if request.state is RequestState.PREFILL:
                assert room >= request.num_tokens
                assert request.num_computed_tokens < request.num_tokens

    def check_waits(self) -> None:
        """queue_ns is exactly the time accepted and not running."""
        for request in self.requests:
            assert request.queue_ns_at(self.now_ns) == self.waited_ns[request]

    def check_moves(self) -> None:
        """No terminal state is left, and no state is reached that legal edges do not reach."""
        for request in self.requests:
            last = self.last_states[request]
            if request.state is not last:
                assert request.state in _reachable(last), f"{last} -> {request.state}"
                self.last_states[request] = request.state

    def check_outputs(self) -> None:
        """Tokens are those that the request makes alone: none lost, none doubled, none from a wrong context."""
        for request in self.requests:
            made, prompt = request.output_token_ids, tuple(request.token_ids[: request.num_prompt_tokens])
            assert made == expected_output(prompt, request.index, MAX_OUTPUTS)[: len(made)]
            assert len(made) <= request.max_tokens
            assert len(request.token_times_ns) == len(made)
            assert request.is_finished == (request.finish_reason is not None)
            if request.finish_reason == "length":
                assert len(made) == request.max_tokens

    def check_writes(self) -> None:
        """The step in flight writes no block that is free or that two tables hold."""
        if self.in_flight is None:
            return
        pool = self.scheduler._cache.pool
        free = set(pool.free_blocks())
        for block in self.device.blocks_written(self.in_flight.rows, self.in_flight.plan.copies):
            assert block not in free
            assert pool.refcount(block) <= 1

    def check_plan(self, plan: StepPlan, before: Before) -> None:
        """All that is true of a plan by itself."""
        self.check_budget(plan)
        self.check_seats(plan)
        self.check_chunks(plan, before)
        self.check_decodes(plan, before)
        self.check_progress(plan)

    def check_budget(self, plan: StepPlan) -> None:
        """The tokens of a pass, counted from its inputs, are those of the plan and at most max_num_batched_tokens."""
        rows = [] if self.in_flight is None else self.in_flight.rows
        assert sum(row.num_new for row in rows) == plan.num_tokens <= self.config.max_num_batched_tokens

    def check_seats(self, plan: StepPlan) -> None:
        """At most max_num_seqs run, each once in the plan."""
        assert len(set(plan.requests)) == len(plan.requests) <= self.config.max_num_seqs
        assert self.scheduler.num_running <= self.config.max_num_seqs

    def check_chunks(self, plan: StepPlan, before: Before) -> None:
        """1 <= scheduled <= known - computed; who has no token left to compute samples; a prefix is never all."""
        for row_index, request in enumerate(plan.requests):
            computed, new = plan.num_computed[row_index], plan.num_new_tokens[row_index]
            assert 1 <= new <= request.num_tokens - computed
            assert plan.samples[row_index] == (computed + new == request.num_tokens)
            if request not in plan.joined:
                assert computed == before[request][1]
            elif not self.config.prefix_caching:
                assert computed < request.num_prompt_tokens

    def check_decodes(self, plan: StepPlan, before: Before) -> None:
        """Every decode that was not preempted has exactly one token in the plan."""
        decodes = [request for request, (state, _) in before.items() if state is RequestState.DECODE]
        assert set(decodes) <= {*plan.requests, *plan.preempted, *(request for request, _ in plan.refused)}
        # One that shares more when it comes back, or was not the last to be preempted, may fit again at once.
        resumed = set(plan.preempted) & set(plan.requests)
        assert resumed <= set(plan.joined)
        shares = self.config.prefix_caching or any(request.group for request in resumed)
        assert not resumed or shares or len(plan.preempted) > 1
        assert plan.num_decode_tokens == sum(1 for r in decodes if r in plan.requests and r not in resumed)
        assert set(plan.requests[: plan.num_decode_tokens]) == {r for r in decodes if r not in plan.preempted}
        assert plan.num_new_tokens[: plan.num_decode_tokens] == [1] * plan.num_decode_tokens

    def check_progress(self, plan: StepPlan) -> None:
        """While somebody is there something runs."""
        if self.scheduler.has_unfinished:
            assert not plan.is_empty, "somebody waits, and nothing runs"

    def check_order(self, plan: StepPlan) -> None:
        """Nobody starts before an earlier one that waits; and the first that waits does wait for something."""
        if self.config.packing != "none":
            return
        computing = {
            request.group
            for request, computed in zip(plan.requests, plan.num_computed, strict=True)
            if request.group and computed < request.num_prompt_tokens - 1 and not request.needs_all_prompt_logits
        }
        waiting = [
            request
            for request in self.requests
            if request.state in QUEUED_STATES
            and request.group not in computing
            and not self.is_computed_by_another(request)
        ]
        if not waiting:
            return
        first = min(waiting, key=lambda r: r.arrival_seq)
        assert all(request.arrival_seq < first.arrival_seq for request in plan.joined)
        running = [r for r in self.requests if r.state in (RequestState.PREFILL, RequestState.DECODE)]
        if self.config.capacity == "guaranteed":
            # Those whose prompt is computed by this very step were still prefills when it was planned.
            prefills = plan.requests[plan.num_decode_tokens :]
            has_room = self.peak_use(prefills) + self.last_blocks(first) <= self.config.num_blocks
        else:
            has_room = self.has_room_now(first, running)
        has_seat = len(running) < self.config.max_num_seqs
        has_tokens = plan.num_tokens < self.config.max_num_batched_tokens
        assert not (has_seat and has_tokens and has_room), f"{first!r} waits for nothing"

    def is_computed_by_another(self, request: Request) -> bool:
        """Whether `request` waits for a prefix; then a running one has yet to compute a full block of it."""
        other = self.scheduler._cache.waits_for(request)
        if other is None or (other.group is not None and other.group is request.group):
            return other is not None
        assert other.state in (RequestState.PREFILL, RequestState.DECODE)
        size = self.config.block_size
        known = min(other.num_tokens, request.num_tokens - 1) // size * size
        same = [i for i in range(size, known + 1, size) if other.token_ids[:i] == request.token_ids[:i]]
        found = {self.scheduler._cache.pool.find(block_hash) for block_hash in request.block_hashes[: len(same)]}
        assert None in found, f"{request!r} waits for what exists"
        assert other.cache_salt == request.cache_salt
        return True

    def has_room_now(self, first: Request, running: list[Request]) -> bool:
        needed = -(-first.num_tokens // self.config.block_size)
        shares = first.group is not None and not first.needs_all_prompt_logits
        if shares and any(request.group is first.group for request in running):
            needed -= (first.num_prompt_tokens - 1) // self.config.block_size
        spare = int(self.config.watermark * self.config.num_blocks) if running else 0
        return needed <= self.scheduler.num_free_blocks - spare

    def last_blocks(self, request: Request) -> int:
        return -(-(request.num_prompt_tokens + request.max_tokens - 1) // self.config.block_size)

    def peak_use(self, prefills: Sequence[Request] = ()) -> int:
        """The most blocks that running requests use together in a future bucket of steps, followed step by step."""
        use: dict[int, int] = {}
        size, step = self.config.block_size, self.scheduler._step
        always = 0
        for request in self.scheduler.running():
            if request.state is RequestState.PREFILL or request in prefills:
                always += self.last_blocks(request)
                continue
            worst: dict[int, int] = {}
            last = request.num_prompt_tokens + request.max_tokens - 1
            for tokens in range(request.num_computed_tokens, last + 1):
                worst[(step - 1 + tokens - request.num_computed_tokens) // size] = -(-tokens // size)
            for bucket, blocks in worst.items():
                use[bucket] = use.get(bucket, 0) + blocks
        return max(use.values(), default=0) + always

    def check_guarantee(self, plan: StepPlan) -> None:
        """Nobody is preempted, future use fits the pool, and the certificate is that use, no more and no less."""
        capacity = self.scheduler._capacity
        if isinstance(capacity, Guaranteed):
            assert not plan.preempted
            assert capacity.forecast.peak() == self.peak_use() <= self.config.num_blocks


class CachedWorld(World):
    """A world that also looks into the cache: what is found, who shares it, and what it holds on the device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parents: dict[bytes, bytes | None] = {}
        self.salts: dict[bytes, str] = {}
        self.values: dict[bytes, list[int]] = {}
        self.num_named: dict[Request, int] = {}

    def check_structures(self) -> None:
        super().check_structures()
        self.check_index()
        self.check_salts()

    def finish_step(self, ends: dict[Request, str] | None = None) -> None:
        super().finish_step(ends)
        self.check_index()

    def name_blocks(self) -> None:
        """Hash all full blocks of known tokens, apart from the cache."""
        size = self.config.block_size
        for request in self.requests:
            count = request.num_tokens // size
            if self.num_named.get(request) == count:
                continue
            made: list[bytes] = []
            extend_hashes(made, root_hash("", request.cache_salt), request.token_ids, count, size)
            known = fingerprints(request.token_ids)
            for i, block_hash in enumerate(made):
                self.parents[block_hash] = made[i - 1] if i else None
                self.salts[block_hash] = request.cache_salt
                self.values[block_hash] = known[i * size : (i + 1) * size]
            self.num_named[request] = count

    def check_index(self) -> None:
        """An index entry: the block holds exactly those tokens, with that salt. What is found is a tree; leaves first.

        The blocks that the step in flight writes are none of them.
        """
        self.name_blocks()
        pool = self.scheduler._cache.pool
        place = {block: i for i, block in enumerate(pool.free_blocks())}
        holders: dict[int, set[str]] = {}
        for request in self.scheduler.running():
            for block in request.block_table:
                holders.setdefault(block, set()).add(request.cache_salt)
        for block_hash, block in pool.keys.items():
            assert self.device.kv[block] == self.values[block_hash], f"block {block} is found and holds something else"
            assert holders.get(block, set()) <= {self.salts[block_hash]}
            parent_hash = self.parents[block_hash]
            if parent_hash is not None:
                parent = pool.find(parent_hash)
                assert parent is not None, "a block is found that nobody reaches"
                assert parent not in place or place[block] < place[parent], "a parent goes before its leaf"
        if self.in_flight is not None:
            for block in self.device.blocks_written(self.in_flight.rows, self.in_flight.plan.copies):
                assert block not in pool.keys.values(), "a block is found that the step in flight writes"

    def check_salts(self) -> None:
        """Each block is in the tables of one salt only."""
        salts: dict[int, str] = {}
        for request in self.scheduler.running():
            for block in request.block_table:
                assert salts.setdefault(block, request.cache_salt) == request.cache_salt


def _reachable(state: RequestState) -> set[RequestState]:
    seen: set[RequestState] = set()
    todo = [state]
    while todo:
        for following in LEGAL_MOVES[todo.pop()]:
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return seen
