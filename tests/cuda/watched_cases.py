"""Small cases of every kernel of the CUDA backend, for a run under a sanitizer: test_sanitizers.py starts this file.

    python -m tests.simt.watched thread -m tests.cuda.watched_cases norm attention

They are tests of the ops, called as functions: results are compared too. Arrays end where their memory ends, so that
AddressSanitizer sees the first byte behind them.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simt.build import simt_module

from . import device_ops
from .device_ops import NUMPY_DTYPE, Device, HostArray

LIBC = ctypes.CDLL(None)
ORDERS = ("forward", "reverse", "7")


def exact_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """An allocation of its own that begins where the bindings want a weight to and ends with its last byte."""
    address = ctypes.c_void_p()
    if LIBC.posix_memalign(ctypes.byref(address), 64, max(1, num_bytes)):
        raise MemoryError
    memory = (ctypes.c_uint8 * num_bytes).from_address(address.value)
    weakref.finalize(memory, LIBC.free, address)
    return np.frombuffer(memory, np.uint8)


class ExactDevice(Device):
    """A device whose arrays have memory of exactly their size."""

    def to_device(self, array: NDArray[Any]) -> HostArray:
        copy = exact_bytes(array.nbytes).view(array.dtype).reshape(array.shape)
        copy[...] = array
        return HostArray(copy)


class Exact:
    """What Guarded is, without anything around: an array in memory of its own. Not `aligned`: at an odd element."""

    def __init__(
        self,
        device: Device,
        shape: tuple[int, ...],
        dtype: str,
        values: NDArray[Any] | None = None,
        *,
        aligned: bool = True,
    ) -> None:
        before = 0 if aligned else 1
        items = np.full(before + int(np.prod(shape)), 0, NUMPY_DTYPE[dtype])
        items.view(np.uint8)[...] = device_ops.CANARY
        if values is not None:
            items[before:] = values.reshape(-1)
        self.array = device.to_device(items)[before:].reshape(*shape)

    def get(self) -> NDArray[Any]:
        return self.array.get()

    def check(self) -> None:
        """Whatever lies around the array is the sanitizer's."""


device_ops.Guarded = Exact  # type: ignore[misc]  # before the tests are imported

from tests.ops.reference_attention import Heads  # noqa: E402
from tests.ops.reference_gemm import random_layer  # noqa: E402
from tests.ops.reference_sampling import Row, random_logits, random_row  # noqa: E402

from . import (  # noqa: E402
    test_activation,
    test_attention,
    test_copy_blocks,
    test_embed,
    test_gather,
    test_gemm,
    test_norm,
    test_rope_and_store,
    test_sampling,
)


def norm(device: Device) -> None:
    for dtype in ("bf16", "f32"):
        for cols, aligned in ((7, True), (260, True), (260, False), (4100, True)):
            test_norm.test_norm_agrees_with_the_cpu(device, dtype, cols, aligned, True)


def elements(device: Device) -> None:
    """The ops that go over elements, and read_matrix."""
    for dtype in ("f16", "f32"):
        for aligned in (True, False):
            for cols in (7, 264):
                test_activation.test_activation_agrees_with_the_cpu(device, dtype, "silu", 3, cols, aligned)
                test_gather.test_gather_copies_the_chosen_rows(device, dtype, cols, 5, aligned)
                test_embed.test_rows_are_those_of_the_cpu_bit_by_bit(device, dtype, 9, cols, aligned)
            values = np.arange(15, dtype=NUMPY_DTYPE[dtype]).reshape(3, 5)
            read = device.ops.read_matrix(device.context(), Exact(device, (3, 5), dtype, values, aligned=aligned).array)
            np.testing.assert_array_equal(read, values.astype(np.float32))
    test_embed.test_ids_below_zero_stand_for_those_of_the_step_before(device)


def rope(device: Device) -> None:
    for dtype in ("bf16", "f32"):
        for head_dim, rotary_dim, aligned in ((64, 64, True), (80, 32, True), (40, 16, True), (18, 10, False)):
            case = test_rope_and_store.random_case(
                Heads(4, 2, head_dim), rotary_dim, dtype, tokens=5, norms=(True, True)
            )
            test_rope_and_store.check(device, case, aligned=aligned)


def copies(device: Device) -> None:
    for pairs in test_copy_blocks.CHAINS.values():
        test_copy_blocks.check(device, "bf16", (3, 16, 16), 7, np.array(pairs, np.int32).reshape(-1, 2))
    test_copy_blocks.check(device, "bf16", (1, 3, 1), 7, np.array([[0, 5], [5, 2]], np.int32), aligned=False)


def attention(device: Device) -> None:
    """Prompt tiles, split and merged decode rows, fp32; the widest head, windows, more items than blocks."""
    for dtype in ("bf16", "f32"):
        test_attention.test_chunks_and_decode_rows_of_one_batch_agree_with_the_cpu(device, dtype, False)
    test_attention.test_chunks_and_decode_rows_of_one_batch_agree_with_the_cpu(device, "f16", True)
    test_attention.test_every_head_size_agrees_with_the_cpu(device, "bf16", 256)
    test_attention.test_a_sliding_window_sees_only_its_keys(device, 17, False)
    test_attention.test_rows_at_odd_addresses_have_the_same_bits(device, "f16")
    test_attention.test_more_sequences_than_blocks_find_their_own_keys(device)


def products(device: Device) -> None:
    """All tiles of our own kernel, fp32, the rounded bias that the library wants."""
    for dtype, y_dtype in test_gemm.TYPES:
        for path in ("own", "library"):
            context = test_gemm.context_for(device, path)
            for m, n, k in ((2, 33, 70), (17, 65, 200), (65, 7, 33), (129, 130, 136)):
                rng = np.random.default_rng(m)
                layer = random_layer(rng, dtype, n, k)
                product = test_gemm.Product.make(device, context, layer, y_dtype)
                x = test_gemm.random_input(rng, m, layer)
                results = [product(x, aligned, aligned) for aligned in (True, False)]
                assert np.array_equal(*map(test_gemm.bits, results)) or path == "library"


def sampling(device: Device) -> None:
    """Short lists, long ones that are sorted by the whole block, histograms by bins and by digits, kept raw logits."""
    rng = np.random.default_rng(1)
    for vocab, aligned in ((33, True), (1025, False)):
        rows = [random_row(rng, vocab) for _ in range(8)]
        test_sampling.check(device, random_logits(rng, len(rows), vocab), rows, aligned=aligned)
    vocab = test_sampling.LISTED + 300
    rows = test_sampling.settings_of_all_passes(vocab)
    test_sampling.check(device, random_logits(rng, len(rows), vocab), rows)
    flat = np.full((1, vocab), 2.0, np.float32)
    flat[:, ::2] = np.nextafter(np.float32(2), np.float32(3))
    test_sampling.check(device, flat, [Row(top_p=0.9, seed=2)])
    test_sampling.test_rows_whose_raw_logits_are_kept_take_turns(device)


CASES: dict[str, Callable[[Device], None]] = {
    case.__name__: case for case in (norm, elements, rope, copies, attention, products, sampling)
}


def main() -> None:
    native = simt_module()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--order", action="append", help="of threads (default: forward, reverse and random)")
    arguments = parser.parse_args()
    for name in arguments.cases or CASES:
        for order in arguments.order or ORDERS:
            os.environ["SIMT_ORDER"] = order
            CASES[name](ExactDevice(f"simt-{order}", native))
        print(f"{name}: done", flush=True)


if __name__ == "__main__":
    main()
