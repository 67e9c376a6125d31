"""The manager of every cache spec of kvframe: what it keeps and finds follows from the spec's live blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from kvframe.contract import BackendError

BlockRanges = list[tuple[int, int]]


class LiveBlockManager(SingleTypeKVCacheManager):
    """Keeps of each request the blocks that its spec says are live.

    A request's blocks before the one that it computes next are live, or the null block. ``_kept`` says which were live
    when this was last seen to, and up to which block.
    """

    def __init__(self, kv_cache_spec: Any, **options: Any) -> None:
        """Admit requests by the most blocks that they ever hold."""
        super().__init__(kv_cache_spec, **options)
        self.max_admission_blocks_per_request = kv_cache_spec.peak_blocks
        self._kept: dict[str, tuple[BlockRanges, int]] = {}

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

        What is not live at a position is not live at a later one. So a block that is missing stays missing for every
        shorter prefix that reaches beyond it, and the search goes on at its start.

        Args:
            block_hashes: The request's, by block.
            max_length: The most tokens of the prefix; its length is a multiple of ``alignment_tokens``.
            kv_cache_group_ids: The groups in which ``block_pool`` has to have the blocks; all have ``kv_cache_spec``.
            block_pool: Where they are looked up.
            kv_cache_spec: The groups' spec.
            drop_eagle_block: Whether the request is drafted by a head that computes the last block again: refused.
            alignment_tokens: See ``max_length``.
            sizes: Those of context parallelism, which is not served.
        """
        if drop_eagle_block:
            raise BackendError(
                "kvframe-vllm does not serve prefix caching with EAGLE or MTP drafting; switch one of them off"
            )
        block_size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        step = math.lcm(block_size, alignment_tokens)
        found: dict[int, Any] = {}

        def is_cached(block: int) -> bool:
            if block not in found:
                found[block] = block_pool.get_cached_block(hashes[block], kv_cache_group_ids)
            return found[block] is not None

        length = max_length // step * step
        while length:
            live = [block for span in kv_cache_spec.inner.live_blocks(length) for block in range(*span)]
            missing = next((block for block in live if not is_cached(block)), None)
            if missing is None:
                rows = tuple([block_pool.null_block] * (length // block_size) for _ in kv_cache_group_ids)
                for block in live:
                    for row, cached in zip(rows, found[block], strict=True):
                        row[block] = cached
                return rows, length
            length = missing * block_size // step * step
        return tuple([] for _ in kv_cache_group_ids), 0

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return how many tokens at a request's start are not live."""
        ranges = self.kv_cache_spec.inner.live_ranges(num_computed_tokens)
        return ranges[0][0] if ranges else num_computed_tokens

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free a request's blocks that are no longer live at the position after the tokens that are computed."""
        blocks = self.req_to_blocks.get(request_id, ())
        end = min(processed_computed_tokens // self.block_size, len(blocks))  # the next token's block is written to
        kept, seen = self._kept.get(request_id, ([], 0))
        live = _below(self.kv_cache_spec.inner.live_blocks(processed_computed_tokens), end)
        self._kept[request_id] = live, end
        dead = [block for block in _outside([*kept, (seen, end)], live) if not blocks[block].is_null]
        freed = [blocks[block] for block in reversed(dead)]
        for block in dead:
            blocks[block] = self._null_block
        if freed:
            self.block_pool.free_blocks(freed)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Forget a request, and return its blocks."""
        self._kept.pop(request_id, None)
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        return blocks


def _below(ranges: Sequence[tuple[int, int]], end: int) -> BlockRanges:
    return [(start, min(stop, end)) for start, stop in ranges if start < end]


def _outside(ranges: Sequence[tuple[int, int]], live: BlockRanges) -> list[int]:
    """Return what ``ranges`` contain and ``live`` does not; both are sorted and disjoint."""
    found: list[int] = []
    first = 0
    for start, stop in ranges:
        while first < len(live) and live[first][1] <= start:
            first += 1
        for low, high in itertools.islice(live, first, None):
            if low >= stop:
                break
            found += range(start, low)
            start = max(start, high)
        found += range(start, stop)
    return found
