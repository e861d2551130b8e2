"""sample on the device: the bits of the CPU's op, token ids of the NumPy reference, and nothing written elsewhere."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ops import reference_sampling as ref
from tests.ops.reference_sampling import Row, columns, random_logits, random_row
from tests.ops.test_sampling import make_context
from tests.ops.test_sampling import run as run_on_cpu

from .device_ops import Device, Guarded

F32 = np.float32
INF = float("inf")
LISTED = 4096  # tokens that the kernel has a list for; more are counted in several passes

Results = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]


class Outputs:
    """The four arrays that sample writes, with guards around them."""

    def __init__(self, device: Device, rows: int, width: int) -> None:
        self.shape = (rows, width)
        self.parts = [
            Guarded(device, (size,), dtype)
            for size, dtype in [(rows, "i32"), (rows, "f32"), (rows * width, "i32"), (rows * width, "f32")]
        ]

    def arrays(self) -> list[Any]:
        flat = [part.array for part in self.parts]
        return flat[:2] + [array.reshape(*self.shape) for array in flat[2:]]

    def get(self) -> Results:
        token_ids, logprobs, top_ids, top_logprobs = (part.get() for part in self.parts)
        return token_ids, logprobs, top_ids.reshape(self.shape), top_logprobs.reshape(self.shape)


def context_for(device: Device, rows: int, vocab: int) -> tuple[Any, Guarded]:
    context = device.context()
    shape = device.ops.AttentionShape(num_heads=1, num_kv_heads=1, head_dim=64, rotary_dim=64, scale=1.0)
    return context, device.scratch(context, shape, max_rows=rows, vocab_size=vocab)


def on_device(device: Device, rows: list[Row], vocab: int) -> Any:
    arrays = {name: None if array is None else device.to_device(array) for name, array in columns(rows, vocab).items()}
    return device.ops.SamplingRows(**arrays)


def run(
    device: Device, logits: NDArray[np.float32], rows: list[Row], width: int | None = None, *, aligned: bool = True
) -> Results:
    """(token_ids [R], logprobs [R], top_ids [R, W], top_logprobs [R, W])."""
    n, vocab = logits.shape
    context, scratch = context_for(device, n, vocab)
    matrix = Guarded(device, (n, vocab), "f32", logits.astype(F32), aligned=aligned)
    out = Outputs(device, n, max([0, *(row.num_logprobs for row in rows)]) if width is None else width)
    device.ops.sample(context, matrix.array, on_device(device, rows, vocab), *out.arrays())
    results = out.get()
    matrix.check()
    scratch.check()
    return results


def assert_same(results: Results, wanted: Results) -> None:
    for got, want in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


def on_cpu(logits: NDArray[np.float32], rows: list[Row], width: int | None = None) -> Results:
    return run_on_cpu(make_context(vocab=logits.shape[1]), logits, rows, width)


def check(device: Device, logits: NDArray[np.float32], rows: list[Row], *, aligned: bool = True) -> None:
    """All bits are the CPU's, and the ids are the reference's."""
    results = run(device, logits, rows, aligned=aligned)
    wanted = on_cpu(logits, rows)
    # Zeros of both signs may be the first logit; what is subtracted from it decides the sign of a log-probability of 0.
    assert_same(tuple(part + 0 for part in results), tuple(part + 0 for part in wanted))
    for r, row in enumerate(rows):
        want = ref.sample(logits[r], row)
        assert results[0][r] == want.token_id, row
        assert results[2][r, : len(want.top_ids)].tolist() == want.top_ids


# ---- agreement with the CPU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 2, 3, 31, 32, 33, 64, 255, 1000, 1025])
@pytest.mark.parametrize("aligned", [True, False])
def test_any_settings_give_what_the_cpu_gives(device: Device, vocab: int, aligned: bool) -> None:
    rng = np.random.default_rng(vocab + aligned)
    logits = random_logits(rng, 25, vocab)
    check(device, logits, [random_row(rng, vocab) for _ in range(25)], aligned=aligned)


def settings_of_all_passes(vocab: int) -> list[Row]:
    """Rows for a vocabulary that does not fit the list: each way through the kernel."""
    rng = np.random.default_rng(vocab)
    return [
        Row(temperature=0.8, top_k=50, top_p=0.9, seed=1, num_logprobs=5),
        Row(top_p=0.95, min_p=0.01, seed=2),
        Row(temperature=3.0, seed=3, allowed=rng.random(vocab) < 0.5),
        Row(temperature=1e4, top_p=0.97, seed=4),
        Row(top_k=vocab - 300, top_p=0.99, seed=5),
        Row(top_k=vocab // 4, seed=6),
        Row(temperature=1.5, top_p=0.99, seed=7, penalties=dict.fromkeys(range(0, vocab, 3), 2), frequency_penalty=0.1),
        Row(temperature=0.0, num_logprobs=64, penalties={7: 1}, presence_penalty=1.0),
        Row(temperature=0.05, top_p=0.9, seed=8),
        Row(top_k=LISTED + 1, seed=9),
    ]


@pytest.mark.parametrize(
    "vocab", [5000, pytest.param(32000, marks=pytest.mark.slow), pytest.param(128257, marks=pytest.mark.slow)]
)
def test_large_vocabularies_give_what_the_cpu_gives(device: Device, vocab: int) -> None:
    rows = settings_of_all_passes(vocab)
    logits = random_logits(np.random.default_rng(vocab), len(rows), vocab)
    check(device, logits, rows)
    check(device, np.roll(logits, 1, axis=0), rows)


def of_one_thread(vocab: int) -> NDArray[np.bool_]:
    """Some tokens, among them all that some thread reads: groups of 4, as many groups apart as a block has
    threads, which is a multiple of 32."""
    return np.arange(vocab) // 4 % 32 == 5


@pytest.mark.parametrize(("ulps", "different"), [(0, 1), (1, 8), (1, 1024), (1 << 10, 7), (1 << 20, 2)])
def test_nearly_equal_logits_are_told_apart_to_the_last_bit(device: Device, ulps: int, different: int) -> None:
    """More of them in one bin of the histogram than the list holds; where all are equal, ids alone decide."""
    rows = [
        Row(top_k=LISTED + 1, num_logprobs=64),
        Row(top_p=0.5),
        Row(top_k=LISTED + 150, top_p=0.9),
        Row(top_k=40, penalties={3: 1}, frequency_penalty=1.0, num_logprobs=3),
        Row(top_k=576, top_p=0.5),
    ]
    rows = [dataclasses.replace(row, seed=seed) for seed in range(3) for row in rows]
    vocab = 2 * LISTED + 101
    rng = np.random.default_rng(different)
    steps = rng.integers(0, different, (len(rows), vocab), np.int32) * ulps
    logits = (F32(20.0).view(np.int32) + steps).view(F32)
    logits[:, of_one_thread(vocab)] = -3000.0  # so that the bins are wide
    check(device, logits, rows)


def test_tokens_that_few_threads_read_are_all_found(device: Device) -> None:
    vocab = 2 * LISTED
    rng = np.random.default_rng(4)
    logits = np.minimum(rng.normal(size=(8, vocab)), 2.0).astype(F32)
    logits[:, ::4] = 3.0  # the largest logits of all threads are equal, and tell nothing of the others
    left = of_one_thread(vocab)
    logits[:4, ~left] = -INF
    rows = [Row(temperature=50.0, top_k=200, seed=seed, num_logprobs=64) for seed in range(4)]
    rows += [Row(temperature=50.0, top_k=200, seed=seed, allowed=left) for seed in range(4)]
    check(device, logits, rows)


@pytest.mark.parametrize(
    "row",
    [
        Row(temperature=0.0),
        Row(temperature=1e-38),
        Row(temperature=1e-42),
        Row(temperature=1e4, top_p=0.3),
        Row(temperature=3e38),
        Row(temperature=1e-30, top_k=3, top_p=0.5, min_p=1.0),
        Row(min_p=1e-45),
        Row(top_k=2**31 - 1, top_p=1e-30),
        Row(repetition_penalty=1e-30, penalties={0: 1, 1: 0, 2: 3}),
        Row(repetition_penalty=1e4, penalties={0: 1, 1: 0, 2: 3}, num_logprobs=3),
    ],
)
def test_extreme_settings_on_extreme_logits(device: Device, row: Row) -> None:
    values = [[3e38, -3e38, 3e38], [1e30, 1e30, -1e30], [1e-40, -1e-40, 0.0], [-0.0, 0.0, -INF], [-3.4e38, -INF, -INF]]
    logits = np.array([np.resize(np.array(v, F32), 100) for v in values])
    check(device, logits, [dataclasses.replace(row, seed=s) for s in range(len(values))])


@pytest.mark.parametrize("vocab", [70, LISTED + 70])
def test_one_token_that_is_left_is_drawn(device: Device, vocab: int) -> None:
    logits = np.random.default_rng(1).normal(size=(4, vocab)).astype(F32)
    left = np.arange(vocab) == vocab - 3
    rows = [Row(top_p=0.9, allowed=left), Row(top_k=5, allowed=left), Row(0.0, allowed=left), Row(3.0, allowed=left)]
    assert run(device, logits, [dataclasses.replace(r, num_logprobs=2) for r in rows])[0].tolist() == [vocab - 3] * 4


@pytest.mark.parametrize(("seed", "position", "tied"), [(1, 854955, [0, 7]), (6, 589272, [0, 7]), (8, 327675, [4, 7])])
@pytest.mark.parametrize("settings", [{}, {"top_k": 8, "top_p": 0.999}, {"top_p": 0.999}])
def test_equal_noise_goes_to_the_lower_id(
    device: Device, seed: int, position: int, tied: list[int], settings: dict[str, Any]
) -> None:
    row = Row(seed=seed, position=position, **settings)
    logits = np.zeros((1, 8), F32)
    noise = ref.gumbel(ref.draw_bits(seed, position, 8))
    assert np.flatnonzero(noise == noise.max()).tolist() == tied
    assert run(device, logits, [row])[0].tolist() == tied[:1]


def test_thousands_of_draws_are_the_argmax_of_logits_plus_noise(device: Device) -> None:
    draws, vocab = 1000, 132
    logits = (np.random.default_rng(12).normal(size=vocab) * 2).astype(F32)
    counter = np.zeros((draws, vocab // 4, 4), np.uint32)
    counter[..., 0], counter[..., 1] = np.arange(vocab // 4), np.arange(draws)[:, None]
    noise = ref.gumbel(ref.philox4x32(counter, 77).reshape(draws, vocab))
    rows = [Row(seed=77, position=position) for position in range(draws)]
    drawn = run(device, np.broadcast_to(logits, (draws, vocab)), rows)[0]
    np.testing.assert_array_equal(drawn, np.argmax((logits - logits.max()) + noise, axis=1))


# ---- rows that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, INF, -math.nan])
@pytest.mark.parametrize("place", [0, 63, 98])
def test_a_bad_row_fails_alone(device: Device, poison: float, place: int) -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(6, 99)).astype(F32)
    rows = [Row(seed=r, num_logprobs=2) for r in range(6)]
    clean = run(device, logits, rows)
    rows[1] = Row(temperature=0.0)
    rows[2] = Row(num_logprobs=2, allowed=np.arange(99) != place, bias={place: -INF}, penalties={place: 1})
    rows[3] = Row(bias={place: -INF}, allowed=np.arange(99) != place)
    rows[4] = Row(target=3)
    logits[1:5, place] = poison
    results = run(device, logits, rows)
    token_ids, logprobs, top_ids, top_logprobs = (part[1:5] for part in results)
    assert (token_ids == -1).all()
    assert np.isnan(logprobs).all()
    assert (top_ids == -1).all()
    assert np.isnan(top_logprobs).all()
    for r in (0, 5):
        assert_same(tuple(part[r] for part in results), tuple(part[r] for part in clean))


def test_a_row_with_nothing_allowed_fails_alone(device: Device) -> None:
    logits = np.zeros((5, 70), F32)
    logits[0] = -INF
    rows = [
        Row(num_logprobs=1),
        Row(allowed=np.zeros(70, bool), num_logprobs=1),
        Row(bias=dict.fromkeys(range(70), -INF), temperature=0.0),
        Row(top_k=1, num_logprobs=1),
        Row(bias=dict.fromkeys(range(70), -INF), num_logprobs=1),
    ]
    token_ids, logprobs, top_ids, _ = results = run(device, logits, rows)
    assert token_ids.tolist() == [-1, -1, -1, 0, -1]
    assert np.isnan(logprobs[[0, 1, 2, 4]]).all()
    assert top_ids.tolist() == [[-1], [-1], [-1], [0], [-1]]
    assert_same(results, on_cpu(logits, rows))


# ---- independence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [777, 5000])
def test_a_row_is_the_same_alone_in_company_and_elsewhere(device: Device, vocab: int) -> None:
    rng = np.random.default_rng(5)
    logits = random_logits(rng, 11, vocab)
    rows = [random_row(rng, vocab) for _ in range(11)]
    together = run(device, logits, rows, 64)
    backwards = run(device, logits[::-1], rows[::-1], 64, aligned=False)
    assert_same(tuple(part[::-1] for part in backwards), together)
    for r in range(0, 11, 3):
        alone = run(device, logits[r : r + 1], [rows[r]], 64)
        assert_same(alone, tuple(part[r : r + 1] for part in together))


def test_rows_whose_raw_logits_are_kept_take_turns(device: Device) -> None:
    """The scratch has room for the raw logits of two rows; of nine that need it every second one."""
    vocab = 300
    rng = np.random.default_rng(8)
    logits = random_logits(rng, 9, vocab)
    rows = [Row(seed=r, num_logprobs=r % 2, penalties=dict.fromkeys(range(r, 90), 1), bias={5: 9.0}) for r in range(9)]
    rows += [Row(seed=9, num_logprobs=1, bias={3: 30.0}), Row(seed=10, bias={3: 30.0})]
    logits = np.concatenate([logits, logits[:2]])
    context, scratch = context_for(device, 2, vocab)
    out = Outputs(device, len(rows), 1)
    device.ops.sample(context, device.to_device(logits), on_device(device, rows, vocab), *out.arrays())
    assert_same(tuple(part + 0 for part in out.get()), tuple(part + 0 for part in on_cpu(logits, rows)))
    scratch.check()


# ---- what is reported and refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_logprobs", [0, 1, 7, 20])
@pytest.mark.parametrize("width", [0, 1, 20, 33])
def test_as_many_logprobs_as_asked_for_and_as_there_is_room(device: Device, num_logprobs: int, width: int) -> None:
    vocab = 90
    logits = random_logits(np.random.default_rng(2), 5, vocab)
    rows = [
        Row(num_logprobs=num_logprobs),
        Row(target=5, num_logprobs=num_logprobs),
        Row(target=89),
        Row(num_logprobs=num_logprobs, penalties=dict.fromkeys(range(60), 1), presence_penalty=3.0),
        Row(0.0, bias={8: 50.0}, num_logprobs=num_logprobs),
    ]
    results = run(device, logits, rows, width)
    assert_same(tuple(part + 0 for part in results), tuple(part + 0 for part in on_cpu(logits, rows, width)))
    assert (results[2][0] >= 0).sum() == min(num_logprobs, width)


def test_more_logprobs_than_the_list_holds_are_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="top_width"):
        run(device, np.zeros((1, 10), F32), [Row()], LISTED + 1)


def test_no_rows_are_no_work(device: Device) -> None:
    assert run(device, np.zeros((0, 40), F32), [], 2)[0].size == 0


def test_a_wrong_call_is_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        run(device, np.zeros((1, 2**19 + 1), F32), [Row()])
    context, _ = context_for(device, 1, 1000)
    out = Outputs(device, 1, 0)
    with pytest.raises(ValueError, match="scratch"):
        device.ops.sample(
            context, device.to_device(np.zeros((1, 2**19), F32)), on_device(device, [Row()], 2**19), *out.arrays()
        )
