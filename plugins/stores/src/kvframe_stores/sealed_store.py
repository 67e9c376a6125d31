"""A page store as one thread of a host uses it: pages are sealed, failures are misses, and a failing store rests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.contract.foreign import safe_text
from kvframe.contract.page_store import SEAL_BYTES, OpenPageStore, PageStore
from kvframe_stores.page_records import PageRecords

_log = logging.getLogger("kvframe")
Page = npt.NDArray[np.uint8]
"""The bytes of a page: ``[page_bytes], uint8, CPU``."""

FIRST_REST, LONGEST_REST = 0.5, 30.0
"""Seconds that a store rests after a failure; doubled after each further one."""


@attrs.define
class StoreCounts:
    """What a host counts of one store.

    Attributes:
        pages_found: Pages that were read.
        pages_stored: Pages that were given to the store, except those that it had already.
        pages_refused: Records whose seal was wrong, so that they were not used.
        pages_dropped: Pages that were not given to the store, because it was too slow or failed.
        bytes_read: Bytes of the pages that were read.
        bytes_written: Bytes of the pages that were given to the store.
        failures: Calls that raised.
    """

    pages_found: int = 0
    pages_stored: int = 0
    pages_refused: int = 0
    pages_dropped: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    failures: int = 0


class SealedStore:
    """Opens a store when it is first used, and again after a failure. One thread uses it.

    Attributes:
        name: The store's registered name.
        counts: What is counted of the store.
    """

    def __init__(self, store: PageStore, counts: StoreCounts) -> None:
        """Begin without opening the store."""
        self.name = store.name
        self.counts = counts
        self._store = store
        self._open: OpenPageStore | None = None
        self._origin = ""
        self._rest, self._rests_until = 0.0, 0.0

    def find(self, records: PageRecords, keys: Sequence[bytes]) -> list[bool]:
        """Return which records the store has; none if it fails or rests."""
        are_found = self._find(records, keys)
        if are_found is None:
            return [False] * len(keys)
        self._works()
        return are_found

    def _find(self, records: PageRecords, keys: Sequence[bytes]) -> list[bool] | None:
        """Return which records the store has; None if it fails or rests, or there is no key."""
        store = self._opened(records)
        if store is None or not keys:
            return None
        try:
            answers = [bool(answer) for answer in store.find(keys)]
            if len(answers) != len(keys):
                raise ValueError(f"find() returned {len(answers)} answers for {len(keys)} keys")
        except BaseException as error:
            self._fail(error)
            return None
        return answers

    def read(self, records: PageRecords, keys: Sequence[bytes], page_bytes: int) -> list[Page | None]:
        """Return pages of one size; None for each that the store does not have, or has wrongly."""
        store = self._opened(records)
        if store is None or not keys:
            return [None] * len(keys)
        buffers = np.empty((len(keys), SEAL_BYTES + page_bytes), dtype=np.uint8)
        views = [memoryview(buffer) for buffer in buffers]  # type: ignore[arg-type]
        try:
            answers = [bool(answer) for answer in store.read(keys, views)]
            if len(answers) != len(keys):
                raise ValueError(f"read() returned {len(answers)} answers for {len(keys)} keys")
        except BaseException as error:
            self._fail(error)
            return [None] * len(keys)
        self._works()
        pages: list[Page | None] = []
        wrong = []
        for key, view, buffer, is_read in zip(keys, views, buffers, answers, strict=True):
            is_sound = is_read and records.is_sound(key, view)
            pages.append(buffer[SEAL_BYTES:] if is_sound else None)
            if is_read and not is_sound:
                wrong.append(key)
        num_found = sum(page is not None for page in pages)
        self.counts.pages_found += num_found
        self.counts.bytes_read += num_found * page_bytes
        if wrong:
            self.counts.pages_refused += len(wrong)
            _log.warning("page store %r returned %d pages with a wrong seal; they are not used", self.name, len(wrong))
            self._forget(store, wrong)
        return pages

    def write(self, records: PageRecords, keys: Sequence[bytes], pages: Sequence[Page]) -> None:
        """Give pages to the store, except those that it has."""
        # A store that is full still finds records: only a write shows that it works.
        are_found = self._find(records, keys)
        store = self._opened(records)
        if are_found is None or store is None:
            self.counts.pages_dropped += len(keys)
            return
        absent = [index for index, is_found in enumerate(are_found) if not is_found]
        if not absent:
            return
        page_bytes = pages[0].nbytes
        sealed = np.empty((len(absent), SEAL_BYTES + page_bytes), dtype=np.uint8)
        for row, index in zip(sealed, absent, strict=True):
            row[SEAL_BYTES:] = pages[index]
            row[:SEAL_BYTES] = np.frombuffer(records.seal(keys[index], memoryview(pages[index])), dtype=np.uint8)  # type: ignore[arg-type]
        views = [memoryview(row).toreadonly() for row in sealed]  # type: ignore[arg-type]
        try:
            num_kept = int(store.write([keys[index] for index in absent], views))
        except BaseException as error:
            self.counts.pages_dropped += len(absent)
            self._fail(error)
            return
        self._works()
        self.counts.pages_stored += num_kept
        self.counts.bytes_written += num_kept * page_bytes

    def close(self) -> None:
        """Close the store if it is open."""
        store, self._open = self._open, None
        if store is not None:
            try:
                store.close()
            except BaseException as error:
                _log.warning("page store %r could not be closed: %s", self.name, safe_text(error))

    def _opened(self, records: PageRecords) -> OpenPageStore | None:
        """Return the store, opened for an origin; None if it rests or cannot be opened."""
        if self._open is not None and self._origin == records.origin:
            return self._open
        if monotonic() < self._rests_until:
            return None
        self.close()
        try:
            self._open, self._origin = self._store.open(records.origin), records.origin
        except BaseException as error:
            self._fail(error)
        return self._open

    def _forget(self, store: OpenPageStore, keys: Sequence[bytes]) -> None:
        try:
            store.forget(keys)
        except BaseException as error:
            self._fail(error)

    def _works(self) -> None:
        if self._rest:
            self._rest = 0.0
            _log.info("page store %r works again", self.name)

    def _fail(self, error: BaseException) -> None:
        """Let the store rest, and open it again later. The first failure in a row is logged."""
        self.counts.failures += 1
        if not self._rest:
            _log.warning(
                "page store %r failed: %s; what it has is computed until it works again", self.name, safe_text(error)
            )
        self._rest = min(max(2 * self._rest, FIRST_REST), LONGEST_REST)
        self._rests_until = monotonic() + self._rest
        self.close()
