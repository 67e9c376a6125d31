"""Ranges of a prompt whose tokens see each other in both directions: no prefix ends within one."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import ClassVar, overload

from kvframe.contract.specs import TokenRange

_ID_BITS = 19


def before_range(ranges: Sequence[TokenRange], stop: int) -> int:
    """Return the start of the range that tokens ``[0, stop)`` would divide; ``stop`` if they divide none."""
    place = bisect_left(ranges, stop, key=_start_of) - 1
    return ranges[place][0] if place >= 0 and ranges[place][0] < stop < ranges[place][1] else stop


def whole_ranges(ranges: Sequence[TokenRange], stop: int, unit: int) -> int:
    """Return the most tokens up to ``stop``, a multiple of ``unit``, that divide no range."""
    stop -= stop % unit
    while (start := before_range(ranges, stop)) < stop:
        stop = start - start % unit
    return stop


def _start_of(part: TokenRange) -> int:
    return part[0]


class RangedTokens(Sequence[int]):
    """A request's tokens as the prefix cache compares them: the first token of each range contains the range's length.

    The state of each token in a range depends on all tokens of the range, and on its length. So no prefix that ends
    within a range is found or published.

    Attributes:
        MOST_TOKEN_ID: The highest token id with which a range may begin.
        MOST_RANGE: The most tokens of a range.
    """

    MOST_TOKEN_ID: ClassVar[int] = (1 << _ID_BITS) - 1
    MOST_RANGE: ClassVar[int] = (1 << (31 - _ID_BITS)) - 1
    before_range = staticmethod(before_range)
    whole_ranges = staticmethod(whole_ranges)

    def __init__(self, token_ids: array[int], ranges: Sequence[TokenRange]) -> None:
        """Mark tokens.

        Args:
            token_ids: The tokens, below ``2**31``; their owner appends to them.
            ranges: Sorted and disjoint, all among the tokens, of at most ``MOST_RANGE`` tokens each; the first one of
                each is at most ``MOST_TOKEN_ID``.
        """
        self._token_ids = token_ids
        self._places = [start for start, _ in ranges]
        self._marked = [1 << 31 | (stop - start) << _ID_BITS | token_ids[start] for start, stop in ranges]

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> array[int]: ...

    def __getitem__(self, index: int | slice) -> int | array[int]:
        if not isinstance(index, slice):
            place = range(len(self))[index]
            return self[place : place + 1][0]
        places, found = range(len(self))[index], self._token_ids[index]
        if len(places):
            low, high = sorted((places[0], places[-1]))
            first, last = bisect_left(self._places, low), bisect_right(self._places, high)
            for place, marked in zip(self._places[first:last], self._marked[first:last], strict=True):
                if place in places:
                    found[places.index(place)] = marked
        return found
