"""What is kept of one request: the account of its waiting, the numbers behind it, who was in its way. Plain state."""

from __future__ import annotations

from typing import NamedTuple

from pyengine.request import Request
from pyengine.scheduler.ledger import Account
from pyengine.scheduler.verdict import Reason

NOBODY = -1  # in the place of a request's key
MAX_LABELS = 8


class Facts:
    """What is known of a request beside its waiting, copied when it ends, since its tokens are not kept."""

    __slots__ = (
        "arrival_ns",
        "finish_reason",
        "finished_ns",
        "first_token_ns",
        "max_tokens",
        "num_cached_tokens",
        "num_output_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_recomputed_tokens",
        "started_ns",
        "state",
    )

    def __init__(self, request: Request) -> None:
        self.state = request.state
        self.finish_reason = request.finish_reason
        self.arrival_ns = request.arrival_ns
        self.started_ns = request.started_ns
        self.first_token_ns = request.first_token_ns
        self.finished_ns = request.finished_ns
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_output_tokens = request.num_output_tokens
        self.max_tokens = request.max_tokens
        self.num_cached_tokens = request.num_cached_tokens
        self.num_preemptions = request.num_preemptions
        self.num_recomputed_tokens = request.num_recomputed_tokens


class Labels(NamedTuple):
    """The first few names of a series, and how many there were."""

    first: tuple[str, ...] = ()
    number: int = 0

    def plus(self, label: str) -> Labels:
        """With one more, which is counted, and kept if it is among the first."""
        return Labels(self.first if self.number >= MAX_LABELS else (*self.first, label), self.number + 1)


NO_LABELS = Labels()


class Numbers:
    """The numbers behind one reason of one request's wait.

    `need` and `had` are the first pair that was found for it, `need` 0 if it has no numbers; `least` and `most` are the
    range of what there was in all the steps that examined it. `lacked` is the reason that the pair belongs to: this
    one, except that a PREEMPTED request lacks something else to come back. `by` are the first of those in its way.
    """

    __slots__ = ("by", "first_step", "had", "lacked", "last_step", "least", "most", "need")

    def __init__(self, lacked: Reason, step: int) -> None:
        self.lacked = lacked
        self.need = self.had = self.least = self.most = 0
        self.first_step = self.last_step = step
        self.by: tuple[str, ...] = ()

    def update(self, need: int, have: int, step: int) -> None:
        """It was examined in `step`."""
        self.last_step = step
        if self.need == 0:
            self.need = need
            self.had = self.least = self.most = have
        elif have < self.least:
            self.least = have
        elif have > self.most:
            self.most = have

    def add_by(self, label: str) -> None:
        """This one is in its way."""
        if len(self.by) < MAX_LABELS and label not in self.by:
            self.by = (*self.by, label)


class Submit:
    """The n sequences of one submit, of those that are still known, by index."""

    __slots__ = ("n", "records", "request_id")

    def __init__(self, request_id: str, n: int) -> None:
        self.request_id = request_id
        self.n = n
        self.records: dict[int, RequestRecord] = {}


class RequestRecord(Account):
    """All that is kept of one request.

    Attributes:
        key: its number in the order of arrival. sibling: which of its submit it is. label: its name in texts.
        submit: those it was submitted with.
        request: itself while it lives. facts: what is kept of it afterwards.
        is_fixed: whether its reason, PREEMPTED or HELD, stays whatever a step finds.
        examined: the round in which it was last examined.
        by: key of the one in its way. numbers: those behind each reason, by the reason's place in REASONS.
        open_numbers: those behind what it waits for now, None if it was not examined for that.
        passed_by / passed: those that overtook it while it was blocked, and those it overtook.
        is_reserved: whether it is the blocked head and `reserved_step` holds.
        reserved_step: the step at which it is, or was, sure to start; None if no finite one was known.
        num_reservations: how often it became the blocked head. num_moves: how often the reserved step became later.
        voided_by: those of higher order that made a reservation void.
        held_for: what it was held for. end_note: why it was ended, where somebody said so.
        arrived_step / started_step / ended_step: the last step that had begun then.
    """

    __slots__ = (
        "arrived_step",
        "by",
        "end_note",
        "ended_step",
        "examined",
        "facts",
        "held_for",
        "is_fixed",
        "is_reserved",
        "key",
        "label",
        "num_moves",
        "num_reservations",
        "numbers",
        "open_numbers",
        "passed",
        "passed_by",
        "request",
        "reserved_step",
        "sibling",
        "started_step",
        "submit",
        "voided_by",
    )

    def __init__(self, request: Request, submit: Submit, step: int) -> None:
        super().__init__()
        self.key = request.arrival_seq
        self.sibling = request.index
        self.label = request.request_id if submit.n == 1 else f"{request.request_id}[{request.index}]"
        self.submit = submit
        self.request: Request | None = request
        self.facts: Facts | None = None
        self.is_fixed = False
        self.end_note: str | None = None
        self.examined = 0
        self.by = NOBODY
        self.numbers: dict[int, Numbers] = {}
        self.open_numbers: Numbers | None = None
        self.passed_by = NO_LABELS
        self.passed = NO_LABELS
        self.is_reserved = False
        self.reserved_step: int | None = None
        self.num_reservations = 0
        self.num_moves = 0
        self.voided_by = NO_LABELS
        self.held_for = NO_LABELS
        self.arrived_step = step
        self.started_step: int | None = None
        self.ended_step: int | None = None

    def facts_now(self) -> Facts:
        """What is known of the request now, or was when it ended."""
        if self.facts is not None:
            return self.facts
        assert self.request is not None
        return Facts(self.request)
