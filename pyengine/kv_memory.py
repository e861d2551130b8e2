"""How large the KV pool is: from the user's `kv_cache_memory` to a number of blocks."""

from __future__ import annotations

import re

from pyengine.backends.base import Backend, StepLimits
from pyengine.config import SchedulerConfig
from pyengine.errors import InvalidRequest

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?b|b?)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "1GiB", "512 MB" or "1000000". Raises InvalidRequest."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            f"kv_cache_memory is {text!r}; write a number with B, KB, MB, GB, KiB, MiB or GiB, for example '1GiB'.",
            field="kv_cache_memory",
            value=text,
        )
    unit = match[2].lower()
    return int(float(match[1]) * _UNITS["" if unit == "b" else unit])


def plan_kv_blocks(
    kv_cache_memory: int | float | str, backend: Backend, settings: SchedulerConfig, *, max_context: int
) -> StepLimits:
    """The limits of a step with as many KV blocks as the memory allows; never more than every seat could use.

    Raises InvalidRequest naming what is needed and what is free when not one block fits, or when more is asked for than
    there is.
    """
    block_bytes = backend.kv_block_bytes(settings.block_size)

    def limits(num_blocks: int) -> StepLimits:
        return StepLimits(
            max_tokens=settings.max_num_batched_tokens,
            max_seqs=settings.max_num_seqs,
            max_context=min(max_context, num_blocks * settings.block_size),
            block_size=settings.block_size,
            num_blocks=num_blocks,
        )

    blocks_of_context = -(-max_context // settings.block_size)
    most_blocks = settings.max_num_seqs * blocks_of_context
    free = backend.free_memory() - backend.workspace_bytes(limits(blocks_of_context))
    if free < block_bytes:
        raise InvalidRequest(
            f"max_num_batched_tokens is {settings.max_num_batched_tokens}: beside the weights, its workspaces need "
            f"{backend.workspace_bytes(limits(blocks_of_context)):,} bytes and one KV block {block_bytes:,}; "
            f"{max(backend.free_memory(), 0):,} bytes are free. Lower it or max_num_seqs.",
            field="max_num_batched_tokens",
            value=settings.max_num_batched_tokens,
            limit=backend.free_memory(),
        )
    wanted = backend.auto_kv_bytes(free) if kv_cache_memory == "auto" else _wanted_bytes(kv_cache_memory, free)
    wanted = min(wanted, most_blocks * block_bytes)
    if wanted > free:
        raise InvalidRequest(
            f"kv_cache_memory is {kv_cache_memory!r}, {wanted:,} bytes, but {max(free, 0):,} bytes are free after "
            "weights and workspaces; lower it, max_num_batched_tokens or max_context.",
            field="kv_cache_memory",
            value=kv_cache_memory,
            limit=max(free, 0),
        )
    num_blocks = min(wanted // block_bytes, most_blocks)
    if num_blocks < 1:
        raise InvalidRequest(
            f"kv_cache_memory is {kv_cache_memory!r}, {wanted:,} bytes; one KV block of {settings.block_size} tokens "
            f"needs {block_bytes:,} bytes.",
            field="kv_cache_memory",
            value=kv_cache_memory,
            limit=block_bytes,
        )
    return limits(num_blocks)


def check_kv_cache_memory(kv_cache_memory: int | float | str) -> None:
    """Raise InvalidRequest for a value that means nothing, before a model is loaded for it."""
    if kv_cache_memory != "auto":
        _wanted_bytes(kv_cache_memory, 0)


def _wanted_bytes(kv_cache_memory: int | float | str, free: int) -> int:
    if isinstance(kv_cache_memory, str):
        return parse_bytes(kv_cache_memory)
    if isinstance(kv_cache_memory, float) and 0.0 < kv_cache_memory < 1.0:
        return int(kv_cache_memory * max(free, 0))
    if isinstance(kv_cache_memory, int) and not isinstance(kv_cache_memory, bool) and kv_cache_memory > 0:
        return kv_cache_memory
    raise InvalidRequest(
        f"kv_cache_memory is {kv_cache_memory!r}; give bytes as a positive integer, a string such as '1GiB', a "
        "fraction of the free memory as a float between 0 and 1, or 'auto'.",
        field="kv_cache_memory",
        value=kv_cache_memory,
    )
