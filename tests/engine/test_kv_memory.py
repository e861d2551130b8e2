"""How large the KV pool becomes for each way to say it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pyengine import InvalidRequest
from pyengine.backends.base import StepLimits
from pyengine.config import SchedulerConfig
from pyengine.kv_memory import parse_bytes, plan_kv_blocks

MIB = 2**20
SETTINGS = SchedulerConfig(num_blocks=1, max_context=2, max_num_seqs=4, max_num_batched_tokens=64)


@dataclasses.dataclass
class Machine:
    """A backend with a megabyte a block, 100 MiB of workspaces and so much free memory, of which "auto" takes 3/4."""

    free: int

    def kv_block_bytes(self, block_size: int) -> int:
        return MIB * block_size // 16

    def free_memory(self) -> int:
        return self.free

    def auto_kv_bytes(self, free: int) -> int:
        return 3 * free // 4

    def workspace_bytes(self, limits: StepLimits) -> int:
        return 100 * MIB


def blocks(kv_cache_memory: Any, *, free: int = 1000 * MIB, max_context: int = 100_000) -> int:
    machine: Any = Machine(free)
    return plan_kv_blocks(kv_cache_memory, machine, SETTINGS, max_context=max_context).num_blocks


def test_bytes_strings_and_fractions_say_how_many_blocks_there_are() -> None:
    assert blocks(64 * MIB) == 64
    assert blocks(64 * MIB + MIB // 2) == 64
    assert blocks("64MiB") == 64
    assert blocks(0.5) == 450  # of what the workspaces leave


def test_auto_is_what_the_backend_makes_of_what_the_workspaces_leave() -> None:
    assert blocks("auto") == 675


def test_no_pool_is_larger_than_all_seats_can_use() -> None:
    assert blocks("auto", max_context=64) == 4 * 4
    assert blocks("900000GiB", max_context=64) == 4 * 4
    assert blocks(0.9, max_context=65) == 4 * 5


def test_more_than_is_free_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequest) as refused:
        blocks("2GiB")
    assert refused.value.field == "kv_cache_memory"
    assert "2,147,483,648" in str(refused.value)
    assert f"{900 * MIB:,}" in str(refused.value)


def test_less_than_a_block_is_refused_and_so_is_a_machine_without_room_for_the_workspaces() -> None:
    with pytest.raises(InvalidRequest, match="one KV block of 16 tokens"):
        blocks(MIB - 1)
    with pytest.raises(InvalidRequest, match="workspaces need 104,857,600 bytes") as refused:
        blocks("auto", free=100 * MIB)
    assert refused.value.field == "max_num_batched_tokens"


@pytest.mark.parametrize(
    ("text", "value"),
    [("17", 17), ("17B", 17), ("1 KB", 1000), ("1.5MiB", 3 * 2**19), ("2gb", 2 * 10**9), (" 1GiB ", 2**30)],
)
def test_sizes_are_read_with_their_units(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "1TiB", "-1", "1e9", "1,5GiB", "0x10"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidRequest, match="for example '1GiB'"):
        parse_bytes(text)
