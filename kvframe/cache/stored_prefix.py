"""Stored prefixes: the keys of a request's blocks, and the longest prefix whose needed blocks are all somewhere.

Blocks that are not in the pool may be in host memory, on disk or on another machine. A request can continue after ``n``
tokens if the blocks that are live at ``n`` are in any of these places, in every group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_table import GroupKinds
from kvframe.cache.events import input_key, prefix_keys
from kvframe.cache.input_index import InputBlocks, Namespace
from kvframe.cache.live_range import LiveRange, longest_common_prefix
from kvframe.cache.prefix_lookup import PrefixCache, PrefixHit
from kvframe.planning.plan import PlannedGroup

Present = npt.NDArray[np.bool_]
"""For each block, whether it is somewhere: ``[num_blocks], bool, host``."""


@attrs.frozen(eq=False)
class PrefixBlocks:
    """The blocks of a request that a later request could continue from, and which of them are in the pool.

    Attributes:
        keys: Per group, the key of each whole block of tokens, or of each block of the request's input.
        cached: Per group, which of these blocks are in the pool.
        num_cached: The tokens of the longest prefix that is in the pool.
        inputs: The names of the inputs that are in the pool.
        groups: The groups.
        live: For each group of tokens, when its blocks die.
        alignment: Prefixes are multiples of it.
        most: The most tokens of a prefix.
    """

    keys: Sequence[Sequence[bytes]]
    cached: Sequence[Present]
    num_cached: int
    inputs: frozenset[str]
    groups: Sequence[PlannedGroup]
    live: Mapping[int, LiveRange]
    alignment: int
    most: int

    @property
    def lacks_inputs(self) -> bool:
        """Whether the pool lacks an input of the request."""
        names = {group.spec.sequence for group in self.groups if group.is_of_input and self.keys[group.index]}
        return not names <= self.inputs

    @property
    def is_complete(self) -> bool:
        """Whether the pool has the longest prefix that a request can continue from, and all inputs."""
        return self.num_cached + self.alignment > self.most and not self.lacks_inputs

    def longest(self, present: Sequence[Present]) -> int | None:
        """Return the tokens of the longest prefix whose needed blocks are present, in every group.

        Args:
            present: Per group, the blocks that are in the pool or elsewhere.

        Returns:
            The number of tokens; None if a block of an input is missing, without which nothing is continued.
        """
        if not all(present[group.index].all() for group in self.groups if group.is_of_input):
            return None
        group_pages = [(live, present[group].astype(np.int32)) for group, live in self.live.items()]
        return longest_common_prefix(group_pages, self.alignment, self.most) if group_pages else 0

    def needed(self, num_tokens: int) -> list[Present]:
        """Return per group, which blocks a request needs to continue after its first ``num_tokens`` tokens."""
        all_needed = []
        for group in self.groups:
            num_blocks = len(self.keys[group.index]) if group.is_of_input else num_tokens // group.block_size
            is_needed = np.full(num_blocks, group.is_of_input)
            if not group.is_of_input and num_tokens:
                for start, stop in group.answers.live_blocks(num_tokens):
                    is_needed[start:stop] = True
            all_needed.append(is_needed)
        return all_needed


def prefix_blocks(
    cache: PrefixCache,
    kinds: GroupKinds,
    hit: PrefixHit,
    keys: Sequence[Sequence[bytes]],
    max_tokens: int,
    inputs: Sequence[InputBlocks],
) -> PrefixBlocks:
    """Return the blocks of a request's inputs and of its first ``max_tokens`` tokens.

    Args:
        cache: The prefix cache.
        kinds: The groups.
        hit: What the cache has of the request.
        keys: The keys of its blocks (``block_keys``).
        max_tokens: The most tokens of a prefix.
        inputs: The blocks of its inputs.
    """
    plan = kinds.plan
    pages = cache.tree.pages_of(hit.match, max_tokens)
    cached_blocks = [np.zeros(0, dtype=np.bool_) for _ in plan.groups]
    for group, (stack, index) in cache.tree.stack_indices.items():
        cached_blocks[group] = pages[stack][index] != 0
    for blocks in inputs:
        input_pages = cache.inputs.find_input(blocks)
        is_cached = np.zeros(blocks.num_blocks, dtype=np.bool_) if input_pages is None else input_pages != 0
        cached_blocks[blocks.group] = is_cached
    return PrefixBlocks(
        keys=keys,
        cached=cached_blocks,
        num_cached=hit.num_tokens,
        inputs=frozenset(hit.inputs),
        groups=plan.groups,
        live=kinds.live,
        alignment=plan.alignment,
        most=max_tokens,
    )


def block_keys(
    kinds: GroupKinds,
    secret: bytes,
    namespace: Namespace,
    tokens: Sequence[int],
    max_tokens: int,
    inputs: Sequence[InputBlocks],
) -> list[list[bytes]]:
    """Return per group the keys of a request's whole blocks of its first ``max_tokens`` tokens, or of its input.

    Args:
        kinds: The groups.
        secret: 32 bytes, for the keys.
        namespace: The request's salt and inputs.
        tokens: Its tokens.
        max_tokens: The most tokens of a prefix.
        inputs: The blocks of its inputs.
    """
    groups = kinds.plan.groups
    sizes = {index: groups[index].block_size for index in kinds.live}
    ends_of = {index: range(size, max_tokens + 1, size) for index, size in sizes.items()}
    key_of = prefix_keys(secret, namespace, tokens, sorted({end for ends in ends_of.values() for end in ends}))
    keys = [[key_of[end] for end in ends_of.get(group.index, ())] for group in groups]
    for blocks in inputs:
        size = groups[blocks.group].block_size
        ends = (min((index + 1) * size, blocks.num_tokens) for index in range(blocks.num_blocks))
        keys[blocks.group] = [input_key(secret, blocks, end) for end in ends]
    return keys
