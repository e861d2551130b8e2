"""The parts of pyengine.bench: what is drawn, fitted and counted. No test looks at how fast anything is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyengine.bench.batch_size import batch_sizes_up_to, fit_line, sweep
from pyengine.bench.batching import Plan
from pyengine.bench.client import serve
from pyengine.bench.device import SETTINGS, Shape, measure_device, shapes_for
from pyengine.bench.load import BEFORE_SUBMIT, NUM_WORST, Setting, measure_capacity, run_load, worst_requests
from pyengine.bench.machine import Ceilings, OthersLoad, Work, least_step_s
from pyengine.bench.workload import END_ID, make_requests, mix_for, poisson_times
from pyengine.checkpoint.source import BUILT_IN, built_in_folder
from pyengine.engine import Engine
from pyengine.errors import InvalidRequest, ModelError
from pyengine.request_options import RequestOptions
from pyengine.scheduler.step_time import COEFFICIENTS
from pyengine.simulate.policies import parse_policies
from pyengine.simulate.profiles import DeviceProfile


@pytest.fixture(scope="module")
def model() -> str:
    """The built-in model, installed or in the source tree."""
    try:
        return str(built_in_folder())
    except ModelError:
        return str(Path(__file__).resolve().parents[2] / "weights" / BUILT_IN)


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Engine]:
    with Engine(model, max_num_seqs=4, num_threads=1, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def setting(model: str, engine: Engine) -> Setting:
    mix = mix_for(512)
    return Setting(
        model=model,
        engine={"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_threads": 1},
        block_size=16,
        block_bytes=engine.model.backend.kv_block_bytes(16),
        num_blocks=40,
        mix=mix,
        vocab_size=engine.model.spec.vocab_size,
    )


# ---- Workload


def test_a_seed_always_gives_the_same_requests_and_another_one_others() -> None:
    mix = mix_for(512)
    assert make_requests(mix, 30, 2048, 7) == make_requests(mix, 30, 2048, 7)
    assert make_requests(mix, 30, 2048, 7) != make_requests(mix, 30, 2048, 8)


@pytest.mark.parametrize("max_context", [32, 100, 512, 131072])
def test_every_request_fits_into_the_models_context(max_context: int) -> None:
    mix = mix_for(max_context)
    assert mix.longest <= max_context
    for request in make_requests(mix, 200, 50, 1):
        assert len(request.prompt) + request.max_tokens <= max_context
        assert 2 <= request.output_tokens <= request.max_tokens
        assert END_ID not in request.prompt
        assert request.is_long or len(request.prompt) <= mix.max_short


def test_another_rate_is_the_same_pattern_of_arrivals_at_another_speed() -> None:
    slow, fast = poisson_times(20, 2.0, 3), poisson_times(20, 8.0, 3)
    assert slow == pytest.approx([4 * time for time in fast])
    assert slow == sorted(slow)


# ---- Client


def test_a_request_makes_just_the_tokens_that_the_client_has_in_mind(engine: Engine) -> None:
    requests = make_requests(mix_for(512), 12, engine.model.spec.vocab_size, 0)
    served = serve(engine, requests, [0.0] * len(requests))
    assert [len(one.token_times_ns) for one in served] == [request.output_tokens for request in requests]
    for one in served:
        assert one.has_finished
        assert one.due_ns <= one.submitted_ns < one.token_times_ns[0]
        assert one.token_times_ns == sorted(one.token_times_ns)


def test_a_refused_request_is_counted_and_the_others_are_served(engine: Engine) -> None:
    requests = make_requests(mix_for(512), 3, engine.model.spec.vocab_size, 0)
    too_large = make_requests(mix_for(1 << 20), 1, engine.model.spec.vocab_size, 0)[0]
    giant = type(too_large)((1,) * 600, 4, 8, True)  # the context is 512
    served = serve(engine, [requests[0], giant, *requests[1:]], [0.0] * 4)
    assert [one.refusal for one in served] == [None, served[1].refusal, None, None]
    assert served[1].refusal is not None
    assert not served[1].has_finished


def test_what_cannot_keep_its_limit_ends_without_holding_up_the_client(engine: Engine) -> None:
    requests = make_requests(mix_for(512), 6, engine.model.spec.vocab_size, 0)
    served = serve(engine, requests, [0.0] * 6, options=lambda asked: RequestOptions(ttft_limit_ms=1e-3))
    assert len(served) == 6
    assert any(one.refusal in ("DeadlinePassed", "TTFTUnreachable") for one in served)


# ---- One load


def test_a_loads_waiting_adds_up_to_that_of_its_requests(setting: Setting) -> None:
    requests = make_requests(setting.mix, 40, setting.vocab_size, 0)
    worst: list = []
    result = run_load(setting, parse_policies("best-fit")[0], requests, 2000.0, 1.0, 0, worst=worst)
    assert (result.num_requests, result.num_finished, dict(result.refusals)) == (40, 40, {})
    assert result.ttft.count == 40
    assert result.ttft_short.count + result.ttft_long.count == 40
    assert result.itl.count == sum(request.output_tokens - 1 for request in requests)
    assert sum(result.waiting_s.values()) > 0
    assert 1 <= result.mean_batch <= 8
    assert 0 < result.kv_used <= 1
    assert [one.ttft_s for one in worst] == sorted((one.ttft_s for one in worst), reverse=True)
    for one in worst:
        assert one.slices[0].what == BEFORE_SUBMIT
        assert one.slices[-1].what == "decode"
        assert all(part.start_s <= part.end_s for part in one.slices)


def test_the_worst_requests_are_at_most_so_many_and_told_without_gaps(setting: Setting) -> None:
    requests = make_requests(setting.mix, NUM_WORST + 5, setting.vocab_size, 1)
    with setting.start(parse_policies("fifo")[0]) as engine:
        worst = worst_requests(engine, serve(engine, requests, [0.0] * len(requests)))
    assert len(worst) == NUM_WORST
    for one in worst:
        for earlier, later in zip(one.slices, one.slices[1:], strict=False):
            assert later.start_s == pytest.approx(earlier.end_s, abs=2e-6)
        first_token_s = next(part.start_s for part in one.slices if part.what == "decode")
        assert first_token_s - one.slices[0].start_s <= one.ttft_s + 2e-3 or any(
            part.what == "preempted" for part in one.slices
        )


def test_a_policy_that_knows_the_lengths_declares_them(setting: Setting) -> None:
    requests = make_requests(setting.mix, 20, setting.vocab_size, 2)
    result = run_load(setting, parse_policies("oracle")[0], requests, 5000.0, 1.0, 0)
    assert (result.num_finished, result.preemptions) == (20, 0)


def test_capacity_is_a_rate(setting: Setting) -> None:
    requests = make_requests(setting.mix, 30, setting.vocab_size, 3)
    assert measure_capacity(setting, parse_policies("best-fit")[0], requests) > 0


# ---- Batch sizes


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])])
def test_batch_sizes_double_up_to_the_largest(most: int, sizes: list[int]) -> None:
    assert batch_sizes_up_to(most) == sizes


def test_the_line_through_points_on_a_line_is_that_line() -> None:
    line = fit_line([1, 2, 8, 64], [0.003 + 0.0005 * n for n in (1, 2, 8, 64)])
    assert (line.base_s, line.per_sequence_s) == (pytest.approx(0.003), pytest.approx(0.0005))
    assert line.mean_error == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("seconds", "base", "slope"), [([3.0, 2.0, 1.0], None, 0.0), ([0.1, 2.0, 4.1], 0.0, None), ([2.0], 2.0, 0.0)]
)
def test_a_line_has_no_negative_part(seconds: list[float], base: float | None, slope: float | None) -> None:
    line = fit_line([1, 2, 3][: len(seconds)], seconds)
    assert line.base_s >= 0
    assert line.per_sequence_s >= 0
    assert base is None or line.base_s == pytest.approx(base)
    assert slope is None or line.per_sequence_s == pytest.approx(slope)


def test_the_sweep_measures_each_size_with_all_sequences_decoding(engine: Engine) -> None:
    parts: list[float] = []
    swept = sweep(engine, [1, 3], 2, num_threads=1, seed=0, on_progress=parts.append)
    assert [point.batch_size for point in swept.points] == [1, 3]
    assert all(point.num_steps >= 100 and point.step_s > 0 for point in swept.points)
    assert all(point.itl_p99_s >= point.itl_p50_s > 0 for point in swept.points)
    assert swept.ceilings is not None
    assert parts == sorted(parts)
    assert parts[-1] == 1.0


def test_the_least_time_of_a_step_counts_weights_once_and_kv_for_each_sequence() -> None:
    work, ceilings = Work(1000, 50.0, 10.0), Ceilings(100.0, 500.0)
    assert least_step_s(work, ceilings, 1, 0.0) == (10.0, 0.1)
    assert least_step_s(work, ceilings, 4, 25.0) == (20.0, 0.4)


# ---- The device profile


def test_the_measured_profile_can_be_simulated_with(engine: Engine) -> None:
    measured = measure_device(engine, 0.1, seed=0, on_progress=lambda part: None)
    profile = measured.profile
    assert DeviceProfile.from_json(profile.to_json()) == profile
    assert (profile.origin, set(profile.step_time)) == ("measured", set(COEFFICIENTS))
    assert (profile.max_context, profile.num_blocks) == (512, engine.limits.num_blocks)
    assert {one.shape for one in measured.shapes} == set(shapes_for(engine))
    assert measured.mean_error >= 0


def test_shapes_fit_into_the_engine(engine: Engine) -> None:
    limits = engine.limits
    for shape in shapes_for(engine):
        assert shape.decodes + shape.prefills <= limits.max_seqs
        assert shape.decodes + shape.prefills * shape.chunk <= limits.max_tokens
    assert Shape(4, 1, 0, 0).decodes == max(shape.decodes for shape in shapes_for(engine))


# ---- Plans and the machine


@pytest.mark.parametrize(
    ("field", "value"), [("max_batch", 0), ("rates", (0.0,)), ("rates", ()), ("seconds", 0.0), ("seeds", 0)]
)
def test_a_plan_that_measures_nothing_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Plan(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field


def test_the_load_of_others_is_a_part_or_unknown() -> None:
    load = OthersLoad()
    sum(range(100_000))
    share = load.share()
    assert share is None or 0.0 <= share <= 1.0
