"""The event loop: nobody is lost, the same input gives the same run, and replicas know nothing of each other."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pyengine.config import SchedulerConfig
from pyengine.request import Request
from pyengine.scheduler.virtual import VirtualEngine
from pyengine.simulate.cluster import Cluster, Setup, simulate
from pyengine.simulate.experiment import Experiment, NeverFit
from pyengine.simulate.lengths import Uniform
from pyengine.simulate.policies import Policy, parse_policies
from pyengine.simulate.results import Recorder, RunResult
from pyengine.simulate.routers import ROUTERS, LeastWork, Load, PrefixAffinity, RoundRobin
from pyengine.simulate.workload import SimRequest, Workload
from tests.simulate.conftest import SETTINGS, small_generator, small_profile


def config_of(setup: Setup, **settings: Any) -> SchedulerConfig:
    profile = setup.profile
    base = {"num_blocks": profile.num_blocks, "block_size": 16, "max_context": profile.max_context}
    return SchedulerConfig(**{**base, **SETTINGS, **settings})


def run(workload: Workload, setup: Setup, *, router: str = "round-robin", **settings: Any) -> RunResult:
    return simulate(workload, config_of(setup, **settings), setup, ROUTERS[router](), policy="p")


def facts(result: RunResult) -> dict[str, Any]:
    return {**asdict(result), "wall_s": None}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("arrivals", ["gamma", "closed"])
def test_every_request_ends_once_with_its_own_length_and_again_in_the_same_way(
    setup: Setup, router: str, arrivals: str
) -> None:
    setup = replace(setup, num_replicas=3)
    workload = small_generator(arrivals=arrivals, num_users=12, think_s=0.1, num_prefixes=4).workload(1)
    result = run(workload, setup, router=router)
    assert result.num_finished == len(workload.requests)
    assert result.output_tokens == sum(request.output_tokens for request in workload.requests)
    assert result.prompt_tokens == sum(request.prompt_tokens for request in workload.requests)
    assert result.ttft_short.count + result.ttft_long.count == result.ttft.count == len(workload.requests)
    assert result.itl.count == result.output_tokens - len(workload.requests)
    assert facts(run(workload, setup, router=router)) == facts(result)


def test_one_replica_is_a_virtual_engine_with_these_arrivals(setup: Setup) -> None:
    workload = small_generator().workload(2)
    config = config_of(setup)
    engine = VirtualEngine(config, setup.profile.model())
    requests = []
    for asked in workload.requests:
        requests.append(Request("", asked.prompt(), max(200, asked.output_tokens)))
        engine.arrive(asked.arrival_ns, [requests[-1]], [asked.output_tokens])
    engine.drain()
    waits = [(request.token_times_ns[0] - request.arrival_ns) / 1e9 for request in requests]
    result = run(workload, setup)
    assert result.ttft_curve == pytest.approx(np.quantile(waits, np.linspace(0, 1, 101)).tolist(), rel=1e-12)
    assert result.preemptions == sum(request.num_preemptions for request in requests)
    assert result.num_steps == engine.num_steps
    gaps = np.concatenate([np.diff(request.token_times_ns) for request in requests]) / 1e9
    assert result.itl.p50 == pytest.approx(np.quantile(gaps, 0.5, method="inverted_cdf"), rel=1.1e-3)
    assert result.itl.p99 == pytest.approx(np.quantile(gaps, 0.99, method="inverted_cdf"), rel=1.1e-3)


def test_replicas_in_turn_do_what_each_would_do_alone(setup: Setup) -> None:
    workload = small_generator(rate=60.0).workload(3)
    together = run(workload, replace(setup, num_replicas=3))
    alone = [run(Workload("part", workload.requests[i::3]), setup) for i in range(3)]
    assert together.num_steps == sum(result.num_steps for result in alone)
    assert together.preemptions == sum(result.preemptions for result in alone)
    for reason, seconds in together.waiting_s.items():
        assert seconds == pytest.approx(sum(result.waiting_s.get(reason, 0.0) for result in alone), abs=1e-6)
    assert together.ttft_curve[-1] == max(result.ttft_curve[-1] for result in alone)


def test_waiting_by_reason_adds_up_to_the_time_in_the_queue(setup: Setup) -> None:
    workload = small_generator().workload(4)
    cluster = Cluster(workload, config_of(setup), setup, RoundRobin(), knows_lengths=False)
    queue_ns = 0
    ended = cluster.recorder.ended

    def note(asked: SimRequest, request: Request) -> None:
        nonlocal queue_ns
        queue_ns += request.queue_ns
        ended(asked, request)

    cluster.recorder.ended = note  # type: ignore[method-assign]
    cluster.run()
    assert queue_ns > 0
    assert sum(cluster.recorder.waiting_ns.values()) == queue_ns


def test_refusals_are_counted_by_kind_and_the_rest_goes_on(setup: Setup) -> None:
    workload = small_generator(rate=200.0).workload(5)
    giant = SimRequest(workload.requests[0].arrival_ns, 5000, 1, ((1, 5000),))
    workload = Workload("with a giant", (giant, *workload.requests))
    result = run(workload, setup, max_queue=4)
    assert result.refusals["NeverFits"] == 1
    assert result.refusals["QueueFull"] > 10
    assert result.num_finished + sum(result.refusals.values()) == len(workload.requests)


@pytest.mark.parametrize("num_blocks", [2, 3, 64])
def test_what_is_said_never_to_fit_is_what_is_refused(setup: Setup, num_blocks: int) -> None:
    setup = replace(setup, profile=replace(setup.profile, num_blocks=num_blocks, max_context=60))
    policies = tuple(parse_policies("fifo fifo-guaranteed"))
    experiment = Experiment(small_generator(num_requests=60), policies, setup, SETTINGS, seeds=(0, 1))
    (found,) = experiment.never_fit()
    most = min(16 * num_blocks, 59)  # the context needs room for one token more
    prompts = [
        request.prompt_tokens for seed in (0, 1) for request in small_generator(num_requests=60).workload(seed).requests
    ]
    longer = [i for i, tokens in enumerate(prompts) if tokens > most]
    assert found == NeverFit(("fifo", "fifo-guaranteed"), most, len(longer), 120, longer[0], prompts[longer[0]])
    for policy in policies:
        refusals = [experiment.run_one(policy, seed).refusals.get("NeverFits", 0) for seed in (0, 1)]
        assert sum(refusals) == found.num_prompts


def test_those_whose_limit_has_passed_are_refused_and_a_closed_loop_goes_on(setup: Setup) -> None:
    workload = small_generator(arrivals="closed", num_users=60, think_s=0.01, num_requests=400).workload(6)
    result = run(workload, setup, ttft_limit_ms=150)
    assert sum(result.refusals.values()) > 0
    assert result.num_finished + sum(result.refusals.values()) == 400


def test_a_closed_loop_never_has_more_requests_than_users(setup: Setup) -> None:
    workload = small_generator(arrivals="closed", num_users=5, think_s=0.05).workload(7)
    cluster = Cluster(workload, config_of(setup), setup, RoundRobin(), knows_lengths=False)
    spans: list[tuple[int, int, int]] = []
    ended = cluster.recorder.ended

    def note(asked: SimRequest, request: Request) -> None:
        spans.append((asked.user, request.arrival_ns, request.token_times_ns[-1]))
        ended(asked, request)

    cluster.recorder.ended = note  # type: ignore[method-assign]
    cluster.run()
    for user in range(5):
        own = sorted((arrived, left) for who, arrived, left in spans if who == user)
        thoughts = [request.arrival_ns for request in workload.requests if request.user == user]
        assert len(own) == len(thoughts)
        assert [later - left for (_, left), (later, _) in pairwise(own)] == thoughts[1:]


def test_a_known_length_is_an_oracle_that_is_never_wrong(setup: Setup) -> None:
    workload = small_generator().workload(8)
    oracle, told = parse_policies("oracle best-fit-guaranteed")
    results = [
        simulate(
            workload,
            config_of(setup, **policy.settings),
            setup,
            RoundRobin(),
            policy=policy.name,
            knows_lengths=policy.knows_lengths,
        )
        for policy in (oracle, told)
    ]
    assert [result.preemptions for result in results] == [0, 0]
    assert [result.moved_starts for result in results] == [0, 0]
    assert results[0].ttft_curve[50] < results[1].ttft_curve[50]


def test_a_step_takes_what_the_profile_says_and_an_idle_device_waits(setup: Setup) -> None:
    two = tuple(SimRequest(at_ns, 20, 2, ((at_ns + 1, 20),)) for at_ns in (0, 10**9))
    result = run(Workload("two", two), setup)
    prefill_s, decode_s = (5e6 + 20 * 30_000) / 1e9, (5e6 + 10_000 + 20 * 35) / 1e9
    assert result.ttft.p50 == pytest.approx(prefill_s)
    assert result.makespan_s == pytest.approx(1 + prefill_s + decode_s)
    assert result.busy * result.makespan_s == pytest.approx(2 * (prefill_s + decode_s))


def test_jitter_changes_the_times_of_steps_but_not_their_mean(setup: Setup) -> None:
    workload = small_generator(rate=5.0, num_requests=300).workload(0)
    exact, shaky = run(workload, setup), run(workload, replace(setup, jitter=0.2))
    assert shaky.ttft_curve != exact.ttft_curve
    assert facts(shaky) == facts(run(workload, replace(setup, jitter=0.2)))
    assert shaky.busy * shaky.makespan_s / shaky.num_steps == pytest.approx(
        exact.busy * exact.makespan_s / exact.num_steps, rel=0.03
    )


def test_a_limit_between_tokens_is_kept_and_what_is_over_it_is_counted(setup: Setup) -> None:
    workload = small_generator().workload(0)
    free, limited = run(workload, setup), run(workload, setup, itl_limit_ms=9)
    assert free.itl_over_limit is None
    assert free.itl.p99 is not None
    assert free.itl.p99 > 0.011
    assert limited.itl_over_limit is not None
    assert limited.itl_over_limit < 0.01
    impossible = run(workload, setup, itl_limit_ms=1)
    assert impossible.itl_over_limit == 1.0
    assert impossible.num_finished == len(workload.requests)


def test_more_replicas_make_nobody_wait_longer_than_one(setup: Setup) -> None:
    workload = small_generator(rate=60.0).workload(9)
    one, four = run(workload, setup), run(workload, replace(setup, num_replicas=4), router="least-work")
    assert four.ttft.p50 is not None
    assert one.ttft.p50 is not None
    assert four.ttft.p50 < one.ttft.p50 / 2


def test_an_experiment_is_the_same_in_one_process_and_in_two(setup: Setup) -> None:
    experiment = Experiment(
        small_generator(num_requests=40), (Policy("a"), Policy("b", {"packing": "none"})), setup, SETTINGS, seeds=(0, 1)
    )
    seen: list[tuple[int, int]] = []
    results = experiment.run_all(1, lambda place, done: seen.append((place, done)))
    assert [(result.policy, result.seed) for result in results] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert seen == [(0, 40), (1, 40), (2, 40), (3, 40)]
    assert [facts(result) for result in experiment.run_all(2)] == [facts(result) for result in results]


def test_prefixes_are_cached_where_there_are_any_unless_a_policy_says_otherwise(setup: Setup) -> None:
    on, off = Policy("on", {"prefix_caching": True}), Policy("plain")
    for source, expected in ((small_generator(num_prefixes=2), True), (small_generator(), False)):
        for given in (source, source.workload(0)):
            base = Experiment(given, (off,), setup, SETTINGS).base_settings()
            assert off.config(base).prefix_caching is expected
            assert on.config(base).prefix_caching


def asked(number: int, prompt_tokens: int = 100, *keys: int) -> SimRequest:
    return SimRequest(0, prompt_tokens, 1, ((number, prompt_tokens),), keys)


def test_round_robin_takes_turns_and_least_work_the_emptiest() -> None:
    load = Load(3)
    turns = RoundRobin()
    assert [turns.choose(asked(i), load) for i in range(5)] == [0, 1, 2, 0, 1]
    least = LeastWork()
    chosen = []
    for length in (500, 100, 300, 100, 100):
        chosen.append(least.choose(asked(1, length), load))
        load.sent(asked(1, length), chosen[-1])
    assert chosen == [0, 1, 2, 1, 2]


def test_prefix_affinity_follows_the_longest_prefix_until_that_costs_more_than_it_saves() -> None:
    def prompt(*lengths: int) -> SimRequest:
        segments = tuple((100 + i, length) for i, length in enumerate(lengths))
        return SimRequest(0, sum(lengths), 1, (*segments, (1, 10)), tuple(100 + i for i in range(len(lengths))))

    router, load = PrefixAffinity(), Load(4)
    load.tokens[:] = [50, 0, 40, 60]
    assert router.choose(prompt(30), load) == 1, "nobody has it: the least work"
    load.tokens[:] = [50, 69, 40, 60]
    assert router.choose(prompt(30), load) == 1, "29 more to do, 30 saved"
    load.tokens[1] = 71
    assert router.choose(prompt(30, 500), load) == 2, "31 more to do, and it has only the first part"
    load.tokens[:] = [0, 0, 400, 0]
    assert router.choose(prompt(30, 500), load) == 2, "that has both parts now"
    assert router.choose(prompt(), load) == 0


def test_prefix_affinity_finds_more_in_the_caches_than_turns_do(setup: Setup) -> None:
    setup = replace(setup, profile=small_profile(200), num_replicas=4)
    workload = small_generator(prompt=Uniform(300, 500), num_prefixes=12, prefix_share=0.8, rate=15.0).workload(0)
    affine, turns = (run(workload, setup, router=router).cached_tokens for router in ("prefix-affinity", "round-robin"))
    assert affine > 1.3 * turns > 0


def test_the_histogram_of_gaps_does_not_depend_on_when_it_is_flushed() -> None:
    def recorded(flush: bool) -> Recorder:
        recorder = Recorder(1000)
        for length in (3, 40, 7):
            request = Request("", [1], 50)
            request.settled_token_times_ns = [i * i * 1_000_003 for i in range(1, length)]
            recorder.ended(asked(1), request)
            if flush:
                recorder.itl()
        return recorder

    assert recorded(True).itl() == recorded(False).itl()
    assert recorded(True).itl().count == 1 + 38 + 5
