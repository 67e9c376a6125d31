"""The block pool: reference counts of blocks, which of them are published, and which are evicted to allocate others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.eviction import EvictionQueue, PolicyPriorities, Run, all_equal, equal_runs, joined_runs, of_groups
from kvframe.cache.free_list import BlockIds, FreeList, Groups
from kvframe.cache.slabs import Slabs
from kvframe.contract.eviction import LRU, EvictionPolicy
from kvframe.contract.foreign import safe_text
from kvframe.planning.plan import KVCachePlan

_log = logging.getLogger("kvframe")
Indices = npt.NDArray[np.int32] | npt.NDArray[np.int64]
NO_OWNER = 0
"""The owner of a block that is not published."""
_Places = npt.NDArray[np.intp]
_MAX_STALE = 1 << 16
"""Stale entries that the eviction queue may have besides as many entries as there are cached blocks."""


class BlockPool:
    """Blocks, shared by reference counts. A published block has an *owner*, a number of the index that finds it.

    Invariant: every block is exactly one of *free*, *held* (it has references) or *cached* (published, no references).

    Attributes:
        num_cached: Cached blocks of all groups.
        held_bytes: Bytes of held blocks.
        peak_held_bytes: The most of them at once.
        num_evictions: Cached blocks that were evicted so far.
        on_pages_freed: Called with a group and block ids when the content of blocks ends; or None.
        on_removed: Called with the ids of cached blocks that are evicted; or None.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        *,
        reserve_slabs: int = 0,
        on_evicted: Callable[[int, int | Groups, Indices], None] | None = None,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        """Start with every block free.

        Args:
            plan: The cut of the pool.
            reserve_slabs: Idle slabs that an allocation leaves alone as long as evicting its own group's cached blocks
                serves it too: so that a lone request always finds the slabs that the plan promised it.
            on_evicted: Called with an owner, and the groups and indices of its evicted blocks; None if no block
                is ever published.
            eviction: Which cached blocks are evicted first; the least recently used ones if None.

        Raises:
            PluginError: The policy does not answer as it has to.
        """
        self._page_bytes = [group.page_bytes for group in plan.groups]
        block_ids = [num_bytes // plan.block_id_bytes for num_bytes in self._page_bytes]
        # Blocks are apart by the smallest block at least, so that a quotient tells them apart.
        self._divisor = min(block_ids, default=1)
        num_places = self._num_places(plan)
        policy = None
        if eviction is not None and eviction != LRU:
            policy = PolicyPriorities(eviction, self._page_bytes, plan.total_bytes, num_places, self._places)
        is_shared = FreeList.fits(plan)
        self._queue = EvictionQueue(len(plan.groups), policy, is_shared=is_shared)
        self._free: FreeList | Slabs
        if is_shared:
            self._free = FreeList(plan)
        else:
            self._free = slabs = Slabs(plan, reserve_slabs, self._priorities if policy else None)
            self._queue.on_reorder = slabs.sort_idle
        self._on_evicted = on_evicted
        # Of a cached block, the stamp of its release; of a held one, minus the references beyond the first. Zero for a
        # free one too: allocating and freeing need not write it.
        self._state = np.zeros(num_places, dtype=np.int64)
        self._owner, self._index = np.zeros((2, num_places if on_evicted else 1), dtype=np.int32)
        self._stamp = self._num_more_references = 0
        self._held, self._peak_held = [0] * len(plan.groups), [0] * len(plan.groups)
        self.held_bytes = self.peak_held_bytes = self.num_cached = self.num_evictions = 0
        self.on_pages_freed: Callable[[int, list[int]], None] | None = None
        self.on_removed: Callable[[BlockIds], None] | None = None

    # --- what is there ------------------------------------------------------------------------------------------------

    @property
    def num_idle_slabs(self) -> int:
        """Slabs without held blocks."""
        return self._free.num_idle_slabs

    @property
    def is_nearly_full(self) -> bool:
        """Whether so few blocks are free that cached ones will be evicted soon."""
        return self._free.is_nearly_full

    @property
    def eviction(self) -> EvictionPolicy:
        """Which cached blocks are evicted first."""
        return LRU if self._queue.policy is None else self._queue.policy.policy

    @property
    def blocks_held(self) -> list[int]:
        """Per group, the held blocks."""
        return [*self._held]

    @property
    def peak_blocks_held(self) -> list[int]:
        """Per group, the most held blocks at once."""
        return [*self._peak_held]

    def count_cached(self) -> list[int]:
        """Return the cached blocks of each group, in time that grows with the pool."""
        counts = np.zeros(len(self._held), dtype=np.int64)
        for stamp, block_ids, groups in self._queue.all_entries():
            is_cached = self._is_current(stamp, block_ids)
            np.add.at(counts, np.broadcast_to(groups, len(block_ids))[is_cached], 1)
        found: list[int] = counts.tolist()
        return found

    def is_cached(self, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Return of each block whether it is cached."""
        is_cached: npt.NDArray[np.bool_] = self._state[self._places(block_ids)] > 0
        return is_cached

    def reference_counts(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        """Return how many references each block has: 0 if it is cached; a free one counts as 1."""
        states = self._state[self._places(block_ids)]
        return np.where(states > 0, 0, 1 - states)

    def owners_of(self, block_ids: BlockIds) -> npt.NDArray[np.int32]:
        """Return the owner of each block; ``NO_OWNER`` of those that are not published."""
        if self._on_evicted is None:
            return np.full(len(block_ids), NO_OWNER, dtype=np.int32)
        return self._owner[self._places(block_ids)]

    def all_blocks(self) -> BlockIds:
        """Return all blocks that the pool is cut into."""
        return self._free.all_blocks()

    def free_blocks(self) -> BlockIds:
        """Return those of them that are free."""
        return self._free.free_blocks()

    def count_idle_slabs(self, held: BlockIds) -> int:
        """Return how many slabs have none of the held blocks."""
        return self._free.count_idle_slabs(held)

    # --- references ---------------------------------------------------------------------------------------------------

    def can_allocate(self, num_blocks: Sequence[int]) -> bool:
        """Return whether ``allocate_blocks`` would find as many blocks for each group."""
        return self._free.can_take(num_blocks)

    def allocate_blocks(self, num_blocks: Sequence[int]) -> BlockIds | None:
        """Allocate blocks of each group, evicting cached ones if too few are free.

        Args:
            num_blocks: Blocks wanted, per group.

        Returns:
            Block ids, one group after the other, each with one reference; None, and nothing changed, if there are not
            enough.
        """
        taken = self._free.take_free(num_blocks, self)
        if taken is not None:
            for group, count in enumerate(num_blocks):
                if count:
                    self._count_held(group, count)
        return taken

    def _count_held(self, group: int, count: int) -> None:
        """Count more blocks as held."""
        self._held[group] = num_held = self._held[group] + count
        if num_held > self._peak_held[group]:
            self._peak_held[group] = num_held
        self.held_bytes = num_bytes = self.held_bytes + count * self._page_bytes[group]
        if num_bytes > self.peak_held_bytes:
            self.peak_held_bytes = num_bytes

    def add_references(self, group: int, block_ids: BlockIds) -> None:
        """Add one reference to each block, held or cached."""
        places = self._places(block_ids)
        states = self._state[places]
        is_cached = states > 0
        num_cached = int(np.count_nonzero(is_cached))
        self._num_more_references += len(block_ids) - num_cached
        self._state[places] = np.where(is_cached, 0, states - 1)
        if num_cached:
            self.num_cached -= num_cached
            self._free.hold_cached(group, block_ids[is_cached])
            self._count_held(group, num_cached)

    def release_blocks(self, block_ids: BlockIds, groups: int | Groups) -> None:
        """Remove one reference of each block. Blocks without references are cached if they are published, else free.

        Args:
            block_ids: The blocks, the first to be evicted first; a block as often as references to it are removed.
            groups: Their group, or the group of each.
        """
        if self._num_more_references:
            places = self._places(block_ids)
            if np.count_nonzero(self._state[places]):
                is_last = self._remove_shared(places)
                block_ids, groups = block_ids[is_last], of_groups(groups, is_last)
        num_blocks = len(block_ids)
        if not num_blocks:
            return
        self._begin_release(groups, num_blocks)
        if self._on_evicted is not None:
            places = self._places(block_ids)
            owners = self._owner[places]
            num_published = np.count_nonzero(owners)
            if num_published == num_blocks:
                self._cache(block_ids, places, groups)
                return
            if num_published:
                is_published = owners != NO_OWNER
                self._cache(block_ids[is_published], places[is_published], of_groups(groups, is_published))
                block_ids, groups = block_ids[~is_published], of_groups(groups, ~is_published)
        self._free.free_held(block_ids, self._stamp)
        self._end_content(block_ids, groups)

    def publish_and_release(
        self, owner: int | BlockIds, block_ids: BlockIds, indices: Indices, groups: int | Groups
    ) -> None:
        """Publish blocks that are not published and remove one reference of each, without looking up their owners.

        Args:
            owner: The owner, or the owner of each.
            block_ids: The blocks, the first to be evicted first.
            indices: What the owner knows each by.
            groups: Their group, or the group of each.
        """
        places = self._places(block_ids)
        self._owner[places] = owner
        self._index[places] = indices
        if self._num_more_references:
            self.release_blocks(block_ids, groups)
            return
        self._begin_release(groups, len(block_ids))
        self._cache(block_ids, places, groups)

    def _begin_release(self, groups: int | Groups, num_blocks: int) -> None:
        """Count blocks as no longer held, at a new stamp."""
        self._stamp += 1
        counts = [(groups, num_blocks)] if isinstance(groups, int) else enumerate(np.bincount(groups).tolist())
        for group, count in counts:
            self._held[group] -= count
            self.held_bytes -= count * self._page_bytes[group]

    def _remove_shared(self, places: _Places) -> npt.NDArray[np.intp]:
        """Remove one reference of blocks that may have several; return where blocks without references are first."""
        np.add.at(self._state, places, 1)
        # For a block without references the sum is one too high now.
        last = np.flatnonzero(self._state[places] > 0)
        last = last[np.sort(np.unique(places[last], return_index=True)[1])]
        self._state[places[last]] = 0
        self._num_more_references -= len(places) - len(last)
        return last

    def _cache(self, block_ids: BlockIds, places: _Places, groups: int | Groups) -> None:
        """Cache published blocks without references."""
        self._state[places] = self._stamp
        self.num_cached += len(block_ids)
        self._queue.add_blocks(self._stamp, block_ids, groups)
        self._free.cache_held(block_ids, self._stamp)
        if self._queue.num_entries > 2 * self.num_cached + _MAX_STALE:
            self._queue.remove_stale(self._is_current)

    # --- publishing ---------------------------------------------------------------------------------------------------

    def publish_blocks(self, owner: int | BlockIds, block_ids: BlockIds, indices: Indices) -> None:
        """Let blocks be found through an owner from now on: when they are evicted, it is told.

        Args:
            owner: The owner, or the owner of each; ``NO_OWNER`` to unpublish held blocks.
            block_ids: Blocks that are held or cached.
            indices: What the owner knows each by.
        """
        places = self._places(block_ids)
        self._owner[places] = owner
        self._index[places] = indices

    def unpublish_all(self) -> None:
        """Evict every cached block and unpublish held ones, without telling their owners."""
        self._owner[...] = NO_OWNER
        for stamp, block_ids, groups in self._queue.all_entries():
            is_cached = self._is_current(stamp, block_ids)
            block_ids = block_ids[is_cached]
            self._end_cached(of_groups(groups, is_cached), block_ids, self._places(block_ids))
        self._queue.remove_all()
        if self._queue.policy is not None:
            self._queue.policy.forget_blocks(slice(None))

    def count_uses(self, block_ids: BlockIds) -> None:
        """Tell the eviction policy that a request found blocks; 0 for none."""
        if self._queue.policy is not None:
            self._queue.policy.count_uses(block_ids)

    # --- eviction -----------------------------------------------------------------------------------------------------

    def evict_blocks(self, groups: int | Groups, block_ids: BlockIds) -> None:
        """Evict cached blocks, and tell each owner once."""
        assert self._on_evicted is not None
        places = self._places(block_ids)
        owners, indices = self._owner[places], self._index[places]
        self._end_cached(groups, block_ids, places)
        if all_equal(owners):
            self._on_evicted(owners.item(0), groups, indices)
            return
        order = np.argsort(owners, kind="stable")
        owners, indices, groups = owners[order], indices[order], of_groups(groups, order)
        starts = [0, *(np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist()]
        for owner, start, stop in zip(owners[starts].tolist(), starts, [*starts[1:], len(owners)], strict=True):
            self._on_evicted(owner, of_groups(groups, slice(start, stop)), indices[start:stop])

    def discard_cached(self, group: int, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Evict the cached ones of some blocks without telling their owner, and return which these are.

        Args:
            group: Their group.
            block_ids: Published blocks, and 0 for none.
        """
        places = self._places(block_ids)
        is_cached: npt.NDArray[np.bool_] = (self._state[places] > 0) & (block_ids != 0)
        if np.count_nonzero(is_cached):
            self._end_cached(group, block_ids[is_cached], places[is_cached])
        return is_cached

    def first_priority(self, group: int) -> int | None:
        """Return the priority of the block of a group that is evicted first; None if the group has no cached block."""
        return self._queue.first_priority(group, self._is_current)

    def evict_first(self, group: int, num_blocks: int, whole_run: int = 0) -> None:
        """Evict cached blocks in the order of their priority, until ``num_blocks`` are evicted or none is left.

        Args:
            group: Their group; of no meaning if any block serves any group.
            num_blocks: The blocks wanted.
            whole_run: Blocks that were released together are evicted together if they are no more than these.
        """
        while num_blocks > 0:
            runs = self._queue.pop_runs(group, num_blocks, whole_run)
            if not runs:
                return
            block_ids, groups = joined_runs(runs)
            stamps = self._state[self._places(block_ids)]
            is_current = stamps == (runs[0][0] if len(runs) == 1 else np.repeat(*_stamps_of(runs)))
            num_current = int(np.count_nonzero(is_current))
            if num_current < len(block_ids):
                block_ids, groups = block_ids[is_current], of_groups(groups, is_current)
            if num_current:
                self.evict_blocks(groups, block_ids)
                num_blocks -= num_current
            else:
                # That removes the stale entries that follow, many at once.
                self.first_priority(group)

    def evict_among(self, group: int, block_ids: BlockIds, num_blocks: int) -> None:
        """Evict the cached ones of some blocks in the order of their priority, until ``num_blocks`` are evicted."""
        block_ids = block_ids[self.is_cached(block_ids)]
        self.evict_blocks(group, block_ids[np.argsort(self._priorities(block_ids), kind="stable")[:num_blocks]])

    def _end_cached(self, groups: int | Groups, block_ids: BlockIds, places: _Places) -> None:
        """Free cached blocks."""
        self._state[places] = 0
        self._owner[places] = NO_OWNER
        self.num_cached -= len(block_ids)
        self.num_evictions += len(block_ids)
        if self.on_removed is not None:
            self.on_removed(block_ids)
        self._free.free_cached(block_ids)
        self._end_content(block_ids, groups)

    def _end_content(self, block_ids: BlockIds, groups: int | Groups) -> None:
        """Tell the policy and the listener that the content of blocks ended. A listener that raises is removed."""
        if self._queue.policy is not None:
            self._queue.policy.forget_blocks(self._places(block_ids))
        if self.on_pages_freed is not None:
            try:
                for group, of_group in equal_runs(groups):
                    self.on_pages_freed(group, block_ids[of_group].tolist())
            except Exception as error:
                _log.error("on_pages_freed raises %s; it is told nothing any more", safe_text(error))
                self.on_pages_freed = None

    # --- size ---------------------------------------------------------------------------------------------------------

    def resize(self, plan: KVCachePlan, reserve_slabs: int) -> bool:
        """Have more or fewer slabs. Cached blocks of the removed slabs, the last ones, are evicted.

        Args:
            plan: The cut of the pool, the same but for the number of slabs.
            reserve_slabs: As for a new pool.

        Returns:
            False, and nothing changed, if a block of a slab to be removed is held.
        """
        end = plan.total_bytes // plan.block_id_bytes
        blocks, free = self.all_blocks(), self.free_blocks()
        lost = blocks[blocks >= end]
        num_lost_cached = np.count_nonzero(self.is_cached(lost))
        if num_lost_cached + np.count_nonzero(free >= end) < len(lost):
            return False
        for stamp, block_ids, groups in [*self._queue.all_entries()] if num_lost_cached else ():
            is_lost = (block_ids >= end) & self._is_current(stamp, block_ids)
            if is_lost.any():
                self.evict_blocks(of_groups(groups, is_lost), block_ids[is_lost])
        # Stale entries of removed blocks may be left in the queue: the arrays never shrink.
        num_places = self._num_places(plan)
        num_new = max(0, num_places - len(self._state))
        self._state = np.append(self._state, np.zeros(num_new, dtype=np.int64))
        if self._on_evicted is not None:
            self._owner, self._index = (np.append(of, np.zeros(num_new, of.dtype)) for of in (self._owner, self._index))
        if self._queue.policy is not None:
            self._queue.policy.resize_arrays(plan.total_bytes, num_places)
        self._free.resize(plan, reserve_slabs, self._stamp)
        return True

    # --- inside -------------------------------------------------------------------------------------------------------

    def _num_places(self, plan: KVCachePlan) -> int:
        return plan.total_bytes // plan.block_id_bytes // self._divisor + 1 if plan.groups else 1

    def _places(self, block_ids: BlockIds) -> _Places:
        """Return where arrays say something of blocks."""
        # NumPy takes such an index several times as fast as a shorter one.
        places = block_ids.astype(np.intp)
        return places if self._divisor == 1 else places // self._divisor

    def _is_current(self, stamp: int, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Return of each block whether it has been cached since its release at a stamp."""
        is_current: npt.NDArray[np.bool_] = self._state[self._places(block_ids)] == stamp
        return is_current

    def _priorities(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        """Return the eviction priority of cached blocks; a smaller number than any of theirs for others."""
        policy = self._queue.policy
        return self._state[self._places(block_ids)] if policy is None else policy.priorities_of(block_ids)


def _stamps_of(runs: Sequence[Run]) -> tuple[list[int], list[int]]:
    """Return the stamp of each run, and how many blocks it has."""
    return [stamp for stamp, _, _ in runs], [len(block_ids) for _, block_ids, _ in runs]
