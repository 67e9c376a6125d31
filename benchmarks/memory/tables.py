"""Requests and their block tables over a pool of equal blocks: a model of vLLM's manager, derived from the specs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate

import attrs

from benchmarks.memory.traces import Tokens
from kvframe.cache.input_index import InputSequence
from kvframe.contract.specs import TOKENS, KVCacheSpec

Key = tuple[int, int]
"""A group and the hash of a prefix."""


class EqualBlocks:
    """Blocks of one size that any group can take: vLLM's ``BlockPool``.

    Blocks without content that can be found again are taken first, the last one freed before the others; then those
    that can, the one unused for longest first.
    """

    def __init__(self, num_blocks: int) -> None:
        """Start with every block free; the first one is never given away, as in vLLM."""
        self.num_blocks = num_blocks - 1
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._holders: dict[int, int] = {}
        self._key_of: dict[int, Key] = {}
        self._index: dict[Key, int] = {}

    @property
    def use(self) -> float:
        """Share of the blocks that requests hold."""
        return len(self._holders) / self.num_blocks

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return len(self._holders)

    def find(self, key: Key) -> int:
        """Return the block with this key; 0 if there is none."""
        return self._index.get(key, 0)

    def allocate(self, num_blocks: Sequence[int]) -> list[list[int]] | None:
        """Take blocks for each group, evicting where needed; None, and nothing changed, if there are not enough."""
        if sum(num_blocks) > len(self._free):
            return None
        return [[self._take() for _ in range(count)] for count in num_blocks]

    def has_room(self, num_blocks: Sequence[int]) -> bool:
        """Return whether ``allocate`` would find as many blocks for each group."""
        return sum(num_blocks) <= len(self._free)

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._index[key]
        self._holders[block] = 1
        return block

    def reference(self, group: int, block: int) -> None:
        """Hold a block once more."""
        count = self._holders.get(block, 0)
        if not count:
            del self._free[block]
        self._holders[block] = count + 1

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """Hold each block once less, in the order in which they shall be evicted."""
        for block in blocks:
            count = self._holders[block] - 1
            if count:
                self._holders[block] = count
                continue
            del self._holders[block]
            self._free[block] = None
            if block not in self._key_of:
                self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: Key) -> None:
        """Make a held block findable, unless another one is already found by that key."""
        if self._index.setdefault(key, block) == block:
            self._key_of[block] = key


Inputs = Mapping[str, InputSequence]


@attrs.define
class _Entry:
    ids: list[list[int]]
    first: list[int]
    """Per group, the first block that may be resident."""
    published: list[int]
    num_computed: int
    inputs: Inputs
    boundaries: tuple[int, ...] = ()
    """Where a later request may want to continue: at the prompt's end, and where it parts from an earlier request."""
    keys: dict[int, list[int]] = attrs.field(factory=dict)


