"""How well the real engine keeps an inter-token limit: decodes that run while long prompts arrive.

    python tools/itl_coverage.py [--model NAME] [--limits 2 4 8] [--seconds 20]

The limits are multiples of a measured step with all decodes and no prompt. For each one, a fresh engine keeps 8
requests decoding and 2 long prompts on their way, and counts the steps with decodes that took longer than the limit
(schedule to commit, as the scheduler sees it), and the gaps between tokens that the requests themselves saw.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise
from statistics import median

from pyengine import Engine, SamplingParams

NUM_DECODES = 8
NUM_PROMPTS = 2


def decode_step_ms(model: str | None) -> float:
    """Median gap between two tokens with NUM_DECODES decodes and nothing else."""
    with Engine(model, max_num_seqs=16) as engine:
        params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        outputs = engine.generate([[i + 5] * 32 for i in range(NUM_DECODES)], params)
        gaps = [b - a for output in outputs for a, b in pairwise(output.metrics.token_times_s[0])]
        return median(gaps) * 1e3


def run(model: str | None, limit_ms: float, seconds: float) -> tuple[int, int, int, int, float]:
    """(steps with decodes, of these over the limit, gaps, gaps over the limit, prompt tokens a second)."""
    with Engine(model, max_num_seqs=16, itl_limit_ms=limit_ms, prefix_caching=False) as engine:
        context = engine.limits.max_context
        decoding = SamplingParams(max_tokens=min(200, context // 2), temperature=0.0, ignore_eos=True)
        single = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        number = prompt_tokens = gaps = late_gaps = 0
        live: dict[str, bool] = {}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            while sum(live.values()) < NUM_DECODES:
                number += 1
                live[engine.submit([number % 200 + 5] * 32, decoding)] = True
            while len(live) - sum(live.values()) < NUM_PROMPTS:
                number += 1
                length = min(context * 3 // 4, 1500)
                live[engine.submit([number % 200 + 5] * length, single)] = False
                prompt_tokens += length
            for event in engine.step():
                if event.output is not None:
                    del live[event.request_id]
                    times = event.output.metrics.token_times_s[0]
                    between = [(b - a) * 1e3 for a, b in pairwise(times)]
                    gaps += len(between)
                    late_gaps += sum(gap > limit_ms for gap in between)
        rows = list(engine._scheduler.log.steps.rows("decodes", "real_ns"))
        took = [ns / 1e6 for decodes, ns in rows if decodes]
        return len(took), sum(ms > limit_ms for ms in took), gaps, late_gaps, prompt_tokens / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as Engine takes it; default: the built-in one")
    parser.add_argument("--limits", type=float, nargs="+", default=[2, 4, 8], help="in multiples of a decode step")
    parser.add_argument("--seconds", type=float, default=20, help="for each limit")
    args = parser.parse_args()
    base_ms = decode_step_ms(args.model)
    print(f"a step with {NUM_DECODES} decodes and no prompt takes {base_ms:.2f} ms")
    print(f"{'limit ms':>10} {'steps':>8} {'within':>8} {'gaps':>8} {'within':>8} {'prompt tokens/s':>16}")
    for factor in args.limits:
        steps, late, gaps, late_gaps, rate = run(args.model, factor * base_ms, args.seconds)
        print(
            f"{factor * base_ms:>10.2f} {steps:>8} {1 - late / max(steps, 1):>8.1%} {gaps:>8} "
            f"{1 - late_gaps / max(gaps, 1):>8.1%} {rate:>16.0f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
