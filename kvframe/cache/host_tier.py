"""The host tier: pages that were evicted from the device stay in host memory, where later requests find them by key.

The memory is cut into slabs and pages as the device's pool is. The least recently used page makes way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_order import BlockIds, Groups
from kvframe.cache.block_pool import BlockPool, Indices
from kvframe.cache.events import EventLog
from kvframe.cache.host_pages import HostPages
from kvframe.foreign import safe_text
from kvframe.planning.plan import KVCachePlan

_log = logging.getLogger("kvframe")
_PAGES_AT_ONCE = 64
"""Pages that are allocated together, so that more pages than the memory has evict each other in parts."""


class HostTier:
    """Finds pages in host memory by their group and key.

    Invariant: the cached pages of the host memory are exactly those that a key finds.

    Attributes:
        events: What records which pages are copied and removed; None if no router listens.
        pages_stored: Pages that were copied to host memory.
        pages_dropped: Evicted pages for which no host page was free, or whose copy failed.
    """

    def __init__(self, plan: KVCachePlan, host_pages: HostPages, device_pool: BlockPool) -> None:
        """Begin with an empty pool of host pages, ``pool``, for a device pool with this plan."""
        self._device_pool = device_pool
        self._plan, self._num_groups = plan, len(plan.groups)
        self._host_pages = host_pages
        self.pool = BlockPool(attrs.evolve(plan, num_slabs=host_pages.num_slabs), on_evicted=self._remove_evicted)
        self._host_ids: list[dict[bytes, int]] = [{} for _ in plan.groups]
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._held_pages: list[BlockIds] = []
        self.events: EventLog | None = None
        self.pages_stored = self.pages_dropped = 0

    # --- as a watcher of the device's pages ---------------------------------------------------------------------------

    def note_stored(self, group: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Do nothing: pages are copied when they are evicted."""

    def note_evicted(self, group: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Copy pages that are evicted from the device, except those that have a copy already or are not needed."""
        host_ids = self._host_ids[group]
        may_be_needed = self._device_pool.may_be_needed(np.array(block_ids, dtype=np.int32)).tolist()
        if not all(may_be_needed):
            keys, block_ids = [*compress(keys, may_be_needed)], [*compress(block_ids, may_be_needed)]
        self._use_again(group, self.find_pages(group, keys))
        fresh = [index for index, key in enumerate(keys) if key not in host_ids]
        for start in range(0, len(fresh), _PAGES_AT_ONCE):
            batch = fresh[start : start + _PAGES_AT_ONCE]
            self._store(group, [keys[index] for index in batch], [block_ids[index] for index in batch])

    def note_cleared(self) -> None:
        """Forget all pages."""
        for group, host_ids in enumerate(self._host_ids):
            pages = np.array(list(host_ids.values()), dtype=np.int32)
            self.pool.discard_cached(pages)
            # A page that is held now is freed when it is released.
            self.pool.publish_blocks(0, pages, np.zeros_like(pages))
            self._host_ids[group] = {}
        self._key_of.clear()

    def _store(self, group: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        counts = [0] * self._num_groups
        counts[group] = len(keys)
        host_ids = self.pool.allocate_blocks(counts)
        if host_ids is None:
            self.pages_dropped += len(keys)
            return
        try:
            self._host_pages.copy_out(group, block_ids, host_ids.tolist())
        except (RuntimeError, MemoryError) as error:
            _log.warning("%d evicted pages were not copied to host memory: %s", len(keys), safe_text(error))
            self.pages_dropped += len(keys)
            self.pool.release_blocks(host_ids, group)
            return
        for key, host_id in zip(keys, host_ids.tolist(), strict=True):
            self._host_ids[group][key] = host_id
            self._key_of[host_id] = group, key
        self.pool.publish_and_release(host_ids, host_ids, np.zeros_like(host_ids), group)
        self.pages_stored += len(keys)
        if self.events is not None:
            self.events.record_copied(group, keys)

    def _remove_evicted(self, owner: int, groups: int | Groups, indices: Indices) -> None:
        """Forget the key of a page that is evicted from host memory: a page is its own owner."""
        group, key = self._key_of.pop(owner)
        del self._host_ids[group][key]
        if self.events is not None:
            self.events.record_copy_removed(group, key)

    def log_events_to(self, log: EventLog | None) -> None:
        """Log all pages, and from now on each one that is copied or removed; None stops the log."""
        self.events = log
        if log is not None:
            for group, host_ids in enumerate(self._host_ids):
                if host_ids:
                    log.record_copied(group, list(host_ids))

    # --- finding ------------------------------------------------------------------------------------------------------

    def find_pages(self, group: int, keys: Sequence[bytes]) -> BlockIds:
        """Return ``[n], int32, host``: for each key the page with its content; 0 for none."""
        host_ids = self._host_ids[group]
        return np.array([host_ids.get(key, 0) for key in keys], dtype=np.int32)

    @contextmanager
    def holding(self, host_ids: Sequence[BlockIds]) -> Iterator[None]:
        """Keep pages of each group, 0 for none, so that none is evicted; then they are the most recently used ones."""
        self._held_pages = [pages[pages != 0] for pages in host_ids]
        for group, pages in enumerate(self._held_pages):
            self.pool.add_references(group, pages)
        try:
            yield
        finally:
            held_pages, self._held_pages = self._held_pages, []
            for group, pages in enumerate(held_pages):
                self.pool.release_blocks(pages, group)

    def _use_again(self, group: int, host_ids: npt.NDArray[np.int32]) -> None:
        """Make pages the most recently used ones."""
        host_ids = host_ids[host_ids != 0]
        if len(host_ids):
            self.pool.add_references(group, host_ids)
            self.pool.release_blocks(host_ids, group)

    @property
    def num_cached(self) -> int:
        """The pages that a key finds."""
        return len(self._key_of)
