"""The publisher: makes the full blocks of running requests findable, as nodes of the radix tree.

While the tokens of a request are those of nodes in the tree, the publisher adds pages that these nodes lack. After them
a leaf grows with the request. The leaf is updated when it is read, so that a step costs nothing. Blocks that a request
no longer needs, such as those before a window, stay findable until they are evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_order import BlockIds, Groups, of_groups
from kvframe.cache.block_pool import NO_OWNER
from kvframe.cache.block_table import GroupKinds, RowNumbers
from kvframe.cache.live_range import NEVER, Positions
from kvframe.cache.radix_tree import Match, RadixNode, RadixTree, as_bytes, num_readable
from kvframe.contract.errors import RequestError


@attrs.define(eq=False)
class _Cursor:
    """Where a running request's published blocks end.

    Attributes:
        node: The leaf that grows with it, or the node that contained its offset when it was last looked at; None to
            search from the root.
        offset: The tokens whose full blocks were published, by it or by others, before a leaf grew with it.
        stop: The first token that cannot be read, from which on nothing is published.
    """

    node: RadixNode | None
    offset: int
    stop: int = NEVER

    def next_publication(self, unit: int) -> int:
        """Return the number of computed tokens at which the next ``unit`` tokens can be published."""
        next_offset = self.offset + unit
        return next_offset if next_offset <= self.stop else NEVER


class Publisher:
    """Follows the rows of running requests through the radix tree.

    Attributes:
        row_pages: Per table stack ``[num_groups, max_num_seqs, max_blocks], int32, host``: the pages that rows were
            given, 0 for those that they found. Unlike a block table, it keeps the page of a dead block until the page
            is evicted or belongs to a node that does not grow. If no block of a stack dies before its request ends, or
            nothing is cached, it is the block table itself, found pages included.
        unreadable: By row, the error of a token that could not be read, until the error is raised.
        full_rows: Rows whose leaf lacks a full block, if leaves are to be updated after each commit.
    """

    def __init__(self, tree: RadixTree, kinds: GroupKinds, numbers: RowNumbers, *, is_caching: bool) -> None:
        max_num_seqs = len(numbers.states)
        self._tree, self._is_caching = tree, is_caching
        tree.catch_up = self._update_leaf
        self.row_pages = tree.row_pages = [
            stack.ids
            if not is_caching or all(kinds.live[group].never_dies for group in stack.groups)
            else np.zeros(stack.ids.shape, dtype=np.int32)
            for stack in kinds.stacks
        ]
        self._flat = [pages.reshape(-1) for pages in self.row_pages]
        # The indices of blocks, the last one first, as the pool stores them.
        max_blocks = max((stack.ids.shape[2] for stack in kinds.stacks), default=0)
        self._backwards = np.arange(max_blocks, dtype=np.int32)[::-1].copy()
        # The row pages that are not block tables, with the block size.
        self._apart = [
            (pages, stack.block_size)
            for pages, stack in zip(self.row_pages, kinds.stacks, strict=True)
            if pages is not stack.ids
        ]
        # When each block of a stack's groups dies, and the tokens of which every hit is a multiple.
        self._deaths = [np.stack([kinds.live[group].deaths for group in stack.groups]) for stack in kinds.stacks]
        self._alignment = kinds.plan.alignment
        # The owner number and the first token of the leaf that grows with each row; ``NEVER`` for no leaf.
        self._leaf_owner = np.full(max_num_seqs, NO_OWNER, dtype=np.int32)
        self._leaf_start = np.full(max_num_seqs, NEVER, dtype=np.int64)
        self.unreadable: dict[int, RequestError] = {}
        self.full_rows: list[int] = []
        self._updates_leaves = False
        self._states = numbers.states
        self._num_computed, self._next_publication = numbers.num_computed, numbers.next_publication
        self._cursors: list[_Cursor | None] = [None] * max_num_seqs

    def pages_of(self, row: int, counts: Sequence[int]) -> BlockIds:
        """Return ``row_pages`` of a row: of each group so many blocks, one group after the other."""
        indices = (self._tree.stack_indices[group] for group in range(len(counts)))
        return np.concatenate(
            [self.row_pages[s][g, row, :count] for (s, g), count in zip(indices, counts, strict=True)]
        )

    # --- rows ---------------------------------------------------------------------------------------------------------

    def follow(self, row: int, offset: int, match: Match) -> None:
        """Begin to publish a row's blocks after its hit, the first ``offset`` tokens of a match."""
        # If a hit ends after the known tokens, its node is searched from the root.
        node = match.nodes[-1] if match.nodes and offset <= match.length else None
        self._begin(row, _Cursor(node, offset))

    def follow_fork(self, row: int, new_row: int) -> None:
        """Begin to publish the blocks that a fork adds to those of another row."""
        cursor, num_computed = self._cursors[row], self._num_computed.item(row)
        if cursor is None or row in self.unreadable:
            return
        offset = num_computed - num_computed % self._tree.unit
        self._begin(new_row, _Cursor(cursor.node, offset, cursor.stop))

    def _begin(self, row: int, cursor: _Cursor) -> None:
        """Begin to publish a row's blocks after a cursor's offset."""
        self._cursors[row] = cursor
        self._next_publication[row] = cursor.next_publication(self._tree.unit)

    def unfollow(self, row: int, block_ids: BlockIds | None = None) -> int:
        """Stop following a row: its leaf stays in the tree, updated to its last commit.

        If there is one group, and the row's blocks in it are given, the full ones are released if this call publishes
        them. Return their number.
        """
        if self._cursors[row] is None:
            return 0
        leaf, num_released = self._leaf_of(row), 0
        if leaf is not None:
            if block_ids is not None and not leaf.stop:
                num_released = self._publish_and_release(leaf, block_ids)
            if not num_released:
                self._update_leaf(leaf)
            self._end_growth(leaf)
            self._tree.remove_if_empty(leaf)
        self.unreadable.pop(row, None)
        self._cursors[row], self._next_publication[row] = None, NEVER
        return num_released

    def unfollow_all(self) -> None:
        """Remove every prefix; running requests publish nothing more. The pool frees the pages."""
        for row in range(len(self._cursors)):
            self._cursors[row] = None
            self._next_publication[row] = NEVER
        for pages, _ in self._apart:
            pages.fill(0)
        self._leaf_start[...] = NEVER
        self._tree.remove_all()

    def forget_pages(self, row: int, start: int, stop: int) -> None:
        """Forget a row's pages of the blocks in tokens ``[start, stop)``: they are another node's, or are released."""
        for pages, size in self._apart:
            pages[:, row, start // size : stop // size].fill(0)

    def forget_refused(self, row: int, group: int, start: int, stop: int) -> None:
        """Forget a row's pages of the blocks ``[start, stop)`` of a group, which no computed token is in."""
        s, g = self._tree.stack_indices[group]
        self.row_pages[s][g, row, start:stop] = 0

    # --- rows whose tokens are in the tree ----------------------------------------------------------------------------

    def publish_row(self, row: int) -> None:
        """Publish the full blocks of a row, except those that another request has published."""
        cursor = self._cursors[row]
        assert cursor is not None
        if self._leaf_of(row) is not None:
            self.full_rows.append(row)
            return
        try:
            self._publish_tokens(cursor, row)
        except RequestError as error:
            self._stop_at_unreadable(cursor, row, error)
            self._publish_tokens(cursor, row)

    def _publish_tokens(self, cursor: _Cursor, row: int) -> None:
        """Follow a row's tokens after the offset through the tree, and add a leaf for those that it does not have."""
        end = self._end_of(cursor, row)
        node, offset = self._find_offset(cursor, row)
        tokens = self._states[row].token_ids
        while offset < end:
            if offset == node.stop:
                first_unit = as_bytes(tokens, offset, offset + self._tree.unit)
                child = node.children.get(first_unit)
                if child is None:  # all other tokens are read later, with the leaf
                    self._add_leaf(cursor, row, node, first_unit)
                    return
                node = child
                self._update_leaf(node)
            data = as_bytes(tokens, offset, min(end, node.stop))
            common_end = self._tree.end_of_common(node, offset, data, offset)
            self._fill_missing(row, node, max(offset, cursor.offset), common_end)
            offset = common_end
            if offset < min(end, node.stop):
                lower, node = node, self._tree.split_node(node, offset)
                if lower.row >= 0:
                    self.forget_pages(lower.row, node.start, offset)
                    self._leaf_start[lower.row] = offset
        cursor.node, cursor.offset = node, max(end, cursor.offset)
        self._next_publication[row] = cursor.next_publication(self._tree.unit)

    def _find_offset(self, cursor: _Cursor, row: int) -> tuple[RadixNode, int]:
        """Return the node that a cursor's offset lies in, and the offset; the root and 0 if the node was removed."""
        node = cursor.node
        while node is not None and node.start >= cursor.offset:
            node = node.parent
        if node is not None and self._tree.is_in_tree(node):
            self._update_leaf(node)
            if cursor.offset <= node.stop:
                return node, cursor.offset
        return self._tree.root(self._states[row].namespace), 0

    def _fill_missing(self, row: int, node: RadixNode, start: int, stop: int) -> None:
        """Give a node pages of a row for the blocks that end in tokens ``(start, stop]`` and have none."""
        for s, size in enumerate(self._tree.sizes):
            first_block, span = start // size, slice(start // size, stop // size)
            node_pages = node.pages[s][:, first_block - node.start // size : span.stop - node.start // size]
            if np.count_nonzero(node_pages) == node_pages.size:
                continue
            row_pages = self.row_pages[s][:, row, span] * self._tree.is_needed[s][:, span]
            groups, blocks = np.nonzero((node_pages == 0) & (row_pages != 0))
            is_unowned = self._tree.pool.owners_of(row_pages[groups, blocks]) == NO_OWNER
            groups, blocks = groups[is_unowned], blocks[is_unowned]
            node_pages[groups, blocks] = pages = row_pages[groups, blocks]
            node.num_pages += len(pages)
            self._tree.pool.publish_blocks(node.owner, pages, first_block + blocks)
        self.forget_pages(row, start, stop)
        if self._tree.on_stored is not None:
            self._tree.on_stored(node, start, stop)

    # --- nodes that grow with a row -----------------------------------------------------------------------------------

    def _leaf_of(self, row: int) -> RadixNode | None:
        """Return the node that grows with a row."""
        cursor = self._cursors[row]
        return cursor.node if cursor is not None and cursor.node is not None and cursor.node.row == row else None

    def _add_leaf(self, cursor: _Cursor, row: int, parent: RadixNode, first_unit: bytes) -> None:
        """Add a leaf that grows with a row; its parent, which is up to date, stops growing."""
        if parent.row >= 0:
            parent_cursor = self._cursors[parent.row]
            assert parent_cursor is not None
            parent_cursor.offset = parent.stop
            self._next_publication[parent.row] = parent_cursor.next_publication(self._tree.unit)
            self.forget_pages(parent.row, parent.start, parent.stop)
            self._end_growth(parent)
        leaf = cursor.node = self._tree.add_node(parent, parent.stop, first_unit)
        leaf.row = row
        self._leaf_owner[row], self._leaf_start[row], self._next_publication[row] = leaf.owner, leaf.start, NEVER
        if self._updates_leaves:
            self.full_rows.append(row)

    def _end_growth(self, leaf: RadixNode) -> None:
        self._leaf_start[leaf.row] = NEVER
        leaf.row = -1

    def release_passed(
        self,
        s: int,
        group_indices: Positions | int,
        rows: Positions,
        blocks: Positions,
        at: Positions,
        pages: npt.NDArray[np.int32],
        groups: int | Groups,
    ) -> None:
        """Release dead blocks of rows that run; if they are full blocks of a row's leaf, they become findable before.

        If the pool is nearly full, most of them are freed: only a request that branches off in the middle could use
        them, and cached blocks that more requests could use would be evicted for them. Blocks become findable that a
        fork still holds, or that the longest prefix of the row needs, such as its last state at the end of a block;
        they take the place of those that its longest prefix needed before.

        The arguments are, of each block of table stack ``s``, its group's index in the stack, its row, its index in the
        row, its index in the flat stack (``TableStack.at``), its page, and its group.
        """
        pool = self._tree.pool
        if not self._is_caching:
            pool.release_blocks(pages, groups)
            return
        is_unowned = pool.owners_of(pages) == NO_OWNER
        is_of_leaf = is_unowned & (blocks >= self._leaf_start[rows] // self._tree.sizes[s])
        # The leaf of a fork may begin before the pages that the row was given.
        is_of_leaf &= self._flat[s][at] == pages
        is_of_leaf &= self._tree.is_needed[s][group_indices, blocks]
        if pool.free_list.is_nearly_full:
            # A prefix that grows with the next token needs none of the blocks that are dead after it.
            prefixes = (self._num_computed[rows] + 1) // self._alignment * self._alignment
            is_of_prefix = is_of_leaf & (self._deaths[s][group_indices, blocks] > prefixes)
            if np.count_nonzero(is_of_prefix):
                prefix_groups = of_groups(group_indices, is_of_prefix)
                self._evict_before(s, prefix_groups, rows[is_of_prefix], blocks[is_of_prefix], prefixes[is_of_prefix])
            is_of_leaf &= is_of_prefix | (pool.reference_counts(pages) > 1)
        owners = self._leaf_owner[rows]
        if np.count_nonzero(is_of_leaf) == len(pages):
            pool.publish_and_release(owners, pages, blocks, groups)
            return
        pool.publish_blocks(owners[is_of_leaf], pages[is_of_leaf], blocks[is_of_leaf])
        self._flat[s][at[is_unowned & ~is_of_leaf]] = 0
        pool.release_blocks(pages, groups)

    def _evict_before(
        self, s: int, group_indices: Positions | int, rows: Positions, blocks: Positions, prefixes: Positions
    ) -> None:
        """Evict the cached blocks of rows that lie one prefix before some blocks, and that their prefixes do not need.

        Args:
            s: The table stack.
            group_indices: The blocks' groups, by their indices in the stack.
            rows: Their rows.
            blocks: Their indices in the rows.
            prefixes: The tokens of the rows' longest prefixes.
        """
        earlier = blocks - self._alignment // self._tree.sizes[s]
        pages = np.where(earlier < 0, 0, self.row_pages[s][group_indices, rows, earlier])
        is_left = self._tree.pool.is_cached(pages) & (pages != 0)
        is_left &= self._tree.pool.owners_of(pages) == self._leaf_owner[rows]
        is_left &= self._deaths[s][group_indices, earlier] <= prefixes
        if np.count_nonzero(is_left):
            self._tree.pool.evict_blocks(pages[is_left])

    def update_leaves_after_commits(self, updates_leaves: bool) -> None:
        """Begin or cease to note rows whose leaf lacks a full block, so that a step without one costs nothing."""
        self._updates_leaves = updates_leaves
        self.full_rows = [row for row in range(len(self._cursors)) if self._leaf_of(row) is not None]
        self.update_full_leaves()

    def update_full_leaves(self) -> None:
        """Update the leaves of rows that lack a full block, so that the blocks' pages have an owner."""
        rows, self.full_rows = self.full_rows, []
        for row in rows:
            leaf = self._leaf_of(row)
            if leaf is None:
                continue
            self._update_leaf(leaf)
            cursor = self._cursors[row]
            assert cursor is not None
            end = leaf.stop + self._tree.unit
            self._next_publication[row] = end if self._updates_leaves and end <= cursor.stop else NEVER

    def _update_leaf(self, node: RadixNode) -> None:
        """Add the tokens and pages to a node that its row has computed since; do nothing if it does not grow."""
        if node.row < 0:
            return
        row, cursor = node.row, self._cursors[node.row]
        assert cursor is not None
        start, end = node.stop, self._end_of(cursor, row)
        if end <= start:
            return
        try:
            node.tokens += as_bytes(self._states[row].token_ids, start, end)
        except RequestError as error:
            self._stop_at_unreadable(cursor, row, error)
            self._update_leaf(node)
            return
        node.stop = end
        for s, size in enumerate(self._tree.sizes):
            first_block, span = start // size, slice(start // size, end // size)
            new_pages = self.row_pages[s][:, row, span] * self._tree.is_needed[s][:, span]
            node.pages[s] = new_pages if start == node.start else np.concatenate([node.pages[s], new_pages], axis=1)
            groups, blocks = np.nonzero(new_pages)
            node.num_pages += len(blocks)
            self._tree.pool.publish_blocks(node.owner, new_pages[groups, blocks], first_block + blocks)
        if self._tree.on_stored is not None:
            self._tree.on_stored(node, start, end)

    def _publish_and_release(self, leaf: RadixNode, block_ids: BlockIds) -> int:
        """Publish and release all full blocks of a row in the only group, the last first; return their number."""
        cursor = self._cursors[leaf.row]
        assert cursor is not None
        end = self._end_of(cursor, leaf.row)
        try:
            leaf.tokens += as_bytes(self._states[leaf.row].token_ids, 0, end)
        except RequestError:
            return 0
        leaf.stop, leaf.num_pages = end, end // self._tree.sizes[0]
        block_ids = block_ids[: leaf.num_pages].copy()
        leaf.pages = [block_ids[None]]
        indices = self._backwards[len(self._backwards) - leaf.num_pages :]
        self._tree.pool.publish_and_release(leaf.owner, block_ids[::-1], indices, 0)
        if self._tree.on_stored is not None:
            self._tree.on_stored(leaf, 0, end)
        return leaf.num_pages

    # --- where publishing ends ----------------------------------------------------------------------------------------

    def _end_of(self, cursor: _Cursor, row: int) -> int:
        """Return the number of a row's first tokens whose blocks can be published."""
        end = min(self._num_computed.item(row), cursor.stop)
        return end - end % self._tree.unit

    def _stop_at_unreadable(self, cursor: _Cursor, row: int, error: RequestError) -> None:
        """Stop publishing a row at its first token that cannot be read, and unpublish its later blocks."""
        self.unreadable[row] = error
        cursor.stop = min(cursor.stop, num_readable(self._states[row].token_ids))
        leaf = self._leaf_of(row)
        if leaf is None:
            return
        self._leaf_start[row] = NEVER  # no more dead blocks are published
        end = max(leaf.stop, self._end_of(cursor, row))
        for s, size in enumerate(self._tree.sizes):
            pages = self.row_pages[s][:, row, end // size :]
            owned = pages[(self._tree.pool.owners_of(pages) == leaf.owner) & (pages != 0)]
            held_pages = owned[~self._tree.pool.discard_cached(owned)]
            self._tree.pool.publish_blocks(NO_OWNER, held_pages, np.zeros_like(held_pages))
