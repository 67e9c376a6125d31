"""The radix tree: which token sequences the cache knows, and in which pages their blocks lie.

There is one tree over token ids for each salt and set of inputs. Tokens are compared, not hashed, so that two prompts
that differ never share a block. A node is a run of tokens without a branch, with the pages of the blocks that end in
it. The leaf of a running request grows with it, and is brought up to date when it is read.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvframe.cache.block_pool import NO_OWNER, BlockPool, Indices
from kvframe.cache.block_table import TableStack
from kvframe.cache.eviction import equal_runs
from kvframe.cache.free_list import Groups
from kvframe.cache.live_range import LiveRange
from kvframe.cache.row_pages import RowPages
from kvframe.contract.errors import RequestError

TOKEN_BYTES = 4
_LONG = 1024
"""Tokens from which on a view of an array is read faster than a copy of its part."""

Namespace = tuple[str, bytes]
"""A salt and the hash of a request's inputs: requests of different namespaces share nothing."""


class RadixNode:
    """A run of tokens ``[start, stop)`` of a prefix.

    Attributes:
        owner: Its number as the owner of pages; ``NO_OWNER`` for a root.
        parent: The node before it; None for a root.
        start: Its first token; a multiple of the tree's unit.
        stop: The token after its last; likewise.
        tokens: Its token ids, four bytes each; perhaps of tokens after ``stop`` too.
        pages: Per table stack ``[num_groups, num_blocks], int32``: the pages of the blocks that end in it, 0 for none.
        num_pages: How many these are.
        children: The nodes after it, by the bytes of their first unit.
        row: The running request that it grows with; -1 for none.
        namespace: The namespace of a root; None for other nodes.
    """

    __slots__ = (
        "children",
        "namespace",
        "num_pages",
        "owner",
        "pages",
        "parent",
        "row",
        "start",
        "stop",
        "tokens",
    )

    def __init__(
        self, parent: RadixNode | None, start: int, owner: int = NO_OWNER, namespace: Namespace | None = None
    ) -> None:
        self.owner = owner
        self.parent = parent
        self.start = self.stop = start
        self.tokens = bytearray()
        self.pages: list[npt.NDArray[np.int32]] = []
        self.num_pages = 0
        self.children: dict[bytes, RadixNode] = {}
        self.row = -1
        self.namespace = namespace

    def tokens_between(self, start: int, stop: int) -> bytearray:
        """Return the bytes of its tokens ``[start, stop)``."""
        return self.tokens[TOKEN_BYTES * (start - self.start) : TOKEN_BYTES * (stop - self.start)]


class Match(NamedTuple):
    """How far a request's tokens are known.

    Attributes:
        nodes: The nodes along its tokens, from the first.
        length: Tokens that are known, a multiple of the tree's unit.
    """

    nodes: tuple[RadixNode, ...]
    length: int


NO_MATCH = Match((), 0)


