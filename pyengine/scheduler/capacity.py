"""Capacity: whether the KV pool has room for one more request, now and later. It takes no blocks itself."""

from __future__ import annotations

from typing import Protocol

from pyengine.kv_cache.kv_cache import KVCache, Prefix
from pyengine.request import Request
from pyengine.scheduler.verdict import Reason, Verdict


class Capacity(Protocol):
    """Judges a start. It says yes only if the free blocks hold all the tokens that the request knows."""

    name: str

    def judge(self, request: Request, prefix: Prefix, num_running: int) -> Verdict:
        """Whether `request` may start beside `num_running` others, with `prefix` shared; need and have in blocks."""
        ...


class Optimistic:
    """Looks at the present only: known tokens must fit and leave a watermark, waived when nothing runs.

    Running requests may outgrow the pool together; then one is preempted.
    """

    name = "optimistic"

    def __init__(self, cache: KVCache, watermark: float) -> None:
        self._cache = cache
        self._num_spare = int(watermark * cache.pool.num_blocks)

    def judge(self, request: Request, prefix: Prefix, num_running: int) -> Verdict:
        needed = self._cache.need_fresh(request, prefix)
        usable = self._cache.pool.num_free - (self._num_spare if num_running else 0)
        return Verdict(None if needed <= usable else Reason.KV_NOW, needed, usable)


CAPACITIES: dict[str, type[Optimistic]] = {Optimistic.name: Optimistic}
