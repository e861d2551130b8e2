"""Reservation: when a blocked head starts if all goes as forecast, and whether one who passes it would change that.

A head starts at the first moment at which one of two tests is met, and both must still be met at their moment with
whoever passes it (docs/scheduling-proofs.md):

    certain   it fits with its final size, whenever its prompt is computed
    early     it fits as a decode that grows by a block in each bucket, if its prompt is computed in one step
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


class Start:
    """The first moment at which one of the tests is met, and how much is used from then on.

    Attributes:
        step: that moment, once enough of those have ended that end in its bucket.
        num_seats: those that run then, the head not counted.
    """

    __slots__ = ("_at_start", "_blocks", "_bucket", "_final", "_ramp", "_size", "num_seats", "step")

    def __init__(
        self, bucket: int, block_size: int, blocks: np.ndarray, num_seats: int, at_start: int, final: int
    ) -> None:
        self.step = bucket * block_size
        self.num_seats = num_seats
        self._bucket = bucket
        self._size = block_size
        self._blocks = blocks  # of the others, for bucket + index, as long as the head runs
        self._ramp = np.arange(len(blocks))
        self._at_start = at_start
        self._final = final

    def leave(self, num_blocks: int, last_step: int) -> None:
        """One with so many blocks has to end as well before the test is met, after `last_step`."""
        self._blocks[0] -= num_blocks
        self.num_seats -= 1
        self.step = last_step + 1

    def needed(self, num_blocks: int = 0, last_step: int = -1) -> int:
        """Blocks used together with the head, and with one more that has `num_blocks` until `last_step`."""
        blocks = self._blocks
        if num_blocks:
            blocks = blocks.copy()
            blocks[: last_step // self._size - self._bucket + 1] += num_blocks
        return min(self._at_start + int((blocks + self._ramp).max()), self._final + int(blocks.max()))

    def take(self, num_blocks: int, last_step: int) -> None:
        """One more with `num_blocks` runs until `last_step`."""
        if last_step >= self.step:
            self._blocks[: last_step // self._size - self._bucket + 1] += num_blocks
            self.num_seats += 1


@dataclass(frozen=True, slots=True)
class Reservation:
    """The promise to a blocked head: it starts at `step` at the latest, and nobody who passes changes when it does.

    Attributes:
        certain / early: the moments at which the tests are met; the same one if its prompt is longer than a step.
        is_whole: whether its prompt fits into one step, however many run. If it may not beside one more, nobody who
            passes runs at the early moment.
        usable: blocks that all together may use.
        max_num_seqs: the most that run at a time.
    """

    certain: Start
    early: Start
    is_whole: bool
    usable: int
    max_num_seqs: int

    @property
    def step(self) -> int:
        """By which the head starts, if there are tokens for it."""
        return self.certain.step

    @property
    def first_step(self) -> int:
        """Before which the head does not start."""
        return min(self.early.step, self.certain.step)

    def delayed_by(self, num_blocks: int, last_step: int) -> int | None:
        """Blocks that would be needed if one with `num_blocks` ran until `last_step`; None: it changes nothing."""
        for start in (self.early, self.certain):
            if last_step < start.step:
                continue
            needed = start.needed(num_blocks, last_step)
            if start is not self.certain and not self.is_whole:
                return needed
            if needed > self.usable or start.num_seats + 2 > self.max_num_seqs:
                return needed
        return None

    def take(self, num_blocks: int, last_step: int) -> None:
        """One with `num_blocks` has passed, and runs until `last_step`."""
        self.certain.take(num_blocks, last_step)
        if self.early is not self.certain:
            self.early.take(num_blocks, last_step)
