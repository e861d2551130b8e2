"""SchedulerConfig refuses what it cannot keep, and names field, value and limit."""

from __future__ import annotations

from typing import Any

import pytest

from pyengine import config
from pyengine.config import SchedulerConfig
from pyengine.errors import InvalidRequest
from pyengine.scheduler.capacity import CAPACITIES
from pyengine.scheduler.order import ORDERS
from pyengine.scheduler.packing import PACKINGS


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_blocks", 0, "an integer from 1 to 2147483647"),
        ("num_blocks", True, "an integer from 1 to 2147483647"),
        ("max_context", 1, "an integer from 2 to 2147483647"),
        ("block_size", 8, "an integer from 16 to 4096"),
        ("block_size", 24, "a multiple of 16"),
        ("max_num_seqs", 0, "an integer from 1 to 65536"),
        ("max_num_seqs", 2.0, "an integer from 1 to 65536"),
        ("max_num_batched_tokens", -1, "an integer from 1 to 1048576"),
        ("max_queue", 0, "an integer from 1 to 2147483647 or None"),
        ("watermark", 1.0, "a number >= 0 and < 1"),
        ("watermark", float("nan"), "a number >= 0 and < 1"),
        ("watermark", "much", "a number >= 0 and < 1"),
        ("batching", "dynamic", "'continuous'"),
        ("order", "random", "'fifo'"),
        ("packing", "tight", "'none'"),
        ("capacity", "endless", "'guaranteed', 'predicted', 'optimistic'"),
        ("capacity", ["optimistic"], "'optimistic'"),
    ],
)
def test_a_bad_value_is_refused_with_its_field_and_what_is_allowed(field: str, value: Any, said: str) -> None:
    values: dict[str, Any] = {"num_blocks": 4, "max_context": 100, field: value}
    with pytest.raises(InvalidRequest) as caught:
        SchedulerConfig(**values)
    assert caught.value.field == field
    assert repr(value) in str(caught.value)
    assert said in str(caught.value)


def test_more_sequences_than_tokens_a_step_is_refused_and_says_why() -> None:
    with pytest.raises(InvalidRequest, match=r"max_num_seqs is 9.*max_num_batched_tokens 8.*at least one token"):
        SchedulerConfig(num_blocks=4, max_context=100, max_num_seqs=9, max_num_batched_tokens=8)
    SchedulerConfig(num_blocks=4, max_context=100, max_num_seqs=8, max_num_batched_tokens=8)


def test_every_value_that_is_allowed_is_built() -> None:
    assert set(config.ORDERS) == set(ORDERS)
    assert set(config.PACKINGS) == set(PACKINGS)
    assert set(config.CAPACITIES) == set(CAPACITIES)
