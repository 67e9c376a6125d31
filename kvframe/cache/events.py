"""Cache events: what became findable and what is no more, in order, so that others can mirror what the cache holds.

Only what requests can find is told of: pages of the device's pool. Copies of swapped requests in host memory are found
by nobody but the request itself, so that they are no event; their published blocks stay findable where they were.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.free_list import BlockIds
from kvframe.cache.input_index import InputBlocks, Pages
from kvframe.cache.keys import PrefixHash, input_key
from kvframe.cache.radix_tree import TOKEN_BYTES, RadixNode, RadixTree
from kvframe.plan import PlannedGroup
from kvframe.specs import TOKENS

_MAX_HASHES = 4096
"""Nodes whose hash is kept, so that what comes next costs no look at what was before."""


@attrs.frozen(kw_only=True)
class BlocksStored:
    """Blocks that requests find from now on: a run of them, each the parent of the next.

    Attributes:
        group: The index of their cache group. A request continues from a prefix if every group has the blocks that its
            type still needs there.
        parent: The key of the prefix before the first of them; of no tokens at all if they begin the sequence.
        keys: Of each, the key of the prefix that ends with it.
        tokens: Their token ids, ``block_size`` of each; none for blocks of an input.
        start: Tokens before the first of them.
        block_size: Tokens of a block of the group.
        sequence: What the blocks hold the state of: ``"tokens"``, a request's own, or an input, such as ``"encoder"``.
        salt: They are found by requests of this ``cache_salt`` only.
        medium: Where they lie.
    """

    group: int
    parent: bytes
    keys: tuple[bytes, ...]
    tokens: tuple[int, ...]
    start: int
    block_size: int
    sequence: str = TOKENS
    salt: str = ""
    medium: Literal["device"] = "device"


@attrs.frozen(kw_only=True)
class BlocksRemoved:
    """Blocks that nobody finds any more. The key of a block that comes after them may stay.

    Attributes:
        group: The index of their cache group.
        keys: Their keys.
        medium: Where they lay.
    """

    group: int
    keys: tuple[bytes, ...]
    medium: Literal["device"] = "device"


@attrs.frozen(kw_only=True)
class CacheCleared:
    """Nothing is found any more, in no group."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


@attrs.frozen
class _KnownHash:
    node: RadixNode
    salt: str
    hash: PrefixHash


