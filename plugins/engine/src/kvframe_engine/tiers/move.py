"""Moves one prefix to the device, from host memory and from what was fetched of page stores."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt

from kvframe import KVCacheManager, Pin, PrefixBlocks
from kvframe_engine.requests.progress import RequestProgress
from kvframe_engine.tiers.host_tier import HostTier
from kvframe_engine.tiers.stored_pages import StoredPages

HOST = "host_memory"
"""The name of the host memory among the tiers."""


class Move:
    """One prefix on its way to the device.

    Attributes:
        sources: How many pages came from each tier.
        num_host_bytes: The bytes that come from host memory.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        host_tier: HostTier | None,
        pages: StoredPages | None,
        blocks: PrefixBlocks,
        in_host: Sequence[npt.NDArray[np.int32]],
        fetch: int,
        fetched: Mapping[tuple[int, int], str],
        num_tokens: int,
    ) -> None:
        """Work out which blocks have to be moved.

        Args:
            manager: The cache.
            host_tier: The host memory; None for none.
            pages: Has what was fetched; None without page stores.
            blocks: The blocks of the request, and which of them are on the device.
            in_host: Per group, the host page of each block; 0 for none.
            fetch: The number of the fetch.
            fetched: The pages that were fetched, with the names of their stores, by group and block index.
            num_tokens: The tokens of the prefix.
        """
        self._manager, self._host_tier, self._pages = manager, host_tier, pages
        self._in_host, self._num_tokens = in_host, num_tokens
        self._fetch, self._fetched = fetch, fetched
        self.sources: Counter[str] = Counter()
        self.num_host_bytes = sum(
            group.page_bytes * int(np.count_nonzero(is_needed & ((pages > 0) & ~is_cached)[: len(is_needed)]))
            for group, is_needed, pages, is_cached in zip(
                manager.plan.groups, blocks.needed(num_tokens), in_host, blocks.cached, strict=True
            )
        )

    def run(self, request: RequestProgress) -> Pin | None:
        """Move the prefix, and pin it; return None if the pool has too few free pages.

        Raises:
            RuntimeError: A copy failed. Nothing changed.
            LookupError: A block that was on the device is there no longer. Nothing changed.
        """
        token_ids = array("I", request.token_ids[: self._num_tokens])
        with nullcontext() if self._host_tier is None else self._host_tier.holding(self._in_host):
            return self._manager.restore(token_ids, self._copy, salt=request.cache_salt, inputs=request.input_sequences)

    def _copy(self, group: int, blocks: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy pages to the device: from host memory if it has them, otherwise what was fetched."""
        from_host: list[tuple[int, int]] = []
        from_stores: list[tuple[int, int]] = []
        for block, block_id in zip(blocks, block_ids, strict=True):
            host_id = int(self._in_host[group][block])
            if host_id:
                from_host.append((host_id, block_id))
                self.sources[HOST] += 1
            else:
                from_stores.append((block, block_id))
                self.sources[self._fetched[group, block]] += 1
        if from_host:
            assert self._host_tier is not None
            self._host_tier.storage.copy_in(group, *zip(*from_host, strict=True))
        if from_stores:
            assert self._pages is not None
            self._pages.write(self._fetch, group, *zip(*from_stores, strict=True))
