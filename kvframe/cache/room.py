"""Room for tokens: where rows need blocks, and giving them pages for all that are lacking, or for none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from kvframe.cache.block_pool import BlockPool
from kvframe.cache.block_table import BlockTables, TableStack
from kvframe.cache.forking import ForkedRows
from kvframe.cache.free_list import BlockIds
from kvframe.cache.group_kinds import GroupKinds
from kvframe.cache.own_pages import OwnPages
from kvframe.cache.rows import RowNumbers, Rows, RowState
from kvframe.plan import KVCachePlan

_FEW = 3
"""Groups up to which one assignment each is faster than one for all."""


class Room:
    """Gives rows the pages that they lack, and says up to which tokens they lack none (``RowNumbers.room``).

    Invariant: what it gives a row is in the block tables and held once for it; of a row that it gives nothing, nothing
    changes.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        kinds: GroupKinds,
        pool: BlockPool,
        tables: BlockTables,
        numbers: RowNumbers,
        own: OwnPages | None,
        forks: ForkedRows | None,
    ) -> None:
        """Give pages of a pool.

        Args:
            plan: How long requests are.
            kinds: Its groups.
            pool: The pages.
            tables: One block table per group.
            numbers: What is counted of each row.
            own: Who is told which pages a row was given; None for nobody.
            forks: The rows that may share a page which they are about to write; None if there are no forks.
        """
        self._groups, self._dense, self._sparse = kinds.groups, kinds.dense, kinds.sparse
        self._of_tokens, self._stacks, self._is_plain = kinds.of_tokens, kinds.stacks, kinds.is_plain
        self._asked = kinds.asked
        self._lone = kinds.stacks[0] if kinds.is_plain and len(kinds.groups) == 1 else None
        self._alignment = plan.alignment
        self._max_tokens = plan.max_model_len
        # Where the longest request ends within a block, that block's other tokens are no room.
        self._ends_within_block = any(plan.max_model_len % stack.block_size for stack in kinds.stacks)
        self._pool = pool
        self._tables = tables
        self._own = own
        self._forks = forks
        self._num_computed, self._num_blocks, self._room = numbers.num_computed, numbers.num_blocks, numbers.room
        self._blocks_of, self._room_of = numbers.blocks_of, numbers.room_of
        self._states = numbers.states

    # --- asking -------------------------------------------------------------------------------------------------------

    def is_there(self, row: int, num_tokens: int, max_new_tokens: int) -> bool:
        """Return whether the pool could give a row what it lacks while the last of its first tokens are computed.

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

    def note(self, row: int) -> None:
        """Work out up to which tokens nothing is missing; of groups that store few blocks, up to the block's end."""
        room = -1 if self._states[row].missing else self._max_tokens
        for group in self._dense:
            room = min(room, int(self._num_blocks[group.index, row]) * group.block_size)
        for group in self._sparse:
            current = int(self._num_computed[row]) // group.block_size
            is_there = current < self._num_blocks[group.index, row] and self._tables[group.index].ids[row, current]
            room = min(room, (current + 1) * group.block_size if is_there else 0)
        self._room[row] = self._num_right(room)

    # --- giving -------------------------------------------------------------------------------------------------------

    def make(self, row: int, num_tokens: int) -> bool:
        """Give a row room for its tokens ``[0, num_tokens)``, which it lacks, and for its inputs.

        Returns:
            False, and nothing changed, if the pool has too few pages.

        Raises:
            SpecError: A spec answers wrongly about these tokens; nothing changed.
        """
        self._check_answers(num_tokens)
        if not self._is_plain or (self._forks is not None and row in self._forks.rows):
            return self._make_whatever_lacks((row,), (num_tokens,))
        if self._lone is None:
            return self._make_in_stacks(row, num_tokens)
        have, need = self._blocks_of[0, row], -(-num_tokens // self._lone.block_size)
        taken = self._pool.allocate_blocks((need - have,))
        if taken is None:
            return False
        self._lone.ids[0, row, have:need] = taken
        if self._own is not None:
            self._own.take_all(0, row, have, need, taken)
        self._blocks_of[0, row] = need
        room = need * self._lone.block_size
        self._room_of[row] = self._num_right(min(room, self._max_tokens))
        return True

    def make_rows(self, rows: Rows, num_tokens: npt.NDArray[np.int64]) -> bool:
        """Give each of several rows room, as ``make`` does, or none of them.

        Plain rows with one block more each, as decodes need, take a few operations.

        Args:
            rows: ``[n], int64, host``, each once.
            num_tokens: ``[n], int64, host``.

        Raises:
            SpecError: As of ``make``, of any of them; nothing changed.
        """
        if self._asked:
            self._check_answers(int(num_tokens.max()))
        if len(rows) == 1:
            return self.make(int(rows[0]), int(num_tokens[0]))
        if not self._is_plain or (self._forks is not None and self._forks.rows):
            return self._make_whatever_lacks(rows.tolist(), num_tokens.tolist())
        counts = [0] * len(self._groups)
        new = []
        for stack in self._stacks:
            have = self._num_blocks[stack.groups[0], rows]
            need = np.maximum((num_tokens + (stack.block_size - 1)) // stack.block_size, have)
            added = need - have
            if np.maximum.reduce(added) > 1:
                return self._make_whatever_lacks(rows.tolist(), num_tokens.tolist())
            (which,) = added.nonzero()
            mine, places = (rows, have) if len(which) == len(rows) else (rows[which], have[which])
            new.append((mine, places, need * stack.block_size))
            for group in stack.groups:
                counts[group] = len(which)
        taken = self._pool.allocate_blocks(counts)
        if taken is None:
            return False
        room: npt.NDArray[np.int64] | int = self._max_tokens
        for s, (stack, (mine, places, of_stack)) in enumerate(zip(self._stacks, new, strict=True)):
            if len(mine):
                pages = _pages_of(stack, counts, taken)
                stack.ids[:, mine, places] = pages
                if self._own is not None:
                    self._own.take_each(s, mine, places, pages)
                self._set_num_blocks(stack, mine, places + 1)
            room = np.minimum(room, of_stack) if s else of_stack
        if self._ends_within_block or self._asked:
            room = np.minimum(room, self._max_tokens)
        if self._asked:
            room = np.minimum(room, self._num_right(int(np.max(room))))
        self._room[rows] = room
        return True

    def make_again(self, row: int, num_tokens: int, holes: Sequence[Sequence[int]]) -> list[BlockIds] | None:
        """Give a row room that lacks pages among its blocks too.

        Args:
            row: The row.
            num_tokens: As of ``make``.
            holes: Per group, the indices of blocks that it has and that have no page.

        Returns:
            Per group, the pages that it was given, those of the holes first; None, and nothing changed, if the pool has
            too few.
        """
        self._check_answers(num_tokens)
        places = [
            [*of_group, *sorted({*lacking} - {*of_group})]
            for of_group, lacking in zip(holes, self._places(row, num_tokens), strict=True)
        ]
        taken = self._pool.allocate_blocks([len(each) for each in places])
        if taken is None:
            return None
        given = []
        for index, where in enumerate(places):
            pages, taken = taken[: len(where)], taken[len(where) :]
            self._fill(row, index, where, pages, num_tokens)
            given.append(pages)
        self.note(row)
        return given

    # --- inside -------------------------------------------------------------------------------------------------------

    def _num_right(self, room: int) -> int:
        """Return up to which token, ``room`` at most, the types that are asked answer rightly."""
        for answers in self._asked:
            room = answers.num_right(room)
        return room

    def _check_answers(self, num_tokens: int) -> None:
        """Raise ``SpecError`` if a type that is asked answers wrongly about one of the first tokens of a request."""
        for answers in self._asked:
            answers.check(num_tokens)

    def _make_in_stacks(self, row: int, num_tokens: int) -> bool:
        """Give a plain row room in several groups."""
        counts, new = [0] * len(self._groups), []
        for stack in self._stacks:
            have, need = self._blocks_of[stack.groups[0], row], -(-num_tokens // stack.block_size)
            new.append((have, need))
            for group in stack.groups if need > have else ():
                counts[group] = need - have
        taken = self._pool.allocate_blocks(counts)
        if taken is None:
            return False
        room = self._max_tokens
        for s, (stack, (have, need)) in enumerate(zip(self._stacks, new, strict=True)):
            if need > have:
                pages = _pages_of(stack, counts, taken)
                stack.ids[:, row, have:need] = pages
                if self._own is not None:
                    self._own.take_all(s, row, have, need, pages)
                for group in stack.groups:
                    self._blocks_of[group, row] = need
            room = min(room, max(have, need) * stack.block_size)
        self._room_of[row] = self._num_right(room)
        return True

    def _set_num_blocks(self, stack: TableStack, rows: Any, num_blocks: Any) -> None:
        """Set how many blocks rows have in all groups of a stack."""
        for group in stack.groups if len(stack.groups) <= _FEW else ():
            self._num_blocks[group, rows] = num_blocks
        if len(stack.groups) > _FEW:
            self._num_blocks[stack.index[:, None], rows] = num_blocks

    def _make_whatever_lacks(self, rows: Sequence[int], num_tokens: Sequence[int]) -> bool:
        """Give rows room for whatever they lack."""
        wanted = [self._places(row, target) for row, target in zip(rows, num_tokens, strict=True)]
        to_copy = self._forks.blocks_to_copy(rows, wanted) if self._forks is not None and self._forks.rows else ()
        counts = [sum(map(len, places)) for places in zip(*wanted, strict=True)]
        taken = self._pool.allocate_blocks(counts)
        if taken is None:
            return False
        if self._forks is not None and to_copy:
            self._forks.copy(to_copy, rows, wanted, taken)
        used = [0, *accumulate(counts)]
        for row, target, places in zip(rows, num_tokens, wanted, strict=True):
            for index, where in enumerate(places):
                self._fill(row, index, where, taken[used[index] : used[index] + len(where)], target)
                used[index] += len(where)
            self.note(row)
        if self._forks is not None and self._forks.rows:
            self._forks.leave(to_copy)
            self._forks.rows.difference_update(rows)
        return True

    def _places(self, row: int, num_tokens: int) -> list[Sequence[int]]:
        """Return per group the indices of the blocks that a row lacks a page for to compute tokens up to a number.

        Raises:
            SpecError: A spec answers wrongly about the blocks that it stores.
        """
        places: list[Sequence[int]] = [()] * len(self._groups)
        for group in self._dense:
            places[group.index] = range(int(self._num_blocks[group.index, row]), -(-num_tokens // group.block_size))
        num_computed = int(self._num_computed[row])
        if self._sparse and num_computed < num_tokens:
            resume = self._where_others_continue(self._states[row], num_computed, num_tokens)
            for group in self._sparse:
                size, ids = group.block_size, self._tables[group.index].ids[row]
                count = int(self._num_blocks[group.index, row])
                places[group.index] = [
                    index
                    for start, stop in group.answers.stored_blocks(num_computed, num_tokens - num_computed, resume)
                    for index in range(max(start, num_computed // size), stop)
                    if index >= count or not ids[index]
                ]
        missing = self._states[row].missing
        for each in self._states[row].inputs if missing else ():
            if each.sequence in missing:
                places[each.group] = range(int(self._num_blocks[each.group, row]), each.num_blocks)
        return places

    def _where_others_continue(self, state: RowState, num_computed: int, num_tokens: int) -> int:
        """Return from where in the tokens up to ``num_tokens`` a later request may want to continue.

        Where they part from an earlier request's, or else at the last boundary that all groups have before the last
        token: that one is computed again if the request comes again.
        """
        if num_computed < state.branch <= num_tokens:
            return state.branch
        return (num_tokens - 1) // self._alignment * self._alignment

    def _fill(self, row: int, index: int, places: Sequence[int], pages: BlockIds, num_tokens: int) -> None:
        """Put pages of a group in their places."""
        group = self._groups[index]
        where = slice(places.start, places.stop) if isinstance(places, range) else places
        if len(places):
            self._tables[index].ids[row, where] = pages
            if self._own is not None and not group.is_of_input:
                self._own.take(row, index, where, pages)
            last = places[-1] + 1
            if last > self._num_blocks[index, row]:
                self._num_blocks[index, row] = last
        if group in self._sparse:
            self._num_blocks[index, row] = max(int(self._num_blocks[index, row]), -(-num_tokens // group.block_size))


def _pages_of(stack: TableStack, counts: Sequence[int], taken: BlockIds) -> BlockIds:
    """Return ``[num_groups, n]``, or ``[n]`` of a lone group: of pages that were taken, those of a stack."""
    first, last = stack.groups[0], stack.groups[-1]
    if len(counts) == len(stack.groups):
        return taken if len(counts) == 1 else taken.reshape(len(counts), -1)
    starts = [0, *accumulate(counts)]
    if last - first + 1 == len(stack.groups):
        return taken[starts[first] : starts[last + 1]].reshape(len(stack.groups), -1)
    return np.stack([taken[starts[group] : starts[group + 1]] for group in stack.groups])
