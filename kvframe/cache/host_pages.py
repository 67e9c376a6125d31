"""Host memory for pages: what the cache asks of the object that owns its bytes (``attention.storage``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class HostPages(Protocol):
    """Host memory that is cut into slabs and pages as the device's pool is."""

    num_slabs: int
    """Slabs of the plan's size that fit into the memory."""

    def copy_out(self, group: int, block_ids: Sequence[int], host_ids: Sequence[int]) -> None:
        """Copy a group's pages from the pool to host memory, byte by byte; it may raise."""

    def copy_in(self, group: int, host_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy a group's pages from host memory to the pool, byte by byte; it may raise."""
