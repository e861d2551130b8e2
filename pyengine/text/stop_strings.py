"""Finds stop strings in text that arrives in pieces; it cuts text, and leaves token ids to the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from pyengine.errors import InvalidRequest


class _Automaton:
    """Aho-Corasick automaton (Aho and Corasick, 1975, "Efficient string matching") over a set of stop strings.

    A state is the longest suffix of the text so far that is a prefix of some stop string; state 0 is the empty one.
    Read-only after construction, so any number of matchers share one.

    Attributes:
        children: per state, next character -> state whose prefix is one character longer.
        fallback: per state, the state of its longest proper suffix that is also a prefix of a stop string.
        depth: per state, the length of its prefix.
        match: per state, the longest stop string that is a suffix of its prefix, or None.
    """

    __slots__ = ("children", "depth", "fallback", "match")

    def __init__(self, stops: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fallback: list[int] = [0]
        self.depth: list[int] = [0]
        self.match: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.children[state].get(char)
            if following is None:
                following = len(self.children)
                self.children[state][char] = following
                self.children.append({})
                self.fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = following
        self.match[state] = stop

    def _link(self) -> None:
        # Breadth first: a fallback is shallower than its state, hence complete when the state is reached.
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            if self.match[state] is None:
                self.match[state] = self.match[self.fallback[state]]
            for char, child in self.children[state].items():
                self.fallback[child] = self.step(self.fallback[state], char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after reading `char` in `state`; amortised O(1) over a text."""
        while True:
            following = self.children[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fallback[state]


@lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)


class StopStringMatcher:
    """Cuts one growing text at the first stop string that completes in it.

    The match that completes earliest wins; of several that complete at the same character, the one that starts
    earliest, which is the longest. The result does not depend on how the text is split into pushes. Held back is
    exactly the longest suffix of the text that is a proper prefix of some stop string. O(1) per character, amortised.

    Args:
        stops: the stop strings; may be empty, then every push passes through.

    Attributes:
        matched: the stop string that matched, or None so far.
        match_start: offset in characters, over all text pushed, of the first character of the match.
        match_end: offset just past the match. The push that returns a match holds its last character, so an engine that
            pushes once per token truncates to the token of that push.

    Raises:
        InvalidRequest: a stop string is not a `str`, or is empty (field `stop`).
    """

    __slots__ = ("_automaton", "_held", "_received", "_state", "match_end", "match_start", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            stops = [stops]
        for index, stop in enumerate(stops):
            if not isinstance(stop, str):
                raise InvalidRequest(
                    f"stop[{index}] must be a string, not {type(stop).__name__}.", field="stop", value=stop
                )
            if not stop:
                raise InvalidRequest(
                    f"stop[{index}] is empty; a stop string needs at least one character.",
                    field="stop",
                    value=stop,
                    limit=1,
                )
        self._automaton = _automaton(tuple(stops)) if stops else None
        self._state = 0
        self._held = ""
        self._received = 0
        self.matched: str | None = None
        self.match_start: int | None = None
        self.match_end: int | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece of text; returns (text that is safe to emit, the matched stop string or None).

        Text from the start of the match on is never emitted. Once a match was returned, further text is dropped and
        the same match returned.
        """
        automaton = self._automaton
        if automaton is None:
            return text, None
        if self.matched is not None:
            return "", self.matched
        state = self._state
        for index, char in enumerate(text):
            state = automaton.step(state, char)
            stop = automaton.match[state]
            if stop is not None:
                return self._cut(text, self._received + index + 1, stop), stop
        self._state = state
        self._received += len(text)
        pending = self._held + text
        safe_length = len(pending) - automaton.depth[state]
        self._held = pending[safe_length:]
        return pending[:safe_length], None

    def _cut(self, text: str, end: int, stop: str) -> str:
        held_from = self._received - len(self._held)
        safe = (self._held + text)[: end - len(stop) - held_from]
        self.matched, self.match_start, self.match_end = stop, end - len(stop), end
        self._held = ""
        return safe

    def finish(self) -> str:
        """The text still held back, when no more will come; "" after a match."""
        held, self._held, self._state = self._held, "", 0
        return held
