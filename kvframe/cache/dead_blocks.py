"""Dead blocks: which of a row's blocks no later token needs, and the release of their pages as soon as it is so.

The blocks of a group die at the same numbers of computed tokens in every request, and in the same order. A sorted list
of these numbers says what died between two commits, for many rows and groups at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt

from kvframe.cache.allocation import BlockAllocator
from kvframe.cache.block_pool import BlockPool
from kvframe.cache.block_table import BlockTables, TableStack
from kvframe.cache.eviction import of_groups
from kvframe.cache.free_list import BlockIds, Groups
from kvframe.cache.live_range import NEVER, LiveRange
from kvframe.cache.publisher import Publisher
from kvframe.cache.rows import Counts, GroupKinds, RowNumbers, Rows

Positions = npt.NDArray[np.int64]


class _Deaths:
    """The deaths of a table stack's blocks: one list for each live range, in the order of the deaths.

    Attributes:
        places: ``[num_groups], int64, host``: the places in the stack of the groups in which blocks die.
    """

    def __init__(self, live: Sequence[tuple[int, LiveRange]]) -> None:
        """Sort the deaths of groups, each given with its place in the stack; groups may share a live range."""
        self.places = np.array([place for place, _ in live], dtype=np.int64)
        kinds = {id(each): each for _, each in live}
        order = {key: np.argsort(each.deaths, kind="stable") for key, each in kinds.items()}
        # Each list ends with a death that no row reaches. All lists are searched as one array, in which the numbers of
        # each list are larger than those of the list before.
        size = max(len(each.deaths) for each in kinds.values()) + 1
        span = max(each.block_size * size for each in kinds.values()) + 2
        at, blocks = np.full((len(kinds), size), NEVER), np.zeros((len(kinds), size), dtype=np.int64)
        for kind, (key, each) in enumerate(kinds.items()):
            at[kind, :-1], blocks[kind, :-1] = each.deaths[order[key]], order[key]
        starts = span * np.arange(len(kinds))[:, None]
        self._keys = (np.minimum(at, span - 1) + starts).reshape(-1)
        self._at, self._blocks = at.reshape(-1), blocks.reshape(-1)
        self._start = starts[[list(kinds).index(id(each)) for _, each in live]]

    def after(self, num_computed: Positions) -> Positions:
        """Return ``[num_groups, n]``: where in the lists the first death after each number of computed tokens is."""
        after: Positions = self._keys.searchsorted(self._start + num_computed, "right")
        return after

    def nearest(self, after: Positions) -> Positions:
        """Return ``[n]``: at how many computed tokens the next block of each row dies."""
        nearest: Positions = np.minimum.reduce(self._at[after])
        return nearest

    def between(self, start: Positions, stop: Positions) -> tuple[Positions | int, Positions, Positions]:
        """Return the deaths from where ``after`` was for each group and row to where it is now.

        Returns:
            ``[m]`` each: the group's place in the stack (a number if there is one group), which of the rows, the block.
        """
        counts = (stop - start).reshape(-1)
        if np.maximum.reduce(counts) <= 1:
            (which,) = counts.nonzero()
            blocks = self._blocks[start.reshape(-1)[which]]
        else:
            which = np.arange(len(counts)).repeat(counts)
            # Of each group and row, the last deaths before ``stop``, in their order.
            offset = stop.reshape(-1) - counts.cumsum()
            blocks = self._blocks[offset[which] + np.arange(len(which))]
        if len(self.places) == 1:
            return int(self.places[0]), which, blocks
        groups, which = np.divmod(which, start.shape[1])
        return self.places[groups], which, blocks


class DeadBlocks:
    """Releases blocks that died, and says when a row's next block dies (``RowNumbers.next_death``).

    Invariant: after a commit a row holds pages of live blocks only, and of blocks that its next tokens go into.

    Attributes:
        first_death: The number of computed tokens at which a block of a row that begins without a token dies.
    """

    def __init__(
        self,
        kinds: GroupKinds,
        numbers: RowNumbers,
        pool: BlockPool,
        tables: BlockTables,
        publisher: Publisher | None,
        allocator: BlockAllocator,
    ) -> None:
        """Start with every row without a token; without a publisher no dead block stays findable."""
        self._kinds, self._numbers = kinds, numbers
        self._pool, self._tables, self._publisher, self._allocator = pool, tables, publisher, allocator
        self._stacks: list[tuple[int, TableStack, _Deaths]] = []
        for s, stack in enumerate(kinds.stacks):
            live = [(place, kinds.live[group]) for place, group in enumerate(stack.groups)]
            dying = [(place, each) for place, each in live if not each.never_dies]
            if dying:
                self._stacks.append((s, stack, _Deaths(dying)))
        self.first_death = self.next_death(0)
        numbers.next_death[...] = self.first_death

    def next_death(self, num_computed: int) -> int:
        """Return at how many computed tokens the next block of a row dies."""
        at = np.array([num_computed])
        return min((int(deaths.nearest(deaths.after(at))[0]) for _, _, deaths in self._stacks), default=NEVER)

    def release_dead(self, rows: Rows, before: Counts, num_computed: Counts) -> None:
        """Release the blocks of rows that died since ``before`` computed tokens. Inputs are computed with the first."""
        nearest = []
        for s, stack, deaths in self._stacks:
            start, stop = deaths.after(np.minimum(before, num_computed)), deaths.after(num_computed)
            places, which, blocks = deaths.between(start, stop)
            if len(blocks):
                self._release_each(s, stack, places, rows[which], blocks)
            nearest.append(deaths.nearest(stop))
        for row in rows.tolist() if self._kinds.has_inputs else ():
            if self._numbers.states[row].missing:
                self._numbers.states[row].missing = frozenset()
                self._allocator.note_capacity(np.array([row]))
        self._numbers.next_death[rows] = reduce(np.minimum, nearest) if nearest else NEVER

    def _release_each(self, s: int, stack: TableStack, places: Positions | int, rows: Rows, blocks: Positions) -> None:
        """Release blocks of groups of a stack and of rows, each named by its place, row and index."""
        at = stack.at(places, rows, blocks)
        ids = stack.flat[at]
        if np.count_nonzero(ids) < len(ids):
            is_held = ids != 0
            rows, blocks, at, ids = rows[is_held], blocks[is_held], at[is_held], ids[is_held]
            places = places if isinstance(places, int) else places[is_held]
        if not len(ids):
            return
        stack.flat[at] = 0
        groups = stack.groups[places] if isinstance(places, int) else stack.index[places]
        if self._publisher is not None:
            self._publisher.release_passed(s, places, rows, blocks, at, ids, groups)
        else:
            self._pool.release_blocks(ids, groups)

    def release_refused(self, rows: Rows, num_computed: Counts) -> None:
        """Release blocks after rows' computed tokens in groups that store few blocks: the next step stores others."""
        for group in self._kinds.sparse:
            num_after = self._numbers.num_blocks[group.index][rows] * group.block_size - num_computed
            for place in (num_after >= group.block_size).nonzero()[0].tolist():
                self.release_refused_of(int(rows[place]), int(num_computed[place]))

    def release_refused_of(self, row: int, num_computed: int) -> None:
        """Release such blocks of one row."""
        has_released = False
        for group in self._kinds.sparse:
            start, stop = -(-num_computed // group.block_size), self._numbers.blocks_of[group.index, row]
            if start < stop:
                ids = self._tables[group.index].ids[row, start:stop]
                release_resident(self._pool, group.index, ids)
                ids[...] = 0
                if self._publisher is not None:
                    self._publisher.forget_refused(row, group.index, start, stop)
                self._numbers.blocks_of[group.index, row] = start
                has_released = True
        if has_released:
            self._allocator.note_capacity(np.array([row]))


def release_resident(pool: BlockPool, groups: int | Groups, ids: BlockIds) -> None:
    """Release the pages among ``ids``, a part of a block table, in order; 0 stands for none.

    Args:
        pool: The pages.
        groups: Their group, or the group of each.
        ids: ``[n], int32, host``; it is not kept.
    """
    if np.count_nonzero(ids) < len(ids):
        is_held = ids != 0
        ids, groups = ids[is_held], of_groups(groups, is_held)
    else:
        ids = ids.copy()
    if len(ids):
        pool.release_blocks(ids, groups)