class TableManager:
    """Requests and their block tables over a pool: the verbs of a cache, derived from what the groups' specs say."""

    def __init__(self, specs: Sequence[KVCacheSpec], pool: EqualBlocks, tokens_a_step: int) -> None:
        """Start with no request.

        Args:
            specs: The groups'.
            pool: Where blocks come from.
            tokens_a_step: The most tokens that a step computes.
        """
        self._specs = tuple(specs)
        self._keeps_states = [spec.is_per_block for spec in specs]
        self._pool = pool
        self._tokens_a_step = tokens_a_step
        self._entries: dict[str, _Entry] = {}
        self._sizes = sorted({spec.block_size for spec in specs if spec.sequence == TOKENS})
        self._alignment = math.lcm(*self._sizes)

    def start(self, request_id: str, token_ids: Tokens[int], *, use_prefix: bool, inputs: Inputs) -> int:
        """Take a request in, on its longest cached prefix; returns the tokens of that."""
        entry = _Entry([[] for _ in self._specs], [0] * len(self._specs), [0] * len(self._specs), 0, inputs)
        self._entries[request_id] = entry
        if use_prefix and self._is_shared(entry):
            self._make_keys(entry, token_ids, len(token_ids) - 1)
            hit, longest = self._longest_hit(entry, len(token_ids) - 1)
            ends = (longest, (len(token_ids) - 1) // self._alignment * self._alignment)
            entry.num_computed, entry.boundaries = hit, tuple(end for end in ends if end > hit)
            for group, spec in enumerate(self._specs):
                ids = [0] * (hit // spec.block_size)
                for first, stop in spec.live_blocks(hit):
                    for index in range(first, stop):
                        ids[index] = self._pool.find((group, entry.keys[spec.block_size][index]))
                        self._pool.reference(group, ids[index])
                    entry.first[group] = first
                entry.ids[group] = ids
                entry.published[group] = len(ids)
        return entry.num_computed

    def _longest_hit(self, entry: _Entry, most: int) -> tuple[int, int]:
        """Return the longest prefix that every group can continue from, and the longest that any of them can."""
        missing = []
        for group, spec in enumerate(self._specs):
            keys = entry.keys[spec.block_size][: most // spec.block_size]
            missing.append([0, *accumulate(not self._pool.find((group, key)) for key in keys)])
        hit = most - most % self._alignment
        longest = max(_longest(spec, absent, hit) for spec, absent in zip(self._specs, missing, strict=True))
        while hit:
            shorter = min(_longest(spec, absent, hit) for spec, absent in zip(self._specs, missing, strict=True))
            if shorter == hit:
                break
            hit = shorter - shorter % self._alignment
        return hit, longest - longest % self._alignment

    def has_room(self, request_id: str, num_tokens: int) -> bool:
        """Return whether there is room for all that a request takes up to ``num_tokens`` tokens; takes nothing."""
        entry = self._entries[request_id]
        start = max(entry.num_computed, num_tokens - self._tokens_a_step)
        lacking = []
        for spec, ids in zip(self._specs, entry.ids, strict=True):
            if spec.sequence == TOKENS:
                most = spec.num_resident_blocks(start, max(0, num_tokens - start))
            else:
                most = -(-entry.inputs[spec.sequence].num_tokens // spec.block_size)
            lacking.append(max(0, most - sum(map(bool, ids))))
        return self._pool.has_room(lacking)

    def extend(self, request_id: str, num_tokens: int) -> bool:
        """Make room for tokens ``[0, num_tokens)``; False, and nothing changed, if there is none."""
        entry = self._entries[request_id]
        places = [self._places(entry, group, spec, num_tokens) for group, spec in enumerate(self._specs)]
        taken = self._pool.allocate([len(each) for each in places])
        if taken is None:
            return False
        for ids, where, blocks in zip(entry.ids, places, taken, strict=True):
            if where:
                ids.extend([0] * (where[-1] + 1 - len(ids)))
                for index, block in zip(where, blocks, strict=True):
                    ids[index] = block
        return True

    def _places(self, entry: _Entry, group: int, spec: KVCacheSpec, num_tokens: int) -> Sequence[int]:
        ids, size = entry.ids[group], spec.block_size
        if spec.sequence != TOKENS:
            return range(len(ids), -(-entry.inputs[spec.sequence].num_tokens // size))
        if not self._keeps_states[group]:
            return range(len(ids), -(-num_tokens // size))
        if num_tokens <= entry.num_computed:
            return ()
        # A step stores the state after its last token alone.
        last = (num_tokens - 1) // size
        return () if last < len(ids) and ids[last] else (last,)

    def commit(self, request_id: str, token_ids: Tokens[int], num_computed: int) -> None:
        """Take note that tokens ``[0, num_computed)`` are computed."""
        entry = self._entries[request_id]
        entry.num_computed = num_computed
        is_shared = self._is_shared(entry)
        if is_shared:
            self._make_keys(entry, token_ids, num_computed)
        for group, spec in enumerate(self._specs):
            if spec.sequence != TOKENS:
                continue
            ids, size = entry.ids[group], spec.block_size
            if is_shared:
                keys = entry.keys[size]
                for start, stop in self._findable(entry, spec):
                    for index in range(max(start, entry.published[group]), min(stop, num_computed // size)):
                        if ids[index]:
                            self._pool.publish(ids[index], (group, keys[index]))
                entry.published[group] = max(entry.published[group], num_computed // size)
            live = spec.live_blocks(num_computed)
            first = min(live[0][0] if live else num_computed // size, num_computed // size)
            if first > entry.first[group]:
                passed = [block for block in ids[entry.first[group] : first] if block]
                self._pool.release(group, passed)
                ids[entry.first[group] : first] = [0] * (first - entry.first[group])
                entry.first[group] = first

    def _findable(self, entry: _Entry, spec: KVCacheSpec) -> list[tuple[int, int]]:
        """Return which of a request's blocks of a group are to be findable once they are full."""
        every = [(0, len(entry.keys[spec.block_size]))]
        if not _passes_each_token(spec):
            return every
        return [live for boundary in entry.boundaries for live in spec.live_blocks(boundary)]

    def free(self, request_id: str) -> None:
        """Give back everything that a request holds, its tail first."""
        for group, ids in enumerate(self._entries.pop(request_id).ids):
            self._pool.release(group, [block for block in reversed(ids) if block])

    def boundaries(self, request_id: str) -> tuple[int, ...]:
        """Return where a later request may want to continue from a request's tokens."""
        return self._entries[request_id].boundaries

    def block_ids(self, request_id: str, group: int) -> list[int]:
        """Return a request's blocks in a group, 0 where none is held."""
        return self._entries[request_id].ids[group]

    def _is_shared(self, entry: _Entry) -> bool:
        return not entry.inputs

    def _make_keys(self, entry: _Entry, token_ids: Tokens[int], num_tokens: int) -> None:
        for size in self._sizes:
            keys = entry.keys.setdefault(size, [])
            for start in range(len(keys) * size, num_tokens - size + 1, size):
                parent = keys[-1] if keys else 0
                keys.append(hash((parent, token_ids[start : start + size].tobytes())))


def _passes_each_token(spec: KVCacheSpec) -> bool:
    """Return whether every token makes an earlier one useless: so it is with windows and states, not with chunks."""
    somewhere = (1 << 20) + 1
    return spec.live_ranges(somewhere)[0][0] < spec.live_ranges(somewhere + 1)[0][0]


def _longest(spec: KVCacheSpec, missing: Sequence[int], num_tokens: int) -> int:
    """Return the longest prefix of at most ``num_tokens`` tokens whose live range is there.

    Args:
        spec: A group's.
        missing: How many of its first blocks are not there, for each number of blocks.
        num_tokens: Where to begin.
    """
    num_tokens -= num_tokens % spec.block_size
    while num_tokens:
        for start, stop in spec.live_blocks(num_tokens):
            if missing[start] != missing[stop]:
                # What is live is live for every shorter prefix that it lies in.
                num_tokens = (bisect_right(missing, missing[start], start, stop + 1) - 1) * spec.block_size
                break
        else:
            break
    return num_tokens
