"""Prefix lookups: how much of a request is cached already, over any number of groups, and which group had less."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate

import attrs

from kvframe.cache.inputs import InputBlocks
from kvframe.cache.pool import BlockPool, PrefixKey
from kvframe.cache.stats import GroupLookups
from kvframe.plan import KVCachePlan, PlannedGroup
from kvframe.specs import KVCacheSpec

MAX_SEEN_PREFIXES = 1 << 16
"""Prefixes that are remembered, each by a key of 32 bytes, to see where later requests part from them."""


@attrs.frozen
class PrefixHit:
    """What of a request is cached: the longest prefix that every group can continue from, and its inputs.

    Attributes:
        num_tokens: Tokens that need not be computed.
        block_ids: Per group, the block ids of these tokens' blocks, 0 where a block is not live any more; in a group
            of an input, the ids of all its blocks, or nothing.
        branch: The longest prefix that an earlier request had too, where a type that stores few blocks may have kept
            nothing of it, so that it has to be computed again; 0 if the hit is as long.
        lookups: Per group, what this lookup found.
    """

    num_tokens: int
    block_ids: tuple[list[int], ...]
    branch: int = 0
    lookups: tuple[GroupLookups, ...] = ()


class PrefixLookup:
    """Finds prefixes and inputs in a pool. It asks no spec for its type."""

    def __init__(self, plan: KVCachePlan, pool: BlockPool) -> None:
        """Look into a pool.

        Args:
            plan: The groups.
            pool: The pages.
        """
        self._pool = pool
        self._groups = tuple(group for group in plan.groups if not group.is_of_input)
        self._alignment = plan.alignment
        self._has_sparse = any(
            type(group.spec).stored_blocks is not KVCacheSpec.stored_blocks for group in self._groups
        )
        self._seen: OrderedDict[PrefixKey, None] = OrderedDict()
        self._kinds = tuple(group.spec.kind for group in plan.groups)

    def find(
        self, keys: Mapping[int, Sequence[PrefixKey]], num_tokens: int, inputs: Sequence[InputBlocks] = ()
    ) -> PrefixHit:
        """Return what is cached of a request's inputs and of its tokens, the last one left out.

        A hit at ``n`` needs exactly the live range at ``n``, in every group. An input needs all its blocks, in every
        group that keeps state of it.

        Args:
            keys: The prefix keys of the request's full blocks, by block size.
            num_tokens: Its tokens, at least one.
            inputs: Its inputs.
        """
        lookups = tuple(map(GroupLookups, self._kinds))
        block_ids: list[list[int]] = [[] for _ in lookups]
        for index, ids in self._find_inputs(inputs, lookups).items():
            block_ids[index] = ids
        most = num_tokens - 1
        found = [
            _Found(group, keys[group.block_size][: most // group.block_size], self._pool) for group in self._groups
        ]
        alone = [each.longest(most) for each in found]
        hit = self._longest_of_all(found, min(alone, default=0))
        for each, longest in zip(found, alone, strict=True):
            index, size = each.group.index, each.group.block_size
            is_limiting = any(each.longest(other) < other for other in alone if other > hit)
            lookups[index].add(GroupLookups("", num_tokens, longest, hit, is_limiting))
            block_ids[index] = held = [0] * (hit // size)
            for start, stop in each.group.spec.live_blocks(hit):
                held[start:stop] = each.block_ids[start:stop]
        branch = self._branch(keys, hit, most) if self._has_sparse else 0
        return PrefixHit(hit, tuple(block_ids), branch, lookups)

    def note(self, keys: Mapping[int, Sequence[PrefixKey]], num_before: int, num_computed: int) -> None:
        """Remember which prefixes were computed, where a later request may have to be told where it parts from them.

        Args:
            keys: The prefix keys of a request's full blocks, by block size.
            num_before: Tokens up to which it was done before.
            num_computed: Tokens up to which it is to be done.
        """
        if self._has_sparse:
            size, step = self._groups[0].block_size, self._alignment
            for num_tokens in range(num_before - num_before % step + step, num_computed + 1, step):
                self._seen[keys[size][num_tokens // size - 1]] = None
            while len(self._seen) > MAX_SEEN_PREFIXES:
                self._seen.popitem(last=False)

    def forget(self) -> None:
        """Forget which prefixes were computed."""
        self._seen.clear()

    def _branch(self, keys: Mapping[int, Sequence[PrefixKey]], hit: int, most: int) -> int:
        """Return the longest prefix, longer than the hit, that was computed before.

        A state at the point where requests part is what a third one wants to continue from: the idea of Marconi,
        arXiv 2411.19379. What was computed is remembered beyond the life of its pages, which are computed again anyway.
        """
        size, step = self._groups[0].block_size, self._alignment
        for num_tokens in range(most - most % step, hit, -step):
            key = keys[size][num_tokens // size - 1]
            if key in self._seen:
                self._seen.move_to_end(key)
                return num_tokens
        return 0

    def _longest_of_all(self, found: Sequence[_Found], most: int) -> int:
        num_tokens = most - most % self._alignment
        while num_tokens:
            shorter = min(each.longest(num_tokens) for each in found)
            if shorter == num_tokens:
                break
            num_tokens = shorter - shorter % self._alignment
        return num_tokens

    def _find_inputs(self, inputs: Sequence[InputBlocks], lookups: Sequence[GroupLookups]) -> dict[int, list[int]]:
        """Return the block ids of the inputs that are cached as a whole, by group."""
        found = {each.group: [self._pool.find(each.group, key) for key in each.keys] for each in inputs}
        whole = {group: all(ids) for group, ids in found.items()}
        some = {each.sequence for each in inputs if whole[each.group]}
        lacking = {each.sequence for each in inputs if not whole[each.group]}
        for each in inputs:
            alone, together = whole[each.group], each.sequence not in lacking
            is_limiting = not alone and each.sequence in some
            size = each.num_tokens
            lookups[each.group].add(GroupLookups("", size, size * alone, size * together, is_limiting))
        return {each.group: found[each.group] for each in inputs if each.sequence not in lacking}


class _Found:
    """What one lookup found of one group's blocks."""

    def __init__(self, group: PlannedGroup, keys: Sequence[PrefixKey], pool: BlockPool) -> None:
        self.group = group
        self.block_ids = [pool.find(group.index, key) for key in keys]
        self._missing_before = [0, *accumulate(not block_id for block_id in self.block_ids)]

    def longest(self, num_tokens: int) -> int:
        """Return the longest prefix of at most ``num_tokens`` tokens that the group holds the live range of."""
        size, missing = self.group.block_size, self._missing_before
        num_tokens -= num_tokens % size
        while num_tokens:
            for start, stop in self.group.spec.live_blocks(num_tokens):
                if missing[start] != missing[stop]:
                    # By the law of forgetting, what is live is live for every shorter prefix that it lies in.
                    num_tokens = (bisect_right(missing, missing[start], start, stop + 1) - 1) * size
                    break
            else:
                break
        return num_tokens
