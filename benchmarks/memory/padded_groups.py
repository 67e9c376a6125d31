"""What a model takes where all groups have as many layers and one page size: the grouping that kvframe is held against.

The arithmetic is that of vLLM's hybrid KV cache manager, from its design page (docs/design/hybrid_kv_cache_manager.md,
cases 2 to 5) and the rule for states and for nearly equal numbers of layers in its code of version 0.11
(``HybridAttentionMambaModelConfig``, ``_get_kv_cache_groups_uniform_page_size``):

* a block holds one layer's tokens for each layer of a group, and all blocks have one size;
* where layers keep states, blocks of attention layers get more tokens, in multiples of 16, until a block of one layer
  is as large as a state, and the state is padded to it; other layers with smaller blocks get more tokens likewise;
* layers of one type are cut into groups of as many layers as the rarest type has, or the most frequent one if that has
  less than half more; the last group of a type is filled up with layers that are not there;
* layers that read other layers' caches do not count.

Which blocks a request holds is the same for both, so that nothing but the grouping is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvframe.contract.specs import TOKENS, KVCacheSpec, LayerSpec, align_up
from kvframe.planning.plan import KVCachePlan

BLOCK_MULTIPLE = 16
"""Blocks are made longer in steps of so many tokens, as kernels need it."""

NEARLY_EQUAL = 1.5
"""Below this ratio of the most layers of a type to the fewest, groups are as large as the former."""


@attrs.frozen(kw_only=True)
class PaddedType:
    """Layers of one type.

    Attributes:
        spec: What each keeps, with the tokens per block that it gets.
        num_layers: How many there are.
        layer_bytes: Bytes of a block of one of them, without padding.
    """

    spec: KVCacheSpec
    num_layers: int
    layer_bytes: int


@attrs.frozen(kw_only=True)
class PaddedGroups:
    """A model in equal groups.

    Attributes:
        types: The types of layers.
        group_size: Layers of each group, those that are not there included.
        page_bytes: Bytes of a block of one layer, alike for all.
    """

    types: tuple[PaddedType, ...]
    group_size: int
    page_bytes: int

    @classmethod
    def of(cls, layers: Sequence[LayerSpec]) -> PaddedGroups:
        """Group a model's layers.

        Args:
            layers: Its layers, in the order they run.
        """
        counts: dict[KVCacheSpec, int] = {}
        for layer in layers:
            if layer.shares_with is None and layer.spec is not None and layer.spec.keeps_past:
                counts[layer.spec] = counts.get(layer.spec, 0) + 1
        most, fewest = max(counts.values()), min(counts.values())
        page_bytes = _page_bytes(counts)
        types = []
        for spec, num_layers in counts.items():
            longer = spec
            if not spec.is_per_block:
                longer = attrs.evolve(spec, block_size=spec.block_size * page_bytes // spec.block_bytes)
            types.append(PaddedType(spec=longer, num_layers=num_layers, layer_bytes=longer.block_bytes))
        return cls(
            types=tuple(types), group_size=most if most < NEARLY_EQUAL * fewest else fewest, page_bytes=page_bytes
        )

    @property
    def num_missing(self) -> int:
        """Layers that are not there and take memory."""
        return sum(align_up(each.num_layers, self.group_size) - each.num_layers for each in self.types)

    def blocks(self, plan: KVCachePlan, num_tokens: int) -> list[int]:
        """Return the blocks that a request of each type's layers holds at most, for one group of them.

        Args:
            plan: What says how much a step computes, and how long inputs get.
            num_tokens: The request's length at its end.
        """
        return [
            each.spec.peak_blocks(num_tokens, plan.max_num_batched_tokens)
            if each.spec.sequence == TOKENS
            else -(-plan.max_input_lens[each.spec.sequence] // each.spec.block_size)
            for each in self.types
        ]

    @property
    def num_groups(self) -> int:
        """Groups of all types."""
        return sum(-(-each.num_layers // self.group_size) for each in self.types)

    def held_bytes(self, plan: KVCachePlan, num_tokens: int) -> int:
        """Return the bytes of the most blocks that a request holds."""
        counts = zip(self.blocks(plan, num_tokens), self.types, strict=True)
        return sum(count * align_up(each.num_layers, self.group_size) * self.page_bytes for count, each in counts)

    def max_concurrency(self, plan: KVCachePlan, num_tokens: int) -> int:
        """Return how many requests fit the plan's memory at once."""
        block_bytes = self.group_size * self.page_bytes
        return plan.memory_bytes // block_bytes // (self.held_bytes(plan, num_tokens) // block_bytes)

    def waste_fraction(self, plan: KVCachePlan, num_tokens: int) -> float:
        """Return the share of a request's blocks that belongs to no layer, or is padding of a state."""
        counts = zip(self.blocks(plan, num_tokens), self.types, strict=True)
        used = sum(count * each.num_layers * each.layer_bytes for count, each in counts)
        return 1 - used / self.held_bytes(plan, num_tokens)


def _page_bytes(counts: dict[KVCacheSpec, int]) -> int:
    """Return the bytes of a block of one layer that every type can have.

    Raises:
        ValueError: A type's block cannot be made as large by whole tokens.
    """
    sizes = {spec.block_bytes for spec in counts if not spec.is_per_block}
    states = [spec.block_bytes for spec in counts if spec.is_per_block]
    if not sizes:
        return max(states)
    largest = max((spec for spec in counts if not spec.is_per_block), key=lambda spec: spec.block_bytes)
    step_bytes = BLOCK_MULTIPLE * largest.block_bytes // largest.block_size
    page_bytes = max(align_up(max(states, default=0), step_bytes), largest.block_bytes)
    if any(page_bytes % size for size in sizes):
        raise ValueError(f"blocks of {sorted(sizes)} bytes cannot be made longer to {page_bytes}")
    return page_bytes
