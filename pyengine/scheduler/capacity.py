"""Capacity: whether the KV pool has room for one more request, now and later. It takes no blocks itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from typing import Any

from pyengine.config import SchedulerConfig
from pyengine.errors import InvalidRequest, PolicyFault
from pyengine.kv_cache.blocks import last_horizon, need, num_blocks_for
from pyengine.kv_cache.kv_cache import KVCache, Prefix
from pyengine.request import Request
from pyengine.scheduler.forecast import Charge, Forecast, decode_charge
from pyengine.scheduler.reservation import Reservation, Start
from pyengine.scheduler.verdict import STARTS, Reason, Verdict

MIN_LENGTHS = 16  # below so many known outputs nothing is predicted
MAX_LENGTHS = 1000  # older ones are forgotten
NO_END = 2**62  # a step that never comes


class Capacity(ABC):
    """Judges starts, by a forecast of what the running requests will use.

    Subclass it for another rule: `horizon` says how many tokens a request is expected to get beyond those that it
    knows, `judge` whether it may start. A yes must mean that the free blocks hold all the tokens that it knows.
    """

    name = "capacity"
    is_exact = False  # whether nobody runs longer than is forecast

    def __init__(self, cache: KVCache, config: SchedulerConfig) -> None:
        self._cache = cache
        self._config = config
        self.forecast = Forecast(config.max_context, config.block_size)
        self._step = 0  # the present one
        self._charges: dict[Request, Charge] = {}
        self._ends: dict[int, dict[Request, None]] = {}  # decodes by the last bucket they are charged for
        self.spare = 0  # blocks that a start leaves free while others run
        self.on_fault: Callable[[str, Exception], None] | None = None  # told of what a rule of the user's does wrong

    # ---- The rule

    def horizon(self, request: Request) -> int:
        """Tokens that will get KV beyond the known ones, as far as this rule looks."""
        return last_horizon(request)

    @abstractmethod
    def judge(self, request: Request, prefix: Prefix, whole_in_step: bool, num_running: int) -> Verdict:
        """Whether `request` may start beside `num_running` others, with `prefix` shared; need and have in blocks.

        `whole_in_step` tells whether all tokens it knows would be computed in this step, so that it then decodes.
        """

    # ---- The rule, as others ask it: what the user's own says is checked

    def expect(self, request: Request) -> int:
        """`horizon`, at most what `request` may still get."""
        if self.on_fault is None:
            return self.horizon(request)
        most = last_horizon(request)
        try:
            tokens = self.horizon(request)
            if isinstance(tokens, int) and 0 <= tokens <= most:
                return tokens
            raise PolicyFault(f"Its horizon for {request!r} is {tokens!r}; that must be 0 to {most}.", policy=self.name)
        except Exception as error:
            self.on_fault(self.name, error)
            return most

    def verdict(self, request: Request, prefix: Prefix, whole_in_step: bool, num_running: int) -> Verdict:
        """`judge`; where that is at fault, whether the free blocks hold the tokens that `request` knows."""
        if self.on_fault is None:
            return self.judge(request, prefix, whole_in_step, num_running)
        now = _fits_now(self._cache, request, prefix, 0)
        try:
            verdict = self.judge(request, prefix, whole_in_step, num_running)
            if not isinstance(verdict, Verdict):
                raise PolicyFault(f"Its verdict on {request!r} is {verdict!r}, no Verdict.", policy=self.name)
            if verdict.starts and not now.starts:
                raise PolicyFault(
                    f"It lets {request!r} start, which needs {now.need} blocks; {now.have} are free.", policy=self.name
                )
            if not verdict.starts and num_running == 0:
                raise PolicyFault(f"It lets nobody start, though nothing runs: not {request!r}.", policy=self.name)
            return verdict
        except Exception as error:
            self.on_fault(self.name, error)
            return now

    # ---- The forecast

    def reserve(self, head: Request) -> Reservation | None:
        """When `head`, which does not fit now, starts if all goes as forecast; None if that is not known."""
        horizon = self.expect(head)
        final = need(head, horizon, self._config.block_size)
        num_blocks, last = self._use_of(head, horizon)
        certain = self._first_start(final, final, None)
        early = self._first_start(num_blocks, final, last - self.forecast.bucket)
        if certain is None or early is None:
            return None
        config = self._config
        prefix = self._cache.find_prefix(head)
        num_tokens = head.num_tokens - (0 if prefix is None else prefix.num_tokens)
        is_whole = num_tokens <= config.max_num_batched_tokens - config.max_num_seqs
        if num_tokens > config.max_num_batched_tokens or not self.is_exact:
            early = certain  # a forecast that may be wrong is not worth holding others up for the earliest chance
        return Reservation(certain, early, is_whole, config.num_blocks - self.spare, config.max_num_seqs)

    def _first_start(self, at_start: int, final: int, life: int | None) -> Start | None:
        config, forecast = self._config, self.forecast
        usable, num_seats = config.num_blocks - self.spare, config.max_num_seqs - 1
        bucket = forecast.first_start(usable, num_seats, at_start, final, life)
        if bucket is None:
            return None
        blocks, seats = forecast.use_from(bucket, life)
        start = Start(bucket, config.block_size, blocks, seats, at_start, final)
        ending = sorted((self._charges[request] for request in self._ends.get(bucket, ())), key=_last_step)
        for charge in ending:
            if start.num_seats <= num_seats and start.needed() <= usable:
                break
            start.leave(charge.final, charge.last_step)
        return start

    def _use_of(self, request: Request, horizon: int) -> tuple[int, int]:
        """Blocks of `request` at the end of the present bucket, and the last bucket in which it runs, if it starts now.

        All of its known tokens are computed in a step of this bucket, whichever that is: this is at most a block more,
        and a bucket longer, than what it will be charged; and as long as the bucket is the same, so is the answer.
        """
        size = self._config.block_size
        last = self.forecast.bucket + (size - 1 + horizon) // size
        return num_blocks_for(request.num_tokens + size - 1, size), last

    def would_delay(self, reservation: Reservation, request: Request, num_steps: int) -> Verdict:
        """Whether starting `request` now would move `reservation`; its tokens are computed in `num_steps` steps.

        If these are several the last one of its decode is not known, and the head needs the tokens when it starts.
        """
        if num_steps > 1 and self._step + num_steps > reservation.first_step:
            return Verdict(Reason.WOULD_DELAY_HEAD)
        needed = reservation.delayed_by(*self._final_use(request, num_steps == 1))
        return STARTS if needed is None else Verdict(Reason.WOULD_DELAY_HEAD, needed, reservation.usable)

    def passed(self, reservation: Reservation, request: Request, *, is_whole: bool) -> None:
        """`request` has started, and will not move `reservation`; `is_whole`: all its tokens are in this step."""
        reservation.take(*self._final_use(request, is_whole))

    def _final_use(self, request: Request, is_whole: bool) -> tuple[int, int]:
        """The most blocks that `request` will have if it starts now, and the last step in which it has them."""
        horizon = self.expect(request)
        last_step = self._step + horizon if is_whole else NO_END
        return need(request, horizon, self._config.block_size), last_step

    def begin(self, step: int) -> None:
        """Step `step` is about to be planned. Those that outlived what they were charged for are charged anew."""
        self._step = step
        bucket = step // self._config.block_size
        if bucket == self.forecast.bucket:
            return
        passed = range(self.forecast.bucket, bucket)
        self.forecast.move_to(bucket)
        for earlier in passed:
            for request in self._ends.pop(earlier, ()):
                del self._charges[request]
                self._charge_decode(request, step)

    def started(self, request: Request) -> None:
        """`request` is in state PREFILL from now on, and more of its tokens are left than the step computes."""
        self._put(request, Charge(self._final(request)))

    def decodes(self, request: Request, step: int) -> None:
        """All tokens that `request` knows are computed in `step`, and then it gains one in each step.

        A request that does both in one step is only told of here.
        """
        if request in self._charges:
            self._remove(request)
        self._put(request, decode_charge(request.num_tokens, self.expect(request), step, self._config.block_size))

    def left(self, request: Request) -> None:
        """`request` runs no more and has given its blocks back."""
        self._remove(request)

    def ended(self, request: Request) -> None:
        """`request` made its last token; its length is known."""

    def learn(self, request: Request) -> None:
        """`ended`, where an error of a rule of the user's is reported."""
        try:
            self.ended(request)
        except Exception as error:
            if self.on_fault is None:
                raise
            self.on_fault(self.name, error)

    # ---- Details

    def _final(self, request: Request) -> int:
        return need(request, self.expect(request), self._config.block_size)

    def _charge_decode(self, request: Request, step: int) -> None:
        # Between two steps a decode knows one token that has no KV; within one all of them have.
        known = request.num_computed_tokens
        horizon = self.expect(request) + request.num_tokens - known
        self._put(request, decode_charge(known, horizon, step - 1, self._config.block_size))

    def _put(self, request: Request, charge: Charge) -> None:
        self._charges[request] = charge
        self.forecast.add(charge)
        if charge.last_bucket is not None:
            self._ends.setdefault(charge.last_bucket, {})[request] = None

    def _remove(self, request: Request) -> None:
        charge = self._charges.pop(request)
        self.forecast.add(charge, -1)
        if charge.last_bucket is not None:
            enders = self._ends[charge.last_bucket]
            del enders[request]
            if not enders:
                del self._ends[charge.last_bucket]


