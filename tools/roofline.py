"""Bytes, FLOPs and the time no kernel can beat: each operation of a step, on paper.

    tools/roofline.py                 print the tables
    tools/roofline.py --write         put them into docs/roofline.md, between its markers

Every operation of csrc/decoder.cpp is counted as it is called there: what it must read and write at least once
(weights, activations of two bytes, a residual stream and logits of four), and its multiplications and additions. The
limit is the larger of bytes / bandwidth and FLOPs / arithmetic rate, with the datasheet's dense bfloat16 figures. No
figure here was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyengine.simulate.profiles import GPU, GPUS

PAGE = Path(__file__).parents[1] / "docs" / "roofline.md"
BEGIN, END = "<!-- tools/roofline.py: begin -->", "<!-- end -->"
ACTIVATION, FLOAT = 2, 4  # bytes


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a decoder, as its config.json has them."""

    label: str
    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Step:
    """A pass over `sequences`, each with `new` tokens and `context` keys after it; one row of logits each."""

    label: str
    sequences: int
    new: int
    context: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.new


@dataclass(frozen=True, slots=True)
class Cost:
    """One operation of a step, summed over all layers: how often it is launched, bytes moved, floating-point work."""

    op: str
    launches: int
    bytes: float
    flops: float

    def limit_s(self, gpu: GPU) -> float:
        """The shortest time the datasheet allows."""
        return max(self.bytes / gpu.bandwidth, self.flops / gpu.arithmetic)

    def is_bound_by_memory(self, gpu: GPU) -> bool:
        return self.bytes / gpu.bandwidth >= self.flops / gpu.arithmetic


MODELS = (
    Model("Llama-3-8B", 128256, 4096, 14336, 32, 32, 8, 128),
    Model("Qwen3-0.6B", 151936, 1024, 3072, 28, 16, 8, 128),
)
STEPS = (
    Step("decode, batch 1, context 2,048", 1, 1, 2048),
    Step("decode, batch 64, context 2,048", 64, 1, 2048),
    Step("prompt of 2,048 tokens", 1, 2048, 2048),
)
GPU_NAMES = ("l4", "a100", "h100", "h200")


def matmul(op: str, launches: int, rows: int, n: int, k: int, out_bytes: int = ACTIVATION) -> Cost:
    """y [rows, n] = x [rows, k] W^T."""
    moved = ACTIVATION * (n * k + rows * k) + out_bytes * rows * n
    return Cost(op, launches, launches * moved, launches * 2 * rows * n * k)


def attention(model: Model, step: Step) -> Cost:
    """Keys and values are read once for all heads of a group, and once for each 64 / group query tokens of a prompt."""
    group = model.heads // model.kv_heads
    reads = max(1, -(-step.new * group // 64))
    # The mean context of a chunk's tokens: its last one sees all keys, its first one `new - 1` fewer.
    mean_context = step.context - (step.new - 1) / 2
    kv_bytes = 2 * ACTIVATION * model.kv * (step.context if step.new == 1 else mean_context * reads)
    moved = step.sequences * kv_bytes + 2 * ACTIVATION * step.tokens * model.q
    flops = 4 * step.tokens * model.q * mean_context
    return Cost("attention", model.layers, model.layers * moved, model.layers * flops)


def costs(model: Model, step: Step) -> list[Cost]:
    """All operations of one pass; after the last attention only the rows of logits go on."""
    t, r, layers, h = step.tokens, step.sequences, model.layers, model.hidden
    full = layers - 1  # layers whose second half runs over all tokens

    def per_row(op: str, launches: int, rows: int, num_bytes: int, flops: int = 0) -> Cost:
        return Cost(op, launches, launches * rows * num_bytes, launches * rows * flops)

    def both(first: Cost, second: Cost) -> Cost:
        return Cost(first.op, first.launches + second.launches, first.bytes + second.bytes, first.flops + second.flops)

    norm_bytes = h * (2 * FLOAT + 2 * ACTIVATION)  # residual in and out, delta in, result out
    qkv = model.q + 2 * model.kv
    return [
        per_row("embed", 1, t, h * (ACTIVATION + FLOAT)),
        both(
            per_row("add_rms_norm", layers + full, t, norm_bytes, 4 * h),
            per_row("add_rms_norm", 2, r, norm_bytes, 4 * h),
        ),
        matmul("gemm qkv", layers, t, qkv, h),
        per_row("rope_and_store", layers, t, 2 * ACTIVATION * qkv, 6 * (model.q + model.kv)),
        attention(model, step),
        both(matmul("gemm o", full, t, h, model.q), matmul("gemm o", 1, r, h, model.q)),
        both(matmul("gemm gate, up", full, t, 2 * model.inner, h), matmul("gemm gate, up", 1, r, 2 * model.inner, h)),
        both(
            per_row("gated_activation", full, t, 3 * ACTIVATION * model.inner, 5 * model.inner),
            per_row("gated_activation", 1, r, 3 * ACTIVATION * model.inner, 5 * model.inner),
        ),
        both(matmul("gemm down", full, t, h, model.inner), matmul("gemm down", 1, r, h, model.inner)),
        matmul("gemm head", 1, r, model.vocab, h, FLOAT),
        per_row("sample", 1, r, FLOAT * model.vocab, 4 * model.vocab),
    ]


def table(model: Model, step: Step) -> Iterator[str]:
    """Each operation: bytes, FLOPs, and its part of the step's limit on each GPU."""
    gpus = [GPUS[name] for name in GPU_NAMES]
    rows = costs(model, step)
    yield f"### {model.label}, {step.label}"
    yield ""
    yield "| operation | launches | MB | GFLOP | " + " | ".join(gpu.label for gpu in gpus) + " |"
    yield "|---|---:|---:|---:|" + "---:|" * len(gpus)
    totals = {gpu.label: sum(cost.limit_s(gpu) for cost in rows) for gpu in gpus}
    for cost in rows:
        cells = []
        for gpu in gpus:
            by = "memory" if cost.is_bound_by_memory(gpu) else "arithmetic"
            cells.append(f"{cost.limit_s(gpu) / totals[gpu.label]:.1%} {by}")
        yield _row(cost.op, cost.launches, cost.bytes, cost.flops, cells)
    limits = [f"**{totals[gpu.label] * 1e3:,.2f} ms**" for gpu in gpus]
    launches, moved, flops = (sum(getattr(cost, name) for cost in rows) for name in ("launches", "bytes", "flops"))
    yield _row("limit of the step", launches, moved, flops, limits)
    rates = " | ".join(f"{step.tokens / totals[gpu.label]:,.0f}" for gpu in gpus)
    yield f"| tokens/s at the limit | | | | {rates} |"
    yield ""


def _row(name: str, launches: int, num_bytes: float, flops: float, cells: list[str]) -> str:
    return f"| {name} | {launches} | {num_bytes / 1e6:,.1f} | {flops / 1e9:,.2f} | {' | '.join(cells)} |"


def text() -> str:
    """All tables."""
    return "\n".join(line for model in MODELS for step in STEPS for line in table(model, step)).rstrip() + "\n"


def page_with(tables: str) -> str:
    """docs/roofline.md with `tables` between its markers."""
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/roofline.md")
    if parser.parse_args().write:
        PAGE.write_text(page_with(text()))
    else:
        print(text(), end="")


if __name__ == "__main__":
    main()
