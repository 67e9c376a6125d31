"""What other processes learn: events of blocks that became findable or were removed, and keys of prefixes and inputs.

The events are in order, so that a router can mirror the cache. They are about pages of the device's pool, and about
copies of evicted pages in host memory.

The keys are keyed hashes that every process with the same secret computes alike. Inside the cache tokens are compared,
and nothing is hashed. Outside, the first ``n`` tokens of a request have the key BLAKE2b (RFC 7693), keyed, of
``joined(salt, inputs)`` and then each token id as four bytes, little-endian: 32 bytes from which nothing can be learnt
without the secret. The key depends on the prefix alone, not on a block size.

The content of an input has the key BLAKE2b, keyed, of the hash that its model adapter gives: in the cache, within the
keys of prefixes, and in files of saved prefixes. The first ``n`` tokens of an input have the key of its salt, its name,
its content's key, its number of tokens, and ``n``, ``joined``; numbers are eight bytes, little-endian.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, groupby
from types import MappingProxyType
from typing import Literal, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_order import AnyBlockIds
from kvframe.cache.input_index import InputBlocks, InputSequence, Namespace, inputs_root, joined
from kvframe.cache.layout import CacheLayout
from kvframe.cache.live_range import Pages
from kvframe.cache.radix_tree import RadixNode, RadixTree, as_bytes
from kvframe.contract.specs import TOKENS
from kvframe.planning.tiers import HOST_MEMORY

KEY_BYTES = 32
# BLAKE2b's ``person``: the purpose of a key, with the version of its definition.
PREFIX = b"kvframe.prefix.1"
INPUT = b"kvframe.inputs.1"
CONTENT = b"kvframe.content1"

NO_INPUTS: Mapping[str, InputSequence] = MappingProxyType({})
_MAX_HASHES = 4096
"""Nodes whose hash is kept, so that the tokens before a block are not hashed again."""


DEVICE: Literal["device"] = "device"
"""The medium of pages in the device's pool."""

Medium = Literal["device", "host_memory"]
"""Where a block is: on the device, where requests find it, or in host memory, from where it is brought back."""


@attrs.frozen(kw_only=True)
class BlocksStored:
    """Blocks of one group that requests find from now on.

    Blocks on the device are a run, each the parent of the next, and all fields are given. Copies in host memory are
    told of by their keys alone: ``parent``, ``start`` and ``salt`` are None, and ``tokens`` is empty.

    Attributes:
        group: The index of their cache group. A request continues from a prefix if every group has the blocks that the
            layout says it needs there.
        keys: For each block, the key of the prefix that ends with it.
        block_size: Tokens per block of the group.
        sequence: The sequence whose state the blocks store: ``"tokens"``, a request's own, or an input: ``"encoder"``.
        medium: Where they are stored.
        parent: The key of the prefix before the first block; the key of no tokens if the run begins the sequence.
        start: Tokens before the first block.
        tokens: Their token ids, ``block_size`` for each block; empty for blocks of an input.
        salt: Only requests with this ``cache_salt`` find them.
    """

    group: int
    keys: tuple[bytes, ...]
    block_size: int
    sequence: str = TOKENS
    medium: Medium = DEVICE
    parent: bytes | None = None
    start: int | None = None
    tokens: tuple[int, ...] = ()
    salt: str | None = None


@attrs.frozen(kw_only=True)
class BlocksRemoved:
    """Blocks that are no longer in a medium. Blocks after them in the sequence may stay.

    Attributes:
        group: The index of their cache group.
        keys: Their keys.
        medium: Where they were stored.
    """

    group: int
    keys: tuple[bytes, ...]
    medium: Medium = DEVICE


@attrs.frozen(kw_only=True)
class CacheCleared:
    """All blocks of all groups were removed, from every medium. A listener's first event is this one.

    Attributes:
        layout: What hits need, in each group.
    """

    layout: CacheLayout


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared
"""What happened to the blocks of the prefix cache."""