class Optimistic(Capacity):
    """Looks at the present only: known tokens must fit and leave a watermark, waived when nothing runs.

    Running requests may outgrow the pool together; then one is preempted. The forecast takes everyone at max_tokens.
    """

    name = "optimistic"

    def __init__(self, cache: KVCache, config: SchedulerConfig) -> None:
        super().__init__(cache, config)
        self.spare = int(config.watermark * config.num_blocks)

    def judge(self, request: Request, prefix: Prefix, whole_in_step: bool, num_running: int) -> Verdict:
        return _fits_now(self._cache, request, prefix, self.spare if num_running else 0)


class Guaranteed(Capacity):
    """Starts a request only if nobody needs to be preempted later, even if all make max_tokens.

    A lockstep certificate: the forecast is exact when everyone makes max_tokens, and too high by what is shared and
    by those that end earlier, never too low.
    """

    name = "guaranteed"
    is_exact = True

    def judge(self, request: Request, prefix: Prefix, whole_in_step: bool, num_running: int) -> Verdict:
        return _fits_later(self, request, whole_in_step)


class Predicted(Capacity):
    """The same certificate for the lengths that requests are expected to reach, with preemption as the fallback.

    The expected length is a quantile of the recent outputs that are longer than what the request has made; it is
    taken anew when a request outlives it. Until enough outputs have been seen it is max_tokens.
    """

    name = "predicted"

    def __init__(self, cache: KVCache, config: SchedulerConfig) -> None:
        super().__init__(cache, config)
        self.spare = int(config.watermark * config.num_blocks)
        self._lengths = OutputLengths()

    def horizon(self, request: Request) -> int:
        return max(0, self._lengths.expect(request, self._config.capacity_quantile) - request.num_output_tokens - 1)

    def judge(self, request: Request, prefix: Prefix, whole_in_step: bool, num_running: int) -> Verdict:
        verdict = _fits_now(self._cache, request, prefix, 0)
        if not verdict.starts or num_running == 0:
            return verdict
        return _fits_later(self, request, whole_in_step)

    def ended(self, request: Request) -> None:
        self._lengths.add(request.num_output_tokens)


