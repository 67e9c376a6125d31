"""Prefixes that replicas will have cached: those of prompts that were sent to them and are not in their events yet."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

from kvframe_serve.runner import EngineRequest

_TOKENS = 16
"""Prefixes are told apart at multiples of so many tokens."""

Prefixes = Sequence[int]
"""For each prefix of a prompt, by length: a number that equal prefixes share in this process."""


def prefixes_of(request: EngineRequest) -> Prefixes:
    """Return the numbers of a prompt's prefixes; requests with different salts share none."""
    tokens, number, numbers = array("I", request.prompt), hash(request.options.get("cache_salt", "")), []
    for end in range(_TOKENS, len(tokens), _TOKENS):
        number = hash((number, tokens[end - _TOKENS : end].tobytes()))
        numbers.append(number)
    return numbers


class ExpectedPrefixes:
    """Counts, for each prefix, the prompts that contain it and were sent to a replica."""

    def __init__(self) -> None:
        """Expect nothing."""
        self._counts: dict[int, Counter[str]] = {}

    def add(self, replica: str, prefixes: Prefixes) -> None:
        """Expect the prefixes of a prompt in a replica."""
        for number in prefixes:
            self._counts.setdefault(number, Counter())[replica] += 1

    def remove(self, replica: str, prefixes: Prefixes) -> None:
        """Expect the prefixes of a prompt no longer that were added."""
        for number in prefixes:
            counts = self._counts[number]
            counts[replica] -= 1
            if not counts[replica]:
                del counts[replica]
            if not counts:
                del self._counts[number]

    def hits(self, prefixes: Prefixes) -> Iterator[tuple[str, int]]:
        """Yield replicas and the tokens of a prefix that they are expected to have, the longest prefix last."""
        for length, number in enumerate(prefixes, 1):
            counts = self._counts.get(number)
            if counts is None:
                return
            for replica in counts:
                yield replica, length * _TOKENS
