"""When blocks die: the law of forgetting for a whole batch of requests at once.

A spec says for one position what is live. A step needs it for every request, so where the live range has the form that
an ``AttentionMask`` names, it is worked out for arrays of positions. Any other type is asked position by position.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.answers import ask_live_ranges, blocks_of
from kvframe.errors import SpecError
from kvframe.specs import KVCacheSpec

Positions = npt.NDArray[np.int64]
NEVER = sys.maxsize
"""A position that no request reaches."""


@attrs.frozen
class Forgetting:
    """A type whose dead blocks are one range ``[first, dead(n))``: those between the sinks and what moves along.

    Attributes:
        block_size: Tokens per block.
        first: The first block that ever dies.
        window: Tokens that stay live, that of the query included; 0 for none.
        chunk: Tokens of a chunk that is forgotten as a whole; 0 for none.
    """

    block_size: int
    first: int = 0
    window: int = 0
    chunk: int = 0

    def dead(self, num_computed: int) -> int:
        """Return the block before which blocks from ``first`` on are dead when so many tokens are computed."""
        if self.window:
            return max(self.first, (num_computed - (self.window - 1)) // self.block_size)
        if self.chunk:
            return (num_computed - num_computed % self.chunk) // self.block_size
        return 0

    def next_death(self, dead: int) -> int:
        """Return the computed tokens from which on block ``dead`` is dead too."""
        tokens = (dead + 1) * self.block_size
        if self.window:
            return tokens + (self.window - 1)
        return -(-tokens // self.chunk) * self.chunk if self.chunk else NEVER

    def dead_at(self, num_computed: Positions) -> Positions:
        """Return ``[n]``: the block before which blocks are dead, for each count of computed tokens."""
        if self.window:
            return np.maximum((num_computed - (self.window - 1)) // self.block_size, self.first)
        dead = (
            (num_computed - num_computed % self.chunk) // self.block_size if self.chunk else np.zeros_like(num_computed)
        )
        return np.maximum(dead, self.first)

    def deaths(self, blocks: Positions) -> Positions:
        """Return ``[n]``: for each block, the computed tokens from which on it is dead."""
        tokens = (blocks + 1) * self.block_size
        if self.window:
            deaths = tokens + (self.window - 1)
        elif self.chunk:
            deaths = -(-tokens // self.chunk) * self.chunk
        else:
            return np.full_like(blocks, NEVER)
        return np.where(blocks < self.first, NEVER, deaths)


def forgetting_of(spec: KVCacheSpec) -> Forgetting | None:
    """Return how a type forgets; None where only its live ranges say it."""
    mask = spec.mask
    if mask is None or not mask.causal:
        return None
    size = spec.block_size
    found = Forgetting(size, -(-mask.num_sink_tokens // size), mask.window or 0, mask.chunk or 0)
    reach = max(mask.window or 0, mask.chunk or 0) + mask.num_sink_tokens + 2 * size
    samples = {*range(min(reach, 64)), *range(0, 2 * reach, max(1, reach // 16)), reach, 3 * reach + 1}
    return found if all(_says(found, spec, n) for n in samples) else None


def never_dies(spec: KVCacheSpec) -> bool:
    """Return whether every block of a request stays live to its end."""
    found = forgetting_of(spec)
    return found is not None and not found.window and not found.chunk


def _says(forgetting: Forgetting, spec: KVCacheSpec, n: int) -> bool:
    current, dead = n // spec.block_size, forgetting.dead(n)
    ranges = ((0, min(forgetting.first, dead)), (dead, current)) if dead > forgetting.first else ((0, current),)
    try:
        live = blocks_of(ask_live_ranges(spec, n), spec.block_size)
    except SpecError:  # a type may answer no further than requests go
        return False
    return all(
        any(start <= first and stop <= last for first, last in live) for start, stop in ranges if start < stop
    ) and sum(min(stop, current) - start for start, stop in live if start < current) == sum(
        stop - start for start, stop in ranges
    )


class MovingGroups:
    """The groups of a table stack that forget, as arrays: blocks of ``[first, dead(n))`` are dead.

    Attributes:
        places: ``[num_groups], int64, host``: where they lie in the stack.
        dead: ``[num_groups, max_num_seqs], int64, host``: the block before which each row's were given back.
    """

    def __init__(self, forgetting: Sequence[tuple[int, Forgetting]], max_num_seqs: int) -> None:
        """Take the places and types of the groups, of equal block size."""
        self.places = np.array([place for place, _ in forgetting], dtype=np.int64)
        self.types = tuple(each for _, each in forgetting)
        self._size = self.types[0].block_size
        self._first = np.array([[each.first] for each in self.types], dtype=np.int64)
        self._behind = np.array([[each.window - 1] for each in self.types], dtype=np.int64)
        self._chunk = np.array([[each.chunk or 1] for each in self.types], dtype=np.int64)
        self._is_chunk = np.array([[each.chunk > 0] for each in self.types])
        self._has_chunks = bool(self._is_chunk.any())
        self.dead = np.zeros((len(self.types), max_num_seqs), dtype=np.int64)
        self.dead[...] = self._first

    def start(self, row: int, num_computed: int) -> None:
        """Begin a row that holds exactly what is live."""
        self.dead[:, row] = [each.dead(num_computed) for each in self.types]

    def clear(self, row: int) -> None:
        """Let a row be as one without a token."""
        self.dead[:, row] = self._first[:, 0]

    def dead_at(self, num_computed: Positions) -> Positions:
        """Return ``[num_groups, n]``: the block before which blocks are dead, for each count of computed tokens."""
        behind: Positions = np.maximum(self._first, (num_computed - self._behind) // self._size)
        if self._has_chunks:
            chunks = (num_computed - num_computed % self._chunk) // self._size
            behind = np.where(self._is_chunk, chunks, behind)
        return behind

    def next_death(self, dead: Positions) -> Positions:
        """Return ``[n]``: the computed tokens from which on another block is dead in some group."""
        tokens = (dead + 1) * self._size
        found = tokens + self._behind
        if self._has_chunks:
            found = np.where(self._is_chunk, -(-tokens // self._chunk) * self._chunk, found)
        nearest: Positions = np.minimum.reduce(found)
        return nearest
