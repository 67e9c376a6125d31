"""Put any cache spec of kvframe into vLLM's cache: the spec's live blocks say which blocks vLLM keeps and finds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import attrs
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec

from kvframe import LiveBlocks
from kvframe.contract import BackendError, KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class HostedSpec(AttentionSpec):
    """A spec of kvframe in vLLM's pages. Its live range decides which blocks vLLM keeps.

    Attributes:
        inner: kvframe's spec, with the same block size.
        max_model_len: The most tokens of a request.
        max_in_flight_tokens: The most tokens of a request that are scheduled but not computed yet.
    """

    inner: KVCacheSpec
    max_model_len: int
    max_in_flight_tokens: int
    dcp_sharded: bool = False

    @classmethod
    def over(cls, reported: Any, inner: Any, config: Any) -> HostedSpec:
        """Return the spec of a layer, with the sizes of vLLM's own spec, ``reported``, and the limits of its config."""
        same = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "page_size_padded")
        sizes = {name: getattr(reported, name) for name in same}
        max_model_len, in_flight = config.model_config.max_model_len, config.max_in_flight_tokens
        return cls(**sizes, inner=inner, max_model_len=max_model_len, max_in_flight_tokens=in_flight)

    def __post_init__(self) -> None:
        """Give the inner spec the outer one's block size, because vLLM changes the outer one only."""
        super().__post_init__()
        if self.inner.block_size != self.block_size:
            object.__setattr__(self, "inner", attrs.evolve(self.inner, block_size=self.block_size))

    @cached_property
    def live_blocks(self) -> LiveBlocks:
        """The position at which each block of a request is no longer live."""
        return LiveBlocks(self.inner, self.max_model_len)

    @property
    def peak_blocks(self) -> int:
        """The most blocks that a request holds at once; vLLM admits requests by this number."""
        return self.inner.peak_blocks(self.max_model_len, self.max_in_flight_tokens)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Return the most bytes that a request needs in one layer, under the limits of ``vllm_config``."""
        return int(HostedSpec.over(self, self.inner, vllm_config).peak_blocks * self.page_size_bytes)

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, Any]) -> bool:
        """Return whether all layers can share one block table: their specs differ in layout only."""
        specs = kv_cache_specs.values()
        return all(isinstance(spec, HostedSpec) and spec.inner.group_key == self.inner.group_key for spec in specs)


class LiveBlockManager(SingleTypeKVCacheManager):
    """Keeps the live blocks of each request and frees the others.

    Invariant: at the position ``_seen``, each full block of a request is live or replaced by the null block.
    """

    def __init__(self, kv_cache_spec: Any, **options: Any) -> None:
        """Make a manager that admits requests by the most blocks that they hold at once."""
        super().__init__(kv_cache_spec, max_admission_blocks_per_request=kv_cache_spec.peak_blocks, **options)
        self._seen: dict[str, int] = {}

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        **sizes: int,
    ) -> tuple[tuple[list[Any], ...], int]:
        """Return the cached blocks of the longest prefix whose live blocks are all cached, and its length.

        The blocks are one row for each group; the null block stands for blocks that are not live. ``sizes`` belong to
        context parallelism, which vLLM refuses for this backend.
        """
        if drop_eagle_block:
            raise BackendError(
                "kvframe-vllm does not serve prefix caching with EAGLE or MTP drafting; switch one of them off"
            )
        block_size, null = kv_cache_spec.block_size, block_pool.null_block
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        blocks = kv_cache_spec.live_blocks.longest_hit(
            lambda block: block_pool.get_cached_block(hashes[block], kv_cache_group_ids),
            max_length,
            math.lcm(block_size, alignment_tokens),
        )
        groups = range(len(kv_cache_group_ids))
        rows = tuple([null if block is None else block[group] for block in blocks] for group in groups)
        return rows, len(blocks) * block_size

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return the number of tokens at a request's start that are not live."""
        ranges = self.kv_cache_spec.inner.live_ranges(num_computed_tokens)
        return ranges[0][0] if ranges else num_computed_tokens

    def allocate_external_computed_blocks(
        self, request_id: str, num_local_computed_tokens: int, num_external_computed_tokens: int, **options: Any
    ) -> None:
        """Allocate blocks for tokens that a KV connector loads.

        A connector loads the live blocks only. vLLM makes all blocks findable that are not null, so dead blocks with
        nothing in them become null here.
        """
        super().allocate_external_computed_blocks(
            request_id, num_local_computed_tokens, num_external_computed_tokens, **options
        )
        num_tokens, blocks = num_local_computed_tokens + num_external_computed_tokens, self.req_to_blocks[request_id]
        num_local, num_full = (num // self.block_size for num in (num_local_computed_tokens, num_tokens))
        live = {*self.kv_cache_spec.live_blocks.at(num_tokens)}
        dead = [block for block in range(num_full - 1, num_local - 1, -1) if block not in live]
        self.block_pool.free_blocks([blocks[block] for block in dead if not blocks[block].is_null])
        for block in dead:
            blocks[block] = self._null_block

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Return 0. vLLM before 0.32 asks it for cascade attention, which this backend does not compute."""
        return 0

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free a request's blocks that are no longer live after ``processed_computed_tokens`` tokens."""
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:  # vLLM calls this before it allocates the first blocks.
            return
        died = self.kv_cache_spec.live_blocks.died(self._seen.get(request_id, 0), processed_computed_tokens)
        self._seen[request_id] = processed_computed_tokens
        dead = [block for block in reversed(died) if not blocks[block].is_null]
        self.block_pool.free_blocks([blocks[block] for block in dead])
        for block in dead:
            blocks[block] = self._null_block

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Remove a request and return its blocks."""
        self._seen.pop(request_id, None)
        return list(super().pop_blocks_for_free(request_id))
