"""What the decision log keeps of the fleet: rings of rows, the last ones, and sums over everything. Plain state."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from pyengine.scheduler.ledger import REASONS

# The code of a row in the ring of records is a reason's place in REASONS: that is what it waits for from now on; or
PREFILLS, DECODES, ENDED = 100, 101, 102  # it started or resumed; its prompt is computed; it ended
SHARES = 103  # it waits for what those wait for that nobody examined
MOVED, VOID = 104, 105  # its reserved start became later, from step `need` to step `have`; is void
SHARED = -1  # in the place of a request: all those that nobody examined
NO_STEP = -1

# Columns and their array typecodes.
STEP_COLUMNS = {
    "step": "q",
    "start_ns": "q",
    "predicted_ns": "q",  # 0: no prediction
    "real_ns": "q",  # -1: not back yet
    "sequences": "i",
    "decodes": "i",
    "prefill_tokens": "i",
    "budget": "i",
    "bound_by": "b",  # place in REASONS, -1: nothing
    "stop_reason": "b",  # the same
    "free_blocks": "i",
    "cached_blocks": "i",
    "reserved_blocks": "i",
    "waiting": "i",
    "ahead": "b",  # 1: planned before the tokens of the step before were known
}
RECORD_COLUMNS = {"key": "q", "step": "q", "at_ns": "q", "code": "b", "need": "q", "have": "q", "by": "q"}


class Ring:
    """The last `size` rows of a table of integers, a column each; `number` counts all rows ever written."""

    __slots__ = ("columns", "number", "size")

    def __init__(self, size: int, typecodes: dict[str, str]) -> None:
        self.size = size
        self.number = 0
        self.columns = {name: array(code, bytes(array(code).itemsize * size)) for name, code in typecodes.items()}

    def __len__(self) -> int:
        return min(self.number, self.size)

    @property
    def num_lost(self) -> int:
        """Rows that were overwritten."""
        return self.number - len(self)

    def rows(self, *names: str) -> Iterator[tuple[int, ...]]:
        """These columns, oldest row first."""
        columns = [self.columns[name] for name in names]
        for number in range(self.num_lost, self.number):
            place = number % self.size
            yield tuple(column[place] for column in columns)


@dataclass(slots=True)
class Totals:
    """Sums over all that was logged. Those over requests are complete for the ended ones only."""

    num_arrived: int = 0
    num_ended: int = 0
    num_preemptions: int = 0
    num_reservations: int = 0
    num_reservation_moves: int = 0
    num_reservations_void: int = 0
    # Over steps.
    num_steps: int = 0
    num_ahead_steps: int = 0
    discarded_tokens: int = 0
    sequences: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    reserved_blocks: int = 0
    bound: list[int] = field(default_factory=lambda: [0] * len(REASONS))  # steps by what bound the budget
    # Over requests that ended.
    started_prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    parts: list[int] = field(default_factory=lambda: [0] * len(REASONS))  # waited ns by reason
