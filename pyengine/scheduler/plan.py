"""What leaves the scheduler: the plan of one model pass. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from pyengine.errors import PyEngineError
from pyengine.request import Request
from pyengine.scheduler.verdict import Reason


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One model pass: which requests share it, and how many tokens each of them gets.

    The lists `requests`, `num_new_tokens`, `num_computed` and `samples` have one entry a request, in batch order:
    decodes first, then running prefills, then those that joined. Request i runs its tokens at the positions
    num_computed[i] to num_computed[i] + num_new_tokens[i] - 1, which are all in its `token_ids`, and its
    `block_table` has the blocks for them. The lists are the caller's to read, not to change.

    Attributes:
        step: number of the step, counted from 0.
        num_new_tokens: tokens of each request in this pass, >= 1.
        num_computed: tokens of each request that had KV before this pass.
        samples: whether the newest known token of the request is in this pass, so that it samples its next one.
        copies: (source block, destination block) pairs to be copied whole, in every layer, before the pass.
        joined: requests that started or resumed in this step.
        preempted: requests that lost their KV in this step, to be resumed later, or even in it.
        refused: requests that were ended before they started, and why; also in a plan that is empty.
        num_decode_tokens / num_prefill_tokens: the sum of num_new_tokens, split by the state at the step's start.
    """

    step: int
    requests: list[Request]
    num_new_tokens: list[int]
    num_computed: list[int]
    samples: list[bool]
    copies: list[tuple[int, int]]
    joined: list[Request]
    preempted: list[Request]
    refused: list[tuple[Request, PyEngineError]]
    num_decode_tokens: int
    num_prefill_tokens: int

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run; an empty plan need not be committed."""
        return not self.requests

    @property
    def num_tokens(self) -> int:
        """Tokens in the pass."""
        return self.num_decode_tokens + self.num_prefill_tokens


class PlanDraft:
    """A plan while it is made: requests are added until the budget of prompt tokens is used up."""

    __slots__ = (
        "_num_decodes",
        "_num_prefill_tokens",
        "bound_by",
        "budget",
        "copies",
        "first_budget",
        "joined",
        "num_computed",
        "num_new_tokens",
        "preempted",
        "refused",
        "requests",
        "samples",
        "step",
    )

    def __init__(self, step: int) -> None:
        self.step = step
        self.budget = 0
        self.first_budget = 0  # before anybody took of it
        self.bound_by: Reason | None = None  # the limit that set the budget
        self.requests: list[Request] = []
        self.num_new_tokens: list[int] = []
        self.num_computed: list[int] = []
        self.samples: list[bool] = []
        self.copies: list[tuple[int, int]] = []
        self.joined: list[Request] = []
        self.preempted: list[Request] = []
        self.refused: list[tuple[Request, PyEngineError]] = []
        self._num_decodes = 0
        self._num_prefill_tokens = 0

    def add_decodes(self, decodes: list[Request]) -> None:
        """Add requests that each compute their newest token. Call it once, before any chunk."""
        self.requests = decodes
        self.num_new_tokens = [1] * len(decodes)
        self.num_computed = [request.num_computed_tokens for request in decodes]
        self.samples = [True] * len(decodes)
        self._num_decodes = len(decodes)

    def add_chunk(self, request: Request) -> bool:
        """Add as many of the tokens that `request` has yet to compute as the budget (>= 1) allows; whether all of them.

        Then the request samples its next token in this step.
        """
        left = request.num_tokens - request.num_computed_tokens
        count = min(left, self.budget)
        self.budget -= count
        self._num_prefill_tokens += count
        self.requests.append(request)
        self.num_new_tokens.append(count)
        self.num_computed.append(request.num_computed_tokens)
        self.samples.append(count == left)
        return count == left

    def plan(self) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            step=self.step,
            requests=self.requests,
            num_new_tokens=self.num_new_tokens,
            num_computed=self.num_computed,
            samples=self.samples,
            copies=self.copies,
            joined=self.joined,
            preempted=self.preempted,
            refused=self.refused,
            num_decode_tokens=self._num_decodes,
            num_prefill_tokens=self._num_prefill_tokens,
        )
