"""Block allocation: which blocks rows lack for their next tokens, and pages for all of these blocks or for none."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_pool import BlockPool
from kvframe.cache.block_table import BlockTables, TableStack
from kvframe.cache.copy_on_write import SharedBlocks
from kvframe.cache.free_list import BlockIds
from kvframe.cache.group_kinds import GroupKinds
from kvframe.cache.row_pages import RowPages
from kvframe.cache.rows import RowNumbers, Rows, RowState
from kvframe.contract.specs import TokenRange
from kvframe.planning.plan import KVCachePlan, PlannedGroup

Counts = npt.NDArray[np.int64]
PagesOfGroups = Sequence[BlockIds] | npt.NDArray[np.int32]


@attrs.frozen(eq=False)
class _Part:
    """Consecutive groups of a table stack whose rows always have equally many blocks: they get their pages together.

    Attributes:
        groups: Their indices.
        block_size: Tokens per block.
        is_dense: Whether they store every block.
        ids: ``[num_groups, max_num_seqs, max_blocks], int32, host``: their block tables.
        row_pages: Likewise, the pages that rows were given; None if these are not recorded beside the block tables.
    """

    groups: slice
    block_size: int
    is_dense: bool
    ids: BlockIds
    row_pages: BlockIds | None

    @property
    def num_groups(self) -> int:
        """How many groups they are."""
        return len(self.ids)


class _NewBlocks(NamedTuple):
    """Blocks that need a page, in each group of a part.

    Attributes:
        part: The groups.
        rows: ``[n], int64, host``: the row of each block.
        blocks: ``[n], int64, host``: its index.
        num_blocks: Of all rows that blocks are allocated for, how many they have with these; None if it is no matter.
    """

    part: _Part
    rows: Rows
    blocks: Counts
    num_blocks: Counts | None = None


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
        stacks = [(stack, row_pages.apart(s) if row_pages else None) for s, stack in enumerate(kinds.stacks)]
        stacks += [(stack, None) for stack in tables.stacks if stack not in kinds.stacks]
        is_dense = {group.index for group in kinds.dense}
        self._dense = [
            _part(stack, of_rows, run, is_dense=True) for stack, of_rows in stacks for run in _runs(stack, is_dense)
        ]
        # Pages are allocated in the order of the groups.
        self._dense.sort(key=lambda part: part.groups.start)
        self._part_of = {
            group: _part(stack, of_rows, range(place, place + 1), is_dense=False)
            for stack, of_rows in stacks
            for place, group in enumerate(stack.groups)
        }
        self._is_plain = kinds.is_plain
        self._lone = self._dense[0] if kinds.is_plain and len(kinds.groups) == 1 else None
        self._alignment, self._max_tokens = plan.alignment, plan.max_model_len
        self._pool = pool
        self._tables = tables
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
            np.minimum(capacity, self._num_blocks[part.groups.start, rows] * part.block_size, out=capacity)
        self._set_capacity(rows, capacity)

    def _set_capacity(self, rows: Rows, capacity: Counts) -> None:
        """Set the capacity of rows: what is given for dense groups, or less if other groups or inputs lack a block."""
        np.minimum(capacity, self._max_tokens, out=capacity)
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
        if not self._is_plain or (self._shared is not None and row in self._shared.rows):
            return self.allocate_for_rows(np.array([row]), np.array([num_tokens]))
        self._check_answers(num_tokens)
        if self._lone is None:
            return self._allocate_dense(row, num_tokens)
        have, need = self._blocks_of[0, row], -(-num_tokens // self._lone.block_size)
        pages = self._pool.allocate_blocks((need - have,))
        if pages is None:
            return False
        self._lone.ids[0, row, have:need] = pages
        if self._lone.row_pages is not None:
            self._lone.row_pages[0, row, have:need] = pages
        self._blocks_of[0, row] = need
        self._capacity_of[row] = self._num_right(min(need * self._lone.block_size, self._max_tokens))
        return True

    def _allocate_dense(self, row: int, num_tokens: int) -> bool:
        """Give one row pages in several groups, all of which store every block, without arrays of rows."""
        counts, needs = [0] * len(self._groups), []
        for part in self._dense:
            have, need = self._blocks_of[part.groups.start, row], -(-num_tokens // part.block_size)
            needs.append((part, have, max(have, need)))
            counts[part.groups] = [max(0, need - have)] * part.num_groups
        taken = self._pool.allocate_blocks(counts)
        if taken is None:
            return False
        num_used, capacity = 0, self._max_tokens
        for part, have, need in needs:
            if need > have:
                end = num_used + part.num_groups * (need - have)
                pages, num_used = taken[num_used:end].reshape(part.num_groups, need - have), end
                part.ids[:, row, have:need] = pages
                if part.row_pages is not None:
                    part.row_pages[:, row, have:need] = pages
                self._num_blocks[part.groups, row] = need
            capacity = min(capacity, need * part.block_size)
        self._capacity_of[row] = self._num_right(capacity)
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
        extra = self._blocks_of_inputs(rows) if self._has_inputs else []
        shared = self._shared.blocks_to_copy(rows) if self._shared is not None and self._shared.rows else []
        first_shared = len(extra)
        extra += [self._blocks_in(each.group, each.row, (each.block,)) for each in shared]
        first_gaps = len(extra)
        extra += [self._blocks_in(index, int(rows[0]), blocks) for index, blocks in enumerate(gaps)]
        counts = [0] * len(self._groups)
        for each in new:
            counts[each.part.groups] = [len(each.blocks)] * each.part.num_groups
        for each in extra:
            counts[each.part.groups.start] += len(each.blocks)
        taken = self._pool.allocate_blocks(counts)
        if taken is None:
            return None
        starts = [0, *accumulate(counts)]
        extra_pages = _take_last(extra, starts, taken)
        if self._shared is not None and shared:
            self._shared.copy(shared, extra_pages[first_shared:first_gaps], taken, counts)
        for each in new:
            if len(each.blocks):
                _write(each, _take_first(each, starts, taken))
        for each, pages in zip(extra, extra_pages, strict=True):
            _write(each, pages)
        self._count_blocks(rows, new)
        if self._shared is not None and self._shared.rows:
            self._shared.release_copied(shared, rows)
        return extra_pages[first_gaps:]

    # --- which blocks -------------------------------------------------------------------------------------------------

    def _dense_blocks(self, part: _Part, rows: Rows, num_tokens: Counts) -> _NewBlocks:
        """Return the blocks that rows lack in groups that store every block."""
        have = self._num_blocks[part.groups.start, rows]
        num_blocks = np.maximum((num_tokens + (part.block_size - 1)) // part.block_size, have)
        added = num_blocks - have
        (lacking,) = added.nonzero()
        if len(lacking) < len(rows):
            rows, have, added = rows[lacking], have[lacking], added[lacking]
        if not len(rows) or np.maximum.reduce(added) == 1:
            return _NewBlocks(part, rows, have, num_blocks)
        blocks = np.arange(added.sum()) - np.repeat(np.cumsum(added) - added - have, added)
        return _NewBlocks(part, np.repeat(rows, added), blocks, num_blocks)

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
        have, need = self._num_blocks[group.index, rows], -(-num_tokens // group.block_size)
        found = np.array([found_rows, found_blocks], dtype=np.int64)
        return _NewBlocks(self._part_of[group.index], found[0], found[1], np.maximum(need, have))

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

    def _count_blocks(self, rows: Rows, new: Sequence[_NewBlocks]) -> None:
        """Note how many blocks rows have now, and for how many tokens they lack none."""
        capacity: Counts | None = None
        for each in new:
            assert each.num_blocks is not None
            self._num_blocks[each.part.groups, rows] = each.num_blocks
            if each.part.is_dense:
                of_part = each.num_blocks * each.part.block_size
                capacity = of_part if capacity is None else np.minimum(capacity, of_part)
        for row in rows.tolist() if self._has_inputs else ():
            for of_input in self._states[row].inputs:
                self._blocks_of[of_input.group, row] = of_input.num_blocks
        self._set_capacity(rows, np.full(len(rows), self._max_tokens) if capacity is None else capacity)

    def _num_right(self, num_tokens: int) -> int:
        """Return up to which token, ``num_tokens`` at most, the types that are asked answer rightly."""
        for answers in self._asked:
            num_tokens = answers.num_right(num_tokens)
        return num_tokens

    def _check_answers(self, num_tokens: int) -> None:
        """Raise ``SpecError`` if a type that is asked answers wrongly about one of the first tokens of a request."""
        for answers in self._asked:
            answers.check(num_tokens)


def _runs(stack: TableStack, chosen: Container[int]) -> list[range]:
    """Return runs of places in a stack whose groups are chosen and have consecutive indices."""
    runs: list[range] = []
    for place, group in enumerate(stack.groups):
        if group in chosen:
            if runs and runs[-1].stop == place and stack.groups[place - 1] == group - 1:
                runs[-1] = range(runs[-1].start, place + 1)
            else:
                runs.append(range(place, place + 1))
    return runs


def _part(stack: TableStack, row_pages: BlockIds | None, places: range, *, is_dense: bool) -> _Part:
    """Return the groups at consecutive places of a stack as a part."""
    first, of_stack = stack.groups[places.start], slice(places.start, places.stop)
    return _Part(
        groups=slice(first, first + len(places)),
        block_size=stack.block_size,
        is_dense=is_dense,
        ids=stack.ids[of_stack],
        row_pages=None if row_pages is None else row_pages[of_stack],
    )


def _write(new: _NewBlocks, pages: PagesOfGroups) -> None:
    """Put pages, ``[num_groups, n]`` or ``[n]`` of one group, into the block tables, and record them."""
    new.part.ids[:, new.rows, new.blocks] = pages
    if new.part.row_pages is not None:
        new.part.row_pages[:, new.rows, new.blocks] = pages


def _take_first(new: _NewBlocks, starts: Sequence[int], taken: BlockIds) -> PagesOfGroups:
    """Return the first pages of each group of a part: ``[num_groups, n]``, from where the group's pages start."""
    groups, num_groups, count = new.part.groups, new.part.num_groups, len(new.blocks)
    first = starts[groups.start]
    if starts[groups.stop - 1] == first + (num_groups - 1) * count:
        return taken[first : first + num_groups * count].reshape(num_groups, count)
    return [taken[start : start + count] for start in starts[groups]]


def _take_last(extra: Sequence[_NewBlocks], starts: Sequence[int], taken: BlockIds) -> list[BlockIds]:
    """Return the pages of blocks of single groups, which are the last ones of their groups."""
    ends = list(starts[1:])
    pages = []
    for each in reversed(extra):
        end = ends[each.part.groups.start]
        start = ends[each.part.groups.start] = end - len(each.blocks)
        pages.append(taken[start:end])
    return pages[::-1]
