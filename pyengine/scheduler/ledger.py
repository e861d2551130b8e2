"""Ledger: what each request waited for and how long, in integer nanoseconds that add up exactly. It decides nothing.

A verdict reached at the beginning of a step holds until the next step begins, or until the request starts or ends:

    schedule() at T0            T1            T2        start
        |---- verdict of T0 ----|-- verdict --|-- of T2 --|

Requests that nobody examines share one reason. Their time is added once for all of them, to `_shared_ns`; a request
that comes to share keeps a snapshot of it, and the difference is its own part when it leaves. So a step costs the
same whether ten or ten thousand requests share.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyengine.scheduler.verdict import Reason

REASONS = tuple(Reason)
INDEX = {reason: index for index, reason in enumerate(REASONS)}
MID_STEP, PREEMPTED, HELD = INDEX[Reason.MID_STEP], INDEX[Reason.PREEMPTED], INDEX[Reason.HELD]


class Account:
    """The waiting of one request: what is settled, and what it waits for now.

    Attributes:
        parts: settled nanoseconds by the reason's place in REASONS.
        index: place in REASONS of what it waits for by itself; -1 while it does not wait, or shares.
        snapshot: the shared time when it came to share; None while it does not.
        since_ns: the beginning of what is not settled yet.
    """

    __slots__ = ("index", "parts", "since_ns", "snapshot")

    def __init__(self) -> None:
        self.parts = [0] * len(REASONS)
        self.index = -1
        self.snapshot: Sequence[int] | None = None
        self.since_ns = 0

    @property
    def is_open(self) -> bool:
        """Whether it waits."""
        return self.index >= 0 or self.snapshot is not None


class Ledger:
    """Adds up the time of all accounts. Times are integer nanoseconds that never go backwards."""

    __slots__ = ("_shared_index", "_shared_ns", "_shared_used", "_snapshot", "begun_ns")

    def __init__(self) -> None:
        self.begun_ns = 0
        self._shared_index = MID_STEP
        self._shared_used = [self._shared_index]  # reasons that were ever shared, the only ones in which a sum can grow
        self._shared_ns = [0] * len(REASONS)
        self._snapshot: tuple[int, ...] | None = None

    @property
    def shared_reason(self) -> Reason:
        """What those that share wait for."""
        return REASONS[self._shared_index]

    def begin(self, now_ns: int) -> None:
        """A step begins: the shared reason held until now."""
        self._shared_ns[self._shared_index] += now_ns - self.begun_ns
        self.begun_ns = now_ns
        self._snapshot = None

    def share_reason(self, reason: Reason) -> None:
        """From the beginning of this step on, those that share wait for `reason`."""
        self._shared_index = index = INDEX[reason]
        if index not in self._shared_used:
            self._shared_used.append(index)

    def wait(self, account: Account, index: int, now_ns: int) -> None:
        """From `now_ns` on it waits by itself, for the reason at this place in REASONS."""
        self._settle(account, account.parts, now_ns)
        account.index = index
        account.snapshot = None
        account.since_ns = now_ns

    def share(self, account: Account) -> None:
        """From the beginning of this step on it waits for what the others wait for that nobody examined."""
        self._settle(account, account.parts, self.begun_ns)
        account.index = -1
        if self._snapshot is None:
            self._snapshot = tuple(self._shared_ns)
        account.snapshot = self._snapshot
        account.since_ns = self.begun_ns

    def stop(self, account: Account, now_ns: int) -> None:
        """It waits no more."""
        self._settle(account, account.parts, now_ns)
        account.index = -1
        account.snapshot = None

    def parts_at(self, account: Account, now_ns: int) -> list[int]:
        """Nanoseconds up to `now_ns`, by the reason's place in REASONS; the account is not changed."""
        parts = list(account.parts)
        self._settle(account, parts, now_ns)
        return parts

    def _settle(self, account: Account, parts: list[int], now_ns: int) -> None:
        """Add what is not settled in `account` to `parts`."""
        if account.index >= 0:
            parts[account.index] += now_ns - account.since_ns
        elif account.snapshot is not None:
            for index in self._shared_used:
                parts[index] += self._shared_ns[index] - account.snapshot[index]
            parts[self._shared_index] += now_ns - self.begun_ns
