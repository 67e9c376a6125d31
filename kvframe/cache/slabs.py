"""Slabs: the free blocks of groups whose blocks differ in size. A slab is cut into blocks of one group at a time."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from kvframe.cache.block_order import FULL_SHARE, MAX_STALE, AnyBlockIds, BlockIds, Cached
from kvframe.contract.eviction import LRU
from kvframe.planning.plan import KVCachePlan

_NO_GROUP = -1
_SlabSet = OrderedDict[int, None]


class Slabs:
    """The slabs of a pool that several groups share.

    Invariant: a slab without held and cached blocks belongs to no group. Every other one is cut into blocks of its
    group; it is *idle* while none of them is held. Its free blocks are listed; the slabs that have any are *open*.

    An allocation succeeds if and only if the free and cached blocks in each group's slabs that are not idle, and as
    many idle slabs as the shortfall needs, cover it.
    """

    def __init__(self, plan: KVCachePlan, pool: Cached, reserve: int) -> None:
        """Start with every slab free.

        An allocation does not use ``reserve`` idle slabs if evicting its own group's cached blocks is enough. The
        priority of an idle slab is the largest that a policy gave its blocks, or the stamp of its last release.
        """
        num_groups, num_slabs = len(plan.groups), plan.num_slabs
        self._pool, self._reserve = pool, reserve
        self._num_slabs = num_slabs
        self._null_ids = plan.null_bytes // plan.block_id_bytes
        self._slab_ids = plan.slab_bytes // plan.block_id_bytes if plan.groups else 1
        self._per_slab = [group.pages_per_slab for group in plan.groups]
        self._ids_per_block = [group.page_bytes // plan.block_id_bytes for group in plan.groups]
        # Per slab.
        self._group = [_NO_GROUP] * num_slabs
        self._num_held, self._num_cached = [0] * num_slabs, [0] * num_slabs
        self._free: list[list[int]] = [[] for _ in range(num_slabs)]
        self._free_slabs = list(range(num_slabs - 1, -1, -1))
        # The first key of an ordered dictionary is found at once, however many were removed before it.
        # Idle slabs in the order in which they became idle, each with its stamp; and, if a policy gives priorities, in
        # the order of these, with stale entries.
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._by_priority: list[tuple[int, int, int]] = []
        # Per group: slabs with free blocks, held and idle; held slabs with cached blocks; and how many blocks of held
        # slabs are free or cached.
        self._open_held: list[_SlabSet] = [OrderedDict() for _ in range(num_groups)]
        self._open_idle: list[_SlabSet] = [OrderedDict() for _ in range(num_groups)]
        self._cached_held: list[_SlabSet] = [OrderedDict() for _ in range(num_groups)]
        self._available = [0] * num_groups

    @property
    def num_idle_slabs(self) -> int:
        """Slabs without held blocks: free, or with cached and free blocks only."""
        return len(self._free_slabs) + len(self._idle)

    @property
    def is_nearly_full(self) -> bool:
        """Whether nearly all slabs have held or cached blocks."""
        return FULL_SHARE * len(self._free_slabs) <= self._num_slabs

    # --- taking free blocks -------------------------------------------------------------------------------------------

    def can_take(self, num_blocks: Sequence[int]) -> bool:
        """Return whether ``take_free`` would find so many blocks for each group."""
        return sum(self._lacking_slabs(num_blocks)) <= self.num_idle_slabs

    def _lacking_slabs(self, num_blocks: Sequence[int]) -> list[int]:
        """Return the number of idle slabs that each group needs for so many blocks."""
        return [
            -(-max(0, count - available) // per_slab)
            for count, available, per_slab in zip(num_blocks, self._available, self._per_slab, strict=True)
        ]

    def take_free(self, num_blocks: Sequence[int]) -> BlockIds | None:
        """Take blocks for each group: from held slabs first, then from idle ones, evicting if none is free."""
        needed_slabs = self._lacking_slabs(num_blocks)
        spare = self.num_idle_slabs - sum(needed_slabs)
        if spare < 0:
            return None
        spare = max(0, spare - self._reserve)
        block_ids: list[int] = []
        for group, count in enumerate(num_blocks):
            if not count:
                continue
            budget, end = needed_slabs[group] + spare, len(block_ids) + count
            while len(block_ids) < end:
                idle_before = self.num_idle_slabs
                self._take_some(group, end - len(block_ids), block_ids, budget)
                budget -= idle_before - self.num_idle_slabs
            spare = budget
        return np.array(block_ids, dtype=np.int32)

    def _take_some(self, group: int, count: int, block_ids: list[int], budget: int) -> None:
        """Take at least one block and at most ``count``, or evict at least one; use at most ``budget`` idle slabs."""
        slab = next(iter(self._open_held[group]), None)
        if slab is None and budget > 0:
            slab = next(iter(self._open_idle[group]), None)
        if slab is not None:
            self._take_from(slab, count, block_ids)
        elif budget > 0 and self._free_slabs:
            self._take_free_slabs(group, count, block_ids, budget)
        elif budget > 0:
            slab, slab_priority = self._first_idle()
            priority = self._pool.first_priority(group)
            if priority is not None and priority <= slab_priority:
                self._pool.evict_first(group, min(count, self._per_slab[group]))
            else:
                self._pool.evict_among(self._blocks_of(slab), self._per_slab[self._group[slab]])
        else:
            self._pool.evict_among(self._blocks_of(next(iter(self._cached_held[group]))), count)

    def _take_from(self, slab: int, count: int, block_ids: list[int]) -> None:
        """Take the first free blocks of a slab, at most ``count``."""
        free = self._free[slab]
        num_before = len(free)
        block_ids += free[: -count - 1 : -1]
        del free[-count:]
        self._change_counts(slab, num_before - len(free), 0, 0)

    def _take_free_slabs(self, group: int, count: int, block_ids: list[int], budget: int) -> None:
        """Cut free slabs into blocks and take these; the last slab may keep some."""
        size, per_slab = self._ids_per_block[group], self._per_slab[group]
        while count > 0 and budget > 0 and self._free_slabs:
            slab = self._free_slabs.pop()
            first_block = self._null_ids + slab * self._slab_ids
            blocks = range(first_block, first_block + per_slab * size, size)
            self._group[slab] = group
            if count < per_slab:
                self._free[slab] = [*reversed(blocks)]
                self._take_from(slab, count, block_ids)
            else:  # no block is left, so the slab is in no set
                block_ids += blocks
                self._num_held[slab] = per_slab
            count -= per_slab
            budget -= 1

    # --- changes of blocks --------------------------------------------------------------------------------------------

    def move_blocks(self, block_ids: AnyBlockIds, held_change: int, cached_change: int, stamp: int) -> None:
        """Add 1, 0 or -1 to each block's count as held and as cached, and list blocks as free that are neither now."""
        slabs = self._slabs_of(block_ids)
        if held_change + cached_change < 0:
            for block_id, slab in zip(block_ids.tolist(), slabs, strict=True):
                self._free[slab].append(block_id)
        for slab, count in Counter(slabs).items():
            self._change_counts(slab, held_change * count, cached_change * count, stamp)

    def _change_counts(self, slab: int, held_change: int, cached_change: int, stamp: int) -> None:
        """Change the counts of a slab's held and cached blocks, and put the slab into the sets that it belongs to."""
        group, size, num_before = self._group[slab], self._per_slab[self._group[slab]], self._num_held[slab]
        num_held = self._num_held[slab] = num_before + held_change
        num_cached = self._num_cached[slab] = self._num_cached[slab] + cached_change
        # A slab's free and cached blocks are available to its group while the slab is held.
        self._available[group] += (size - num_held if num_held else 0) - (size - num_before if num_before else 0)
        is_open, is_idle = bool(self._free[slab]), not num_held and num_cached > 0
        _put(self._open_held[group], slab, num_held > 0 and is_open)
        _put(self._cached_held[group], slab, num_held > 0 and num_cached > 0)
        _put(self._open_idle[group], slab, is_idle and is_open)
        if is_idle and num_before:
            self._idle[slab] = stamp
            if self._pool.eviction is not LRU:
                self._rank(slab)
        elif not is_idle:
            self._idle.pop(slab, None)
            if not num_held:
                self._group[slab], self._free[slab] = _NO_GROUP, []
                self._free_slabs.append(slab)

    # --- the order of idle slabs --------------------------------------------------------------------------------------

    def _rank(self, slab: int) -> None:
        """Put an idle slab into the order of priorities."""
        if len(self._by_priority) > 2 * len(self._idle) + MAX_STALE:
            self._by_priority = [entry for entry in self._by_priority if self._idle.get(entry[2]) == entry[1]]
            heapify(self._by_priority)
        priority = int(self._pool.priorities_of(self._blocks_of(slab)).max())
        heappush(self._by_priority, (priority, self._idle[slab], slab))

    def rank_again(self, block_ids: AnyBlockIds, stamp: int) -> None:
        """Put the idle slabs of cached blocks that got another priority into the order of priorities."""
        for slab in {*self._slabs_of(block_ids)} & self._idle.keys():
            self._idle[slab] = stamp
            self._rank(slab)

    def _first_idle(self) -> tuple[int, int]:
        """Return the idle slab with the smallest priority, and that priority; there is one."""
        if self._pool.eviction is LRU:
            return next(iter(self._idle.items()))
        while self._idle.get(self._by_priority[0][2]) != self._by_priority[0][1]:
            heappop(self._by_priority)
        priority, _, slab = self._by_priority[0]
        return slab, priority

    # --- all slabs ----------------------------------------------------------------------------------------------------

    def resize(self, plan: KVCachePlan, reserve: int) -> None:
        """Put added slabs at the bottom of the stack of free ones, or remove the last slabs, which are free."""
        num_before, num_after = self._num_slabs, plan.num_slabs
        self._num_slabs, self._reserve = num_after, reserve
        num_added = max(0, num_after - num_before)
        self._free_slabs = [slab for slab in self._free_slabs if slab < num_after]
        self._free_slabs[:0] = range(num_after - 1, num_before - 1, -1)
        self._free = [*self._free[:num_after], *([] for _ in range(num_added))]
        self._group = self._group[:num_after] + [_NO_GROUP] * num_added
        self._num_held = self._num_held[:num_after] + [0] * num_added
        self._num_cached = self._num_cached[:num_after] + [0] * num_added

    def all_blocks(self) -> BlockIds:
        """Return the blocks of all slabs that are cut."""
        slab_blocks = [self._blocks_of(slab) for slab, group in enumerate(self._group) if group != _NO_GROUP]
        return np.concatenate(slab_blocks) if slab_blocks else np.zeros(0, dtype=np.int32)

    def free_blocks(self) -> BlockIds:
        """Return the free blocks of all slabs that are cut."""
        return np.array([block_id for free in self._free for block_id in free], dtype=np.int32)

    def count_idle_slabs(self, held_blocks: BlockIds) -> int:
        """Return the number of slabs without one of the given held blocks."""
        return self._num_slabs - len({*self._slabs_of(held_blocks)})

    def _slabs_of(self, block_ids: AnyBlockIds) -> list[int]:
        slabs: list[int] = ((block_ids - self._null_ids) // self._slab_ids).tolist()
        return slabs

    def _blocks_of(self, slab: int) -> BlockIds:
        """Return the blocks of a slab that is cut."""
        group = self._group[slab]
        first_block = self._null_ids + slab * self._slab_ids
        return first_block + self._ids_per_block[group] * np.arange(self._per_slab[group], dtype=np.int32)


def _put(slabs: _SlabSet, slab: int, is_in: bool) -> None:
    """Add a slab to the end of a set, unless it is in it, or remove it."""
    if is_in:
        slabs.setdefault(slab)
    else:
        slabs.pop(slab, None)
