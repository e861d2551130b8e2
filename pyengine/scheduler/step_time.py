"""StepTimeModel: how long a step takes, learned from steps as they run. It plans nothing and measures nothing itself.

    T = c0 + c1 * prefill_tokens + c2 * decode_seqs + c3 * kv_tokens + c4 * attention_pairs        all c >= 0

The fit is weighted least squares with exponential forgetting, which is recursive least squares with the normal
equations kept instead of their inverse: one observation adds to 20 sums, and every few steps a 5 x 5 problem with
c >= 0 is solved. A step counts by its *relative* error, as a 5 ms step and a 500 ms step are wrong by their size.

Features that move together (a batch that never changes has c0 and c2 on one line) leave coefficients that the data
do not tell apart. Each solve adds a small pull towards the previous coefficients, relative to what is known of each:
what the data tell is not biased by it after a few solves, and what they do not tell stays where it was.

Outliers (a page fault, a laptop that slept) are always slow steps. Three things bound them: a step counts by
1 / duration^2, so that the pull of a step 100 times too long is about a hundredth of an ordinary one; once fitted, a
duration counts as at most OUTLIER_RATIO times the prediction; and the margin, a quantile, is of the others: shorter
chunks would not make a page fault shorter. If most steps between two solves were that slow, it is the device that has
changed: the past is discounted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyengine.scheduler.plan import StepPlan

COEFFICIENTS = (
    "base_ns",
    "ns_per_prefill_token",
    "ns_per_decode_seq",
    "ns_per_kv_token",
    "ns_per_attention_pair",
)
FORGETTING = 0.999
WINDOW = 512
QUANTILE = 0.98  # above the 95 % that are to be kept: how slow a machine is changes while one learns
SOLVE_EVERY = 16
OUTLIER_RATIO = 4.0
CHANGED_WEIGHT = 100.0  # of later steps against earlier ones, once most are outliers
MIN_STEPS = 32  # to count as fitted, and
MIN_PREFILL_STEPS = 8  # with prefill tokens: before, their cost is a guess
_PULL = 1e-4  # of the diagonal, towards the previous coefficients
_SIZE = len(COEFFICIENTS)
_PAIRS = tuple((i, j) for i in range(_SIZE) for j in range(i, _SIZE))
_MAX_WEIGHT = 1e100


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """What the time of a step depends on.

    Attributes:
        prefill_tokens: prompt tokens (and recomputed ones) in the pass.
        decode_seqs: requests that compute one token each.
        kv_tokens: tokens with KV, of these decodes, before the pass: what their attention reads.
        attention_pairs: of the chunks, pairs of a token and one it attends to: chunk * context + chunk * (chunk + 1)
            / 2 for a chunk behind `context` tokens.
    """

    prefill_tokens: int = 0
    decode_seqs: int = 0
    kv_tokens: int = 0
    attention_pairs: int = 0


def chunk_pairs(chunk: int, context: int) -> int:
    """The (token, attended token) pairs of `chunk` tokens behind `context` others; each attends to itself too."""
    return chunk * context + chunk * (chunk + 1) // 2


def step_features(plan: StepPlan, kv_tokens: int | None = None) -> StepFeatures:
    """The features of `plan`. `kv_tokens`, if the caller keeps count of them, saves a sum over the decodes."""
    num_decodes = plan.num_decode_tokens
    if kv_tokens is None:
        kv_tokens = sum(plan.num_computed[:num_decodes])
    pairs = 0
    for i in range(num_decodes, len(plan.requests)):
        pairs += chunk_pairs(plan.num_new_tokens[i], plan.num_computed[i])
    return StepFeatures(plan.num_prefill_tokens, num_decodes, kv_tokens, pairs)


class StepTimeModel:
    """Predicts the duration of a step in ns from its features; `observe` teaches it.

    With `coefficients` (in the order of COEFFICIENTS) it is fitted from the beginning: a device of a simulation, or a
    stored profile. They are also what the fit is pulled to while the data say nothing. Raises ValueError for
    coefficients that are not 5 finite numbers >= 0.
    """

    __slots__ = (
        "_count",
        "_decode_residuals",
        "_forgetting",
        "_given",
        "_margins",
        "_normal",
        "_num_outliers",
        "_passive",
        "_prefill_count",
        "_prefill_residuals",
        "_quantile",
        "_right",
        "_unsolved",
        "_weight",
        "_window",
        "coefficients",
        "largest_prefill_seen",
    )

    def __init__(
        self,
        coefficients: Sequence[float] | None = None,
        *,
        forgetting: float = FORGETTING,
        window: int = WINDOW,
        quantile: float = QUANTILE,
    ) -> None:
        self._given = coefficients is not None
        self.coefficients = _checked(coefficients if coefficients is not None else (0.0,) * _SIZE)
        self._forgetting = forgetting
        self._window = window
        self._quantile = quantile
        self._normal = [0.0] * len(_PAIRS)
        self._right = [0.0] * _SIZE
        self._weight = 1.0
        self._count = 0
        self._prefill_count = 0
        self._unsolved = 0
        self._num_outliers = 0
        self._passive: tuple[int, ...] = ()
        # Of the last steps without and with prefill tokens: (duration - prediction) / prediction, as a ring each.
        self._decode_residuals: list[float] = []
        self._prefill_residuals: list[float] = []
        self._margins = (0.0, 0.0)
        self.largest_prefill_seen = 0

    # ---- Learning

    def observe(self, features: StepFeatures, duration_ns: int) -> None:
        """Learn from one step. A duration <= 0 (a clock that stood still) is no measurement and changes nothing."""
        if duration_ns <= 0:
            return
        row = (
            1.0,
            float(features.prefill_tokens),
            float(features.decode_seqs),
            float(features.kv_tokens),
            float(features.attention_pairs),
        )
        duration = float(duration_ns)
        predicted = self._dot(row)
        if predicted > 0.0 and (self._given or self._count >= MIN_STEPS // 2):
            if duration <= OUTLIER_RATIO * predicted:
                self._keep_residual(features.prefill_tokens > 0, duration / predicted - 1.0)
            elif self._given or self._count >= MIN_STEPS:
                duration = OUTLIER_RATIO * predicted
                self._num_outliers += 1
        self._add(row, duration)
        self._count += 1
        if features.prefill_tokens:
            self._prefill_count += 1
            if features.prefill_tokens > self.largest_prefill_seen:
                self.largest_prefill_seen = features.prefill_tokens
        self._unsolved += 1
        if self._unsolved >= (SOLVE_EVERY if self._count > 2 * SOLVE_EVERY else 4):
            self.solve()

    def solve(self) -> None:
        """Bring coefficients and margins up to date with all observations; `observe` does it every few steps."""
        if 2 * self._num_outliers > self._unsolved:
            self._weight *= CHANGED_WEIGHT
        self._unsolved = 0
        self._num_outliers = 0
        self._fit()
        self._margins = (
            _upper_quantile(self._decode_residuals, self._quantile),
            _upper_quantile(self._prefill_residuals, self._quantile),
        )

    # ---- Asking

    @property
    def is_fitted(self) -> bool:
        """Whether predictions can be relied on: coefficients were given, or enough steps of each kind were seen."""
        return self._given or (self._count >= MIN_STEPS and self._prefill_count >= MIN_PREFILL_STEPS)

    @property
    def is_given(self) -> bool:
        """Whether the coefficients were given at the start."""
        return self._given

    @property
    def has_estimate(self) -> bool:
        """Whether there are coefficients at all, reliable or not."""
        return self._given or any(self.coefficients)

    @property
    def num_observed(self) -> int:
        """Steps learned from."""
        return self._count

    @property
    def margins(self) -> tuple[float, float]:
        """By how much, of the prediction, all but the slowest few recent steps were longer: (decodes only, others)."""
        return self._margins

    def predict(self, features: StepFeatures) -> int:
        """Expected duration in ns."""
        c0, c1, c2, c3, c4 = self.coefficients
        return round(
            c0
            + c1 * features.prefill_tokens
            + c2 * features.decode_seqs
            + c3 * features.kv_tokens
            + c4 * features.attention_pairs
        )

    def upper(self, features: StepFeatures) -> int:
        """The duration in ns that recent steps like this stayed under, at the quantile: prediction plus margin."""
        return math.ceil(self.predict(features) * (1.0 + self._margins[features.prefill_tokens > 0]))

    def largest_chunk(self, limit_ns: int, num_decodes: int, kv_tokens: int, context: int, most: int) -> int:
        """Most prefill tokens, 0 to `most`, behind `context` others that keep `upper` of the step within `limit_ns`.

        Several prefills in a step are counted as one chunk behind the context of the first.
        """
        c0, c1, c2, c3, c4 = self.coefficients
        left = limit_ns / (1.0 + self._margins[True]) - (c0 + c2 * num_decodes + c3 * kv_tokens)
        if left <= 0.0 or most <= 0:
            return 0
        # c1 * x + c4 * (x * context + x * (x + 1) / 2) <= left
        linear, half = c1 + c4 * (context + 0.5), c4 / 2
        if linear * most + half * most * most <= left:
            chunk = most
        else:
            # The root in the form that does not cancel when c4 is small.
            chunk = min(most, int(2.0 * left / (linear + math.sqrt(linear * linear + 4.0 * half * left))))
        while chunk > 0 and self._upper_of(chunk, num_decodes, kv_tokens, context) > limit_ns:
            chunk -= 1  # rounding, at most a few times
        return chunk

    def _upper_of(self, chunk: int, num_decodes: int, kv_tokens: int, context: int) -> int:
        return self.upper(StepFeatures(chunk, num_decodes, kv_tokens, chunk_pairs(chunk, context)))

    # ---- To and from plain data

    def summary(self) -> dict[str, Any]:
        """What is worth showing: coefficients by name, how many steps they rest on, the margins."""
        return {
            "coefficients": dict(zip(COEFFICIENTS, self.coefficients, strict=True)),
            "is_fitted": self.is_fitted,
            "num_observed": self.num_observed,
            "margins": list(self._margins),
        }

    def to_dict(self) -> dict[str, Any]:
        """The whole state as JSON-able data; a model made from it goes on exactly as this one."""
        return {
            "coefficients": dict(zip(COEFFICIENTS, self.coefficients, strict=True)),
            "given": self._given,
            "forgetting": self._forgetting,
            "window": self._window,
            "quantile": self._quantile,
            "count": self._count,
            "prefill_count": self._prefill_count,
            "unsolved": self._unsolved,
            "outliers": self._num_outliers,
            "largest_prefill_seen": self.largest_prefill_seen,
            "weight": self._weight,
            "normal": list(self._normal),
            "right": list(self._right),
            "passive": list(self._passive),
            "margins": list(self._margins),
            "decode_residuals": list(self._decode_residuals),
            "prefill_residuals": list(self._prefill_residuals),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepTimeModel:
        """What to_dict gave; `coefficients` alone are enough. Raises ValueError for what cannot be such a model."""
        try:
            given = [data["coefficients"][name] for name in COEFFICIENTS]
            model = cls(
                given,
                forgetting=float(data.get("forgetting", FORGETTING)),
                window=int(data.get("window", WINDOW)),
                quantile=float(data.get("quantile", QUANTILE)),
            )
            if "count" in data:
                model._given = bool(data["given"])
                model._count = int(data["count"])
                model._prefill_count = int(data["prefill_count"])
                model._unsolved = int(data["unsolved"])
                model._num_outliers = int(data["outliers"])
                model.largest_prefill_seen = int(data["largest_prefill_seen"])
                model._weight = float(data["weight"])
                model._normal = _floats(data["normal"], len(_PAIRS))
                model._right = _floats(data["right"], _SIZE)
                model._passive = tuple(int(i) for i in data["passive"])
                model._decode_residuals = _floats(data["decode_residuals"])
                model._prefill_residuals = _floats(data["prefill_residuals"])
                decode_margin, prefill_margin = _floats(data["margins"], 2)
                model._margins = (decode_margin, prefill_margin)
        except (KeyError, TypeError) as error:
            raise ValueError(f"This is no step-time model: {error!r}.") from error
        return model

    def copy(self) -> StepTimeModel:
        """Another model in the same state."""
        return StepTimeModel.from_dict(self.to_dict())

    # ---- Details

    def _dot(self, row: tuple[float, float, float, float, float]) -> float:
        c0, c1, c2, c3, c4 = self.coefficients
        return c0 + c1 * row[1] + c2 * row[2] + c3 * row[3] + c4 * row[4]

    def _keep_residual(self, with_prefill: bool, residual: float) -> None:
        ring = self._prefill_residuals if with_prefill else self._decode_residuals
        if len(ring) == self._window:
            del ring[0]
        ring.append(residual)

    def _add(self, row: tuple[float, float, float, float, float], duration: float) -> None:
        """Add one observation to the sums. Newer ones get a larger weight instead of older ones a smaller."""
        self._weight /= self._forgetting
        if self._weight > _MAX_WEIGHT:
            self._normal = [value / _MAX_WEIGHT for value in self._normal]
            self._right = [value / _MAX_WEIGHT for value in self._right]
            self._weight /= _MAX_WEIGHT
        weight = self._weight / (duration * duration)
        _, x1, x2, x3, x4 = row
        w1, w2, w3, w4 = weight * x1, weight * x2, weight * x3, weight * x4
        # _normal is the upper triangle by rows: 00 01 02 03 04 11 12 13 14 22 23 24 33 34 44.
        a, right = self._normal, self._right
        a[0] += weight
        right[0] += weight * duration
        if x1:
            a[1] += w1
            a[4] += w4
            a[5] += w1 * x1
            a[6] += w1 * x2
            a[7] += w1 * x3
            a[8] += w1 * x4
            a[11] += w4 * x2
            a[13] += w4 * x3
            a[14] += w4 * x4
            right[1] += w1 * duration
            right[4] += w4 * duration
        if x2:
            a[2] += w2
            a[3] += w3
            a[9] += w2 * x2
            a[10] += w2 * x3
            a[12] += w3 * x3
            right[2] += w2 * duration
            right[3] += w3 * duration

    def _fit(self) -> None:
        """Minimise the weighted squares over c >= 0, each feature scaled to norm 1; what was never seen stays."""
        normal = [[0.0] * _SIZE for _ in range(_SIZE)]
        for (i, j), value in zip(_PAIRS, self._normal, strict=True):
            normal[i][j] = normal[j][i] = value
        floor = normal[0][0] * 1e-30
        seen = [i for i in range(_SIZE) if normal[i][i] > floor]
        scale = {i: math.sqrt(normal[i][i]) for i in seen}
        matrix = [[normal[i][j] / (scale[i] * scale[j]) + _PULL * (i == j) for j in seen] for i in seen]
        right = [self._right[i] / scale[i] + _PULL * self.coefficients[i] * scale[i] for i in seen]
        passive = tuple(seen.index(i) for i in self._passive if i in seen)
        solution, passive = _non_negative(matrix, right, passive)
        coefficients = list(self.coefficients)
        for i, value in zip(seen, solution, strict=True):
            coefficients[i] = value / scale[i]
        self._passive = tuple(seen[i] for i in passive)
        self.coefficients = tuple(coefficients)


def _non_negative(
    matrix: list[list[float]], right: list[float], passive: tuple[int, ...]
) -> tuple[list[float], tuple[int, ...]]:
    """The x >= 0 that minimises x.M.x / 2 - right.x, M positive definite; and which x are not held at 0 (passive).

    Tries all free, and `passive`, which the last solve ended with; else the active-set method of Lawson and Hanson,
    Solving Least Squares Problems (1974), chapter 23.
    """
    size = len(right)
    everything = tuple(range(size))
    for guess in (everything, passive):
        solution = _solve(matrix, right, guess)
        if min(solution) >= 0.0 and _wants_in(matrix, right, solution, guess) is None:
            return solution, guess
    solution = [0.0] * size
    free: list[int] = []
    for _ in range(3 * size):
        entering = _wants_in(matrix, right, solution, free)
        if entering is None:
            break
        free.append(entering)
        while True:
            target = _solve(matrix, right, free)
            if all(target[i] > 0.0 for i in free):
                solution = target
                break
            # Go towards the target until the first one reaches 0, and hold that one there.
            part = min(solution[i] / (solution[i] - target[i]) for i in free if target[i] <= 0.0)
            solution = [x + part * (y - x) for x, y in zip(solution, target, strict=True)]
            free = [i for i in free if solution[i] > 1e-12]
            solution = [x if i in free else 0.0 for i, x in enumerate(solution)]
    return solution, tuple(free)


def _wants_in(matrix: list[list[float]], right: list[float], solution: list[float], free: Sequence[int]) -> int | None:
    """Of the variables held at 0, the one whose increase lowers the squares most; None if none does."""
    best, best_gain = None, 1e-9 * max(map(abs, right), default=0.0)
    for i, row in enumerate(matrix):
        if i not in free:
            gain = right[i] - sum(a * x for a, x in zip(row, solution, strict=True))
            if gain > best_gain:
                best, best_gain = i, gain
    return best


def _solve(matrix: list[list[float]], right: list[float], free: Sequence[int]) -> list[float]:
    """The unconstrained minimum over the variables `free`, the others 0, by elimination; M is positive definite."""
    rows = [[matrix[i][j] for j in free] + [right[i]] for i in free]
    size = len(rows)
    for k in range(size):
        pivot_row = rows[k]
        for row in rows[k + 1 :]:
            factor = row[k] / pivot_row[k]
            if factor:
                for j in range(k + 1, size + 1):
                    row[j] -= factor * pivot_row[j]
    solution = [0.0] * len(right)
    for k in range(size - 1, -1, -1):
        row = rows[k]
        known = sum(row[j] * solution[free[j]] for j in range(k + 1, size))
        solution[free[k]] = (row[size] - known) / row[k]
    return solution


def _upper_quantile(residuals: list[float], quantile: float) -> float:
    """The smallest of `residuals` that a further one stays under with probability >= `quantile`; >= 0.

    That is the ceil((n + 1) * quantile)-th smallest, the largest while there are too few; 0 if there are none.
    """
    if not residuals:
        return 0.0
    rank = min(len(residuals), math.ceil((len(residuals) + 1) * quantile))
    return max(0.0, sorted(residuals)[rank - 1])


def _checked(coefficients: Sequence[float]) -> tuple[float, ...]:
    values = tuple(float(value) for value in coefficients)
    if len(values) != _SIZE or not all(math.isfinite(value) and value >= 0.0 for value in values):
        raise ValueError(f"coefficients are {values!r}; they must be {_SIZE} finite numbers >= 0: {COEFFICIENTS}.")
    return values


def _floats(values: Sequence[float], length: int | None = None) -> list[float]:
    numbers = [float(value) for value in values]
    if length is not None and len(numbers) != length:
        raise ValueError(f"A step-time model has {length} numbers where there are {len(numbers)}.")
    return numbers
