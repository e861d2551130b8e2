"""The batch does not change the answer: ids and log-probabilities are the same bits in any company."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyengine._cpu import ops

from pyengine import Engine, RequestOutput, SamplingParams

from .conftest import block_bytes, write_model

PARAMS = (
    SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.9, seed=11, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=15, temperature=1.3, top_k=40, top_p=0.9, seed=12, logprobs=0, ignore_eos=True),
    SamplingParams(
        max_tokens=11,
        temperature=0.7,
        min_p=0.02,
        seed=13,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logprobs=1,
        ignore_eos=True,
    ),
    SamplingParams(max_tokens=8, temperature=0.0, logit_bias={7: 3.0, 9: -2.0}, logprobs=1, ignore_eos=True),
)


def cases(count: int, seed: int = 5) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, 31, 33, 70]
    return [
        ([rng.randrange(2, 300) for _ in range(lengths[i % len(lengths)] + i // len(lengths))], PARAMS[i % len(PARAMS)])
        for i in range(count)
    ]


def answer(output: RequestOutput) -> tuple[Any, ...]:
    """Everything that may not depend on company, exactly."""
    completion = output.outputs[0]
    assert output.error is None
    return completion.token_ids, completion.text, completion.finish_reason, completion.logprobs


@pytest.fixture(scope="module")
def alone(model_folder: Path) -> list[tuple[Any, ...]]:
    """The answer of each case, each in an engine run of its own."""
    with Engine(model_folder, kv_cache_memory="16MiB", num_threads=1) as engine:
        return [answer(engine.generate([prompt], params)[0]) for prompt, params in cases(33)]


@pytest.mark.parametrize("batch", [2, 3, 7, 8, 9, 33])
def test_a_request_gives_the_same_bits_alone_and_in_a_batch(
    model_folder: Path, alone: list[tuple[Any, ...]], batch: int
) -> None:
    order = list(range(33))
    random.Random(batch).shuffle(order)
    everyone = cases(33)
    with Engine(model_folder, kv_cache_memory="16MiB", max_num_batched_tokens=256) as engine:
        for begin in range(0, 33, batch):
            chosen = order[begin : begin + batch]
            outputs = engine.generate([everyone[i][0] for i in chosen], [everyone[i][1] for i in chosen])
            for i, output in zip(chosen, outputs, strict=True):
                assert answer(output) == alone[i]


def test_a_request_gives_the_same_bits_when_others_arrive_at_every_step(
    model_folder: Path, alone: list[tuple[Any, ...]]
) -> None:
    everyone = cases(33)
    order = list(range(33))
    random.Random(99).shuffle(order)
    ids: dict[str, int] = {}
    got: dict[int, list[int]] = {i: [] for i in order}
    with Engine(model_folder, kv_cache_memory="16MiB", max_num_batched_tokens=64) as engine:
        while order or engine.has_unfinished:
            if order:
                i = order.pop()
                ids[engine.submit(everyone[i][0], everyone[i][1])] = i
            for event in engine.step():
                got[ids[event.request_id]].extend(event.token_ids)
    assert {i: tuple(tokens) for i, tokens in got.items()} == {i: alone[i][0] for i in got}


@pytest.mark.parametrize("budget", [1, 7, 16, 1024])
def test_the_chunks_of_a_prompt_do_not_change_the_answer(
    model_folder: Path, alone: list[tuple[Any, ...]], budget: int
) -> None:
    everyone = cases(10)
    with Engine(
        model_folder, kv_cache_memory="16MiB", max_num_batched_tokens=budget, max_num_seqs=min(budget, 4)
    ) as engine:
        outputs = engine.generate([prompt for prompt, _ in everyone], [params for _, params in everyone])
    assert [answer(output) for output in outputs] == alone[:10]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_number_of_threads_does_not_change_the_answer(
    model_folder: Path, alone: list[tuple[Any, ...]], num_threads: int
) -> None:
    everyone = cases(10)
    with Engine(model_folder, kv_cache_memory="16MiB", num_threads=num_threads) as engine:
        outputs = engine.generate([prompt for prompt, _ in everyone], [params for _, params in everyone])
    assert [answer(output) for output in outputs] == alone[:10]


def test_preemption_does_not_change_a_seeded_request_with_penalties(model_folder: Path) -> None:
    params = SamplingParams(
        max_tokens=60,
        temperature=1.1,
        top_p=0.95,
        seed=3,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        logprobs=2,
        ignore_eos=True,
    )
    prompts = [[(17 * i + j) % 300 + 2 for j in range(20 + i)] for i in range(6)]
    with Engine(model_folder, kv_cache_memory="16MiB") as roomy:
        expected = [answer(roomy.generate([prompt], params)[0]) for prompt in prompts]
    with Engine(model_folder, kv_cache_memory=12 * block_bytes(model_folder), capacity="optimistic") as tight:
        outputs = tight.generate(prompts, params)
    assert max(output.metrics.preemptions for output in outputs) >= 2
    assert sum(output.metrics.recomputed_tokens for output in outputs) > 0
    assert [answer(output) for output in outputs] == expected


@pytest.mark.parametrize("neighbours", ["seeded", "unseeded", "greedy", "all"])
def test_a_seeded_request_does_not_notice_its_neighbours(model_folder: Path, neighbours: str) -> None:
    mine = SamplingParams(max_tokens=20, temperature=1.0, seed=77, logprobs=1, ignore_eos=True)
    kinds = {
        "seeded": [SamplingParams(max_tokens=25, temperature=1.5, seed=78, ignore_eos=True)] * 3,
        "unseeded": [SamplingParams(max_tokens=25, temperature=1.5, ignore_eos=True)] * 3,
        "greedy": [SamplingParams(max_tokens=25, temperature=0.0, ignore_eos=True)] * 3,
    }
    company = [one for kind in kinds.values() for one in kind] if neighbours == "all" else kinds[neighbours]
    prompt = [5, 6, 7, 8]
    with Engine(model_folder, kv_cache_memory="16MiB") as engine:
        expected = answer(engine.generate([prompt], mine)[0])
        outputs = engine.generate([[9, 10, 11 + i] for i in range(len(company))] + [prompt], [*company, mine])
    assert answer(outputs[-1]) == expected


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_batches_and_chunks_change_no_bit_on_any_instruction_set(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, isa: str, dtype: str
) -> None:
    monkeypatch.setenv("PYENGINE_CPU_ISA", isa)
    everyone = cases(9)
    with Engine(model_folder, dtype=dtype, kv_cache_memory="16MiB", num_threads=1) as engine:
        assert isa in engine.model.backend.description
        expected = [answer(engine.generate([prompt], params)[0]) for prompt, params in everyone]
    with Engine(
        model_folder, dtype=dtype, kv_cache_memory="16MiB", max_num_batched_tokens=24, max_num_seqs=9
    ) as engine:
        outputs = engine.generate([prompt for prompt, _ in everyone], [params for _, params in everyone])
    assert [answer(output) for output in outputs] == expected


def test_sliding_windows_and_long_contexts_are_invariant_too(tmp_path: Path) -> None:
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "sliding_window": 100,
        "rms_norm_eps": 1e-5,
    }
    folder = write_model(tmp_path / "mistral", config)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, 300, n).tolist() for n in (1200, 99, 100, 101, 640)]
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)
    with Engine(folder, kv_cache_memory="32MiB", num_threads=1) as engine:
        expected = [answer(engine.generate([prompt], params)[0]) for prompt in prompts]
    with Engine(folder, kv_cache_memory="32MiB", max_num_batched_tokens=130, max_num_seqs=8) as engine:
        outputs = engine.generate(prompts, params)
    assert [answer(output) for output in outputs] == expected


def test_asking_for_prompt_logprobs_does_not_change_the_answer_and_chunks_do_not_change_them(
    model_folder: Path,
) -> None:
    prompt = [(13 * i) % 300 + 2 for i in range(50)]
    plain = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2)
    with_prompt = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=2)
    with Engine(model_folder, kv_cache_memory="16MiB") as engine:
        expected = engine.generate([prompt], plain)[0]
        whole = engine.generate([prompt], with_prompt)[0]
    with Engine(model_folder, kv_cache_memory="16MiB", max_num_batched_tokens=7, max_num_seqs=4) as engine:
        chunked = engine.generate([prompt, prompt[:20]], with_prompt)[0]
    assert answer(whole) == answer(chunked) == answer(expected)
    assert whole.prompt_logprobs == chunked.prompt_logprobs
    assert whole.prompt_logprobs is not None
    assert whole.prompt_logprobs[0] is None
    assert [entry.token_id for entry in whole.prompt_logprobs[1:] if entry is not None] == prompt[1:]
