"""Reads the pages of waiting requests from page stores, in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from time import monotonic

import attrs
import numpy as np
import numpy.typing as npt
from kvframe_stores import PageRecords, SealedStore

from kvframe_vllm.transfer.messages import Load

_PAGES_AT_ONCE = 256


@attrs.define(eq=False)
class _Loading:
    load: Load
    ends: float
    pages: list[npt.NDArray[np.uint8]] | None = None
    is_done: bool = False


class PageLoader:
    """Reads loads, one after the other. A load is complete or failed: lost, wrong or late pages are not waited for.

    The thread writes to memory of its own only. So a load that is given up does no harm when it arrives.
    """

    def __init__(self, stores: Sequence[SealedStore], records: PageRecords, page_bytes: Sequence[int]) -> None:
        """Start the thread; the stores are used by nothing else.

        Args:
            stores: The stores, in the order in which they are asked.
            records: Makes keys and seals.
            page_bytes: Per group, the size of a page.
        """
        self._stores, self._records, self._page_bytes = stores, records, page_bytes
        self._queue: queue.SimpleQueue[_Loading | None] = queue.SimpleQueue()
        self._loadings: list[_Loading] = []
        self._thread = threading.Thread(target=self._run, name="kvframe-page-loader", daemon=True)
        self._thread.start()

    def put(self, load: Load) -> None:
        """Queue a load."""
        loading = _Loading(load, monotonic() + load.max_seconds)
        self._loadings.append(loading)
        self._queue.put(loading)

    def take_ended(self) -> list[tuple[Load, list[npt.NDArray[np.uint8]] | None]]:
        """Return each load that ended since the last call, with its pages per group; None if it failed."""
        now = monotonic()
        ended = [loading for loading in self._loadings if loading.is_done or loading.ends <= now]
        self._loadings = [loading for loading in self._loadings if loading not in ended]
        return [(loading.load, loading.pages if loading.is_done else None) for loading in ended]

    def close(self, seconds: float) -> None:
        """End the thread, after some seconds at most."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (loading := self._queue.get()) is not None:
            if monotonic() < loading.ends:
                loading.pages = self._read(loading.load)
                loading.is_done = True
        for store in self._stores:
            store.close()

    def _read(self, load: Load) -> list[npt.NDArray[np.uint8]] | None:
        """Return the pages of each group, ``[n, page_bytes]``; None if a page is nowhere."""
        groups = []
        for group, (wanted, page_bytes) in enumerate(zip(load.groups, self._page_bytes, strict=True)):
            keys = [self._records.key_of(group, key) for key in wanted.keys]
            pages = np.empty((len(keys), page_bytes), dtype=np.uint8)
            missing = [*range(len(keys))]
            for store in self._stores:
                missing = self._read_from(store, keys, missing, pages)
            if missing:
                return None
            groups.append(pages)
        return groups

    def _read_from(
        self, store: SealedStore, keys: Sequence[bytes], missing: Sequence[int], pages: npt.NDArray[np.uint8]
    ) -> list[int]:
        """Read missing pages from one store, and return which are missing still."""
        absent = []
        for start in range(0, len(missing), _PAGES_AT_ONCE):
            some = missing[start : start + _PAGES_AT_ONCE]
            found = store.read(self._records, [keys[index] for index in some], pages.shape[1])
            for index, page in zip(some, found, strict=True):
                if page is None:
                    absent.append(index)
                else:
                    pages[index] = page
        return absent
