"""The whole decoder on the device, on tiny random models: against the CPU backend, and a row's bits in any company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pyengine import _cpu
from pyengine.backends.step_inputs import LogitsRow, SequenceChunk, StepInputs
from pyengine.sampling_params import SamplingParams
from pyengine.sampling_row import SamplingRow
from tests.ops.reference_attention import ISAS, bits, rope_tables, to_dtype

from .device_ops import CANARY, Device, aligned_empty

NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
# Of one rounding. In fp32 that of a result is small beside those of its sum, here of some 100 products: they add like
# steps in no common direction, to the root of that.
UNIT_ROUNDOFF = {"f32": 10 * 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS, POSITIONS = 16, 16, 48, 96
GREEDY = SamplingRow(SamplingParams(temperature=0.0).with_defaults({}), 0, (), ())


@dataclass(frozen=True)
class Model:
    """A decoder's shape, and which parts it has."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rotary_dim: int = 32
    hidden_size: int = 64
    intermediate_size: int = 96
    vocab_size: int = 70
    windows: tuple[int, ...] = (0, 0)
    activation: str = "silu"
    has_biases: bool = False
    has_head_norms: bool = False
    is_tied: bool = False

    def config(self, dtype: str) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "dtype": NAMES[dtype],
            "norm_eps": 1e-5,
            "activation": self.activation,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rotary_dim": self.rotary_dim,
            "attention_scale": self.head_dim**-0.5,
            "sliding_windows": list(self.windows),
            "block_size": BLOCK_SIZE,
            "rope_positions": POSITIONS,
            "max_tokens": MAX_TOKENS,
            "max_seqs": 4,
            "max_rows": MAX_TOKENS,
            "max_context_len": POSITIONS,
            "mlp_rows": 20,  # so that a step's MLP is computed in parts
            "logits_rows": 7,  # and so are its logits
        }

    def tensors(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Weights [n, k] that neither grow nor shrink what they multiply, and vectors and tables; all fp32."""
        rng = np.random.default_rng(self.head_dim)
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        weights, vectors = {}, {}

        def add(name: str, n: int, k: int, has_bias: bool = False) -> None:
            weights[name] = rng.standard_normal((n, k)) / np.sqrt(k)
            if has_bias:
                vectors[f"{name}_bias"] = rng.standard_normal(n) / 2

        def add_norm(name: str, n: int) -> None:
            vectors[name] = 1 + rng.standard_normal(n) / 4

        add("embedding", self.vocab_size, self.hidden_size)
        weights["embedding"] *= 4
        add("head", self.vocab_size, self.hidden_size)
        if self.is_tied:
            weights["head"] = weights["embedding"]
        add_norm("final_norm", self.hidden_size)
        for n in range(len(self.windows)):
            layer = f"layers.{n}."
            add_norm(f"{layer}attention_norm", self.hidden_size)
            add_norm(f"{layer}mlp_norm", self.hidden_size)
            if self.has_head_norms:
                add_norm(f"{layer}q_norm", self.head_dim)
                add_norm(f"{layer}k_norm", self.head_dim)
            add(f"{layer}qkv", q + 2 * kv, self.hidden_size, self.has_biases)
            add(f"{layer}o", self.hidden_size, q, self.has_biases)
            add(f"{layer}gate_up", 2 * self.intermediate_size, self.hidden_size, self.has_biases)
            add(f"{layer}down", self.hidden_size, self.intermediate_size, self.has_biases)
        vectors["rope_cos"], vectors["rope_sin"] = rope_tables(POSITIONS, self.rotary_dim)
        return weights, {name: np.ascontiguousarray(x, np.float32) for name, x in vectors.items()}


MODELS = {
    "plain": Model(num_kv_heads=4),
    "grouped heads": Model(num_heads=6),
    "one kv head": Model(num_heads=8, num_kv_heads=1),
    "norms of heads": Model(has_head_norms=True),
    "biases": Model(has_biases=True),
    "sliding window": Model(windows=(5, 0, 17)),
    "tied head": Model(is_tied=True, activation="gelu_tanh"),
    "rotated in part": Model(head_dim=64, rotary_dim=32, num_heads=2, num_kv_heads=1),
    "odd sizes": Model(head_dim=80, rotary_dim=20, hidden_size=52, intermediate_size=75, num_heads=2, num_kv_heads=1),
}


@dataclass
class Runner:
    """A decoder of one backend. `place` brings bytes of the host into its memory. Pages that were never written, the
    workspace and the scratch hold canaries, which are NaN."""

    native: ModuleType
    context: Any
    place: Callable[[np.ndarray], Any]
    model: Model
    dtype: str
    inputs: StepInputs = field(default_factory=lambda: StepInputs(BLOCK_SIZE))

    def __post_init__(self) -> None:
        config = self.model.config(self.dtype)
        weights, vectors = self.model.tensors()
        arrays = {name: self.place(vector) for name, vector in vectors.items()}
        for name, rows in weights.items():
            n, k = rows.shape
            arrays[name] = self.canaries(self.native.packed_weight_bytes(NAMES[self.dtype], n, k))
            stored = to_dtype(rows, self.dtype)
            self.native.pack_weight(self.context, stored, NAMES[self.dtype], 0, n, k, arrays[name])
        pages = self.canaries(self.native.kv_block_bytes(self.context, config) * NUM_BLOCKS * len(self.model.windows))
        workspace = self.canaries(self.native.workspace_bytes(self.context, config))
        scratch = self.canaries(self.native.scratch_bytes(self.context, config))
        self.native.bind_scratch(self.context, scratch)
        self.decoder = self.native.Decoder(self.context, config, arrays, pages, NUM_BLOCKS, workspace)

    def canaries(self, num_bytes: int) -> Any:
        return self.place(np.full(num_bytes, CANARY, np.uint8))

    def step(
        self, chunks: Sequence[SequenceChunk], *, copies: Sequence[tuple[int, int]] = ()
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Greedy ids [T], logits [T, vocab] and residual streams [layers + 1, T, hidden] of all tokens of a step."""
        positions = [c.start + i for c in chunks for i in range(len(c.token_ids))]
        rows = [LogitsRow(i, GREEDY, position + 1) for i, position in enumerate(positions)]
        staging, result = self.inputs.write(chunks, rows, copies)
        logits = np.full((len(rows), self.model.vocab_size), np.nan, np.float32)
        residuals = np.full((len(self.model.windows) + 1, len(rows), self.model.hidden_size), np.nan, np.float32)
        out = self.place(np.full(result.shape, -7, np.int32))
        self.decoder.step(staging, out, arrays=self.place(staging), logits=logits, residuals=residuals)
        ids = out.get() if hasattr(out, "get") else out
        return ids[: len(rows)].copy(), logits, residuals


def on_device(device: Device, model: Model, dtype: str, **context: bool) -> Runner:
    return Runner(device.module, device.context(**context), device.to_device, model, dtype)


def on_cpu(model: Model, dtype: str) -> Runner:
    def place(array: np.ndarray) -> np.ndarray:
        copy = aligned_empty(array.nbytes).view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    return Runner(_cpu, _cpu.Context(1, ISAS[-1], oversubscribe=True), place, model, dtype)


def random_tokens(model: Model, seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, model.vocab_size, count).tolist()


# Of three sequences, in no order: a context of one token more than two blocks, one of a token, one in the middle.
TABLES = ((9, 2, 14), (5, 11, 3), (0, 7, 12))


def chunk(tokens: Sequence[int], begin: int, end: int, sequence: int) -> SequenceChunk:
    return SequenceChunk(tokens[begin:end], begin, TABLES[sequence][: -(-end // BLOCK_SIZE)])


def mixed_steps(model: Model) -> list[list[SequenceChunk]]:
    """Prompts whole and in parts, decode steps, and both in one step."""
    a, b, c = (random_tokens(model, seed, count) for seed, count in ((1, 34), (2, 3), (3, 25)))
    return [
        [chunk(a, 0, 31, 0)],
        [chunk(a, 31, 32, 0), chunk(b, 0, 1, 1), chunk(c, 0, 17, 2)],
        [chunk(c, 17, 24, 2), chunk(a, 32, 33, 0), chunk(b, 1, 2, 1)],
        [chunk(b, 2, 3, 1), chunk(c, 24, 25, 2), chunk(a, 33, 34, 0)],
    ]


def assert_rows_agree(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    error = np.linalg.norm(actual - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert error.max() <= tolerance, f"rows are off by {error.max():.2g} of their length; {tolerance:.2g} is allowed"


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_residuals_agree_with_the_cpu(device: Device, name: str, dtype: str) -> None:
    """A layer rounds eight results on the way to its sum (and the CPU fewer of them). Each moves the row by less than a
    unit roundoff of its length, in no common direction: together by the root of eight, less than four."""
    model = MODELS[name]
    actual, expected = on_device(device, model, dtype), on_cpu(model, dtype)
    tolerance = 4 * len(model.windows) * UNIT_ROUNDOFF[dtype]
    for chunks in mixed_steps(model):
        ids, logits, residuals = actual.step(chunks)
        expected_ids, expected_logits, expected_residuals = expected.step(chunks)
        np.testing.assert_array_equal(bits(residuals[0]), bits(expected_residuals[0]))
        assert_rows_agree(residuals, expected_residuals, tolerance)
        assert_rows_agree(logits, expected_logits, tolerance)
        np.testing.assert_array_equal(ids, logits.argmax(axis=1))
        if dtype == "f32":
            np.testing.assert_array_equal(ids, expected_ids)


def test_a_sequence_goes_on_in_a_copied_block(device: Device) -> None:
    model = MODELS["grouped heads"]
    tokens = random_tokens(model, 1, 20)
    runner, forked = on_device(device, model, "bf16"), on_device(device, model, "bf16")
    runner.step([SequenceChunk(tokens[:19], 0, (4, 6))])
    forked.step([SequenceChunk(tokens[:19], 0, (4, 6))])
    expected = runner.step([SequenceChunk(tokens[19:], 19, (4, 6))])
    actual = forked.step([SequenceChunk(tokens[19:], 19, (4, 15))], copies=[(6, 15)])
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


def last_logits(runner: Runner, steps: Sequence[Sequence[SequenceChunk]], sequence: int) -> np.ndarray:
    """The logits of all tokens of one sequence, in order."""
    parts = []
    for chunks in steps:
        _, logits, _ = runner.step(chunks)
        at = 0
        for c in chunks:
            if c.block_table[0] == TABLES[sequence][0]:
                parts.append(logits[at : at + len(c.token_ids)])
            at += len(c.token_ids)
    return np.concatenate(parts)


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
@pytest.mark.parametrize("library", [True, False])
def test_deterministic_rows_have_the_same_bits_however_they_are_computed(
    device: Device, dtype: str, library: bool
) -> None:
    """Alone or in company; its prompt whole, in parts, or half of it token by token."""
    model = MODELS["sliding window"]
    a, b, c = (random_tokens(model, seed, 20) for seed in (1, 2, 3))
    ways = [
        [[chunk(a, 0, 20, 0)]],
        [[chunk(b, 0, 9, 1), chunk(a, 0, 11, 0)], [chunk(a, 11, 19, 0), chunk(b, 9, 10, 1)], [chunk(a, 19, 20, 0)]],
        [[chunk(c, 0, 14, 2), chunk(a, 0, 7, 0), chunk(b, 0, 20, 1)], [chunk(a, 7, 20, 0)]],
        [[chunk(a, 0, 13, 0)], *([chunk(a, i, i + 1, 0)] for i in range(13, 20))],
    ]
    results = [
        last_logits(on_device(device, model, dtype, deterministic=True, library=library), steps, 0) for steps in ways
    ]
    for result in results[1:]:
        np.testing.assert_array_equal(bits(result), bits(results[0]))


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
def test_decode_rows_have_the_same_bits_in_any_company(device: Device, dtype: str) -> None:
    """Without the library, whose products may depend on how many rows there are."""
    model = MODELS["grouped heads"]
    a, b, c = (random_tokens(model, seed, 34) for seed in (1, 2, 3))
    alone = [[chunk(a, 0, 30, 0)], *([chunk(a, i, i + 1, 0)] for i in range(30, 34))]
    company = [
        [chunk(a, 0, 30, 0)],
        [chunk(b, 0, 20, 1), chunk(a, 30, 31, 0)],
        [chunk(a, 31, 32, 0), chunk(b, 20, 21, 1), chunk(c, 0, 1, 2)],
        [chunk(c, 1, 34, 2), chunk(a, 32, 33, 0), chunk(b, 21, 22, 1)],
        [chunk(b, 22, 23, 1), chunk(a, 33, 34, 0)],
    ]
    expected = last_logits(on_device(device, model, dtype, library=False), alone, 0)
    actual = last_logits(on_device(device, model, dtype, library=False), company, 0)
    np.testing.assert_array_equal(bits(actual), bits(expected))
