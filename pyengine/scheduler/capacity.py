"""Capacity: whether the KV pool has room for one more request, now and later. It takes no blocks itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pyengine.config import SchedulerConfig
from pyengine.kv_cache.blocks import last_horizon, need
from pyengine.kv_cache.kv_cache import KVCache, Prefix
from pyengine.request import Request
from pyengine.scheduler.verdict import Reason, Verdict


class Capacity(Protocol):
    """Judges a start. It says yes only if the free blocks hold all the tokens that the request knows.

    It is told of each running request when it starts, decodes and leaves; the default is not to care.
    """

    name: str

    def judge(self, request: Request, prefix: Prefix, num_running: int) -> Verdict:
        """Whether `request` may start beside `num_running` others, with `prefix` shared; need and have in blocks."""
        ...

    def started(self, request: Request) -> None:
        """`request` is in state PREFILL from now on."""

    def decodes(self, request: Request, step: int) -> None:
        """`request` is in state DECODE: from `step` on it gains one token in each step."""

    def left(self, request: Request) -> None:
        """`request` runs no more and has given its blocks back."""


class Optimistic(Capacity):
    """Looks at the present only: known tokens must fit and leave a watermark, waived when nothing runs.

    Running requests may outgrow the pool together; then one is preempted.
    """

    name = "optimistic"

    def __init__(self, cache: KVCache, config: SchedulerConfig) -> None:
        self._cache = cache
        self._num_spare = int(config.watermark * config.num_blocks)

    def judge(self, request: Request, prefix: Prefix, num_running: int) -> Verdict:
        needed = self._cache.need_fresh(request, prefix)
        usable = self._cache.pool.num_free - (self._num_spare if num_running else 0)
        return Verdict(None if needed <= usable else Reason.KV_NOW, needed, usable)


@dataclass(frozen=True, slots=True)
class _Charge:
    """What one running request may still use: `offset + k` blocks in bucket k, and `final` ones in its last bucket.

    A prefill has no last bucket yet, and is charged `final` in all.
    """

    final: int
    offset: int = 0
    last_bucket: int | None = None


class Guaranteed(Capacity):
    """Starts a request only if nobody needs to be preempted later, even if all make max_tokens: a lockstep certificate.

    A decode gains one token in each step, so the steps at which it takes a block and at which it ends at the latest
    are known. Future steps are cut into buckets of block_size; in each a decode takes one more block:

        bucket            k       k+1     k+2     k+3
        ends in k+2       5       6       7       -
        ends in k+1       2       3       -       -
        prefill           4       4       4       4      its final size always: when it will decode is not known
        all              11      13      11       4      peak 13: another one that may grow to 6 needs 19 blocks

    Each request is rounded up by itself, and by the same rule before and after it begins to decode, so the peak never
    rises by itself. It holds because every decode is in every step. Blocks shared by siblings are counted for each.
    """

    name = "guaranteed"

    def __init__(self, cache: KVCache, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        self._num_blocks = config.num_blocks
        self._charges: dict[Request, _Charge] = {}
        self._prefill_blocks = 0
        # Of the decodes by last bucket: how many, the sum of their offsets, the sum of their final blocks.
        self._decodes: dict[int, tuple[int, int, int]] = {}

    def judge(self, request: Request, prefix: Prefix, num_running: int) -> Verdict:
        final = self._final(request)
        usable = self._num_blocks - self.peak()
        return Verdict(None if final <= usable else Reason.KV_PEAK, final, usable)

    def peak(self) -> int:
        """Most blocks that the running requests use together in any future step, rounded up to buckets.

        Use grows from bucket to bucket until somebody ends, so only buckets in which one ends can be the worst.
        """
        worst = num_later = sum_later = 0
        for bucket in sorted(self._decodes, reverse=True):
            number, offsets, final = self._decodes[bucket]
            worst = max(worst, sum_later + bucket * num_later + final)
            num_later += number
            sum_later += offsets
        return worst + self._prefill_blocks

    def started(self, request: Request) -> None:
        charge = _Charge(self._final(request))
        self._charges[request] = charge
        self._prefill_blocks += charge.final

    def decodes(self, request: Request, step: int) -> None:
        self.left(request)
        size = self._block_size
        # After step s it has KV for base + s tokens.
        base = request.num_computed_tokens + 1 - step
        last_step = request.num_tokens + last_horizon(request) - base
        charge = _Charge(self._final(request), -(-(base + size - 1) // size), last_step // size)
        self._charges[request] = charge
        self._add(charge, 1)

    def left(self, request: Request) -> None:
        charge = self._charges.pop(request)
        if charge.last_bucket is None:
            self._prefill_blocks -= charge.final
        else:
            self._add(charge, -1)

    def _final(self, request: Request) -> int:
        return need(request, last_horizon(request), self._block_size)

    def _add(self, charge: _Charge, sign: int) -> None:
        assert charge.last_bucket is not None
        number, offsets, final = self._decodes.pop(charge.last_bucket, (0, 0, 0))
        if number + sign:
            self._decodes[charge.last_bucket] = (
                number + sign,
                offsets + sign * charge.offset,
                final + sign * charge.final,
            )


CAPACITIES: dict[str, Callable[[KVCache, SchedulerConfig], Capacity]] = {
    Optimistic.name: Optimistic,
    Guaranteed.name: Guaranteed,
}
