"""The prefix tree: which token sequences the cache knows, and in which pages their blocks lie.

A radix tree over token ids, one for each salt and set of inputs: tokens are compared, not hashed, so that two prompts
that differ never share a block. A node is a run of tokens without a branch, with the pages of the blocks that end in
it. The node at the end of a running request grows with it and is brought up to date when somebody looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.block_pool import BlockPool, Indices
from kvframe.cache.block_table import TableStack
from kvframe.cache.live_range import LiveRange
from kvframe.cache.prefix import NO_MATCH, TOKEN_BYTES, Match, Namespace, PrefixNode, as_bytes
from kvframe.cache.row_pages import RowPages


class PrefixTree:
    """Finds prefixes. It keeps the pages that its nodes own from being used for anything else.

    Invariant: a page of a node is held or cached, and its owner in the pool is that node.

    Attributes:
        unit: Tokens that runs are cut by: what the block sizes of all groups are multiples of.
        sizes: Per table stack, tokens per block.
        groups: Per table stack, its groups.
        place: For each group, its table stack, and which of the stack's it is.
        is_needed: Per table stack ``[num_groups, max_blocks], bool, host``: which blocks some hit could need.
        row_pages: The pages that running requests were given.
        pool: Who has the pages; set by whoever makes both: each needs the other.
        catch_up: Brings a node that grows with a row up to date; set by whoever follows rows.
        on_stored: Called with a node, whose blocks that end in tokens ``(start, stop]`` became findable; or None.
    """

    def __init__(
        self,
        live: Mapping[int, LiveRange],
        stacks: Sequence[TableStack],
        max_tokens: int,
    ) -> None:
        """Start with no prefix.

        Args:
            live: When the blocks of each group of tokens die.
            stacks: The block tables of these groups.
            max_tokens: The tokens of the longest request.
        """
        self.unit = math.gcd(*(stack.block_size for stack in stacks)) if stacks else 1
        self.sizes = tuple(stack.block_size for stack in stacks)
        self.place = {group: (s, g) for s, stack in enumerate(stacks) for g, group in enumerate(stack.groups)}
        self.groups = tuple(stack.groups for stack in stacks)
        self._nothing = [np.zeros((len(groups), 0), dtype=np.int32) for groups in self.groups]
        self.row_pages = RowPages(live, stacks)
        step = math.lcm(*self.sizes)
        self.is_needed = [
            np.stack([live[group].needed(step, max_tokens) for group in stack.groups]) for stack in stacks
        ]
        self._roots: dict[Namespace, PrefixNode] = {}
        self._nodes: list[PrefixNode | None] = [None]  # the owner that is nobody
        self._free_owners: list[int] = []
        self.pool: BlockPool
        self.catch_up: Callable[[PrefixNode], None]
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
            offset = child.start + self.common(child, data, 0, limit)
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
            if node.row >= 0:
                self.catch_up(node)
            todo += node.children.values()
            if node.parent is not None:
                yield node

    # --- the shape of the tree ----------------------------------------------------------------------------------------

    def remove_root_if_empty(self, namespace: Namespace) -> None:
        """Forget a namespace, if nothing hangs on its root."""
        root = self._roots.get(namespace)
        if root is not None and not root.children:
            del self._roots[namespace]

    def root(self, namespace: Namespace) -> PrefixNode:
        """Return the root of a namespace, which is there as long as something hangs on it."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = PrefixNode(None, 0, namespace=namespace)
        return root

    def common(self, node: PrefixNode, data: bytes, base: int, limit: int) -> int:
        """Return how many tokens of a node, a multiple of the unit, are those of ``data``, which begins at ``base``."""
        if node.row >= 0:
            self.catch_up(node)
        length = min(node.stop, limit) - node.start
        mine = node.tokens if len(node.tokens) == TOKEN_BYTES * length else node.tokens[: TOKEN_BYTES * length]
        at = TOKEN_BYTES * (node.start - base)
        if not data.startswith(mine, at):
            theirs = data[at : at + len(mine)]
            differ = np.frombuffer(mine, dtype=np.uint32) != np.frombuffer(theirs, dtype=np.uint32)
            length = int(differ.argmax())
            length -= length % self.unit
        return length

    def new_node(self, parent: PrefixNode, start: int) -> PrefixNode:
        """Return a node without a token, which its parent does not have among its children yet."""
        owner = self._free_owners.pop() if self._free_owners else len(self._nodes)
        node = PrefixNode(parent, start, owner)
        node.pages = list(self._nothing)
        if owner == len(self._nodes):
            self._nodes.append(node)
        else:
            self._nodes[owner] = node
        return node

    def split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Cut a node in two and return the upper part, a new node; what grows is the lower one."""
        assert node.parent is not None
        upper = self.new_node(node.parent, node.start)
        cut = TOKEN_BYTES * (at - node.start)
        upper.stop, upper.tokens = at, node.tokens[:cut]
        node.parent.children[node.tokens[: TOKEN_BYTES * self.unit]] = upper
        for s, size in enumerate(self.sizes):
            num_blocks = at // size - node.start // size
            upper.pages[s], node.pages[s] = node.pages[s][:, :num_blocks].copy(), node.pages[s][:, num_blocks:].copy()
            groups, blocks = np.nonzero(upper.pages[s])
            upper.num_pages += len(blocks)
            self.pool.hand_over(upper.owner, upper.pages[s][groups, blocks], upper.start // size + blocks)
        node.num_pages -= upper.num_pages
        node.start, node.tokens, node.parent = at, node.tokens[cut:], upper
        upper.children[node.tokens[: TOKEN_BYTES * self.unit]] = node
        return upper

    # --- what is given up ---------------------------------------------------------------------------------------------

    def node(self, owner: int) -> PrefixNode | None:
        """Return the node of a number; None if it is gone."""
        return self._nodes[owner]

    def is_there(self, node: PrefixNode) -> bool:
        """Return whether a node is still in the tree."""
        return self._nodes[node.owner] is node

    def lost_all(self, owner: int, group: int, num_pages: int) -> bool:
        """Record that a node lost so many pages, if these are all that it has, and remove it; return whether so.

        Args:
            owner: The node's number.
            group: The group of one of them.
            num_pages: How many they are, of all groups.
        """
        node = self._nodes[owner]
        if node is None or node.num_pages != num_pages or node.children or node.row >= 0:
            return False
        node.num_pages = 0
        self.trim(node)
        return True

    def lost(self, owner: int, group: int, indices: Indices) -> None:
        """Record that pages of a node were evicted.

        Args:
            owner: The node's number.
            group: Their group.
            indices: ``[n], host``: which blocks of the prefix they hold.
        """
        node = self._nodes[owner]
        assert node is not None
        s, g = self.place[group]
        places = indices - node.start // self.sizes[s]
        if node.row >= 0:
            if not self.row_pages.is_table[s]:
                self.row_pages.pages[s][g, node.row, indices] = 0
            places = places[places < node.pages[s].shape[1]]
        node.pages[s][g, places] = 0
        node.num_pages -= len(places)
        self.trim(node)

    def trim(self, node: PrefixNode) -> None:
        """Forget the end of a node if it has no page, and nodes that have neither pages nor children.

        A node that has children, or that a running request grows, keeps its tokens. The time is in proportion to what
        is forgotten.
        """
        while node.parent is not None and not node.children and node.row < 0:
            if node.num_pages:
                self._cut_off(node)
                return
            self.remove(node)
            node = node.parent

    def _cut_off(self, node: PrefixNode) -> None:
        """Forget the tokens after the last page of a node that has pages."""
        stop, width = node.start, self.unit
        while stop == node.start:
            base = max(node.start, node.stop - width)
            for size, pages in zip(self.sizes, node.pages, strict=True):
                first = base // size
                held = np.flatnonzero(pages[:, first - node.start // size :].any(axis=0))
                if len(held):
                    stop = max(stop, (first + int(held[-1]) + 1) * size)
            width *= 4
        if stop < node.stop:
            node.stop = stop
            for s, size in enumerate(self.sizes):
                node.pages[s] = node.pages[s][:, : stop // size - node.start // size]

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
        """Forget every prefix. Whoever has the pool gives up the pages."""
        self._roots.clear()
        del self._nodes[1:]
        self._free_owners.clear()
