"""The block pool: who owns which page, what is kept for those who may come back, and what is given up for others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvframe.cache.equal_pages import EqualPages
from kvframe.cache.eviction import LeastRecentlyUsed
from kvframe.cache.free_pages import BlockIds, FreePages, Groups
from kvframe.cache.slabs import Slabs
from kvframe.plan import KVCachePlan

Places = npt.NDArray[np.intp]
_NOBODY = -1
_MAX_STALE = 1 << 16
"""Stale entries that the queues of cached pages may have besides as many as there are cached pages."""


class Keeper(Protocol):
    """Who has pages in the pool found by others: told of each page whose content is given up."""

    def lost(self, owner: int, group: int, indices: npt.NDArray[np.int32]) -> None:
        """Take note that an owner's pages at these indices are gone."""


class BlockPool:
    """Pages, shared by counts of their holders.

    Invariant: every page is exactly one of *free*, *held* (by at least one holder) or *cached* (published by an owner,
    held by nobody).

    Attributes:
        num_held: Per group, the pages that somebody holds.
        peak_held: Per group, the most of them at once.
        held_bytes: Bytes of held pages.
        peak_held_bytes: The most of them at once.
        num_cached: Per group, the cached pages.
        num_evictions: Cached pages whose content was given up so far.
        on_pages_freed: Called with a group and block ids whenever the content of pages ends; None for nobody.
        on_removed: Called with the block ids of pages that were cached and are given up; None for nobody.
    """

    def __init__(self, plan: KVCachePlan, *, reserve_slabs: int = 0, keeper: Keeper | None = None) -> None:
        """Start with every page free.

        Args:
            plan: The cut of the pool.
            reserve_slabs: Idle slabs that an allocation leaves alone as long as evicting its own group's cached
                pages serves it too: so that a lone request always finds the slabs that the plan promised it.
            keeper: Who publishes pages; None if nobody does.
        """
        num_groups = len(plan.groups)
        page_ids = [group.page_bytes // plan.block_id_bytes for group in plan.groups]
        # Pages are apart by the smallest page at least, so that a quotient tells them apart.
        self._divisor = min(page_ids, default=1)
        num_places = plan.total_bytes // plan.block_id_bytes // self._divisor + 1 if plan.groups else 1
        self._free: FreePages = EqualPages(plan) if EqualPages.fit(plan) else Slabs(plan, reserve_slabs)
        self._keeper = keeper
        # Holders beyond the first; -1 for a cached page. Zero for a free one too: taking and giving need not write it.
        self._more_holders = np.zeros(num_places, dtype=np.int32)
        self._owner = np.full(num_places if keeper is not None else 1, _NOBODY, dtype=np.int32)
        self._index = np.zeros(num_places if keeper is not None else 1, dtype=np.int32)
        self._stamp = np.zeros(num_places if keeper is not None else 1, dtype=np.int64)
        self._cached = LeastRecentlyUsed(num_groups)
        self._page_bytes = [group.page_bytes for group in plan.groups]
        self.num_cached = [0] * num_groups
        self.num_held = [0] * num_groups
        self.peak_held = [0] * num_groups
        self.held_bytes = 0
        self.peak_held_bytes = 0
        self.num_evictions = 0
        self.on_pages_freed: Callable[[int, list[int]], None] | None = None
        self.on_removed: Callable[[BlockIds], None] | None = None

    # --- what is there ------------------------------------------------------------------------------------------------

    @property
    def num_idle_slabs(self) -> int:
        """Slabs that hold no page that somebody needs."""
        return self._free.num_idle_slabs

    @property
    def num_cached_pages(self) -> int:
        """Pages that nobody holds and that a prefix hit can still take."""
        return sum(self.num_cached)

    def holders(self, block_ids: BlockIds) -> npt.NDArray[np.int32]:
        """Return how many hold each page: 1 for a free one too, and -1 for a cached one."""
        more: npt.NDArray[np.int32] = self._more_holders[self._places(block_ids)]
        return more + (more >= 0)

    def pages(self) -> BlockIds:
        """Return all pages that the pool is cut into."""
        return self._free.cut_pages()

    def free_pages(self) -> BlockIds:
        """Return those of them that are free."""
        return self._free.free_pages()

    def count_idle_slabs(self, held: BlockIds) -> int:
        """Return how many slabs have none of the pages that are held."""
        return self._free.count_idle_slabs(held)

    # --- what happens to pages ----------------------------------------------------------------------------------------

    @property
    def is_short(self) -> bool:
        """Whether so few pages are free that what is cached has to be given up soon."""
        return self._free.is_short

    def has_room(self, num_blocks: Sequence[int]) -> bool:
        """Return whether ``allocate`` would find as many pages for each group."""
        return self._free.has_room(num_blocks)

    def allocate(self, num_blocks: Sequence[int]) -> BlockIds | None:
        """Take pages for each group, evicting cached ones where needed.

        Args:
            num_blocks: Pages wanted, per group.

        Returns:
            Block ids, one group after the other, each held once; None, and nothing changed, if there are not enough.
        """
        taken = self._free.take(num_blocks, self)
        if taken is not None:
            self._count_held(num_blocks)
        return taken

    def hold(self, group: int, block_ids: BlockIds) -> None:
        """Count one more holder of each page, held or cached."""
        places = self._places(block_ids)
        before = self._more_holders[places]
        self._more_holders[places] = before + 1
        was_cached = before < 0
        woken = block_ids[was_cached]
        if len(woken):
            self._free.hold(group, woken)
            self.num_cached[group] -= len(woken)
            counts = [0] * len(self.num_held)
            counts[group] = len(woken)
            self._count_held(counts)

    def release(self, block_ids: BlockIds, group: int | Groups) -> None:
        """Count one holder of each page less. Of pages with none, the published ones are cached and others are free.

        Args:
            block_ids: The pages, in the order in which they shall be given up; one as often as it has holders that let
                go of it.
            group: Their group, or the group of each.
        """
        places = self._places(block_ids)
        before = self._more_holders[places]
        if np.count_nonzero(before):
            # A page may come once for each of several holders.
            np.subtract.at(self._more_holders, places, 1)
            last = np.flatnonzero(self._more_holders[places] < 0)
            last = last[np.sort(np.unique(places[last], return_index=True)[1])]
            self._more_holders[places[last]] = 0
            block_ids, places = block_ids[last], places[last]
            group = group if isinstance(group, int) else group[last]
        if not len(block_ids):
            return
        self._free.clock += 1
        is_cached = self._cache(block_ids, places, group) if self._keeper is not None else False
        if is_cached is not True:
            self._give(block_ids, group, is_cached)
        self._free.let_go(block_ids, group, is_cached)
        for each, count in _per_group(group, len(block_ids)):
            self.num_held[each] -= count
            self.held_bytes -= count * self._page_bytes[each]

    def publish(
        self, owner: int | BlockIds, block_ids: BlockIds, indices: npt.NDArray[np.int32] | npt.NDArray[np.int64]
    ) -> None:
        """Let pages be found through an owner: they are cached when their last holder goes.

        Args:
            owner: Who it is, or who of each.
            block_ids: The pages.
            indices: What the owner knows each by.
        """
        places = self._places(block_ids)
        self._owner[places] = owner
        self._index[places] = indices

    def owners(self, block_ids: BlockIds) -> npt.NDArray[np.int32]:
        """Return who published each page; -1 for nobody."""
        return self._owner[self._places(block_ids)]

    def is_published(self, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Return whether each page has an owner."""
        if self._keeper is None:
            return np.zeros(len(block_ids), dtype=np.bool_)
        has_owner: npt.NDArray[np.bool_] = self._owner[self._places(block_ids)] != _NOBODY
        return has_owner

    def resize(self, plan: KVCachePlan, reserve_slabs: int) -> bool:
        """Have more or fewer slabs. Of those that go, the last ones, cached pages are given up.

        Args:
            plan: The cut of the pool, the same but for the number of slabs.
            reserve_slabs: As for a new pool.

        Returns:
            False, and nothing changed, if somebody holds a page of a slab that would go.
        """
        end = plan.total_bytes // plan.block_id_bytes
        pages, free = self.pages(), self.free_pages()
        lost = pages[pages >= end]
        cached = self._more_holders[self._places(lost)] < 0
        if np.count_nonzero(cached) + np.count_nonzero(free >= end) < len(lost):
            return False
        for stamp, block_ids, group in list(self._cached.entries()) if cached.any() else ():
            goes = (block_ids >= end) & self._is_current(stamp, block_ids)
            if goes.any():
                self.evict(group if isinstance(group, int) else group[goes], block_ids[goes])
        # Entries of pages that are gone are stale: what is known of pages stays as long as it was.
        num_new = end // self._divisor + 1 - len(self._more_holders)
        if num_new > 0:
            self._more_holders = np.concatenate([self._more_holders, np.zeros(num_new, dtype=np.int32)])
            if self._keeper is not None:
                self._owner = np.concatenate([self._owner, np.full(num_new, _NOBODY, dtype=np.int32)])
                self._index = np.concatenate([self._index, np.zeros(num_new, dtype=np.int32)])
                self._stamp = np.concatenate([self._stamp, np.zeros(num_new, dtype=np.int64)])
        self._free.resize(plan, reserve_slabs)
        return True

    # --- giving up cached pages ---------------------------------------------------------------------------------------

    def drop(self, group: int, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Give up the cached ones of some pages without telling their keeper, and return which these are.

        Args:
            group: Their group.
            block_ids: Published pages, and 0 for none.
        """
        places = self._places(block_ids)
        is_cached: npt.NDArray[np.bool_] = (self._more_holders[places] < 0) & (block_ids != 0)
        self._owner[places[is_cached]] = _NOBODY
        self._end(group, block_ids[is_cached])
        return is_cached

    def evict(self, group: int | Groups, block_ids: BlockIds) -> None:
        """Give up cached pages, and tell their keeper."""
        assert self._keeper is not None
        places = self._places(block_ids)
        owners, indices = self._owner[places], self._index[places]
        self._owner[places] = _NOBODY
        self._end(group, block_ids)
        if not isinstance(group, int):
            for each in np.unique(group).tolist():
                self._tell_keeper(each, owners[group == each], indices[group == each])
        else:
            self._tell_keeper(group, owners, indices)

    def _tell_keeper(self, group: int, owners: BlockIds, indices: npt.NDArray[np.int32]) -> None:
        assert self._keeper is not None
        first = int(owners[0])
        if np.count_nonzero(owners == first) == len(owners):
            self._keeper.lost(first, group, indices)
        else:
            for owner in np.unique(owners).tolist():
                self._keeper.lost(owner, group, indices[owners == owner])

    def forget(self) -> None:
        """Give up every cached page and let held ones be found no more, without telling anybody."""
        self._owner[...] = _NOBODY
        for stamp, block_ids, group in self._cached.entries():
            is_current = self._is_current(stamp, block_ids)
            self._end(group if isinstance(group, int) else group[is_current], block_ids[is_current])
        self._cached.clear()

    def oldest(self, group: int) -> int | None:
        """Return when a group's longest unused cached page was let go of; None if it has none."""
        queue = self._cached.queue(group)
        while queue:
            stamp, block_ids = queue[0]
            if self._is_current(stamp, block_ids).any():
                return stamp
            queue.popleft()
            self._cached.num_entries -= len(block_ids)
        return None

    def evict_oldest(self, group: int, num_pages: int) -> None:
        """Give up as many of a group's cached pages, or all if it has fewer."""
        queue = self._cached.queue(group)
        while num_pages > 0 and queue:
            stamp, block_ids = queue.popleft()
            self._cached.num_entries -= len(block_ids)
            current = block_ids[self._is_current(stamp, block_ids)]
            if len(current) > num_pages:
                queue.appendleft((stamp, current[num_pages:]))
                self._cached.num_entries += len(current) - num_pages
                current = current[:num_pages]
            if len(current):
                self.evict(group, current)
                num_pages -= len(current)

    def evict_oldest_of_any(self, num_pages: int, uncut: int) -> None:
        """Give up as many cached pages, of whatever group, or all if there are fewer; short runs are not cut."""
        queue = self._cached.unsorted
        while num_pages > 0 and queue:
            stamp, block_ids, group = queue.popleft()
            self._cached.num_entries -= len(block_ids)
            is_current = self._is_current(stamp, block_ids)
            if np.count_nonzero(is_current) < len(block_ids):
                block_ids = block_ids[is_current]
                group = group if isinstance(group, int) else group[is_current]
            if len(block_ids) > max(num_pages, uncut):
                rest = group if isinstance(group, int) else group[num_pages:]
                queue.appendleft((stamp, block_ids[num_pages:], rest))
                self._cached.num_entries += len(block_ids) - num_pages
                block_ids = block_ids[:num_pages]
                group = group if isinstance(group, int) else group[:num_pages]
            if len(block_ids):
                num_pages -= len(block_ids)
                self.evict(group, block_ids)

    def evict_among(self, group: int, block_ids: BlockIds, num_pages: int) -> None:
        """Give up the cached ones of some pages, the longest unused first, until ``num_pages`` are."""
        places = self._places(block_ids)
        cached = block_ids[self._more_holders[places] < 0]
        order = np.argsort(self._stamp[self._places(cached)], kind="stable")[:num_pages]
        self.evict(group, cached[order])

    # --- inside -------------------------------------------------------------------------------------------------------

    def _places(self, block_ids: BlockIds) -> Places:
        # NumPy takes such an index several times as fast as a shorter one.
        places = block_ids.astype(np.intp)
        return places if self._divisor == 1 else places // self._divisor

    def _is_current(self, stamp: int, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        places = self._places(block_ids)
        current: npt.NDArray[np.bool_] = (self._more_holders[places] < 0) & (self._stamp[places] == stamp)
        return current

    def _cache(self, block_ids: BlockIds, places: Places, group: int | Groups) -> npt.NDArray[np.bool_] | bool:
        """Keep the published ones of pages that were let go of; return which these are."""
        is_published = self._owner[places] >= 0
        is_cached: npt.NDArray[np.bool_] | bool = True
        if np.count_nonzero(is_published) < len(block_ids):
            is_cached = is_published
            block_ids, places = block_ids[is_cached], places[is_cached]
            group = group if isinstance(group, int) else group[is_cached]
            if not len(block_ids):
                return False
        self._more_holders[places] = -1
        self._stamp[places] = self._free.clock
        self._cached.add(self._free.clock, block_ids, group)
        if self._cached.num_entries > 2 * sum(self.num_cached) + _MAX_STALE:
            self._cached.keep(self._is_current)
        for each, count in _per_group(group, len(block_ids)):
            self.num_cached[each] += count
        return is_cached

    def _give(self, block_ids: BlockIds, group: int | Groups, is_cached: npt.NDArray[np.bool_] | bool) -> None:
        if is_cached is not False:
            block_ids = block_ids[~is_cached]
            group = group if isinstance(group, int) else group[~is_cached]
        self._give_each(block_ids, group)

    def _give_each(self, block_ids: BlockIds, group: int | Groups) -> None:
        if isinstance(group, int):
            self._give_back(group, block_ids)
        else:
            for each in np.unique(group).tolist():
                self._give_back(each, block_ids[group == each])

    def _give_back(self, group: int, block_ids: BlockIds) -> None:
        self._free.give(group, block_ids)
        if self.on_pages_freed is not None:
            self.on_pages_freed(group, block_ids.tolist())

    def _end(self, group: int | Groups, block_ids: BlockIds) -> None:
        """Give up the content of cached pages."""
        if not len(block_ids):
            return
        self._more_holders[self._places(block_ids)] = 0
        for each, count in _per_group(group, len(block_ids)):
            self.num_cached[each] -= count
        self.num_evictions += len(block_ids)
        if self.on_removed is not None:
            self.on_removed(block_ids)
        self._free.uncache(block_ids)
        self._give_each(block_ids, group)

    def _count_held(self, num_blocks: Sequence[int]) -> None:
        for group, count in enumerate(num_blocks):
            if count:
                self.num_held[group] = num_held = self.num_held[group] + count
                self.held_bytes += count * self._page_bytes[group]
                if num_held > self.peak_held[group]:
                    self.peak_held[group] = num_held
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)


def _per_group(group: int | Groups, num_pages: int) -> Iterable[tuple[int, int]]:
    """Return how many pages are of each group: all of the one, or as an array says."""
    return ((group, num_pages),) if isinstance(group, int) else enumerate(np.bincount(group).tolist())
