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

from kvframe import BlockPool, KVCacheManager
from kvframe.contract.foreign import safe_text
from kvframe_engine.host_storage import HostStorage

BlockIds = npt.NDArray[np.int32]
"""``[n], int32, host``: pages of the host memory."""

_log = logging.getLogger("kvframe")
_PAGES_AT_ONCE = 64
"""Pages that are allocated together, so that more pages than the memory has evict each other in parts."""


class HostTier:
    """Finds pages in host memory by their group and key.

    Invariant: the cached pages of the host memory are exactly those that a key finds.

    Attributes:
        storage: The bytes.
        pages_stored: Pages that were copied to host memory.
        pages_dropped: Evicted pages for which no host page was free, or whose copy failed.
    """

    def __init__(self, manager: KVCacheManager, storage: HostStorage) -> None:
        """Begin with an empty pool of host pages, ``pool``, for the evicted pages of a cache."""
        self._manager, self.storage = manager, storage
        self._num_groups = len(manager.plan.groups)
        plan = attrs.evolve(manager.plan, num_slabs=storage.num_slabs)
        self.pool = BlockPool(plan, on_evicted=self._remove_evicted)
        self._host_ids: list[dict[bytes, int]] = [{} for _ in plan.groups]
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._held_pages: list[BlockIds] = []
        self.pages_stored = self.pages_dropped = 0

    # --- as a watcher of the device's pages ---------------------------------------------------------------------------

    def note_stored(self, group: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Do nothing: pages are copied when they are evicted."""

    def note_evicted(self, group: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Copy pages that are evicted from the device, except those that have a copy already or are not needed."""
        host_ids = self._host_ids[group]
        may_be_needed = self._manager.may_be_needed(block_ids)
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
            self.storage.copy_out(group, block_ids, host_ids.tolist())
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
        self._manager.record_copies(group, keys)

    def _remove_evicted(self, owner: int, groups: object, indices: object) -> None:
        """Forget the key of a page that is evicted from host memory: a page is its own owner."""
        group, key = self._key_of.pop(owner)
        del self._host_ids[group][key]
        self._manager.record_copies(group, [key], are_removed=True)

    def copies(self) -> Iterator[tuple[int, Sequence[bytes]]]:
        """Yield the keys of all pages, group by group."""
        for group, host_ids in enumerate(self._host_ids):
            if host_ids:
                yield group, list(host_ids)

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
