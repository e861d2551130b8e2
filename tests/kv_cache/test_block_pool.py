"""BlockPool: conservation, counts, order of reuse, fences."""

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


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model of multisets."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []
        self.free = list(range(num_blocks))
        self.fenced: dict[int, list[int]] = {}
        self.step = 0

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        if count > len(self.free):
            assert blocks is None
            return
        assert blocks == self.free[:count]
        del self.free[:count]
        self.tables.append(blocks)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.tables:
            table = data.draw(st.sampled_from(self.tables))
            self.pool.share(table)
            self.tables.append(list(table))

    @rule(data=st.data(), is_fenced=st.booleans())
    def release(self, data: st.DataObject, is_fenced: bool) -> None:
        if not self.tables:
            return
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        left = Counter(block for other in self.tables for block in other)
        self.pool.free(table, fence=self.step if is_fenced else None)
        freed = [block for block in table if not left[block]]
        if is_fenced:
            self.fenced.setdefault(self.step, []).extend(freed)
        else:
            self.put_in_front(freed)

    def put_in_front(self, freed: list[int]) -> None:
        self.free = [*reversed(freed), *self.free]

    @rule()
    def step_returns(self) -> None:
        self.pool.lift_fence(self.step)
        self.put_in_front(self.fenced.pop(self.step, []))
        self.step += 1

    @invariant()
    def pool_agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert list(self.pool.free_blocks()) == self.free
        counts = Counter(block for table in self.tables for block in table)
        assert all(self.pool.refcount(block) == counts[block] for block in range(self.pool.num_blocks))
        assert self.pool.num_fenced == sum(map(len, self.fenced.values()))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
