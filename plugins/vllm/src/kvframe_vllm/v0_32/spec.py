"""Any cache spec of kvframe as a spec of vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import attrs
from vllm.v1.kv_cache_interface import AttentionSpec

from kvframe.contract import KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class HostedSpec(AttentionSpec):
    """A spec of kvframe in pages of vLLM's. Its live range decides what vLLM keeps.

    Attributes:
        inner: kvframe's spec. It follows every change of the block size.
        max_model_len: The most tokens of a request.
        max_in_flight_tokens: The most tokens of a request that are scheduled and not computed yet.
    """

    inner: KVCacheSpec
    max_model_len: int
    max_in_flight_tokens: int
    dcp_sharded: bool = False

    @classmethod
    def over(cls, reported: Any, **own: Any) -> HostedSpec:
        """Return the spec of a layer: the sizes are those of vLLM's own spec, ``reported``."""
        same = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "page_size_padded")
        return cls(**{name: getattr(reported, name) for name in same}, **own)

    def __post_init__(self) -> None:
        """Let the inner spec follow: vLLM changes the block size of the outer one only."""
        super().__post_init__()
        if self.inner.block_size != self.block_size:
            object.__setattr__(self, "inner", attrs.evolve(self.inner, block_size=self.block_size))

    @property
    def peak_blocks(self) -> int:
        """The most blocks that a request holds at once, by which vLLM admits requests."""
        return self.inner.peak_blocks(self.max_model_len, self.max_in_flight_tokens)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Return the most bytes that a request needs of one layer."""
        num_tokens, in_flight = vllm_config.model_config.max_model_len, vllm_config.max_in_flight_tokens
        num_bytes: int = self.inner.peak_blocks(num_tokens, in_flight) * self.page_size_bytes
        return num_bytes

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, Any]) -> bool:
        """Return whether all layers can share one block table: their specs differ in layout only."""
        specs = kv_cache_specs.values()
        return all(isinstance(spec, HostedSpec) and spec.inner.group_key == self.inner.group_key for spec in specs)
