"""Properties of StopStringMatcher against a brute-force reading of its definition."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.errors import InvalidRequest
from pyengine.text import StopStringMatcher

# Few letters, so that stops overlap, contain each other and nearly match.
words = st.text(alphabet="ab🎉", min_size=1, max_size=5)
stop_lists = st.lists(words, max_size=5)
pieces_strategy = st.lists(st.text(alphabet="ab🎉", max_size=4), max_size=12)
many = settings(max_examples=400, deadline=None)


def first_match(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """(start, end, stop) of the match that completes first; of several, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return end - len(stop), end, stop
    return None


def longest_possible_start(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a stop."""
    lengths = (length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length]))
    return max(lengths, default=0)


@many
@given(stops=stop_lists, pieces=pieces_strategy)
def test_text_is_cut_at_the_earliest_completing_match_however_it_is_split(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    emitted, matched = "", None
    for piece in pieces:
        text, matched = matcher.push(piece)
        emitted += text
        if matched is not None:
            break
    emitted += matcher.finish()
    expected = first_match("".join(pieces), stops)
    if expected is None:
        assert (emitted, matched, matcher.match_start, matcher.match_end) == ("".join(pieces), None, None, None)
    else:
        start, end, stop = expected
        assert (emitted, matched) == ("".join(pieces)[:start], stop)
        assert (matcher.matched, matcher.match_start, matcher.match_end) == (stop, start, end)


@many
@given(stops=stop_lists, pieces=pieces_strategy)
def test_only_the_longest_suffix_that_may_become_a_stop_is_held_back(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    received = emitted = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        if matched is not None:
            return
        received += piece
        emitted += text
        assert emitted == received[: len(received) - longest_possible_start(received, stops)]


@many
@given(stops=stop_lists.filter(bool), pieces=pieces_strategy)
def test_the_push_that_returns_the_match_holds_its_last_character(stops: list[str], pieces: list[str]) -> None:
    matcher, length = StopStringMatcher(stops), 0
    for piece in pieces:
        _, matched = matcher.push(piece)
        if matched is not None:
            assert matcher.match_end is not None
            assert length < matcher.match_end <= length + len(piece)
            return
        length += len(piece)


def test_an_earlier_start_does_not_beat_an_earlier_end() -> None:
    matcher = StopStringMatcher(["abcd", "bc"])
    assert matcher.push("xab") == ("x", None)
    assert matcher.push("cd") == ("a", "bc")


def test_of_two_stops_that_end_together_the_longer_is_reported() -> None:
    assert StopStringMatcher(["c", "abc"]).push("xabc") == ("x", "abc")


def test_after_a_match_no_text_is_emitted() -> None:
    matcher = StopStringMatcher(["stop"])
    assert matcher.push("a stop b") == ("a ", "stop")
    assert matcher.push("more") == ("", "stop")
    assert matcher.finish() == ""


def test_without_stops_text_passes_through_unchanged() -> None:
    matcher = StopStringMatcher([])
    text = "any text"
    assert matcher.push(text)[0] is text
    assert matcher.finish() == ""


def test_finish_gives_held_text_once() -> None:
    matcher = StopStringMatcher(["###"])
    assert matcher.push("a##") == ("a", None)
    assert (matcher.finish(), matcher.finish()) == ("##", "")


def test_matchers_of_the_same_stops_do_not_share_state() -> None:
    first, second = StopStringMatcher(["ab"]), StopStringMatcher(["ab"])
    first.push("a")
    assert second.push("b") == ("b", None)


@pytest.mark.parametrize(("stops", "index"), [([""], 0), (["a", ""], 1), (["a", 3], 1), ([None], 0)])
def test_a_stop_that_is_no_string_or_empty_is_refused_by_its_index(stops: list[str], index: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"stop\[{index}\]") as caught:
        StopStringMatcher(stops)
    assert caught.value.field == "stop"


def test_long_stops_that_nearly_match_hold_back_no_more_than_the_longest_of_them() -> None:
    """A scan of all stops at every character would compare more than 10^9 characters here."""
    matcher = StopStringMatcher(["a" * length + "b" for length in range(1000, 1100)])
    assert matcher.push("a" * 50_000) == ("a" * (50_000 - 1099), None)
    assert matcher.push("c") == ("a" * 1099 + "c", None)
