"""Every invariant of the scheduler by its name, over all orders, packings, capacities, limits, holds and pauses.

A few hundred seeded trials run once; each test is one invariant. A check that fails ends its trial, and is reported
under its name with the seed.
"""

from __future__ import annotations

import pytest

from pyengine.scheduler.replay import plan_record, replay

from .policy_loads import CHUNKED, KINDS, PASSING, PREEMPTING, Failures, Trial

INVARIANTS = {
    "check_budget": "the tokens of a step, counted from its inputs, are within the budget",
    "check_seats": "at most max_num_seqs run",
    "check_structures": "each live request is in exactly one container",
    "check_moves": "only legal edges are gone",
    "check_chunks": "1 <= scheduled <= known - computed",
    "check_decodes": "every decode is in every plan",
    "check_blocks": "free + held + cached idle + fenced = pool",
    "check_refcounts": "a refcount is the number of tables that hold the block",
    "check_writes": "no free or shared block is written",
    "check_tables": "tables are as long as their tokens need",
    "check_index": "an index entry: the block holds exactly those tokens with that salt",
    "check_salts": "no block is shared between salts",
    "check_outputs": "outputs do not depend on company, chunks, cache or preemption",
    "check_failed_admission": "a failed admission leaves every structure as it was",
    "check_progress": "with nothing running and somebody waiting something is scheduled",
    "check_finite_load": "a finite load ends in bounded steps",
    "check_guarantee": "guaranteed: nobody is preempted, and the certificate is the peak",
    "check_certificate": "guaranteed: no future step uses more than the certificate",
    "check_forecast": "the forecast is the sum of what those that run may use",
    "check_scan_order": "nobody starts before an earlier one, but for passing and prefixes in work",
    "check_queue": "the queue is sorted by the order",
    "check_passing": "who passes is computed whole, and the head has a reserved start",
    "check_reservation": "guaranteed: a head starts no later than promised",
    "check_bypass_budget": "the bypass budget is kept",
    "check_aging_barrier": "nobody passes a head that waited beyond the barrier",
    "check_service": "fair: each token is charged once, and given back if it is not computed",
    "check_classes": "who waits is promoted",
    "check_gates": "nobody starts while paused, nor joins a static batch",
    "check_latency": "a pass keeps the tightest limit between tokens",
    "check_refused": "who is late before it started is refused, and nobody else",
    "check_abort": "abort in any state frees all and changes nobody else; twice is once",
    "check_waits": "queue time is exact",
    "check_log": "the parts of each wait sum to it",
    "check_skipped_admissions": "an admission that is skipped would have started nobody",
}


@pytest.fixture(scope="module")
def trials() -> Failures:
    failures = Failures()
    failures.run(range(27))
    failures.run(range(100, 114), **PASSING)
    failures.run(range(200, 215), **{**PASSING, "capacity": "guaranteed"})
    failures.run(range(300, 312), **PREEMPTING)
    failures.run(range(600, 620), **CHUNKED)
    failures.run(range(620, 640), **{**CHUNKED, "capacity": "guaranteed"})
    return failures


@pytest.mark.parametrize("name", INVARIANTS, ids=[text.replace(" ", "_") for text in INVARIANTS.values()])
def test_it_holds_that(name: str, trials: Failures) -> None:
    assert name not in trials.found, trials.found[name]
    assert trials.counts[name] > 200


def test_nothing_else_goes_wrong(trials: Failures) -> None:
    assert not trials.found, "\n".join(trials.found.values())


def test_the_trials_pass_heads_preempt_refuse_and_share(trials: Failures) -> None:
    worlds = [trial.world for trial in trials.trials]
    assert sum(world.num_passers for world in worlds) > 40
    assert sum(world.num_chunked_passers for world in worlds) > 10
    assert sum(world.num_heads for world in worlds) > 30
    assert sum(request.num_preemptions for world in worlds for request in world.requests) > 40
    assert sum(trial.refused["late"] for trial in trials.trials) > 10
    assert sum(world.scheduler._cache.num_hit_tokens for world in worlds) > 400


@pytest.mark.parametrize("seed", range(6))
def test_to_log_or_not_changes_no_plan(seed: int) -> None:
    logged, silent = Trial(seed).run(), Trial(seed, is_logged=False).run()
    assert logged.plans == silent.plans
    assert [r.token_ids for r in logged.world.requests] == [r.token_ids for r in silent.world.requests]


@pytest.mark.parametrize("seed", range(400, 406))
def test_the_recorded_calls_replay_to_the_identical_plans(seed: int) -> None:
    trial = Trial(seed)
    if trial.world.scheduler.recorder is None:
        trial = Trial(seed, capacity="optimistic")
    trial.world.wants_fork = lambda: False
    key_of = {}
    plans = []
    schedule = trial.world.scheduler.schedule

    def remembered():  # type: ignore[no-untyped-def]
        plan = schedule()
        key_of.update((request, request.arrival_seq) for request in trial.world.requests)
        plans.append(plan_record(plan, key_of))
        return plan

    trial.world.scheduler.schedule = remembered  # type: ignore[method-assign]
    trial.run()
    assert trial.world.scheduler.recorder is not None
    result = replay(trial.world.scheduler.recorder.recording())
    assert result.diverged is None
    assert result.plans == plans


@pytest.mark.slow
@pytest.mark.parametrize("block", [pytest.param(0, marks=pytest.mark.sample), *range(1, 20)])
def test_it_all_holds_in_more_than_a_thousand_trials_of_all_kinds(block: int) -> None:
    failures = Failures()
    first = 10_000 + 100 * block
    failures.run(range(first, first + 6 * len(KINDS)))
    failures.run(range(first + 60, first + 70), **PASSING)
    failures.run(range(first + 70, first + 80), **{**PASSING, "capacity": "guaranteed"})
    failures.run(range(first + 80, first + 90), **CHUNKED)
    failures.run(range(first + 90, first + 100), **{**CHUNKED, "capacity": "guaranteed"})
    failures.run(range(first + 80, first + 90), **PREEMPTING)
    assert not failures.found, "\n".join(failures.found.values())
