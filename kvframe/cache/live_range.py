"""Live ranges as arrays: for each block of a group, the number of computed tokens from which on no token needs it.

A cache spec says which tokens are live at one position. A dead block stays dead, so one number for each block says the
same for all positions, and a step compares it for many requests at once. If the spec's mask says the same as its live
ranges, a formula gives these numbers. Otherwise the spec is asked for each block, once, at set-up.
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


@attrs.frozen(eq=False)
class LiveRange:
    """When the blocks of one group die.

    Attributes:
        block_size: Tokens per block.
        deaths: ``[max_blocks], int64, host``: the number of computed tokens from which on no token needs the block, at
            least the block's end; ``NEVER`` if the longest request needs it to its end.
        is_by_mask: Whether a mask says the same as the live ranges at all sampled positions.
    """

    block_size: int
    deaths: Positions
    is_by_mask: bool

    @classmethod
    def of(cls, answers: Answers, max_tokens: int) -> LiveRange:
        """Return when the blocks of a type die.

        Args:
            answers: The spec's checked answers.
            max_tokens: The tokens of the longest request.
        """
        size, mask = answers.block_size, answers.mask()
        num_blocks = -(-max_tokens // size)
        deaths = None
        if mask is not None:
            deaths = _deaths_by_mask(mask, size, num_blocks)
            if not all(_agrees(deaths, answers, n) for n in _samples(mask, size) if n <= max_tokens):
                deaths = None
        is_by_mask = deaths is not None
        if deaths is None:
            deaths = _deaths_by_asking(answers, num_blocks, max_tokens)
        return cls(size, np.where(deaths > max_tokens, NEVER, deaths), is_by_mask)

    @property
    def never_dies(self) -> bool:
        """Whether every block is needed until its request ends."""
        return bool((self.deaths == NEVER).all())

    @property
    def needs_last(self) -> bool:
        """Whether every token needs the block of the token before it."""
        return bool((self.deaths > self._ends(len(self.deaths))).all())

    def needed(self, step: int, max_tokens: int) -> npt.NDArray[np.bool_]:
        """Return which blocks some prefix hit could need: ``[max_blocks], bool``.

        Args:
            step: Hits end at multiples of so many tokens.
            max_tokens: The tokens of the longest hit.
        """
        ends = self._ends(len(self.deaths))
        if step > max_tokens:
            return np.zeros(len(ends), dtype=np.bool_)
        first_hits = ends + -ends % step
        needed: npt.NDArray[np.bool_] = (self.deaths > first_hits) & (first_hits <= max_tokens)
        return needed

    def longest_prefix(self, pages: Pages, num_tokens: int) -> int:
        """Return the longest prefix of at most ``num_tokens`` tokens, in whole blocks, whose live blocks have pages."""
        num_blocks = min(num_tokens // self.block_size, len(pages))
        pages = pages[:num_blocks]
        if np.count_nonzero(pages) == num_blocks:
            return num_blocks * self.block_size
        covered = self.hits_lost(pages, self.block_size, num_blocks)
        return int(np.flatnonzero(covered == 0)[-1]) * self.block_size

    def hits_lost(self, pages: Pages, step: int, num_hits: int) -> Positions:
        """Return by how many missing blocks each hit is lost: ``[num_hits + 1], int64``.

        Args:
            pages: The pages of a prefix.
            step: Tokens from one hit to the next, a multiple of the block size.
            num_hits: The number of the longest hit, whose blocks ``pages`` holds.
        """
        (missing,) = np.nonzero(pages == 0)
        first = -(-(missing + 1) * self.block_size // step)
        # A hit at the position where a block is dead does not need it.
        stop = np.minimum(-(-self.deaths[missing] // step), num_hits + 1)
        is_lost = first < stop
        changes = np.bincount(first[is_lost], minlength=num_hits + 2) - np.bincount(
            stop[is_lost], minlength=num_hits + 2
        )
        lost: Positions = np.cumsum(changes[: num_hits + 1])
        return lost

    def _ends(self, num_blocks: int) -> Positions:
        return (np.arange(num_blocks) + 1) * self.block_size


def longest_common_prefix(groups: Sequence[tuple[LiveRange, Pages]], step: int, most: int) -> int:
    """Return the longest prefix whose live blocks have pages in every group.

    Args:
        groups: The live range and the pages of each group.
        step: A multiple of all groups' block sizes.
        most: The tokens that it has at most.
    """
    num_hits = most // step
    if not groups or not num_hits:
        return 0
    lost = sum(live.hits_lost(pages[: num_hits * step // live.block_size], step, num_hits) for live, pages in groups)
    return int(np.flatnonzero(lost == 0)[-1]) * step


def _deaths_by_mask(mask: AttentionMask, size: int, num_blocks: int) -> Positions:
    blocks = np.arange(num_blocks)
    ends = (blocks + 1) * size
    if mask.window:
        deaths = ends + (mask.window - 1)
    elif mask.chunk:
        deaths = -(-ends // mask.chunk) * mask.chunk
    else:
        return np.full(num_blocks, NEVER)
    return np.where(blocks < -(-mask.num_sink_tokens // size), NEVER, deaths)


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
        first = block * size
        try:
            return not any(start < first + size and first < stop for start, stop in answers.live_ranges(n))
        except SpecError:  # no request gets further than to a wrong answer, so that it may keep all its blocks
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
