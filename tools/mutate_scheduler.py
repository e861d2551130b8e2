"""Makes small faults in the scheduler and the KV cache, one at a time, and counts how many the fast tests find.

    python tools/mutate_scheduler.py                     all faults
    python tools/mutate_scheduler.py --sample 8 --seed 3   a random sample, the same for the same seed
    python tools/mutate_scheduler.py --only fence        those with this in their name
    python tools/mutate_scheduler.py --list              the names

Each fault replaces one piece of text, which must occur exactly once in its file, so the list cannot rot silently. The
tests run in a temporary copy of the package. Exits with 1 if fewer than --least of the faults are found.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The quickest and sharpest first: pytest stops at the first failure.
TESTS = (
    "tests/kv_cache",
    "tests/properties/test_scheduler_admission.py",
    "tests/properties/test_scheduler_abort.py",
    "tests/properties/test_scheduler_guaranteed.py",
    "tests/properties/test_scheduler_preemption.py",
    "tests/properties/test_scheduler_siblings.py",
    "tests/properties/test_scheduler_details.py",
    "tests/properties/test_scheduler_promises.py",
    "tests/properties/test_scheduler_invariants.py",
    "tests/properties/test_scheduler_log.py",
    "tests/properties/test_scheduler_overlap.py",
    "tests/properties/test_scheduler_stress.py",
    "tests/properties/test_prefix_cache.py",
    "tests/properties/test_scheduler_state_machine.py",
    "tests/properties/test_scheduler_policy_machine.py",
    "tests/scheduler",
)
TIMEOUT_S = 300


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in pyengine/`file`."""

    name: str
    file: str
    old: str
    new: str


SCHEDULER, ADMISSION, CAPACITY = "scheduler/scheduler.py", "scheduler/admission.py", "scheduler/capacity.py"
FORECAST, ORDER, PACKING = "scheduler/forecast.py", "scheduler/order.py", "scheduler/packing.py"
RESERVATION, REFUSAL = "scheduler/reservation.py", "scheduler/refusal.py"
BATCHING, VICTIM, LATENCY = "scheduler/batching.py", "scheduler/victim.py", "scheduler/latency.py"
PLAN, LEDGER, LOG = "scheduler/plan.py", "scheduler/ledger.py", "scheduler/decision_log.py"
POOL, CACHE, BLOCKS, HASHES = (
    "kv_cache/block_pool.py",
    "kv_cache/kv_cache.py",
    "kv_cache/blocks.py",
    "kv_cache/block_hashes.py",
)

