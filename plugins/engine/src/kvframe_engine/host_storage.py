"""CPU memory for pages that are evicted from the device: its bytes, and copies to and from the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from kvframe import KVCachePlan, allocating

STAGING_BYTES = 16 << 20
"""The buffer on a GPU in which scattered pages are gathered for one copy over the bus."""


class HostStorage:
    """Owns the bytes of a host store, and copies pages between it and the pool.

    Pages that are adjacent in both are one copy. If the pool is on a GPU, the memory is pinned, and copies are queued
    on the stream of the steps, between two of them, so that the host waits for none. Pages that are adjacent in the
    host store alone are then one copy too: the GPU gathers and scatters them through a buffer.

    Attributes:
        bytes: ``[num_slabs * slab_bytes], uint8, host``.
        num_slabs: Slabs of the plan's size.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        pool: torch.Tensor,
        num_slabs: int,
        staging_bytes: int | None = None,
        copy_pages: Callable[..., None] | None = None,
    ) -> None:
        """Allocate the bytes.

        Args:
            plan: How the pool is divided.
            pool: ``[total_bytes], uint8, device``: the pool.
            num_slabs: How many slabs to allocate.
            staging_bytes: The size of the buffer for scattered pages; 0 for no buffer. None for ``STAGING_BYTES`` on a
                GPU, and no buffer elsewhere.
            copy_pages: Copies between the pool and that buffer (``AttentionBackend.page_copier``); None for torch.

        Raises:
            PlanError: The host does not have that much memory, or the device has none for the buffer.
        """
        self._plan = plan
        self._pool = pool
        self._copy_pages = copy_pages
        self.num_slabs = num_slabs
        num_bytes = num_slabs * plan.slab_bytes
        self._is_pinned = pool.device.type == "cuda"
        with allocating(num_bytes, "to keep evicted pages in", "less host_memory"):
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        if staging_bytes is None:
            staging_bytes = STAGING_BYTES if self._is_pinned else 0
        with allocating(staging_bytes, "to copy pages through", "less memory for the cache", str(pool.device)):
            self._staging = torch.empty(staging_bytes // 8, dtype=torch.int64, device=pool.device)

    def copy_out(self, group: int, block_ids: Sequence[int], host_ids: Sequence[int]) -> None:
        """Copy pages of a group from the pool to the host store.

        Args:
            group: The pages' group.
            block_ids: The pages in the pool.
            host_ids: As many pages of the host store, which has the pool's shape and ids.
        """
        if self._is_staged(group, len(block_ids)):
            for ids, host_bytes, staged in self._staged(group, block_ids, host_ids):
                if self._copy_pages is None:
                    torch.index_select(self._pages(group), 0, ids, out=staged)
                else:
                    self._copy_pages(self._pool, _flat(staged), ids, None, **self._sizes(group, len(ids)))
                host_bytes.copy_(_flat(staged), non_blocking=self._is_pinned)
            return
        for start, host_start, num_bytes in self._runs(group, block_ids, host_ids):
            target = self.bytes.narrow(0, host_start - self._plan.null_bytes, num_bytes)
            target.copy_(self._pool.narrow(0, start, num_bytes), non_blocking=self._is_pinned)

    def copy_in(self, group: int, host_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy pages of a group from the host store to the pool.

        Args:
            group: The pages' group.
            host_ids: The pages in the host store.
            block_ids: As many pages of the pool.
        """
        if self._is_staged(group, len(block_ids)):
            for ids, host_bytes, staged in self._staged(group, block_ids, host_ids):
                _flat(staged).copy_(host_bytes, non_blocking=self._is_pinned)
                if self._copy_pages is None:
                    self._pages(group).index_copy_(0, ids, staged)
                else:
                    self._copy_pages(_flat(staged), self._pool, None, ids, **self._sizes(group, len(ids)))
            return
        for start, host_start, num_bytes in self._runs(group, block_ids, host_ids):
            source = self.bytes.narrow(0, host_start - self._plan.null_bytes, num_bytes)
            self._pool.narrow(0, start, num_bytes).copy_(source, non_blocking=self._is_pinned)

    def _runs(self, group: int, block_ids: Sequence[int], host_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield ``(byte in the pool, byte in the host store, bytes)`` of pages that follow each other in both."""
        unit, page_bytes = self._plan.block_id_bytes, self._plan.groups[group].page_bytes
        size = page_bytes // unit
        first_index = 0
        for index in range(1, len(block_ids) + 1):
            if index < len(block_ids):
                step, host_step = block_ids[index] - block_ids[index - 1], host_ids[index] - host_ids[index - 1]
                if step == host_step == size:
                    continue
            yield block_ids[first_index] * unit, host_ids[first_index] * unit, (index - first_index) * page_bytes
            first_index = index

    def _is_staged(self, group: int, num_pages: int) -> bool:
        """Return whether to copy through the buffer: there are several pages, and the buffer holds several."""
        return min(num_pages, self._staging.nbytes // self._plan.groups[group].page_bytes) > 1

    def _pages(self, group: int) -> torch.Tensor:
        """Return the pool as ``[num_block_ids, words of a page], int64, device``; rows overlap."""
        words, unit = self._plan.groups[group].page_bytes // 8, self._plan.block_id_bytes // 8
        pool = self._pool.view(torch.int64)
        return pool.as_strided(((pool.numel() - words) // unit + 1, words), (unit, 1))

    def _sizes(self, group: int, num_pages: int) -> dict[str, int]:
        page_bytes = self._plan.groups[group].page_bytes
        return {"num_pages": num_pages, "page_bytes": page_bytes, "id_bytes": self._plan.block_id_bytes}

    def _staged(
        self, group: int, block_ids: Sequence[int], host_ids: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield ids of pages that are adjacent in the host store, their bytes there, and a part of the buffer."""
        page_bytes = self._plan.groups[group].page_bytes
        at_once = self._staging.nbytes // page_bytes
        ids = torch.tensor(block_ids, pin_memory=self._is_pinned).to(self._pool.device, non_blocking=self._is_pinned)
        first_index = 0
        for _, host_start, num_bytes in self._runs(group, host_ids, host_ids):
            target, stop = host_start - self._plan.null_bytes, first_index + num_bytes // page_bytes
            for index in range(first_index, stop, at_once):
                part = ids[index : min(index + at_once, stop)]
                staged = self._staging[: len(part) * page_bytes // 8].view(len(part), -1)
                yield part, self.bytes.narrow(0, target, staged.nbytes), staged
                target += staged.nbytes
            first_index = stop


def _flat(staged: torch.Tensor) -> torch.Tensor:
    return staged.view(torch.uint8).flatten()