class EventLog:
    """The events of a cache since they were last taken.

    Invariant: replaying all that were taken, and then those that were not, gives the blocks that can be found.
    """

    def __init__(self, groups: Sequence[PlannedGroup], tree: RadixTree, secret: bytes) -> None:
        """Begin with a cleared cache.

        Args:
            groups: All groups of the plan.
            tree: What finds blocks of tokens.
            secret: 32 bytes, for the keys.
        """
        self._groups = groups
        self._tree = tree
        self._secret = secret
        # Blocks of all sizes begin at its multiples: what comes next begins at the last of them at the earliest.
        self._alignment = math.lcm(*tree.sizes)
        self._events: list[CacheEvent] = [CacheCleared()]
        self._blocks: dict[int, tuple[int, bytes]] = {}
        self._hashes: OrderedDict[int, _KnownHash] = OrderedDict()

    def take(self) -> list[CacheEvent]:
        """Return the events that were not taken yet, in order."""
        events, self._events = self._events, []
        return events

    # --- what the cache says ------------------------------------------------------------------------------------------

    def stored(self, node: RadixNode, start: int, stop: int) -> None:
        """Take note that blocks of a node that end in tokens ``(start, stop]`` have pages; those that had are known."""
        found: list[tuple[int, int, range, Sequence[int]]] = []
        for s, size in enumerate(self._tree.sizes):
            first, before = start // size, node.start // size
            pages = node.pages[s][:, first - before : stop // size - before].tolist()
            for group, of_group in zip(self._tree.groups[s], pages, strict=True):
                for run in _runs(place for place, page in enumerate(of_group) if page and page not in self._blocks):
                    found.append((group, size, range(first + run.start, first + run.stop), of_group[run]))
        if not found:
            return
        ends = {n for _, size, blocks, _ in found for n in range(blocks.start * size, blocks.stop * size + 1, size)}
        salt, base, tokens, keys = self._keys_of(node, sorted(ends))
        for group, size, blocks, pages in found:
            self._add(
                BlocksStored(
                    group=group,
                    parent=keys[blocks.start * size],
                    keys=tuple(keys[(block + 1) * size] for block in blocks),
                    tokens=tuple(tokens[blocks.start * size - base : blocks.stop * size - base].tolist()),
                    start=blocks.start * size,
                    block_size=size,
                    salt=salt,
                ),
                pages,
            )

    def stored_input(self, blocks: InputBlocks, indices: npt.NDArray[np.intp], pages: Pages) -> None:
        """Take note that blocks of an input have pages."""
        size = self._groups[blocks.group].block_size
        for run in _runs(indices.tolist()):
            ends = [min(block * size, blocks.num_tokens) for block in range(run.start, run.stop + 1)]
            keys = tuple(input_key(self._secret, blocks, end) for end in ends)
            event = BlocksStored(
                group=blocks.group,
                parent=keys[0],
                keys=keys[1:],
                tokens=(),
                start=run.start * size,
                block_size=size,
                sequence=blocks.sequence,
                salt=blocks.salt,
            )
            self._add(event, pages[run].tolist())

    def removed(self, block_ids: BlockIds) -> None:
        """Take note that the content of pages ends."""
        ended: dict[int, list[bytes]] = {}
        for page in block_ids.tolist():
            known = self._blocks.pop(page, None)
            if known is not None:
                ended.setdefault(known[0], []).append(known[1])
        for group, keys in ended.items():
            self._events.append(BlocksRemoved(group=group, keys=tuple(keys)))

    def cleared(self) -> None:
        """Take note that nothing is found any more."""
        self._blocks.clear()
        self._hashes.clear()
        self._events.append(CacheCleared())

    # --- inside -------------------------------------------------------------------------------------------------------

    def _add(self, event: BlocksStored, pages: Sequence[int]) -> None:
        self._events.append(event)
        self._blocks.update(zip(pages, ((event.group, key) for key in event.keys), strict=True))

    def _keys_of(
        self, node: RadixNode, ends: Sequence[int]
    ) -> tuple[str, int, npt.NDArray[np.uint32], dict[int, bytes]]:
        """Return keys of the tokens up to a node's end.

        Args:
            node: The node.
            ends: Of how many tokens, sorted, none behind the node.

        Returns:
            The salt; tokens up to the node's end, and which is the first; the keys.
        """
        parts: list[bytearray] = []
        each = node
        while True:
            if each.namespace is not None:
                salt, known = each.namespace[0], PrefixHash(self._secret, *each.namespace)
                break
            kept = self._hashes.get(each.owner)
            # A node may have been cut in two or shortened since.
            if kept and kept.node is each and each.start <= kept.hash.num_tokens <= min(ends[0], each.stop):
                salt, known = kept.salt, kept.hash
                parts.append(each.tokens[TOKEN_BYTES * (known.num_tokens - each.start) : _length(each)])
                break
            parts.append(each.tokens[: _length(each)])
            assert each.parent is not None
            each = each.parent
        base, current = known.num_tokens, known.copy()
        tokens = np.frombuffer(b"".join(reversed(parts)), dtype=np.uint32)
        keys = {}
        aligned = ends[-1] - ends[-1] % self._alignment
        for end in ends if aligned < ends[0] else sorted({*ends, aligned}):
            keys[end] = current.add(tokens[current.num_tokens - base : end - base])
            if end == aligned:
                known = current.copy()
        self._hashes[node.owner] = _KnownHash(node, salt, known)
        self._hashes.move_to_end(node.owner)
        if len(self._hashes) > _MAX_HASHES:
            self._hashes.popitem(last=False)
        return salt, base, tokens, keys


def _length(node: RadixNode) -> int:
    return TOKEN_BYTES * (node.stop - node.start)


def _runs(places: Iterable[int]) -> Iterator[slice]:
    """Return sorted numbers as runs of consecutive ones."""
    start = stop = None
    for place in places:
        if place != stop:
            if start is not None:
                yield slice(start, stop)
            start = place
        stop = place + 1
    if start is not None:
        yield slice(start, stop)