FAULTS = (
    # What a request needs
    Fault(
        "blocks: rounded down", BLOCKS, "return -(-num_tokens // block_size)", "return max(1, num_tokens // block_size)"
    ),
    Fault(
        "blocks: one token of the horizon too few",
        BLOCKS,
        "request.num_tokens + horizon",
        "request.num_tokens + max(0, horizon - 1)",
    ),
    Fault(
        "blocks: the last token gets no KV is forgotten",
        BLOCKS,
        "request.num_output_tokens - 1",
        "request.num_output_tokens",
    ),
    # Submit
    Fault(
        "submit: a prompt as long as the context",
        REFUSAL,
        "if num_prompt_tokens >= config.max_context:",
        "if num_prompt_tokens > config.max_context:",
    ),
    Fault(
        "submit: a prompt one block too long",
        REFUSAL,
        "if needed > config.num_blocks:",
        "if needed > config.num_blocks + 1:",
    ),
    Fault(
        "submit: clamped one token too low",
        REFUSAL,
        "config.num_blocks * config.block_size - num_prompt_tokens + 1)",
        "config.num_blocks * config.block_size - num_prompt_tokens)",
    ),
    Fault(
        "submit: the queue holds one more",
        SCHEDULER,
        "if self.num_waiting + num_new > limit:",
        "if self.num_waiting + num_new > limit + 1:",
    ),
    Fault(
        "submit: a refused request keeps its number",
        SCHEDULER,
        "                request.arrival_seq = -1\n",
        "                pass\n",
    ),
    # Steps
    Fault(
        "step: a late start is not refused",
        SCHEDULER,
        "while self._deadlines and self._deadlines[0][0] <= now_ns:",
        "while self._deadlines and self._deadlines[0][0] < now_ns - 5000:",
    ),
    Fault(
        "step: a late one that runs is refused",
        SCHEDULER,
        "if request.started_ns is None and not request.is_finished:",
        "if not request.is_finished:",
    ),
    Fault(
        "step: blocks are given in another order than they are taken",
        CACHE,
        "zip(requests, fresh, strict=True)",
        "zip(reversed(requests), fresh, strict=True)",
    ),
    Fault("step: held for ever", SCHEDULER, "if item[1] <= now_ns]", "if item[1] <= now_ns - 10**12]"),
    Fault(
        "step: only one victim for a block",
        SCHEDULER,
        "while request.state is RequestState.DECODE and not self._cache.grow(request):",
        "if request.state is RequestState.DECODE and not self._cache.grow(request):",
    ),
    Fault(
        "step: the wheel looks at the next bucket",
        SCHEDULER,
        "self._wheel[self._step % self.config.block_size]",
        "self._wheel[(self._step + 1) % self.config.block_size]",
    ),
    Fault(
        "step: paused, and yet they start",
        SCHEDULER,
        "        if self._paused_for is not None:\n            return self._paused_for\n",
        "",
    ),
    Fault(
        "step: no batch wait",
        SCHEDULER,
        "            if now_ns < until_ns:\n                self._wake_ns = until_ns",
        "            if now_ns > until_ns:\n                self._wake_ns = until_ns",
    ),
    Fault(
        "step: the seat gate is one short",
        SCHEDULER,
        "        if num_running == config.max_num_seqs:\n",
        "        if num_running + 1 == config.max_num_seqs:\n",
    ),
    Fault(
        "step: a fruitless scan is believed though time passed",
        SCHEDULER,
        "            and now_ns < known.valid_until_ns\n",
        "",
    ),
    Fault(
        "step: a fruitless scan is believed with more tokens",
        SCHEDULER,
        "            and draft.budget <= known.budget\n",
        "",
    ),
    Fault(
        "step: a fruitless scan is believed whatever changed", SCHEDULER, "            and known.state == state\n", ""
    ),
    Fault(
        "step: a fruitless scan under changing ranks",
        SCHEDULER,
        " and is_ours and self._waiting.is_fixed:",
        " and is_ours:",
    ),
    Fault(
        "step: a resumed prefix counts as cached",
        SCHEDULER,
        "        if request.started_ns is None:\n            request.num_cached_tokens",
        "        if True:\n            request.num_cached_tokens",
    ),
    Fault(
        "step: recomputed tokens are not counted",
        SCHEDULER,
        "request.num_recomputed_tokens += max(0, request.num_dropped_tokens - prefix.num_tokens)",
        "request.num_recomputed_tokens += 0",
    ),
    Fault(
        "step: nothing is charged",
        SCHEDULER,
        "self._order.granted(request, request.num_tokens - max(prefix.num_tokens, request.num_reached_tokens))",
        "self._order.granted(request, 0)",
    ),
    Fault(
        "step: tokens are charged again after a preemption",
        SCHEDULER,
        "request.num_tokens - max(prefix.num_tokens, request.num_reached_tokens))",
        "request.num_tokens - prefix.num_tokens)",
    ),
    Fault(
        "step: no refund",
        SCHEDULER,
        "self._order.granted(request, reached - request.num_tokens)",
        "self._order.granted(request, 0)",
    ),
    Fault(
        "step: the last step is one late",
        SCHEDULER,
        "last_step = self._step - 1 + request.max_tokens - request.num_output_tokens - 1",
        "last_step = self._step + request.max_tokens - request.num_output_tokens - 1",
    ),
    Fault(
        "step: a decode is put into the wrong bucket",
        SCHEDULER,
        "self._wheel[(self._step - request.num_computed_tokens) % self.config.block_size]",
        "self._wheel[(self._step - request.num_computed_tokens + 1) % self.config.block_size]",
    ),
    Fault(
        "step: KV of decodes is not counted down",
        SCHEDULER,
        "            self._num_decode_kv -= request.num_computed_tokens\n",
        "",
    ),
    Fault("step: limits of those that left still bind", SCHEDULER, "        self._count_itl_limit(request, -1)\n", ""),
    Fault("step: limits of those that run do not bind", SCHEDULER, "        self._count_itl_limit(request, 1)\n", ""),
    Fault(
        "leave: blocks in flight are not fenced",
        SCHEDULER,
        "if step is not None and request in step.plan.requests:",
        "if step is not None and request not in step.plan.requests:",
    ),
    Fault("leave: one that leaves keeps its charge", SCHEDULER, "        self._capacity.left(request)\n", ""),
    Fault(
        "leave: lengths are not learned", SCHEDULER, "            self._capacity.learn(request)\n", "            pass\n"
    ),
    Fault(
        "leave: a preempted one loses its tokens' count",
        SCHEDULER,
        "        request.num_dropped_tokens = num_dropped\n",
        "",
    ),
    Fault("leave: preemptions are not counted", SCHEDULER, "        request.num_preemptions += 1\n", ""),
    Fault(
        "commit: a token for one that left",
        SCHEDULER,
        "if plan.samples[i] and not request.is_finished:\n                assert",
        "if plan.samples[i]:\n                assert",
    ),
    Fault(
        "commit: an end for one that left",
        SCHEDULER,
        "            if plan.samples[i] and not plan.requests[i].is_finished:\n",
        "            if plan.samples[i]:\n",
    ),
    Fault(
        "wake: the time to wake is forgotten",
        SCHEDULER,
        "due = self._deadlines[0][0] if self._deadlines else NEVER_NS",
        "due = NEVER_NS",
    ),
    # Admission
    Fault(
        "admission: passing is not counted",
        ADMISSION,
        "self.head.bypassed_tokens += request.num_tokens - prefix.num_tokens",
        "self.head.bypassed_tokens += 0",
    ),
    Fault(
        "admission: the bypass budget is doubled",
        ADMISSION,
        "int(self.config.bypass_budget * head.num_prompt_tokens) - head.bypassed_tokens",
        "2 * int(self.config.bypass_budget * head.num_prompt_tokens) - head.bypassed_tokens",
    ),
    Fault(
        "admission: no aging barrier",
        ADMISSION,
        "        if head.queue_ns_at(self.now_ns) >= self.barrier_ns:\n",
        "        if False:\n",
    ),
    Fault(
        "admission: who would pass whole in the next step is cut",
        ADMISSION,
        "        if not whole_in_step and num_tokens <= draft.first_budget:",
        "        if False:",
    ),
    Fault(
        "admission: who passes may delay the head",
        ADMISSION,
        "        verdict = self._capacity.would_delay(reservation, request, num_steps)\n",
        "        verdict = Verdict(None)\n",
    ),
    Fault(
        "admission: a prefix in work is not waited for",
        ADMISSION,
        "            return Verdict(Reason.SHARED_PREFIX_PENDING), None\n",
        "            prefix = Prefix()\n",
    ),
    Fault(
        "admission: one seat too many",
        ADMISSION,
        "        if self.num_running == config.max_num_seqs:\n",
        "        if False:\n",
    ),
    Fault(
        "admission: tries without end",
        ADMISSION,
        "if self._num_tries > MAX_TRIES_A_REQUEST * self.config.window:",
        "if self._num_tries > 10**9:",
    ),
    Fault(
        "admission: a prompt of several steps is computed a step earlier",
        ADMISSION,
        "return 1 - (self._draft.budget - num_tokens) // least",
        "return 0 - (self._draft.budget - num_tokens) // least",
    ),
    Fault(
        "admission: limits of others leave as many tokens",
        ADMISSION,
        " or self._is_limited or request.itl_limit_ns is not None:",
        " or request.itl_limit_ns is not None:",
    ),
    Fault(
        "admission: its own limit leaves as many tokens",
        ADMISSION,
        " or self._is_limited or request.itl_limit_ns is not None:",
        " or self._is_limited:",
    ),
    Fault(
        "admission: who just started has no limit",
        ADMISSION,
        "        self._is_limited |= request.itl_limit_ns is not None\n",
        "",
    ),
    Fault(
        "capacity: a prompt of several steps takes the head's tokens",
        CAPACITY,
        "if num_steps > 1 and self._step + num_steps > reservation.first_step:",
        "if False:",
    ),
    Fault(
        "capacity: what the head finds in the cache is not counted",
        CAPACITY,
        "num_tokens = head.num_tokens - (0 if prefix is None else prefix.num_tokens)",
        "num_tokens = head.num_tokens",
    ),
    Fault(
        "capacity: the end of a prompt of several steps is known",
        CAPACITY,
        "last_step = self._step + horizon if is_whole else NO_END",
        "last_step = self._step + horizon",
    ),
    # Capacity
    Fault(
        "capacity: those that outlived their charge are not charged anew",
        CAPACITY,
        "                self._charge_decode(request, step)\n\n    def started",
        "                self._put(request, Charge(0, 0, bucket))\n\n    def started",
    ),
    Fault(
        "capacity: one block less than free",
        CAPACITY,
        "None if needed <= usable else Reason.KV_NOW",
        "None if needed < usable else Reason.KV_NOW",
    ),
    Fault(
        "capacity: one block more than the peak allows",
        CAPACITY,
        "    if final <= usable:\n",
        "    if final <= usable + 1:\n",
    ),
    Fault(
        "capacity: one block more than the ramp allows",
        CAPACITY,
        "if forecast.peak_with(num_blocks, final, last) <= most:",
        "if forecast.peak_with(num_blocks, final, last) <= most + 1:",
    ),
    Fault("capacity: the watermark holds for nobody", CAPACITY, "self.spare if num_running else 0)", "0)"),
    Fault(
        "capacity: the watermark holds when nothing runs", CAPACITY, "self.spare if num_running else 0)", "self.spare)"
    ),
    Fault(
        "capacity: the decode's known token is counted twice",
        CAPACITY,
        "horizon = self.expect(request) + request.num_tokens - known",
        "horizon = self.expect(request) + request.num_tokens - known + 16",
    ),
    Fault("capacity: ends are not cleaned up", CAPACITY, "            del enders[request]\n", ""),
    Fault(
        "capacity: the shorter outputs are looked at",
        CAPACITY,
        "first = bisect_right(known, made)",
        "first = 0",
    ),
    Fault(
        "capacity: outputs are never forgotten",
        CAPACITY,
        "            del self._sorted[bisect_right(self._sorted, oldest) - 1]\n",
        "",
    ),
    Fault(
        "capacity: a decode is charged a step late",
        CAPACITY,
        "decode_charge(request.num_tokens, self.expect(request), step, self._config.block_size)",
        "decode_charge(request.num_tokens, self.expect(request), step + 1, self._config.block_size)",
    ),
    Fault(
        "capacity: the head's spare is forgotten",
        CAPACITY,
        "usable, num_seats = config.num_blocks - self.spare,",
        "usable, num_seats = config.num_blocks,",
    ),
    Fault("capacity: ends are sorted by nothing", CAPACITY, "key=_last_step)", "key=lambda charge: -charge.last_step)"),
    Fault(
        "capacity: who passed is not counted behind the head",
        CAPACITY,
        "        reservation.take(*self._final_use(request, is_whole))\n",
        "        pass\n",
    ),
    # Reservation
    Fault(
        "reservation: who ends at the head's start does not delay it",
        RESERVATION,
        "if last_step < start.step:",
        "if last_step <= start.step:",
    ),
    Fault("reservation: one block too many", RESERVATION, "needed > self.usable or", "needed > self.usable + 1 or"),
    Fault(
        "reservation: only the certain start counts",
        RESERVATION,
        "for start in (self.early, self.certain):",
        "for start in (self.certain,):",
    ),
    Fault(
        "reservation: starts with the last step of another",
        RESERVATION,
        "self.step = last_step + 1",
        "self.step = last_step",
    ),
    Fault(
        "reservation: who has to end first keeps its blocks",
        RESERVATION,
        "        self._blocks[0] -= num_blocks\n",
        "",
    ),
    Fault(
        "reservation: who passes is gone a bucket early",
        RESERVATION,
        "            blocks[: last_step // self._size - self._bucket + 1] += num_blocks\n        return",
        "            blocks[: last_step // self._size - self._bucket] += num_blocks\n        return",
    ),
    # Forecast
    Fault(
        "forecast: those that end do not make room in their bucket",
        FORECAST,
        "own = future.blocks_behind",
        "own = future.blocks",
    ),
    Fault(
        "forecast: the head's growth is forgotten",
        FORECAST,
        "at_start + np.maximum(own, behind_rising - now)",
        "at_start + np.maximum(own, behind)",
    ),
    Fault(
        "forecast: the offset is rounded down",
        FORECAST,
        "offset=num_blocks_for(base + block_size - 1, block_size),",
        "offset=num_blocks_for(base, block_size),",
    ),
    Fault(
        "forecast: ends a bucket early",
        FORECAST,
        "last_bucket=(step + horizon) // block_size,",
        "last_bucket=(step + horizon - block_size) // block_size,",
    ),
    Fault(
        "forecast: a prefill keeps its seat",
        FORECAST,
        "            self._prefill_seats += sign\n",
        "            self._prefill_seats += 1\n",
    ),
    Fault(
        "forecast: no seat in the last bucket",
        FORECAST,
        "return cls(blocks_behind + finals, seats,",
        "return cls(blocks_behind + finals, seats_behind,",
    ),
    Fault("forecast: the last bucket is not charged", FORECAST, "cls(blocks_behind + finals,", "cls(blocks_behind,"),
    Fault("forecast: what is added is not in the bound", FORECAST, "self.at_most += charge.final", "pass"),
    Fault(
        "forecast: those that end grow on",
        FORECAST,
        "offsets[::-1].cumsum()[::-1] - offsets\n",
        "offsets[::-1].cumsum()[::-1]\n",
    ),
    Fault(
        "forecast: prefills do not count in the peak",
        FORECAST,
        "int(self._future.blocks.max(initial=0)) + self._prefill_blocks",
        "int(self._future.blocks.max(initial=0))",
    ),
    Fault(
        "forecast: room a bucket early", FORECAST, "self._bucket + int(found[-1]) + 1", "self._bucket + int(found[-1])"
    ),
    Fault(
        "forecast: old buckets stay when the window moves", FORECAST, "                column[len(kept) :] = 0\n", ""
    ),
    # Order
    Fault(
        "order: fifo is lifo",
        ORDER,
        "    def key(self, request: Request) -> Key:\n        return (request.arrival_seq,)\n",
        "    def key(self, request: Request) -> Key:\n        return (-request.arrival_seq,)\n",
    ),
    Fault(
        "order: priority without arrival",
        ORDER,
        "        return (request.priority_class, request.arrival_seq)\n",
        "        return (request.priority_class, -request.arrival_seq)\n",
    ),
    Fault("order: no credit for age", ORDER, "request.arrival_ns * AGE_CREDIT_TOKENS_PER_S", "0"),
    Fault(
        "order: no lift on return",
        ORDER,
        "self.service[lane[1]] = max(self.service.get(lane[1], 0), self._floor)",
        "self.service[lane[1]] = self.service.get(lane[1], 0)",
    ),
    Fault("order: outputs cost nothing", ORDER, "self._floor) + OUTPUT_WEIGHT * number", "self._floor) + 0 * number"),
    Fault(
        "order: one that stopped is charged on",
        ORDER,
        "        left = self._num_decoding.pop(request.tenant) - 1\n",
        "        left = self._num_decoding.pop(request.tenant)\n",
    ),
    Fault("order: nobody is promoted", ORDER, "            request.priority_class -= 1\n", ""),
    Fault(
        "order: promoted once only",
        ORDER,
        "            self.add(request, now_ns)  #",
        "            self._insert(request)  #",
    ),
    Fault(
        "order: a changed rank is not seen",
        ORDER,
        "if num_moved < len(lanes) and rank(name) != known_rank:",
        "if False:",
    ),
    Fault(
        "order: an empty lane stays",
        ORDER,
        "            del self._lanes[name]\n            self._order.closed(name)\n",
        "            pass\n",
    ),
    # Packing, batching, victim, latency
    Fault(
        "packing: strict order passes",
        PACKING,
        "                admission.block(request)\n                return\n",
        "                admission.block(request)\n",
    ),
    Fault(
        "packing: the worst fit first",
        PACKING,
        "sorted(able, key=admission.slack)",
        "sorted(able, key=admission.slack, reverse=True)",
    ),
    Fault(
        "packing: nobody passes",
        PACKING,
        "            if admission.head is not None:\n                behind.append(request)\n",
        "            if admission.head is not None:\n                pass\n",
    ),
    Fault(
        "batching: static is continuous",
        BATCHING,
        "return None if self._is_forming else Reason.STATIC_BATCH",
        "return None",
    ),
    Fault("batching: a batch is never formed again", BATCHING, "        self._is_forming |= num_running == 0\n", ""),
    Fault("batching: a shared prefix closes the batch", BATCHING, ", Reason.SHARED_PREFIX_PENDING)", ")"),
    Fault(
        "victim: nobody is protected", VICTIM, "MAX_PREEMPTIONS_UNPROTECTED = 2", "MAX_PREEMPTIONS_UNPROTECTED = 10**9"
    ),
    Fault(
        "victim: the earliest",
        VICTIM,
        "        return max(running, key=_arrival)\n",
        "        return min(running, key=_arrival)\n",
    ),
    Fault(
        "victim: the dearest",
        VICTIM,
        "                -request.num_computed_tokens,\n",
        "                request.num_computed_tokens,\n",
    ),
    Fault(
        "latency: no floor",
        LATENCY,
        "        if is_forced:\n            tokens = floor\n",
        "        if is_forced:\n            tokens = 0\n",
    ),
    Fault(
        "latency: decodes need no room",
        LATENCY,
        "        room = self._max_num_batched_tokens - num_decodes\n        if",
        "        room = self._max_num_batched_tokens\n        if",
    ),
    # Plan, ledger
    Fault("plan: the budget is not used up", PLAN, "        self.budget -= count\n", ""),
    Fault(
        "plan: samples too early", PLAN, "self.samples.append(count == left)", "self.samples.append(count >= left - 1)"
    ),
    Fault(
        "ledger: the shared time begins late",
        LEDGER,
        "parts[self._shared_index] += now_ns - self.begun_ns",
        "parts[self._shared_index] += max(0, now_ns - self.begun_ns - 1)",
    ),
    Fault(
        "ledger: an old snapshot is used",
        LEDGER,
        "        self.begun_ns = now_ns\n        self._snapshot = None\n",
        "        self.begun_ns = now_ns\n",
    ),
    Fault(
        "batching: a gate of the user's may close an empty engine",
        BATCHING,
        "if reason is not None and num_running == 0:",
        "if False:",
    ),
    # Block pool and cache
    Fault(
        "pool: one block too many is given",
        POOL,
        "        if count > self.num_free:\n",
        "        if count > self.num_free + 1:\n",
    ),
    Fault(
        "pool: idle blocks keep their keys when given out",
        POOL,
        "            for block in blocks[num_blank:]:\n                self._forget(block)\n",
        "",
    ),
    Fault(
        "pool: no fence",
        POOL,
        "            if fence is None:\n                self._put(released)\n",
        "            if True:\n                self._put(released)\n",
    ),
    Fault("pool: the fence is never lifted", POOL, "self._fenced.pop(step, ())", "self._fenced.pop(step + 1, ())"),
    Fault("pool: freed while others hold it", POOL, "if count == 1:\n", "if count >= 1:\n"),
    Fault(
        "pool: the most recently used goes first",
        POOL,
        "before, after = previous[sentinel], sentinel",
        "before, after = sentinel, following[sentinel]",
    ),
    Fault(
        "pool: a shared idle block stays in the free list",
        POOL,
        "                self._unlink(block)\n                self.num_free -= 1\n",
        "                self.num_free -= 1\n",
    ),
    Fault(
        "cache: the last token is found too",
        CACHE,
        "most = self._hash_blocks(request, (request.num_tokens - 1) // size)",
        "most = self._hash_blocks(request, request.num_tokens // size)",
    ),
    Fault(
        "cache: idle blocks of a prefix cost nothing",
        CACHE,
        "need(request, 0, self.block_size) - prefix.num_held",
        "need(request, 0, self.block_size) - prefix.num_tokens // self.block_size",
    ),
    Fault(
        "cache: siblings share all of the prompt",
        CACHE,
        "request.num_prompt_tokens - 1\n        if group",
        "request.num_prompt_tokens\n        if group",
    ),
    Fault(
        "cache: blocks in flight are found",
        CACHE,
        "            self._index_blocks(request, num_settled_tokens)\n",
        "            self._index_blocks(request, request.num_computed_tokens)\n",
    ),
    Fault(
        "cache: blocks in flight are not fenced",
        CACHE,
        "self.pool.free(reversed(table[num_settled:]), fence)",
        "self.pool.free(reversed(table[num_settled:]))",
    ),
    Fault(
        "cache: the oldest blocks go first",
        CACHE,
        "            self.pool.free(reversed(table))\n",
        "            self.pool.free(table)\n",
    ),
    Fault(
        "cache: who stopped computing is waited for",
        CACHE,
        "        request.num_indexed_blocks = 0\n        self._blocks_came(request, None)\n",
        "        request.num_indexed_blocks = 0\n",
    ),
    Fault(
        "cache: who left still holds the prompt",
        CACHE,
        "            request.group.holders.pop(request, None)\n",
        "            pass\n",
    ),
    Fault(
        "overlap: those at max_tokens get one token more",
        SCHEDULER,
        "        for request in self._last_steps.pop(plan.step, ()):\n",
        "        for request in ():\n",
    ),
    Fault(
        "overlap: the token takes the place of the one before it",
        SCHEDULER,
        "request.token_ids[num_computed + num_new] = token_id",
        "request.token_ids[num_computed + num_new - 1] = token_id",
    ),
    Fault(
        "overlap: the time of a token of one that came back is lost",
        SCHEDULER,
        "request.step_times is None or request.first_decode_step > plan.step",
        "request.step_times is None",
    ),
    Fault(
        "overlap: who ends keeps a token that never came",
        SCHEDULER,
        "            del request.token_ids[-1]\n",
        "            pass\n",
    ),
    Fault(
        "overlap: the time a step waited for the one before it counts as its own",
        SCHEDULER,
        "started_ns = max(step.started_ns, self._last_commit_ns)",
        "started_ns = step.started_ns",
    ),
    Fault(
        "overlap: a late token is given to who has ended",
        SCHEDULER,
        "            if not samples or request.is_finished:\n                continue\n            assert token_id",
        "            if not samples:\n                continue\n            assert token_id",
    ),
    Fault(
        "overlap: a replay forgets that a step was expected",
        "scheduler/replay.py",
        "        self._scheduler.expect(self._plans[0])\n",
        "",
    ),
    Fault("hashes: the salt is forgotten", HASHES, "for part in (model_id, salt):", "for part in (model_id,):"),
    Fault("hashes: the parent is forgotten", HASHES, "parent = blake2b(parent + data", "parent = blake2b(data"),
)