class PageWatcher(Protocol):
    """Learns the keys of pages, to keep copies of the pages elsewhere. It does not raise."""

    def note_stored(self, group: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Record that pages of a group became findable: their content stays the same until they are evicted."""

    def note_evicted(self, group: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Record that pages of a group are evicted; during this call they still have their content."""

    def note_cleared(self) -> None:
        """Record that all pages were removed, because their content may be wrong."""

    def copies(self) -> Iterable[tuple[int, Sequence[bytes]]]:
        """Return the group and keys of the copies in host memory, which events say are there."""


class EventLog:
    """The events of a cache since they were last taken.

    Invariant: replaying all events, taken and not yet taken, gives the blocks that can be found.

    Attributes:
        keeps_events: Whether events are kept for ``take``. Otherwise only the watchers learn of pages, and of the pages
            of a running request only when another request finds them, or when it ends.
    """

    def __init__(
        self,
        layout: CacheLayout,
        tree: RadixTree,
        secret: bytes,
        watchers: Sequence[PageWatcher] = (),
        *,
        keeps_events: bool = True,
    ) -> None:
        """Begin with the event of a cleared cache; the secret for the keys is 32 bytes."""
        self.keeps_events = keeps_events
        self._watchers = watchers
        self._layout = layout
        self._group_layouts = {group.group: group for group in layout.groups}
        self._tree = tree
        self._secret = secret
        # Blocks of all sizes begin at its multiples: no later block begins before the last multiple.
        self._alignment = math.lcm(*tree.sizes)
        self._events: list[CacheEvent] = [CacheCleared(layout=layout)] if keeps_events else []
        self._key_of_page: dict[int, tuple[int, bytes]] = {}
        # By a node's owner number: the node, its salt, and the hash of a prefix that ends in it.
        self._hashes: OrderedDict[int, tuple[RadixNode, str, PrefixHash]] = OrderedDict()

    def take(self) -> list[CacheEvent]:
        """Return the events that were not taken yet, in order."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return [*_joined_removals(events)]

    def record_stored(self, node: RadixNode, start: int, stop: int) -> None:
        """Record the blocks of a node that end in tokens ``(start, stop]``, except those that were recorded before."""
        runs: list[tuple[int, int, range, Sequence[int]]] = []
        for s, size in enumerate(self._tree.sizes):
            first_block, node_block = start // size, node.start // size
            pages = node.pages[s][:, first_block - node_block : stop // size - node_block].tolist()
            for group, group_pages in zip(self._tree.groups[s], pages, strict=True):
                for run in _runs(i for i, page in enumerate(group_pages) if page and page not in self._key_of_page):
                    runs.append((group, size, range(first_block + run.start, first_block + run.stop), group_pages[run]))
        if not runs:
            return
        ends = {n for _, size, blocks, _ in runs for n in range(blocks.start * size, blocks.stop * size + 1, size)}
        salt, base, tokens, keys = self._keys_of(node, sorted(ends))
        for group, size, blocks, pages in runs:
            self._append_stored(
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

    def record_stored_input(self, blocks: InputBlocks, indices: npt.NDArray[np.intp], pages: Pages) -> None:
        """Record the blocks of an input at these indices; ``pages`` are the pages of all its blocks."""
        size = self._group_layouts[blocks.group].block_size
        for run in _runs(indices.tolist()):
            ends = [min(block * size, blocks.num_tokens) for block in range(run.start, run.stop + 1)]
            parent, *keys = (input_key(self._secret, blocks, end) for end in ends)
            self._append_stored(
                BlocksStored(
                    group=blocks.group,
                    parent=parent,
                    keys=tuple(keys),
                    tokens=(),
                    start=run.start * size,
                    block_size=size,
                    sequence=blocks.sequence,
                    salt=blocks.salt,
                ),
                pages[run].tolist(),
            )

    def _append_stored(self, event: BlocksStored, pages: Sequence[int]) -> None:
        if self.keeps_events:
            self._events.append(event)
        for watcher in self._watchers:
            watcher.note_stored(event.group, event.keys, pages)
        self._key_of_page.update(zip(pages, ((event.group, key) for key in event.keys), strict=True))

    def record_removed(self, block_ids: AnyBlockIds) -> None:
        """Record that pages are evicted."""
        removed_by_group: dict[int, tuple[list[bytes], list[int]]] = {}
        for page in block_ids.tolist():
            entry = self._key_of_page.pop(page, None)
            if entry is not None:
                keys, pages = removed_by_group.setdefault(entry[0], ([], []))
                keys.append(entry[1])
                pages.append(page)
        for group, (keys, pages) in removed_by_group.items():
            for watcher in self._watchers:
                watcher.note_evicted(group, keys, pages)
            if self.keeps_events:
                self._events.append(BlocksRemoved(group=group, keys=tuple(keys)))

    def record_copies(self, group: int, keys: Sequence[bytes], *, are_removed: bool = False) -> None:
        """Record that host memory has copies of evicted blocks, or has them no longer."""
        if are_removed:
            self._events.append(BlocksRemoved(group=group, keys=tuple(keys), medium=HOST_MEMORY))
            return
        layout = self._group_layouts[group]
        self._events.append(
            BlocksStored(
                group=group,
                keys=tuple(keys),
                block_size=layout.block_size,
                sequence=layout.sequence,
                medium=HOST_MEMORY,
            )
        )

    def record_cleared(self) -> None:
        """Record that all blocks were removed."""
        self._key_of_page.clear()
        self._hashes.clear()
        for watcher in self._watchers:
            watcher.note_cleared()
        if self.keeps_events:
            self._events.append(CacheCleared(layout=self._layout))

    def _keys_of(
        self, node: RadixNode, ends: Sequence[int]
    ) -> tuple[str, int, npt.NDArray[np.uint32], dict[int, bytes]]:
        """Return a salt, the position of the first token that follows, tokens up to a node's end, and keys of prefixes.

        The keys are by the length of the prefix, for all lengths in ``ends``.
        """
        # Walk back to the last node whose hash is kept, or to the root.
        parts: list[bytearray] = []
        ancestor = node
        while ancestor.namespace is None:
            entry = self._hashes.get(ancestor.owner)
            # A node may have been split or shortened since its hash was kept.
            if entry and entry[0] is ancestor and ancestor.start <= entry[2].num_tokens <= min(ends[0], ancestor.stop):
                _, salt, known_hash = entry
                parts.append(ancestor.tokens_between(known_hash.num_tokens, ancestor.stop))
                break
            parts.append(ancestor.tokens_between(ancestor.start, ancestor.stop))
            assert ancestor.parent is not None
            ancestor = ancestor.parent
        else:
            salt, known_hash = ancestor.namespace[0], PrefixHash(self._secret, *ancestor.namespace)
        base, current = known_hash.num_tokens, known_hash.copy()
        tokens = np.frombuffer(b"".join(reversed(parts)), dtype=np.uint32)
        keys = {}
        aligned = ends[-1] - ends[-1] % self._alignment
        for end in ends if aligned < ends[0] else sorted({*ends, aligned}):
            keys[end] = current.add_tokens(tokens[current.num_tokens - base : end - base])
            if end == aligned:
                known_hash = current.copy()
        self._hashes[node.owner] = node, salt, known_hash
        self._hashes.move_to_end(node.owner)
        if len(self._hashes) > _MAX_HASHES:
            self._hashes.popitem(last=False)
        return salt, base, tokens, keys


def _joined_removals(events: Iterable[CacheEvent]) -> Iterator[CacheEvent]:
    """Yield events, with removals in a row from one group and medium as one."""

    def run_of(event: CacheEvent) -> tuple[int, str]:
        return (event.group, event.medium) if isinstance(event, BlocksRemoved) else (id(event), "")

    for _, run in groupby(events, run_of):
        first, *others = run
        if others and isinstance(first, BlocksRemoved):
            keys = chain.from_iterable(event.keys for event in (first, *others) if isinstance(event, BlocksRemoved))
            yield BlocksRemoved(group=first.group, keys=tuple(keys), medium=first.medium)
        else:
            yield first


def _runs(indices: Iterable[int]) -> Iterator[slice]:
    """Yield runs of consecutive numbers out of sorted ones."""
    for _, pairs in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        run = [index for _, index in pairs]
        yield slice(run[0], run[-1] + 1)


class PrefixHash:
    """The hash of a prefix that grows; ``num_tokens`` counts its tokens so far."""

    __slots__ = ("_hash", "num_tokens")

    def __init__(self, secret: bytes, salt: str, inputs: bytes) -> None:
        """Begin without a token; ``inputs`` is what ``inputs_root`` returns."""
        self._hash = blake2b(joined(salt.encode(), inputs), digest_size=KEY_BYTES, key=secret, person=PREFIX)
        self.num_tokens = 0

    def add_tokens(self, tokens: npt.NDArray[np.uint32]) -> bytes:
        """Append tokens, ``[n], uint32, host``, and return the key of all tokens."""
        self._hash.update(tokens.astype("<u4", copy=False).data)
        self.num_tokens += len(tokens)
        return self._hash.digest()

    def copy(self) -> PrefixHash:
        """Return a hash of the same tokens that grows by itself."""
        clone = object.__new__(PrefixHash)
        clone._hash, clone.num_tokens = self._hash.copy(), self.num_tokens
        return clone


def prefix_key(
    secret: bytes, token_ids: Sequence[int], *, salt: str = "", inputs: Mapping[str, InputSequence] = NO_INPUTS
) -> bytes:
    """Return the key of a prefix, 32 bytes.

    Args:
        secret: 32 bytes: the stack's ``[cache] key``.
        token_ids: The tokens of the prefix: those of whole blocks, for the key of a block.
        salt: The request's ``cache_salt``.
        inputs: The request's inputs beside its tokens, by the name of the sequence.
    """
    return PrefixHash(secret, salt, inputs_root(inputs)).add_tokens(np.fromiter(token_ids, dtype=np.uint32))


def block_keys(
    secret: bytes, namespace: Namespace, token_ids: Sequence[int], max_tokens: int, block_sizes: Iterable[int]
) -> dict[int, list[bytes]]:
    """Return by block size the keys of the whole blocks in a request's first ``max_tokens`` tokens."""
    ends_of = {size: range(size, max_tokens + 1, size) for size in block_sizes}
    ends = sorted({end for size_ends in ends_of.values() for end in size_ends})
    prefix, keys = PrefixHash(secret, *namespace), {}
    numbers = np.frombuffer(as_bytes(token_ids, 0, ends[-1]) if ends else b"", dtype=np.uint32)
    for end in ends:
        keys[end] = prefix.add_tokens(numbers[prefix.num_tokens : end])
    return {size: [keys[end] for end in size_ends] for size, size_ends in ends_of.items()}


def content_key(secret: bytes, content: bytes) -> bytes:
    """Return the key of an input's content, 32 bytes: the ``key`` of its ``InputSequence``.

    Args:
        secret: 32 bytes: the stack's ``[cache] key``.
        content: The content's hash, as the model adapter makes it (``ModelInput.key``).
    """
    return blake2b(content, digest_size=KEY_BYTES, key=secret, person=CONTENT).digest()


def input_key(secret: bytes, blocks: InputBlocks, num_tokens: int) -> bytes:
    """Return the key of the first tokens of an input, 32 bytes: those of whole blocks, or all for its last block."""
    numbers = (number.to_bytes(8, "little") for number in (blocks.num_tokens, num_tokens))
    message = joined(blocks.salt.encode(), blocks.sequence.encode(), blocks.key, *numbers)
    return blake2b(message, digest_size=KEY_BYTES, key=secret, person=INPUT).digest()


def input_keys(secret: bytes, blocks: InputBlocks, block_size: int) -> list[bytes]:
    """Return the keys of all blocks of an input."""
    ends = (min(end, blocks.num_tokens) for end in range(block_size, blocks.num_tokens + block_size, block_size))
    return [input_key(secret, blocks, end) for end in ends]
