"""Which blocks of a request are live, for an engine with a block manager of its own: what it keeps, frees and finds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from kvframe.cache.live_range import LiveRange
from kvframe.contract.specs import KVCacheSpec
from kvframe.planning.answers import Answers

T = TypeVar("T")


class LiveBlocks:
    """The live blocks of every request whose cache has one spec, by the number of tokens that are computed.

    Nothing of a request is kept here. The spec is asked once, at set-up.
    """

    def __init__(self, spec: KVCacheSpec, max_tokens: int) -> None:
        """Find out when each block dies.

        Args:
            spec: The spec, with the block size of the engine's manager.
            max_tokens: The most tokens of a request.
        """
        live = LiveRange.of(Answers(spec), max_tokens)
        order = np.argsort(live.deaths, kind="stable")
        self._block_size, self._deaths = spec.block_size, live.deaths
        self._order: list[int] = order.tolist()
        self._sorted: list[int] = live.deaths[order].tolist()

    def at(self, num_computed: int) -> list[int]:
        """Return the full blocks that the token after ``num_computed`` tokens needs, ascending."""
        live: list[int] = np.flatnonzero(self._deaths[: num_computed // self._block_size] > num_computed).tolist()
        return live

    def died(self, before: int, num_computed: int) -> list[int]:
        """Return the blocks that no token needs after ``num_computed`` tokens, and one needed after ``before`` tokens.

        They are in the order in which they died. Each of them is full: a block that is not is needed.
        """
        return self._order[bisect_right(self._sorted, before) : bisect_right(self._sorted, num_computed)]

    def longest_hit(self, find: Callable[[int], T | None], max_tokens: int, step: int) -> list[T | None]:
        """Return the blocks of the longest prefix, a multiple of ``step`` tokens, whose live blocks are all cached.

        A block that is dead stays dead. So a missing block is missing to every shorter prefix that has it, and the
        search goes on at its start.

        Args:
            find: Returns what the engine has cached of a block of the request, or None; asked once for each block.
            max_tokens: The most tokens of the prefix.
            step: A multiple of the block size.

        Returns:
            For each block of the prefix, what ``find`` returned; None if the block is dead.
        """
        found: dict[int, T | None] = {}
        length = max_tokens // step * step
        while length:
            live = self.at(length)
            missing = next((block for block in live if _look_up(block, find, found) is None), None)
            if missing is None:
                hit: list[T | None] = [None] * (length // self._block_size)
                for block in live:
                    hit[block] = found[block]
                return hit
            length = missing * self._block_size // step * step
        return []


def _look_up(block: int, find: Callable[[int], T | None], found: dict[int, T | None]) -> T | None:
    if block not in found:
        found[block] = find(block)
    return found[block]