class RadixTree:
    """Finds prefixes, and knows which node owns a page in the pool.

    Invariant: a page of a node is referenced or cached, and its owner in the pool is that node.

    Attributes:
        unit: Tokens that runs are cut by: what the block sizes of all groups are multiples of.
        sizes: Per table stack, tokens per block.
        groups: Per table stack, its groups.
        place: For each group, its table stack, and which of the stack's groups it is.
        is_needed: Per table stack ``[num_groups, max_blocks], bool, host``: which blocks some hit could need.
        row_pages: The pages that running requests were given.
        pool: The pages; set after both are made, for each needs the other.
        catch_up: Brings a node that grows with a row up to date; set by the publisher.
        on_stored: Called with a node, whose blocks that end in tokens ``(start, stop]`` became findable; or None.
    """

    def __init__(self, live: Mapping[int, LiveRange], stacks: Sequence[TableStack], max_tokens: int) -> None:
        """Start with no prefix."""
        self.unit = math.gcd(*(stack.block_size for stack in stacks)) if stacks else 1
        self.sizes = tuple(stack.block_size for stack in stacks)
        self.place = {group: (s, g) for s, stack in enumerate(stacks) for g, group in enumerate(stack.groups)}
        self.groups = tuple(stack.groups for stack in stacks)
        self._no_pages = [np.zeros((len(groups), 0), dtype=np.int32) for groups in self.groups]
        self.row_pages = RowPages(live, stacks)
        step = math.lcm(*self.sizes)
        self.is_needed = [
            np.stack([live[group].needed(step, max_tokens) for group in stack.groups]) for stack in stacks
        ]
        self._roots: dict[Namespace, RadixNode] = {}
        self._nodes: list[RadixNode | None] = [None]  # by owner number; NO_OWNER is no node
        self._free_owners: list[int] = []
        self.pool: BlockPool
        self.catch_up: Callable[[RadixNode], None]
        self.on_stored: Callable[[RadixNode, int, int], None] | None = None

    # --- finding ------------------------------------------------------------------------------------------------------

    def match_prefix(self, namespace: Namespace, tokens: Sequence[int], most: int) -> Match:
        """Return how far tokens are known, ``most`` of them at the utmost."""
        root = self._roots.get(namespace)
        limit = most - most % self.unit
        if root is None or not root.children or not limit:
            return NO_MATCH
        if as_bytes(tokens, 0, self.unit) not in root.children:
            return NO_MATCH
        data = as_bytes(tokens, 0, limit)
        nodes: list[RadixNode] = []
        node, offset, step = root, 0, TOKEN_BYTES * self.unit
        while offset < limit:
            child = node.children.get(data[TOKEN_BYTES * offset : TOKEN_BYTES * offset + step])
            if child is None:
                break
            offset = self.end_of_common(child, offset, data, 0, limit)
            nodes.append(child)
            if offset < child.stop:
                break
            node = child
        return Match(tuple(nodes), offset)

    def end_of_common(self, node: RadixNode, start: int, data: bytes, base: int, limit: int) -> int:
        """Return up to which token a node has the tokens of ``data``, in units.

        Args:
            node: The node, which is brought up to date.
            start: The token from which on they are compared, within the node.
            data: Tokens as bytes.
            base: The token that ``data`` begins with.
            limit: The token after the last one to compare.
        """
        if node.row >= 0:
            self.catch_up(node)
        stop = min(node.stop, limit)
        size, at = TOKEN_BYTES * (stop - start), TOKEN_BYTES * (start - base)
        mine = node.tokens if start == node.start and len(node.tokens) == size else node.tokens_between(start, stop)
        if data.startswith(mine, at):
            return stop
        differ = np.frombuffer(mine, dtype=np.uint32) != np.frombuffer(data, np.uint32, stop - start, at)
        num_equal = int(differ.argmax())
        return start + num_equal - num_equal % self.unit

    def pages_of(self, match: Match, num_tokens: int) -> list[npt.NDArray[np.int32]]:
        """Return per stack ``[num_groups, num_blocks], int32``: the pages of a match's first tokens, 0 for none."""
        found = []
        for s, size in enumerate(self.sizes):
            parts = [node.pages[s] for node in match.nodes]
            if num_tokens > match.length:
                num_known = match.length // size
                unknown = np.zeros((len(self.groups[s]), num_tokens // size - num_known), dtype=np.int32)
                parts = [np.concatenate(parts, axis=1)[:, :num_known], unknown] if parts else [unknown]
            pages = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1) if parts else self._no_pages[s]
            found.append(pages[:, : num_tokens // size])
        return found

    def walk(self) -> Iterator[RadixNode]:
        """Go through all nodes but the roots, each up to date, parents first."""
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            if node.row >= 0:
                self.catch_up(node)
            todo += node.children.values()
            if node.parent is not None:
                yield node

    # --- inserting ----------------------------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> RadixNode:
        """Return the root of a namespace, which stays as long as it has a child."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = RadixNode(None, 0, namespace=namespace)
        return root

    def remove_root_if_empty(self, namespace: Namespace) -> None:
        """Forget a namespace whose root has no child."""
        root = self._roots.get(namespace)
        if root is not None and not root.children:
            del self._roots[namespace]

    def add_leaf(self, parent: RadixNode, first: bytes) -> RadixNode:
        """Return a new node without a token, a child of a parent.

        Args:
            parent: The parent.
            first: The bytes of the first unit that the leaf will have.
        """
        leaf = parent.children[first] = self._new_node(parent, parent.stop)
        return leaf

    def _new_node(self, parent: RadixNode, start: int) -> RadixNode:
        owner = self._free_owners.pop() if self._free_owners else len(self._nodes)
        node = RadixNode(parent, start, owner)
        node.pages = list(self._no_pages)
        if owner == len(self._nodes):
            self._nodes.append(node)
        else:
            self._nodes[owner] = node
        return node

    def split_node(self, node: RadixNode, at: int) -> RadixNode:
        """Cut a node in two and return the upper part, a new node; the lower one keeps growing."""
        assert node.parent is not None
        upper = self._new_node(node.parent, node.start)
        upper.stop, upper.tokens = at, node.tokens_between(node.start, at)
        node.parent.children[self._first_unit(node)] = upper
        for s, size in enumerate(self.sizes):
            num_blocks = at // size - node.start // size
            upper.pages[s], node.pages[s] = node.pages[s][:, :num_blocks].copy(), node.pages[s][:, num_blocks:].copy()
            groups, blocks = np.nonzero(upper.pages[s])
            upper.num_pages += len(blocks)
            self.pool.publish_blocks(upper.owner, upper.pages[s][groups, blocks], upper.start // size + blocks)
        node.num_pages -= upper.num_pages
        del node.tokens[: TOKEN_BYTES * (at - node.start)]
        node.start, node.parent = at, upper
        upper.children[self._first_unit(node)] = node
        return upper

    def _first_unit(self, node: RadixNode) -> bytes:
        return bytes(node.tokens[: TOKEN_BYTES * self.unit])

    # --- evicting -----------------------------------------------------------------------------------------------------

    def is_in_tree(self, node: RadixNode) -> bool:
        """Return whether a node was not removed."""
        return self._nodes[node.owner] is node

    def remove_evicted(self, owner: int, groups: int | Groups, indices: Indices) -> None:
        """Remove evicted pages from a node.

        Args:
            owner: The node's number.
            groups: Their group, or the group of each.
            indices: ``[n], host``: which blocks of the prefix they hold.
        """
        node = self._nodes[owner]
        assert node is not None
        if node.num_pages == len(indices) and not node.children and node.row < 0:
            node.num_pages = 0  # the node goes as a whole
        else:
            for group, of_group in equal_runs(groups):
                self._remove_pages(node, group, indices[of_group])
        self.trim_node(node)

    def _remove_pages(self, node: RadixNode, group: int, indices: Indices) -> None:
        s, g = self.place[group]
        places = indices - node.start // self.sizes[s]
        if node.row >= 0:
            if not self.row_pages.is_table[s]:
                self.row_pages.pages[s][g, node.row, indices] = 0
            places = places[places < node.pages[s].shape[1]]
        node.pages[s][g, places] = 0
        node.num_pages -= len(places)

    def trim_node(self, node: RadixNode) -> None:
        """Forget a node's tokens after its last page, and remove nodes that have neither pages nor children.

        A node that has children, or that grows with a running request, keeps its tokens. The time is in proportion to
        what is forgotten.
        """
        while node.parent is not None and not node.children and node.row < 0:
            if node.num_pages:
                self._cut_off(node)
                return
            self._remove_node(node)
            node = node.parent

    def _cut_off(self, node: RadixNode) -> None:
        """Forget the tokens after the last page of a node that has pages."""
        stop, width = node.start, self.unit
        while stop == node.start:
            base = max(node.start, node.stop - width)
            for size, pages in zip(self.sizes, node.pages, strict=True):
                first = base // size
                held = np.flatnonzero(pages[:, first - node.start // size :].any(axis=0))
                if len(held):
                    stop = max(stop, (first + int(held[-1]) + 1) * size)
            assert stop > node.start or base > node.start, "a node's pages are miscounted"
            width *= 4
        if stop < node.stop:
            node.stop = stop
            for s, size in enumerate(self.sizes):
                node.pages[s] = node.pages[s][:, : stop // size - node.start // size]

    def _remove_node(self, node: RadixNode) -> None:
        assert node.parent is not None
        del node.parent.children[self._first_unit(node)]
        self._nodes[node.owner] = None
        self._free_owners.append(node.owner)
        namespace = node.parent.namespace
        if namespace is not None and not node.parent.children:
            del self._roots[namespace]

    def remove_all(self) -> None:
        """Forget every prefix; the pool gives up the pages."""
        self._roots.clear()
        del self._nodes[1:]
        self._free_owners.clear()


def as_bytes(tokens: Sequence[int], start: int = 0, stop: int | None = None) -> bytes:
    """Return token ids, those of ``[start, stop)``, as four bytes each.

    Raises:
        RequestError: One of them is no token id, or is missing (``bad_token``).
    """
    if isinstance(tokens, array) and tokens.typecode == "I":
        if stop is None:
            data = tokens.tobytes()
        else:
            # A part of an array is a copy, which takes less time than a view of it if it is short. No view is kept,
            # not even by an error: the caller could add no token to the array while a view lives.
            data = (tokens[start:stop] if stop - start < _LONG else memoryview(tokens)[start:stop]).tobytes()
    else:
        try:
            data = array("I", tokens if stop is None else tokens[start:stop]).tobytes()
        except (OverflowError, TypeError):
            raise _unreadable(tokens, num_readable(tokens)) from None
    if stop is not None and len(data) != TOKEN_BYTES * (stop - start):
        raise _unreadable(tokens, len(tokens))
    return data


def num_readable(tokens: Sequence[int]) -> int:
    """Return how many tokens come before the first one that is no token id."""
    for place, token in enumerate(tokens):
        try:
            array("I", (token,))
        except (OverflowError, TypeError):
            return place
    return len(tokens)


def _unreadable(tokens: Sequence[int], place: int) -> RequestError:
    if place < len(tokens):
        why = f"{tokens[place]!r} is no token id; give whole numbers in [0, 2**32)"
    else:
        why = f"there are {place} token ids of more tokens that are computed; give them all"
    return RequestError(why, code="bad_token")
