"""capacity="guaranteed": nobody is ever preempted, and nobody waits longer than the certificate needs."""

from __future__ import annotations

from pyengine.config import SchedulerConfig

from .scheduler_world import COMMON_RULE, World


def world(**settings: object) -> World:
    values: dict[str, object] = {"num_blocks": 6, "max_context": 300, "max_num_seqs": 8, "capacity": "guaranteed"}
    return World(SchedulerConfig(**{**COMMON_RULE, **values, **settings}))  # type: ignore[arg-type]


def test_two_that_outgrow_the_pool_at_the_same_time_run_one_after_the_other() -> None:
    w = world()
    [first] = w.submit([1] * 10, max_tokens=50)
    [second] = w.submit([2] * 10, max_tokens=50)
    w.step()
    assert second.started_ns is None
    w.drain()
    assert first.num_preemptions == second.num_preemptions == 0
    assert first.finished_ns is not None
    assert second.started_ns is not None
    assert second.started_ns > first.token_times_ns[40]  # it may overlap where the first has nothing left to grow


def test_peaks_at_different_times_share_a_pool_smaller_than_the_sum_of_the_maxima() -> None:
    w = world(num_blocks=8)
    [ending] = w.submit([1] * 60, max_tokens=5)
    [growing] = w.submit([2] * 2, max_tokens=62)
    w.step()
    w.step()
    [late] = w.submit([3] * 2, max_tokens=14)
    assert w.last_blocks(ending) + w.last_blocks(growing) + w.last_blocks(late) == 9
    assert w.step().joined == [late]
    w.drain()


def test_peaks_at_the_same_time_do_not_share() -> None:
    w = world(num_blocks=8)
    w.submit([1] * 2, max_tokens=62)
    w.submit([2] * 2, max_tokens=62)
    w.step()
    [late] = w.submit([3] * 2, max_tokens=62)
    w.step()
    assert late.started_ns is None
    w.drain()


def test_the_certificate_is_the_peak_wherever_block_boundaries_fall() -> None:
    for length in range(1, 17):
        w = world(num_blocks=60)
        w.submit([1] * length, max_tokens=70)
        w.submit([2] * 5, max_tokens=40)
        w.drain()
        assert w.steps >= 70


def test_ten_of_seventeen_tokens_are_counted_as_twenty_blocks() -> None:
    w = world(num_blocks=19, max_num_seqs=10)
    made = [w.submit([i] * 17, max_tokens=1)[0] for i in range(10)]
    w.step()
    assert [request.started_ns is not None for request in made] == [True] * 9 + [False]
    w.drain()


def test_what_an_early_end_leaves_is_given_to_the_next() -> None:
    w = world(num_blocks=4)
    [first] = w.submit([1] * 10, max_tokens=50)
    [second] = w.submit([2] * 10, max_tokens=50)
    w.step(ends={first: "stop"})
    assert w.step().joined == [second]
    w.drain()
