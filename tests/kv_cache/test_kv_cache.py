"""KVCache: what is found is what was computed, for the same salt, and whoever runs keeps what it has."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyengine.kv_cache.block_hashes import extend_hashes, root_hash
from pyengine.kv_cache.kv_cache import NO_PREFIX, KVCache, Prefix
from pyengine.request import Request, RequestGroup

SIZE = 4
Content = tuple[str, tuple[int, ...]]  # salt, and all tokens up to the end of a block


def hash_of(content: Content) -> bytes:
    salt, tokens = content
    made: list[bytes] = []
    extend_hashes(made, root_hash("", salt), tokens, len(tokens) // SIZE, SIZE)
    return made[-1]


class Steps:
    """A cache, and steps that compute whole prompts at once unless told otherwise."""

    def __init__(self, num_blocks: int, prefix_caching: bool = True) -> None:
        self.cache = KVCache(num_blocks, SIZE, prefix_caching=prefix_caching)
        self.running: list[Request] = []
        self.step = 0

    def arrive(self, tokens: list[int], salt: str = "", n: int = 1, **fields: bool) -> list[Request]:
        made = [Request("r", tokens, 50, index=i, cache_salt=salt, **fields) for i in range(n)]  # type: ignore[arg-type]
        for request in made:
            request.group = RequestGroup(made) if n > 1 and request is made[0] else made[0].group
        for request in made:
            self.cache.arrived(request)
        return made

    def start(self, request: Request) -> Prefix:
        prefix = self.cache.find_prefix(request)
        assert prefix is not None
        needed, free = self.cache.need_fresh(request, prefix), self.cache.pool.num_free
        self.cache.start(request, prefix)
        assert free - self.cache.pool.num_free == needed
        self.running.append(request)
        return prefix

    def advance(self, request: Request, count: int | None = None) -> None:
        """A step that computes `count` known tokens of `request`, or all, is in flight."""
        left = request.num_tokens - request.num_computed_tokens
        request.num_computed_tokens += left if count is None else count
        self.cache.computed(request)

    def commit(self) -> None:
        self.cache.committed(self.step)
        self.step += 1
        self.cache.check(self.running)

    def end(self, request: Request) -> None:
        self.cache.release(request)
        self.running.remove(request)
        self.cache.check(self.running)

    def run(self, tokens: list[int], salt: str = "") -> Request:
        """A request that computes its prompt in one step and is still there."""
        [request] = self.arrive(tokens, salt)
        self.start(request)
        self.advance(request)
        self.commit()
        return request

    def decode(self, request: Request, token_id: int) -> None:
        """The newest token of `request` is `token_id`, and a step computes it."""
        request.token_ids.append(token_id)
        if request.num_tokens > len(request.block_table) * SIZE:
            assert self.cache.grow(request)
        request.num_computed_tokens += 1
        self.commit()

    def found(self, tokens: list[int], salt: str = "") -> int:
        """How many tokens of such a prompt a new request would not compute."""
        prefix = self.cache.find_prefix(Request("q", tokens, 1, cache_salt=salt))
        assert prefix is not None
        return prefix.num_tokens


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


# ---- Hits


def test_a_prompt_is_found_while_it_runs_and_afterwards() -> None:
    s = Steps(10)
    first = s.run(tokens(10))
    second = s.run(tokens(11))
    assert second.block_table[:2] == first.block_table[:2]
    assert s.cache.pool.refcount(first.block_table[0]) == 2
    blocks = first.block_table[:2]
    s.end(first)
    s.end(second)
    [third] = s.arrive(tokens(12))
    assert s.start(third) == Prefix(8, 0)
    assert third.block_table[:2] == blocks
    assert (s.cache.num_queried_tokens, s.cache.num_hit_tokens) == (33, 16)


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 8), (30, 8)])
def test_the_last_known_token_is_always_computed(length: int, found: int) -> None:
    s = Steps(10)
    s.run(tokens(11))
    assert s.found(tokens(length)) == found


def test_outputs_are_found_too_so_the_next_turn_of_a_conversation_hits() -> None:
    s = Steps(10)
    request = s.run(tokens(6))
    for token_id in range(100, 107):
        s.decode(request, token_id)
    whole = list(request.token_ids)
    assert len(whole) == 13
    s.end(request)
    assert s.found([*whole, 1, 2, 3]) == 12
    assert s.found([*whole[:11], 1, 2]) == 8


def test_a_block_that_outputs_fill_is_found_only_after_the_step_that_filled_it() -> None:
    s = Steps(10)
    request = s.run(tokens(7))
    request.token_ids.append(7)
    request.num_computed_tokens += 1  # in flight
    assert s.found(tokens(12)) == 4
    s.cache.release(request, fence=s.step, num_settled_tokens=7)
    s.running.remove(request)
    assert s.found(tokens(12)) == 4
    s.commit()
    assert s.found(tokens(12)) == 4
    assert s.cache.pool.num_free == 10


def test_outputs_of_one_that_is_aborted_in_flight_are_found_as_far_as_earlier_steps_computed_them() -> None:
    s = Steps(10)
    request = s.run(tokens(6))
    for token_id in range(6, 11):
        s.decode(request, token_id)
    request.token_ids.append(11)
    request.num_computed_tokens += 1  # in flight, and it fills the third block
    s.cache.release(request, fence=s.step, num_settled_tokens=11)
    s.running.remove(request)
    s.commit()
    assert s.found(tokens(20)) == 8


def test_after_a_preemption_outputs_hit_and_one_token_at_least_is_computed() -> None:
    s = Steps(10)
    request = s.run(tokens(6))
    for token_id in range(6, 13):
        s.decode(request, token_id)
    request.token_ids.pop()  # 12 known and 12 computed: as if the newest had no KV yet
    s.end(request)
    assert s.start(request).num_tokens == 8
    s.end(request)
    request.token_ids.append(99)
    assert s.start(request).num_tokens == 12


@pytest.mark.parametrize("salts", [("", "a"), ("a", ""), ("a", "b")])
def test_another_salt_finds_nothing(salts: tuple[str, str]) -> None:
    s = Steps(10)
    s.run(tokens(12), salts[0])
    assert s.found(tokens(12), salts[0]) == 8
    assert s.found(tokens(12), salts[1]) == 0
    assert s.found(tokens(12)[1:], salts[0]) == 0


def test_a_request_that_needs_all_prompt_logits_never_uses_the_cache_and_fills_it() -> None:
    s = Steps(10)
    s.run(tokens(6))
    [request] = s.arrive(tokens(10), needs_all_prompt_logits=True)
    assert s.start(request) == NO_PREFIX
    s.advance(request)
    s.commit()
    s.end(request)
    assert s.start(request) == NO_PREFIX
    assert s.cache.num_queried_tokens == 6


def test_without_prefix_caching_nothing_is_kept_and_nothing_is_hashed() -> None:
    s = Steps(10, prefix_caching=False)
    request = s.run(tokens(12))
    assert s.found(tokens(12)) == 0
    s.end(request)
    assert request.block_hashes == []
    assert s.cache.pool.num_idle == 0


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_siblings_share_the_partial_block_too(prefix_caching: bool) -> None:
    s = Steps(20, prefix_caching)
    leader, second = s.arrive(tokens(11), n=2)
    s.start(leader)
    assert s.cache.find_prefix(second) is None
    assert s.cache.waits_for(second) is leader
    s.advance(leader)
    s.commit()
    prefix = s.cache.find_prefix(second)
    assert prefix == Prefix(10, 2, leader)
    assert s.cache.need_fresh(second, prefix) == 1
    assert s.cache.start(second, prefix) == (leader.block_table[2], second.block_table[2])
    assert second.block_table[:2] == leader.block_table[:2]


def test_a_sibling_that_comes_back_takes_the_longer_of_its_own_and_the_shared_part() -> None:
    s = Steps(20)
    leader, second = s.arrive(tokens(7), n=2)
    for request in (leader, second):
        s.start(request)
        s.advance(request)
        s.commit()
    for token_id in range(50, 57):
        s.decode(second, token_id)
    s.end(second)
    assert s.cache.find_prefix(second) == Prefix(12, 1)
    del second.token_ids[8:]
    assert s.cache.find_prefix(second) == Prefix(6, 1, leader)


def test_known_hashes_are_used_as_they_are() -> None:
    """A recording has the hashes of prompt and output, and no tokens."""
    s = Steps(20)
    original = s.run(tokens(6))
    for token_id in range(6, 14):
        s.decode(original, token_id)
    s.end(original)
    replayed = Request("r", [0] * 6, 20)
    replayed.block_hashes, replayed.has_known_hashes = list(original.block_hashes), True
    s = Steps(20)
    s.cache.arrived(replayed)
    s.start(replayed)
    s.advance(replayed)
    s.commit()
    for _ in range(14):
        s.decode(replayed, 0)
    s.end(replayed)
    assert replayed.block_hashes == original.block_hashes
    assert s.found(tokens(20)) == 12


# ---- Waiting for one that computes


def test_one_that_arrives_with_the_same_prefix_waits_for_the_running_one_and_then_shares() -> None:
    s = Steps(20)
    [first], [second] = s.arrive(tokens(12)), s.arrive(tokens(16))
    assert s.cache.find_prefix(second) == NO_PREFIX
    s.start(first)
    s.advance(first, 6)
    assert s.cache.find_prefix(second) is None
    assert s.cache.waits_for(second) is first
    s.commit()
    assert s.cache.find_prefix(second) is None
    s.advance(first, 4)
    s.commit()
    assert s.cache.find_prefix(second) is None
    s.advance(first, 2)
    s.commit()
    assert s.cache.find_prefix(second) == Prefix(12, 3)


def test_nobody_waits_when_not_one_more_full_block_will_be_shared() -> None:
    s = Steps(20)
    [first] = s.arrive(tokens(12))
    s.start(first)
    for prompt in (tokens(3), tokens(4), [*tokens(3), 9, 9], tokens(12, first=1)):
        assert s.found(prompt) == 0
    s.advance(first, 8)
    s.commit()
    assert s.found(tokens(12)) == 8
    assert s.found([*tokens(8), 9, 9, 9, 9, 9]) == 8


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_the_wait_ends_when_the_one_that_computes_leaves(is_in_flight: bool) -> None:
    s = Steps(20)
    [first], [second] = s.arrive(tokens(12)), s.arrive(tokens(12))
    s.start(first)
    s.advance(first, 5)
    s.commit()
    assert s.cache.find_prefix(second) is None
    if is_in_flight:
        s.advance(first, 4)
        s.cache.release(first, fence=s.step, num_settled_tokens=5)
        s.running.remove(first)
    else:
        s.end(first)
    assert s.cache.find_prefix(second) == Prefix(4, 0)
    s.commit()
    assert s.cache.find_prefix(second) == Prefix(4, 0)
    s.cache.start(second, Prefix(4, 0))
    assert s.cache.find_prefix(first) is None
    assert s.cache.waits_for(first) is second


def test_nobody_waits_for_one_whose_block_will_not_be_found() -> None:
    """Another running one already computed the same, so what comes behind it is out of reach."""
    s = Steps(20)
    s.run(tokens(6))
    [logged] = s.arrive(tokens(12), needs_all_prompt_logits=True)
    s.start(logged)
    s.advance(logged, 5)
    s.commit()
    assert s.found(tokens(12)) == 4


def test_a_block_twice_computed_is_found_once_and_its_twin_takes_over_when_that_one_is_idle() -> None:
    s = Steps(20)
    first = s.run(tokens(8))
    second = s.run(tokens(8))  # finds one block, computes the other one again
    assert second.block_table[0] == first.block_table[0]
    assert second.block_table[1] != first.block_table[1]
    for token_id in range(8, 13):
        s.decode(second, token_id)
    assert s.found(tokens(20)) == 8
    twin = first.block_table[1]
    s.end(first)
    s.end(second)
    assert s.found(tokens(20)) == 12
    assert s.cache.pool.num_idle == 3
    assert twin in list(s.cache.pool.free_blocks())[:-3]


# ---- Eviction


def test_blank_blocks_go_first_then_the_least_recently_used_leaves_before_their_parents() -> None:
    s = Steps(9)
    old, new = s.run(tokens(9)), s.run(tokens(9, first=50))
    blocks = [*old.block_table[:2], *new.block_table[:2]]
    s.end(old)
    s.end(new)
    assert s.cache.pool.num_idle == 4
    assert s.cache.pool.allocate(5) is not None
    assert s.cache.pool.num_evicted == 0
    assert list(s.cache.pool.free_blocks()) == [blocks[1], blocks[0], blocks[3], blocks[2]]
    assert s.cache.pool.allocate(1) == [blocks[1]]
    assert s.found(tokens(9)) == 4
    assert s.found(tokens(9, first=50)) == 8


def test_a_hit_makes_a_prefix_the_most_recently_used() -> None:
    s = Steps(9)
    for first in (0, 50, 0):
        s.end(s.run(tokens(9, first)))
    assert s.cache.pool.allocate(7) is not None
    assert s.found(tokens(9)) == 8
    assert s.found(tokens(9, first=50)) == 0


def test_a_start_never_evicts_the_prefix_that_it_uses() -> None:
    s = Steps(4)
    s.end(s.run(tokens(9)))
    [request] = s.arrive(tokens(16))
    prefix = s.start(request)
    assert prefix == Prefix(8, 0)
    assert len(set(request.block_table)) == 4
    assert s.cache.pool.num_free == 0
    s.cache.check(s.running)


def test_idle_blocks_of_a_prefix_count_among_the_free_ones_that_a_start_takes() -> None:
    s = Steps(5)
    s.end(s.run(tokens(12)))
    first = s.run(tokens(5))
    [request] = s.arrive(tokens(17))
    prefix = s.cache.find_prefix(request)
    assert prefix == Prefix(12, 1)
    assert s.cache.need_fresh(request, prefix) == 4
    assert s.cache.pool.num_free == 3
    before = snapshot(s.cache, request)
    with pytest.raises(RuntimeError, match="not free"):
        s.cache.start(request, prefix)
    assert snapshot(s.cache, request) == before
    s.end(first)
    assert s.start(request) == Prefix(12, 0)
    assert s.cache.pool.num_free == 0


def test_a_start_with_the_prefix_of_a_sibling_that_has_left_changes_nothing() -> None:
    s = Steps(10, prefix_caching=False)
    leader, second = s.arrive(tokens(11), n=2)
    s.start(leader)
    s.advance(leader)
    s.commit()
    prefix = s.cache.find_prefix(second)
    assert prefix is not None
    s.end(leader)
    before = snapshot(s.cache, second)
    with pytest.raises(RuntimeError, match="holds the prefix"):
        s.cache.start(second, prefix)
    assert snapshot(s.cache, second) == before


def test_a_start_with_a_prefix_that_was_evicted_meanwhile_changes_nothing() -> None:
    s = Steps(5)
    s.end(s.run(tokens(9)))
    [request] = s.arrive(tokens(9))
    prefix = s.cache.find_prefix(request)
    assert prefix is not None
    s.cache.clear()
    before = snapshot(s.cache, request)
    with pytest.raises(RuntimeError, match="evicted"):
        s.cache.start(request, prefix)
    assert snapshot(s.cache, request) == before


def test_clearing_forgets_what_is_idle_and_not_what_is_held() -> None:
    s = Steps(10)
    s.end(s.run(tokens(9)))
    s.run(tokens(5))
    s.cache.clear()
    assert s.cache.pool.num_idle == 0
    assert s.found(tokens(9)) == 4
    s.cache.check(s.running)


def test_many_grow_at_once_as_they_would_one_after_the_other() -> None:
    together, apart = Steps(12), Steps(12)
    running = [[s.run(tokens(4 * i + 1, first=100 * i)) for i in range(1, 4)] for s in (together, apart)]
    assert together.cache.grow_all(running[0])
    assert all(apart.cache.grow(request) for request in running[1])
    tables = [[request.block_table for request in requests] for requests in running]
    assert tables[0] == tables[1]
    assert [len(table) for table in tables[0]] == [3, 4, 5]
    assert not together.cache.grow_all(running[0][:1])
    assert [len(table) for table in tables[0]] == [3, 4, 5]


def test_releasing_twice_gives_nothing_back_twice() -> None:
    s = Steps(10)
    request = s.run(tokens(9))
    table = list(request.block_table)
    s.end(request)
    assert (request.block_table, request.num_computed_tokens, request.num_indexed_blocks) == ([], 0, 0)
    s.cache.release(request)
    s.cache.check([])
    with pytest.raises(RuntimeError, match="nobody holds it"):
        s.cache.pool.free(table)


def snapshot(cache: KVCache, request: Request) -> tuple[object, ...]:
    pool = cache.pool
    return (
        list(pool.free_blocks()),
        [pool.refcount(block) for block in range(pool.num_blocks)],
        dict(pool.keys),
        (pool.num_free, pool.num_idle, pool.num_evicted, pool.num_fenced),
        dict(cache._computing),
        dict(cache._pending),
        (cache.num_hit_tokens, cache.num_queried_tokens),
        list(request.block_table),
        (request.num_computed_tokens, request.num_indexed_blocks),
    )


# ---- Any sequence of events

PROMPTS = st.tuples(
    st.sampled_from([(), (1,) * 4, (1,) * 7, (1,) * 8, (1,) * 4 + (2,) * 4]), st.lists(st.integers(1, 2), max_size=9)
).map(lambda parts: [*parts[0], *parts[1]] or [1])


class CacheMachine(RuleBasedStateMachine):
    """Requests start, are computed in chunks, decode, are aborted and preempted; a model holds what each block has."""

    @initialize(num_blocks=st.integers(3, 14), prefix_caching=st.sampled_from([True, True, True, False]))
    def begin(self, num_blocks: int, prefix_caching: bool) -> None:
        self.cache = KVCache(num_blocks, SIZE, prefix_caching=prefix_caching)
        self.contents: dict[int, Content] = {}  # of blocks written to the last token
        self.by_hash: dict[bytes, Content] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.in_flight: dict[Request, int] | None = None  # how much each had before
        self.step = 0

    @rule(
        prompt=PROMPTS,
        salt=st.sampled_from(["", "", "a"]),
        n=st.sampled_from([1, 1, 2]),
        logits=st.sampled_from([False, False, False, True]),
    )
    def arrive(self, prompt: list[int], salt: str, n: int, logits: bool) -> None:
        if len(self.waiting) > 6 or len(prompt) > self.cache.pool.num_blocks * SIZE:
            return
        made = [Request("r", prompt, 50, index=i, cache_salt=salt, needs_all_prompt_logits=logits) for i in range(n)]
        for request in made:
            request.group = RequestGroup(made) if request is made[0] and n > 1 else made[0].group
            self.cache.arrived(request)
        self.waiting += made

    @precondition(lambda self: self.in_flight is None)
    @rule(data=st.data())
    def start_some(self, data: st.DataObject) -> None:
        for request in list(self.waiting):
            prefix = self.cache.find_prefix(request)
            if prefix is None:
                computing = self.cache.waits_for(request)
                assert computing in self.running
                assert self.is_computing_for(computing, request)
                continue
            assert prefix.num_tokens < request.num_tokens
            assert prefix.num_tokens == 0 or not request.needs_all_prompt_logits
            if prefix.holder is None:
                assert prefix.num_tokens == self.longest_found(request)
            if not data.draw(st.booleans()):
                continue
            needed, free = self.cache.need_fresh(request, prefix), self.cache.pool.num_free
            before = snapshot(self.cache, request)
            if needed > free:
                with pytest.raises(RuntimeError, match="not free"):
                    self.cache.start(request, prefix)
                assert snapshot(self.cache, request) == before
                continue
            copy = self.cache.start(request, prefix)
            assert free - self.cache.pool.num_free == needed
            assert (copy is not None) == (prefix.num_tokens % SIZE > 0)
            self.waiting.remove(request)
            self.running.append(request)
            for block in request.block_table[prefix.num_tokens // SIZE :]:
                self.contents.pop(block, None)
            self.check_table(request)

    @precondition(lambda self: self.in_flight is None and self.running)
    @rule(data=st.data())
    def issue(self, data: st.DataObject) -> None:
        in_flight = {}
        for request in list(self.running):
            left = request.num_tokens - request.num_computed_tokens
            if left == 0:
                request.token_ids.append(data.draw(st.integers(1, 2)))
                if request.num_tokens > len(request.block_table) * SIZE and not self.cache.grow(request):
                    self.preempt(request)
                    continue
                self.contents.pop(request.block_table[-1], None)
                in_flight[request] = request.num_computed_tokens
                request.num_computed_tokens += 1
            elif chunk := data.draw(st.integers(0, left)):
                in_flight[request] = request.num_computed_tokens
                request.num_computed_tokens += chunk
                self.cache.computed(request)
        for request, before in in_flight.items():
            for block in request.block_table[before // SIZE : -(-request.num_computed_tokens // SIZE)]:
                assert self.cache.pool.refcount(block) == 1, "a block in two tables is written"
                assert block not in self.cache.pool.keys.values(), "a block that can be found is written"
        self.in_flight = in_flight
        self.written = {
            request.block_table[i]: (request.cache_salt, tuple(request.token_ids[: (i + 1) * SIZE]))
            for request in in_flight
            for i in range(in_flight[request] // SIZE, request.num_computed_tokens // SIZE)
        }

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def commit(self) -> None:
        self.contents.update(self.written)
        self.cache.committed(self.step)
        assert not self.cache._advanced
        self.step += 1
        self.in_flight = None

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        if self.in_flight is not None and request in self.in_flight:
            self.cache.release(request, fence=self.step, num_settled_tokens=self.in_flight[request])
        else:
            self.cache.release(request)
        assert all(other is not request for other in map(self.cache.waits_for, self.waiting))

    @precondition(lambda self: self.in_flight is None and self.running)
    @rule(data=st.data())
    def preempt_one(self, data: st.DataObject) -> None:
        self.preempt(data.draw(st.sampled_from(self.running)))

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.release(request)
        if request.num_tokens <= self.cache.pool.num_blocks * SIZE:
            self.waiting.append(request)

    def contents_of(self, request: Request) -> list[Content]:
        count = request.num_tokens // SIZE
        made = [(request.cache_salt, tuple(request.token_ids[: (i + 1) * SIZE])) for i in range(count)]
        self.by_hash.update((hash_of(content), content) for content in made)
        return made

    def longest_found(self, request: Request) -> int:
        if request.needs_all_prompt_logits:
            return 0
        known = set(self.cache.pool.keys)
        contents = self.contents_of(request)[: (request.num_tokens - 1) // SIZE]
        return next((i for i, c in enumerate(contents) if hash_of(c) not in known), len(contents)) * SIZE

    def is_computing_for(self, other: Request | None, request: Request) -> bool:
        """`other` is about to compute what `request` will share."""
        assert other is not None
        if other.group is not None and other.group is request.group:
            return other.num_computed_tokens < request.num_prompt_tokens - 1
        stop = self.longest_found(request) + SIZE
        same = other.token_ids[:stop] == request.token_ids[:stop] and other.cache_salt == request.cache_salt
        return same and other.num_computed_tokens < stop < request.num_tokens

    def check_table(self, request: Request) -> None:
        """Its full blocks that are computed hold its own tokens, of its own salt."""
        settled = request.num_computed_tokens
        if self.in_flight is not None:
            settled = self.in_flight.get(request, settled)
        for block, content in zip(request.block_table, self.contents_of(request)[: settled // SIZE], strict=False):
            assert self.contents[block] == content

    @invariant()
    def what_is_found_holds_what_its_hash_says(self) -> None:
        if not hasattr(self, "cache"):
            return
        for request in self.running:
            self.check_table(request)
        for key, block in self.cache.pool.keys.items():
            assert self.contents[block] == self.by_hash[key]

    @invariant()
    def blocks_are_conserved_and_refcounts_are_tables(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check(self.running)

    @invariant()
    def what_is_found_is_a_tree_and_leaves_go_first(self) -> None:
        if not hasattr(self, "cache"):
            return
        pool = self.cache.pool
        place = {block: i for i, block in enumerate(pool.free_blocks())}
        for key, block in pool.keys.items():
            salt, prefix = self.by_hash[key]
            if len(prefix) == SIZE:
                continue
            parent = pool.find(hash_of((salt, prefix[:-SIZE])))
            assert parent is not None
            assert pool.refcount(parent) >= pool.refcount(block)
            if parent in place:
                assert place[block] < place[parent]

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        if self.in_flight is not None:
            self.commit()
        for request in list(self.running):
            self.running.remove(request)
            self.cache.release(request)
        assert self.cache.pool.num_free == self.cache.pool.num_blocks
        assert not self.cache._computing
        assert not self.cache._pending
        self.cache.check([])


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_prefix_found_by_bisection_is_the_longest_for_every_length() -> None:
    s = Steps(40)
    for count in range(1, 40):
        s.end(s.run(tokens(count)))
        lengths = [s.found(tokens(length)) for length in range(1, 45)]
        assert lengths == [min((length - 1) // SIZE, count // SIZE) * SIZE for length in range(1, 45)]
        assert all(a <= b for a, b in pairwise(lengths))