_A_RULE_MAY_HAVE = frozenset({"__init__", "name", "horizon", "judge", "ended"})


def check_capacity_class(chosen: Any) -> None:
    """Raise InvalidRequest unless `chosen` is a class that a user may give: the forecast is not his to change."""
    if not isinstance(chosen, type) or not issubclass(chosen, Capacity):
        raise InvalidRequest(
            f"capacity is {chosen!r}; one of your own must be a class derived from pyengine.scheduler.Capacity.",
            field="capacity",
            value=chosen,
            limit=tuple(CAPACITIES),
        )
    for name in vars(Capacity):
        changed = getattr(chosen, name, None) is not getattr(Capacity, name) and callable(getattr(Capacity, name))
        if changed and name not in _A_RULE_MAY_HAVE and chosen not in CAPACITIES.values():
            raise InvalidRequest(
                f"capacity {chosen.name!r} has its own {name}(); a rule may have horizon(), judge() and ended().",
                field="capacity",
                value=name,
                limit=tuple(sorted(_A_RULE_MAY_HAVE)),
            )


class OutputLengths:
    """The lengths of recent outputs, in tokens."""

    __slots__ = ("_first_quantile", "_recent", "_sorted")

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._first_quantile: dict[float, int] = {}  # of those that have made nothing, until the next output ends

    def add(self, length: int) -> None:
        """An output of `length` tokens has ended."""
        if len(self._recent) == MAX_LENGTHS:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(length)
        insort(self._sorted, length)
        self._first_quantile.clear()

    def expect(self, request: Request, quantile: float) -> int:
        """Output tokens that `request` is expected to reach, more than it has and at most max_tokens.

        The quantile of the outputs longer than its own so far; where none is, twice what it has made.
        """
        known = self._sorted
        if len(known) < MIN_LENGTHS:
            return request.max_tokens
        made = request.num_output_tokens
        if made == 0:
            if quantile not in self._first_quantile:
                self._first_quantile[quantile] = known[int(quantile * (len(known) - 1))]
            return min(request.max_tokens, self._first_quantile[quantile])
        first = bisect_right(known, made)
        if first == len(known):
            return min(request.max_tokens, 2 * made)
        return min(request.max_tokens, known[first + int(quantile * (len(known) - first - 1))])


def _last_step(charge: Charge) -> int:
    return charge.last_step


def _fits_now(cache: KVCache, request: Request, prefix: Prefix, spare: int) -> Verdict:
    needed = cache.need_fresh(request, prefix)
    usable = cache.pool.num_free - spare
    return Verdict(None if needed <= usable else Reason.KV_NOW, needed, usable)


def _fits_later(capacity: Capacity, request: Request, whole_in_step: bool) -> Verdict:
    """Whether the forecast with `request`, which may grow to `need` blocks, leaves what a start has to leave free."""
    config, forecast = capacity._config, capacity.forecast
    horizon = capacity.expect(request)
    final = need(request, horizon, config.block_size)
    most = config.num_blocks - capacity.spare
    if final <= most - forecast.at_most:
        return STARTS
    usable = most - forecast.peak()
    if final <= usable:
        return Verdict(None, final, usable)
    if whole_in_step:
        num_blocks, last = capacity._use_of(request, horizon)
        if forecast.peak_with(num_blocks, final, last) <= most:
            return Verdict(None, final, final)
    return Verdict(Reason.KV_PEAK, final, usable)


CAPACITIES: dict[str, Callable[[KVCache, SchedulerConfig], Capacity]] = {
    Optimistic.name: Optimistic,
    Guaranteed.name: Guaranteed,
    Predicted.name: Predicted,
}
