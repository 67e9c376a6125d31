"""The radix tree: the token sequences of published prefixes, with the pages of their blocks.

There is one tree over token ids for each salt and set of inputs. Tokens are compared, not hashed, so that two prompts
that differ never share a block. A node is a run of tokens without a branch, with the pages of the blocks that end in
it. The leaf of a running request grows with the request, and is updated when it is read. A node stays until it has
neither pages nor children.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_order import Groups, equal_runs
from kvframe.cache.block_pool import NO_OWNER, BlockPool, Indices
from kvframe.cache.block_table import TableStack
from kvframe.cache.input_index import Namespace
from kvframe.cache.live_range import LiveRange
from kvframe.contract.errors import RequestError

TOKEN_BYTES = 4


@attrs.define(eq=False, repr=False, weakref_slot=False)
class RadixNode:
    """A run of tokens ``[start, stop)`` of a prefix, whole units of the tree. Only roots have a namespace.

    Attributes:
        first_unit: The bytes of its first unit, by which its parent knows it.
        owner: Its number as the owner of pages; ``NO_OWNER`` for a root.
        tokens: Its token ids, four bytes each.
        pages: Per table stack ``[num_groups, num_blocks], int32``: the pages of the blocks that end in it, 0 for none.
        row: The row of the running request that it grows with; -1 for none.
    """

    parent: RadixNode | None
    start: int
    stop: int
    first_unit: bytes = b""
    owner: int = NO_OWNER
    namespace: Namespace | None = None
    tokens: bytearray = attrs.field(factory=bytearray)
    pages: list[npt.NDArray[np.int32]] = attrs.field(factory=list)
    num_pages: int = 0
    children: dict[bytes, RadixNode] = attrs.field(factory=dict)
    row: int = -1

    def tokens_between(self, start: int, stop: int) -> bytearray:
        """Return the bytes of its tokens ``[start, stop)``."""
        return self.tokens[TOKEN_BYTES * (start - self.start) : TOKEN_BYTES * (stop - self.start)]


class Match(NamedTuple):
    """The first tokens of a request that are in the tree: they are *known*. Their number is a multiple of the unit."""

    nodes: tuple[RadixNode, ...]
    length: int


NO_MATCH = Match((), 0)


class RadixTree:
    """Finds prefixes by their tokens, and nodes by their owner numbers in the pool.

    Invariant: a page of a node is referenced or cached, and its owner in the pool is that node.

    Attributes:
        unit: Runs are split at multiples of this many tokens, which divides the block sizes of all groups.
        sizes: Per table stack, tokens per block.
        stack_indices: For each group, the number of its table stack, and its index in the stack; ``groups`` is the
            reverse.
        is_needed: Per table stack ``[num_groups, max_blocks], bool, host``: which blocks become findable: those that
            some hit could need, and all of a group in which no block dies.
        pool: The pages; set after both are made, because each needs the other.
        row_pages: ``Publisher.row_pages``, set by the publisher.
        catch_up: Updates a node that grows with a row; likewise.
        on_stored: Called with a node, whose blocks that end in tokens ``(start, stop]`` became findable; or None.
    """

    def __init__(self, live: Mapping[int, LiveRange], stacks: Sequence[TableStack], max_tokens: int) -> None:
        self.unit = math.gcd(*(stack.block_size for stack in stacks)) if stacks else 1
        self.sizes = tuple(stack.block_size for stack in stacks)
        self.stack_indices = {group: (s, g) for s, stack in enumerate(stacks) for g, group in enumerate(stack.groups)}
        self.groups = tuple(stack.groups for stack in stacks)
        self._no_pages = [np.zeros((len(groups), 0), dtype=np.int32) for groups in self.groups]
        step = math.lcm(*self.sizes)
        # If another group prevents every hit, the statistics still show the hits of the groups that keep all blocks.
        self.is_needed = [
            np.stack([live[group].needed(step, max_tokens) | live[group].never_dies for group in stack.groups])
            for stack in stacks
        ]
        self._roots: dict[Namespace, RadixNode] = {}
        self._nodes: list[RadixNode | None] = [None]  # by owner number; NO_OWNER is no node
        self._free_owners: list[int] = []
        self.pool: BlockPool
        self.row_pages: Sequence[npt.NDArray[np.int32]]
        self.catch_up: Callable[[RadixNode], None]
        self.on_stored: Callable[[RadixNode, int, int], None] | None = None

    # --- finding ------------------------------------------------------------------------------------------------------

    def match_prefix(self, namespace: Namespace, tokens: Sequence[int], max_tokens: int) -> Match:
        """Return which of the first ``max_tokens`` tokens are known."""
        node, limit = self._roots.get(namespace), max_tokens - max_tokens % self.unit
        if node is None or not limit or as_bytes(tokens, 0, self.unit) not in node.children:
            return NO_MATCH
        data, step = as_bytes(tokens, 0, limit), TOKEN_BYTES * self.unit
        nodes: list[RadixNode] = []
        offset = 0
        while offset == node.stop and offset < limit:
            child = node.children.get(data[TOKEN_BYTES * offset : TOKEN_BYTES * offset + step])
            if child is None:
                break
            node = child
            nodes.append(node)
            if node.row >= 0:
                self.catch_up(node)
            offset = self.end_of_common(node, offset, data, 0)
        return Match(tuple(nodes), offset)

    def end_of_common(self, node: RadixNode, start: int, data: bytes, base: int) -> int:
        """Return where the equal tokens of a node and of ``data``, which begins at ``base``, end, from ``start`` on."""
        stop, at = min(node.stop, base + len(data) // TOKEN_BYTES), TOKEN_BYTES * (start - base)
        is_whole = start == node.start and stop == node.stop
        mine = node.tokens if is_whole else node.tokens_between(start, stop)
        if data.startswith(mine, at):
            return stop
        differ = np.frombuffer(mine, dtype=np.uint32) != np.frombuffer(data, np.uint32, stop - start, at)
        num_equal = int(differ.argmax())
        return start + num_equal - num_equal % self.unit

    def pages_of(self, match: Match, num_tokens: int) -> list[npt.NDArray[np.int32]]:
        """Return per stack ``[num_groups, num_blocks], int32``: the pages of a match's first tokens, 0 for none."""
        stack_pages = []
        for s, size in enumerate(self.sizes):
            parts = [node.pages[s] for node in match.nodes]
            pages = parts[0] if len(parts) == 1 else np.concatenate([self._no_pages[s], *parts], axis=1)
            pages = pages[:, : min(num_tokens, match.length) // size]
            num_unknown = num_tokens // size - pages.shape[1]
            if num_unknown:
                pages = np.concatenate([pages, np.zeros((len(pages), num_unknown), dtype=np.int32)], axis=1)
            stack_pages.append(pages)
        return stack_pages

    def end_of_pages(self, match: Match) -> int:
        """Return the tokens of a match up to its last page, or all if its last node has children or grows."""
        node = match.nodes[-1]
        if node.children or node.row >= 0:
            return match.length
        ends = [
            (node.start // size + last_column(pages)) * size for size, pages in zip(self.sizes, node.pages, strict=True)
        ]
        return min(max(ends), match.length)

    def walk(self) -> Iterator[RadixNode]:
        """Yield all nodes but the roots, each up to date, parents first."""
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
        """Return the root of a namespace. The tree keeps it as long as it has a child."""
        return self._roots.get(namespace) or RadixNode(None, 0, 0, namespace=namespace)

    def add_node(self, parent: RadixNode, start: int, first_unit: bytes) -> RadixNode:
        """Return a new node without a token; ``first_unit`` is the bytes of the first unit that it will have."""
        if parent.namespace is not None:
            self._roots[parent.namespace] = parent
        if not self._free_owners:
            self._free_owners.append(len(self._nodes))
            self._nodes.append(None)
        owner = self._free_owners.pop()
        node = RadixNode(parent, start, start, first_unit, owner, pages=[*self._no_pages])
        parent.children[first_unit] = self._nodes[owner] = node
        return node

    def split_node(self, node: RadixNode, at: int) -> RadixNode:
        """Split a node and return the upper part, a new node. The lower one grows on, or is removed if it is empty."""
        assert node.parent is not None
        upper = self.add_node(node.parent, node.start, node.first_unit)
        upper.stop, upper.tokens = at, node.tokens_between(node.start, at)
        for s, size in enumerate(self.sizes):
            num_blocks = at // size - node.start // size
            upper.pages[s], node.pages[s] = node.pages[s][:, :num_blocks].copy(), node.pages[s][:, num_blocks:].copy()
            groups, blocks = np.nonzero(upper.pages[s])
            upper.num_pages += len(blocks)
            self.pool.publish_blocks(upper.owner, upper.pages[s][groups, blocks], upper.start // size + blocks)
        node.num_pages -= upper.num_pages
        del node.tokens[: TOKEN_BYTES * (at - node.start)]
        node.start, node.parent, node.first_unit = at, upper, bytes(node.tokens[: TOKEN_BYTES * self.unit])
        upper.children[node.first_unit] = node
        self.remove_if_empty(node)
        return upper

    # --- evicting -----------------------------------------------------------------------------------------------------

    def is_in_tree(self, node: RadixNode) -> bool:
        """Return whether a node is in the tree."""
        return self._nodes[node.owner] is node

    def remove_evicted(self, owner: int, groups: int | Groups, indices: Indices) -> None:
        """Remove evicted pages of groups, the blocks at ``indices`` of the prefix, from the node with a number."""
        node = self._nodes[owner]
        assert node is not None
        if node.num_pages == len(indices) and not node.children and node.row < 0:
            node.num_pages = 0  # the node is removed as a whole
        else:
            for group, group_part in equal_runs(groups):
                s, g = self.stack_indices[group]
                columns = indices[group_part] - node.start // self.sizes[s]
                if node.row >= 0:
                    self.row_pages[s][g, node.row, indices[group_part]] = 0
                    columns = columns[columns < node.pages[s].shape[1]]
                node.pages[s][g, columns] = 0
                node.num_pages -= len(columns)
        self.remove_if_empty(node)

    def remove_if_empty(self, node: RadixNode) -> None:
        """Remove a node that has neither pages nor children and does not grow; then do the same for its parents."""
        while node.parent is not None and not node.num_pages and not node.children and node.row < 0:
            del node.parent.children[node.first_unit]
            self._nodes[node.owner] = None
            self._free_owners.append(node.owner)
            node = node.parent
        if node.namespace is not None and not node.children:
            del self._roots[node.namespace]

    def remove_all(self) -> None:
        """Remove every prefix; the pool frees the pages."""
        self._roots.clear()
        del self._nodes[1:]
        self._free_owners.clear()


def last_column(pages: npt.NDArray[np.int32]) -> int:
    """Return the number of the last column with a page, counted from 1; 0 if there is no page."""
    return int(np.flatnonzero(pages.any(axis=0)).max(initial=-1)) + 1


def as_bytes(tokens: Sequence[int], start: int, stop: int) -> bytes:
    """Return token ids ``[start, stop)``, four bytes each; a wrong one raises a ``RequestError`` (``bad_token``)."""
    if isinstance(tokens, array) and tokens.typecode == "I":
        # No view is kept, not even by an error: the caller could add no token to the array while a view lives.
        data = memoryview(tokens)[start:stop].tobytes()
    else:
        try:
            data = array("I", tokens[start:stop]).tobytes()
        except (OverflowError, TypeError):
            raise _unreadable(tokens, num_readable(tokens)) from None
    if len(data) != TOKEN_BYTES * (stop - start):
        raise _unreadable(tokens, len(tokens))
    return data


def num_readable(tokens: Sequence[int]) -> int:
    """Return the number of tokens before the first one that is not a token id."""
    for index, token in enumerate(tokens):
        try:
            array("I", (token,))
        except (OverflowError, TypeError):
            return index
    return len(tokens)


def _unreadable(tokens: Sequence[int], index: int) -> RequestError:
    if index < len(tokens):
        why = f"{tokens[index]!r} is not a token id; give whole numbers in [0, 2**32)"
    else:
        why = f"there are {index} token ids of more tokens that are computed; give them all"
    return RequestError(why, code="bad_token")
