"""Block allocation: finds the blocks that rows lack, and allocates pages for all of them or none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import attrs
import numpy as np

from kvframe.cache.block_order import BlockIds
from kvframe.cache.block_pool import BlockPool
from kvframe.cache.block_table import Counts, GroupKinds, RowNumbers, Rows, TableStack
from kvframe.planning.answers import Answers
from kvframe.planning.spec_check import num_moved_blocks


@attrs.frozen(eq=False)
class _Part:
    """One group, or all groups of a table stack if they store every block: they get their pages together.

    ``ids``, ``row_pages`` and ``num_blocks`` are their parts of ``TableStack.ids``, of ``Publisher.row_pages`` (None if
    these are the block tables), and of ``RowNumbers.num_blocks``, whose rows are equal. Only a group that stores few
    blocks has ``answers``.
    """

    groups: slice
    block_size: int
    ids: BlockIds
    row_pages: BlockIds | None
    num_blocks: Counts
    answers: Answers | None


class _NewBlocks(NamedTuple):
    """Blocks that need a page in each group of a part: ``[n], int64, host`` each, the row and index of each block."""

    part: _Part
    rows: Rows
    blocks: Counts

    def take(self, starts: list[int], new_pages: BlockIds) -> BlockIds:
        """Take ``[num_groups, n]`` pages from where each group's pages start, and advance the starts."""
        group_starts, count = starts[self.part.groups], len(self.blocks)
        starts[self.part.groups] = [start + count for start in group_starts]
        if group_starts[-1] - group_starts[0] == count * (len(group_starts) - 1):
            return new_pages[group_starts[0] : group_starts[-1] + count].reshape(len(group_starts), count)
        return np.stack([new_pages[start : start + count] for start in group_starts])

    def write(self, pages: BlockIds) -> None:
        """Put pages into the block tables, and record them."""
        self.part.ids[:, self.rows, self.blocks] = pages
        if self.part.row_pages is not None:
            self.part.row_pages[:, self.rows, self.blocks] = pages


