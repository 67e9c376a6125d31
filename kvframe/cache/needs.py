"""Which blocks of a group a hit needs, and which hits need a block: what the law of forgetting says of hits.

Hits end at multiples of a step: the tokens at which the blocks of all groups end together. They are numbered by it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvframe.answers import Answers
from kvframe.cache.forgetting import NEVER, Forgetting, forgetting_of
from kvframe.errors import SpecError
from kvframe.specs import KVCacheSpec

Pages = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]


class Needs(Protocol):
    """What hits need of one group.

    Attributes:
        size: Tokens per block.
    """

    size: int

    def needed(self, num_blocks: int) -> Flags:
        """Return which of the first blocks some hit could need."""

    def end(self, block: int) -> int:
        """Return the shortest hit that does not need a block any more, in tokens; ``NEVER`` if all do."""

    def safe(self, start: int, stop: int) -> int:
        """Return the shortest of the longest hits that need each of the blocks in ``[start, stop)``.

        In tokens, of the blocks that some hit could need; ``NEVER`` if there is none, 0 if that is hard to find out.
        """

    def holds(self, pages: Pages, first: int, last: int, asked: Flags | None) -> Flags:
        """Return ``[last - first + 1], bool``: for which hits all that is needed has a page.

        Args:
            pages: The pages of a prefix, 0 for none; all blocks of the last hit.
            first: The number of the first hit, at least 1.
            last: The number of the last one.
            asked: For which of them it matters; None for all.
        """

    def uses(self, start: int, stop: int, first: int, hits: Numbers) -> Numbers:
        """Return for each block in ``[start, stop)`` the number of the longest hit that needs it, 0 for none.

        Args:
            start: The first block.
            stop: The block after the last.
            first: The number of the first hit there could be.
            hits: From there on, the number of the longest hit so far, 0 for none.
        """

    def needed_by(self, start: int, stop: int, num_tokens: int) -> Flags:
        """Return which of the blocks in ``[start, stop)`` a hit needs."""


class EverlastingNeeds:
    """Every hit needs every block."""

    def __init__(self, size: int, step: int) -> None:
        """Take the tokens per block, and per step."""
        self.size = size
        self._step = step

    def needed(self, num_blocks: int) -> Flags:
        """Return that all are."""
        return np.ones(num_blocks, dtype=np.bool_)

    def end(self, block: int) -> int:
        """Return that there is none."""
        return NEVER

    def safe(self, start: int, stop: int) -> int:
        """Return that each is needed for ever."""
        return NEVER

    def holds(self, pages: Pages, first: int, last: int, asked: Flags | None) -> Flags:
        """Return those before the first block that is missing."""
        num_held = len(pages) if np.count_nonzero(pages) == len(pages) else int((pages == 0).argmax())
        flags = np.zeros(last - first + 1, dtype=np.bool_)
        flags[: max(0, num_held * self.size // self._step - first + 1)] = True
        return flags

    def uses(self, start: int, stop: int, first: int, hits: Numbers) -> Numbers:
        """Return the longest hit of all, where it reaches."""
        longest = int(hits[-1])
        uses = np.full(stop - start, longest)
        uses[max(0, longest * self._step // self.size - start) :] = 0
        return uses

    def needed_by(self, start: int, stop: int, num_tokens: int) -> Flags:
        """Return those before its end."""
        flags = np.zeros(stop - start, dtype=np.bool_)
        flags[: max(0, num_tokens // self.size - start)] = True
        return flags


class MovingNeeds:
    """A hit needs the sinks, and what moves along with it: worked out once for all blocks and hits."""

    def __init__(self, forgetting: Forgetting, step: int, max_tokens: int) -> None:
        """Work out what is needed.

        Args:
            forgetting: When blocks die.
            step: Tokens per step.
            max_tokens: The tokens of the longest hit there could be.
        """
        self.size = forgetting.block_size
        self._step = step
        num_hits = max_tokens // step
        tokens = step * np.arange(num_hits + 1)
        self._stops = tokens // self.size
        self._starts = np.minimum(forgetting.dead_at(tokens), self._stops)
        self._num_sinks = forgetting.first
        blocks = np.arange(-(-max_tokens // self.size))
        deaths = forgetting.deaths(blocks)
        self._ends = np.where(deaths == NEVER, NEVER, deaths + -deaths % step)
        self._first_hits = -(-((blocks + 1) * self.size) // step)
        self._last_hits = np.where(deaths == NEVER, num_hits, np.minimum((deaths - 1) // step, num_hits))

    def needed(self, num_blocks: int) -> Flags:
        """Return those that live until a hit ends."""
        return self.needed_in(0, num_blocks)

    def needed_in(self, start: int, stop: int) -> Flags:
        """Return the same of the blocks in ``[start, stop)``."""
        needed: Flags = self._first_hits[start:stop] <= self._last_hits[start:stop]
        return needed

    def end(self, block: int) -> int:
        """Return the first hit after it is dead."""
        return int(self._ends[block])

    def safe(self, start: int, stop: int) -> int:
        """Return the last hit before the first of them is dead."""
        ends = self._ends[start:stop][self.needed_in(start, stop)]
        end = int(ends.min(initial=NEVER))
        return end if end == NEVER else end - self._step

    def holds(self, pages: Pages, first: int, last: int, asked: Flags | None) -> Flags:
        """Return those with as many missing blocks before what they need as before their end."""
        num_missing = np.zeros(len(pages) + 1, dtype=np.int64)
        np.cumsum(pages == 0, out=num_missing[1:])
        stops = self._stops[first : last + 1]
        flags: Flags = num_missing[stops] == num_missing[self._starts[first : last + 1]]
        if self._num_sinks:
            flags &= num_missing[np.minimum(self._num_sinks, stops)] == 0
        return flags

    def uses(self, start: int, stop: int, first: int, hits: Numbers) -> Numbers:
        """Return of the hits before blocks die the longest, where it reaches."""
        last = np.minimum(self._last_hits[start:stop] - first, len(hits) - 1)
        uses: Numbers = hits[last]
        uses[(last < 0) | (uses < self._first_hits[start:stop])] = 0
        return uses

    def needed_by(self, start: int, stop: int, num_tokens: int) -> Flags:
        """Return the sinks and what lives until its end."""
        number = num_tokens // self._step
        flags = np.zeros(stop - start, dtype=np.bool_)
        flags[max(0, int(self._starts[number]) - start) : max(0, int(self._stops[number]) - start)] = True
        flags[: max(0, min(self._num_sinks, int(self._stops[number])) - start)] = True
        return flags


class AskedNeeds:
    """What hits need is asked of the type, hit by hit, and remembered."""

    def __init__(self, spec: KVCacheSpec, step: int, max_tokens: int) -> None:
        """Ask nothing yet.

        Args:
            spec: The type.
            step: Tokens per step.
            max_tokens: The tokens of the longest hit there could be.
        """
        self.size = spec.block_size
        self._step = step
        self._num_hits = max_tokens // step
        self._answers = Answers(spec)
        self._known: dict[int, Sequence[tuple[int, int]]] = {}

    def _live(self, number: int) -> Sequence[tuple[int, int]]:
        found = self._known.get(number)
        if found is None:
            try:
                found = self._answers.live_blocks(number * self._step)
            except SpecError:  # the request that gets there is told; no cached block is of less use for it
                found = ((0, number * self._step // self.size),)
            self._known[number] = found
        return found

    def _needs(self, block: int, number: int) -> bool:
        return number <= self._num_hits and any(start <= block < stop for start, stop in self._live(number))

    def needed(self, num_blocks: int) -> Flags:
        """Return those that the first hit that has them needs: by the law of forgetting no other does else."""
        needed = [self._needs(block, self._first_hit(block)) for block in range(num_blocks)]
        return np.array(needed, dtype=np.bool_)

    def end(self, block: int) -> int:
        """Return the first hit that does not need it, by halves."""
        numbers = range(self._first_hit(block), self._num_hits + 1)
        found = bisect_left(numbers, True, key=lambda number: not self._needs(block, number))
        return numbers[found] * self._step if found < len(numbers) else NEVER

    def safe(self, start: int, stop: int) -> int:
        """Return the last hit that needs the first of them, which dies first if it is not a sink."""
        first = next((block for block in range(start, stop) if self._needs(block, self._first_hit(block))), stop)
        end = self.end(first) if first < stop else NEVER
        return end - self._step if end < NEVER else NEVER if first == stop else 0

    def _first_hit(self, block: int) -> int:
        return -(-(block + 1) * self.size // self._step)

    def holds(self, pages: Pages, first: int, last: int, asked: Flags | None) -> Flags:
        """Return those of which no block is missing."""
        num_missing = [0, *np.cumsum(pages == 0).tolist()]
        flags = np.zeros(last - first + 1, dtype=np.bool_)
        for place in range(len(flags)) if asked is None else asked.nonzero()[0].tolist():
            flags[place] = all(num_missing[start] == num_missing[stop] for start, stop in self._live(first + place))
        return flags

    def uses(self, start: int, stop: int, first: int, hits: Numbers) -> Numbers:
        """Return of each block the last hit that says so."""
        uses = np.zeros(stop - start, dtype=np.int64)
        for number in np.unique(hits).tolist():
            for live_start, live_stop in self._live(number) if number else ():
                uses[max(0, live_start - start) : max(0, live_stop - start)] = number
        return uses

    def needed_by(self, start: int, stop: int, num_tokens: int) -> Flags:
        """Return those that the type says are live."""
        flags = np.zeros(stop - start, dtype=np.bool_)
        for live_start, live_stop in self._live(num_tokens // self._step):
            flags[max(0, live_start - start) : max(0, live_stop - start)] = True
        return flags


def needs_of(spec: KVCacheSpec, step: int, max_tokens: int) -> Needs:
    """Return what hits need of a type.

    Args:
        spec: The type.
        step: Tokens per step, a multiple of its block size.
        max_tokens: The tokens of the longest hit there could be.
    """
    forgetting = forgetting_of(spec)
    if forgetting is None:
        return AskedNeeds(spec, step, max_tokens)
    if not forgetting.window and not forgetting.chunk:
        return EverlastingNeeds(spec.block_size, step)
    return MovingNeeds(forgetting, step, max_tokens)
