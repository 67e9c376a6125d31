"""Dead blocks: which of a row's blocks no later token needs, and the release of their pages as soon as it is so.

The blocks of a group die at the same numbers of computed tokens in every request, and in the same order. So each row
has one position in this list for each group, and a step compares the next entry of all rows and groups at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.allocation import BlockAllocator
from kvframe.cache.block_pool import BlockPool
from kvframe.cache.block_table import BlockTables, TableStack
from kvframe.cache.free_list import BlockIds
from kvframe.cache.group_kinds import GroupKinds
from kvframe.cache.live_range import NEVER, LiveRange
from kvframe.cache.publisher import Publisher
from kvframe.cache.rows import RowNumbers, Rows, RowState

Positions = npt.NDArray[np.int64]


class _Deaths:
    """The deaths of a table stack's blocks, in their order, and how far each row is.

    Invariant: of each row and group, exactly the blocks before ``next`` died at its number of computed tokens.

    Attributes:
        places: ``[num_groups], int64, host``: the places in the stack of the groups in which blocks die.
        next: ``[num_groups, max_num_seqs], int64, host``: the place of each row's next death in the lists.
    """

    def __init__(self, live: Sequence[tuple[int, LiveRange]], max_num_seqs: int) -> None:
        """Start with every row at the beginning."""
        self.places = np.array([place for place, _ in live], dtype=np.int64)
        # Many groups may have one live range, and share its list.
        kinds = list({id(each): each for _, each in live}.values())
        order = [np.argsort(each.deaths, kind="stable") for each in kinds]
        self._lists = [
            each.deaths[blocks[: np.count_nonzero(each.deaths < NEVER)]]
            for each, blocks in zip(kinds, order, strict=True)
        ]
        # Two entries after the last one, so that the next two can be read at every place.
        width = 2 + max(map(len, self._lists))
        at, blocks = np.full((len(kinds), width), NEVER), np.zeros((len(kinds), width), dtype=np.int64)
        for kind, (deaths, of_kind) in enumerate(zip(self._lists, order, strict=True)):
            at[kind, : len(deaths)], blocks[kind, : len(deaths)] = deaths, of_kind[: len(deaths)]
        self._at, self._blocks = at.reshape(-1), blocks.reshape(-1)
        number = {id(each): kind for kind, each in enumerate(kinds)}
        self._kind = np.array([number[id(each)] for _, each in live], dtype=np.int64)
        self._first = (self._kind * width)[:, None]
        self.next = np.zeros((len(live), max_num_seqs), dtype=np.int64)

    def after(self, num_computed: Positions) -> Positions:
        """Return ``[num_groups, n]``: how many deaths there are up to each number of computed tokens."""
        found = np.stack([np.searchsorted(deaths, num_computed, side="right") for deaths in self._lists])
        return found if len(found) == len(self._kind) else found[self._kind]

    def nearest(self, places: Positions) -> Positions:
        """Return ``[n]``: the number of computed tokens at which the next block of each row dies."""
        nearest: Positions = np.minimum.reduce(self._at[self._first + places])
        return nearest

    def take(self, rows: Rows, num_computed: Positions) -> tuple[Positions | int, Positions, Positions, Positions]:
        """Advance rows to their numbers of computed tokens.

        Returns:
            Of each death on the way, the group's place in the stack (a number if there is one group), the index in
            ``rows`` and the block, ``[m]`` each; and ``[n]``: at how many computed tokens each row's next block dies.
        """
        before = self.next.take(rows, axis=1)
        flat = before + self._first
        first, second = self._at.take(flat), self._at.take(flat + 1)
        if np.count_nonzero(second <= num_computed):
            after = self.after(num_computed)
            counts = (after - before).reshape(-1)
            which = np.repeat(np.arange(len(counts)), counts)
            starts = np.cumsum(counts) - counts
            died = flat.reshape(-1)[which] + np.arange(len(which)) - starts[which]
            nearest = self._at.take(after + self._first)
        else:
            is_due = first <= num_computed
            after = before + is_due
            (which,) = is_due.reshape(-1).nonzero()
            died = flat.reshape(-1)[which]
            nearest = np.where(is_due, second, first)
        self.next[:, rows] = after
        blocks = self._blocks.take(died)
        if len(self._kind) == 1:
            return int(self.places[0]), which, blocks, nearest[0]
        groups, which = np.divmod(which, len(rows))
        return self.places[groups], which, blocks, np.minimum.reduce(nearest)


class DeadBlocks:
    """Releases blocks that died, and says when a row's next block dies (``RowNumbers.next_death``).

    Invariant: after ``release`` a row holds pages of live blocks only, and of blocks that its next tokens go into.

    Attributes:
        first_death: The number of computed tokens at which a block of a row that begins without a token dies.
    """

    def __init__(
        self,
        kinds: GroupKinds,
        pool: BlockPool,
        tables: BlockTables,
        numbers: RowNumbers,
        publisher: Publisher | None,
        allocator: BlockAllocator,
    ) -> None:
        """Start with every row without a token; without a publisher no dead block stays findable."""
        self._sparse = kinds.sparse
        self._has_inputs = len(kinds.of_tokens) < len(kinds.groups)
        self._sparse_index = np.array([group.index for group in kinds.sparse], dtype=np.int64)[:, None]
        self._sparse_size = np.array([group.block_size for group in kinds.sparse], dtype=np.int64)[:, None]
        self._stacks: list[tuple[int, TableStack, _Deaths]] = []
        for s, stack in enumerate(kinds.stacks):
            live = [(place, kinds.live[group]) for place, group in enumerate(stack.groups)]
            dying = [(place, each) for place, each in live if not each.never_dies]
            if dying:
                self._stacks.append((s, stack, _Deaths(dying, len(numbers.states))))
        self._pool = pool
        self._tables = tables
        self._publisher = publisher
        self._allocator = allocator
        self._num_blocks, self._blocks_of, self._states = numbers.num_blocks, numbers.blocks_of, numbers.states
        self._next_death, self._death_of = numbers.next_death, numbers.death_of
        start = np.zeros(1, dtype=np.int64)
        self.first_death = min((int(deaths.nearest(start)[0]) for _, _, deaths in self._stacks), default=NEVER)
        self._next_death[...] = self.first_death

    def begin_row(self, row: int, num_computed: int, state: RowState) -> None:
        """Record that a row begins, with exactly those blocks that are live after its computed tokens."""
        nearest = self.first_death
        if num_computed and self._stacks:
            nearest = NEVER
            for _, _, deaths in self._stacks:
                after = deaths.after(np.array([num_computed]))
                deaths.next[:, row] = after[:, 0]
                nearest = min(nearest, int(deaths.nearest(after)[0]))
        # The first commit also says that the inputs are computed.
        self._death_of[row] = -1 if state.missing else nearest

    def clear_row(self, row: int) -> None:
        """Let a row be as one without a token."""
        self._death_of[row] = self.first_death
        for _, _, deaths in self._stacks:
            deaths.next[:, row] = 0

    def release_dead(self, rows: Rows, num_computed: Positions) -> None:
        """Release the blocks of rows that no token after the computed ones needs. Inputs are computed with the first.

        Args:
            rows: ``[n], int64, host``, each once.
            num_computed: ``[n], int64, host``.
        """
        next_death: Positions | None = None
        for s, stack, deaths in self._stacks:
            places, which, blocks, nearest = deaths.take(rows, num_computed)
            if len(blocks):
                self._release_each(s, stack, places, rows[which], blocks)
            next_death = nearest if next_death is None else np.minimum(next_death, nearest)
        if self._has_inputs:
            self._inputs_are_computed(rows)
        self._next_death[rows] = NEVER if next_death is None else next_death

    def release_refused(self, rows: Rows, num_computed: Positions) -> None:
        """Release blocks after rows' computed tokens in groups that store few blocks: the next step stores others.

        Args:
            rows: ``[n], int64, host``, each once.
            num_computed: ``[n], int64, host``.
        """
        beyond = self._num_blocks[self._sparse_index, rows] * self._sparse_size - num_computed >= self._sparse_size
        (refused,) = np.logical_or.reduce(beyond).nonzero()
        for row, count in zip(rows[refused].tolist(), num_computed[refused].tolist(), strict=True):
            self.release_refused_of(row, count)

    def release_refused_of(self, row: int, num_computed: int) -> None:
        """Release such blocks of one row."""
        has_released = False
        for group in self._sparse:
            start, stop = -(-num_computed // group.block_size), self._blocks_of[group.index, row]
            if start < stop:
                ids = self._tables[group.index].ids[row, start:stop]
                if self._publisher is not None:
                    self._publisher.row_pages.keep_published(row, group.index, start, ids, self._pool)
                release_resident(self._pool, group.index, ids)
                ids[...] = 0
                self._blocks_of[group.index, row] = start
                has_released = True
        if has_released:
            self._allocator.note_capacity(np.array([row]))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _inputs_are_computed(self, rows: Rows) -> None:
        for row in rows.tolist():
            if self._states[row].missing:
                self._states[row].missing = frozenset()
                self._allocator.note_capacity(np.array([row]))

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


def release_resident(pool: BlockPool, group: int, ids: BlockIds) -> None:
    """Release the pages of a group that are there, in order.

    Args:
        pool: The pages.
        group: The group.
        ids: ``[n], int32, host``: a part of a block table, 0 for none; it is not kept.
    """
    held = ids.copy() if np.count_nonzero(ids) == len(ids) else ids[ids != 0]
    if len(held):
        pool.release_blocks(held, group)
