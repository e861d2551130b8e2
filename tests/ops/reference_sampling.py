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


# ---- rows for tests --------------------------------------------------------------------------------------------------


def columns(rows: list[Row], vocab: int) -> dict[str, np.ndarray | None]:
    """`rows` as the arrays that ops.SamplingRows takes."""

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(row, name) for row in rows], dtype)

    def starts(lists: list[dict]) -> np.ndarray:
        return np.cumsum([0] + [len(entries) for entries in lists]).astype(np.int32)

    penalties, bias = [row.penalties for row in rows], [row.bias for row in rows]
    mask = None
    if any(row.allowed is not None for row in rows):
        bits = np.zeros((len(rows), (vocab + 31) // 32 * 32), bool)
        for r, row in enumerate(rows):
            bits[r, :vocab] = True if row.allowed is None else row.allowed
        mask = np.packbits(bits, axis=1, bitorder="little").view("<u4")
    return {
        "temperature": column("temperature", F32),
        "top_k": column("top_k", np.int32),
        "top_p": column("top_p", F32),
        "min_p": column("min_p", F32),
        "repetition_penalty": column("repetition_penalty", F32),
        "presence_penalty": column("presence_penalty", F32),
        "frequency_penalty": column("frequency_penalty", F32),
        "seed": column("seed", np.uint64),
        "position": column("position", np.int32),
        "target": column("target", np.int32),
        "num_logprobs": column("num_logprobs", np.int32),
        "penalty_start": starts(penalties),
        "penalty_ids": np.array([i for p in penalties for i in p], np.int32),
        "penalty_counts": np.array([c for p in penalties for c in p.values()], np.int32),
        "bias_start": starts(bias),
        "bias_ids": np.array([i for b in bias for i in b], np.int32),
        "bias_values": np.array([v for b in bias for v in b.values()], F32),
        "allow_mask": mask,
    }


def random_row(rng: np.random.Generator, vocab: int) -> Row:
    """Settings drawn so that every step is on or off about half of the time."""

    def some(neutral, values):
        return neutral if rng.random() < 0.5 else values[rng.integers(len(values))]

    ids = rng.permutation(vocab)[: rng.integers(0, 12)].tolist()
    penalties = {i: int(rng.integers(0, 4)) for i in ids} if rng.random() < 0.4 else {}
    bias = {i: float(rng.choice([-100, 100, 3.5, -np.inf])) for i in ids[::2]} if rng.random() < 0.3 else {}
    return Row(
        temperature=float(some(1.0, [0.0, 0.3, 0.7, 2.0, 1e4, 1e-6])),
        top_k=int(some(0, [1, 2, 5, 50, 300, vocab, vocab + 7])),
        top_p=float(some(1.0, [0.9, 0.5, 0.99, 1e-7, 0.999999])),
        min_p=float(some(0.0, [0.05, 0.5, 1.0, 1e-12])),
        repetition_penalty=float(some(1.0, [1.3, 0.7])),
        presence_penalty=float(some(0.0, [1.5, -2.0])),
        frequency_penalty=float(some(0.0, [0.3, -1.0])),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        position=int(rng.integers(0, 2**31)),
        num_logprobs=int(some(-1, [0, 1, 5, 64])),
        target=-1 if rng.random() < 0.9 else int(rng.integers(vocab)),
        penalties=penalties,
        bias=bias,
        allowed=rng.random(vocab) < 0.6 if rng.random() < 0.3 else None,
    )


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Rows of different kinds: peaked as a model's, flat, coarse (many ties), with forbidden tokens, huge."""
    logits = rng.normal(size=(rows, vocab)).astype(F32)
    logits[0::5] *= F32(4)
    logits[1::5] = np.round(logits[1::5] * 2) / 2
    logits[2::5][rng.random(logits[2::5].shape) < 0.5] = -np.inf
    logits[3::5] *= F32(1e30)
    logits[4::5] = np.round(logits[4::5]) * F32(0.0)  # zeros of both signs
    return logits