def check(fault: Fault) -> str | None:
    """What is wrong with `fault` itself; None: nothing."""
    number = (ROOT / "pyengine" / fault.file).read_text().count(fault.old)
    if number != 1:
        return f"{fault.name}: the text to be replaced occurs {number} times in {fault.file}"
    return "the replacement changes nothing" if fault.old == fault.new else None


def copy_tree(source: Path, target: Path) -> None:
    """What the tests need, from one folder to another."""
    ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for name in ("pyengine", "tests"):
        shutil.copytree(source / name, target / name, ignore=ignored)
    shutil.copy(source / "pyproject.toml", target)


def is_found(fault: Fault | None, source: Path, python: str) -> tuple[bool, str, float]:
    """Whether the tests fail with `fault`, and the last line that they said; without one, whether they fail at all."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder)
        copy_tree(source, root)
        if fault is not None:
            path = root / "pyengine" / fault.file
            path.write_text(path.read_text().replace(fault.old, fault.new))
        tests = [test for test in TESTS if (root / test).exists()]
        command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-W", "ignore", *tests]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return True, "the tests do not end", time.monotonic() - started
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    lines = said.strip().splitlines()
    return process.returncode != 0, (failed or lines[-1:] or [""])[0], time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, help="so many at random; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", help="those whose name or file has this in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--least", type=float, default=0.95, help="the part that must be found")
    parser.add_argument("--list", action="store_true", help="only print the faults")
    args = parser.parse_args()
    problems = [problem for problem in map(check, FAULTS) if problem is not None]
    if problems:
        print("\n".join(problems))
        return 2
    faults = [fault for fault in FAULTS if args.only is None or args.only in fault.name or args.only in fault.file]
    if args.sample is not None:
        faults = random.Random(args.seed).sample(faults, min(args.sample, len(faults)))
    if args.list:
        print("\n".join(f"{fault.file:28} {fault.name}" for fault in faults))
        return 0
    survived = []
    with tempfile.TemporaryDirectory(prefix="unchanged-") as folder, ThreadPoolExecutor(args.jobs) as pool:
        copy_tree(ROOT, Path(folder))  # once, so that all faults are made in the same source
        broken, said, seconds = is_found(None, Path(folder), sys.executable)
        if broken:
            print(f"The tests fail without any fault: {said}")
            return 2
        print(f"{len(faults)} faults; the tests alone take {seconds:.0f} s", flush=True)
        for fault, found, said, seconds in pool.map(
            lambda fault: (fault, *is_found(fault, Path(folder), sys.executable)), faults
        ):
            if not found:
                survived.append(fault)
            print(f"{'killed  ' if found else 'SURVIVED'} {seconds:4.0f} s  {fault.name}: {said[:150]}", flush=True)
    number = len(faults)
    print(f"{number - len(survived)} of {number} killed ({(number - len(survived)) / max(1, number):.1%})")
    for fault in survived:
        print(f"survived: {fault.name} ({fault.file})")
    return 1 if number - len(survived) < args.least * number else 0


if __name__ == "__main__":
    sys.exit(main())
