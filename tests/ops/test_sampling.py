"""Sampling on the CPU: the kernels draw what the NumPy reference draws, bit for bit, and keep what the docs promise."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from pyengine import _cpu

from . import reference_sampling as ref
from .reference_sampling import Row, columns, random_logits, random_row

ops = _cpu.ops
F32 = np.float32
INF = float("inf")


def make_context(isa: str | None = None, num_threads: int = 1, vocab: int = 1000):
    context = ops.Context(num_threads, isa, oversubscribe=True)
    shape = ops.AttentionShape(num_heads=1, num_kv_heads=1, head_dim=16, rotary_dim=16, scale=1.0)
    size = context.scratch_bytes(
        shape, max_tokens=1, max_seqs=1, max_rows=64, max_context_len=16, vocab_size=vocab, widest_k=16
    )
    memory = np.full(size + 64, 0xFF, np.uint8)  # garbage: NaN in every type
    start = -memory.ctypes.data % 64
    context.bind_scratch(memory[start : start + size])
    return context


@pytest.fixture(params=ops.supported_isas())
def context(request):
    return make_context(request.param, vocab=152000)


def run(context, logits: np.ndarray, rows: list[Row], top_width: int | None = None):
    """(token_ids [R], logprobs [R], top_ids [R, W], top_logprobs [R, W]); `logits` [R, V] are not touched."""
    n, vocab = logits.shape
    width = max([0] + [row.num_logprobs for row in rows]) if top_width is None else top_width
    out = np.full(n, -7, np.int32), np.zeros(n, F32), np.full((n, width), -7, np.int32), np.zeros((n, width), F32)
    ops.sample(context, logits.astype(F32).copy(), ops.SamplingRows(**columns(rows, vocab)), *out)
    return out


def check(context, logits: np.ndarray, rows: list[Row]) -> None:
    """The op and the reference agree: ids exactly, log-probabilities to the last place."""
    token_ids, logprobs, top_ids, top_logprobs = run(context, logits, rows)
    for r, row in enumerate(rows):
        want = ref.sample(logits[r], row)
        assert token_ids[r] == want.token_id, row
        np.testing.assert_allclose(logprobs[r], want.logprob, rtol=2e-7, atol=0, err_msg=str(row))
        n = len(want.top_ids)
        assert top_ids[r, :n].tolist() == want.top_ids
        assert (top_ids[r, n:] == -1).all()
        assert np.isnan(top_logprobs[r, n:]).all()
        np.testing.assert_allclose(top_logprobs[r, :n], want.top_logprobs, rtol=2e-7, atol=0)


# ---- agreement with the reference -----------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 2, 3, 31, 32, 33, 63, 64, 65, 200, 1000])
def test_any_settings_draw_what_the_reference_draws(context, vocab):
    rng = np.random.default_rng(vocab)
    logits = random_logits(rng, 60, vocab)
    check(context, logits, [random_row(rng, vocab) for _ in range(60)])


@pytest.mark.parametrize("vocab", [49152, 151936])
def test_real_vocabularies_draw_what_the_reference_draws(context, vocab):
    rng = np.random.default_rng(vocab)
    rows = [
        Row(temperature=0.8, top_k=50, top_p=0.9, seed=1, num_logprobs=5),
        Row(top_p=0.95, min_p=0.01, seed=2),
        Row(temperature=3.0, seed=3, allowed=rng.random(vocab) < 0.5),
        Row(temperature=1e4, top_p=0.7, seed=4),
        Row(top_k=vocab // 2, top_p=0.5, seed=5),
        Row(top_k=vocab // 30, seed=6),
        Row(temperature=1.5, top_p=0.99, seed=7),
        Row(temperature=0.0, num_logprobs=64),
    ]
    check(context, random_logits(rng, len(rows), vocab), rows)


@pytest.mark.parametrize(
    "row",
    [
        Row(temperature=0.0),
        Row(temperature=1e-38),
        Row(temperature=1e-42),
        Row(temperature=1e4, top_p=0.3),
        Row(temperature=1e-30, top_k=3, top_p=0.5, min_p=1.0),
        Row(min_p=1e-45),
        Row(top_k=2**31 - 1, top_p=1e-30),
        Row(repetition_penalty=1e-30, penalties={0: 1, 1: 0, 2: 3}),
        Row(repetition_penalty=1e4, penalties={0: 1, 1: 0, 2: 3}, num_logprobs=3),
    ],
)
def test_extreme_settings_on_extreme_logits(context, row):
    values = [[3e38, -3e38, 3e38], [1e30, 1e30, -1e30], [1e-40, -1e-40, 0.0], [-0.0, 0.0, -INF], [-3.4e38, -INF, -INF]]
    logits = np.array([np.resize(np.array(v, F32), 100) for v in values])
    check(context, logits, [dataclasses.replace(row, seed=s) for s in range(len(values))])


def test_thousands_of_draws_are_the_argmax_of_logits_plus_noise(context):
    draws, vocab = 2000, 132
    logits = (np.random.default_rng(12).normal(size=vocab) * 2).astype(F32)
    counter = np.zeros((draws, vocab // 4, 4), np.uint32)
    counter[..., 0], counter[..., 1] = np.arange(vocab // 4), np.arange(draws)[:, None]
    noise = ref.gumbel(ref.philox4x32(counter, 77).reshape(draws, vocab))
    rows = [Row(seed=77, position=position) for position in range(draws)]
    drawn = run(context, np.broadcast_to(logits, (draws, vocab)), rows)[0]
    np.testing.assert_array_equal(drawn, np.argmax((logits - logits.max()) + noise, axis=1))


# ---- order and ties -------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_of_equal_logits_whatever_the_filters(context):
    logits = np.full((3, 300), -1.0, F32)
    logits[:, [70, 130, 299]] = 2.5
    rows = [Row(temperature=0.0), Row(temperature=0.0, top_k=1, top_p=0.1), Row(temperature=0.0, min_p=1.0, seed=9)]
    assert run(context, logits, rows)[0].tolist() == [70, 70, 70]


def test_zeros_of_both_signs_are_a_tie(context):
    logits = np.array([[-0.0, 0.0, -0.0, 0.0] * 20], F32)
    assert run(context, logits, [Row(temperature=0.0)])[0].tolist() == [0]
    rows = [Row(top_k=2, seed=s) for s in range(64)]
    assert set(run(context, np.repeat(logits, 64, 0), rows)[0].tolist()) == {0, 1}


@pytest.mark.parametrize(("seed", "position", "tied"), [(1, 854955, [0, 7]), (6, 589272, [0, 7]), (8, 327675, [4, 7])])
def test_equal_noise_goes_to_the_lower_id(context, seed, position, tied):
    noise = ref.gumbel(ref.draw_bits(seed, position, 8))
    assert np.flatnonzero(noise == noise.max()).tolist() == tied  # found by search; about one draw in three million
    assert run(context, np.zeros((1, 8), F32), [Row(seed=seed, position=position)])[0].tolist() == tied[:1]


@pytest.mark.parametrize(("row", "kept"), [(Row(top_k=3), 3), (Row(top_p=0.045), 5), (Row(top_k=10, top_p=0.35), 4)])
def test_equal_logits_keep_exactly_the_lowest_ids(context, row, kept):
    logits = np.zeros((400, 100), F32)
    drawn = run(context, logits, [dataclasses.replace(row, seed=s) for s in range(400)])[0]
    assert set(drawn.tolist()) == set(range(kept))


def test_min_p_of_one_keeps_the_ties_of_the_most_likely_token_only(context):
    logits = np.zeros((200, 50), F32)
    logits[:, [4, 40]] = 1e-3
    drawn = run(context, logits, [Row(min_p=1.0, seed=s) for s in range(200)])[0]
    assert set(drawn.tolist()) == {4, 40}


def test_top_p_counts_mass_among_what_top_k_kept(context):
    # Probabilities 0.4, 0.3, 0.2, 0.1: of the first two, 0.4 is a share of 0.57.
    logits = np.log(np.array([[0.2, 0.4, 0.1, 0.3]], F32)).repeat(200, 0)
    drawn = run(context, logits, [Row(top_k=2, top_p=0.55, seed=s) for s in range(200)])[0]
    assert set(drawn.tolist()) == {1}
    drawn = run(context, logits, [Row(top_p=0.55, seed=s) for s in range(200)])[0]
    assert set(drawn.tolist()) == {1, 3}


def test_penalties_come_before_bias_and_bias_before_the_mask(context):
    logits = np.array([[4.0, 3.0, -1.0, 0.0]] * 4, F32)
    rows = [
        Row(temperature=0.0, repetition_penalty=2.0, penalties={0: 0}),  # 4 / 2 < 3
        Row(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.5, penalties={0: 2, 1: 0}),  # 4 - 0.5 - 1 < 3
        Row(temperature=0.0, repetition_penalty=2.0, penalties={0: 1}, bias={0: 1.5}),  # 4 / 2 + 1.5 > 3
        Row(temperature=0.0, bias={2: 100.0, 0: -INF}, allowed=np.array([True, True, False, True])),
    ]
    assert run(context, logits, rows)[0].tolist() == [1, 1, 0, 1]


# ---- independence ---------------------------------------------------------------------------------------------------


def all_bytes(results) -> list[bytes]:
    return [part.tobytes() for part in results]


def test_a_row_is_the_same_alone_and_in_company(context):
    rng = np.random.default_rng(5)
    logits = random_logits(rng, 33, 777)
    rows = [random_row(rng, 777) for _ in range(33)]
    together = run(context, logits, rows, top_width=64)
    for r in range(33):
        alone = run(context, logits[r : r + 1], [rows[r]], top_width=64)
        assert all_bytes(alone) == all_bytes([part[r : r + 1] for part in together])


def test_instruction_sets_and_threads_do_not_change_a_bit():
    rng = np.random.default_rng(6)
    logits = random_logits(rng, 40, 5000)
    rows = [random_row(rng, 5000) for _ in range(40)]
    results = {
        (isa, threads): all_bytes(run(make_context(isa, threads, vocab=5000), logits, rows))
        for isa in ops.supported_isas()
        for threads in (1, 2, 3)
    }
    assert all(result == results[ops.supported_isas()[0], 1] for result in results.values())


@pytest.mark.parametrize("poison", [math.nan, INF, -math.nan])
@pytest.mark.parametrize("place", [0, 63, 64, 98])
def test_a_bad_row_fails_alone(context, poison, place):
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(6, 99)).astype(F32)
    rows = [Row(seed=r, num_logprobs=2) for r in range(6)]
    clean = run(context, logits, rows)
    rows[1] = Row(temperature=0.0)
    rows[2] = Row(num_logprobs=2, allowed=np.arange(99) != place, bias={place: -INF}, penalties={place: 1})
    rows[3] = Row(allowed=np.arange(99) != place)
    rows[4] = Row(target=3)
    logits[1:5, place] = poison
    results = run(context, logits, rows)
    token_ids, logprobs, top_ids, top_logprobs = (part[1:5] for part in results)
    assert (token_ids == -1).all()
    assert np.isnan(logprobs).all()
    assert (top_ids == -1).all()
    assert np.isnan(top_logprobs).all()
    for r in (0, 5):
        assert all_bytes([part[r] for part in results]) == all_bytes([part[r] for part in clean])


def test_a_row_with_nothing_allowed_fails_alone(context):
    logits = np.zeros((4, 70), F32)
    logits[0] = -INF
    rows = [
        Row(num_logprobs=1),
        Row(allowed=np.zeros(70, bool), num_logprobs=1),
        Row(bias=dict.fromkeys(range(70), -INF), temperature=0.0),
        Row(top_k=1, num_logprobs=1),
    ]
    token_ids, logprobs, top_ids, _ = run(context, logits, rows)
    assert token_ids.tolist() == [-1, -1, -1, 0]
    assert np.isnan(logprobs[:3]).all()
    assert logprobs[3] == pytest.approx(-math.log(70))
    assert top_ids.tolist() == [[-1], [-1], [-1], [0]]


def test_rows_may_lie_apart_and_nothing_between_them_is_touched(context):
    buffer = np.full((3, 80), 123.0, F32)
    buffer[:, :70] = np.random.default_rng(8).normal(size=(3, 70))
    rows = [Row(seed=r, allowed=np.arange(70) % 3 > 0) for r in range(3)]
    want = run(context, buffer[:, :70], rows)[0]
    out = np.zeros(3, np.int32), np.zeros(3, F32), np.zeros((3, 0), np.int32), np.zeros((3, 0), F32)
    ops.sample(context, buffer[:, :70], ops.SamplingRows(**columns(rows, 70)), *out)
    assert out[0].tolist() == want.tolist()
    assert (buffer[:, 70:] == 123.0).all()


# ---- log-probabilities ----------------------------------------------------------------------------------------------


def test_logprobs_are_the_raw_models_and_never_positive(context):
    rng = np.random.default_rng(9)
    logits = (rng.normal(size=(20, 3000)) * np.linspace(0, 40, 20)[:, None]).astype(F32)
    row = Row(0.5, top_k=4, num_logprobs=6, penalties=dict.fromkeys(range(99), 1), presence_penalty=2.0, bias={7: 5.0})
    token_ids, logprobs, top_ids, top_logprobs = run(context, logits, [row] * 20)
    exact = logits.astype(np.float64)
    exact -= exact.max(1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    np.testing.assert_allclose(logprobs, exact[np.arange(20), token_ids], rtol=3e-7, atol=3e-7)
    np.testing.assert_allclose(top_logprobs, np.take_along_axis(exact, top_ids, 1), rtol=3e-7, atol=3e-7)
    assert (logprobs <= 0).all()
    assert (top_logprobs <= 0).all()
    assert (np.diff(top_logprobs) <= 0).all()


def test_a_target_row_only_reports(context):
    logits = np.random.default_rng(10).normal(size=(1, 500)).astype(F32)
    token_ids, logprobs, _, _ = run(context, logits, [Row(target=123, temperature=0.0, bias={123: -INF})])
    assert token_ids.tolist() == [123]
    np.testing.assert_allclose(logprobs, ref.log_softmax(logits[0])[123], rtol=2e-7)


def test_a_wrong_call_is_refused(context):
    with pytest.raises(ValueError, match="vocabulary"):
        run(context, np.zeros((1, 2**19 + 1), F32), [Row()])
    with pytest.raises(ValueError, match="scratch"):
        run(context, np.zeros((1, 2**19), F32), [Row()])


# ---- random numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter, key, words):
    """Known answers of the Random123 library (philox4x32, 10 rounds)."""
    assert ref.philox4x32(np.array(counter, np.uint32), key).tolist() == words


def test_noise_is_finite_decreasing_and_accurate_over_all_random_bits():
    bits = np.concatenate([2 ** np.arange(32, dtype=np.uint64), [0, 2**32 - 1], np.linspace(0, 2**32 - 1, 10**5)])
    bits = np.sort(bits.astype(np.uint32))
    noise = ref.gumbel(bits)
    assert np.isfinite(noise).all()
    assert noise.max() < 23.0
    assert noise.min() > -3.0
    assert (np.diff(noise) < 1e-6).all()
    u = np.minimum((((bits >> 1).astype(F32) + F32(0.5)) * F32(2.0**-31)).astype(np.float64), 1 - 2.0**-24)
    exact = -np.log(-np.log1p(-u))
    np.testing.assert_allclose(noise, exact, rtol=2e-7, atol=2e-7)


def test_weights_are_accurate_to_single_precision():
    z = -np.concatenate([np.linspace(0, 20, 10**5), [0.0]]).astype(F32)
    got, want = ref.weight(z) / 2.0**44, np.exp(z.astype(np.float64))
    np.testing.assert_allclose(got, want, rtol=2e-7, atol=2.0**-44)
    assert ref.weight(F32([0.0, -42.0, -1e30, -INF])).tolist() == [2**44, 0, 0, 0]


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Standard deviations that Pearson's statistic lies above its mean (classes with few draws put together)."""
    expected = probabilities * counts.sum()
    few = expected < 8
    counts = np.append(counts[~few], counts[few].sum())
    expected = np.append(expected[~few], expected[few].sum() + 1e-9)
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("along", ["seed", "position"])
@pytest.mark.parametrize(
    ("settings", "shown"), [({}, 100), ({"temperature": 0.5}, 100), ({"temperature": 1.7, "top_k": 20}, 20)]
)
def test_draws_follow_the_softmax(along, settings, shown):
    draws, vocab = 20000, 100
    logits = np.random.default_rng(11).normal(size=vocab).astype(F32)
    z = logits.astype(np.float64) / settings.get("temperature", 1.0)
    z[np.argsort(-z)[shown:]] = -INF
    probabilities = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    context = make_context(vocab=vocab)
    rows = [Row(**settings, **{along: i}) for i in range(draws)]
    drawn = run(context, np.broadcast_to(logits, (draws, vocab)), rows)[0]
    assert abs(chi_square(np.bincount(drawn, minlength=vocab), probabilities)) < 4


def test_equal_logits_of_a_large_vocabulary_are_drawn_evenly():
    vocab, draws = 60000, 2000
    context = make_context(vocab=vocab)
    logits = np.zeros((100, vocab), F32)
    drawn = np.concatenate(
        [run(context, logits, [Row(seed=s) for s in range(first, first + 100)])[0] for first in range(0, draws, 100)]
    )
    assert abs(chi_square(np.bincount(drawn * 50 // vocab, minlength=50), np.full(50, 1 / 50))) < 4
    assert abs(chi_square(np.bincount(drawn % 4, minlength=4), np.full(4, 1 / 4))) < 4
