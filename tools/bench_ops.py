"""Times the CPU GEMM on cold weights and prints it beside the machine's own ceilings; not a benchmark of the engine.

    python tools/bench_ops.py                          # shapes of SmolLM2-135M, bf16, all threads
    python tools/bench_ops.py --shapes 6912x2560 --rows 1,64,256 --dtype f32 --isa avx2 --threads 1

`limit` is the time that arithmetic at the measured peak or reading the weights at the measured bandwidth takes, the
larger of the two; `share` is limit over the best measured time. Both ceilings (`peak` in GFLOP/s, `read` in GB/s) are
measured anew before each line and the highest so far counts, since other programs on the machine disturb them.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from pyengine import _cpu

ops = _cpu.ops
SMOLLM2_SHAPES = "960x576,576x576,3072x576,576x1536,49152x576"
COLD_BYTES = 256 << 20  # copies of a weight used in turn: more than any cache holds
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
NUMPY_DTYPE = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def aligned_bytes(size: int) -> np.ndarray:
    """Zeroed bytes that begin at a multiple of 64."""
    buffer = np.zeros(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size]


def as_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    """x in a storage type; for bf16 the upper half of each float32."""
    return (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else x.astype(NUMPY_DTYPE[dtype])


def time_gemm(context: _cpu.Context, dtype: str, n: int, k: int, rows: int, seconds: float) -> float:
    """Best seconds of one call, each on weights that are not in any cache."""
    rng = np.random.default_rng(0)
    size = ops.packed_weight_bytes(dtype, n, k)
    copies = max(2, min(400, COLD_BYTES // size))
    pool = aligned_bytes(copies * size)
    weights = [pool[i * size : (i + 1) * size] for i in range(copies)]
    ops.pack_weight(context, as_dtype(rng.standard_normal((n, k), np.float32), dtype), 0, n, k, weights[0])
    for weight in weights[1:]:
        weight[:] = weights[0]
    x = as_dtype(rng.standard_normal((rows, k), np.float32), context.activation_types(dtype)[1])
    y = np.empty((rows, n), np.float32)
    best, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while time.perf_counter() < end or calls < 5:
        weight = weights[calls % copies]
        start = time.perf_counter()
        ops.gemm(context, x, weight, dtype, n, None, y)
        best = min(best, time.perf_counter() - start)
        calls += 1
    return best


def parse_shapes(text: str) -> list[tuple[int, int]]:
    return [(int(n), int(k)) for n, k in (shape.split("x") for shape in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=parse_shapes, default=parse_shapes(SMOLLM2_SHAPES), metavar="NxK,...")
    parser.add_argument("--rows", type=lambda s: [int(m) for m in s.split(",")], default=[1, 4, 8, 16, 32, 64, 256])
    parser.add_argument("--dtype", choices=sorted(ITEM_BYTES), default="bf16")
    parser.add_argument("--isa", choices=ops.supported_isas(), default=None)
    parser.add_argument("--threads", type=int, default=0, help="0: all processors")
    parser.add_argument("--seconds", type=float, default=0.2, help="per measurement")
    args = parser.parse_args()

    context = _cpu.Context(args.threads, args.isa)
    cold = aligned_bytes(COLD_BYTES)
    cold[:] = 1
    print(f"{context.description}; weights {args.dtype}")
    titles = ("N x K", "rows", "ms", "GFLOP/s", "GB/s", "limit ms", "share", "peak", "read")
    print(" ".join(f"{title:>{width}}" for title, width in zip(titles, (12, 5, 8, 8, 6, 8, 6, 8, 6), strict=True)))
    peak = bandwidth = 0.0
    for n, k in args.shapes:
        for rows in args.rows:
            peak = max(peak, ops.measure_multiply(context, args.dtype, args.seconds))
            bandwidth = max(bandwidth, ops.measure_read(context, cold, args.seconds))
            best = time_gemm(context, args.dtype, n, k, rows, args.seconds)
            flops, size = 2.0 * rows * n * k, n * k * ITEM_BYTES[args.dtype]
            limit = max(flops / peak, size / bandwidth)
            print(
                f"{f'{n} x {k}':>12} {rows:>5} {best * 1e3:8.3f} {flops / best / 1e9:8.1f} {size / best / 1e9:6.1f} "
                f"{limit * 1e3:8.3f} {limit / best:6.1%} {peak / 1e9:8.1f} {bandwidth / 1e9:6.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
