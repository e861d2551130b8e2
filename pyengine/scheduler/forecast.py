"""Forecast: how many KV blocks and seats the running requests will use, bucket by bucket of future steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pyengine.kv_cache.blocks import num_blocks_for


class Charge(NamedTuple):
    """What one running request may still use: `offset + k` blocks in bucket k, and `final` ones in its last bucket.

    A prefill has no last bucket yet, and is charged `final` in all.
    """

    final: int
    offset: int = 0
    last_bucket: int | None = None
    last_step: int = 0  # within the last bucket


def decode_charge(num_tokens: int, horizon: int, step: int, block_size: int) -> Charge:
    """The charge of a request that knows `num_tokens` tokens and gains one in each step from `step` + 1 on.

    In `step` it has KV for all tokens it knows; `horizon` more follow before it ends.
    """
    base = num_tokens - step  # after step s it has KV for base + s tokens
    return Charge(
        final=num_blocks_for(num_tokens + horizon, block_size),
        offset=num_blocks_for(base + block_size - 1, block_size),
        last_bucket=(step + horizon) // block_size,
        last_step=step + horizon,
    )


class Forecast:
    """The sum of the charges of all running requests.

    A decode gains one token in each step, so the steps at which it takes a block, and at which it ends if its length
    is known, are known. Future steps are cut into buckets of block_size; in each a decode takes one more block:

        bucket            k       k+1     k+2     k+3
        ends in k+2       5       6       7       -
        ends in k+1       2       3       -       -
        prefill           4       4       4       4      its final size always: when it will decode is not known
        all              11      13      11       4      peak 13: another one that may grow to 6 needs 19 blocks

    Each request is rounded up by itself, and by the same rule before and after it begins to decode, so the peak never
    rises by itself. It holds because every decode is in every step. Blocks that two share are counted for each.

    Only sums by the last bucket are kept, so that a charge costs the same however long it lasts. What is used in
    bucket k follows when somebody asks: `final` of those that end in it, and `offset + k` of those that end later.

    Attributes:
        bucket: the present one.
        at_most: no less than `peak`, and known without adding up.
        version: changes whenever a charge is added or removed.
    """

    __slots__ = (
        "_bucket",
        "_end",
        "_finals",
        "_first",
        "_future",
        "_future_of",
        "_known",
        "_offsets",
        "_peak",
        "_prefill_blocks",
        "_prefill_seats",
        "_ramp",
        "_seats",
        "at_most",
        "version",
    )

    def __init__(self, max_context: int, block_size: int) -> None:
        size = 2 * (num_blocks_for(max_context, block_size) + 2)
        # Of the decodes whose last bucket is _first + index.
        self._finals = np.zeros(size, np.int64)
        self._offsets = np.zeros(size, np.int64)
        self._seats = np.zeros(size, np.int64)
        self._ramp = np.arange(size)
        self._first = 0
        self._bucket = 0
        self._end = 0  # behind the last bucket that any decode reached
        self._prefill_blocks = 0
        self._prefill_seats = 0
        # What follows from these, of the state (version, bucket).
        self._future_of = (-1, -1)
        self._future = _Future.of(self._finals[:0], self._offsets[:0], self._seats[:0], self._ramp[:0])
        self._peak = self.at_most = 0
        self._known: dict[int, tuple[int, int]] = {}  # see _worst
        self.version = 0

    @property
    def bucket(self) -> int:
        """The present bucket."""
        return self._bucket

    def move_to(self, bucket: int) -> None:
        """Let `bucket` be the present one; those before it are forgotten."""
        self._bucket = bucket
        if bucket - self._first >= len(self._seats) // 2:
            for column in (self._finals, self._offsets, self._seats):
                kept = column[bucket - self._first :].copy()
                column[: len(kept)] = kept
                column[len(kept) :] = 0
            self._first = bucket

    def add(self, charge: Charge, sign: int = 1) -> None:
        """Count `charge` from the present bucket on; with sign -1 no longer."""
        self.version += 1
        if sign > 0:
            self.at_most += charge.final
        last = charge.last_bucket
        if last is None:
            self._prefill_blocks += sign * charge.final
            self._prefill_seats += sign
        elif last >= self._bucket:
            index = last - self._first
            self._finals[index] += sign * charge.final
            self._offsets[index] += sign * charge.offset
            self._seats[index] += sign
            if last >= self._end:
                self._end = last + 1

    def peak(self) -> int:
        """Most blocks that the running requests use together in any bucket from the present one on."""
        self._bring_up_to_date()
        return self._peak

    def peak_with(self, num_blocks: int, final: int, last: int) -> int:
        """At most what `peak` is with one more request, from now on, while that one runs.

        It uses `num_blocks` in the present bucket and one more in each later one up to `last`, and never above `final`.
        """
        rising, highest = self._worst(last)
        return min(num_blocks + rising, final + highest) + self._prefill_blocks

    def _worst(self, last: int) -> tuple[int, int]:
        """The most that blocks + bucket less the present one, and that blocks are up to bucket `last`."""
        future = self._bring_up_to_date()
        number = last + 1 - self._bucket
        known = self._known.get(number)
        if known is None:
            column = future.blocks[:number]
            rising, highest = number - 1 if len(column) < number else 0, 0
            if len(column):
                rising = max(rising, int((column + self._ramp[: len(column)]).max()))
                highest = int(column.max())
            known = self._known[number] = rising, highest
        return known

    def seats_in(self, bucket: int) -> int:
        """Requests that run in `bucket`, the present or a later one; in none after it are there more."""
        seats = self._bring_up_to_date().seats[bucket - self._bucket :]
        return (int(seats[0]) if len(seats) else 0) + self._prefill_seats

    def first_room(self, num_blocks: int, num_seats: int) -> int | None:
        """The first bucket from which on never more than so many blocks and seats are used; None if there is none.

        A prefill holds its blocks and its seat for ever here, so there is none while these alone are too many.
        """
        if self._prefill_blocks > num_blocks or self._prefill_seats > num_seats:
            return None
        future = self._bring_up_to_date()
        too_many = future.blocks > num_blocks - self._prefill_blocks
        too_many |= future.seats > num_seats - self._prefill_seats
        found = np.flatnonzero(too_many)
        return self._bucket if len(found) == 0 else self._bucket + int(found[-1]) + 1

    def first_start(self, usable: int, num_seats: int, at_start: int, final: int, life: int | None) -> int | None:
        """The first bucket in which, once those have ended that end in it, one more can start; None: there is none.

        It has `at_start` blocks in its first bucket and one more in each of `life` others (None: for ever), at most
        `final`; together at most `usable` blocks, and `num_seats` others beside it.
        """
        if final + self._prefill_blocks > usable or self._prefill_seats > num_seats:
            return None
        future = self._bring_up_to_date()
        number = len(future.blocks)
        more = number if life is None else life
        column = np.concatenate((future.blocks, np.zeros(more + 1, np.int64)))
        ramp = np.arange(len(column))
        own = future.blocks_behind
        now = ramp[:number]
        behind, behind_rising = own, own + now
        if life != 0:
            width = len(column) if life is None else life
            behind = _window_max(column, width)[1 : number + 1]
            behind_rising = _window_max(column + ramp, width)[1 : number + 1]
        needed = np.minimum(at_start + np.maximum(own, behind_rising - now), final + np.maximum(own, behind))
        fits = needed + self._prefill_blocks <= usable
        fits &= future.seats_behind + self._prefill_seats <= num_seats
        found = np.flatnonzero(fits)
        return self._bucket + (int(found[0]) if len(found) else number)

    def use_from(self, bucket: int, life: int | None) -> tuple[np.ndarray, int]:
        """A copy of the blocks in use in `bucket` and `life` more (None: all) from then on, and the seats in it."""
        future = self._bring_up_to_date()
        end = max(self._end, bucket + 1) if life is None else bucket + life + 1
        column = np.full(end - bucket, self._prefill_blocks, np.int64)
        known = future.blocks[bucket - self._bucket : end - self._bucket]
        column[: len(known)] += known
        return column, self.seats_in(bucket)

    @property
    def last_bucket(self) -> int:
        """The bucket behind the last in which any decode that was ever counted was expected to run."""
        return max(self._end, self._bucket)

    def _bring_up_to_date(self) -> _Future:
        if self._future_of != (self.version, self._bucket):
            self._future_of = (self.version, self._bucket)
            window = slice(self._bucket - self._first, self.last_bucket - self._first)
            buckets = self._ramp[window] + self._first
            self._future = _Future.of(self._finals[window], self._offsets[window], self._seats[window], buckets)
            self._peak = self.at_most = int(self._future.blocks.max(initial=0)) + self._prefill_blocks
            self._known.clear()
        return self._future


class _Future(NamedTuple):
    """What the decodes use in the present bucket + index; `behind` is without those that end in it."""

    blocks: np.ndarray
    seats: np.ndarray
    blocks_behind: np.ndarray
    seats_behind: np.ndarray

    @classmethod
    def of(cls, finals: np.ndarray, offsets: np.ndarray, ending: np.ndarray, buckets: np.ndarray) -> _Future:
        """From the sums over those that end in each of `buckets`, the last one behind which nobody runs."""
        seats = ending[::-1].cumsum()[::-1]
        seats_behind = seats - ending
        blocks_behind = offsets[::-1].cumsum()[::-1] - offsets
        blocks_behind += seats_behind * buckets
        return cls(blocks_behind + finals, seats, blocks_behind, seats_behind)


def _window_max(column: np.ndarray, width: int) -> np.ndarray:
    """For each index the largest of the next `width` values from it on, fewer at the end, in O(len)."""
    if width >= len(column):
        return np.maximum.accumulate(column[::-1])[::-1]
    padded = np.full((len(column) // width + 2) * width, np.iinfo(np.int64).min, np.int64)
    padded[: len(column)] = column
    groups = padded.reshape(-1, width)
    to_the_end = np.maximum.accumulate(groups[:, ::-1], axis=1)[:, ::-1].ravel()
    from_the_beginning = np.maximum.accumulate(groups, axis=1).ravel()
    return np.maximum(to_the_end[: len(column)], from_the_beginning[width - 1 : width - 1 + len(column)])
