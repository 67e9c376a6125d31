"""When blocks die, as arrays: for each block of a group, the number of computed tokens after which none needs it.

A cache spec gives the tokens that are live at one position. A dead block stays dead, so one number for each block holds
for all positions, and a step compares it for many requests at once. If the spec's mask agrees with its live ranges, a
formula gives these numbers. Otherwise the spec is asked for each block, once, at set-up.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.contract.errors import SpecError
from kvframe.contract.specs import AttentionMask
from kvframe.planning.answers import Answers

Positions = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int32]
"""``[num_blocks], int32, host``: the page of each block of a prefix, 0 for none."""
NEVER = sys.maxsize
"""A position that no request reaches."""

DeathRun = tuple[int, int, int]
"""Blocks in a row, ``(count, death, step)``: the first is needed at ``n < death``, each next one ``step`` longer."""


@attrs.frozen(kw_only=True)
class Need:
    """The tokens that a request needs to continue after ``n`` tokens, and so the blocks that contain one of them.

    Without a value in any field, it needs all tokens.

    Attributes:
        last: How many tokens before ``n`` are needed: of a window all but one, of a state 1. None for another form.
        chunk: The length of a chunk; the tokens of the one that ``n`` is in are needed. None for another form.
        first: How many tokens from the first one on are needed too, whatever ``n`` is.
        deaths: If no other form is exact, when each block is needed no longer, from the first block on. A death of 0
            stands for never.
    """

    last: int | None = None
    chunk: int | None = None
    first: int = 0
    deaths: tuple[DeathRun, ...] = ()

    @classmethod
    def of_mask(cls, mask: AttentionMask) -> Need:
        """Return what hits need if the live tokens are those that a mask shows."""
        return cls(last=mask.window - 1 if mask.window else None, chunk=mask.chunk, first=mask.num_sink_tokens)

    @classmethod
    def of(cls, live: LiveRange, max_tokens: int) -> Need:
        """Return what hits of up to ``max_tokens`` tokens need in a group whose blocks die as ``live`` says."""
        (dying,) = np.nonzero(live.deaths != NEVER)
        if not len(dying):
            return cls()
        size, block = live.block_size, int(dying[0])
        age = int(live.deaths[block]) - (block + 1) * size
        chunk = int(np.gcd.reduce(live.deaths[dying]))
        for need in (cls(last=age, first=block * size), cls(chunk=chunk, first=block * size)):
            if np.array_equal(need.live(size, max_tokens).deaths, live.deaths):
                return need
        return cls(deaths=_runs_of(np.where(live.deaths == NEVER, 0, live.deaths)))

    def live(self, block_size: int, max_tokens: int) -> LiveRange:
        """Return when the blocks of a group die, in requests of at most ``max_tokens`` tokens."""
        num_blocks = -(-max_tokens // block_size)
        blocks = np.arange(num_blocks)
        ends = (blocks + 1) * block_size
        deaths: Positions
        if self.deaths:
            deaths = np.concatenate([death + step * np.arange(count) for count, death, step in self.deaths])
            deaths = np.where(deaths == 0, NEVER, deaths)
        elif self.last is not None:
            deaths = ends + self.last
        elif self.chunk is not None:
            deaths = -(-ends // self.chunk) * self.chunk
        else:
            deaths = np.full(num_blocks, NEVER)
        is_kept = (blocks < -(-self.first // block_size)) | (deaths > max_tokens)
        return LiveRange(block_size, np.where(is_kept, NEVER, deaths), is_by_mask=False)


@attrs.frozen(eq=False)
class LiveRange:
    """When the blocks of one group die.

    Attributes:
        deaths: ``[max_blocks], int64, host``: the number of computed tokens from which on no token needs the block, at
            least the block's end; ``NEVER`` if the longest request needs it to its end.
        is_by_mask: Whether a mask agrees with the live ranges at all sampled positions.
    """

    block_size: int
    deaths: Positions
    is_by_mask: bool

    @classmethod
    def of(cls, answers: Answers, max_tokens: int) -> LiveRange:
        """Return when the blocks of a type with these answers die, in requests of at most ``max_tokens`` tokens."""
        size, mask = answers.block_size, answers.mask()
        if mask is not None:
            live = Need.of_mask(mask).live(size, max_tokens)
            if all(_agrees(live.deaths, answers, n) for n in _samples(mask, size) if n <= max_tokens):
                return attrs.evolve(live, is_by_mask=True)
        deaths = _deaths_by_asking(answers, -(-max_tokens // size), max_tokens)
        return cls(size, np.where(deaths > max_tokens, NEVER, deaths), is_by_mask=False)

    @property
    def never_dies(self) -> bool:
        """Whether every block is needed until its request ends."""
        return bool((self.deaths == NEVER).all())

    @property
    def needs_last(self) -> bool:
        """Whether every token needs the block of the token before it."""
        return bool((self.deaths > self._ends(len(self.deaths))).all())

    def needed(self, step: int, max_tokens: int) -> npt.NDArray[np.bool_]:
        """Return which blocks hits at multiples of ``step`` up to ``max_tokens`` could need: ``[max_blocks], bool``."""
        ends = self._ends(len(self.deaths))
        if step > max_tokens:
            return np.zeros(len(ends), dtype=np.bool_)
        first_hits = ends + -ends % step
        is_needed: npt.NDArray[np.bool_] = (self.deaths > first_hits) & (first_hits <= max_tokens)
        return is_needed

    def longest_prefix(self, pages: Pages, num_tokens: int) -> int:
        """Return the longest prefix of at most ``num_tokens`` tokens, in whole blocks, whose live blocks have pages."""
        num_blocks = min(num_tokens // self.block_size, len(pages))
        pages = pages[:num_blocks]
        if np.count_nonzero(pages) == num_blocks:
            return num_blocks * self.block_size
        return longest_common_prefix([(self, pages)], self.block_size, num_blocks * self.block_size)

    def hits_lost(self, pages: Pages, step: int, num_hits: int) -> Positions:
        """Return how many missing blocks each hit at a multiple of ``step`` needs: ``[num_hits + 1], int64``."""
        (missing_blocks,) = np.nonzero(pages == 0)
        start = -(-(missing_blocks + 1) * self.block_size // step)
        # A hit at the position where a block is dead does not need it.
        stop = np.minimum(-(-self.deaths[missing_blocks] // step), num_hits + 1)
        is_lost = start < stop
        size = num_hits + 2
        changes = np.bincount(start[is_lost], minlength=size) - np.bincount(stop[is_lost], minlength=size)
        num_lost: Positions = np.cumsum(changes[: num_hits + 1])
        return num_lost

    def _ends(self, num_blocks: int) -> Positions:
        return (np.arange(num_blocks) + 1) * self.block_size


class DeathLists:
    """The deaths of the blocks of some groups: one list for each group, in the order of the deaths.

    The blocks of a group die at the same numbers of computed tokens in every request, and in the same order. The lists
    give the blocks that died between two commits, for many rows and groups at once.
    """

    def __init__(self, live: Sequence[tuple[int, LiveRange]]) -> None:
        """Sort the deaths of groups, each given with a number."""
        self._numbers = np.array([number for number, _ in live], dtype=np.int64)
        # Each list ends with a death that no row reaches. All lists are searched as one array, in which the numbers of
        # each list are larger than those of the list before.
        size = max(len(ranges.deaths) for _, ranges in live) + 1
        span = max(ranges.block_size * size for _, ranges in live) + 2
        self._start = span * np.arange(len(live))[:, None]
        lists, indices = np.full((len(live), size), NEVER), np.zeros((len(live), size), dtype=np.int64)
        for at, blocks, (_, ranges) in zip(lists, indices, live, strict=True):
            order = np.argsort(ranges.deaths, kind="stable")
            blocks[: len(order)], at[: len(order)] = order, ranges.deaths[order]
        self._keys = (np.minimum(lists, span - 1) + self._start).reshape(-1)
        self._at, self._blocks = lists.reshape(-1), indices.reshape(-1)

    def after(self, num_computed: Positions) -> Positions:
        """Return ``[num_groups, n]``: the position in the lists of the first death after each row's computed tokens."""
        positions: Positions = self._keys.searchsorted(self._start + num_computed, "right")
        return positions

    def nearest(self, positions: Positions) -> Positions:
        """Return ``[n]``: the number of computed tokens at which the next block of each row dies."""
        nearest: Positions = np.minimum.reduce(self._at[positions])
        return nearest

    def between(self, start: Positions, stop: Positions) -> tuple[Positions | int, Positions, Positions]:
        """Return deaths between two results of ``after``: of each its group's number, the row's index, the block."""
        counts = (stop - start).reshape(-1)
        if np.maximum.reduce(counts) <= 1:
            (row_indices,) = counts.nonzero()
            blocks = self._blocks[start.reshape(-1)[row_indices]]
        else:
            row_indices = np.arange(len(counts)).repeat(counts)
            # Of each group and row, the last deaths before ``stop``, in their order.
            offset = stop.reshape(-1) - counts.cumsum()
            blocks = self._blocks[offset[row_indices] + np.arange(len(row_indices))]
        if len(self._numbers) == 1:
            return int(self._numbers[0]), row_indices, blocks
        groups, row_indices = np.divmod(row_indices, start.shape[1])
        return self._numbers[groups], row_indices, blocks


