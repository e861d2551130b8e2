"""KVCache: gives KV blocks to requests and takes them back, and finds what is computed. It never decides who."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pyengine.kv_cache.block_hashes import extend_hashes, root_hash
from pyengine.kv_cache.block_pool import BlockPool
from pyengine.kv_cache.blocks import need
from pyengine.request import Request


class Prefix(NamedTuple):
    """The first of a request's tokens whose KV exists already; right until the cache next changes.

        | full | full | full | partial .. |
          blocks: shared       copied, then the request writes its own tokens behind it

    Attributes:
        num_tokens: tokens with KV, less than the known ones: the last is always computed.
        num_held: of the full blocks among them, how many others hold now; always the first ones, the rest is idle.
        holder: the running sibling whose table has them, and the partial block; None: the cache has them, and all
            are full.
    """

    num_tokens: int = 0
    num_held: int = 0
    holder: Request | None = None


NO_PREFIX = Prefix()


class KVCache:
    """The pool, the block tables of running requests, and which full blocks can be found again by their hash.

    A block that two tables hold is never written, and no block of a running request is ever exchanged for another one,
    so a table only grows. A full block of known tokens can be found once the step that computed it was committed,
    while it is held and afterwards, until it is needed for something else. One that outputs fill can be found once its
    request leaves the batch: nobody knows outputs earlier, and so a decode costs nothing here.

    Only the first blocks of a table can be found: one whose predecessor cannot (a request that ran at the same time
    computed the same tokens, and its block is the one that is found) stays out, until that other one is idle and
    gives way. So blocks that can be found form a tree, and this always holds:

    * whoever holds one holds those before it, so it has at least as many holders as each that continues it;
    * of the idle ones, each is handed out before the one that it continues: leaves first;
    * of a chain of hashes, those that are found are the first ones, and of these, those that are held.
      So a binary search counts both, and asking again in each step costs next to nothing.

    Attributes:
        num_queried_tokens / num_hit_tokens: tokens known at each start that might use the cache, and those of them
            that needed no computing, thanks to the cache or a sibling.
    """

    __slots__ = (
        "_advanced",
        "_computing",
        "_pending",
        "block_size",
        "model_id",
        "num_hit_tokens",
        "num_queried_tokens",
        "pool",
        "prefix_caching",
    )

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, model_id: str = "") -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.model_id = model_id
        self.pool = BlockPool(num_blocks)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        # Running requests that have full blocks to compute whose hashes are known, and which blocks of their tables.
        self._computing: dict[Request, range] = {}
        # The hashes of these, and who computes them: of several, the one that started first.
        self._pending: dict[bytes, Request] = {}
        # Those whose prompt the step in flight advances.
        self._advanced: list[Request] = []

    # ---- Before a request runs

    def arrived(self, request: Request) -> None:
        """Hash the prompt of `request`, once. Siblings have the same prompt and salt, and take their first one's."""
        if not self.prefix_caching or request.has_known_hashes:
            return
        first = request.group.requests[0] if request.group else request
        num_full = request.num_prompt_tokens // self.block_size
        self._hash_blocks(first, num_full)
        if first is not request:
            request.block_hashes = first.block_hashes[:num_full]

    def find_prefix(self, request: Request) -> Prefix | None:
        """What `request` need not compute; None while a running request is computing more of it."""
        prefix, computing = self._find(request)
        return None if computing else prefix

    def waits_for(self, request: Request) -> Request | None:
        """The running request that computes what `request` will share, if find_prefix is None.

        It pays to wait if that is at least one full block (of a sibling: one token), for no block is computed twice,
        and what is computed twice at the same time is found only once. What is awaited is always the next block that
        is not found yet, and it comes with the next chunk of the one that computes it; when that one leaves the
        batch, or goes on with what is not shared, the wait ends.
        """
        return self._find(request)[1]

    def need_fresh(self, request: Request, prefix: Prefix) -> int:
        """Free blocks that it takes to start `request` with all the tokens it knows; idle ones of `prefix` are free."""
        return need(request, 0, self.block_size) - prefix.num_held

    # ---- While it runs

    def start(self, request: Request, prefix: Prefix) -> tuple[int, int] | None:
        """Give `request` blocks for all the tokens it knows; returns the (source, destination) block to copy, if any.

        Raises RuntimeError, and changes nothing, if they are not free, or `prefix` is of another state of the cache.
        """
        blocks, partial = self._prefix_blocks(request, prefix)
        num_fresh = need(request, 0, self.block_size) - len(blocks)
        num_idle = sum(self.pool.refcount(block) == 0 for block in blocks)
        if num_fresh + num_idle > self.pool.num_free:
            raise RuntimeError(f"The KV blocks to start {request!r} are not free.")
        self.pool.share(blocks)  # before any is handed out: idle ones of the prefix must not be
        fresh = self.pool.allocate(num_fresh)
        assert fresh is not None
        request.block_table.extend(blocks)
        request.block_table.extend(fresh)
        request.num_computed_tokens = prefix.num_tokens
        holder = prefix.holder
        request.num_indexed_blocks = len(blocks) if holder is None else min(len(blocks), holder.num_indexed_blocks)
        if not request.needs_all_prompt_logits:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += prefix.num_tokens
        self._expect_blocks(request, len(blocks))
        if request.group is not None:
            kept = request.group.holders if self._holds_shared_part(request) else request.group.computing
            kept[request] = None
        return None if partial is None else (partial, fresh[0])

    def grow(self, request: Request) -> bool:
        """Give a running request one more block; False if there is none."""
        fresh = self.pool.allocate(1)
        if fresh is None:
            return False
        request.block_table.extend(fresh)
        return True

    def grow_all(self, requests: Sequence[Request]) -> bool:
        """Give each of these one more block, in their order; False, and nothing is changed, if there are fewer."""
        fresh = self.pool.allocate(len(requests))
        if fresh is None:
            return False
        for request, block in zip(requests, fresh, strict=True):
            request.block_table.append(block)
        return True

    def computed(self, request: Request) -> None:
        """Note that the step now in flight advances the prefill of `request`: once committed, it can be shared."""
        self._advanced.append(request)

    def committed(self, step: int) -> None:
        """Step `step` has returned: what it wrote can be shared, and blocks that only it still used are free."""
        self.pool.lift_fence(step)
        for request in self._advanced:
            self._index_blocks(request, request.num_computed_tokens)
            self._blocks_came(request, request.num_computed_tokens // self.block_size)
            group = request.group
            if group is not None and request in group.computing and self._holds_shared_part(request):
                del group.computing[request]
                group.holders[request] = None
        self._advanced.clear()

    def release(self, request: Request, *, fence: int | None = None, num_settled_tokens: int = 0) -> None:
        """Take the blocks of `request` back, the newest first, for these are the least useful to others.

        With `fence`, that step is in flight and still writes the tokens behind num_settled_tokens: their blocks wait,
        and are never shared.
        """
        table = request.block_table
        if fence is None:
            self._index_blocks(request, request.num_computed_tokens)
            self.pool.free(reversed(table))
        else:
            self._index_blocks(request, num_settled_tokens)
            num_settled = num_settled_tokens // self.block_size
            self.pool.free(reversed(table[num_settled:]), fence)
            self.pool.free(reversed(table[:num_settled]))
        request.block_table = []
        request.num_computed_tokens = 0
        request.num_indexed_blocks = 0
        self._blocks_came(request, None)
        if request.group is not None:
            request.group.computing.pop(request, None)
            request.group.holders.pop(request, None)

    def clear(self) -> None:
        """Forget all content that nobody holds; running requests keep theirs, and it can still be found."""
        self.pool.forget_idle()

    def check(self, running: Iterable[Request]) -> None:
        """Raise AssertionError unless pool, block tables of the running requests and what can be found agree."""
        self.pool.check()
        held = [0] * self.pool.num_blocks
        running = dict.fromkeys(running)
        for request in running:
            for block in request.block_table:
                held[block] += 1
            found = [self.pool.find(block_hash) for block_hash in request.block_hashes]
            num_indexed = request.num_indexed_blocks
            assert found[:num_indexed] == request.block_table[:num_indexed], f"{request!r} has blocks not found"
            num_found = [block is None for block in [*found, None]].index(True)
            assert not any(block is not None for block in found[num_found:]), f"a block of {request!r} has no parent"
            counts = [self.pool.refcount(block) for block in found[:num_found] if block is not None]
            assert counts == sorted(counts, reverse=True), f"a block of {request!r} has more holders than its parent"
        for block, count in enumerate(held):
            assert self.pool.refcount(block) == count, f"block {block} is in {count} tables, its refcount differs"
        assert set(self._computing) <= set(running), "one that does not run is computing blocks"
        assert set(self._pending.values()) <= set(self._computing), "a block is awaited that nobody computes"

    # ---- Details

    def _find(self, request: Request) -> tuple[Prefix, Request | None]:
        """What exists of `request`, and the running request that is computing more of it."""
        if request.needs_all_prompt_logits:
            return NO_PREFIX, None
        hashes, pool, size = request.block_hashes, self.pool, self.block_size
        most = self._hash_blocks(request, (request.num_tokens - 1) // size)
        num_found = 0
        if most and pool.find(hashes[0]) is not None:
            num_found = bisect_left(range(most), True, lo=1, key=lambda i: pool.find(hashes[i]) is None)
        group, num_shared = request.group, request.num_prompt_tokens - 1
        if group is not None and num_shared > num_found * size:
            for holder in group.holders:
                return Prefix(num_shared, num_shared // size, holder), None
            for sibling in group.computing:
                return NO_PREFIX, sibling
        if num_found < most and hashes[num_found] in self._pending:
            return NO_PREFIX, self._pending[hashes[num_found]]
        if num_found == 0:
            return NO_PREFIX, None
        num_held = bisect_left(range(num_found), True, key=lambda i: self._is_idle(hashes[i]))
        return Prefix(num_found * size, num_held), None

    def _prefix_blocks(self, request: Request, prefix: Prefix) -> tuple[list[int], int | None]:
        """The full blocks of `prefix`, and the partial one."""
        num_full, rest = divmod(prefix.num_tokens, self.block_size)
        if prefix.holder is not None:
            table = prefix.holder.block_table
            if len(table) * self.block_size < prefix.num_tokens:
                raise RuntimeError(f"{prefix.holder!r} holds the prefix of {request!r} no more.")
            return table[:num_full], table[num_full] if rest else None
        blocks = [block for block in map(self.pool.find, request.block_hashes[:num_full]) if block is not None]
        if len(blocks) < num_full:
            raise RuntimeError(f"The prefix of {request!r} was evicted since it was looked up.")
        return blocks, None

    def _is_idle(self, block_hash: bytes) -> bool:
        block = self.pool.find(block_hash)
        return block is not None and self.pool.refcount(block) == 0

    def _hash_blocks(self, request: Request, num_blocks: int) -> int:
        """Hash the first `num_blocks` blocks of the tokens of `request`; how many of these have a hash."""
        if not self.prefix_caching:
            return 0
        hashes = request.block_hashes
        if len(hashes) < num_blocks and not request.has_known_hashes:
            parent = hashes[-1] if hashes else root_hash(self.model_id, request.cache_salt)
            extend_hashes(hashes, parent, request.token_ids, num_blocks, self.block_size)
        return min(num_blocks, len(hashes))

    def _index_blocks(self, request: Request, num_tokens: int) -> None:
        """Let the full blocks of the first `num_tokens` tokens be found, as far as no other held one is in the way."""
        num_blocks = num_tokens // self.block_size
        if num_blocks <= request.num_indexed_blocks:
            return
        num_blocks = self._hash_blocks(request, num_blocks)
        fresh = slice(request.num_indexed_blocks, num_blocks)
        request.num_indexed_blocks += self.pool.name(request.block_table[fresh], request.block_hashes[fresh])
        if request.num_indexed_blocks < num_blocks:
            self._blocks_came(request, None)  # nobody can share what comes behind

    def _expect_blocks(self, request: Request, first: int) -> None:
        """`request` starts to compute its blocks from `first` on."""
        blocks = range(first, self._hash_blocks(request, request.num_tokens // self.block_size))
        if not blocks:
            return
        self._computing[request] = blocks
        for block_hash in request.block_hashes[blocks.start : blocks.stop]:
            self._pending.setdefault(block_hash, request)

    def _blocks_came(self, request: Request, num_blocks: int | None) -> None:
        """Its first `num_blocks` blocks are computed; None: the rest will not be, or not for others."""
        blocks = self._computing.pop(request, None)
        if blocks is None:
            return
        stop = blocks.stop if num_blocks is None else min(num_blocks, blocks.stop)
        for block_hash in request.block_hashes[blocks.start : stop]:
            if self._pending.get(block_hash) is request:
                del self._pending[block_hash]
        if stop < blocks.stop:
            self._computing[request] = range(stop, blocks.stop)

    def _holds_shared_part(self, request: Request) -> bool:
        return request.num_computed_tokens >= request.num_prompt_tokens - 1
