"""Block hashes: a name says all that the KV of a block depends on, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.kv_cache.block_hashes import extend_hashes, root_hash

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def hashes_of(token_ids: list[int], block_size: int = 4, model_id: str = "m", salt: str = "") -> list[bytes]:
    made: list[bytes] = []
    extend_hashes(made, root_hash(model_id, salt), token_ids, len(token_ids) // block_size, block_size)
    return made


@settings(deadline=None)
@given(TOKENS, st.integers(0, 10))
def test_hashing_in_parts_gives_what_hashing_at_once_gives(token_ids: list[int], first: int) -> None:
    whole = hashes_of(token_ids)
    parts = hashes_of(token_ids[: first * 4])
    parent = parts[-1] if parts else root_hash("m", "")
    extend_hashes(parts, parent, token_ids, len(token_ids) // 4, 4)
    assert parts == whole


@settings(deadline=None)
@given(TOKENS, TOKENS)
def test_two_prompts_have_the_same_hashes_as_far_as_they_have_the_same_blocks(a: list[int], b: list[int]) -> None:
    for i, (one, other) in enumerate(zip(hashes_of(a), hashes_of(b), strict=False)):
        assert (one == other) == (a[: (i + 1) * 4] == b[: (i + 1) * 4])


def test_a_block_has_another_hash_behind_another_block() -> None:
    assert hashes_of([1, 2, 3, 4, 9, 9, 9, 9])[1] != hashes_of([1, 2, 3, 5, 9, 9, 9, 9])[1]
    assert hashes_of([9] * 8)[0] != hashes_of([9] * 8)[1]


def test_tokens_are_not_confused_with_their_neighbours() -> None:
    assert hashes_of([1, 256, 0, 0]) != hashes_of([256, 1, 0, 0])
    assert hashes_of([0, 1, 0, 0]) != hashes_of([2**32, 0, 0, 0])


@pytest.mark.parametrize(
    ("one", "other"),
    [(("m", ""), ("m", "a")), (("m", ""), ("n", "")), (("ab", "c"), ("a", "bc")), (("", "m"), ("m", ""))],
)
def test_model_and_salt_are_part_of_every_hash(one: tuple[str, str], other: tuple[str, str]) -> None:
    tokens = list(range(12))
    pairs = zip(hashes_of(tokens, 4, *one), hashes_of(tokens, 4, *other), strict=True)
    assert all(a != b for a, b in pairs)


def test_any_text_is_a_salt() -> None:
    assert len({root_hash("m", salt) for salt in ("", "\0", "é", "\ud800", "a" * 1000)}) == 5
