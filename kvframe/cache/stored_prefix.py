"""Stored prefixes: the keys of a request's blocks, and the longest prefix of which all needed blocks are somewhere.

Blocks that are not in the pool may be in host memory, on disk or on another machine. Whoever has them, a request can
continue after ``n`` tokens if the blocks that are live at ``n`` are there, in every group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_table import GroupKinds
from kvframe.cache.events import PrefixHash, input_key
from kvframe.cache.input_index import InputBlocks, Namespace
from kvframe.cache.live_range import LiveRange, longest_common_prefix
from kvframe.cache.prefix_lookup import PrefixCache
from kvframe.cache.radix_tree import as_bytes, before_range
from kvframe.contract.specs import TokenRange
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
        ranges: The ranges of tokens that no prefix divides.
    """

    keys: Sequence[Sequence[bytes]]
    cached: Sequence[Present]
    num_cached: int
    inputs: frozenset[str]
    groups: Sequence[PlannedGroup]
    live: Mapping[int, LiveRange]
    alignment: int
    most: int
    ranges: Sequence[TokenRange]

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
        num_tokens = longest_common_prefix(group_pages, self.alignment, self.most) if group_pages else 0
        while (max_tokens := before_range(self.ranges, num_tokens)) < num_tokens:
            num_tokens = longest_common_prefix(group_pages, self.alignment, max_tokens)
        return num_tokens

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
    secret: bytes,
    namespace: Namespace,
    tokens: Sequence[int],
    max_tokens: int,
    inputs: Sequence[InputBlocks],
    ranges: Sequence[TokenRange],
    earlier_result: PrefixBlocks | None,
) -> PrefixBlocks:
    """Return the blocks of a request's inputs and of its first ``max_tokens`` tokens.

    Args:
        cache: The prefix cache.
        kinds: The groups.
        secret: 32 bytes, for the keys.
        namespace: The request's salt and inputs.
        tokens: Its tokens.
        max_tokens: The most tokens of a prefix.
        inputs: The blocks of its inputs.
        ranges: Its ranges of tokens that no prefix divides.
        earlier_result: The earlier result for these tokens, whose keys are taken over; None for none.
    """
    plan = kinds.plan
    hit = cache.find_prefix(namespace, tokens, max_tokens, inputs)
    while (range_start := before_range(ranges, hit.num_tokens)) < hit.num_tokens:
        hit = cache.find_prefix(namespace, tokens, range_start, inputs)
    pages = cache.tree.pages_of(hit.match, max_tokens)
    is_cached_of = {group: pages[stack][index] != 0 for group, (stack, index) in cache.tree.stack_indices.items()}
    sizes = {plan.groups[group].block_size for group in is_cached_of}
    ends = sorted({end for size in sizes for end in range(size, max_tokens + 1, size)})
    key_of = {} if earlier_result else _keys_of(secret, namespace, tokens, ends)
    keys: list[list[bytes]] = [[] for _ in plan.groups]
    cached_blocks = [np.zeros(0, dtype=np.bool_) for _ in plan.groups]
    for group, is_cached in is_cached_of.items():
        size = plan.groups[group].block_size
        keys[group] = [] if earlier_result else [key_of[end] for end in range(size, max_tokens + 1, size)]
        cached_blocks[group] = is_cached
    for blocks in inputs:
        size = plan.groups[blocks.group].block_size
        lengths = (
            [] if earlier_result else [min((index + 1) * size, blocks.num_tokens) for index in range(blocks.num_blocks)]
        )
        keys[blocks.group] = [input_key(secret, blocks, length) for length in lengths]
        input_pages = cache.inputs.find_input(blocks)
        is_cached = np.zeros(blocks.num_blocks, dtype=np.bool_) if input_pages is None else input_pages != 0
        cached_blocks[blocks.group] = is_cached
    return PrefixBlocks(
        keys=earlier_result.keys if earlier_result else keys,
        cached=cached_blocks,
        num_cached=hit.num_tokens,
        inputs=frozenset(hit.inputs),
        groups=plan.groups,
        live={group: kinds.live[group] for group in is_cached_of},
        alignment=plan.alignment,
        most=max_tokens,
        ranges=ranges,
    )


def _keys_of(secret: bytes, namespace: Namespace, tokens: Sequence[int], ends: Sequence[int]) -> dict[int, bytes]:
    """Return the keys of a request's prefixes, by their numbers of tokens."""
    prefix, keys = PrefixHash(secret, *namespace), {}
    numbers = np.frombuffer(as_bytes(tokens, 0, ends[-1]) if ends else b"", dtype=np.uint32)
    for end in ends:
        keys[end] = prefix.add_tokens(numbers[prefix.num_tokens : end])
    return keys
