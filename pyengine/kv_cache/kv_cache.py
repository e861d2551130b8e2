"""KVCache: gives KV blocks to requests and takes them back, prompts shared where they can be. It never decides who."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyengine.kv_cache.block_pool import BlockPool
from pyengine.kv_cache.blocks import need
from pyengine.request import Request


@dataclass(frozen=True, slots=True)
class Prefix:
    """The part of a request's tokens whose KV exists already, in blocks that others hold.

        | full | full | full | partial .. |
          blocks: shared       copied, then the request writes its own tokens behind it

    Attributes:
        num_tokens: tokens with KV, less than the prompt: its last token is always computed.
        blocks: the full blocks among them.
        partial: the block that holds the num_tokens % block_size tokens behind them; None when there are none.
    """

    num_tokens: int = 0
    blocks: tuple[int, ...] = ()
    partial: int | None = None


NO_PREFIX = Prefix()


class KVCache:
    """The pool, and the block tables of running requests. A block that two tables hold is never written."""

    __slots__ = ("block_size", "pool")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)

    def find_prefix(self, request: Request) -> Prefix | None:
        """What `request` need not compute; None while a running sibling is still computing it."""
        group = request.group
        num_shared = request.num_prompt_tokens - 1
        if group is None or num_shared == 0 or request.needs_all_prompt_logits:
            return NO_PREFIX
        for holder in group.holders:
            num_full, rest = divmod(num_shared, self.block_size)
            table = holder.block_table
            return Prefix(num_shared, tuple(table[:num_full]), table[num_full] if rest else None)
        return None if group.computing else NO_PREFIX

    def need_fresh(self, request: Request, prefix: Prefix) -> int:
        """Free blocks that it takes to start `request` with all the tokens it knows."""
        return need(request, 0, self.block_size) - len(prefix.blocks)

    def start(self, request: Request, prefix: Prefix) -> tuple[int, int] | None:
        """Give `request` blocks for all the tokens it knows; returns the (source, destination) block to copy, if any.

        Raises RuntimeError, and changes nothing, if they are not free.
        """
        fresh = self.pool.allocate(self.need_fresh(request, prefix))
        if fresh is None:
            raise RuntimeError(f"The KV blocks to start {request!r} are not free.")
        self.pool.share(prefix.blocks)
        request.block_table.extend(prefix.blocks)
        request.block_table.extend(fresh)
        request.num_computed_tokens = prefix.num_tokens
        if request.group is not None:
            kept = request.group.holders if self._holds_shared_part(request) else request.group.computing
            kept[request] = None
        return None if prefix.partial is None else (prefix.partial, fresh[0])

    def grow(self, request: Request) -> bool:
        """Give a running request one more block; False if there is none."""
        fresh = self.pool.allocate(1)
        if fresh is None:
            return False
        request.block_table.extend(fresh)
        return True

    def computed(self, request: Request) -> None:
        """Note that the step now planned advances `request`; later steps may share what it has then."""
        group = request.group
        if group is not None and request in group.computing and self._holds_shared_part(request):
            del group.computing[request]
            group.holders[request] = None

    def release(self, request: Request, *, fence: int | None = None, num_settled_tokens: int = 0) -> None:
        """Take the blocks of `request` back, the newest first, for these are the least useful to others.

        With `fence`, that step is in flight and still writes the tokens behind num_settled_tokens: their blocks wait.
        """
        table = request.block_table
        num_settled = len(table) if fence is None else num_settled_tokens // self.block_size
        self.pool.free(reversed(table[num_settled:]), fence)
        self.pool.free(reversed(table[:num_settled]))
        request.block_table = []
        request.num_computed_tokens = 0
        if request.group is not None:
            request.group.computing.pop(request, None)
            request.group.holders.pop(request, None)

    def check(self, running: Iterable[Request]) -> None:
        """Raise AssertionError unless pool and block tables of the running requests agree."""
        self.pool.check()
        held = [0] * self.pool.num_blocks
        for request in running:
            for block in request.block_table:
                held[block] += 1
        for block, count in enumerate(held):
            assert self.pool.refcount(block) == count, f"block {block} is in {count} tables, its refcount differs"

    def _holds_shared_part(self, request: Request) -> bool:
        return request.num_computed_tokens >= request.num_prompt_tokens - 1
