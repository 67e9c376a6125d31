"""Prefix lookups: how much of a request is cached already, over any number of groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import attrs

from kvframe.cache.inputs import InputBlocks
from kvframe.cache.pool import BlockPool, PrefixKey
from kvframe.plan import KVCachePlan


@attrs.frozen
class PrefixHit:
    """What of a request is cached: the longest prefix that every group can continue from, and its inputs.

    Attributes:
        num_tokens: Tokens that need not be computed.
        block_ids: Per group, the block ids of these tokens' blocks, 0 where a block is not live any more; in a group
            of an input, the ids of all its blocks, or nothing.
    """

    num_tokens: int
    block_ids: tuple[list[int], ...]


class PrefixLookup:
    """Finds prefixes and inputs in a pool. It asks no spec for its type, and changes nothing."""

    def __init__(self, plan: KVCachePlan, pool: BlockPool) -> None:
        """Look into a pool.

        Args:
            plan: The groups.
            pool: The pages.
        """
        self._pool = pool
        self._num_groups = len(plan.groups)
        self._groups = tuple(group for group in plan.groups if not group.is_of_input)
        self._alignment = math.lcm(*(group.block_size for group in self._groups))

    def find(
        self, keys: Mapping[int, Sequence[PrefixKey]], max_tokens: int, inputs: Sequence[InputBlocks] = ()
    ) -> PrefixHit:
        """Return what is cached of a request's inputs and of its first ``max_tokens`` tokens.

        A hit at ``n`` needs exactly the live range at ``n``, in every group. An input needs all its blocks, in every
        group that keeps state of it.

        Args:
            keys: The prefix keys of the request's full blocks, by block size.
            max_tokens: The longest hit that is of use.
            inputs: The request's inputs.
        """
        found: list[list[int]] = []
        missing_before: list[list[int]] = []
        for group in self._groups:
            wanted = keys[group.block_size][: max_tokens // group.block_size]
            blocks = [self._pool.find(group.index, key) for key in wanted]
            found.append(blocks)
            missing_before.append([0, *accumulate(not block for block in blocks)])
        num_tokens = max_tokens - max_tokens % self._alignment if self._groups else 0
        while num_tokens and not self._all_live_found(missing_before, num_tokens):
            num_tokens -= self._alignment
        block_ids: list[list[int]] = [[] for _ in range(self._num_groups)]
        for group, blocks in zip(self._groups, found, strict=True):
            block_ids[group.index] = held = [0] * (num_tokens // group.block_size)
            for start, stop in group.spec.live_blocks(num_tokens):
                held[start:stop] = blocks[start:stop]
        for group_index, ids in self._find_inputs(inputs).items():
            block_ids[group_index] = ids
        return PrefixHit(num_tokens, tuple(block_ids))

    def _all_live_found(self, missing_before: Sequence[Sequence[int]], num_tokens: int) -> bool:
        return all(
            missing[start] == missing[stop]
            for group, missing in zip(self._groups, missing_before, strict=True)
            for start, stop in group.spec.live_blocks(num_tokens)
        )

    def _find_inputs(self, inputs: Sequence[InputBlocks]) -> dict[int, list[int]]:
        """Return the block ids of the inputs that are cached as a whole, by group."""
        found = {blocks.group: [self._pool.find(blocks.group, key) for key in blocks.keys] for blocks in inputs}
        missing = {blocks.sequence for blocks in inputs if not (found[blocks.group] and all(found[blocks.group]))}
        return {blocks.group: found[blocks.group] for blocks in inputs if blocks.sequence not in missing}