class BlockAllocator:
    """Allocates pages for the blocks that rows lack, and counts the tokens for which a row lacks none (``capacity``).

    Invariant: each page that a row gets is in the block tables and has one reference for the row. If the pool has too
    few pages, nothing changes for any row.
    """

    def __init__(
        self,
        kinds: GroupKinds,
        numbers: RowNumbers,
        pool: BlockPool,
        row_pages: Sequence[BlockIds],
    ) -> None:
        self._kinds, self._numbers, self._pool = kinds, numbers, pool
        self._tables, self._max_tokens = kinds.tables, kinds.plan.max_model_len
        sparse = {group.index: group.answers for group in kinds.sparse}

        def part_of(stack: TableStack, first_group: int, last_group: int) -> _Part:
            pages = row_pages[kinds.stacks.index(stack)] if stack in kinds.stacks else stack.ids
            groups = slice(first_group, last_group + 1)
            indices = slice(stack.groups.index(first_group), stack.groups.index(last_group) + 1)
            return _Part(
                groups=groups,
                block_size=stack.block_size,
                ids=stack.ids[indices],
                row_pages=None if pages is stack.ids else pages[indices],
                num_blocks=numbers.num_blocks[groups],
                answers=sparse.get(first_group),
            )

        self._part_of = {group: part_of(stack, group, group) for stack in self._tables.stacks for group in stack.groups}
        self._parts: list[_Part] = []
        for stack in kinds.stacks:
            first_group, last_group = stack.groups[0], stack.groups[-1]
            if last_group - first_group < len(stack.groups) and sparse.keys().isdisjoint(stack.groups):
                self._parts.append(part_of(stack, first_group, last_group))
            else:
                self._parts += [self._part_of[group] for group in stack.groups]
        is_lone = kinds.is_plain and not kinds.asked_answers and len(self._parts) == 1
        self._lone = self._parts[0] if is_lone else None

    def could_allocate(self, row: int, num_tokens: int) -> bool:
        """Return whether the pool has all pages that a row takes up to ``num_tokens`` tokens."""
        lacking = [0] * len(self._tables)
        start = max(self._numbers.num_computed.item(row), num_tokens - self._kinds.plan.max_num_batched_tokens)
        for group in self._kinds.token_groups:
            num_held = np.count_nonzero(
                self._tables[group.index].ids[row, : self._numbers.num_blocks.item(group.index, row)]
            )
            num_needed = group.answers.num_resident_blocks(start, max(0, num_tokens - start))
            if group.index in self._kinds.budgets and group.index not in self._numbers.states[row].first_tokens:
                num_needed += num_moved_blocks(group.spec, num_tokens)
            lacking[group.index] = max(0, num_needed - int(num_held))
        for blocks in self._numbers.states[row].inputs:
            lacking[blocks.group] = blocks.num_blocks - self._numbers.num_blocks.item(blocks.group, row)
        return self._pool.free_list.can_take(lacking)

    def note_capacity(self, rows: Rows) -> None:
        """Count the tokens for which rows lack no block; in groups that store few, to the current block's end."""
        numbers = self._numbers
        capacity: Counts | int = self._max_tokens
        for part in self._parts:
            if part.answers is None:
                covered = part.num_blocks[0][rows] * part.block_size
            else:
                current = numbers.num_computed[rows] // part.block_size
                has_page = part.ids[0, rows, np.minimum(current, part.ids.shape[2] - 1)] != 0
                covered = (current + 1) * part.block_size * has_page
            capacity = np.minimum(capacity, covered)
        for answers in self._kinds.asked_answers:  # not beyond the first token with a wrong answer
            max_capacity = int(np.maximum.reduce(capacity))
            if (num_right := answers.num_right(max_capacity)) < max_capacity:
                capacity = np.minimum(capacity, num_right)
        numbers.capacity[rows] = capacity
        for row in rows.tolist() if self._kinds.input_groups else ():
            if numbers.states[row].missing_inputs:
                numbers.capacity[row] = -1

    def allocate_for_row(self, row: int, num_tokens: int) -> bool:
        """Do what ``allocate_for_rows`` does for one row; if there is one part, in a third of the time."""
        part = self._lone
        if part is None:
            return self.allocate_for_rows(np.array([row]), np.array([num_tokens]))
        numbers, need = self._numbers, -(-num_tokens // part.block_size)
        have = numbers.num_blocks.item(0, row)
        pages = self._pool.allocate_blocks([need - have] * len(numbers.num_blocks))
        if pages is None:
            return False
        pages = pages.reshape(-1, need - have)
        part.num_blocks[:, row] = need
        part.ids[:, row, have:need] = pages
        if part.row_pages is not None:
            part.row_pages[:, row, have:need] = pages
        covered = need * part.block_size
        numbers.capacity[row] = covered if covered < self._max_tokens else self._max_tokens
        return True

    def allocate_for_rows(self, rows: Rows, num_tokens: Counts) -> bool:
        """Allocate the pages that several rows lack for their first ``num_tokens`` tokens and their inputs.

        Return False, and nothing changed, if the pool has too few pages.
        """
        for answers in self._kinds.asked_answers:
            answers.check(int(np.maximum.reduce(num_tokens)))
        new_blocks, num_blocks = [], []
        for part in self._parts:
            have = part.num_blocks[0][rows]
            need = np.maximum(have, (num_tokens + (part.block_size - 1)) // part.block_size)
            if part.answers is None:
                new_blocks.append(self._dense_blocks(part, rows, have, need))
            else:
                new_blocks.append(self._sparse_blocks(part, part.answers, rows, num_tokens, need))
            num_blocks.append(need)
        if self._kinds.input_groups:
            new_blocks += self._blocks_of_inputs(rows)
        counts = [0] * len(self._tables)
        for part_blocks in new_blocks:
            groups = part_blocks.part.groups
            counts[groups] = [count + len(part_blocks.blocks) for count in counts[groups]]
        new_pages = self._pool.allocate_blocks(counts)
        if new_pages is None:
            return False
        starts = [*accumulate(counts, initial=0)]
        for part_blocks in new_blocks:
            part_blocks.write(part_blocks.take(starts, new_pages))
        for part, need in zip(self._parts, num_blocks, strict=True):
            part.num_blocks[:, rows] = need
        for row in rows.tolist() if self._kinds.input_groups else ():
            for input_blocks in self._numbers.states[row].inputs:
                self._numbers.num_blocks[input_blocks.group, row] = input_blocks.num_blocks
        self.note_capacity(rows)
        return True

    def allocate_blocks(self, row: int, blocks: Sequence[Counts]) -> list[BlockIds] | None:
        """Allocate pages for some blocks of a row, given per group by their indices; None if the pool has too few."""
        counts = [len(indices) for indices in blocks]
        new_pages = self._pool.allocate_blocks(counts)
        if new_pages is None:
            return None
        pages = [new_pages[stop - count : stop] for count, stop in zip(counts, accumulate(counts), strict=True)]
        for group, (indices, ids) in enumerate(zip(blocks, pages, strict=True)):
            _NewBlocks(self._part_of[group], np.full(len(indices), row), indices).write(ids[None])
        return pages

    def _dense_blocks(self, part: _Part, rows: Rows, have: Counts, need: Counts) -> _NewBlocks:
        """Return the blocks that rows lack in groups that store every block: those from ``have`` to ``need``."""
        num_lacking = need - have
        (lacking,) = num_lacking.nonzero()
        if len(lacking) < len(rows):
            rows, have, num_lacking = rows[lacking], have[lacking], num_lacking[lacking]
        if not len(rows) or np.maximum.reduce(num_lacking) == 1:
            return _NewBlocks(part, rows, have)
        blocks = np.arange(num_lacking.sum()) - (num_lacking.cumsum() - num_lacking - have).repeat(num_lacking)
        return _NewBlocks(part, rows.repeat(num_lacking), blocks)

    def _sparse_blocks(self, part: _Part, answers: Answers, rows: Rows, num_tokens: Counts, need: Counts) -> _NewBlocks:
        """Return the blocks that rows lack in a group that stores few blocks."""
        ids, size, num_computed = part.ids[0], part.block_size, self._numbers.num_computed[rows]
        first_block, last_block = num_computed // size, need - 1
        # While the tokens stay within a block that has a page, the row lacks nothing.
        is_asked = (num_computed < num_tokens) & (
            (first_block < last_block) | (ids[rows, np.minimum(first_block, last_block)] == 0)
        )
        lacking_rows: list[int] = []
        lacking_blocks: list[int] = []
        for row, start, stop in zip(
            rows[is_asked].tolist(), num_computed[is_asked].tolist(), num_tokens[is_asked].tolist(), strict=True
        ):
            block = start // size
            # A block that the tokens begin is stored if it is live after them: most decodes need not ask for it.
            if stop <= (block + 1) * size and (live := answers.live_blocks(stop)) and live[-1][1] > block:
                stored_blocks: Iterable[int] = (block,)
            else:
                branch = self._where_others_continue(row, start, stop)
                ranges = answers.stored_blocks(start, stop - start, branch)
                stored_blocks = chain.from_iterable(range(*block_range) for block_range in ranges)
            for block in stored_blocks:
                if not ids[row, block]:
                    lacking_rows.append(row)
                    lacking_blocks.append(block)
        return _NewBlocks(part, np.array(lacking_rows, dtype=np.int64), np.array(lacking_blocks, dtype=np.int64))

    def _where_others_continue(self, row: int, num_computed: int, num_tokens: int) -> int:
        """Return after which token a later request may continue: at the end of a prefix that an earlier one has too.

        If none is known, it is the last boundary of all groups before the last token, which is always computed.
        """
        branch, alignment = self._numbers.states[row].branch, self._kinds.plan.alignment
        return branch if num_computed < branch <= num_tokens else (num_tokens - 1) // alignment * alignment

    def _blocks_of_inputs(self, rows: Rows) -> list[_NewBlocks]:
        """Return the blocks of rows' inputs that are not computed."""
        new_blocks = []
        for row in rows.tolist():
            state = self._numbers.states[row]
            for blocks in state.inputs:
                if blocks.sequence in state.missing_inputs:
                    indices = np.arange(self._numbers.num_blocks.item(blocks.group, row), blocks.num_blocks)
                    new_blocks.append(_NewBlocks(self._part_of[blocks.group], np.full(len(indices), row), indices))
        return new_blocks
