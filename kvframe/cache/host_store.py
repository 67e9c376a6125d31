"""The host store: pages of requests that wait, in a fixed number of bytes of host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

import attrs
import numpy as np

from kvframe.cache.audit import audit_pool
from kvframe.cache.block_pool import BlockPool
from kvframe.plan import KVCachePlan


class HostPages(Protocol):
    """The bytes of a host store, and the copies between them and the pool (``attention.storage.HostStorage``)."""

    num_slabs: int
    """Slabs of the plan's size that there are bytes for."""

    def copy_out(self, group: int, block_ids: Sequence[int], host_ids: Sequence[int]) -> None:
        """Copy a group's pages from the pool to the host store, byte by byte; may raise."""

    def copy_in(self, group: int, host_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy a group's pages from the host store to the pool, byte by byte; may raise."""


class HostStore:
    """Who owns which bytes of host memory: cut into slabs and pages as the pool is.

    Ids are given as requests have their blocks: one list per group, by block index, 0 where nothing is resident.

    Invariant: a page of the store is held by exactly one request that is swapped out, or free.
    """

    def __init__(self, plan: KVCachePlan, pages: HostPages) -> None:
        """Start empty.

        Args:
            plan: How the pool is cut.
            pages: The bytes.
        """
        self._plan = plan
        self._pages = pages
        self._pool = BlockPool(attrs.evolve(plan, num_slabs=pages.num_slabs, num_rest_pages=0))

    def put(self, block_ids: Sequence[Sequence[int]]) -> list[list[int]] | None:
        """Copy a request's resident pages to the store.

        Args:
            block_ids: Where they lie in the pool.

        Returns:
            Where their copies lie; None, and nothing changed, if there is no room for all of them.

        Raises:
            RuntimeError: A copy failed; nothing is held.
        """
        resident = [[block_id for block_id in ids if block_id] for ids in block_ids]
        pages = self._pool.allocate_blocks([len(ids) for ids in resident])
        if pages is None:
            return None
        page = iter(pages.tolist())
        taken = [list(islice(page, len(ids))) for ids in resident]
        try:
            for group, (ids, copies) in enumerate(zip(resident, taken, strict=True)):
                self._pages.copy_out(group, ids, copies)
        except BaseException:
            self.free(taken)
            raise
        places = [iter(copies) for copies in taken]
        return [
            [next(place) if block_id else 0 for block_id in ids] for ids, place in zip(block_ids, places, strict=True)
        ]

    def fetch(self, host_ids: Sequence[Sequence[int]], block_ids: Sequence[Sequence[int]]) -> None:
        """Copy a request's pages to the pool; their copies stay.

        Args:
            host_ids: Where its copies lie.
            block_ids: Where to, at least as many; 0 for a page that is not wanted.

        Raises:
            RuntimeError: A copy failed; what the pages hold is undefined.
        """
        for group, (copies, ids) in enumerate(zip(host_ids, block_ids, strict=True)):
            wanted = [(copy, block_id) for copy, block_id in zip(copies, ids, strict=False) if copy and block_id]
            self._pages.copy_in(group, [copy for copy, _ in wanted], [block_id for _, block_id in wanted])

    def free(self, host_ids: Sequence[Sequence[int]]) -> None:
        """Give up a request's copies."""
        for group, copies in enumerate(host_ids):
            held = np.array([copy for copy in copies if copy], dtype=np.int32)
            if len(held):
                self._pool.release_blocks(held, group)

    def audit(self, host_ids: Iterable[Sequence[Sequence[int]]]) -> None:
        """Check that all pages of the store are free or held, and counted right, as ``audit_pool`` does.

        Args:
            host_ids: Where the copies of each request lie.
        """
        held = [copy for copies in host_ids for ids in copies for copy in ids if copy]
        audit_pool(self._pool, self._plan, np.array(held, dtype=np.int32))

    @property
    def held_bytes(self) -> int:
        """Bytes of pages in the store: 0 when no request is swapped out."""
        return self._pool.held_bytes

    @property
    def peak_held_bytes(self) -> int:
        """The most of them at once."""
        return self._pool.peak_held_bytes
