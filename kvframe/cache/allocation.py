"""Block allocation: which blocks rows lack for their next tokens, and pages for all of these blocks or for none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_pool import BlockPool
from kvframe.cache.block_table import BlockTables
from kvframe.cache.copy_on_write import SharedBlocks
from kvframe.cache.free_list import BlockIds
from kvframe.cache.group_kinds import GroupKinds
from kvframe.cache.row_pages import RowPages
from kvframe.cache.rows import RowNumbers, Rows, RowState
from kvframe.plan import KVCachePlan, PlannedGroup
from kvframe.specs import TokenRange

Counts = npt.NDArray[np.int64]
PagesOfGroups = Sequence[BlockIds] | npt.NDArray[np.int32]


@attrs.frozen(eq=False)
class _Part:
    """Groups whose rows always have equally many blocks: they get their pages together.

    Attributes:
        groups: Their indices.
        block_size: Tokens per block.
        stack: Their table stack, if they are all of its groups.
        where: The same indices, to index an array's first axis beside rows.
    """

    groups: tuple[int, ...]
    block_size: int
    stack: int | None
    where: slice | npt.NDArray[np.int64]

    @classmethod
    def of(cls, groups: Sequence[int], block_size: int, stack: int | None) -> _Part:
        first, last = groups[0], groups[-1]
        is_run = last - first + 1 == len(groups)
        where = slice(first, last + 1) if is_run else np.array(groups, dtype=np.int64)[:, None]
        return cls(tuple(groups), block_size, stack, where)


@attrs.frozen(eq=False)
class _NewBlocks:
    """Blocks that need a page, in each group of a part: ``rows`` and ``blocks`` are ``[n], int64, host``."""

    part: _Part
    rows: Rows
    blocks: Counts


class BlockAllocator:
    """Gives rows pages for the blocks that they lack, and notes for how many tokens they lack none (``capacity``).

    Invariant: each page that it gives a row is in the block tables and has one reference for it. If there are not
    enough pages, nothing changes for any row.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        kinds: GroupKinds,
        pool: BlockPool,
        tables: BlockTables,
        numbers: RowNumbers,
        row_pages: RowPages | None,
        shared: SharedBlocks | None,
    ) -> None:
        """Take pages from a pool; without publishing there are no ``row_pages``, without forks nothing is shared."""
        self._groups, self._sparse, self._of_tokens = kinds.groups, kinds.sparse, kinds.of_tokens
        self._asked = kinds.asked
        self._has_inputs = len(kinds.of_tokens) < len(kinds.groups)
        is_dense = {group.index for group in kinds.dense}
        self._dense = []
        for s, stack in enumerate(kinds.stacks):
            dense = [group for group in stack.groups if group in is_dense]
            if dense:
                self._dense.append(_Part.of(dense, stack.block_size, s if len(dense) == len(stack.groups) else None))
        self._part_of = [_Part.of([group.index], group.block_size, None) for group in kinds.groups]
        self._stacks = kinds.stacks
        self._lone = kinds.stacks[0] if kinds.is_plain and len(kinds.groups) == 1 else None
        self._alignment, self._max_tokens = plan.alignment, plan.max_model_len
        self._pool = pool
        self._tables = tables
        self._row_pages = row_pages
        self._shared = shared
        self._num_computed, self._num_blocks, self._capacity = (
            numbers.num_computed,
            numbers.num_blocks,
            numbers.capacity,
        )
        self._blocks_of, self._capacity_of = numbers.blocks_of, numbers.capacity_of
        self._states = numbers.states

    # --- asking -------------------------------------------------------------------------------------------------------

    def could_allocate(self, row: int, num_tokens: int, max_new_tokens: int) -> bool:
        """Return whether the pool has all pages that a row takes up to ``num_tokens`` tokens.

        Args:
            row: The row.
            num_tokens: How many tokens.
            max_new_tokens: The most tokens that one step computes.
        """
        lacking = [0] * len(self._groups)
        start = max(int(self._num_computed[row]), num_tokens - max_new_tokens)
        for group in self._of_tokens:
            held = np.count_nonzero(self._tables[group.index].ids[row, : self._num_blocks[group.index, row]])
            most = group.answers.num_resident_blocks(start, max(0, num_tokens - start))
            lacking[group.index] = max(0, most - int(held))
        for each in self._states[row].inputs:
            lacking[each.group] = each.num_blocks - int(self._num_blocks[each.group, row])
        return self._pool.can_allocate(lacking)

    def note_capacity(self, rows: Rows) -> None:
        """Work out for how many tokens rows lack no block; of groups that store few blocks, up to the block's end."""
        capacity = np.full(len(rows), self._max_tokens)
        for part in self._dense:
            np.minimum(capacity, self._num_blocks[part.groups[0], rows] * part.block_size, out=capacity)
        self._set_capacity(rows, capacity)

    def _set_capacity(self, rows: Rows, capacity: Counts) -> None:
        """Set the capacity of rows: what is given for dense groups, or less if other groups or inputs lack a block."""
        for group in self._sparse:
            ids, current = self._tables[group.index].ids, self._num_computed[rows] // group.block_size
            has_page = ids[rows, np.minimum(current, ids.shape[1] - 1)] != 0
            has_page &= current < self._num_blocks[group.index, rows]
            np.minimum(capacity, np.where(has_page, (current + 1) * group.block_size, 0), out=capacity)
        for place, row in enumerate(rows.tolist()) if self._has_inputs else ():
            if self._states[row].missing:
                capacity[place] = -1
        if self._asked:
            np.minimum(capacity, self._num_right(int(capacity.max())), out=capacity)
        self._capacity[rows] = capacity

    # --- giving -------------------------------------------------------------------------------------------------------

    def allocate_for_row(self, row: int, num_tokens: int) -> bool:
        """Give a row pages for its tokens ``[0, num_tokens)``, of which it lacks some, and for its inputs.

        Returns:
            False, and nothing changed, if the pool has too few pages.

        Raises:
            SpecError: A spec answers wrongly about these tokens; nothing changed.
        """
        if self._lone is None or (self._shared is not None and row in self._shared.rows):
            return self.allocate_for_rows(np.array([row]), np.array([num_tokens]))
        self._check_answers(num_tokens)
        have, need = self._blocks_of[0, row], -(-num_tokens // self._lone.block_size)
        pages = self._pool.allocate_blocks((need - have,))
        if pages is None:
            return False
        self._lone.ids[0, row, have:need] = pages
        if self._row_pages is not None:
            self._row_pages.record_run(row, have, need, pages)
        self._blocks_of[0, row] = need
        self._capacity_of[row] = self._num_right(min(need * self._lone.block_size, self._max_tokens))
        return True

    def allocate_for_rows(self, rows: Rows, num_tokens: Counts) -> bool:
        """Give each of several rows pages for its tokens up to ``num_tokens`` and for its inputs, or none of them.

        Args:
            rows: ``[n], int64, host``, each once; each lacks some block.
            num_tokens: ``[n], int64, host``.

        Returns:
            False, and nothing changed, if the pool has too few pages.

        Raises:
            SpecError: A spec answers wrongly about these tokens; nothing changed.
        """
        return self._allocate(rows, num_tokens, ()) is not None

    def allocate_for_return(self, row: int, num_tokens: int, gaps: Sequence[Sequence[int]]) -> list[BlockIds] | None:
        """Give a row that comes back pages for gaps among its blocks, and for its tokens ``[0, num_tokens)``.

        Args:
            row: The row.
            num_tokens: As for ``allocate_for_row``.
            gaps: Per group, the indices of blocks that the row has and that have no page.

        Returns:
            Per group, the pages of the gaps; None, and nothing changed, if the pool has too few.
        """
        return self._allocate(np.array([row]), np.array([num_tokens]), gaps)

    def _allocate(self, rows: Rows, num_tokens: Counts, gaps: Sequence[Sequence[int]]) -> list[BlockIds] | None:
        """Give rows pages, and return those of the gaps."""
        if self._asked:
            self._check_answers(int(num_tokens.max()))
        new = [self._dense_blocks(part, rows, num_tokens) for part in self._dense]
        for group in self._sparse:
            new.append(self._sparse_blocks(group, rows, num_tokens, gaps[group.index] if gaps else ()))
        if self._has_inputs:
            new += self._blocks_of_inputs(rows)
        shared = self._shared.blocks_to_copy(rows) if self._shared is not None and self._shared.rows else ()
        num_plain = len(new)
        new += [self._blocks_in(each.group, each.row, (each.block,)) for each in shared]
        new += [self._blocks_in(index, int(rows[0]), blocks) for index, blocks in enumerate(gaps)]
        counts = [0] * len(self._groups)
        for each in new:
            for index in each.part.groups:
                counts[index] += len(each.blocks)
        taken = self._pool.allocate_blocks(counts)
        if taken is None:
            return None
        pages = _split(taken, counts, new)
        if self._shared is not None and shared:
            self._shared.copy(shared, [each[0] for each in pages[num_plain : num_plain + len(shared)]], taken, counts)
        for each, its_pages in zip(new, pages, strict=True):
            if len(each.blocks):
                self._write(each, its_pages)
        self._count_blocks(rows, num_tokens)
        if self._shared is not None and self._shared.rows:
            self._shared.release_copied(shared, rows)
        return [its_pages[0] for its_pages in pages[num_plain + len(shared) :]]

    # --- which blocks -------------------------------------------------------------------------------------------------

    def _dense_blocks(self, part: _Part, rows: Rows, num_tokens: Counts) -> _NewBlocks:
        """Return the blocks that rows lack in groups that store every block."""
        have = self._num_blocks[part.groups[0], rows]
        added = (num_tokens + (part.block_size - 1)) // part.block_size - have
        (lacking,) = (added > 0).nonzero()
        if len(lacking) < len(rows):
            rows, have, added = rows[lacking], have[lacking], added[lacking]
        if not len(rows) or np.maximum.reduce(added) == 1:
            return _NewBlocks(part, rows, have)
        blocks = np.arange(added.sum()) - np.repeat(np.cumsum(added) - added - have, added)
        return _NewBlocks(part, np.repeat(rows, added), blocks)

    def _sparse_blocks(
        self, group: PlannedGroup, rows: Rows, num_tokens: Counts, gaps: Sequence[int] = ()
    ) -> _NewBlocks:
        """Return the blocks that rows lack in a group that stores few blocks, but not the gaps.

        Raises:
            SpecError: The spec answers wrongly about the blocks that it stores.
        """
        ids, num_computed = self._tables[group.index].ids, self._num_computed[rows]
        first, last = num_computed // group.block_size, (num_tokens - 1) // group.block_size
        # While the tokens stay within a block that has a page, the row lacks nothing.
        is_asked = (num_computed < num_tokens) & ((first < last) | (ids[rows, np.minimum(first, last)] == 0))
        found_rows: list[int] = []
        found_blocks: list[int] = []
        for row, start, stop in zip(
            rows[is_asked].tolist(), num_computed[is_asked].tolist(), num_tokens[is_asked].tolist(), strict=True
        ):
            for begin, end in self._stored_blocks(group, row, start, stop):
                lacking = [block for block in range(begin, end) if not ids[row, block] and block not in gaps]
                found_rows += [row] * len(lacking)
                found_blocks += lacking
        part = self._part_of[group.index]
        return _NewBlocks(part, np.array(found_rows, dtype=np.int64), np.array(found_blocks, dtype=np.int64))

    def _stored_blocks(self, group: PlannedGroup, row: int, num_computed: int, num_tokens: int) -> Sequence[TokenRange]:
        """Return the ranges of blocks that a group stores when a row's tokens up to ``num_tokens`` are computed."""
        block = num_computed // group.block_size
        # A block that the tokens begin is stored if it is live after them: most decodes need not ask for it.
        if num_tokens <= (block + 1) * group.block_size and group.answers.is_live(block, num_tokens):
            return ((block, block + 1),)
        branch = self._where_others_continue(self._states[row], num_computed, num_tokens)
        return group.answers.stored_blocks(num_computed, num_tokens - num_computed, branch)

    def _blocks_of_inputs(self, rows: Rows) -> list[_NewBlocks]:
        """Return the blocks of rows' inputs that are not computed."""
        return [
            self._blocks_in(each.group, row, range(self._blocks_of[each.group, row], each.num_blocks))
            for row in rows.tolist()
            if self._states[row].missing
            for each in self._states[row].inputs
            if each.sequence in self._states[row].missing
        ]

    def _blocks_in(self, group: int, row: int, blocks: Iterable[int]) -> _NewBlocks:
        found = np.fromiter(blocks, dtype=np.int64)
        return _NewBlocks(self._part_of[group], np.full(len(found), row), found)

    def _where_others_continue(self, state: RowState, num_computed: int, num_tokens: int) -> int:
        """Return from where in the tokens up to ``num_tokens`` a later request may want to continue.

        That is where they part from an earlier request's tokens. Without such a place it is the last boundary of all
        groups before the last token: a request that comes again computes its last token.
        """
        if num_computed < state.branch <= num_tokens:
            return state.branch
        return (num_tokens - 1) // self._alignment * self._alignment

    # --- what rows have afterwards ------------------------------------------------------------------------------------

    def _write(self, new: _NewBlocks, pages: PagesOfGroups) -> None:
        """Put pages, one row for each group of the part, into the block tables."""
        part = new.part
        if part.stack is not None:
            self._stacks[part.stack].ids[:, new.rows, new.blocks] = pages
            if self._row_pages is not None:
                self._row_pages.record_stack(part.stack, new.rows, new.blocks, pages)
            return
        for group, of_group in zip(part.groups, pages, strict=True):
            self._tables[group].ids[new.rows, new.blocks] = of_group
            if self._row_pages is not None and not self._groups[group].is_of_input:
                self._row_pages.record_group(group, new.rows, new.blocks, of_group)

    def _count_blocks(self, rows: Rows, num_tokens: Counts) -> None:
        """Note how many blocks rows have now, and for how many tokens they lack none."""
        capacity = np.full(len(rows), self._max_tokens)
        for part in self._dense:
            counts = (num_tokens + (part.block_size - 1)) // part.block_size
            np.maximum(counts, self._num_blocks[part.groups[0], rows], out=counts)
            self._num_blocks[part.where, rows] = counts
            np.minimum(capacity, counts * part.block_size, out=capacity)
        for group in self._sparse:
            counts = (num_tokens + (group.block_size - 1)) // group.block_size
            self._num_blocks[group.index, rows] = np.maximum(counts, self._num_blocks[group.index, rows])
        for row in rows.tolist() if self._has_inputs else ():
            for each in self._states[row].inputs:
                self._blocks_of[each.group, row] = each.num_blocks
        self._set_capacity(rows, capacity)

    def _num_right(self, num_tokens: int) -> int:
        """Return up to which token, ``num_tokens`` at most, the types that are asked answer rightly."""
        for answers in self._asked:
            num_tokens = answers.num_right(num_tokens)
        return num_tokens

    def _check_answers(self, num_tokens: int) -> None:
        """Raise ``SpecError`` if a type that is asked answers wrongly about one of the first tokens of a request."""
        for answers in self._asked:
            answers.check(num_tokens)


def _split(taken: BlockIds, counts: Sequence[int], new: Sequence[_NewBlocks]) -> list[PagesOfGroups]:
    """Cut allocated pages, one group after the other, into those of each of the new blocks, a row for each group."""
    starts = [0, *accumulate(counts)]
    pages: list[PagesOfGroups] = []
    for each in new:
        groups, count = each.part.groups, len(each.blocks)
        first, last = groups[0], groups[-1]
        if isinstance(each.part.where, slice) and starts[last] + count == starts[first] + len(groups) * count:
            pages.append(taken[starts[first] : starts[first] + len(groups) * count].reshape(len(groups), count))
        else:
            pages.append([taken[starts[group] : starts[group] + count] for group in groups])
        for group in groups:
            starts[group] += count
    return pages
