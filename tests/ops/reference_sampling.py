"""NumPy reference of sampling: one row at a time, with full sorts; the same bits as the kernels, and no speed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

F32 = np.float32
FLT_MIN = np.finfo(F32).tiny
FLT_MAX = np.finfo(F32).max
WEIGHT_BITS = 44

EXP = [0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.008368736132979393, 0.001381455920636654]
LOG = [
    0.3333333134651184,
    -0.250008225440979,
    0.20001226663589478,
    -0.16623355448246002,
    0.14201761782169342,
    -0.13160201907157898,
    0.12761563062667847,
    -0.07634426653385162,
]


@dataclass
class Row:
    """Settings of one row; the neutral values draw from the plain softmax."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    position: int = 0
    target: int = -1
    num_logprobs: int = -1
    penalties: dict[int, int] = field(default_factory=dict)  # token id -> how often it is in the output
    bias: dict[int, float] = field(default_factory=dict)
    allowed: np.ndarray | None = None  # bool [V]


@dataclass
class Result:
    token_id: int
    logprob: float = float("nan")
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


def philox4x32(counter: np.ndarray, key: int, rounds: int = 10) -> np.ndarray:
    """Philox4x32 of counters uint32 [..., 4] under a 64-bit key (low word first). Salmon et al., SC11, section 4.2."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    low = np.uint64(0xFFFFFFFF)
    for _ in range(rounds):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=-1).astype(np.uint32)


def draw_bits(seed: int, position: int, vocab: int) -> np.ndarray:
    """The 32 random bits of every token of one draw, uint32 [V]."""
    counter = np.zeros(((vocab + 3) // 4, 4), np.uint32)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1] = position
    return philox4x32(counter, seed).reshape(-1)[:vocab]


def horner(x: np.ndarray, coefficients: list[float]) -> np.ndarray:
    y = np.full_like(x, F32(coefficients[-1]))
    for c in reversed(coefficients[:-1]):
        y = y * x + F32(c)  # two roundings: NumPy does not fuse
    return y


def exponent(x: np.ndarray) -> np.ndarray:
    """k of x = m * 2^k with m in [sqrt(1/2), sqrt(2)), for normal x > 0."""
    return (x.view(np.int32) - np.int32(0x3F3504F3)) >> np.int32(23)


def log1p_polynomial(f: np.ndarray) -> np.ndarray:
    square = f * f
    return f - (F32(0.5) * square - (square * f) * horner(f, LOG))


def gumbel(bits: np.ndarray) -> np.ndarray:
    """Gumbel noise of random bits: -log(-log(1 - u)), float32."""
    u = ((bits >> np.uint32(1)).astype(np.int32).astype(F32) + F32(0.5)) * F32(2.0**-31)
    u = np.minimum(u, F32(1 - 2.0**-24))
    k = exponent(F32(1) - u)
    scale = ((np.int32(127) - k) << np.int32(23)).view(F32)
    e = (-k).astype(F32) * F32(np.log(2)) - log1p_polynomial((scale - F32(1)) - scale * u)
    k = exponent(e)
    mantissa = (e.view(np.int32) - (k << np.int32(23))).view(F32)
    return -(k.astype(F32) * F32(np.log(2)) + log1p_polynomial(mantissa - F32(1)))


def weight(z: np.ndarray) -> np.ndarray:
    """floor(exp(z) * 2^44) for z <= 0, as uint64."""
    z = np.maximum(z, F32(-42))
    n = (z * F32(1.44269502162933349609375) - F32(0.5)).astype(np.int32)
    nf = n.astype(F32)
    r = (z - nf * F32(0.693359375)) - nf * F32(-0.00021219444170128554)
    p = F32(1) + (r + (r * r) * horner(r, EXP))
    mantissa = (p * F32(2**24)).astype(np.int32).astype(np.uint64)
    return (mantissa << np.uint64(WEIGHT_BITS - 24)) >> (-n).astype(np.uint64)


def descending(values: np.ndarray) -> np.ndarray:
    """Ids from the largest value down, equal values by ascending id."""
    return np.lexsort((np.arange(len(values)), -values))


def processed(raw: np.ndarray, row: Row) -> np.ndarray:
    """Logits after penalties, bias and mask."""
    logits = raw.astype(F32).copy()

    def changed(token: int, value: np.float32) -> None:
        logits[token] = min(max(value, -FLT_MAX), FLT_MAX)

    for token, count in row.penalties.items():
        value = logits[token]
        if value == -np.inf:
            continue
        rp = F32(row.repetition_penalty)
        value = value / rp if value > 0 else value * rp
        if count > 0:
            value = (value - F32(row.presence_penalty)) - F32(row.frequency_penalty) * F32(count)
        changed(token, value)
    for token, bias in row.bias.items():
        if logits[token] == -np.inf:
            continue
        if bias == -np.inf:
            logits[token] = -np.inf
        else:
            changed(token, logits[token] + F32(bias))
    if row.allowed is not None:
        logits[~row.allowed] = -np.inf
    return logits


def kept_tokens(logits: np.ndarray, row: Row) -> np.ndarray:
    """Ids of the tokens among which `row` draws, in descending order; `logits` are processed, not yet divided."""
    order = descending(logits)
    order = order[logits[order] > -np.inf]
    if row.top_k > 0:
        order = order[: row.top_k]
    z = (logits[order] - logits[order[0]]) / F32(row.temperature)
    if row.top_p < 1:
        mass = np.cumsum(weight(z), dtype=np.uint64)
        target = max(1, int(np.ceil(np.float64(mass[-1]) * np.float64(F32(row.top_p)))))
        order = order[: int(np.searchsorted(mass, np.uint64(target))) + 1]
        z = z[: len(order)]
    if F32(row.min_p) >= FLT_MIN:
        order = order[z >= F32(np.log(np.float64(F32(row.min_p))))]
    return order


def drawn(logits: np.ndarray, row: Row) -> int:
    order = descending(logits)
    if F32(row.temperature) < FLT_MIN:
        return int(order[0])
    kept = np.sort(kept_tokens(logits, row))
    z = (logits[kept] - logits[order[0]]) / F32(row.temperature)
    return int(kept[np.argmax(z + gumbel(draw_bits(row.seed, row.position, len(logits)))[kept])])


def log_softmax(raw: np.ndarray) -> np.ndarray:
    """Log-probabilities of the raw model, float32, never positive; the normaliser is a sum of integers."""
    top = raw.max()
    total = weight(raw - top).sum(dtype=np.uint64)
    exact = raw.astype(np.float64) - np.float64(top) - np.log(np.float64(total) * 2.0**-WEIGHT_BITS)
    return np.minimum(exact.astype(F32), F32(0))


def sample(raw: np.ndarray, row: Row) -> Result:
    """One row of logits [V] -> what is drawn and reported. A row without hope gives token -1 and NaN."""
    raw = raw.astype(F32)
    with np.errstate(all="ignore"):
        if np.isnan(raw).any() or (raw == np.inf).any() or (raw == -np.inf).all():
            return Result(-1)
        if row.target >= 0:
            token = row.target
        else:
            logits = processed(raw, row)
            if (logits == -np.inf).all():
                return Result(-1)
            token = drawn(logits, row)
        if row.target < 0 and row.num_logprobs < 0:
            return Result(token)
        logprobs = log_softmax(raw)
        top = [int(i) for i in descending(raw)[: max(0, row.num_logprobs)] if raw[i] > -np.inf]
        return Result(token, float(logprobs[token]), top, [float(logprobs[i]) for i in top])
