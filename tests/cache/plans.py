"""Small plans that the cache tests share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np

from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import (
    ENCODER,
    AttentionMask,
    AttentionSpec,
    KVCacheSpec,
    LayerSpec,
    StateTensor,
    TokenRange,
)
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import KVCachePlan, plan_cache
from kvframe.planning.rollback import RollbackSpec
from tests.support.engines import numbers_of, pool_of


@attrs.frozen(kw_only=True)
class RangeSpec(AttentionSpec):
    """A window with sinks, or a chunk, defined by live ranges only: all derivations are those of the base class."""

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


@attrs.frozen(kw_only=True)
class MaskedSpec(RangeSpec):
    """The same with a mask, so that many positions can be computed at once."""

    kind = "masked"

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask(window=self.window or None, num_sink_tokens=self.num_sink_tokens, chunk=self.chunk or None)


@attrs.frozen(kw_only=True)
class StateSpec(KVCacheSpec):
    """A state that is overwritten at each token; it is kept at every few block ends, and where tokens differ."""

    kind = "state"

    every: int = 0
    num_drafts: int = 0
    num_rollback: int = 0

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((n - 1, n),) if n else ()

    @property
    def num_rollback_states(self) -> int:
        return self.num_rollback

    @property
    def most_refused(self) -> int:
        """The most tokens of a step that may be refused."""
        return max(self.num_drafts, self.num_rollback)

    def state_tensors(self) -> Mapping[str, StateTensor]:
        return {"state": StateTensor((1, 6 * (1 + self.num_drafts)), "float32")}

    def stored_blocks(self, n: int, num_new_tokens: int, branch: int = 0) -> tuple[tuple[int, int], ...]:
        first, end, size = n // self.block_size, n + num_new_tokens, self.block_size
        kept = {token // size for token in range(max(n, end - 1 - self.most_refused), end)}
        kept |= {index for index in range(first, end // size) if self.every and (index + 1) % self.every == 0}
        if n < branch <= end:
            kept.add(branch // size - 1)
        return tuple((index, index + 1) for index in sorted(kept))


@attrs.frozen(kw_only=True)
class EncoderSpec(AttentionSpec):
    """Keys and values of all of an encoder's output for an input."""

    kind = "encoder"
    sequence: ClassVar[str] = ENCODER

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((0, n),) if n else ()


def full(block_size: int = 4, num_kv_heads: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=4)


def ranged(block_size: int = 4, num_kv_heads: int = 1, **options: Any) -> RangeSpec:
    return RangeSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=4, **options)


def masked(block_size: int = 4, num_kv_heads: int = 1, **options: Any) -> MaskedSpec:
    return MaskedSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=4, **options)


def state(block_size: int = 4, **options: int) -> StateSpec:
    return StateSpec(block_size=block_size, **options)


def encoder(block_size: int = 4, num_kv_heads: int = 1) -> EncoderSpec:
    return EncoderSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=4)


def rollback(block_size: int = 4, num_states: int = 1) -> RollbackSpec:
    return RollbackSpec(block_size=block_size, num_states=num_states)


def make_plan(
    *specs: KVCacheSpec,
    num_slabs: int = 8,
    max_model_len: int = 64,
    max_num_batched_tokens: int = 16,
    max_encoder_len: int = 24,
) -> KVCachePlan:
    """Plan one layer per spec over exactly ``num_slabs`` slabs (0 for no specs)."""
    layers = [LayerSpec(name=f"layer{index}", spec=spec) for index, spec in enumerate(specs)]
    plan = plan_cache(
        group_layers(layers),
        memory_bytes=2**20,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_input_lens={ENCODER: max_encoder_len},
    )
    return attrs.evolve(plan, num_slabs=num_slabs if specs else 0)


def evict(manager: KVCacheManager, page: int) -> None:
    """Evict a cached page."""
    pool_of(manager).evict_blocks(np.array([page], dtype=np.int32))


def evict_all(manager: KVCacheManager) -> None:
    """Evict every cached page."""
    for group in range(len(manager.plan.groups)):
        pool_of(manager).evict_first(group, pool_of(manager).num_cached)


def branch(manager: KVCacheManager, name: str) -> int:
    """Return the position at which a request's tokens differ from earlier ones."""
    position: int = numbers_of(manager).states[manager.row(name)].branch
    return position
