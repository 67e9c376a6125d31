"""Plan a model in groups of equal size with pages of equal size, the grouping that kvframe is compared with.

The arithmetic is that of vLLM's hybrid KV cache manager, from its design page (docs/design/hybrid_kv_cache_manager.md,
cases 2 to 5) and the rule for states and for nearly equal numbers of layers in its code of version 0.11
(``HybridAttentionMambaModelConfig``, ``_get_kv_cache_groups_uniform_page_size``):

* a block holds one layer's tokens for each layer of a group, and all blocks have one size;
* if layers keep states, blocks of attention layers get more tokens, in multiples of 16, until a block of one layer is
  as large as a state, and the state is padded to it; other layers with smaller blocks get more tokens in the same way;
* a group has as many layers as the rarest type, or as the most frequent type if that has less than half more; the last
  group of a type is filled up with layers that do not exist;
* layers that read other layers' caches do not count.

Planned by kvframe with one page in a slab, such groups share a pool of equal blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvframe.contract.specs import KVCacheSpec, LayerSpec, align_up
from kvframe.planning.groups import Grouping, KVCacheGroup
from kvframe.planning.plan import KVCachePlan, plan_cache

BLOCK_MULTIPLE = 16
"""Blocks grow in steps of so many tokens, because kernels need it."""

NEARLY_EQUAL = 1.5
"""Below this ratio of the most layers of a type to the fewest, groups are as large as the former."""


@attrs.frozen(kw_only=True)
class PaddedGroups:
    """A model in equal groups; a block of each layer has ``page_bytes``.

    Attributes:
        types: For each type of layers, its spec with the block size that it gets, and the layers' names.
        group_size: Layers of each group, those that do not exist included.
    """

    types: tuple[tuple[KVCacheSpec, tuple[str, ...]], ...]
    group_size: int
    page_bytes: int

    @classmethod
    def of(cls, layers: Sequence[LayerSpec], *, has_longer_states: bool = False) -> PaddedGroups:
        """Group a model's layers.

        With ``has_longer_states``, one state is kept for each block of attention, as in vLLM; otherwise as many as in
        kvframe.
        """
        names: dict[KVCacheSpec, list[str]] = {}
        for layer in layers:
            if layer.shares_with is None and layer.spec is not None and layer.spec.keeps_past:
                names.setdefault(layer.spec, []).append(layer.name)
        max_layers, min_layers = max(map(len, names.values())), min(map(len, names.values()))
        page_bytes = _page_bytes([*names])
        longer = {
            spec: attrs.evolve(spec, block_size=spec.block_size * page_bytes // spec.block_bytes)
            for spec in names
            if not spec.is_per_block
        }
        if has_longer_states:
            size = max((spec.block_size for spec in longer.values()), default=BLOCK_MULTIPLE)
            longer |= {spec: attrs.evolve(spec, block_size=size) for spec in names if spec.is_per_block}
        return cls(
            types=tuple((longer.get(spec, spec), tuple(layer_names)) for spec, layer_names in names.items()),
            group_size=max_layers if max_layers < NEARLY_EQUAL * min_layers else min_layers,
            page_bytes=page_bytes,
        )

    def plan(
        self, memory_bytes: int, max_model_len: int, max_num_batched_tokens: int, max_input_lens: Mapping[str, int]
    ) -> KVCachePlan:
        """Return the plan of these groups. A block is a slab; a page has as many bytes as its group's layers use."""
        groups: list[KVCacheGroup] = []
        for spec, names in self.types:
            count = -(-len(names) // self.group_size)
            for own in (names[index::count] for index in range(count)):
                groups.append(KVCacheGroup(index=len(groups), spec=spec, layers=own, stored=(spec,) * len(own)))
        plan = plan_cache(
            Grouping(groups=tuple(groups), follows={}),
            memory_bytes=memory_bytes,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_input_lens=max_input_lens,
            pages_per_slab=[1] * len(groups),
        )
        assert plan.slab_bytes == self.group_size * self.page_bytes
        return plan


def _page_bytes(specs: Sequence[KVCacheSpec]) -> int:
    """Return the least bytes of a block of one layer that a whole number of tokens of every type can have."""
    attention = [spec for spec in specs if not spec.is_per_block]
    states = [spec.block_bytes for spec in specs if spec.is_per_block]
    if not attention:
        return max(states)
    largest = max(attention, key=lambda spec: spec.block_bytes)
    step_bytes = BLOCK_MULTIPLE * largest.block_bytes // largest.block_size
    page_bytes = max(align_up(max(states, default=0), step_bytes), largest.block_bytes)
    if any(page_bytes % spec.block_bytes for spec in attention):
        raise ValueError(f"some of {specs} cannot be made longer to {page_bytes} bytes")
    return page_bytes
