"""The pages of one process on their way between the device and page stores.

If several ranks divide a model, each has its share of every page, and keeps it under keys of its own. Rank 0 decides
which pages move, and every rank moves its share of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from kvframe_stores import PageRecords, PageWriter, SealedStore, StoreCounts

from kvframe import KVCacheStorage
from kvframe.contract import PageStore
from kvframe_engine.pool_pages import PoolPages

Page = npt.NDArray[np.uint8]
"""The bytes of a page: ``[page_bytes], uint8, host``."""

_BYTES_AT_ONCE = 64 << 20
"""The bytes of pages that are copied to the device at once; at least one page is."""


class StoredPages:
    """Gives pages to page stores, and brings pages from them to the device.

    The thread that computes steps calls ``give``, ``write``, ``flush`` and ``close``, which wait for no store but
    ``flush``. Another thread calls ``find``, ``read`` and ``close_reading``. Either drops what was read for a fetch,
    when the other one no longer uses it.

    Attributes:
        page_bytes: Per group, the size of a page.
        counts: By name, what is counted of each store; in the order in which they are asked.
        records: Makes the keys and seals of records; another one after ``renew``.
    """

    def __init__(
        self,
        storage: KVCacheStorage,
        stores: Sequence[PageStore],
        secret: bytes,
        origin: Callable[[], Sequence[str]],
    ) -> None:
        """Start the thread that writes.

        Args:
            storage: The bytes of the device's pages.
            stores: The page stores, in the order in which they are asked.
            secret: 32 bytes, for keys and seals.
            origin: Returns texts that engines share if the pages of one are valid for the other.
        """
        self.page_bytes = [group.page_bytes for group in storage.plan.groups]
        self.counts = {store.name: StoreCounts() for store in stores}
        self._pool = PoolPages(storage)
        self._secret, self._make_origin = secret, origin
        self.records = PageRecords(secret, origin())
        self._readers = [SealedStore(store, self.counts[store.name]) for store in stores]
        self._writer = PageWriter([SealedStore(store, self.counts[store.name]) for store in stores])
        # By the number of a fetch, what was read for it, by group and block index.
        self._read_pages: dict[int, dict[tuple[int, int], Page]] = {}

    def renew(self) -> None:
        """Make other keys from now on, if the model changed."""
        self.records = PageRecords(self._secret, self._make_origin())

    # --- to the stores ------------------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """The bytes of further pages that should be given while an engine computes steps."""
        return self._writer.free_bytes

    @property
    def queued_bytes(self) -> int:
        """The bytes of pages that wait for the stores."""
        return self._writer.queued_bytes

    def give(
        self, group: int, keys: Sequence[bytes], block_ids: Sequence[int], max_queued_bytes: int | None = None
    ) -> None:
        """Copy pages of a group from the device, and queue them for the stores.

        Args:
            group: The group.
            keys: The pages' keys in the cache.
            block_ids: The pages.
            max_queued_bytes: As for ``PageWriter.put``.
        """
        pages = self._pool.read(group, block_ids, non_blocking=True)
        is_copied = None
        if pages.is_pinned():
            is_copied = torch.cuda.Event()
            is_copied.record()
        self._writer.put(self.records, group, keys, pages, is_copied, max_queued_bytes)

    def count_dropped(self, num_pages: int) -> None:
        """Count pages that the stores do not get."""
        self._writer.drop(num_pages)

    def flush(self, seconds: float) -> bool:
        """Wait until nothing is queued, for some seconds at most; return whether nothing is."""
        return self._writer.wait(seconds)

    def close(self, seconds: float) -> None:
        """Write what is queued, for some seconds at most, and end the thread that writes."""
        self._writer.close(seconds)

    # --- from the stores ----------------------------------------------------------------------------------------------

    def find(self, store: int, pages: Sequence[tuple[int, bytes]]) -> list[bool]:
        """Return which pages a store has.

        Args:
            store: The store's index.
            pages: The group and the key in the cache of each page.
        """
        records = self.records
        return self._readers[store].find(records, [records.key_of(group, key) for group, key in pages])

    def read(self, store: int, fetch: int, group: int, blocks: Sequence[int], keys: Sequence[bytes]) -> list[bool]:
        """Read pages of a group, and keep them until ``release``; return which of them were read.

        Args:
            store: The store's index.
            fetch: The number of the fetch that they are for.
            group: The group.
            blocks: The indices of the request's blocks.
            keys: Their keys in the cache.
        """
        records, fetched_pages = self.records, self._read_pages.setdefault(fetch, {})
        record_keys = [records.key_of(group, key) for key in keys]
        pages = self._readers[store].read(records, record_keys, self.page_bytes[group])
        fetched_pages.update(
            ((group, block), page) for block, page in zip(blocks, pages, strict=True) if page is not None
        )
        return [page is not None for page in pages]

    def write(self, fetch: int, group: int, blocks: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy pages that were read to the device.

        Args:
            fetch: The number of the fetch that they were read for.
            group: The group.
            blocks: The indices of the request's blocks.
            block_ids: The device's pages.
        """
        fetched_pages = self._read_pages[fetch]
        at_once = max(1, _BYTES_AT_ONCE // self.page_bytes[group])
        for start in range(0, len(blocks), at_once):
            pages = [fetched_pages[group, block] for block in blocks[start : start + at_once]]
            self._pool.write(group, block_ids[start : start + at_once], torch.from_numpy(np.stack(pages)))

    def release(self, fetch: int) -> None:
        """Drop what was read for a fetch, if anything was."""
        self._read_pages.pop(fetch, None)

    def close_reading(self) -> None:
        """Close the stores that were read from."""
        for store in self._readers:
            store.close()
