"""The coordinator: the blocks of all running requests over any number of groups, derived from live ranges alone.

A row needs work only at few numbers of computed tokens: when it lacks a block, when a block dies, and when a block is
full that can be published. A step compares all rows with these numbers at once. The allocator, the release of dead
blocks and the publisher get only the rows that reached one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.allocation import BlockAllocator
from kvframe.cache.arguments import not_computable, too_many_tokens
from kvframe.cache.block_pool import BlockPool
from kvframe.cache.block_table import BlockTable, BlockTables, TableStack
from kvframe.cache.copy_on_write import PageCopier, SharedBlocks
from kvframe.cache.dead_blocks import DeadBlocks, release_resident
from kvframe.cache.free_list import BlockIds
from kvframe.cache.group_kinds import GroupKinds
from kvframe.cache.input_index import InputBlocks
from kvframe.cache.live_range import NEVER
from kvframe.cache.prefix_lookup import PrefixHit
from kvframe.cache.publisher import Publisher
from kvframe.cache.rows import PLAIN, RowNumbers, Rows, RowState
from kvframe.planning.plan import KVCachePlan


class KVCacheCoordinator:
    """Begins and ends rows, and gives each event of a running row to the part that handles it.

    It asks no spec for its type.

    Invariant: the pages that a row references are those in its row of the block tables; ``num_blocks`` says how many
    columns of a group are in use.

    Attributes:
        num_computed: ``[max_num_seqs], int64, host``: each row's computed tokens.
        num_blocks: ``[num_groups, max_num_seqs], int64, host``: each row's blocks, dead ones included.
        allocator: Gives rows their pages.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        kinds: GroupKinds,
        pool: BlockPool,
        tables: BlockTables,
        publisher: Publisher | None,
        num_computed: npt.NDArray[np.int64],
        next_publication: npt.NDArray[np.int64],
        copier: PageCopier | None = None,
    ) -> None:
        """Work on a pool and mirror every change into the block tables.

        Args:
            plan: How long requests are.
            kinds: Its groups.
            pool: The pages.
            tables: One block table per group.
            publisher: Makes full blocks findable; None if nothing does.
            num_computed: ``[max_num_seqs], int64, host``, zeroed.
            next_publication: Likewise, which the publisher sets.
            copier: Copies pages that forks share; None if there are no forks.
        """
        numbers = RowNumbers(len(plan.groups), num_computed, next_publication)
        self.num_computed, self.num_blocks = num_computed, numbers.num_blocks
        self._kinds = kinds
        self._pool = pool
        self._tables = tables
        self._publisher = publisher
        self._shared = None if copier is None else SharedBlocks(kinds.of_tokens, pool, tables, num_computed, copier)
        row_pages = None if publisher is None else publisher.row_pages
        self.allocator = BlockAllocator(plan, kinds, pool, tables, numbers, row_pages, self._shared)
        self._dead_blocks = DeadBlocks(kinds, pool, tables, numbers, publisher, self.allocator)
        self._max_tokens = plan.max_model_len
        self._is_plain = kinds.is_plain
        # In a lone group whose blocks all live as long as their request, rows have no gaps and no block dies.
        is_lone = kinds.is_plain and len(plan.groups) == 1 and self._dead_blocks.first_death == NEVER
        self._lone = tables[0] if is_lone else None
        self._states = numbers.states
        self._capacity, self._next_death, self._next_publication = (
            numbers.capacity,
            numbers.next_death,
            next_publication,
        )
        self._computed_of, self._blocks_of = numbers.computed_of, numbers.blocks_of
        self._capacity_of = numbers.capacity_of
        self._death_of, self._publication_of = numbers.death_of, numbers.publication_of

    # --- the beginning ------------------------------------------------------------------------------------------------

    def start_row(self, row: int, hit: PrefixHit, inputs: tuple[InputBlocks, ...] = ()) -> None:
        """Begin a request in a free row from what a lookup found, and reference its blocks.

        Raises:
            SpecError: A spec answers wrongly at the end of what was found; nothing changed.
        """
        live = [group.answers.live_blocks(hit.num_tokens) if hit.num_tokens else () for group in self._kinds.of_tokens]
        if self._is_plain:
            if not hit.num_tokens:
                return
            self.begin_row(row, hit.num_tokens, PLAIN)
        else:
            missing = frozenset(each.sequence for each in inputs if each.sequence not in hit.inputs)
            self.begin_row(row, hit.num_tokens, RowState(inputs, missing, hit.branch))
        for group, ranges in zip(self._kinds.of_tokens, live, strict=True) if hit.num_tokens else ():
            index = group.index
            self._blocks_of[index, row] = hit.num_tokens // group.block_size
            table, pages = self._tables[index].ids[row], hit.pages(index)
            for start, stop in ranges:
                table[start:stop] = pages[start:stop]
                self._pool.add_references(index, pages[start:stop])
        for each in inputs:
            of_input = hit.inputs.get(each.sequence, {}).get(each.group)
            if of_input is not None:
                self.reference_blocks(row, each.group, of_input)
        if self._is_plain:
            self._capacity_of[row] = hit.num_tokens
        else:
            self.allocator.note_capacity(np.array([row]))

    def fork_row(self, row: int, new_row: int, token_ids: Sequence[int]) -> None:
        """Begin a request from what another one has computed, and reference its pages.

        Args:
            row: The other one's row, of which no token is being computed; its inputs are computed.
            new_row: A free row.
            token_ids: The tokens of the request that begins.
        """
        assert self._shared is not None
        state, num_computed = self._states[row], self._computed_of[row]
        assert not state.missing
        self.begin_row(new_row, num_computed, state.copy())
        if self._publisher is not None:
            self._publisher.follow_fork(row, new_row, token_ids)
        is_shared = False
        for group in self._kinds.groups:
            index, size, count = group.index, group.block_size, self._blocks_of[group.index, row]
            # Blocks without a computed token stay the other row's own.
            count = count if group.is_of_input else min(count, -(-num_computed // size))
            ids = self._tables[index].ids[row, :count]
            self.reference_blocks(new_row, index, ids)
            if num_computed % size and count * size > num_computed and not group.is_of_input and ids[-1]:
                is_shared = True
                if self._publisher is not None:
                    self._publisher.row_pages.record_page(index, new_row, count - 1, ids[-1])
        self.allocator.note_capacity(np.array([new_row]))
        if is_shared:
            self._shared.rows |= {row, new_row}
            self._capacity[[row, new_row]] = -1

    def begin_row(self, row: int, num_computed: int, state: RowState) -> None:
        """Let a free row be that of a request with computed tokens; the caller references its blocks.

        Args:
            row: The row.
            num_computed: How many tokens.
            state: What it has beside.
        """
        self._computed_of[row] = num_computed
        self._states[row] = state
        if self._lone is None:
            self._dead_blocks.begin_row(row, num_computed, state)

    def reference_blocks(self, row: int, group: int, block_ids: BlockIds) -> None:
        """Let a row that begins have blocks in a group, and reference their pages.

        Args:
            row: The row.
            group: The group.
            block_ids: ``[n], int32, host``: the pages of its first blocks, 0 for none.
        """
        self._blocks_of[group, row] = len(block_ids)
        self._tables[group].ids[row, : len(block_ids)] = block_ids
        resident = block_ids[block_ids != 0]
        if len(resident):
            self._pool.add_references(group, resident)

    # --- while it runs ------------------------------------------------------------------------------------------------

    def extend_row(self, row: int, num_tokens: int) -> bool:
        """Give a row blocks for its tokens ``[0, num_tokens)`` and, the first time, for its inputs.

        Returns:
            False, and nothing changed, if the pool has too few pages.

        Raises:
            RequestError: The plan is for fewer tokens; nothing changed.
        """
        if num_tokens <= self._capacity_of[row]:
            return True
        if num_tokens > self._max_tokens:
            raise too_many_tokens(num_tokens, self._max_tokens)
        return self.allocator.allocate_for_row(row, num_tokens)

    def extend_rows(self, rows: Rows, num_tokens: npt.NDArray[np.int64]) -> bool:
        """Give each of several rows blocks for its tokens up to ``num_tokens``, or none of them.

        Args:
            rows: ``[n], int64, host``, each once.
            num_tokens: ``[n], int64, host``.

        Raises:
            RequestError: As of ``extend_row``, of any of them.
        """
        (lacking,) = (num_tokens > self._capacity[rows]).nonzero()
        if not len(lacking):
            return True
        rows, num_tokens = rows[lacking], num_tokens[lacking]
        if np.maximum.reduce(num_tokens) > self._max_tokens:
            raise too_many_tokens(int(num_tokens.max()), self._max_tokens)
        if len(rows) == 1:
            return self.allocator.allocate_for_row(int(rows[0]), int(num_tokens[0]))
        return self.allocator.allocate_for_rows(rows, num_tokens)

    def commit_row(self, row: int, num_computed: int) -> None:
        """Record that a row's tokens ``[0, num_computed)`` are computed; release the blocks that died.

        Inputs are computed with the first of these tokens, and stay.
        """
        self._computed_of[row] = num_computed
        if num_computed >= self._publication_of[row] and self._publisher is not None:
            self._publisher.publish_row(row)
        if num_computed >= self._death_of[row]:
            self._dead_blocks.release_dead(np.array([row]), np.array([num_computed]))
        if self._kinds.sparse:
            self._dead_blocks.release_refused_of(row, num_computed)

    def commit_rows(self, rows: Rows, num_computed: npt.NDArray[np.int64]) -> None:
        """Record what is computed of several rows, as ``commit_row`` does of one.

        Args:
            rows: ``[n], int64, host``, each once.
            num_computed: ``[n], int64, host``.
        """
        self.num_computed[rows] = num_computed
        if self._publisher is not None:
            for row in rows[num_computed >= self._next_publication[rows]].tolist():
                self._publisher.publish_row(row)
        (has_dead,) = (num_computed >= self._next_death[rows]).nonzero()
        if len(has_dead):
            self._dead_blocks.release_dead(rows[has_dead], num_computed[has_dead])
        if self._kinds.sparse:
            self._dead_blocks.release_refused(rows, num_computed)

    def num_granted(self, row: int) -> int:
        """Return how many tokens a row's blocks have slots for."""
        counts = [int(self._blocks_of[each.index, row]) * each.block_size for each in self._kinds.of_tokens]
        return min([*counts, self._max_tokens])

    def check_commit(self, rows: Rows, num_computed: npt.NDArray[np.int64]) -> None:
        """Refuse to commit more tokens of rows than their blocks have slots for, or fewer than none.

        Args:
            rows: ``[n], int64, host``, each once, of requests.
            num_computed: ``[n], int64, host``.

        Raises:
            RequestError: It is so of one of them; nothing changed.
        """
        is_odd = (num_computed > self._capacity[rows]) | (num_computed < 0)
        if np.count_nonzero(is_odd):
            for row, count in zip(rows[is_odd].tolist(), num_computed[is_odd].tolist(), strict=True):
                self.check_commit_of(row, count)

    def check_commit_of(self, row: int, num_computed: int) -> None:
        """Check the tokens of one row, as ``check_commit`` does."""
        # The capacity of forks, of rows with inputs and of those with few blocks may be less than their blocks have.
        if not 0 <= num_computed <= self._capacity_of[row] and not 0 <= num_computed <= self.num_granted(row):
            raise not_computable(num_computed, self.num_granted(row))

    def blocks(self, row: int) -> list[list[int]]:
        """Return a row's block ids, one list per group; 0 where a block is not resident."""
        counts = self.num_blocks[:, row].tolist()
        return [self._tables[index].ids[row, :count].tolist() for index, count in enumerate(counts)]

    def state(self, row: int) -> RowState:
        """Return what a row has beside its numbers."""
        return self._states[row]

    # --- the end ------------------------------------------------------------------------------------------------------

    def free_row(self, row: int) -> None:
        """Release every block of a row, its last block first: a prefix stays longer than what continues it."""
        if self._shared is not None:
            self._shared.rows.discard(row)
        if self._lone is not None:
            self._free_lone(self._lone, row)
            return
        if self._publisher is not None:
            self._publisher.unfollow(row)
        self.release_row(row)

    def release_row(self, row: int) -> None:
        """Release every block of a row, which may have gaps, and let it be as one without a token."""
        most = 0
        for stack in self._tables.stacks:
            counts = self._blocks_of
            count = max([counts[group, row] for group in stack.groups])
            if count:
                most = max(most, count)
                ids = stack.ids[:, row, :count]
                self._release_last_first(stack, ids)
                ids.fill(0)
                for group in stack.groups:
                    counts[group, row] = 0
        if self._publisher is not None:
            self._publisher.row_pages.clear_row(row, most)
        self._computed_of[row] = self._capacity_of[row] = 0
        self._states[row] = PLAIN
        self._dead_blocks.clear_row(row)

    def _free_lone(self, table: BlockTable, row: int) -> None:
        """Release every block of a row in the only group."""
        count = self._blocks_of[0, row]
        num_released = 0
        if self._publisher is not None:
            num_released = self._publisher.unfollow(row, retires=True) // table.block_size
        ids = table.ids[row, :count]
        if count > num_released:
            self._pool.release_blocks(ids[num_released:][::-1].copy(), 0)
        ids.fill(0)
        self._blocks_of[0, row] = self._computed_of[row] = self._capacity_of[row] = 0

    def _release_last_first(self, stack: TableStack, ids: BlockIds) -> None:
        """Release all blocks of a row in a stack, ``[num_groups, num_blocks], int32``."""
        if len(stack.groups) == 1:
            release_resident(self._pool, stack.groups[0], ids[0, ::-1])
            return
        pages = ids[:, ::-1].T.flatten()
        groups = stack.group_of_each[: len(pages)]
        if np.count_nonzero(pages) < len(pages):
            is_held = pages != 0
            pages, groups = pages[is_held], groups[is_held]
        if len(pages):
            self._pool.release_blocks(pages, groups)
