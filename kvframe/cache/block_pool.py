"""The block pool: who owns which page, what is kept for those who may come back, and what is given up for others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvframe.cache.due import PagesByDue, SlabsByDue
from kvframe.cache.eviction import CachedPages, LeastRecentlyUsed
from kvframe.cache.free_list import BlockIds, FreeList, FreePages, Groups
from kvframe.cache.owners import NO_OWNER as NO_OWNER
from kvframe.cache.owners import Indices as Indices
from kvframe.cache.owners import Owners, Places
from kvframe.cache.page_counts import PageCounts
from kvframe.cache.slabs import Slabs
from kvframe.eviction import LRU, EvictionPolicy
from kvframe.foreign import safe_text
from kvframe.plan import KVCachePlan

_log = logging.getLogger("kvframe")
_MAX_STALE = 1 << 16
"""Stale entries that the queues of cached pages may have besides as many as there are cached pages; and stamps that
they may remember as thinned."""


class Keeper(Protocol):
    """Who has pages in the pool found by others: told of each page whose content is given up."""

    def lost_all(self, owner: int, group: int, num_pages: int) -> bool:
        """Record that an owner lost so many pages, if these are all that it has.

        Args:
            owner: Who published them.
            group: The group of one of them.
            num_pages: How many they are, of all groups.

        Returns:
            Whether it is so; else nothing changed, and ``lost`` follows for each group.
        """

    def lost(self, owner: int, group: int, indices: Indices) -> None:
        """Record that an owner's pages at these indices were evicted."""


