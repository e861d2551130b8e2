"""Rows of an embedding table read out of its packed form."""

from __future__ import annotations

import numpy as np
import pytest

from .reference_attention import make_context
from .reference_gemm import DTYPES, ops, pack, random_layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), ((1, 1), (33, 7), (100, 64), (64, 577)))
def test_a_row_of_the_packed_table_equals_the_stored_row_bit_by_bit(isa: str, dtype: str, n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    context = make_context(isa, 2)
    table = random_layer(rng, dtype, n, k)
    ids = rng.integers(0, n, 50).astype(np.int32)
    guarded = np.full((52, k + 5), np.nan, np.float32)
    out = guarded[1:51, 2 : 2 + k]
    ops.embed(context, pack(context, table), dtype, n, ids, out)
    assert np.array_equal(out.copy().view(np.uint32), table.values[ids].view(np.uint32))
    out[:] = np.nan
    assert np.isnan(guarded).all()


@pytest.mark.parametrize("dtype", ("f16", "bf16"))
def test_every_finite_number_of_the_type_survives(isa: str, dtype: str) -> None:
    context = make_context(isa, 1)
    every = np.arange(65536, dtype=np.uint16)
    values = every.view(np.float16).astype(np.float32) if dtype == "f16" else (every.astype(np.uint32) << 16).view("f4")
    finite = every[np.isfinite(values)]
    stored = finite[: len(finite) // 64 * 64].reshape(64, -1)
    stored = stored.view(np.float16) if dtype == "f16" else stored
    layer = random_layer(np.random.default_rng(0), dtype, *stored.shape)
    layer = type(layer)(dtype, stored, values[np.isfinite(values)][: stored.size].reshape(stored.shape), None)
    out = np.empty(stored.shape, np.float32)
    ops.embed(context, pack(context, layer), dtype, 64, np.arange(64, dtype=np.int32), out)
    assert np.array_equal(out.view(np.uint32), layer.values.view(np.uint32))


@pytest.mark.parametrize("bad", (-1, 64))
def test_an_id_outside_the_table_is_refused(bad: int) -> None:
    context = make_context(ops.supported_isas()[0], 1)
    table = random_layer(np.random.default_rng(0), "f32", 64, 4)
    with pytest.raises(ValueError, match="token_ids"):
        ops.embed(context, pack(context, table), "f32", 64, np.array([bad], np.int32), np.empty((1, 4), np.float32))
