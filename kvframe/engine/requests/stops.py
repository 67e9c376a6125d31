"""Finds the first of several stop strings in text that arrives in parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs


class StopStrings:
    """An automaton that reads a text character by character (A. Aho and M. Corasick, 1975).

    A reader keeps the number of its state, from 0 on. The time for a character does not depend on how many strings
    there are or how long they are, but for the steps back, which are fewer than the characters read.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """Build the states: one for each beginning of a string.

        Args:
            strings: What to find; none is empty.
        """
        self._following: list[dict[str, int]] = [{}]
        self._depth = [0]
        # The longest string that ends in the state.
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
        # Of each state, that of its longest end which is a beginning too.
        self._shorter = [0] * len(self._following)
        waiting = deque(self._following[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._following[state].items():
                self._shorter[following] = self._next(self._shorter[state], character)
                self._found[following] = self._found[following] or self._found[self._shorter[following]]
                waiting.append(following)

    def read(self, state: int, text: str) -> Reading:
        """Return what a piece of text leads to.

        Args:
            state: That of the text before.
            text: The piece.
        """
        first: int | None = None
        if not self._following[0]:
            return NOTHING
        for index, character in enumerate(text):
            state = self._next(state, character)
            if self._found[state]:
                start = index + 1 - self._found[state]
                first = start if first is None else min(first, start)
        return Reading(state, self._depth[state], first)

    def _next(self, state: int, character: str) -> int:
        while state and character not in self._following[state]:
            state = self._shorter[state]
        return self._following[state].get(character, 0)


@attrs.frozen
class Reading:
    """What became of a piece of text.

    Attributes:
        state: The state after it.
        num_held: Characters at its end, and before it, with which a string begins.
        found_at: Where in the piece the first string begins that ends in it, negative for before it; None for none.
    """

    state: int
    num_held: int
    found_at: int | None


NOTHING = Reading(0, 0, None)
NO_STOPS = StopStrings(())