class BlockPool:
    """Pages, shared by counts of their holders.

    Invariant: every page is exactly one of *free*, *held* (by at least one holder) or *cached* (published by an owner,
    held by nobody).

    Attributes:
        counts: How many pages are held and cached.
        num_evictions: Cached pages whose content was given up so far.
        on_pages_freed: Called with a group and block ids whenever the content of pages ends; None for nobody.
        on_removed: Called with the block ids of pages that were cached and are given up; None for nobody.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        *,
        reserve_slabs: int = 0,
        keeper: Keeper | None = None,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        """Start with every page free.

        Args:
            plan: The cut of the pool.
            reserve_slabs: Idle slabs that an allocation leaves alone as long as evicting its own group's cached
                pages serves it too: so that a lone request always finds the slabs that the plan promised it.
            keeper: Who publishes pages; None if nobody does.
            eviction: Who says which cached pages are given up first; the longest unused unless given.

        Raises:
            PluginError: The policy does not answer as it has to.
        """
        num_groups = len(plan.groups)
        page_ids = [group.page_bytes // plan.block_id_bytes for group in plan.groups]
        # Pages are apart by the smallest page at least, so that a quotient tells them apart.
        self._divisor = min(page_ids, default=1)
        num_places = plan.total_bytes // plan.block_id_bytes // self._divisor + 1 if plan.groups else 1
        page_bytes = [group.page_bytes for group in plan.groups]
        self.counts = PageCounts(page_bytes)
        self._by_due: PagesByDue | None = None
        if eviction is not None and eviction != LRU:
            self._by_due = PagesByDue(eviction, page_bytes, plan.total_bytes, num_places, self._places)
        self._cached: CachedPages = LeastRecentlyUsed(num_groups) if self._by_due is None else self._by_due
        self._free: FreePages
        if FreeList.fit(plan):
            self._free = FreeList(plan)
        elif self._by_due is None:
            self._free = Slabs(plan, reserve_slabs)
        else:
            self._free = SlabsByDue(plan, reserve_slabs, self._by_due)
        self._keeper = keeper
        # Of a cached page, when it was let go of; of a held one, minus the holders beyond the first. Zero for a free
        # one too: taking and giving need not write it.
        self._state = np.zeros(num_places, dtype=np.int64)
        self._num_more_holders = 0
        self._owners = Owners(num_places if keeper is not None else 1, self._places)
        self.num_evictions = 0
        self.on_pages_freed: Callable[[int, list[int]], None] | None = None
        self.on_removed: Callable[[BlockIds], None] | None = None

    # --- counts -------------------------------------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        """Cached blocks of all groups."""
        return self.counts.num_cached

    @property
    def blocks_held(self) -> list[int]:
        """Per group, the blocks that requests and pins reference."""
        return self.counts.held

    @property
    def peak_blocks_held(self) -> list[int]:
        """Per group, the most of them at once."""
        return self.counts.peak_held

    @property
    def blocks_cached(self) -> list[int]:
        """Per group, the cached blocks."""
        return self.counts.cached

    @property
    def held_bytes(self) -> int:
        """Bytes of referenced blocks."""
        return self.counts.held_bytes

    @property
    def peak_held_bytes(self) -> int:
        """The most of them at once."""
        return self.counts.peak_held_bytes

    # --- what is there ------------------------------------------------------------------------------------------------

    @property
    def num_idle_slabs(self) -> int:
        """Slabs that hold no page that somebody needs."""
        return self._free.num_idle_slabs

    @property
    def eviction(self) -> EvictionPolicy:
        """Who says which cached pages are given up first."""
        return LRU if self._by_due is None or self._by_due.policy is None else self._by_due.policy

    def is_cached(self, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Return of each block whether it is published and not referenced."""
        is_cached: npt.NDArray[np.bool_] = self._state[self._places(block_ids)] > 0
        return is_cached

    def reference_counts(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        """Return how many references each block has: 0 if it is cached; a free one counts as 1."""
        states = self._state[self._places(block_ids)]
        return np.where(states > 0, 0, 1 - states)

    def all_blocks(self) -> BlockIds:
        """Return all pages that the pool is cut into."""
        return self._free.cut_pages()

    def free_blocks(self) -> BlockIds:
        """Return those of them that are free."""
        return self._free.free_pages()

    def count_idle_slabs(self, held: BlockIds) -> int:
        """Return how many slabs have none of the pages that are held."""
        return self._free.count_idle_slabs(held)

    # --- what happens to pages ----------------------------------------------------------------------------------------

    @property
    def is_nearly_full(self) -> bool:
        """Whether so few pages are free that what is cached has to be given up soon."""
        return self._free.is_short

    def can_allocate(self, num_blocks: Sequence[int]) -> bool:
        """Return whether ``allocate_blocks`` would find as many pages for each group."""
        return self._free.has_room(num_blocks)

    def allocate_blocks(self, num_blocks: Sequence[int]) -> BlockIds | None:
        """Take pages for each group, evicting cached ones where needed.

        Args:
            num_blocks: Pages wanted, per group.

        Returns:
            Block ids, one group after the other, each held once; None, and nothing changed, if there are not enough.
        """
        taken = self._free.take(num_blocks, self)
        if taken is not None:
            self.counts.hold(num_blocks)
        return taken

    def add_references(self, group: int, block_ids: BlockIds) -> None:
        """Count one more holder of each page, held or cached."""
        places = self._places(block_ids)
        before = self._state[places]
        was_cached = before > 0
        num_woken = int(np.count_nonzero(was_cached))
        self._num_more_holders += len(block_ids) - num_woken
        if not num_woken:
            self._state[places] = before - 1
            return
        self._state[places] = np.where(was_cached, 0, before - 1)
        self._note_taken(before[was_cached])
        self._free.hold(group, block_ids[was_cached])
        self.counts.wake(group, num_woken)

    def release_blocks(self, block_ids: BlockIds, group: int | Groups) -> None:
        """Count one holder of each page less. Of pages with none, the published ones are cached and others are free.

        Args:
            block_ids: The pages, in the order in which they shall be given up; one as often as it has holders that let
                go of it.
            group: Their group, or the group of each.
        """
        places = None
        if self._num_more_holders:
            places = self._places(block_ids)
            if np.count_nonzero(self._state[places]):
                is_last = self._release_shared(places)
                block_ids, places = block_ids[is_last], places[is_last]
                group = group if isinstance(group, int) else group[is_last]
        if not len(block_ids):
            return
        is_published: npt.NDArray[np.bool_] | bool = False
        if self._keeper is not None:
            places = self._places(block_ids) if places is None else places
            owners = self._owners.of(places)
            num_published = np.count_nonzero(owners)
            if num_published:
                is_published = True if num_published == len(block_ids) else owners != NO_OWNER
        self._let_go(block_ids, places, group, is_published)

    def publish_and_release(
        self, owner: int | BlockIds, block_ids: BlockIds, indices: Indices, group: int | Groups
    ) -> None:
        """Publish pages and count one holder of each less.

        Args:
            owner: Who it is, or who of each.
            block_ids: Pages that nobody published yet, in the order in which they shall be given up; kept.
            indices: What the owner knows each by; kept.
            group: Their group, or the group of each.
        """
        places = self._places(block_ids)
        if isinstance(owner, int) and not self._num_more_holders:
            self._let_go(block_ids, places, group, True)
            self._owners.retire(self._free.clock, owner, block_ids, indices)
            return
        self._owners.publish(owner, places, indices)
        if self._num_more_holders:
            self.release_blocks(block_ids, group)
        else:
            self._let_go(block_ids, places, group, True)

    def _release_shared(self, places: Places) -> npt.NDArray[np.intp]:
        """Count a holder less of pages that may have several, or come once for each; return which have none left."""
        np.add.at(self._state, places, 1)
        # Of a page's last holder the count is one too high now.
        last = np.flatnonzero(self._state[places] > 0)
        last = last[np.sort(np.unique(places[last], return_index=True)[1])]
        self._state[places[last]] = 0
        self._num_more_holders -= len(places) - len(last)
        return last

    def _let_go(
        self,
        block_ids: BlockIds,
        places: Places | None,
        group: int | Groups,
        is_published: npt.NDArray[np.bool_] | bool,
    ) -> None:
        """Cache or free pages whose last holder is gone; those that are published have places, in whatever order."""
        self._free.clock += 1
        if is_published is not False:
            assert places is not None
            if is_published is True:
                self._cache(block_ids, places, group)
            else:
                is_free = ~is_published
                of_cached = group if isinstance(group, int) else group[is_published]
                self._cache(block_ids[is_published], places[is_published], of_cached)
                self._give(block_ids[is_free], group if isinstance(group, int) else group[is_free])
        else:
            self._give(block_ids, group)
        self._free.let_go(block_ids, is_published)
        self.counts.let_go(group, len(block_ids), is_published)

    def publish_blocks(self, owner: int | BlockIds, block_ids: BlockIds, indices: Indices) -> None:
        """Let pages that somebody holds be found through an owner: they are cached when their last holder goes.

        Args:
            owner: Who it is, or who of each.
            block_ids: The pages.
            indices: What the owner knows each by.
        """
        self._owners.publish(owner, self._places(block_ids), indices)

    def hand_over(self, owner: int, block_ids: BlockIds, indices: Indices) -> None:
        """Let published pages, held or cached, be found through another owner, which knows each by an index."""
        places = self._places(block_ids)
        self._owners.note(self._state[places].tolist())
        self._owners.publish(owner, places, indices)

    def owners_of(self, block_ids: BlockIds) -> npt.NDArray[np.int32]:
        """Return who published each page; ``NO_OWNER`` for nobody."""
        if self._keeper is None:
            return np.full(len(block_ids), NO_OWNER, dtype=np.int32)
        places = self._places(block_ids)
        return self._owners.of_all(places, self._state[places])

    def resize(self, plan: KVCachePlan, reserve_slabs: int) -> bool:
        """Have more or fewer slabs. Of those that go, the last ones, cached pages are given up.

        Args:
            plan: The cut of the pool, the same but for the number of slabs.
            reserve_slabs: As for a new pool.

        Returns:
            False, and nothing changed, if somebody holds a page of a slab that would go.
        """
        end = plan.total_bytes // plan.block_id_bytes
        pages, free = self.all_blocks(), self.free_blocks()
        lost = pages[pages >= end]
        cached = self._state[self._places(lost)] > 0
        if np.count_nonzero(cached) + np.count_nonzero(free >= end) < len(lost):
            return False
        for stamp, block_ids, group in list(self._cached.entries()) if cached.any() else ():
            goes = (block_ids >= end) & self._is_current(stamp, block_ids)
            if goes.any():
                self.evict_blocks(group if isinstance(group, int) else group[goes], block_ids[goes])
        # Entries of pages that are gone are stale: what is known of pages stays as long as it was.
        num_new = end // self._divisor + 1 - len(self._state)
        if num_new > 0:
            self._state = np.concatenate([self._state, np.zeros(num_new, dtype=np.int64)])
            if self._keeper is not None:
                self._owners.grow(num_new)
            if self._by_due is not None:
                self._by_due.grow(num_new)
        if self._by_due is not None:
            self._by_due.capacity = plan.total_bytes
        self._free.resize(plan, reserve_slabs)
        return True

    def count_uses(self, block_ids: BlockIds) -> None:
        """Take note that a request that runs found these pages; 0 for none."""
        if self._by_due is not None:
            self._by_due.count_uses(block_ids)

    # --- giving up cached pages ---------------------------------------------------------------------------------------

    def discard_cached(self, group: int, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Give up the cached ones of some pages without telling their keeper, and return which these are.

        Args:
            group: Their group.
            block_ids: Published pages, and 0 for none.
        """
        places = self._places(block_ids)
        stamps = self._state[places]
        is_cached: npt.NDArray[np.bool_] = (stamps > 0) & (block_ids != 0)
        if np.count_nonzero(is_cached):
            places = places[is_cached]
            self._note_taken(stamps[is_cached])
            self._owners.clear(places)
            self._end(group, block_ids[is_cached], places)
        return is_cached

    def evict_blocks(self, group: int | Groups, block_ids: BlockIds) -> None:
        """Give up cached pages, and tell their keeper."""
        self._note_taken(self._state[self._places(block_ids)])
        self._evict(group, block_ids)

    def _evict(self, group: int | Groups, block_ids: BlockIds) -> None:
        """Give up cached pages that are in no queue any more."""
        assert self._keeper is not None
        places = self._places(block_ids)
        owners, indices = self._owners.take(places, self._state.item(places.item(0)))
        self._end(group, block_ids, places)
        if isinstance(owners, int):
            any_group = group if isinstance(group, int) else int(group[0])
            if self._keeper.lost_all(owners, any_group, len(block_ids)):
                return
        for each in (group,) if isinstance(group, int) else np.unique(group).tolist():
            is_of_group = slice(None) if isinstance(group, int) else group == each
            of_group = owners if isinstance(owners, int) else owners[is_of_group]
            self._tell_keeper(each, of_group, indices[is_of_group])

    def _tell_keeper(self, group: int, owners: int | BlockIds, indices: Indices) -> None:
        assert self._keeper is not None
        if isinstance(owners, int):
            self._keeper.lost(owners, group, indices)
            return
        for owner in np.unique(owners).tolist():
            self._keeper.lost(owner, group, indices[owners == owner])

    def unpublish_all(self) -> None:
        """Give up every cached page and let held ones be found no more, without telling anybody."""
        self._owners.forget()
        for stamp, block_ids, group in self._cached.entries():
            block_ids, group = self._current(stamp, block_ids, group)
            self._end(group, block_ids, self._places(block_ids))
        self._cached.clear()

    def first_priority(self, group: int) -> int | None:
        """Return when a group's first cached page is due; None if it has none."""
        return self._cached.first(group, self._current)

    def evict_group(self, group: int, num_pages: int) -> None:
        """Give up as many of a group's cached pages, or all if it has fewer."""
        while num_pages > 0:
            block_ids = self._cached.take(group, num_pages, self._current)
            if block_ids is None:
                return
            if len(block_ids):
                num_pages -= len(block_ids)
                self._evict(group, block_ids)

    def evict_any(self, num_pages: int, uncut: int) -> None:
        """Give up as many cached pages, of whatever group, or all if there are fewer; short runs are not cut."""
        end = self.num_evictions + num_pages
        while self.num_evictions < end:
            taken = self._cached.take_any(end - self.num_evictions, uncut, self._current)
            if taken is None:
                return
            block_ids, group = taken
            if len(block_ids):
                self._evict(group, block_ids)

    def evict_among(self, group: int, block_ids: BlockIds, num_pages: int) -> None:
        """Give up the cached ones of some pages, the first due first, until ``num_pages`` are."""
        stamps = self._state[self._places(block_ids)]
        cached = np.flatnonzero(stamps > 0)
        dues = stamps[cached] if self._by_due is None else self._by_due.dues(block_ids[cached])
        first = cached[np.argsort(dues, kind="stable")[:num_pages]]
        self.evict_blocks(group, block_ids[first])

    # --- inside -------------------------------------------------------------------------------------------------------

    def _places(self, block_ids: BlockIds) -> Places:
        # NumPy takes such an index several times as fast as a shorter one.
        places = block_ids.astype(np.intp)
        return places if self._divisor == 1 else places // self._divisor

    def _current(self, stamp: int, block_ids: BlockIds, group: int | Groups) -> tuple[BlockIds, int | Groups]:
        """Return those of pages that were let go of together that are still cached since then, and their groups."""
        if stamp in self._cached.thinned:
            is_current = self._is_current(stamp, block_ids)
            if np.count_nonzero(is_current) < len(block_ids):
                return block_ids[is_current], group if isinstance(group, int) else group[is_current]
        return block_ids, group

    def _is_current(self, stamp: int, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        current: npt.NDArray[np.bool_] = self._state[self._places(block_ids)] == stamp
        return current

    def _note_taken(self, stamps: npt.NDArray[np.int64]) -> None:
        """Take note that pages that were let go of at these times are not cached any more."""
        self._owners.note(self._cached.note_taken(stamps))

    def _cache(self, block_ids: BlockIds, places: Places, group: int | Groups) -> None:
        """Keep published pages that were let go of."""
        stamp = self._free.clock
        self._state[places] = stamp
        self._cached.add(stamp, block_ids, group)
        num_thinned, most = len(self._cached.thinned), 2 * self.counts.num_cached + _MAX_STALE
        if num_thinned and (num_thinned > _MAX_STALE or self._cached.num_entries > most):
            self._cached.keep(self._is_current)

    def _give(self, block_ids: BlockIds, group: int | Groups) -> None:
        self._free.give(block_ids)
        if self._by_due is not None:
            self._by_due.end(block_ids)
        if self.on_pages_freed is not None:
            self._tell_freed(self.on_pages_freed, block_ids, group)

    def _tell_freed(self, listener: Callable[[int, list[int]], None], block_ids: BlockIds, group: int | Groups) -> None:
        """Tell a listener; one that raises is logged, and told nothing any more."""
        try:
            for each in (group,) if isinstance(group, int) else np.unique(group).tolist():
                listener(each, (block_ids if isinstance(group, int) else block_ids[group == each]).tolist())
        except Exception as error:
            _log.error("on_pages_freed raises %s; it is told nothing any more", safe_text(error))
            self.on_pages_freed = None

    def _end(self, group: int | Groups, block_ids: BlockIds, places: Places) -> None:
        """Give up the content of cached pages."""
        self._state[places] = 0
        self.counts.end(group, len(block_ids))
        self.num_evictions += len(block_ids)
        if self.on_removed is not None:
            self.on_removed(block_ids)
        self._free.uncache(block_ids)
        self._give(block_ids, group)
