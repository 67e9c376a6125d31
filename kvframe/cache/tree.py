"""The prefix tree: which token sequences the cache knows, and in which pages their blocks lie.

A radix tree over token ids, one for each salt and set of inputs: tokens are compared, not hashed, so that two prompts
that differ never share a block. A node is a run of tokens without a branch, with the pages of the blocks that end in
it. The node at the end of a running request grows with it and is brought up to date when somebody looks: a step costs
the tree nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.block_table import TableStack
from kvframe.cache.forgetting import NEVER
from kvframe.cache.own_pages import OwnPages
from kvframe.cache.pool import NOBODY, BlockPool
from kvframe.cache.prefix import NO_MATCH, TOKEN_BYTES, Cursor, Match, Namespace, PrefixNode, as_bytes, num_readable
from kvframe.cache.usefulness import Usefulness
from kvframe.errors import RequestError
from kvframe.plan import PlannedGroup
from kvframe.specs import KVCacheSpec

MAX_GHOST_TOKENS = 1 << 22
"""Tokens that are remembered, where it matters what requests have in common, though nothing of them is kept."""


class PrefixTree:
    """Finds and takes in prefixes. It keeps the pages that its nodes own from being used for anything else.

    Invariant: a page of a node is held or cached, and its owner in the pool is that node.

    Attributes:
        unit: Tokens that runs are cut by: what the block sizes of all groups are multiples of.
        sizes: Per table stack, tokens per block.
        groups: Per table stack, its groups.
        place: For each group, its table stack, and which of the stack's it is.
        own: The pages that running requests took for themselves.
        keeps_ghosts: Whether tokens are remembered whose pages are all gone.
        doubtful: Nodes of which some pages may be of no use to anybody; for each, the tokens that a hit behind it may
            have if it is concerned.
    """

    def __init__(
        self,
        groups: Sequence[PlannedGroup],
        stacks: Sequence[TableStack],
        num_computed: npt.NDArray[np.int64],
        next_publication: npt.NDArray[np.int64],
        usefulness: Usefulness,
        *,
        keeps_ghosts: bool,
    ) -> None:
        """Start with no prefix.

        Args:
            groups: All groups of the plan.
            stacks: The block tables of those of requests' tokens.
            num_computed: ``[max_num_seqs], int64, host``: the computed tokens of each row, as they are at any time.
            next_publication: Likewise, the computed tokens from which on ``publish`` has to be called; set here.
            usefulness: Says which blocks a hit could need.
            keeps_ghosts: Whether to remember tokens whose pages are all gone.
        """
        self._groups = groups
        self.unit = math.gcd(*(stack.block_size for stack in stacks)) if stacks else 1
        self.sizes = tuple(stack.block_size for stack in stacks)
        self.place = {group: (s, g) for s, stack in enumerate(stacks) for g, group in enumerate(stack.groups)}
        self.groups = tuple(stack.groups for stack in stacks)
        self._nothing = [np.zeros((len(groups), 0), dtype=np.int32) for groups in self.groups]
        self.own = OwnPages(groups, stacks)
        self._needs = [[usefulness.groups[group] for group in stack.groups] for stack in stacks]
        # Per stack, which blocks of which group become findable.
        self._is_needed = [
            np.stack([each.needed(stack.ids.shape[2]) for each in needs])
            for needs, stack in zip(self._needs, stacks, strict=True)
        ]
        self._numbers = np.arange(max((stack.ids.shape[2] for stack in stacks), default=0), dtype=np.int32)
        # Per row, the owner number of the node that grows with it, and that node's first token.
        self.leaf_owner = np.full(len(num_computed), NOBODY, dtype=np.int32)
        self.leaf_start = np.zeros(len(num_computed), dtype=np.int64)
        # Single numbers of rows are read and written several times as fast in these.
        self._computed_of, self._next_publication = num_computed.data, next_publication.data
        self._num_computed = num_computed
        self.keeps_ghosts = keeps_ghosts
        self._cursors: list[Cursor | None] = [None] * len(num_computed)
        self._roots: dict[Namespace, PrefixNode] = {}
        self._nodes: list[PrefixNode | None] = [None]  # the owner that is nobody
        self._free_owners: list[int] = []
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        self._num_ghost_tokens = 0
        # Where blocks of groups end differently, the end of a request may be of no use.
        self._ends_alike = len(set(self.sizes)) <= 1
        self._sparse = frozenset(
            group.index for group in groups if type(group.spec).stored_blocks is not KVCacheSpec.stored_blocks
        )
        self._passes = not all(self.own.is_table)
        # Per row, how many tokens were computed when it last passed a block that was kept, and one that was freed.
        self._kept_at = np.zeros(len(num_computed), dtype=np.int64)
        self._freed_at = np.zeros(len(num_computed), dtype=np.int64)
        # Per row, whether it may have blocks that no hit needs, as what comes before them is not there or not its own.
        self._has_gaps = np.zeros(len(num_computed), dtype=np.bool_)
        self._gaps_of = self._has_gaps.data
        self.doubtful: dict[PrefixNode, int] = {}
        self.pool: BlockPool  # set by whoever makes both: each needs the other
        # Of rows whose tokens could not be read, why not: such a row is followed no more.
        self.unreadable: dict[int, RequestError] = {}
        # Called with a node, whose blocks that end in tokens (start, stop] became findable; None for nobody.
        self.on_stored: Callable[[PrefixNode, int, int], None] | None = None

    # --- looking ------------------------------------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: Sequence[int], most: int) -> Match:
        """Return how far tokens are known, ``most`` of them at the utmost."""
        root = self._roots.get(namespace)
        limit = most - most % self.unit
        if root is None or not root.children or not limit:
            return NO_MATCH
        first = as_bytes(tokens, 0, self.unit)
        if first not in root.children:
            return NO_MATCH
        data = as_bytes(tokens, 0, limit)
        nodes: list[PrefixNode] = []
        node, offset, step = root, 0, TOKEN_BYTES * self.unit
        while offset < limit:
            child = node.children.get(data[TOKEN_BYTES * offset : TOKEN_BYTES * offset + step])
            if child is None:
                break
            offset = child.start + self._common(child, data, 0, limit)
            nodes.append(child)
            if offset < child.stop:
                break
            node = child
        return Match(tuple(nodes), offset)

    def pages(self, match: Match, num_tokens: int) -> list[npt.NDArray[np.int32]]:
        """Return per stack ``[num_groups, num_blocks], int32``: the pages of a match's first tokens, 0 for none."""
        found = []
        for s, size in enumerate(self.sizes):
            parts = [node.pages[s] for node in match.nodes]
            if num_tokens > match.length:
                num_known = match.length // size
                unknown = np.zeros((len(self.groups[s]), num_tokens // size - num_known), dtype=np.int32)
                parts = [np.concatenate(parts, axis=1)[:, :num_known], unknown] if parts else [unknown]
            pages = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1) if parts else self._nothing[s]
            found.append(pages[:, : num_tokens // size])
        return found

    def path(self, node: PrefixNode) -> Match:
        """Return the nodes from the root to a node, as a match of all its tokens."""
        nodes = [node]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return Match(tuple(nodes[-2::-1]), node.stop)

    def walk(self) -> Iterator[PrefixNode]:
        """Go through all nodes, each up to date, parents first."""
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            self.update(node)
            todo += node.children.values()
            if node.parent is not None:
                yield node

    # --- taking in ----------------------------------------------------------------------------------------------------

    def follow(self, row: int, namespace: Namespace, tokens: Sequence[int], offset: int, match: Match) -> None:
        """Let a row publish its blocks from ``offset`` tokens on, which is what it found."""
        node = None
        # A hit may lie behind the tokens that are known, where nothing of them is needed: then the way begins anew.
        for each in match.nodes if offset <= match.length else ():
            if each.start < offset:
                node = each
        self._cursors[row] = Cursor(namespace, node, offset, tokens)
        self._gaps_of[row] = self.keeps_ghosts or self._computed_of[row] > offset
        if self._passes:
            self._kept_at[row] = self._freed_at[row] = 0
        self._next_publication[row] = offset + self.unit

    def fork(self, row: int, new_row: int, tokens: Sequence[int]) -> None:
        """Let a row publish what it adds to the blocks that another one has computed."""
        cursor = self._cursors[row]
        self._kept_at[new_row] = self._freed_at[new_row] = 0
        self._has_gaps[new_row] = self._has_gaps[row]
        if cursor is not None:
            offset = self._computed_of[row]
            offset -= offset % self.unit
            self._cursors[new_row] = Cursor(cursor.namespace, cursor.leaf or cursor.node, offset, tokens)
            self._next_publication[new_row] = offset + self.unit

    def read_from(self, row: int, tokens: Sequence[int]) -> None:
        """Read a row's tokens from somewhere else from now on."""
        cursor = self._cursors[row]
        if cursor is not None:
            cursor.tokens = tokens

    def publish(self, row: int) -> None:
        """Take in the blocks of a row that are full.

        Where another request's tokens are the same, its blocks stay found, and missing ones are taken from this row.
        """
        cursor = self._cursors[row]
        if cursor is None or cursor.leaf is not None:
            return
        end = self._computed_of[row]
        end -= end % self.unit
        if end > cursor.offset:
            try:
                self._take_in(cursor, row, end)
            except RequestError as error:
                self._take_in_readable(cursor, row, end, error)
                return
        self._next_publication[row] = NEVER if cursor.leaf is not None else end + self.unit

    def _take_in(self, cursor: Cursor, row: int, end: int) -> None:
        node, offset = self._resume(cursor)
        if offset < cursor.offset:
            self._gaps_of[row] = True
        if offset == node.stop:
            first = as_bytes(cursor.tokens, offset, offset + self.unit)
            if first not in node.children:
                self._grow(cursor, row, node, first)
                return
        # What it has of known tokens is found by others' pages, which may be given up.
        self._gaps_of[row] = True
        base = min(node.start, offset)
        data = as_bytes(cursor.tokens, base, end)
        while True:
            if offset == node.stop:
                first = data[TOKEN_BYTES * (offset - base) : TOKEN_BYTES * (offset - base + self.unit)]
                child = node.children.get(first)
                if child is None:
                    self._grow(cursor, row, node, first)
                    return
                node = child
            self.update(node)
            known = node.start + self._common(node, data, base, end)
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
        end -= end % self.unit
        if end > cursor.offset:
            self._take_in(cursor, row, end)
        if cursor.leaf is not None:
            # That finds out the same of what comes after it.
            self.update(cursor.leaf)
        if self._cursors[row] is cursor:
            self._stop_following(row, cursor, error)

    def _stop_following(self, row: int, cursor: Cursor, error: RequestError) -> None:
        """Let nothing more of a row be found: its tokens behind the cursor's offset cannot be read."""
        self.unreadable[row] = error
        root = self._roots.get(cursor.namespace)
        if root is not None and not root.children:
            del self._roots[cursor.namespace]
        if cursor.leaf is not None:
            for s, size in enumerate(self.sizes):
                for group, own in zip(self.groups[s], self.own.pages[s][:, row, cursor.offset // size :], strict=True):
                    pages = own[(self.pool.owners(own) == cursor.leaf.owner) & (own != 0)]
                    held = pages[~self.pool.drop(group, pages)]
                    self.pool.publish(NOBODY, held, np.zeros_like(held))
            cursor.leaf.row = -1
            self.leaf_owner[row] = NOBODY
            self.doubt(cursor.leaf)
        self.own.clear(row, len(self._numbers))
        self._cursors[row] = None
        self._next_publication[row] = NEVER

    def _resume(self, cursor: Cursor) -> tuple[PrefixNode, int]:
        """Return the node that a cursor's offset lies in, or a place from which to look for it."""
        node = cursor.node
        while node is not None and node.parent is not None and node.start >= cursor.offset:
            node = node.parent
        if node is not None and node.parent is not None and self._nodes[node.owner] is node:
            self.update(node)
            if cursor.offset <= node.stop:
                return node, cursor.offset
        return self._root(cursor.namespace), 0

    def _root(self, namespace: Namespace) -> PrefixNode:
        """Return the root of a namespace, which is there as long as something hangs on it."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = PrefixNode(None, 0, namespace=namespace)
        return root

    def _grow(self, cursor: Cursor, row: int, parent: PrefixNode, first: bytes) -> None:
        """Begin a node that grows with a row."""
        if parent.row >= 0:
            self._freeze(parent)
        leaf = self._new_node(parent, parent.stop)
        leaf.row = row
        parent.children[first] = leaf
        if parent.parent is not None:
            leaf.added()
        cursor.leaf, cursor.node = leaf, leaf
        self.leaf_owner[row], self.leaf_start[row] = leaf.owner, leaf.start

    def _common(self, node: PrefixNode, data: bytes, base: int, limit: int) -> int:
        """Return how many tokens of a node, a multiple of the unit, are those of ``data``, which begins at ``base``."""
        self.update(node)
        length = min(node.stop, limit) - node.start
        mine = node.tokens if len(node.tokens) == TOKEN_BYTES * length else node.tokens[: TOKEN_BYTES * length]
        at = TOKEN_BYTES * (node.start - base)
        if not data.startswith(mine, at):
            theirs = data[at : at + len(mine)]
            differ = np.frombuffer(mine, dtype=np.uint32) != np.frombuffer(theirs, dtype=np.uint32)
            length = int(differ.argmax())
            length -= length % self.unit
        return length

    def _heal(self, row: int, node: PrefixNode, start: int, stop: int) -> None:
        """Take pages of a row for blocks of a node that end in tokens ``(start, stop]`` and have none."""
        for s, size in enumerate(self.sizes):
            first, last = start // size, stop // size
            mine = self.own.pages[s][:, row, first:last]
            theirs = node.pages[s][:, first - node.start // size : last - node.start // size]
            groups, blocks = np.nonzero((theirs == 0) & (mine != 0) & self._is_needed[s][:, first:last])
            if len(groups):
                free = self.pool.owners(mine[groups, blocks]) == NOBODY
                groups, blocks = groups[free], blocks[free]
                theirs[groups, blocks] = pages = mine[groups, blocks]
                node.num_pages += len(pages)
                node.changed()
                self.pool.publish(node.owner, pages, first + blocks)
            if not self.own.is_table[s]:
                mine[...] = 0
        if self.on_stored is not None:
            self.on_stored(node, start, stop)

    # --- nodes that grow ----------------------------------------------------------------------------------------------

    def pass_by(
        self,
        s: int,
        places: npt.NDArray[np.int64] | int,
        rows: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
    ) -> None:
        """Take note that rows are about to let go of full blocks of a stack; those of growing nodes become theirs.

        Not so where pages are short: only a request that parts from this one in the middle could use what it passed.
        """
        leaves = self.leaf_owner[rows]
        is_unowned = self.pool.owners(pages) == NOBODY
        is_of_leaf = is_unowned & (leaves != NOBODY) & (blocks >= self.leaf_start[rows] // self.sizes[s])
        # Of a fork, a leaf may begin before what the row took for itself.
        is_of_leaf &= self.own.pages[s][places, rows, blocks] == pages
        is_of_leaf &= self._is_needed[s][places, blocks]
        if self.pool.is_short:
            is_of_leaf[...] = False
        if np.count_nonzero(is_of_leaf) == len(pages):
            self.pool.publish(leaves, pages, blocks)
            self._kept(rows, pages)
            return
        self.pool.publish(leaves[is_of_leaf], pages[is_of_leaf], blocks[is_of_leaf])
        is_lost = is_unowned & ~is_of_leaf
        places = places if isinstance(places, int) else places[is_lost]
        rows_lost, blocks_lost = rows[is_lost], blocks[is_lost]
        self.own.pages[s][places, rows_lost, blocks_lost] = 0
        self._freed(rows_lost, blocks_lost * self.sizes[s])
        self._kept(rows[~is_lost], pages[~is_lost])

    def pass_range(self, row: int, group: int, start: int, pages: npt.NDArray[np.int32]) -> None:
        """Take note that a row is about to let go of blocks of a group; those that nobody can find are freed.

        Args:
            row: The row.
            group: The group.
            start: The first block.
            pages: The pages of the blocks; 0 for none.
        """
        is_kept = self.own.keep_published(row, group, start, pages, self.pool)
        if group not in self._sparse:
            (freed,) = ((pages != 0) & ~is_kept).nonzero()
            self._freed(np.full(len(freed), row), (start + freed) * self.sizes[self.place[group][0]])
        pages = pages[is_kept]
        self._kept(np.full(len(pages), row), pages)

    def _kept(self, rows: npt.NDArray[np.int64], pages: npt.NDArray[np.int32]) -> None:
        """Take note of pages that rows let go of and that stay; doubt those that may never have been of use."""
        num_computed = self._num_computed[rows]
        self._kept_at[rows] = num_computed
        is_doubtful = self._has_gaps[rows] | (self._freed_at[rows] == num_computed)
        if np.count_nonzero(is_doubtful):
            for owner in np.unique(self.pool.owners(pages[is_doubtful])).tolist():
                node = self._nodes[owner]
                if node is not None:
                    self.doubt(node)

    def _freed(self, rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> None:
        """Take note of blocks that rows let go of and that do not stay; doubt what a hit needed together with them."""
        if len(rows):
            self._freed_at[rows] = self._num_computed[rows]
            for row in set(rows[starts < self._kept_at[rows]].tolist()):
                cursor = self._cursors[row]
                if cursor is not None and cursor.leaf is not None:
                    self.doubt(cursor.leaf)

    def refresh(self, row: int) -> None:
        """Bring the node that grows with a row up to date, so that the pages of its full blocks are owned."""
        cursor = self._cursors[row]
        if cursor is not None and cursor.leaf is not None:
            self.update(cursor.leaf)

    def leave(self, row: int) -> int:
        """Let a row's node be as its last commit left it; the row is not followed any more.

        Returns:
            The first tokens of which it published all blocks by itself; 0 where that would have to be found out.
        """
        cursor, num_published = self._cursors[row], 0
        if cursor is not None and cursor.leaf is not None:
            leaf = cursor.leaf
            self.update(leaf)
            leaf.row = -1
            self.leaf_owner[row] = NOBODY
            num_published = leaf.stop if not leaf.start else 0
        if self.unreadable:
            self.unreadable.pop(row, None)
        node = None if cursor is None else cursor.node
        if node is not None and (self._gaps_of[row] or not self._ends_alike) and self.is_there(node):
            self.doubt(node)
        self._cursors[row] = None
        self._next_publication[row] = NEVER
        return num_published

    def update(self, node: PrefixNode) -> None:
        """Bring a node that grows with a row up to date."""
        row = node.row
        if row < 0:
            return
        end = self._computed_of[row]
        end -= end % self.unit
        if end == node.stop:
            return
        cursor, error = self._cursors[row], None
        assert cursor is not None
        try:
            added = as_bytes(cursor.tokens, node.stop, end)
        except RequestError as caught:
            error, end = caught, min(end, num_readable(cursor.tokens))
            end = max(node.stop, end - end % self.unit)
            added = as_bytes(cursor.tokens, node.stop, end)
        node.tokens = node.tokens[: TOKEN_BYTES * (node.stop - node.start)] + added if node.stop > node.start else added
        for s, size in enumerate(self.sizes):
            first, last = node.stop // size, end // size
            new = self.own.pages[s][:, row, first:last].copy()
            if not self.own.is_table[s]:
                new *= self._is_needed[s][:, first:last]
            node.pages[s] = np.concatenate([node.pages[s], new], axis=1) if node.pages[s].shape[1] else new
            num_new = new.size if self.own.is_table[s] else int(np.count_nonzero(new))
            node.num_pages += num_new
            if num_new == last - first and len(new) == 1:
                self.pool.publish(node.owner, new[0], self._numbers[first:last])
            else:
                groups, places = np.nonzero(new)
                self.pool.publish(node.owner, new[groups, places], first + places)
        start, node.stop = node.stop, end
        cursor.offset = end
        if node.first_hit or node.safe > node.start:
            node.changed()
        if self.on_stored is not None:
            self.on_stored(node, start, end)
        if error is not None:
            self._stop_following(row, cursor, error)

    def _freeze(self, node: PrefixNode) -> None:
        """Let a node grow no more though its request runs on: something else comes after its tokens."""
        self.update(node)
        if node.row < 0:
            # Its row is followed no more.
            return
        cursor = self._cursors[node.row]
        assert cursor is not None
        cursor.leaf, cursor.node, cursor.offset = None, node, node.stop
        self._next_publication[node.row] = node.stop + self.unit
        self.own.give_up(node.row, node.start, node.stop)
        self.leaf_owner[node.row] = NOBODY
        node.row = -1

    # --- the shape of the tree ----------------------------------------------------------------------------------------

    def _new_node(self, parent: PrefixNode, start: int) -> PrefixNode:
        owner = self._free_owners.pop() if self._free_owners else len(self._nodes)
        node = PrefixNode(parent, start, owner)
        node.pages = list(self._nothing)
        if owner == len(self._nodes):
            self._nodes.append(node)
        else:
            self._nodes[owner] = node
        return node

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Cut a node in two and return the upper part, a new node; what grows is the lower one."""
        assert node.parent is not None
        upper = self._new_node(node.parent, node.start)
        cut = TOKEN_BYTES * (at - node.start)
        upper.stop, upper.tokens = at, node.tokens[:cut]
        node.parent.children[node.tokens[: TOKEN_BYTES * self.unit]] = upper
        for s, size in enumerate(self.sizes):
            num_blocks = at // size - node.start // size
            upper.pages[s], node.pages[s] = node.pages[s][:, :num_blocks].copy(), node.pages[s][:, num_blocks:].copy()
            groups, blocks = np.nonzero(upper.pages[s])
            upper.num_pages += len(blocks)
            self.pool.publish(upper.owner, upper.pages[s][groups, blocks], upper.start // size + blocks)
        node.num_pages -= upper.num_pages
        if node.row >= 0:
            self.own.give_up(node.row, upper.start, at)
            self.leaf_start[node.row] = at
        node.start, node.tokens, node.parent = at, node.tokens[cut:], upper
        upper.children[node.tokens[: TOKEN_BYTES * self.unit]] = node
        upper.added()
        node.safe, node.first_hit = at, 0
        upper.unseen = [node]
        if node in self.doubtful:
            self.doubtful[upper] = self.doubtful[node]
        return upper

    # --- what is given up ---------------------------------------------------------------------------------------------

    def node(self, owner: int) -> PrefixNode | None:
        """Return the node of a number; None if it is gone."""
        return self._nodes[owner]

    def is_there(self, node: PrefixNode) -> bool:
        """Return whether a node is still in the tree."""
        return self._nodes[node.owner] is node

    def is_whole_to(self, node: PrefixNode) -> bool:
        """Return whether a node and all before it have all pages that some hit could need."""
        each = node
        while each.parent is not None:
            if each.num_pages != self._num_needed(each):
                return False
            each = each.parent
        return True

    def _num_needed(self, node: PrefixNode) -> int:
        num_pages = 0
        for s, size in enumerate(self.sizes):
            start, stop = node.start // size, node.stop // size
            is_needed = self._is_needed[s]
            num_pages += (
                (stop - start) * len(is_needed)
                if self.own.is_table[s]
                else int(np.count_nonzero(is_needed[:, start:stop]))
            )
        return num_pages

    def safe_if_whole(self, node: PrefixNode) -> int:
        """Return what is safe of a node and what is behind it, if it has all pages that some hit could need."""
        if node.num_pages != self._num_needed(node):
            return node.start
        safe = node.stop
        for needs, size in zip(self._needs, self.sizes, strict=True):
            safe = min(safe, *(each.safe(node.start // size, node.stop // size) for each in needs))
        return max(safe, node.start)

    def doubt(self, node: PrefixNode, concerned: int = 0) -> None:
        """Take note that pages of a node may be of no use, and those behind it that hits of fewer tokens needed."""
        self.doubtful[node] = max(concerned, self.doubtful.get(node, 0))

    def take_out(self, node: PrefixNode, group: int, places: npt.NDArray[np.intp] | npt.NDArray[np.int32]) -> None:
        """Forget the pages of some of a node's blocks, by their places in it, which are not held."""
        s, g = self.place[group]
        if node.row >= 0:
            if not self.own.is_table[s]:
                self.own.pages[s][g, node.row, places + node.start // self.sizes[s]] = 0
            places = places[places < node.pages[s].shape[1]]
        node.pages[s][g, places] = 0
        node.num_pages -= len(places)

    def cut_off(self, node: PrefixNode) -> None:
        """Forget the tokens at a node's end that no page is left of, where nothing hangs on them."""
        if node.children or node.row >= 0 or self.keeps_ghosts or not node.num_pages:
            return
        stop = node.start
        for size, pages in zip(self.sizes, node.pages, strict=True):
            if len(held := np.flatnonzero(pages.any(axis=0))):
                stop = max(stop, (node.start // size + int(held[-1]) + 1) * size)
        if stop == node.stop:
            return
        node.stop = stop
        for s, size in enumerate(self.sizes):
            node.pages[s] = node.pages[s][:, : node.stop // size - node.start // size]

    def remove_if_empty(self, node: PrefixNode) -> None:
        """Take a node without pages out, if nothing hangs on it; or remember its tokens, for the present."""
        if node.parent is None or node.children or node.row >= 0 or node.num_pages:
            return
        if self._nodes[node.owner] is not node:
            # It was remembered for the longest, and went as another one came.
            return
        if self.keeps_ghosts:
            self._num_ghost_tokens += (node.stop - node.start) - self._ghosts.pop(node.owner, 0)
            self._ghosts[node.owner] = node.stop - node.start
            while self._num_ghost_tokens > MAX_GHOST_TOKENS:
                owner, num_tokens = self._ghosts.popitem(last=False)
                self._num_ghost_tokens -= num_tokens
                ghost = self._nodes[owner]
                assert ghost is not None
                assert ghost.parent is not None
                if not ghost.num_pages and not ghost.children and ghost.row < 0:
                    self.remove(ghost)
                    self.remove_if_empty(ghost.parent)
        else:
            self.remove(node)

    def remove(self, node: PrefixNode) -> None:
        """Take a node out."""
        assert node.parent is not None
        del node.parent.children[node.tokens[: TOKEN_BYTES * self.unit]]
        self._nodes[node.owner] = None
        self._free_owners.append(node.owner)
        namespace = node.parent.namespace
        if namespace is not None and not node.parent.children:
            del self._roots[namespace]

    def forget(self) -> None:
        """Forget every prefix; requests that run publish nothing any more. Whoever has the pool gives up the pages."""
        for row, cursor in enumerate(self._cursors):
            if cursor is not None:
                self._cursors[row] = None
                self._next_publication[row] = NEVER
        self.own.forget()
        self.leaf_owner[...] = NOBODY
        self._roots.clear()
        del self._nodes[1:]
        self._free_owners.clear()
        self._ghosts.clear()
        self._num_ghost_tokens = 0
        self.doubtful.clear()
