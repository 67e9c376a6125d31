"""What hits of a cache need, as data: for each group, which blocks a request needs to continue, without a type's name.

Another process that knows which blocks there are computes from it exactly the hits that the cache finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import attrs
import numpy as np

from kvframe.cache.live_range import NEVER, LiveRange, Positions
from kvframe.contract.specs import TOKENS
from kvframe.planning.plan import KVCachePlan

DeathRun = tuple[int, int, int]
"""Blocks in a row, ``(count, death, step)``: the first is needed at ``n < death``, each next one ``step`` longer."""


@attrs.frozen(kw_only=True)
class Need:
    """The tokens that a request needs to continue after ``n`` tokens, and so the blocks that contain one of them.

    Without a value in any field, it needs all tokens.

    Attributes:
        last: The last so many tokens before ``n``: of a window all but one, of a state 1. None for another form.
        chunk: The tokens since the last multiple of so many. None for another form.
        first: The first so many tokens too, whatever ``n`` is.
        deaths: If no other form is exact, when each block is needed no longer, from the first block on. A death of 0
            stands for never.
    """

    last: int | None = None
    chunk: int | None = None
    first: int = 0
    deaths: tuple[DeathRun, ...] = ()

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


@attrs.frozen(kw_only=True)
class GroupLayout:
    """One group of a cache.

    Attributes:
        group: Its index.
        block_size: Tokens per block.
        sequence: What its blocks store: ``"tokens"``, a request's own, or an input: ``"encoder"``.
        need: What a hit needs of its tokens. None for a group of an input, of which all blocks are needed.
    """

    group: int
    block_size: int
    sequence: str = TOKENS
    need: Need | None = None


@attrs.frozen(kw_only=True)
class CacheLayout:
    """What hits of a cache need.

    A request continues after ``n`` tokens, a multiple of ``alignment`` and fewer than its prompt has, if every group
    has the blocks that it needs at ``n``.

    Attributes:
        alignment: Hits are multiples of so many tokens.
        max_tokens: The tokens of the longest request.
        groups: The groups; none if the cache finds nothing.
    """

    alignment: int
    max_tokens: int
    groups: tuple[GroupLayout, ...]

    @classmethod
    def of(cls, plan: KVCachePlan, live: Mapping[int, LiveRange], *, is_caching: bool) -> Self:
        """Return the layout of a plan's cache; ``live`` says when blocks die, for each group of tokens."""
        needs = {index: Need.of(ranges, plan.max_model_len) for index, ranges in live.items()}
        groups = [
            GroupLayout(
                group=group.index,
                block_size=group.block_size,
                sequence=group.spec.sequence,
                need=needs.get(group.index),
            )
            for group in plan.groups
        ]
        return cls(alignment=plan.alignment, max_tokens=plan.max_model_len, groups=tuple(groups) if is_caching else ())


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
