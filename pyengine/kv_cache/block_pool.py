"""BlockPool: which KV blocks are free, and how many tables hold each of the others. It never sees their content."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise


class BlockPool:
    """Blocks 0 to num_blocks - 1. Each is free, or held by `refcount` tables, or fenced.

    A fenced block is held by nobody, but a step in flight still writes it: it becomes free when that step returns.

    The free list is a doubly linked ring in two arrays, in the order in which blocks are handed out: last freed, first
    reused, because its memory is in the processor's caches, and so that a small load touches a small part of the pool.
    Taking from its front and putting there are O(1), and so is removal from its middle.

        next: num_blocks (sentinel) -> front -> ... -> back -> num_blocks
    """

    __slots__ = ("_fenced", "_next", "_previous", "_refcounts", "num_blocks", "num_fenced", "num_free")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_fenced = 0
        self._refcounts = array("q", bytes(8 * num_blocks))
        self._next = array("q", [*range(1, num_blocks + 1), 0])
        self._previous = array("q", [num_blocks, *range(num_blocks)])
        self._fenced: dict[int, list[int]] = {}

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks, each with refcount 1; None, and nothing is changed, if there are fewer."""
        if count > self.num_free:
            return None
        blocks = []
        following, refcounts, sentinel = self._next, self._refcounts, self.num_blocks
        block = following[sentinel]
        for _ in range(count):
            blocks.append(block)
            refcounts[block] = 1
            block = following[block]
        following[sentinel] = block
        self._previous[block] = sentinel
        self.num_free -= count
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more holder of each block. Raises RuntimeError for a block that nobody holds."""
        for block in blocks:
            if self._refcounts[block] == 0:
                raise RuntimeError(f"KV block {block} is shared, but nobody holds it.")
            self._refcounts[block] += 1

    def free(self, blocks: Iterable[int], fence: int | None = None) -> None:
        """Count one holder less of each block; those that nobody holds any more become free, the last one in front.

        With `fence` they do so only at lift_fence(fence), the number of the step in flight that still writes them.
        Raises RuntimeError for a block that nobody holds.
        """
        for block in blocks:
            count = self._refcounts[block]
            if count == 0:
                raise RuntimeError(f"KV block {block} is freed, but nobody holds it.")
            self._refcounts[block] = count - 1
            if count > 1:
                continue
            if fence is None:
                self._put_in_front(block)
            else:
                self._fenced.setdefault(fence, []).append(block)
                self.num_fenced += 1

    def lift_fence(self, step: int) -> None:
        """Free the blocks that were fenced until `step` returned; without such blocks nothing happens."""
        for block in self._fenced.pop(step, ()):
            self.num_fenced -= 1
            self._put_in_front(block)

    def refcount(self, block: int) -> int:
        """How many tables hold the block."""
        return self._refcounts[block]

    def free_blocks(self) -> Iterator[int]:
        """The free blocks, in the order in which they will be handed out."""
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            yield block
            block = self._next[block]

    def check(self) -> None:
        """Raise AssertionError unless each block is exactly one of free, held and fenced, and the counts say so."""
        free = list(islice(self.free_blocks(), self.num_blocks + 1))
        ring = [self.num_blocks, *free, self.num_blocks]
        for before, block in pairwise(ring):
            assert self._previous[block] == before, f"links around block {block} of the free list disagree"
        fenced = [block for blocks in self._fenced.values() for block in blocks]
        held = [block for block in range(self.num_blocks) if self._refcounts[block]]
        assert min(self._refcounts, default=0) >= 0, "a refcount is negative"
        assert len(free) == self.num_free, f"{len(free)} blocks are free, {self.num_free} counted"
        assert len(fenced) == self.num_fenced, f"{len(fenced)} blocks are fenced, {self.num_fenced} counted"
        assert sorted(free + fenced + held) == list(range(self.num_blocks)), "blocks are lost or doubled"

    def _put_in_front(self, block: int) -> None:
        sentinel = self.num_blocks
        first = self._next[sentinel]
        self._next[sentinel] = block
        self._previous[block] = sentinel
        self._next[block] = first
        self._previous[first] = block
        self.num_free += 1
