"""The coordinator: the blocks of all running requests over any number of groups, derived from live ranges alone.

Each row knows the computed tokens from which on something happens to it: it lacks room, a block dies, a block is full
that nobody published. A step compares all rows with these counts at once, and touches those that are due.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_table import BlockTable, BlockTables, TableStack
from kvframe.cache.forgetting import NEVER, MovingGroups, forgetting_of
from kvframe.cache.forking import ForkedRows, PageCopier
from kvframe.cache.free_pages import BlockIds
from kvframe.cache.inputs import InputBlocks
from kvframe.cache.lookup import PrefixHit
from kvframe.cache.pool import BlockPool
from kvframe.cache.refusals import too_many_tokens
from kvframe.cache.tree import PrefixTree
from kvframe.plan import KVCachePlan, PlannedGroup
from kvframe.specs import KVCacheSpec

Rows = npt.NDArray[np.int64]
_FEW = 3
"""Groups up to which one assignment each is faster than one for all."""
BlockRange = tuple[int, int]


@attrs.define
class RowState:
    """What a row has beside its numbers.

    Attributes:
        inputs: Its blocks in the groups of inputs.
        missing: The inputs whose state is not computed.
        branch: Where its tokens part from those of an earlier request; 0 if nothing is known.
        live: For each group that is asked position by position, the block ranges that may hold pages.
    """

    inputs: tuple[InputBlocks, ...] = ()
    missing: frozenset[str] = frozenset()
    branch: int = 0
    live: dict[int, tuple[BlockRange, ...]] = attrs.field(factory=dict)


_PLAIN = RowState()


@attrs.frozen
class SwappedBlocks:
    """A request's blocks while it is swapped out.

    Attributes:
        copies: Per group, where its copies lie, by block index; 0 where nothing was resident.
        num_computed: Its computed tokens.
        state: What its row had beside.
    """

    copies: list[list[int]]
    num_computed: int
    state: RowState


class KVCacheCoordinator:
    """Derives allocation and release from each group's live ranges. It asks no spec for its type.

    Invariant: the pages that a row holds are those in its row of the block tables; ``num_blocks`` says how many columns
    of a group are in use.

    Attributes:
        num_computed: ``[max_num_seqs], int64, host``: each row's computed tokens.
        num_blocks: ``[num_groups, max_num_seqs], int64, host``: each row's blocks, those that are dead included.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        pool: BlockPool,
        tables: BlockTables,
        tree: PrefixTree | None,
        num_computed: npt.NDArray[np.int64],
        next_publication: npt.NDArray[np.int64],
        copier: PageCopier | None = None,
    ) -> None:
        """Work on a pool and mirror every change into the block tables.

        Args:
            plan: The groups.
            pool: The pages.
            tables: One block table per group.
            tree: Where full blocks are published; None if nowhere.
            num_computed: ``[max_num_seqs], int64, host``, zeroed.
            next_publication: Likewise, what the tree says of when it has to be told.
            copier: Copies pages where a fork writes; None if there are no forks.
        """
        max_num_seqs = len(num_computed)
        self.num_computed = num_computed
        self.num_blocks = np.zeros((len(plan.groups), max_num_seqs), dtype=np.int64)
        self._groups: tuple[PlannedGroup, ...] = plan.groups
        self._alignment = plan.alignment
        self._max_tokens = plan.max_model_len
        self._pool = pool
        self._tables = tables
        self._tree = tree
        self._states: list[RowState] = [_PLAIN] * max_num_seqs
        self._room = np.zeros(max_num_seqs, dtype=np.int64)
        self._next_death = np.full(max_num_seqs, NEVER, dtype=np.int64)
        self._next_publication = next_publication
        of_tokens = [group for group in plan.groups if not group.is_of_input]
        self._of_tokens = tuple(of_tokens)
        self._sparse = tuple(g for g in of_tokens if type(g.spec).stored_blocks is not KVCacheSpec.stored_blocks)
        self._dense = tuple(group for group in of_tokens if group not in self._sparse)
        moving = {group.index: forgetting_of(group.spec) for group in self._dense}
        self._asked = (*self._sparse, *(group for group in self._dense if moving[group.index] is None))
        # Where every group of tokens is dense and in arrays, a batch of rows needs no look at each.
        self._is_plain = not self._asked and len(of_tokens) == len(plan.groups)
        self._stacks = [stack for stack in tables.stacks if not plan.groups[stack.groups[0]].is_of_input]
        # Where the longest request ends within a block, that block's other tokens are no room.
        self._ends_within_block = any(plan.max_model_len % stack.block_size for stack in self._stacks)
        self._moving: list[MovingGroups | None] = []
        for stack in self._stacks:
            found = [(place, moving.get(group)) for place, group in enumerate(stack.groups)]
            kinds = [(place, each) for place, each in found if each is not None and (each.window or each.chunk)]
            self._moving.append(MovingGroups(kinds, max_num_seqs) if kinds else None)
        self._forks = None if copier is None else ForkedRows(of_tokens, pool, tables, num_computed, copier)
        # Single numbers of rows are read and written several times as fast in these.
        self._num_blocks, self._room_of = self.num_blocks.data, self._room.data
        self._computed_of, self._death_of = num_computed.data, self._next_death.data
        self._publication_of = next_publication.data
        deaths = [int(moving.next_death(moving.dead[:, :1])[0]) for moving in self._moving if moving is not None]
        self._first_death = -1 if self._asked else min(deaths, default=NEVER)
        # Of a lone group whose blocks all live as long as their request, rows have no gaps, and nothing falls due.
        self._lone = tables[0] if self._is_plain and len(plan.groups) == 1 and not deaths else None
        self._next_death[...] = self._first_death

    # --- the beginning and the end ------------------------------------------------------------------------------------

    def start(self, row: int, hit: PrefixHit, inputs: tuple[InputBlocks, ...] = ()) -> None:
        """Begin a request from what a lookup found, holding its blocks; a free row is as one without a token."""
        if self._is_plain:
            if not hit.num_tokens:
                return
            self._begin(row, hit.num_tokens, _PLAIN)
        else:
            missing = frozenset(each.sequence for each in inputs if each.sequence not in hit.inputs)
            self._begin(row, hit.num_tokens, RowState(inputs, missing, hit.branch))
        for group in self._of_tokens if hit.num_tokens else ():
            index, pages = group.index, hit.pages.get(group.index)
            self.num_blocks[index, row] = hit.num_tokens // group.block_size
            if pages is not None:
                table = self._tables[index].ids[row]
                for start, stop in group.spec.live_blocks(hit.num_tokens):
                    table[start:stop] = pages[start:stop]
                    self._pool.hold(index, pages[start:stop])
        for each in inputs:
            pages = hit.inputs.get(each.sequence, {}).get(each.group)
            if pages is not None:
                self.num_blocks[each.group, row] = each.num_blocks
                self._tables[each.group].ids[row, : each.num_blocks] = pages
                self._pool.hold(each.group, pages)
        if self._is_plain:
            self._room[row] = hit.num_tokens
        else:
            self._note_room(row)

    def fork(self, row: int, new_row: int, token_ids: Sequence[int]) -> None:
        """Begin a request from what another one has computed, holding its pages.

        Args:
            row: The other one's row, of which no token is being computed; its inputs are computed.
            new_row: A free row.
            token_ids: The tokens of the one that begins.
        """
        assert self._forks is not None
        state, num_computed = self._states[row], int(self.num_computed[row])
        assert not state.missing
        self._begin(new_row, num_computed, attrs.evolve(state, live=dict(state.live)) if state is not _PLAIN else state)
        if self._tree is not None:
            self._tree.fork(row, new_row, token_ids)
        is_shared = False
        for group in self._groups:
            index, size, count = group.index, group.block_size, int(self.num_blocks[group.index, row])
            # What was made room for and not computed is the other one's.
            count = count if group.is_of_input else min(count, -(-num_computed // size))
            ids = self._tables[index].ids[row, :count]
            self.num_blocks[index, new_row] = count
            self._tables[index].ids[new_row, :count] = ids
            if len(held := ids[ids != 0]):
                self._pool.hold(index, held)
            if num_computed % size and count * size > num_computed and not group.is_of_input and ids[-1]:
                is_shared = True
                if self._tree is not None:
                    self._tree.own.take(new_row, index, [count - 1], ids[-1:])
        self._note_room(new_row)
        if is_shared:
            self._forks.rows |= {row, new_row}
            self._room[[row, new_row]] = -1

    def _begin(self, row: int, num_computed: int, state: RowState) -> None:
        self.num_computed[row] = num_computed
        self._states[row] = state
        if state is not _PLAIN:
            for group in self._asked:
                state.live.setdefault(group.index, ((0, num_computed // group.block_size),))
        self._next_death[row] = -1 if self._asked or state.inputs else NEVER
        for moving in self._moving:
            if moving is not None:
                moving.start(row, num_computed)
                self._note_next_death(row, moving)

    def free(self, row: int) -> None:
        """Release every block of a row, its tail first: a prefix outlives what hangs on it."""
        if self._forks is not None:
            self._forks.rows.discard(row)
        num_published = self._tree.leave(row) if self._tree is not None else 0
        if self._lone is None:
            self._free_all(row)
        else:
            self._free_lone(self._lone, row, num_published // self._lone.block_size)

    def _free_all(self, row: int) -> None:
        """Release every block of a row in all groups, which may have gaps."""
        most = 0
        for stack in self._tables.stacks:
            counts = self._num_blocks
            count = max([counts[group, row] for group in stack.groups])
            if count:
                most = max(most, count)
                ids = stack.ids[:, row, :count]
                self._release_tail_first(stack, ids)
                ids.fill(0)
                for group in stack.groups:
                    counts[group, row] = 0
        if self._tree is not None:
            self._tree.own.clear(row, most)
        self._clear(row)

    def _free_lone(self, table: BlockTable, row: int, num_published: int) -> None:
        """Release every block of a row in the only group; of the first ones it is known that they are published."""
        count = self._num_blocks[0, row]
        if count > num_published:
            self._pool.release(table.ids[row, num_published:count][::-1].copy(), 0)
        if num_published:
            self._pool.release(table.ids[row, :num_published][::-1].copy(), 0, are_published=True)
        table.ids[row, :count] = 0
        self._num_blocks[0, row] = self._computed_of[row] = self._room_of[row] = 0

    def _clear(self, row: int) -> None:
        """Let a row be as one without a token."""
        self._computed_of[row] = self._room_of[row] = 0
        self._states[row] = _PLAIN
        self._death_of[row] = self._first_death
        for moving in self._moving:
            if moving is not None:
                moving.clear(row)

    def blocks(self, row: int) -> list[list[int]]:
        """Return a row's block ids, one list per group; 0 where a block is not resident."""
        counts = self.num_blocks[:, row].tolist()
        return [self._tables[index].ids[row, :count].tolist() for index, count in enumerate(counts)]

    def state(self, row: int) -> RowState:
        """Return what a row has beside its numbers."""
        return self._states[row]

    # --- room ---------------------------------------------------------------------------------------------------------

    def extend(self, row: int, num_tokens: int) -> bool:
        """Give a row room for its tokens ``[0, num_tokens)`` and, the first time, for its inputs.

        Returns:
            False, and nothing changed, if there is none.

        Raises:
            RequestError: These are more tokens than the tables have room for; nothing changed.
        """
        if num_tokens <= self._room_of[row]:
            return True
        if num_tokens > self._max_tokens:
            raise too_many_tokens(num_tokens, self._max_tokens)
        if self._is_plain and (self._forks is None or row not in self._forks.rows):
            return self._make_plain_room(row, num_tokens)
        return self._make_room((row,), (num_tokens,))

    def extend_rows(self, rows: Rows, num_tokens: npt.NDArray[np.int64]) -> bool:
        """Give each of several rows room for its tokens up to ``num_tokens``, or none of them.

        Args:
            rows: ``[n], int64, host``, each once.
            num_tokens: ``[n], int64, host``.

        Raises:
            RequestError: As of ``extend``, of any of them.
        """
        (due,) = (num_tokens > self._room[rows]).nonzero()
        if not len(due):
            return True
        rows, num_tokens = rows[due], num_tokens[due]
        if num_tokens.max() > self._max_tokens:
            raise too_many_tokens(int(num_tokens.max()), self._max_tokens)
        if self._is_plain and len(rows) > 1 and (self._forks is None or not self._forks.rows):
            return self._make_room_at_once(rows, num_tokens)
        return self._make_room(rows.tolist(), num_tokens.tolist())

    def has_room(self, row: int, num_tokens: int, max_new_tokens: int) -> bool:
        """Return whether the pool could give a row what it lacks while the last of its first tokens are computed.

        Args:
            row: The row.
            num_tokens: How many tokens.
            max_new_tokens: The most tokens that one step computes.
        """
        lacking = [0] * len(self._groups)
        start = max(int(self.num_computed[row]), num_tokens - max_new_tokens)
        for group in self._of_tokens:
            held = np.count_nonzero(self._tables[group.index].ids[row, : self.num_blocks[group.index, row]])
            most = group.spec.num_resident_blocks(start, max(0, num_tokens - start))
            lacking[group.index] = max(0, most - int(held))
        for each in self._states[row].inputs:
            lacking[each.group] = each.num_blocks - int(self.num_blocks[each.group, row])
        return self._pool.has_room(lacking)

    def _make_plain_room(self, row: int, num_tokens: int) -> bool:
        """Give a plain row room."""
        if len(self._groups) == 1:
            return self._make_lone_room(self._stacks[0], row, num_tokens)
        counts, new = [0] * len(self._groups), []
        for stack in self._stacks:
            have, need = self._num_blocks[stack.groups[0], row], -(-num_tokens // stack.block_size)
            new.append((have, need))
            for group in stack.groups if need > have else ():
                counts[group] = need - have
        taken = self._pool.allocate(counts)
        if taken is None:
            return False
        room = self._max_tokens
        for s, (stack, (have, need)) in enumerate(zip(self._stacks, new, strict=True)):
            if need > have:
                pages = self._pages_of(stack, counts, taken)
                stack.ids[:, row, have:need] = pages
                if self._tree is not None:
                    self._tree.own.take_all(s, row, have, need, pages)
                for group in stack.groups:
                    self._num_blocks[group, row] = need
            room = min(room, max(have, need) * stack.block_size)
        self._room_of[row] = room
        return True

    def _make_lone_room(self, stack: TableStack, row: int, num_tokens: int) -> bool:
        """Give a plain row room in the only group."""
        have, need = self._num_blocks[0, row], -(-num_tokens // stack.block_size)
        taken = self._pool.allocate((need - have,))
        if taken is None:
            return False
        stack.ids[0, row, have:need] = taken
        if self._tree is not None:
            self._tree.own.take_all(0, row, have, need, taken)
        self._num_blocks[0, row] = need
        room = need * stack.block_size
        self._room_of[row] = room if room <= self._max_tokens else self._max_tokens
        return True

    def _set_num_blocks(self, stack: TableStack, rows: Any, num_blocks: Any) -> None:
        """Set how many blocks rows have in all groups of a stack."""
        for group in stack.groups if len(stack.groups) <= _FEW else ():
            self.num_blocks[group, rows] = num_blocks
        if len(stack.groups) > _FEW:
            self.num_blocks[stack.index[:, None], rows] = num_blocks

    def _pages_of(self, stack: TableStack, counts: Sequence[int], taken: BlockIds) -> BlockIds:
        """Return ``[num_groups, n]``, or ``[n]`` of a lone group: of pages that were taken, those of a stack."""
        first, last = stack.groups[0], stack.groups[-1]
        if len(counts) == len(stack.groups):
            return taken if len(counts) == 1 else taken.reshape(len(counts), -1)
        starts = [0, *accumulate(counts)]
        if last - first + 1 == len(stack.groups):
            return taken[starts[first] : starts[last + 1]].reshape(len(stack.groups), -1)
        return np.stack([taken[starts[group] : starts[group + 1]] for group in stack.groups])

    def _make_room_at_once(self, rows: Rows, num_tokens: npt.NDArray[np.int64]) -> bool:
        """Give plain rows room: with one block more each, as decodes need, in a few operations."""
        counts = [0] * len(self._groups)
        new = []
        for stack in self._stacks:
            have = self.num_blocks[stack.groups[0], rows]
            added = np.maximum(-(-num_tokens // stack.block_size) - have, 0)
            if added.max() > 1:
                return self._make_room(rows.tolist(), num_tokens.tolist())
            (which,) = added.nonzero()
            new.append((which, have[which]))
            for group in stack.groups:
                counts[group] = len(which)
        taken = self._pool.allocate(counts)
        if taken is None:
            return False
        room: npt.NDArray[np.int64] | int = self._max_tokens
        for s, (stack, (which, places)) in enumerate(zip(self._stacks, new, strict=True)):
            if len(which):
                mine, pages = rows[which], self._pages_of(stack, counts, taken)
                stack.ids[:, mine, places] = pages
                if self._tree is not None:
                    self._tree.own.take_each(s, mine, places, pages)
                self._set_num_blocks(stack, mine, places + 1)
            of_stack = self.num_blocks[stack.groups[0], rows] * stack.block_size
            room = np.minimum(room, of_stack) if s else of_stack
        self._room[rows] = np.minimum(room, self._max_tokens) if self._ends_within_block else room
        return True

    def _make_room(self, rows: Sequence[int], num_tokens: Sequence[int]) -> bool:
        """Give rows room for whatever they lack."""
        wanted = [self._places(row, target) for row, target in zip(rows, num_tokens, strict=True)]
        to_copy = self._forks.blocks_to_copy(rows, wanted) if self._forks is not None and self._forks.rows else ()
        counts = [sum(map(len, places)) for places in zip(*wanted, strict=True)]
        taken = self._pool.allocate(counts)
        if taken is None:
            return False
        if self._forks is not None and to_copy:
            self._forks.copy(to_copy, rows, wanted, taken)
        used = [0, *accumulate(counts)]
        for row, target, places in zip(rows, num_tokens, wanted, strict=True):
            for index, where in enumerate(places):
                self._fill(row, index, where, taken[used[index] : used[index] + len(where)], target)
                used[index] += len(where)
            self._note_room(row)
        if self._forks is not None and self._forks.rows:
            self._forks.leave(to_copy)
            self._forks.rows.difference_update(rows)
        return True

    def _places(self, row: int, num_tokens: int) -> list[Sequence[int]]:
        """Return per group the indices of the blocks that a row lacks a page for to compute tokens up to a number."""
        places: list[Sequence[int]] = [()] * len(self._groups)
        for group in self._dense:
            places[group.index] = range(int(self.num_blocks[group.index, row]), -(-num_tokens // group.block_size))
        num_computed = int(self.num_computed[row])
        if self._sparse and num_computed < num_tokens:
            resume = self._where_others_continue(self._states[row], num_computed, num_tokens)
            for group in self._sparse:
                size, ids = group.block_size, self._tables[group.index].ids[row]
                count = int(self.num_blocks[group.index, row])
                places[group.index] = [
                    index
                    for start, stop in group.spec.stored_blocks(num_computed, num_tokens - num_computed, resume)
                    for index in range(max(start, num_computed // size), stop)
                    if index >= count or not ids[index]
                ]
        missing = self._states[row].missing
        for each in self._states[row].inputs if missing else ():
            if each.sequence in missing:
                places[each.group] = range(int(self.num_blocks[each.group, row]), each.num_blocks)
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
            if self._tree is not None and not group.is_of_input:
                self._tree.own.take(row, index, where, pages)
            last = places[-1] + 1
            if last > self.num_blocks[index, row]:
                self.num_blocks[index, row] = last
        if group in self._sparse:
            self.num_blocks[index, row] = max(int(self.num_blocks[index, row]), -(-num_tokens // group.block_size))

    def _note_room(self, row: int) -> None:
        """Work out up to which tokens nothing is missing; of groups that store few blocks, up to the block's end."""
        room = -1 if self._states[row].missing else self._max_tokens
        for group in self._dense:
            room = min(room, int(self.num_blocks[group.index, row]) * group.block_size)
        for group in self._sparse:
            current = int(self.num_computed[row]) // group.block_size
            is_there = current < self.num_blocks[group.index, row] and self._tables[group.index].ids[row, current]
            room = min(room, (current + 1) * group.block_size if is_there else 0)
        self._room[row] = room

    # --- what is computed ---------------------------------------------------------------------------------------------

    def commit(self, row: int, num_computed: int) -> None:
        """Take note that a row's tokens ``[0, num_computed)`` are computed; release what no token after them needs.

        Inputs are computed with the first of them, and stay.
        """
        self._computed_of[row] = num_computed
        if num_computed >= self._publication_of[row] and self._tree is not None:
            self._tree.publish(row)
        if num_computed >= self._death_of[row]:
            self._bury(row, num_computed)

    def commit_rows(self, rows: Rows, num_computed: npt.NDArray[np.int64]) -> None:
        """Take note of what is computed of several rows.

        Args:
            rows: ``[n], int64, host``, each once.
            num_computed: ``[n], int64, host``.
        """
        self.num_computed[rows] = num_computed
        if self._tree is not None:
            for row in rows[num_computed >= self._next_publication[rows]].tolist():
                self._tree.publish(row)
        (due,) = (num_computed >= self._next_death[rows]).nonzero()
        if not len(due):
            return
        rows, num_computed = rows[due], num_computed[due]
        if self._is_plain and len(rows) > 1:
            self._bury_at_once(rows, num_computed)
        else:
            for row, count in zip(rows.tolist(), num_computed.tolist(), strict=True):
                self._bury(row, count)

    def _bury_at_once(self, rows: Rows, num_computed: npt.NDArray[np.int64]) -> None:
        """Release the dead blocks of plain rows."""
        next_death = np.full(len(rows), NEVER)
        for s, moving in enumerate(self._moving):
            if moving is None:
                continue
            before, after = moving.dead[:, rows], moving.dead_at(num_computed)
            np.maximum(before, after, out=after)
            died = after - before
            most = int(died.max())
            for step in range(most):
                # Nearly always one block of a group and row; a chunk of a prompt kills several.
                if len(moving.types) == 1:
                    (which,) = (died[0] > step).nonzero()
                    self._release_dead(s, int(moving.places[0]), rows[which], before[0, which] + step)
                    continue
                kinds, which = np.nonzero(died > step)
                self._release_dead(s, moving.places[kinds], rows[which], before[kinds, which] + step)
            if most:
                moving.dead[:, rows] = after
            np.minimum(next_death, moving.next_death(after), out=next_death)
        self._next_death[rows] = next_death

    def _release_dead(self, s: int, places: Rows | int, rows: Rows, blocks: npt.NDArray[np.int64]) -> None:
        """Release blocks of groups of a stack and of rows, each named by its place, row and index."""
        stack = self._stacks[s]
        ids = stack.ids[places, rows, blocks]
        if np.count_nonzero(ids) < len(ids):
            is_held = ids != 0
            rows, blocks, ids = rows[is_held], blocks[is_held], ids[is_held]
            places = places if isinstance(places, int) else places[is_held]
        if not len(ids):
            return
        stack.ids[places, rows, blocks] = 0
        if self._tree is not None:
            self._tree.pass_by(s, places, rows, blocks, ids)
        self._pool.release(ids, stack.groups[places] if isinstance(places, int) else stack.index[places])

    def _bury(self, row: int, num_computed: int) -> None:
        """Release the dead blocks of a row."""
        if self._tree is not None and not self._pool.is_short:
            # Else what the row passes is freed with it: there are more useful pages to keep.
            self._tree.refresh(row)
        state = self._states[row]
        if state.missing:
            state.missing = frozenset()
            self._note_room(row)
        for s, moving in enumerate(self._moving):
            if moving is not None:
                for place, kind, before in zip(moving.places, moving.types, moving.dead[:, row].tolist(), strict=True):
                    dead = kind.dead(num_computed)
                    if dead > before:
                        self._release_range(row, self._stacks[s].groups[place], before, dead)
                np.maximum(moving.dead[:, row], moving.dead_at(np.array([num_computed]))[:, 0], out=moving.dead[:, row])
        for group in self._asked:
            self._bury_asked(row, group, state, num_computed)
        self._next_death[row] = -1 if self._asked else NEVER
        for moving in self._moving:
            if moving is not None:
                self._note_next_death(row, moving)
        if self._sparse:
            self._note_room(row)

    def _note_next_death(self, row: int, moving: MovingGroups) -> None:
        nearest = int(moving.next_death(moving.dead[:, [row]])[0])
        self._next_death[row] = min(int(self._next_death[row]), nearest)

    def _bury_asked(self, row: int, group: PlannedGroup, state: RowState, num_computed: int) -> None:
        index, count = group.index, int(self.num_blocks[group.index, row])
        live = group.spec.live_blocks(num_computed)
        # The block that the next token is written into stays, live or not.
        current = num_computed // group.block_size
        is_live = live and live[-1][1] >= current
        kept = (*live[:-1], (live[-1][0], count)) if is_live else (*live, (current, count))
        before = state.live[index]
        if before and before[-1][1] < count:
            before = (*before[:-1], (before[-1][0], count))
        # Where few blocks are stored, each step says which: those beyond its end are of tokens that were refused.
        for start, stop in _difference(before, live if group in self._sparse else kept):
            self._release_range(row, index, start, stop)
        state.live[index] = kept

    def _release_range(self, row: int, index: int, start: int, stop: int) -> None:
        ids = self._tables[index].ids[row, start:stop]
        if self._tree is not None:
            self._tree.own.keep_published(row, index, start, stop, self._pool)
        self._release(index, ids)
        ids[...] = 0

    # --- swapping -----------------------------------------------------------------------------------------------------

    def swapped(self, row: int, copies: list[list[int]]) -> SwappedBlocks:
        """Return what a row is to be begun from again, its blocks copied."""
        return SwappedBlocks(copies, int(self.num_computed[row]), self._states[row])

    def resume(
        self, row: int, swapped: SwappedBlocks, num_tokens: int, found: Sequence[Sequence[int]]
    ) -> list[list[int]] | None:
        """Begin a request again where it was swapped out, with room for its tokens ``[0, num_tokens)``.

        Args:
            row: Its row.
            swapped: What it was.
            num_tokens: The tokens to make room for.
            found: Per group, by block index, pages that hold the same as its copies and can be shared; 0 for none.

        Returns:
            Per group, the block ids of the pages that have to be filled from the copies, 0 elsewhere; None, and nothing
            changed, if there are not enough pages.

        Raises:
            RequestError: As of ``extend``.
        """
        if num_tokens > self._max_tokens:
            raise too_many_tokens(num_tokens, self._max_tokens)
        state = attrs.evolve(swapped.state, live=dict(swapped.state.live))
        self._begin(row, swapped.num_computed, state)
        for index, copies in enumerate(swapped.copies):
            self.num_blocks[index, row] = len(copies)
            shared = np.array(found[index], dtype=np.int32)
            self._tables[index].ids[row, : len(copies)] = shared
            # First of all, so that nothing of it is evicted to make room.
            if len(held := shared[shared != 0]):
                self._pool.hold(index, held)
        to_fill = [
            [place for place, (copy, page) in enumerate(zip(copies, shared, strict=True)) if copy and not page]
            for copies, shared in zip(swapped.copies, found, strict=True)
        ]
        places = [
            [*lacking, *new] for lacking, new in zip(to_fill, self._places_as_of(row, swapped, num_tokens), strict=True)
        ]
        taken = self._pool.allocate([len(each) for each in places])
        if taken is None:
            self._free_all(row)
            return None
        filled = [[0] * len(copies) for copies in swapped.copies]
        for index, (lacking, where) in enumerate(zip(to_fill, places, strict=True)):
            pages, taken = taken[: len(where)], taken[len(where) :]
            self._fill(row, index, where, pages, num_tokens)
            for place, page in zip(lacking, pages.tolist(), strict=False):
                filled[index][place] = page
        self._note_room(row)
        return filled

    def _places_as_of(self, row: int, swapped: SwappedBlocks, num_tokens: int) -> list[Sequence[int]]:
        """Return what a row lacks besides the pages that it had."""
        places = self._places(row, num_tokens)
        return [
            [place for place in where if place >= len(copies) or not copies[place]]
            for where, copies in zip(places, swapped.copies, strict=True)
        ]

    def _release_tail_first(self, stack: TableStack, ids: BlockIds) -> None:
        """Release all blocks of a row in a stack, ``[num_groups, num_blocks], int32``."""
        if len(stack.groups) == 1:
            self._release(stack.groups[0], ids[0, ::-1])
            return
        pages = ids[:, ::-1].T.flatten()
        groups = stack.group_of_each[: len(pages)]
        if np.count_nonzero(pages) < len(pages):
            is_held = pages != 0
            pages, groups = pages[is_held], groups[is_held]
        if len(pages):
            self._pool.release(pages, groups)

    def _release(self, index: int, ids: BlockIds) -> None:
        held = ids.copy() if np.count_nonzero(ids) == len(ids) else ids[ids != 0]
        if len(held):
            self._pool.release(held, index)


def _difference(whole: Sequence[tuple[int, int]], kept: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of ``whole`` outside ``kept``; both are sorted and disjoint."""
    if whole and kept and whole[0] == kept[0] and len(whole) == len(kept) == 1:
        return []
    left = []
    for start, stop in whole:
        for keep_start, keep_stop in kept:
            if keep_stop <= start or stop <= keep_start:
                continue
            if start < keep_start:
                left.append((start, keep_start))
            start = max(start, keep_stop)
        if start < stop:
            left.append((start, stop))
    return left
