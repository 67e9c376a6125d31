"""The coordinator: allocates and releases the blocks of all running requests, in all groups, by their live ranges.

A row needs work only at few numbers of computed tokens: when it lacks a block, when a block dies, and when a full block
can be published. A step compares all rows with these numbers at once. Only the rows that reached one of them
get blocks, release dead ones, or publish full ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from kvframe.cache.allocation import BlockAllocator
from kvframe.cache.arguments import too_many_tokens
from kvframe.cache.block_order import BlockIds, Groups, of_groups
from kvframe.cache.block_pool import BlockPool
from kvframe.cache.block_table import NO_REQUEST, BlockTable, Counts, GroupKinds, RowNumbers, Rows, RowState, TableStack
from kvframe.cache.live_range import NEVER, DeathLists, Positions
from kvframe.cache.prefix_lookup import PrefixHit
from kvframe.cache.publisher import Publisher
from kvframe.contract.errors import RequestError
from kvframe.contract.foreign import safe_repr

PageCopier = Callable[[int, Sequence[int], Sequence[int]], None]
"""Copies pages within the pool, byte by byte: of a group, from some block ids to as many others. It may raise."""

FillPages = Callable[[int, Sequence[int], Sequence[int]], None]
"""Fills pages of a request: of a group, those of blocks given by their indices, which have these block ids. It may
raise."""

TokenMover = Callable[[int, Sequence[Sequence[int]], Mapping[int, Sequence[int]]], None]
"""Moves the tokens that layers keep of a prompt: given its number of tokens, the block ids of its request by group,
and the pages into which each of some groups moves the tokens that it keeps. It may raise."""


class KVCacheCoordinator:
    """Begins, extends, commits and frees rows. It asks no spec for its type.

    Invariant: the pages that a row references are those in its row of the block tables; ``RowNumbers.num_blocks`` says
    how many columns of a group are in use. After a commit a row holds pages of live blocks only, and of blocks that its
    next tokens go into.

    Attributes:
        allocator: Allocates the pages of rows.
        blocks_moved: Per group, the pages that were filled with the tokens that rows kept of their prompts.
    """

    def __init__(self, kinds: GroupKinds, numbers: RowNumbers, pool: BlockPool, publisher: Publisher) -> None:
        """Start with every row free; rows that the publisher does not follow publish nothing."""
        self._kinds, self._numbers, self._pool, self._publisher = kinds, numbers, pool, publisher
        self._tables, self._max_tokens = kinds.tables, kinds.plan.max_model_len
        self.allocator = BlockAllocator(kinds, numbers, pool, publisher.row_pages)
        # The table stacks in which blocks die, by their number.
        self._dying: list[tuple[int, TableStack, DeathLists]] = []
        for s, stack in enumerate(kinds.stacks):
            live = [(index, kinds.live[group]) for index, group in enumerate(stack.groups)]
            if dying := [(index, live_range) for index, live_range in live if not live_range.never_dies]:
                self._dying.append((s, stack, DeathLists(dying)))
        numbers.next_death[...] = self._first_death = self._death_after(0)
        # If there is one group, and its blocks live as long as their request, rows have no gaps, and are freed in fewer
        # steps: a request of 2,048 tokens costs 16 µs, with this and the allocator's one part, instead of 46.
        never_dies = self._first_death == NEVER and not kinds.budgets
        is_lone = kinds.is_plain and len(self._tables) == 1 and never_dies
        self._lone = self._tables[0] if is_lone else None
        self.blocks_moved = [0] * len(self._tables)

    # --- the beginning ------------------------------------------------------------------------------------------------

    def start_row(self, row: int, state: RowState, hit: PrefixHit) -> None:
        """Begin a request in a free row from a lookup's hit, and reference its blocks; it may raise a ``SpecError``."""
        if self._kinds.is_plain and not hit.num_tokens:
            self._numbers.states[row] = state
            return
        needed_pages = hit.needed_pages(self._kinds)
        state.branch = hit.branch
        state.missing_inputs = frozenset(
            blocks.sequence for blocks in state.inputs if blocks.sequence not in hit.inputs
        )
        self._begin_row(row, hit.num_tokens, state, needed_pages)
        self.allocator.note_capacity(np.array([row]))

    def fork_row(self, row: int, new_row: int, state: RowState, copier: PageCopier) -> bool:
        """Begin a request in a free row with the computed tokens and inputs of another row.

        Full blocks are never written again: their pages are shared. Of a block that is not full, the new row gets a
        copy.

        Returns:
            False, and nothing changed, if the pool has too few pages for the copies.
        """
        num_computed = self._numbers.num_computed.item(row)
        full_pages, other_blocks = [], []
        for group in self._kinds.plan.groups:
            count = num_full = self._numbers.num_blocks.item(group.index, row)
            if not group.is_of_input:
                # Blocks without a computed token stay the other row's own.
                count, num_full = min(count, -(-num_computed // group.block_size)), num_computed // group.block_size
            ids = self._tables[group.index].ids[row, :count].copy()
            other_blocks.append(np.flatnonzero(ids[num_full:]) + num_full)
            ids[num_full:] = 0
            full_pages.append(ids)

        def copy(group: int, blocks: Sequence[int], block_ids: Sequence[int]) -> None:
            copier(group, self._tables[group].ids[row, blocks].tolist(), block_ids)

        if not self.fill_row(new_row, num_computed, state, full_pages, other_blocks, copy):
            return False
        self._publisher.follow_fork(row, new_row)
        self.allocator.note_capacity(np.array([new_row]))
        return True

    def fill_row(
        self,
        row: int,
        num_computed: int,
        state: RowState,
        pages: Sequence[BlockIds],
        new_blocks: Sequence[Counts],
        fill: FillPages,
    ) -> bool:
        """Begin a request in a free row with computed tokens: in pages that there are, and in new ones.

        Args:
            row: The row.
            num_computed: The computed tokens.
            state: The request.
            pages: Per group, the page of each block that the row references; 0 for none.
            new_blocks: Per group, the indices of other blocks, which get new pages.
            fill: Fills these pages.

        Returns:
            False, and the row is free, if the pool has too few pages; it is free too if ``fill`` raises.
        """
        # These pages are held first, so that the allocation evicts none of them.
        self._begin_row(row, num_computed, state, pages)
        is_filled = False
        try:
            new_pages = self.allocator.allocate_blocks(row, new_blocks)
            if new_pages is not None:
                for group, (blocks, block_ids) in enumerate(zip(new_blocks, new_pages, strict=True)):
                    if len(blocks):
                        fill(group, blocks.tolist(), block_ids.tolist())
                is_filled = True
        finally:
            if not is_filled:
                self._release_row(row)
        return is_filled

    def _begin_row(self, row: int, num_computed: int, state: RowState, pages: Sequence[BlockIds]) -> None:
        """Give a free row to a request with computed tokens, and reference pages, per group by block, 0 for none."""
        numbers = self._numbers
        numbers.num_computed[row] = num_computed
        numbers.states[row] = state
        for group, first_token in state.first_tokens.items():
            self._tables.first_tokens[group][row] = first_token
        # Inputs are computed with the first tokens, so the first commit has work to do.
        numbers.next_death[row] = -1 if state.missing_inputs else self._death_after(num_computed)
        for group, block_ids in enumerate(pages):
            numbers.num_blocks[group, row] = len(block_ids)
            self._tables[group].ids[row, : len(block_ids)] = block_ids
            self._pool.add_references(group, block_ids[block_ids != 0])

    # --- while it runs ------------------------------------------------------------------------------------------------

    def extend_row(self, row: int, num_tokens: int) -> bool:
        """Allocate blocks for a row's tokens ``[0, num_tokens)`` and, the first time, for its inputs.

        Returns:
            False, and nothing changed, if the pool has too few pages.

        Raises:
            RequestError: The plan is for fewer tokens; nothing changed.
        """
        if num_tokens <= self._numbers.capacity.item(row):
            return True
        if num_tokens > self._max_tokens:
            raise too_many_tokens(num_tokens, self._max_tokens)
        return self.allocator.allocate_for_row(row, num_tokens)

    def extend_rows(self, rows: Rows, num_tokens: Counts) -> bool:
        """Do what ``extend_row`` does for each of several rows, or for none."""
        (lacking,) = (num_tokens > self._numbers.capacity[rows]).nonzero()
        if not len(lacking):
            return True
        rows, num_tokens = rows[lacking], num_tokens[lacking]
        if np.maximum.reduce(num_tokens) > self._max_tokens:
            raise too_many_tokens(int(num_tokens.max()), self._max_tokens)
        if len(rows) == 1:
            return self.allocator.allocate_for_row(int(rows[0]), int(num_tokens[0]))
        return self.allocator.allocate_for_rows(rows, num_tokens)

    def commit_row(self, row: int, num_computed: int) -> None:
        """Record that a row's tokens ``[0, num_computed)`` are computed; publish full blocks, release dead ones."""
        numbers = self._numbers
        num_before, numbers.num_computed[row] = numbers.num_computed.item(row), num_computed
        if num_computed >= numbers.next_publication.item(row):
            self._publisher.publish_row(row)
        if num_computed >= numbers.next_death.item(row):
            self._release_dead(np.array([row]), np.array([num_before]), np.array([num_computed]))
        if self._kinds.sparse:
            self._release_refused_of(row, num_computed)

    def commit_rows(self, rows: Rows, num_computed: Counts, *, keeps_extended: bool = False) -> None:
        """Do what ``commit_row`` does for each of several rows; ``keeps_extended`` is as for the manager's verb."""
        numbers = self._numbers
        (has_dead,) = (num_computed >= numbers.next_death[rows]).nonzero()
        num_before = numbers.num_computed[rows[has_dead]]
        numbers.num_computed[rows] = num_computed
        for row in rows[num_computed >= numbers.next_publication[rows]].tolist():
            self._publisher.publish_row(row)
        if len(has_dead):
            self._release_dead(rows[has_dead], num_before, num_computed[has_dead])
        for group in () if keeps_extended else self._kinds.sparse:
            num_after = numbers.num_blocks[group.index][rows] * group.block_size - num_computed
            for index in (num_after >= group.block_size).nonzero()[0].tolist():
                self._release_refused_of(int(rows[index]), int(num_computed[index]))

    def check_commit(self, rows: Rows, num_computed: Counts) -> None:
        """Refuse to commit more tokens of rows than their blocks have slots, or a negative number."""
        is_odd = (num_computed > self._numbers.capacity[rows]) | (num_computed < 0)
        if np.count_nonzero(is_odd):
            for row, count in zip(rows[is_odd].tolist(), num_computed[is_odd].tolist(), strict=True):
                self.check_commit_of(row, count)

    def check_commit_of(self, row: int, num_computed: int) -> None:
        """Check the tokens of one row, as ``check_commit`` does."""
        if 0 <= num_computed <= self._numbers.capacity.item(row):
            return
        # The capacity of rows with inputs and in groups that store few blocks may be less than the slots.
        counts = [
            self._numbers.num_blocks.item(group.index, row) * group.block_size for group in self._kinds.token_groups
        ]
        num_granted = min([*counts, self._max_tokens])
        if not 0 <= num_computed <= num_granted:
            raise RequestError(
                f"{num_computed} computed tokens are committed of a request with blocks for {num_granted}; extend "
                "it before its tokens are computed",
                code="not_extended",
            )

    def blocks(self, row: int) -> list[list[int]]:
        """Return a row's block ids, one list per group; 0 where a block is not resident."""
        counts = self._numbers.num_blocks[:, row].tolist()
        return [self._tables[index].ids[row, :count].tolist() for index, count in enumerate(counts)]

    # --- dead blocks --------------------------------------------------------------------------------------------------

    def _death_after(self, num_computed: int) -> int:
        """Return at how many computed tokens the next block of a row dies."""
        at = np.array([num_computed])
        return min((int(deaths.nearest(deaths.after(at))[0]) for _, _, deaths in self._dying), default=NEVER)

    def _release_dead(self, rows: Rows, num_before: Counts, num_computed: Counts) -> None:
        """Release blocks of rows that died after ``num_before`` computed tokens; record that inputs are computed."""
        nearest = []
        for s, stack, deaths in self._dying:
            start, stop = deaths.after(np.minimum(num_before, num_computed)), deaths.after(num_computed)
            group_indices, row_indices, blocks = deaths.between(start, stop)
            if len(blocks):
                self._release_each(s, stack, group_indices, rows[row_indices], blocks)
            nearest.append(deaths.nearest(stop))
        for row in rows.tolist() if self._kinds.input_groups else ():
            if self._numbers.states[row].missing_inputs:
                self._numbers.states[row].missing_inputs = frozenset()
                self.allocator.note_capacity(np.array([row]))
        self._numbers.next_death[rows] = reduce(np.minimum, nearest) if nearest else NEVER

    def _release_each(
        self, s: int, stack: TableStack, group_indices: Positions | int, rows: Rows, blocks: Positions
    ) -> None:
        """Release blocks of a stack, each given by its group's index in the stack, its row and its index."""
        at = stack.at(group_indices, rows, blocks)
        ids = stack.flat[at]
        if np.count_nonzero(ids) < len(ids):
            is_held = ids != 0
            rows, blocks, at, ids = rows[is_held], blocks[is_held], at[is_held], ids[is_held]
            group_indices = of_groups(group_indices, is_held)
        stack.flat[at] = 0
        groups = stack.groups[group_indices] if isinstance(group_indices, int) else stack.index[group_indices]
        self._publisher.release_passed(s, group_indices, rows, blocks, at, ids, groups)

    def _release_refused_of(self, row: int, num_computed: int) -> None:
        """Release a row's blocks after its computed tokens in groups that store few: the next step stores others."""
        has_released = False
        for group in self._kinds.sparse:
            start, stop = -(-num_computed // group.block_size), self._numbers.num_blocks.item(group.index, row)
            if start < stop:
                self._release_resident(self._tables[group.index].ids[row, start:stop], group.index)
                self._publisher.forget_refused(row, group.index, start, stop)
                self._numbers.num_blocks[group.index, row] = start
                has_released = True
        if has_released:
            self.allocator.note_capacity(np.array([row]))

    def _release_resident(self, ids: BlockIds, groups: int | Groups) -> None:
        """Release the pages in a part of a block table, in its order, and set the part to 0, which means no page."""
        is_held = ids != 0
        held_ids, groups = ids[is_held], groups if isinstance(groups, int) else groups[is_held.reshape(-1)]
        ids[...] = 0
        self._pool.release_blocks(held_ids, groups)

    # --- when a prompt is computed -----------------------------------------------------------------------------------

    def shrink_row(self, row: int, mover: TokenMover) -> bool:
        """Let a row give up all but the budget of its computed tokens, in each group that has one.

        Args:
            row: The row, whose prompt is computed.
            mover: Chooses the tokens of a layer, and copies them to other pages.

        Returns:
            False, and nothing changed, if the pool has too few pages for the tokens that stay.
        """
        num_computed, state = self._numbers.num_computed.item(row), self._numbers.states[row]
        first_tokens = {g: num_computed - budget for g, budget in self._kinds.budgets.items() if budget < num_computed}
        if not first_tokens or state.first_tokens:
            return True
        blocks = {}
        for group, first_token in first_tokens.items():
            size = self._tables[group].block_size
            blocks[group] = first_token // size, -(-num_computed // size)
        counts = [stop - start for start, stop in (blocks.get(g, (0, 0)) for g in range(len(self._tables)))]
        new_pages = self._pool.allocate_blocks(counts)
        if new_pages is None:
            return False
        pages = dict(zip(blocks, np.split(new_pages, np.cumsum([*filter(None, counts)])[:-1]), strict=True))
        try:
            mover(num_computed, self.blocks(row), {group: ids.tolist() for group, ids in pages.items()})
        except BaseException:
            self._pool.release_blocks(new_pages, np.repeat(np.arange(len(counts)), counts))
            raise
        self._publisher.unfollow(row)
        for group, (start, stop) in blocks.items():
            ids = self._tables[group].ids[row, :stop]
            self._release_resident(ids[::-1], group)
            ids[start:] = pages[group]
            self.blocks_moved[group] += stop - start
            self._tables.first_tokens[group][row] = first_tokens[group]
        state.first_tokens = first_tokens
        return True

    # --- the end ------------------------------------------------------------------------------------------------------

    def free_row(self, row: int) -> None:
        """Release every block of a row, its last block first, so that the first blocks of a prefix are evicted last."""
        if self._lone is not None:
            self._free_lone(self._lone, row)
            return
        self._publisher.unfollow(row)
        self._release_row(row)

    def _release_row(self, row: int) -> None:
        """Release every block of a row, which may have gaps, and reset the row's numbers."""
        numbers, num_tokens = self._numbers, 0
        for stack in self._tables.stacks:
            count = max([numbers.num_blocks.item(group, row) for group in stack.groups])
            if count:
                num_tokens = max(num_tokens, count * stack.block_size)
                # The last blocks of all groups come first.
                groups = stack.groups[0] if len(stack.groups) == 1 else np.tile(stack.index, count)
                self._release_resident(stack.ids[:, row, :count][:, ::-1].T, groups)
                for group in stack.groups:
                    numbers.num_blocks[group, row] = 0
        self._publisher.forget_pages(row, 0, num_tokens)
        numbers.num_computed[row] = numbers.capacity[row] = 0
        numbers.next_death[row] = self._first_death
        for group in numbers.states[row].first_tokens:
            self._tables.first_tokens[group][row] = 0
        numbers.states[row] = NO_REQUEST

    def _free_lone(self, table: BlockTable, row: int) -> None:
        """Release every block of a row in the only group, where rows have no gaps."""
        numbers = self._numbers
        ids = table.ids[row, : numbers.num_blocks.item(0, row)]
        num_released = self._publisher.unfollow(row, ids)
        if num_released < len(ids):
            self._pool.release_blocks(ids[: num_released - len(ids) - 1 : -1], 0)  # the last block first
        ids.fill(0)
        numbers.num_blocks[0, row] = numbers.num_computed[row] = numbers.capacity[row] = 0
        numbers.states[row] = NO_REQUEST


class TableRows:
    """The rows of the block tables; of those in ``free``, which belong to no request, the last one is taken next."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.free = list(range(num_rows - 1, -1, -1))
        self._is_taken = np.zeros(num_rows, dtype=np.int64)
        # Single numbers are written several times as fast in this.
        self._taken_flags = self._is_taken.data
        # A host gives the same rows in most steps: they are not checked again until a row is taken or freed.
        self._checked: tuple[Any, bytes] | None = None

    def next_free(self) -> int:
        """Return the row that is taken next; raise a ``RequestError`` (``no_row``) if none is free."""
        if not self.free:
            raise RequestError(
                f"no row of the table is free: there are {self._num_rows}; free a request, or ask for a "
                "greater max_num_seqs",
                code="no_row",
            )
        return self.free[-1]

    def take(self) -> None:
        """Take the next free row."""
        self._taken_flags[self.free.pop()], self._checked = 1, None

    def release(self, row: int) -> None:
        """Make a row free again."""
        self.free.append(row)
        self._taken_flags[row], self._checked = 0, None

    def check(self, rows: Any, counts: Any) -> None:
        """Refuse rows that do not belong to requests, rows given twice, and counts of another number (``bad_rows``)."""
        try:
            fingerprint = rows.dtype, rows.tobytes()
            is_right = rows.ndim == counts.ndim == 1 and len(rows) == len(counts) and counts.dtype.kind == "i"
            if is_right and fingerprint != self._checked:
                is_right = not np.count_nonzero(np.bincount(rows, minlength=self._num_rows) > self._is_taken)
                self._checked = fingerprint if is_right else None
        except (AttributeError, TypeError, ValueError, MemoryError):  # no arrays, no whole numbers, or too large ones
            is_right = False
        if not is_right:
            raise RequestError(
                f"the rows {safe_repr(rows)} with {safe_repr(counts)} tokens are refused: give int64 arrays of one "
                f"length, each row of a request in the table once, as 'row' says it; there are {self._num_rows} rows",
                code="bad_rows",
            )
