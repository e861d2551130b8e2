"""BlockPool: conservation, counts, order of reuse, fences, content that can be found again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pyengine.kv_cache.block_pool import BlockPool
from pyengine.kv_cache.blocks import last_horizon, need, num_blocks_for
from pyengine.request import Request


def taken(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def test_blocks_are_rounded_up_for_each_sequence_by_itself() -> None:
    assert [num_blocks_for(n, 16) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]
    assert 10 * num_blocks_for(17, 16) == 20


def test_the_last_output_token_needs_no_kv() -> None:
    request = Request("r", [1] * 31, max_tokens=2)
    assert need(request, 0, 16) == 2
    assert need(request, last_horizon(request), 16) == 2
    longer = Request("r", [1] * 31, max_tokens=3)
    assert need(longer, last_horizon(longer), 16) == 3


def test_too_large_an_allocation_changes_nothing() -> None:
    pool = BlockPool(4)
    taken(pool, 2)
    before = list(pool.free_blocks())
    assert pool.allocate(3) is None
    assert list(pool.free_blocks()) == before
    assert pool.num_free == 2
    pool.check()


def test_all_blocks_can_be_taken_and_the_last_one_freed_is_the_first_one_reused() -> None:
    pool = BlockPool(4)
    assert taken(pool, 4) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    assert taken(pool, 0) == []
    pool.free([2, 0])
    pool.free([3])
    pool.check()
    assert taken(pool, 3) == [3, 0, 2]


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(2)
    blocks = taken(pool, 1)
    pool.share(blocks)
    assert pool.refcount(blocks[0]) == 2
    pool.free(blocks)
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 2


def test_freeing_twice_raises() -> None:
    pool = BlockPool(2)
    blocks = taken(pool, 1)
    pool.free(blocks)
    with pytest.raises(RuntimeError, match="block 0 is freed"):
        pool.free(blocks)
    pool.check()


def test_freeing_a_fenced_block_raises() -> None:
    pool = BlockPool(2)
    blocks = taken(pool, 1)
    pool.free(blocks, fence=5)
    with pytest.raises(RuntimeError, match="block 0 is freed"):
        pool.free(blocks)


def test_sharing_a_free_block_raises() -> None:
    with pytest.raises(RuntimeError, match="block 1 is shared"):
        BlockPool(2).share([1])


def test_a_fenced_block_is_free_only_after_its_own_step() -> None:
    pool = BlockPool(3)
    pool.free(taken(pool, 2), fence=7)
    assert (pool.num_free, pool.num_fenced) == (1, 2)
    pool.lift_fence(6)
    assert pool.allocate(2) is None
    pool.lift_fence(7)
    assert (pool.num_free, pool.num_fenced) == (3, 0)
    pool.lift_fence(7)
    assert pool.num_free == 3
    pool.check()


def idle(pool: BlockPool, *keys: bytes) -> list[int]:
    """Make one idle block for each key, the first one the least recently used."""
    blocks = taken(pool, len(keys))
    for block, key in zip(blocks, keys, strict=True):
        assert pool.name([block], [key]) == 1
    pool.free(blocks)
    return blocks


def test_idle_blocks_are_free_and_are_handed_out_after_the_blank_ones_least_recently_used_first() -> None:
    pool = BlockPool(5)
    a, b, c = idle(pool, b"a", b"b", b"c")
    assert (pool.num_free, pool.num_idle) == (5, 3)
    assert taken(pool, 2) == [3, 4]
    assert pool.num_evicted == 0
    pool.free([4])
    assert taken(pool, 2) == [4, a]
    assert (pool.num_evicted, pool.num_idle) == (1, 2)
    assert pool.find(b"a") is None
    assert (pool.find(b"b"), pool.find(b"c")) == (b, c)
    pool.check()


def test_an_idle_block_that_is_shared_is_free_no_more_and_becomes_the_most_recently_used() -> None:
    pool = BlockPool(2)
    a, b = idle(pool, b"a", b"b")
    pool.share([a])
    assert (pool.num_free, pool.num_idle, pool.refcount(a)) == (1, 1, 1)
    pool.share([a])
    pool.free([a, a])
    assert list(pool.free_blocks()) == [b, a]
    pool.check()


def test_a_block_in_use_is_never_evicted() -> None:
    pool = BlockPool(2)
    a, b = idle(pool, b"a", b"b")
    pool.share([a])
    assert pool.allocate(2) is None
    assert taken(pool, 1) == [b]
    assert pool.find(b"a") == a


def test_of_two_blocks_of_one_content_the_idle_one_becomes_blank_and_a_held_one_stays() -> None:
    pool = BlockPool(3)
    [first] = taken(pool, 1)
    second, third = taken(pool, 2)
    assert pool.name([first], [b"a"]) == 1
    assert pool.name([first], [b"a"]) == 1
    assert pool.name([second], [b"a"]) == 0
    pool.free([first])
    assert (pool.find(b"a"), pool.num_idle) == (first, 1)
    assert pool.name([second], [b"a"]) == 1
    assert (pool.find(b"a"), pool.num_idle, pool.num_free) == (second, 0, 1)
    pool.check()
    pool.free([third])
    assert pool.num_idle == 0


def test_a_free_block_gets_no_key_and_a_block_has_only_one() -> None:
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="block 0 gets a key"):
        pool.name([0], [b"a"])
    taken(pool, 1)
    pool.name([0], [b"a"])
    with pytest.raises(RuntimeError, match="block 0 gets a key"):
        pool.name([0], [b"b"])
    pool.check()


def test_forgetting_idle_content_leaves_that_of_held_blocks() -> None:
    pool = BlockPool(4)
    _, b, _ = idle(pool, b"a", b"b", b"c")
    pool.share([b])
    pool.forget_idle()
    assert dict(pool.keys) == {b"b": b}
    assert (pool.num_free, pool.num_idle) == (3, 0)
    pool.check()
    pool.free([b])
    assert list(pool.free_blocks())[-1] == b


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model of multisets."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []
        self.blank = list(range(num_blocks))
        self.idle: list[int] = []
        self.keys: dict[int, bytes] = {}
        self.fenced: dict[int, list[int]] = {}
        self.step = 0
        self.num_evicted = 0

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        free = self.blank + self.idle
        if count > len(free):
            assert blocks is None
            return
        assert blocks == free[:count]
        num_evicted = max(0, count - len(self.blank))
        del self.blank[:count]
        for block in self.idle[:num_evicted]:
            del self.keys[block]
        del self.idle[:num_evicted]
        self.num_evicted += num_evicted
        self.tables.append(blocks)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.tables:
            table = data.draw(st.sampled_from(self.tables))
            self.pool.share(table)
            self.tables.append(list(table))

    @rule(data=st.data())
    def share_by_key(self, data: st.DataObject) -> None:
        if self.keys:
            block = data.draw(st.sampled_from(sorted(self.keys)))
            assert self.pool.find(self.keys[block]) == block
            self.pool.share([block])
            if block in self.idle:
                self.idle.remove(block)
            self.tables.append([block])

    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]))
    def name(self, data: st.DataObject, key: bytes) -> None:
        held = sorted({block for table in self.tables for block in table} - set(self.keys))
        if not held:
            return
        block = data.draw(st.sampled_from(held))
        others = [other for other, known in self.keys.items() if known == key]
        if any(other not in self.idle for other in others):
            assert self.pool.name([block], [key]) == 0
            return
        assert self.pool.name([block], [key]) == 1
        for other in others:
            del self.keys[other]
            self.idle.remove(other)
            self.blank.insert(0, other)
        self.keys[block] = key

    @rule(data=st.data(), is_fenced=st.booleans())
    def release(self, data: st.DataObject, is_fenced: bool) -> None:
        if not self.tables:
            return
        place = data.draw(st.integers(0, len(self.tables) - 1))
        is_fenced &= not set(self.tables[place]) & set(self.keys)
        table = self.tables.pop(place)
        left = Counter(block for other in self.tables for block in other)
        self.pool.free(table, fence=self.step if is_fenced else None)
        freed = [block for block in table if not left[block]]
        if is_fenced:
            self.fenced.setdefault(self.step, []).extend(freed)
        else:
            self.put(freed)

    def put(self, freed: list[int]) -> None:
        for block in freed:
            if block in self.keys:
                self.idle.append(block)
            else:
                self.blank.insert(0, block)

    @rule()
    def step_returns(self) -> None:
        self.pool.lift_fence(self.step)
        self.put(self.fenced.pop(self.step, []))
        self.step += 1

    @rule()
    def forget_idle(self) -> None:
        self.pool.forget_idle()
        for block in self.idle:
            del self.keys[block]
        self.blank += self.idle
        self.idle = []

    @invariant()
    def pool_agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert list(self.pool.free_blocks()) == self.blank + self.idle
        assert self.pool.num_idle == len(self.idle)
        assert self.pool.num_evicted == self.num_evicted
        assert dict(self.pool.keys) == {key: block for block, key in self.keys.items()}
        counts = Counter(block for table in self.tables for block in table)
        assert all(self.pool.refcount(block) == counts[block] for block in range(self.pool.num_blocks))
        assert self.pool.num_fenced == sum(map(len, self.fenced.values()))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
