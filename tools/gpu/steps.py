"""Whole passes of an engine's backend: how much of the bandwidth or GEMM rate a decode step and a prompt reach."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from pyengine import Engine, SamplingParams
from pyengine.backends.step_inputs import LogitsRow, SequenceChunk, StepInputs
from pyengine.sampling_row import SamplingRow

sys.path.insert(0, str(Path(__file__).parents[1]))
import roofline

GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
STEPS = 40


def roofline_model(config: dict[str, Any]) -> roofline.Model:
    """What tools/roofline.py counts with, from a config.json."""
    heads = config["num_attention_heads"]
    return roofline.Model(
        "",
        config["vocab_size"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
        heads,
        config["num_key_value_heads"],
        config.get("head_dim") or config["hidden_size"] // heads,
    )


class Passes:
    """Passes over made-up sequences, given to the backend of an idle engine."""

    def __init__(self, engine: Engine, config: dict[str, Any]) -> None:
        self.backend, self.limits = engine.model.backend, engine.limits
        self.inputs = StepInputs(self.limits.block_size)
        self.model = roofline_model(config)
        self.row = SamplingRow(GREEDY.with_defaults({}), 0, (), ())
        self.numbers = np.random.default_rng(0)

    def fits(self, batch: int, context: int) -> bool:
        blocks = batch * -(-context // self.limits.block_size)
        limits = self.limits
        return blocks <= limits.num_blocks and batch <= limits.max_seqs and context <= limits.max_context

    def tables(self, batch: int, context: int) -> list[list[int]]:
        width = -(-context // self.limits.block_size)
        blocks = self.numbers.permutation(self.limits.num_blocks)[: batch * width]
        return blocks.reshape(batch, width).tolist()

    def written(self, tables: list[list[int]], start: int, count: int) -> tuple[Any, int]:
        """A step in which each sequence computes `count` tokens from `start` on and samples one; its result's words."""
        token_ids = self.numbers.integers(0, self.model.vocab, count).tolist()
        chunks = [SequenceChunk(token_ids, start, table) for table in tables]
        rows = [LogitsRow((i + 1) * count - 1, self.row, start + count) for i in range(len(tables))]
        staging, result = self.inputs.write(chunks, rows)
        return staging, result.size

    def decode_seconds(self, batch: int, context: int) -> float:
        """Seconds of one step, launched one behind the other so that the device is never idle."""
        tables = self.tables(batch, context)
        staging, words = self.written(tables, context - 1, 1)
        staging = staging.copy()

        def run(steps: int) -> float:
            begin = time.perf_counter()
            last = self.backend.launch(staging, words, uses_previous=False)
            for _ in range(steps - 1):
                following = self.backend.launch(staging, words, uses_previous=False)
                last.wait()
                last = following
            last.wait()
            return time.perf_counter() - begin

        run(3)
        return statistics.median(run(STEPS) / STEPS for _ in range(3))

    def prompt_seconds(self, tokens: int) -> float:
        staging, words = self.written(self.tables(1, tokens), 0, tokens)
        staging = staging.copy()
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            self.backend.launch(staging, words, uses_previous=False).wait()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    def decode(self, batches: list[int], contexts: list[int], copy_bytes_per_s: float) -> list[dict[str, Any]]:
        """Each combination that fits: time, and the part of the copy bandwidth that what must be read amounts to."""
        found = []
        for batch in batches:
            for context in contexts:
                if not self.fits(batch, context):
                    continue
                costs = roofline.costs(self.model, roofline.Step("", batch, 1, context))
                moved = sum(cost.bytes for cost in costs)
                seconds = self.decode_seconds(batch, context)
                found.append(
                    {
                        "batch": batch,
                        "context": context,
                        "seconds": seconds,
                        "bytes": moved,
                        "share_of_copy_bandwidth": moved / seconds / copy_bytes_per_s,
                    }
                )
        return found

    def prompt(self, lengths: list[int], gemm_flops_per_s: float) -> list[dict[str, Any]]:
        """Prompts in one pass: time, and the part of the GEMM rate that what must be computed amounts to."""
        found = []
        for tokens in lengths:
            if tokens > min(self.limits.max_tokens, self.limits.max_context):
                continue
            costs = roofline.costs(self.model, roofline.Step("", 1, tokens, tokens))
            flops = sum(cost.flops for cost in costs)
            seconds = self.prompt_seconds(tokens)
            share = flops / seconds / gemm_flops_per_s
            found.append({"tokens": tokens, "seconds": seconds, "flops": flops, "share_of_gemm_rate": share})
        return found


def overlap(engines: dict[bool, Engine], prompt: list[int], batch: int, tokens: int) -> dict[str, Any]:
    """Decode steps of an engine with and without overlap, and what the device does of that time."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=tokens, ignore_eos=True)
    found: dict[str, Any] = {}
    for overlaps, engine in engines.items():
        engine.generate([prompt] * batch, params)
        begin, steps = time.perf_counter(), engine.stats().num_steps
        engine.generate([prompt] * batch, params)
        seconds = time.perf_counter() - begin
        found["with" if overlaps else "without"] = {
            "seconds_per_step": seconds / (engine.stats().num_steps - steps),
            "tokens_per_s": batch * tokens / seconds,
        }
    return found
