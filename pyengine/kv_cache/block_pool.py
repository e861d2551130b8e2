"""BlockPool: which KV blocks are free, how many tables hold each of the others, and which content can be found again.

It never sees content itself, only keys that name it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from types import MappingProxyType


class BlockPool:
    """Blocks 0 to num_blocks - 1. Each is free, or held by `refcount` tables, or fenced.

    A fenced block is held by nobody, but a step in flight still writes it: it becomes free when that step returns.
    A free block is idle if its content can still be found by a key, else blank.

    The free list is a doubly linked ring in two arrays, in the order in which blocks are handed out:

        next: num_blocks (sentinel) -> blank .. blank -> idle .. idle -> num_blocks

    Of the blank ones the last freed is the first reused, because its memory is in the processor's caches, and so that
    a small load touches a small part of the pool. Of the idle ones the first freed is the first reused (least recently
    used), and then its content is found no more. Taking from the front, putting at either end, and removal from the
    middle are O(1).
    """

    __slots__ = (
        "_blocks",
        "_fenced",
        "_keys",
        "_next",
        "_previous",
        "_refcounts",
        "num_blocks",
        "num_evicted",
        "num_fenced",
        "num_free",
        "num_idle",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_idle = 0  # of the free ones
        self.num_fenced = 0
        self.num_evicted = 0  # idle blocks that were handed out, since the pool was made
        self._refcounts = array("q", bytes(8 * num_blocks))
        self._next = array("q", [*range(1, num_blocks + 1), 0])
        self._previous = array("q", [num_blocks, *range(num_blocks)])
        self._fenced: dict[int, list[int]] = {}
        self._keys: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}

    # ---- Taking and giving back

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
        num_blank = self.num_free - self.num_idle
        self.num_free -= count
        if count > num_blank:
            for block in blocks[num_blank:]:
                self._forget(block)
            self.num_idle -= count - num_blank
            self.num_evicted += count - num_blank
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more holder of each block; idle ones are free no more. Raises RuntimeError for any other free one.

        The blocks before the one that raises have been counted.
        """
        refcounts = self._refcounts
        for block in blocks:
            count = refcounts[block]
            if count == 0:
                if self._keys[block] is None:
                    raise RuntimeError(f"KV block {block} is shared, but nobody holds it and its content is not known.")
                self._unlink(block)
                self.num_free -= 1
                self.num_idle -= 1
            refcounts[block] = count + 1

    def free(self, blocks: Iterable[int], fence: int | None = None) -> None:
        """Count one holder less of each block; those that nobody holds any more become free, in the given order.

        With `fence` they do so only at lift_fence(fence), the number of the step in flight that still writes them.
        Raises RuntimeError for a block that nobody holds.
        """
        refcounts = self._refcounts
        released: list[int] = []
        try:
            for block in blocks:
                count = refcounts[block]
                if count == 0:
                    raise RuntimeError(f"KV block {block} is freed, but nobody holds it.")
                refcounts[block] = count - 1
                if count == 1:
                    released.append(block)
        finally:
            if fence is None:
                self._put(released)
            elif released:
                self._fenced.setdefault(fence, []).extend(released)
                self.num_fenced += len(released)

    def lift_fence(self, step: int) -> None:
        """Free the blocks that were fenced until `step` returned; without such blocks nothing happens."""
        blocks = self._fenced.pop(step, ())
        self.num_fenced -= len(blocks)
        self._put(blocks)

    def refcount(self, block: int) -> int:
        """How many tables hold the block."""
        return self._refcounts[block]

    def free_blocks(self) -> Iterator[int]:
        """The free blocks, in the order in which they will be handed out."""
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            yield block
            block = self._next[block]

    # ---- Finding content again

    @property
    def keys(self) -> Mapping[bytes, int]:
        """The block of each content that can be found, held or idle."""
        return MappingProxyType(self._blocks)

    def find(self, key: bytes) -> int | None:
        """The block whose content `key` names, held or idle."""
        return self._blocks.get(key)

    def name(self, blocks: Sequence[int], keys: Sequence[bytes]) -> int:
        """Let the content of held blocks be found by `keys`, one each, up to the first whose key another held one has.

        Returns how many can be found. An idle block of the same key becomes blank: two of one content are no better
        than one. Raises RuntimeError for a block that nobody holds or that has another key.
        """
        found, names, refcounts = self._blocks, self._keys, self._refcounts
        for number, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            known = found.get(key)
            if known == block:
                continue
            if refcounts[block] == 0 or names[block] is not None:
                raise RuntimeError(f"KV block {block} gets a key, but nobody holds it or it has another one.")
            if known is not None:
                if refcounts[known]:
                    return number
                self._make_blank(known)
            names[block] = key
            found[key] = block
        return len(blocks)

    def forget_idle(self) -> None:
        """Make all idle blocks blank."""
        num_blank = self.num_free - self.num_idle
        for block in islice(self.free_blocks(), num_blank, None):
            self._forget(block)
        self.num_idle = 0

    def check(self) -> None:
        """Raise AssertionError unless each block is exactly one of free, held and fenced, as counts and keys say."""
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
        num_blank = self.num_free - self.num_idle
        assert all(self._keys[block] is None for block in free[:num_blank]), "an idle block is before a blank one"
        assert all(self._keys[block] is not None for block in free[num_blank:]), "a blank block is counted as idle"
        assert all(self._keys[block] is None for block in fenced), "content that is still written can be found"
        named = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert named == self._blocks, "keys of blocks and blocks of keys disagree"

    # ---- The ring

    def _put(self, blocks: Sequence[int]) -> None:
        """Make blocks free, one after the other: a blank one in front, an idle one at the back."""
        following, previous, sentinel, keys = self._next, self._previous, self.num_blocks, self._keys
        for block in blocks:
            if keys[block] is None:
                before, after = sentinel, following[sentinel]
            else:
                before, after = previous[sentinel], sentinel
                self.num_idle += 1
            following[before] = previous[after] = block
            previous[block], following[block] = before, after
        self.num_free += len(blocks)

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before

    def _make_blank(self, block: int) -> None:
        self._unlink(block)
        self._forget(block)
        self.num_idle -= 1
        self.num_free -= 1
        self._put((block,))

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        self._keys[block] = None
        del self._blocks[key]