def longest_common_prefix(groups: Sequence[tuple[LiveRange, Pages]], step: int, max_tokens: int) -> int:
    """Return the longest prefix whose live blocks have pages in every group.

    It is a multiple of ``step`` tokens, and at most ``max_tokens``.
    """
    num_hits = max_tokens // step
    if not groups or not num_hits:
        return 0
    num_lost = sum(
        live.hits_lost(pages[: num_hits * step // live.block_size], step, num_hits) for live, pages in groups
    )
    return int(np.flatnonzero(num_lost == 0)[-1]) * step


def _samples(mask: AttentionMask, size: int) -> set[int]:
    """Return positions at which a spec's live range is compared with its mask."""
    reach = max(mask.window or 0, mask.chunk or 0) + mask.num_sink_tokens + 2 * size
    return {*range(min(reach, 64)), *range(0, 2 * reach, max(1, reach // 16)), reach, 3 * reach + 1}


def _agrees(deaths: Positions, answers: Answers, n: int) -> bool:
    """Return whether the whole blocks that are live at a position are those that did not die."""
    num_whole = n // answers.block_size
    is_live = np.zeros(num_whole, dtype=np.bool_)
    try:
        for start, stop in answers.live_blocks(n):
            is_live[start:stop] = True
    except SpecError:  # raised again for a request that reaches this position
        return False
    return bool((is_live == (deaths[:num_whole] > n)).all())


def _deaths_by_asking(answers: Answers, num_blocks: int, max_tokens: int) -> Positions:
    size = answers.block_size

    def is_dead(block: int, n: int) -> bool:
        first_token = block * size
        try:
            return not any(start < first_token + size and first_token < stop for start, stop in answers.live_ranges(n))
        except SpecError:  # no request is extended beyond a wrong answer, so its blocks may all be kept
            return False

    deaths = np.full(num_blocks, NEVER)
    age = 0
    for block in range(max_tokens // size):
        end = (block + 1) * size
        # Most blocks die as many tokens after their end as the block before them.
        guess = end + age
        if guess <= max_tokens and is_dead(block, guess) and (not age or not is_dead(block, guess - 1)):
            deaths[block] = guess
        elif is_dead(block, max_tokens):
            age = bisect_left(range(end, max_tokens), True, key=partial(is_dead, block))
            deaths[block] = end + age
        else:
            age = NEVER
    return deaths


def _runs_of(deaths: Positions) -> tuple[DeathRun, ...]:
    """Return deaths as runs with equal steps."""
    runs: list[DeathRun] = []
    steps, start = np.diff(deaths), 0
    while start < len(deaths):
        step = int(steps[start]) if start < len(steps) else 0
        (others,) = np.nonzero(steps[start:] != step)
        count = int(others[0]) + 1 if len(others) else len(deaths) - start
        runs.append((count, int(deaths[start]), step))
        start += count
    return tuple(runs)
