"""The publisher: makes the full blocks of running requests findable, as nodes of the radix tree.

The leaf of a running request grows with it, and is brought up to date when it is read: a step costs nothing. Blocks
that a request no longer needs, such as those before a window, stay findable until they are evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_pool import NO_OWNER
from kvframe.cache.free_list import Groups
from kvframe.cache.live_range import NEVER
from kvframe.cache.radix_tree import (
    TOKEN_BYTES,
    Match,
    Namespace,
    RadixNode,
    RadixTree,
    as_bytes,
    num_readable,
)
from kvframe.contract.errors import RequestError


@attrs.define(eq=False)
class _Cursor:
    """Where a running request's published blocks end.

    Attributes:
        namespace: The request's namespace.
        node: The node that its offset lies in, or lay in; None to look for it from the root.
        offset: Tokens up to which its full blocks were published, by it or by others.
        tokens: Its token ids; the caller appends to them, and those that are computed stay as they are.
        leaf: The node that grows with it; None while its tokens are those of other requests.
    """

    namespace: Namespace
    node: RadixNode | None
    offset: int
    tokens: Sequence[int]
    leaf: RadixNode | None = None


class Publisher:
    """Follows the rows of running requests through the radix tree.

    Attributes:
        row_pages: The pages that rows were given.
        leaf_owner: ``[max_num_seqs], int32, host``: per row, the owner number of the node that grows with it.
        leaf_start: ``[max_num_seqs], int64, host``: per row, that node's first token.
        unreadable: Why tokens of a row could not be read; such a row publishes nothing from there on.
    """

    def __init__(
        self,
        tree: RadixTree,
        num_computed: npt.NDArray[np.int64],
        next_publication: npt.NDArray[np.int64],
    ) -> None:
        """Follow no row yet."""
        self._tree = tree
        tree.catch_up = self._update_leaf
        self.row_pages = tree.row_pages
        self.leaf_owner = np.full(len(num_computed), NO_OWNER, dtype=np.int32)
        self.leaf_start = np.zeros(len(num_computed), dtype=np.int64)
        self.unreadable: dict[int, RequestError] = {}
        # Single numbers of rows are read and written several times as fast in these.
        self._computed_of, self._next_publication = num_computed.data, next_publication.data
        self._cursors: list[_Cursor | None] = [None] * len(num_computed)
        self._numbers = np.arange(max((len(needed[0]) for needed in tree.is_needed), default=0), dtype=np.int32)
        self._numbers_down = self._numbers[::-1].copy()
        self._is_all_needed = [bool(needed.all()) for needed in tree.is_needed]

    # --- publishing ---------------------------------------------------------------------------------------------------

    def follow(self, row: int, namespace: Namespace, tokens: Sequence[int], offset: int, match: Match) -> None:
        """Let a row publish its blocks after its hit, which is ``offset`` tokens of a match."""
        node = None
        # If a hit ends after the tokens that are known, its node is looked for from the root.
        for each in match.nodes if offset <= match.length else ():
            if each.start < offset:
                node = each
        self._cursors[row] = _Cursor(namespace, node, offset, tokens)
        self._next_publication[row] = offset + self._tree.unit

    def follow_fork(self, row: int, new_row: int, tokens: Sequence[int]) -> None:
        """Let a row publish what it adds to the blocks that another one has computed."""
        cursor = self._cursors[row]
        if cursor is not None:
            offset = self._computed_of[row]
            offset -= offset % self._tree.unit
            self._cursors[new_row] = _Cursor(cursor.namespace, cursor.leaf or cursor.node, offset, tokens)
            self._next_publication[new_row] = offset + self._tree.unit

    def read_from(self, row: int, tokens: Sequence[int]) -> None:
        """Read a row's tokens from another sequence from now on."""
        cursor = self._cursors[row]
        if cursor is not None:
            cursor.tokens = tokens

    def publish_row(self, row: int) -> None:
        """Publish the full blocks of a row.

        As long as its tokens are those of another request, that one's blocks stay findable; missing ones are filled in
        with pages of this row.
        """
        cursor = self._cursors[row]
        if cursor is None or cursor.leaf is not None:
            return
        end = self._computed_of[row]
        end -= end % self._tree.unit
        if end > cursor.offset:
            try:
                self._publish_up_to(cursor, row, end)
            except RequestError as error:
                self._publish_readable(cursor, row, end, error)
                return
        self._next_publication[row] = NEVER if cursor.leaf is not None else end + self._tree.unit

    def _publish_up_to(self, cursor: _Cursor, row: int, end: int) -> None:
        """Follow a row's tokens ``[offset, end)`` through the tree, and grow a leaf from where they are not known."""
        node, start = self._find_offset(cursor)
        if start == node.stop:
            first = as_bytes(cursor.tokens, start, start + self._tree.unit)
            if first not in node.children:  # all other tokens are read later, with the leaf
                self._add_leaf(cursor, row, node, first)
                return
        data, offset = as_bytes(cursor.tokens, start, end), start
        while offset < end:
            if offset == node.stop:
                at = TOKEN_BYTES * (offset - start)
                first = data[at : at + TOKEN_BYTES * self._tree.unit]
                child = node.children.get(first)
                if child is None:
                    self._add_leaf(cursor, row, node, first)
                    return
                node = child
            known = self._tree.end_of_common(node, offset, data, start, end)
            self._fill_missing(row, node, max(offset, cursor.offset), known)
            offset = known
            if offset < min(end, node.stop):
                node = self._split_node(node, offset)
        cursor.node, cursor.offset = node, end

    def _publish_readable(self, cursor: _Cursor, row: int, end: int, error: RequestError) -> None:
        """Publish what comes before the first token that cannot be read, and stop following the row."""
        end = min(end, num_readable(cursor.tokens))
        end -= end % self._tree.unit
        if end > cursor.offset:
            self._publish_up_to(cursor, row, end)
        if cursor.leaf is not None:
            # It meets the same token, and stops following the row.
            self._update_leaf(cursor.leaf)
        if self._cursors[row] is cursor:
            self._stop_following(row, cursor, error)

    def _stop_following(self, row: int, cursor: _Cursor, error: RequestError) -> None:
        """Publish nothing more of a row: its tokens after the cursor's offset cannot be read."""
        self.unreadable[row] = error
        self._tree.remove_root_if_empty(cursor.namespace)
        if cursor.leaf is not None:
            for s, size in enumerate(self._tree.sizes):
                of_row = self.row_pages.pages[s][:, row, cursor.offset // size :]
                pages = of_row[(self._tree.pool.owners_of(of_row) == cursor.leaf.owner) & (of_row != 0)]
                held = pages[~self._tree.pool.discard_cached(pages)]
                self._tree.pool.publish_blocks(NO_OWNER, held, np.zeros_like(held))
            cursor.leaf.row = -1
            self.leaf_owner[row] = NO_OWNER
            self._tree.trim_node(cursor.leaf)
        self.row_pages.clear_row(row, len(self._numbers))
        self._cursors[row] = None
        self._next_publication[row] = NEVER

    def _find_offset(self, cursor: _Cursor) -> tuple[RadixNode, int]:
        """Return the node that a cursor's offset lies in, and the offset; the root and 0 if it was removed."""
        node = cursor.node
        while node is not None and node.parent is not None and node.start >= cursor.offset:
            node = node.parent
        if node is not None and node.parent is not None and self._tree.is_in_tree(node):
            self._update_leaf(node)
            if cursor.offset <= node.stop:
                return node, cursor.offset
        return self._tree.root(cursor.namespace), 0

    def _add_leaf(self, cursor: _Cursor, row: int, parent: RadixNode, first: bytes) -> None:
        """Add a node that grows with a row."""
        if parent.row >= 0:
            self._stop_growing(parent)
        leaf = self._tree.add_leaf(parent, first)
        leaf.row = row
        cursor.leaf, cursor.node = leaf, leaf
        self.leaf_owner[row], self.leaf_start[row] = leaf.owner, leaf.start

    def _split_node(self, node: RadixNode, at: int) -> RadixNode:
        """Cut a node in two and return the upper part."""
        upper = self._tree.split_node(node, at)
        if node.row >= 0:
            self.row_pages.remove_run(node.row, upper.start, at)
            self.leaf_start[node.row] = at
        return upper

    def _fill_missing(self, row: int, node: RadixNode, start: int, stop: int) -> None:
        """Give a node pages of a row for the blocks that end in tokens ``(start, stop]`` and have none."""
        for s, size in enumerate(self._tree.sizes):
            first, last = start // size, stop // size
            mine = self.row_pages.pages[s][:, row, first:last]
            theirs = node.pages[s][:, first - node.start // size : last - node.start // size]
            groups, blocks = np.nonzero((theirs == 0) & (mine != 0) & self._tree.is_needed[s][:, first:last])
            if len(groups):
                free = self._tree.pool.owners_of(mine[groups, blocks]) == NO_OWNER
                groups, blocks = groups[free], blocks[free]
                theirs[groups, blocks] = pages = mine[groups, blocks]
                node.num_pages += len(pages)
                self._tree.pool.publish_blocks(node.owner, pages, first + blocks)
            if not self.row_pages.is_table[s]:
                mine[...] = 0
        if self._tree.on_stored is not None:
            self._tree.on_stored(node, start, stop)

    # --- nodes that grow ----------------------------------------------------------------------------------------------

    def release_passed(
        self,
        s: int,
        places: npt.NDArray[np.int64] | int,
        rows: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int64],
        at: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
        groups: int | Groups,
    ) -> None:
        """Release dead blocks of rows that run; if they are full blocks of a row's leaf, they become findable before.

        When the pool is nearly full they are freed: only a request that branches off in the middle could use them.

        Args:
            s: The table stack of their groups.
            places: The place of each block's group in the stack; one if it is the same of all.
            rows: ``[n], int64, host``: the row of each.
            blocks: ``[n], int64, host``: which of the row's blocks.
            at: ``[n], int64, host``: where it lies in the stack (``TableStack.at``).
            pages: ``[n], int32, host``: its page.
            groups: Its group; one if it is the same of all.
        """
        pool = self._tree.pool
        owners = pool.owners_of(pages)
        if np.count_nonzero(owners) == len(pages):
            pool.release_blocks(pages, groups)
            return
        leaves, is_unowned = self.leaf_owner[rows], owners == NO_OWNER
        is_of_leaf = is_unowned & (leaves != NO_OWNER) & (blocks >= self.leaf_start[rows] // self._tree.sizes[s])
        # The leaf of a fork may begin before the pages that the row was given.
        is_of_leaf &= self.row_pages.flat[s][at] == pages
        if not self._is_all_needed[s]:
            is_of_leaf &= self._tree.is_needed[s][places, blocks]
        if pool.is_nearly_full:
            is_of_leaf[...] = False
        if np.count_nonzero(is_of_leaf) == len(pages):
            pool.publish_and_release(leaves, pages, blocks, groups)
            return
        pool.publish_blocks(leaves[is_of_leaf], pages[is_of_leaf], blocks[is_of_leaf])
        self.row_pages.flat[s][at[is_unowned & ~is_of_leaf]] = 0
        pool.release_blocks(pages, groups)

    def refresh_leaf(self, row: int) -> None:
        """Bring the node that grows with a row up to date, so that the pages of its full blocks are owned."""
        cursor = self._cursors[row]
        if cursor is not None and cursor.leaf is not None:
            self._update_leaf(cursor.leaf)

    def unfollow(self, row: int, *, retires: bool = False) -> int:
        """Stop following a row: its leaf stays as its last commit left it.

        Args:
            row: The row.
            retires: Whether to release the blocks of the only group too, if all of them become findable only now.

        Returns:
            The number of the row's tokens whose blocks it released.
        """
        cursor, num_released = self._cursors[row], 0
        if cursor is not None and cursor.leaf is not None:
            leaf = cursor.leaf
            if retires and not leaf.stop:
                num_released = self._publish_and_release(leaf, cursor)
            if not num_released:
                self._update_leaf(leaf)
            leaf.row = -1
            self.leaf_owner[row] = NO_OWNER
            if not num_released:
                self._tree.trim_node(leaf)
        if self.unreadable:
            self.unreadable.pop(row, None)
        self._cursors[row] = None
        self._next_publication[row] = NEVER
        return num_released

    def _publish_and_release(self, leaf: RadixNode, cursor: _Cursor) -> int:
        """Publish and release all full blocks of a row in the only group, the last one first.

        Returns:
            How many tokens they have; 0 if one of them cannot be read.
        """
        end = self._computed_of[leaf.row]
        end -= end % self._tree.unit
        if not end:
            return 0
        try:
            leaf.tokens = bytearray(as_bytes(cursor.tokens, 0, end))
        except RequestError:
            return 0
        num_blocks = end // self._tree.sizes[0]
        pages = self.row_pages.pages[0][:, leaf.row, :num_blocks].copy()
        leaf.pages = [pages]
        leaf.stop, leaf.num_pages = end, num_blocks
        tail_first, indices = pages[0, ::-1].copy(), self._numbers_down[len(self._numbers) - num_blocks :]
        self._tree.pool.publish_and_release(leaf.owner, tail_first, indices, self._tree.groups[0][0])
        if self._tree.on_stored is not None:
            self._tree.on_stored(leaf, 0, end)
        return end

    def _update_leaf(self, node: RadixNode) -> None:
        """Bring the leaf of a running request up to date; other nodes are."""
        row = node.row
        if row < 0:
            return
        end = self._computed_of[row]
        end -= end % self._tree.unit
        if end == node.stop:
            return
        cursor, error = self._cursors[row], None
        assert cursor is not None
        try:
            added = as_bytes(cursor.tokens, node.stop, end)
        except RequestError as caught:
            error, end = caught, min(end, num_readable(cursor.tokens))
            end = max(node.stop, end - end % self._tree.unit)
            added = as_bytes(cursor.tokens, node.stop, end)
        start, node.stop = node.stop, end
        is_new = start == node.start
        del node.tokens[TOKEN_BYTES * (start - node.start) :]
        node.tokens += added
        for s, size in enumerate(self._tree.sizes):
            first, last = start // size, end // size
            new = self.row_pages.pages[s][:, row, first:last].copy()
            if self.row_pages.is_table[s]:
                num_new = new.size
            else:
                new *= self._tree.is_needed[s][:, first:last]
                num_new = int(np.count_nonzero(new))
            node.pages[s] = new if is_new else np.concatenate([node.pages[s], new], axis=1)
            node.num_pages += num_new
            if num_new == last - first and len(new) == 1:
                self._tree.pool.publish_blocks(node.owner, new[0], self._numbers[first:last])
            else:
                groups, places = np.nonzero(new)
                self._tree.pool.publish_blocks(node.owner, new[groups, places], first + places)
        cursor.offset = end
        if self._tree.on_stored is not None:
            self._tree.on_stored(node, start, end)
        if error is not None:
            self._stop_following(row, cursor, error)

    def _stop_growing(self, node: RadixNode) -> None:
        """Let a node grow no longer, though its request runs on: it gets a child."""
        self._update_leaf(node)
        if node.row < 0:  # its tokens could not be read
            return
        cursor = self._cursors[node.row]
        assert cursor is not None
        cursor.leaf, cursor.node, cursor.offset = None, node, node.stop
        self._next_publication[node.row] = node.stop + self._tree.unit
        self.row_pages.remove_run(node.row, node.start, node.stop)
        self.leaf_owner[node.row] = NO_OWNER
        node.row = -1

    def unfollow_all(self) -> None:
        """Forget every prefix; running requests publish nothing more. The pool gives up the pages."""
        for row, cursor in enumerate(self._cursors):
            if cursor is not None:
                self._cursors[row] = None
                self._next_publication[row] = NEVER
        self.row_pages.clear_all()
        self.leaf_owner[...] = NO_OWNER
        self._tree.remove_all()
