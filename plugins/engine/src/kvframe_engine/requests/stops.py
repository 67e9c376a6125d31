"""Finds the first of several stop strings in text that arrives in parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs


class StopStrings:
    """An automaton that reads a text character by character (A. Aho and M. Corasick, 1975).

    The caller keeps the number of the current state, which is 0 at first. The time for a text depends on its length
    only: the automaton falls back to a shorter match at most as often as it reads a character.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """Build the states: one for each prefix of a string.

        Args:
            strings: The strings to find; none is empty.
        """
        self._following: list[dict[str, int]] = [{}]
        self._depth = [0]
        # For each state, the length of the longest string that ends in it.
        self._found = [0]
        for string in strings:
            state = 0
            for character in string:
                if character not in self._following[state]:
                    self._following[state][character] = len(self._following)
                    self._following.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._found.append(0)
                state = self._following[state][character]
            self._found[state] = len(string)
        # For each state, the state of its longest proper suffix that is a prefix of a string.
        self._shorter = [0] * len(self._following)
        waiting = deque(self._following[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._following[state].items():
                self._shorter[following] = self._next(self._shorter[state], character)
                self._found[following] = self._found[following] or self._found[self._shorter[following]]
                waiting.append(following)

    def read(self, state: int, text: str) -> Reading:
        """Read a part of the text.

        Args:
            state: The state after the text before.
            text: The part.
        """
        if not self._following[0]:
            return NOTHING
        for index, character in enumerate(text):
            state = self._next(state, character)
            if self._found[state]:
                return Reading(state, self._depth[state], index + 1 - self._found[state])
        return Reading(state, self._depth[state], None)

    def _next(self, state: int, character: str) -> int:
        while state and character not in self._following[state]:
            state = self._shorter[state]
        return self._following[state].get(character, 0)


@attrs.frozen
class Reading:
    """The result of reading a part of the text.

    Attributes:
        state: The state after it.
        num_held: Characters at the end of the text so far that may begin a string.
        found_at: The index in the part at which the string begins that is complete first, negative if it begins before
            the part; None if none is complete. Of strings that are complete at one character, it is the longest.
    """

    state: int
    num_held: int
    found_at: int | None


NOTHING = Reading(0, 0, None)
NO_STOPS = StopStrings(())
