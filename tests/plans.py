"""Small plans that the cache tests share."""

from __future__ import annotations

import attrs

from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.groups import group_layers
from kvframe.plan import KVCachePlan, plan_cache
from kvframe.specs import AttentionSpec, KVCacheSpec, LayerSpec, TokenRange


@attrs.frozen(kw_only=True)
class RangeSpec(AttentionSpec):
    """A window with sinks, or a chunk, by live range alone: every derivation is the base class's."""

    kind = "range"

    window: int = 0
    num_sink_tokens: int = 0
    chunk: int = 0

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        if self.chunk:
            return ((n - n % self.chunk, n),) if n % self.chunk else ()
        start = max(0, n - self.window + 1)
        sinks = min(self.num_sink_tokens, start)
        return tuple(part for part in ((0, sinks), (start, n)) if part[0] < part[1])


def full(block_size: int = 4, num_kv_heads: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=4)


def ranged(block_size: int = 4, num_kv_heads: int = 1, **options: int) -> RangeSpec:
    return RangeSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=4, **options)


def make_plan(
    *specs: KVCacheSpec, num_slabs: int = 8, max_model_len: int = 64, max_num_batched_tokens: int = 16
) -> KVCachePlan:
    """Plan one layer per spec over exactly ``num_slabs`` slabs (0 for no specs)."""
    layers = [LayerSpec(name=f"layer{index}", spec=spec) for index, spec in enumerate(specs)]
    plan = plan_cache(
        group_layers(layers),
        memory_bytes=2**20,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return attrs.evolve(plan, num_slabs=num_slabs if specs else 0)
