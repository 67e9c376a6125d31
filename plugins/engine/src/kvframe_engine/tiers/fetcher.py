"""Fetches the pages of waiting requests' prefixes from page stores, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from time import monotonic

import numpy as np
import numpy.typing as npt

from kvframe.contract.foreign import safe_text
from kvframe_engine.requests.fetch import Fetch
from kvframe_engine.tiers.read_rate import ReadRate
from kvframe_engine.tiers.stored_pages import StoredPages

_log = logging.getLogger("kvframe")
MAX_FETCHED_BYTES = 1 << 30
"""Bytes of pages that were fetched and wait for their requests to be admitted; further requests wait for them."""

LEAST_WAIT = 1.0
"""Seconds that a request waits for its pages at least, before it is computed without them."""

_BYTES_AT_ONCE = 16 << 20
"""The bytes of pages that one call reads; at least one page is read."""


class PrefixFetcher:
    """Fetches prefixes, one request after the other.

    Attributes:
        seconds_per_token: How long the model takes to compute a token of a prompt; None if it is not known.
        num_waiting_bytes: Bytes of pages that were fetched and wait for their requests.
    """

    def __init__(self, pages: StoredPages) -> None:
        """Start the thread.

        Args:
            pages: Finds and reads pages.
        """
        self._pages = pages
        self._stores = tuple(pages.counts)
        self._rates = [ReadRate() for _ in self._stores]
        self._fetches: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self.num_waiting_bytes = 0
        self._is_closed = False
        self._current: Fetch | None = None
        self.seconds_per_token: float | None = None
        self._thread = threading.Thread(target=self._run, name="kvframe-page-fetcher", daemon=True)
        self._thread.start()

    @property
    def is_stuck(self) -> bool:
        """Whether a call to a store lasts longer than its request waited, so that no further request should wait."""
        fetch = self._current
        return fetch is not None and fetch.is_cancelled

    def put(self, fetch: Fetch) -> None:
        """Queue a fetch."""
        self._fetches.put(fetch)

    def release(self, fetch: Fetch) -> None:
        """Drop a fetch and its pages: the request was admitted, or does not want them."""
        fetch.is_cancelled = True
        with self._changed:
            if fetch.is_done:
                self.num_waiting_bytes -= fetch.num_bytes
                self._drop(fetch)
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until a fetch is done, for some seconds at most."""
        with self._changed:
            self._changed.wait(seconds)

    def close(self, seconds: float) -> None:
        """End the thread, after some seconds at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._fetches.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (fetch := self._fetches.get()) is not None:
            with self._changed:
                self._changed.wait_for(lambda: self.num_waiting_bytes < MAX_FETCHED_BYTES or self._is_closed)
            if self._is_closed:
                break
            try:
                if not fetch.is_cancelled:
                    self._current = fetch
                    self._fetch(fetch)
            except Exception as error:  # such as too little memory; the stores' own failures do not come here
                if not fetch.is_cancelled:
                    _log.warning("a prefix was not fetched, and is computed: %s", safe_text(error))
                self._drop(fetch)
            finally:
                self._current = None
                with self._changed:
                    fetch.is_done = True
                    if fetch.is_cancelled:
                        self._drop(fetch)
                    self.num_waiting_bytes += fetch.num_bytes
                    self._changed.notify_all()
        self._pages.close_reading()

    def _drop(self, fetch: Fetch) -> None:
        fetch.pages, fetch.num_bytes = {}, 0
        self._pages.release(fetch.number)

    def _fetch(self, fetch: Fetch) -> None:
        """Find the longest prefix whose blocks are somewhere, and read those that are in stores."""
        blocks = fetch.blocks
        # Per group and block, the number of the store that has it, counted from 1; 0 for none.
        holders = [np.zeros(len(keys), dtype=np.int64) for keys in blocks.keys]
        for store in range(len(self._stores)):
            wanted = [
                (group, block)
                for group, held in enumerate(holders)
                for block in np.flatnonzero(~fetch.local[group] & (held == 0)).tolist()
            ]
            are_found = self._pages.find(store, [(group, blocks.keys[group][block]) for group, block in wanted])
            for (group, block), is_found in zip(wanted, are_found, strict=True):
                if is_found:
                    holders[group][block] = store + 1
        for group, held in enumerate(holders):
            absent = np.flatnonzero(~fetch.local[group] & (held == 0)).tolist()
            fetch.absent += [(group, blocks.keys[group][block]) for block in absent]
        while not fetch.is_cancelled:
            present = [local | (held > 0) for local, held in zip(fetch.local, holders, strict=True)]
            num_tokens = blocks.longest(present)
            if num_tokens is None or (num_tokens <= blocks.num_cached and not blocks.lacks_inputs):
                return
            all_needed = blocks.needed(num_tokens)
            missing_blocks = [
                is_needed & ~local[: len(is_needed)] for is_needed, local in zip(all_needed, fetch.local, strict=True)
            ]
            if not blocks.lacks_inputs and not self._is_worth(missing_blocks, holders, num_tokens - blocks.num_cached):
                return
            if self._read(fetch, missing_blocks, holders):
                fetch.num_tokens = num_tokens
                return

    def _read(
        self, fetch: Fetch, missing_blocks: Sequence[npt.NDArray[np.bool_]], holders: Sequence[npt.NDArray[np.int64]]
    ) -> bool:
        """Read missing blocks; return False if a block was not there after all, and mark it as such."""
        is_complete = True
        for group, is_wanted in enumerate(missing_blocks):
            page_bytes = self._pages.page_bytes[group]
            at_once = max(1, _BYTES_AT_ONCE // page_bytes)
            for store, name in enumerate(self._stores):
                blocks = np.flatnonzero(is_wanted & (holders[group][: len(is_wanted)] == store + 1)).tolist()
                blocks = [block for block in blocks if (group, block) not in fetch.pages]
                for start in range(0, len(blocks), at_once):
                    if fetch.is_cancelled:
                        return True
                    block_part, began = blocks[start : start + at_once], monotonic()
                    keys = [fetch.blocks.keys[group][block] for block in block_part]
                    are_read = self._pages.read(store, fetch.number, group, block_part, keys)
                    num_bytes = sum(are_read) * page_bytes
                    self._rates[store].note(monotonic() - began, num_bytes)
                    fetch.num_bytes += num_bytes
                    for block, is_read in zip(block_part, are_read, strict=True):
                        if is_read:
                            fetch.pages[group, block] = name
                        else:
                            holders[group][block] = 0
                            is_complete = False
        return is_complete

    def _is_worth(
        self,
        missing_blocks: Sequence[npt.NDArray[np.bool_]],
        holders: Sequence[npt.NDArray[np.int64]],
        num_tokens: int,
    ) -> bool:
        """Return whether reading blocks takes less time than computing tokens, as far as both are known."""
        if self.seconds_per_token is None:
            return True
        seconds = [0.0] * len(self._stores)
        for group, is_wanted in enumerate(missing_blocks):
            for store, rate in enumerate(self._rates):
                num_blocks = int(np.count_nonzero(is_wanted & (holders[group][: len(is_wanted)] == store + 1)))
                seconds[store] += rate.seconds(num_blocks * self._pages.page_bytes[group])
        if sum(seconds) < num_tokens * self.seconds_per_token:
            return True
        for rate, store_seconds in zip(self._rates, seconds, strict=True):
            if store_seconds:
                rate.note_skip()
        return False
