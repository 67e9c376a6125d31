"""Gives computed pages to page stores, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

import attrs
import torch

from kvframe.contract.foreign import safe_text
from kvframe_stores.page_records import PageRecords
from kvframe_stores.sealed_store import SealedStore

_log = logging.getLogger("kvframe")
MAX_QUEUED_BYTES = 256 << 20
"""Bytes of pages that wait for the stores at most, as long as a host computes steps."""


@attrs.frozen(eq=False)
class _Batch:
    records: PageRecords
    group: int
    page_keys: Sequence[bytes]
    pages: torch.Tensor
    is_copied: torch.cuda.Event | None


class PageWriter:
    """Writes batches to all stores, in the order in which they were put.

    Attributes:
        queued_bytes: The bytes of pages that wait for the stores.
    """

    def __init__(self, stores: Sequence[SealedStore]) -> None:
        """Start the thread; the stores are used by nothing else."""
        self._stores = stores
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_idle = threading.Condition(self._lock)
        self.queued_bytes = 0
        self._thread = threading.Thread(target=self._run, name="kvframe-page-writer", daemon=True)
        self._thread.start()

    @property
    def free_bytes(self) -> int:
        """The bytes of further pages that should be queued."""
        return max(0, MAX_QUEUED_BYTES - self.queued_bytes)

    def put(
        self,
        records: PageRecords,
        group: int,
        page_keys: Sequence[bytes],
        pages: torch.Tensor,
        is_copied: torch.cuda.Event | None = None,
        max_queued_bytes: int | None = None,
    ) -> None:
        """Queue pages of one group, or drop them if too many wait already.

        Args:
            records: Makes their keys and seals.
            group: The group.
            page_keys: Their keys in the cache.
            pages: ``[n, page_bytes], uint8``, CPU.
            is_copied: The event after which the pages are complete; None if they are.
            max_queued_bytes: They are dropped if so many bytes wait; ``MAX_QUEUED_BYTES`` unless given.
        """
        if self.queued_bytes >= (MAX_QUEUED_BYTES if max_queued_bytes is None else max_queued_bytes):
            self.drop(len(page_keys))
            return
        with self._lock:
            self.queued_bytes += pages.nbytes
        self._batches.put(_Batch(records, group, page_keys, pages, is_copied))

    def drop(self, num_pages: int) -> None:
        """Count pages that the stores do not get."""
        for store in self._stores:
            store.counts.pages_dropped += num_pages

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is queued, for some seconds at most; return whether nothing is."""
        with self._is_idle:
            return self._is_idle.wait_for(lambda: self.queued_bytes == 0, seconds)

    def close(self, seconds: float) -> None:
        """Write what is queued, for some seconds at most, and end the thread."""
        self._batches.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                self._write(batch)
            except Exception as error:  # such as too little memory; the stores' own failures do not come here
                _log.warning("%d pages were not given to the page stores: %s", len(batch.page_keys), safe_text(error))
                self.drop(len(batch.page_keys))
            finally:
                with self._is_idle:
                    self.queued_bytes -= batch.pages.nbytes
                    self._is_idle.notify_all()
        for store in self._stores:
            store.close()

    def _write(self, batch: _Batch) -> None:
        if batch.is_copied is not None:
            batch.is_copied.synchronize()
        keys = [batch.records.key_of(batch.group, key) for key in batch.page_keys]
        pages = list(batch.pages.numpy())
        for store in self._stores:
            store.write(batch.records, keys, pages)
