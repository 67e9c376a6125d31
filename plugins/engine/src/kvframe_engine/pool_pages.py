"""Reads and writes the bytes of pages of the device's pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvframe import KVCacheStorage


class PoolPages:
    """Copies pages of a group between the pool and tensors on the CPU. The storage may be resized in between."""

    def __init__(self, storage: KVCacheStorage) -> None:
        """Work on a storage's pool."""
        self._storage = storage

    def read(self, group: int, block_ids: Sequence[int], *, non_blocking: bool = False) -> torch.Tensor:
        """Return pages as ``[n, page_bytes], uint8``, on the CPU.

        Args:
            group: The pages' group.
            block_ids: The pages.
            non_blocking: Whether the result may be complete only when the device has done what it was given so far; it
                is in pinned memory then.
        """
        pages = self._pages(group)
        chosen = pages.index_select(0, torch.tensor(block_ids, dtype=torch.int64).to(pages.device))
        if not chosen.is_cuda or not non_blocking:
            return chosen.cpu()
        staged = torch.empty(chosen.shape, dtype=torch.uint8, pin_memory=True)
        return staged.copy_(chosen, non_blocking=True)

    def write(self, group: int, block_ids: Sequence[int], content: torch.Tensor) -> None:
        """Write pages, ``[n, page_bytes], uint8``, on the CPU."""
        pages = self._pages(group)
        if not pages.is_cuda:
            # Each page is one copy of contiguous bytes, which is faster than an index of overlapping rows.
            for block_id, page in zip(block_ids, content, strict=True):
                pages[block_id].copy_(page)
            return
        ids = torch.tensor(block_ids, dtype=torch.int64).to(pages.device)
        pages.index_copy_(0, ids, content.to(pages.device))

    def _pages(self, group: int) -> torch.Tensor:
        """Return the pool as ``[num_block_ids, page_bytes], uint8, device``; rows overlap."""
        pool, plan = self._storage.pool, self._storage.plan
        unit, page_bytes = plan.block_id_bytes, plan.groups[group].page_bytes
        return pool.as_strided(((pool.numel() - page_bytes) // unit + 1, page_bytes), (unit, 1))
