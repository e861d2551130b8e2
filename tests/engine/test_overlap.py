"""Passes that overlap: the next one is launched before the tokens of the last one are here, and nobody can tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyengine import Engine, EngineFailed, InvalidRequest, RequestOutput, SamplingParams
from tests.engine.conftest import POISON_TOKEN, write_model, write_tokenizer

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
KINDS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(max_tokens=24, temperature=1.3, top_p=0.9, top_k=50, seed=3),
    "penalties": SamplingParams(max_tokens=24, temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, seed=4),
    "min_tokens": SamplingParams(max_tokens=24, min_tokens=10, temperature=2.0, seed=5),
    "logprobs": SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, prompt_logprobs=2),
    "siblings": SamplingParams(max_tokens=16, temperature=1.5, seed=6, n=3),
    "stop": SamplingParams(max_tokens=24, temperature=0.0, stop=["e", "t"]),
    "bias": SamplingParams(max_tokens=10, temperature=0.0, logit_bias={7: 4.0}),
}
PROMPTS = [[5, 6, 7], [8] * 40, [9, 10], list(range(20, 61)), [5, 6, 7, 8, 9]]


def made(outputs: list[RequestOutput]) -> list[Any]:
    """All that must not depend on how passes are run."""
    return [
        ([(c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in o.outputs], o.prompt_logprobs)
        for o in outputs
    ]


@pytest.fixture
def engines(model_folder: Path) -> Iterator[tuple[Engine, Engine]]:
    settings: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "kv_cache_memory": "1MiB"}
    with Engine(model_folder, **settings) as one, Engine(model_folder, overlap=True, **settings) as other:
        yield one, other


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_request_gets_the_same_with_overlap(engines: tuple[Engine, Engine], kind: str) -> None:
    plain, overlapped = engines
    assert made(overlapped.generate(PROMPTS, KINDS[kind])) == made(plain.generate(PROMPTS, KINDS[kind]))
    ahead = overlapped.stats().num_ahead_steps
    if kind == "penalties":
        assert ahead == 0  # each draw needs the token before it
    else:
        assert ahead > 5
    assert plain.stats().num_ahead_steps == 0


def test_all_kinds_together_and_an_abort_in_the_middle(engines: tuple[Engine, Engine]) -> None:
    results = []
    for engine in engines:
        ids = [engine.submit(prompt, params) for prompt in PROMPTS[:3] for params in KINDS.values()]
        victim = engine.submit([3] * 20, SamplingParams(max_tokens=200, temperature=0.0))
        outputs: dict[str, RequestOutput] = {}
        steps = 0
        while engine.has_unfinished:
            for event in engine.step():
                if event.output is not None:
                    outputs[event.request_id] = event.output
            steps += 1
            if steps == 30:
                engine.abort(victim)
        results.append(made([outputs[request_id] for request_id in ids]))
    assert results[0] == results[1]


def test_preempted_requests_get_the_same(model_folder: Path) -> None:
    settings: dict[str, Any] = {
        "kv_cache_memory": 16 * 8 * 1024,
        "capacity": "optimistic",
        "max_num_seqs": 4,
        "watermark": 0.0,
    }
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=1, ignore_eos=True)
    results, preemptions = [], []
    for overlap in (False, True):
        with Engine(model_folder, overlap=overlap, **settings) as engine:
            outputs = engine.generate([[i, i + 1, i + 2] * 5 for i in range(4, 10)], params)
            results.append(made(outputs))
            preemptions.append(engine.stats().num_preemptions)
    assert results[0] == results[1]
    assert min(preemptions) > 0


def test_one_that_stops_costs_one_token_that_is_thrown_away(engines: tuple[Engine, Engine]) -> None:
    _, engine = engines
    first = engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    assert engine.stats().discarded_tokens == 0  # ends at max_tokens are known beforehand
    stop = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=[first[4]])
    output = engine.generate([[5, 6, 7]], stop)[0].outputs[0]
    assert output.finish_reason == "stop"
    engine.generate([[8]], SamplingParams(max_tokens=1))  # its step was still in flight
    assert engine.stats().discarded_tokens == 1
    assert "planned ahead" in str(engine.stats())


def test_a_row_without_finite_logits_fails_alone(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "poisoned", poisoned=True)
    write_tokenizer(folder)
    with Engine(folder, kv_cache_memory="1MiB", overlap=True) as engine:
        expected = engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
        good, bad = engine.generate([[5, 6, 7], [POISON_TOKEN, 4]], GREEDY)
        assert good.outputs[0].token_ids == expected
        assert bad.outputs[0].finish_reason == "error"
        assert engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids == expected


class Broken:
    """A pass that never comes back with tokens."""

    def wait(self) -> Any:
        raise RuntimeError("the device is gone")


def test_a_pass_that_fails_on_the_device_fails_everybody_once_and_new_ones_are_refused(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = engines
    ids = [engine.submit([5, 6, 7], GREEDY), engine.submit([8, 9], GREEDY)]
    engine.step()
    monkeypatch.setattr(engine.model.backend, "launch", lambda *args, **kwargs: Broken())
    ends = []
    while engine.has_unfinished:
        ends += [event for event in engine.step() if event.finish_reason is not None]
    assert sorted(event.request_id for event in ends) == sorted(ids)
    assert all(isinstance(event.error, EngineFailed) and "the device is gone" in str(event.error) for event in ends)
    with pytest.raises(EngineFailed, match="the device is gone"):
        engine.submit([5], GREEDY)


def test_a_refused_pass_behind_another_ends_only_its_own_requests(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = engines
    expected = engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    launch, launches = engine.model.backend.launch, []

    def refusing(*args: Any, **kwargs: Any) -> Any:
        launches.append(kwargs)
        if len(launches) == 4:
            raise ValueError("argument 'slot_mapping' is wrong")
        return launch(*args, **kwargs)

    monkeypatch.setattr(engine.model.backend, "launch", refusing)
    (output,) = engine.generate([[5, 6, 7]], GREEDY)
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].token_ids == expected[:3]
    assert launches[3]["uses_previous"]
    assert engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids == expected


def test_blocks_of_an_aborted_request_are_free_when_its_pass_has_returned(engines: tuple[Engine, Engine]) -> None:
    _, engine = engines
    request_id = engine.submit([5] * 20, SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
    for _ in range(5):
        engine.step()
    engine.abort(request_id)
    engine.step()
    engine.generate([[8]], SamplingParams(max_tokens=1))
    assert engine._scheduler.num_free_blocks == engine.limits.num_blocks


def test_overlap_that_is_neither_true_nor_false_is_refused(model_folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="overlap is 'yes'"):
        Engine(model_folder, overlap="yes")  # type: ignore[arg-type]
