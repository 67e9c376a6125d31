"""How what running requests compute becomes findable: they grow the prefix tree, or heal what is lost of it.

The node at the end of a running request grows with it and is brought up to date when somebody looks: a step costs
nothing. What a request passes, a window's blocks say, stays findable while there is room.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.block_pool import NO_OWNER
from kvframe.cache.free_list import Groups
from kvframe.cache.live_range import NEVER
from kvframe.cache.prefix import TOKEN_BYTES, Cursor, Match, Namespace, PrefixNode, as_bytes, num_readable
from kvframe.cache.tree import PrefixTree
from kvframe.errors import RequestError


class Publisher:
    """Follows the rows of running requests through a prefix tree.

    Attributes:
        row_pages: The pages that rows were given.
        leaf_owner: ``[max_num_seqs], int32, host``: per row, the owner number of the node that grows with it.
        leaf_start: ``[max_num_seqs], int64, host``: per row, that node's first token.
        unreadable: Of rows whose tokens could not be read, why not: such a row is followed no more.
    """

    def __init__(
        self,
        tree: PrefixTree,
        num_computed: npt.NDArray[np.int64],
        next_publication: npt.NDArray[np.int64],
    ) -> None:
        """Follow no row yet.

        Args:
            tree: The tree.
            num_computed: ``[max_num_seqs], int64, host``: the computed tokens of each row, as they are at any time.
            next_publication: Likewise, the computed tokens from which on ``publish`` has to be called; set here.
        """
        self._tree = tree
        tree.catch_up = self._update
        self.row_pages = tree.row_pages
        self.leaf_owner = np.full(len(num_computed), NO_OWNER, dtype=np.int32)
        self.leaf_start = np.zeros(len(num_computed), dtype=np.int64)
        self.unreadable: dict[int, RequestError] = {}
        # Single numbers of rows are read and written several times as fast in these.
        self._computed_of, self._next_publication = num_computed.data, next_publication.data
        self._num_computed = num_computed
        self._cursors: list[Cursor | None] = [None] * len(num_computed)
        self._numbers = np.arange(max((len(needed[0]) for needed in tree.is_needed), default=0), dtype=np.int32)
        self._is_all_needed = [bool(needed.all()) for needed in tree.is_needed]

    # --- taking in ----------------------------------------------------------------------------------------------------

    def follow(self, row: int, namespace: Namespace, tokens: Sequence[int], offset: int, match: Match) -> None:
        """Let a row publish its blocks from ``offset`` tokens on, which is what it found."""
        node = None
        # A hit may lie behind the tokens that are known, where nothing of them is needed: then the way begins anew.
        for each in match.nodes if offset <= match.length else ():
            if each.start < offset:
                node = each
        self._cursors[row] = Cursor(namespace, node, offset, tokens)
        self._next_publication[row] = offset + self._tree.unit

    def follow_fork(self, row: int, new_row: int, tokens: Sequence[int]) -> None:
        """Let a row publish what it adds to the blocks that another one has computed."""
        cursor = self._cursors[row]
        if cursor is not None:
            offset = self._computed_of[row]
            offset -= offset % self._tree.unit
            self._cursors[new_row] = Cursor(cursor.namespace, cursor.leaf or cursor.node, offset, tokens)
            self._next_publication[new_row] = offset + self._tree.unit

    def read_from(self, row: int, tokens: Sequence[int]) -> None:
        """Read a row's tokens from somewhere else from now on."""
        cursor = self._cursors[row]
        if cursor is not None:
            cursor.tokens = tokens

    def publish_row(self, row: int) -> None:
        """Take in the blocks of a row that are full.

        Where another request's tokens are the same, its blocks stay found, and missing ones are taken from this row.
        """
        cursor = self._cursors[row]
        if cursor is None or cursor.leaf is not None:
            return
        end = self._computed_of[row]
        end -= end % self._tree.unit
        if end > cursor.offset:
            try:
                self._take_in(cursor, row, end)
            except RequestError as error:
                self._take_in_readable(cursor, row, end, error)
                return
        self._next_publication[row] = NEVER if cursor.leaf is not None else end + self._tree.unit

    def _take_in(self, cursor: Cursor, row: int, end: int) -> None:
        node, offset = self._resume(cursor)
        if offset == node.stop:
            first = as_bytes(cursor.tokens, offset, offset + self._tree.unit)
            if first not in node.children:
                self._grow(cursor, row, node, first)
                return
        base = min(node.start, offset)
        data = as_bytes(cursor.tokens, base, end)
        while True:
            if offset == node.stop:
                first = data[TOKEN_BYTES * (offset - base) : TOKEN_BYTES * (offset - base + self._tree.unit)]
                child = node.children.get(first)
                if child is None:
                    self._grow(cursor, row, node, first)
                    return
                node = child
            self._update(node)
            known = node.start + self._tree.common(node, data, base, end)
            self._heal(row, node, max(offset, cursor.offset), known)
            offset = known
            if offset == end:
                cursor.node, cursor.offset = node, end
                return
            if offset < node.stop:
                node = self._split(node, offset)

    def _take_in_readable(self, cursor: Cursor, row: int, end: int, error: RequestError) -> None:
        """Take in what comes before the first token that cannot be read, and follow the row no more."""
        end = min(end, num_readable(cursor.tokens))
        end -= end % self._tree.unit
        if end > cursor.offset:
            self._take_in(cursor, row, end)
        if cursor.leaf is not None:
            # That finds out the same of what comes after it.
            self._update(cursor.leaf)
        if self._cursors[row] is cursor:
            self._stop_following(row, cursor, error)

    def _stop_following(self, row: int, cursor: Cursor, error: RequestError) -> None:
        """Let nothing more of a row be found: its tokens behind the cursor's offset cannot be read."""
        self.unreadable[row] = error
        self._tree.remove_root_if_empty(cursor.namespace)
        if cursor.leaf is not None:
            for s, size in enumerate(self._tree.sizes):
                for group, own in zip(
                    self._tree.groups[s], self.row_pages.pages[s][:, row, cursor.offset // size :], strict=True
                ):
                    pages = own[(self._tree.pool.owners_of(own) == cursor.leaf.owner) & (own != 0)]
                    held = pages[~self._tree.pool.discard_cached(group, pages)]
                    self._tree.pool.publish_blocks(NO_OWNER, held, np.zeros_like(held))
            cursor.leaf.row = -1
            self.leaf_owner[row] = NO_OWNER
            self._tree.trim(cursor.leaf)
        self.row_pages.clear_row(row, len(self._numbers))
        self._cursors[row] = None
        self._next_publication[row] = NEVER

    def _resume(self, cursor: Cursor) -> tuple[PrefixNode, int]:
        """Return the node that a cursor's offset lies in, or a place from which to look for it."""
        node = cursor.node
        while node is not None and node.parent is not None and node.start >= cursor.offset:
            node = node.parent
        if node is not None and node.parent is not None and self._tree.is_there(node):
            self._update(node)
            if cursor.offset <= node.stop:
                return node, cursor.offset
        return self._tree.root(cursor.namespace), 0

    def _grow(self, cursor: Cursor, row: int, parent: PrefixNode, first: bytes) -> None:
        """Begin a node that grows with a row."""
        if parent.row >= 0:
            self._freeze(parent)
        leaf = self._tree.new_node(parent, parent.stop)
        leaf.row = row
        parent.children[first] = leaf
        cursor.leaf, cursor.node = leaf, leaf
        self.leaf_owner[row], self.leaf_start[row] = leaf.owner, leaf.start

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Cut a node in two and return the upper part."""
        upper = self._tree.split(node, at)
        if node.row >= 0:
            self.row_pages.remove_run(node.row, upper.start, at)
            self.leaf_start[node.row] = at
        return upper

    def _heal(self, row: int, node: PrefixNode, start: int, stop: int) -> None:
        """Take pages of a row for blocks of a node that end in tokens ``(start, stop]`` and have none."""
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
        """Release full blocks that rows have passed; those of growing nodes become theirs before.

        Not so where pages are short: only a request that parts from this one in the middle could use what it passed.

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
        # Of a fork, a leaf may begin before what the row took for itself.
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

    def refresh(self, row: int) -> None:
        """Bring the node that grows with a row up to date, so that the pages of its full blocks are owned."""
        cursor = self._cursors[row]
        if cursor is not None and cursor.leaf is not None:
            self._update(cursor.leaf)

    def unfollow(self, row: int, *, retires: bool = False) -> int:
        """Let a row's node be as its last commit left it; the row is not followed any more.

        Args:
            row: The row.
            retires: Whether to release the blocks of a lone group, the last one first, if all become findable only now.

        Returns:
            The first tokens of the row, whose blocks it released.
        """
        cursor, num_released = self._cursors[row], 0
        if cursor is not None and cursor.leaf is not None:
            leaf = cursor.leaf
            if retires and not leaf.stop:
                num_released = self._retire(leaf, cursor)
            if not num_released:
                self._update(leaf)
            leaf.row = -1
            self.leaf_owner[row] = NO_OWNER
            self._tree.trim(leaf)
        if self.unreadable:
            self.unreadable.pop(row, None)
        self._cursors[row] = None
        self._next_publication[row] = NEVER
        return num_released

    def _retire(self, leaf: PrefixNode, cursor: Cursor) -> int:
        """Let all that a row computed in the only group become findable and be released, tail first.

        Returns:
            How many tokens that is; none where one of them cannot be read.
        """
        end = self._computed_of[leaf.row]
        end -= end % self._tree.unit
        if not end:
            return 0
        try:
            leaf.tokens = as_bytes(cursor.tokens, 0, end)
        except RequestError:
            return 0
        num_blocks = end // self._tree.sizes[0]
        pages = self.row_pages.pages[0][:, leaf.row, :num_blocks].copy()
        leaf.pages = [pages]
        leaf.stop, leaf.num_pages = end, num_blocks
        tail_first, indices = pages[0, ::-1].copy(), self._numbers[:num_blocks][::-1]
        self._tree.pool.publish_and_release(leaf.owner, tail_first, indices, self._tree.groups[0][0])
        if self._tree.on_stored is not None:
            self._tree.on_stored(leaf, 0, end)
        return end

    def _update(self, node: PrefixNode) -> None:
        """Bring a node that grows with a row up to date."""
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
        node.tokens = added if is_new else node.tokens[: TOKEN_BYTES * (start - node.start)] + added
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

    def _freeze(self, node: PrefixNode) -> None:
        """Let a node grow no more though its request runs on: something else comes after its tokens."""
        self._update(node)
        if node.row < 0:
            # Its row is followed no more.
            return
        cursor = self._cursors[node.row]
        assert cursor is not None
        cursor.leaf, cursor.node, cursor.offset = None, node, node.stop
        self._next_publication[node.row] = node.stop + self._tree.unit
        self.row_pages.remove_run(node.row, node.start, node.stop)
        self.leaf_owner[node.row] = NO_OWNER
        node.row = -1

    def forget(self) -> None:
        """Forget every prefix; requests that run publish nothing any more. Whoever has the pool gives up the pages."""
        for row, cursor in enumerate(self._cursors):
            if cursor is not None:
                self._cursors[row] = None
                self._next_publication[row] = NEVER
        self.row_pages.clear_all()
        self.leaf_owner[...] = NO_OWNER
        self._tree.forget()
