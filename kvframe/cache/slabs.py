"""Slabs: the free blocks of groups whose blocks differ in size. A slab is cut into blocks of one group at a time."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from kvframe.cache.eviction import MAX_STALE
from kvframe.cache.free_list import FULL_SHARE, AnyBlockIds, BlockIds
from kvframe.planning.plan import KVCachePlan

if TYPE_CHECKING:
    from kvframe.cache.block_pool import BlockPool

_NO_GROUP = -1
_NEVER = int(np.iinfo(np.int64).max)
_SlabSet = OrderedDict[int, None]


class Slabs:
    """The slabs of a pool that several groups share.

    Invariant: a slab without held and cached blocks belongs to no group. Every other one is cut into blocks of its
    group; it is *idle* while none of them is held. Its free blocks are listed; the slabs that have any are *open*.

    An allocation succeeds if and only if the free and cached blocks in each group's slabs that are not idle, and as
    many idle slabs as the shortfall needs, cover it. The rest of the pool after the last slab is treated as a shorter
    slab that is never idle. Its blocks are taken last, but before any cached block is evicted for it.
    """

    def __init__(self, plan: KVCachePlan, pool: BlockPool, reserve: int) -> None:
        """Start with every slab free.

        An allocation leaves ``reserve`` idle slabs alone if evicting its own group's cached blocks serves it too. The
        priority of an idle slab is the largest that a policy gave its blocks; without a policy, its last release.
        """
        num_groups, num_slabs = len(plan.groups), plan.num_slabs
        self._pool, self._reserve = pool, reserve
        # The rest after the last slab, if there is one, is the slab of this number.
        self._num_slabs, self._num_rest = num_slabs, plan.num_rest_pages
        self._null_ids = plan.null_bytes // plan.block_id_bytes
        self._slab_ids = plan.slab_bytes // plan.block_id_bytes if plan.groups else 1
        self._per_slab = [group.pages_per_slab for group in plan.groups]
        self._ids_per_block = [group.page_bytes // plan.block_id_bytes for group in plan.groups]
        # Per slab.
        self._group = [_NO_GROUP] * num_slabs
        self._held, self._cached = [0] * num_slabs, [0] * num_slabs
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
        if self._num_rest:
            # As if one more block of it were always held.
            self._group.append(plan.rest_group)
            self._held.append(1)
            self._cached.append(0)
            self._free.append(self._blocks_of(num_slabs)[::-1].tolist())
            self._open_held[plan.rest_group][num_slabs] = None
            self._available[plan.rest_group] += self._num_rest

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
        """Return whether ``take_free`` would find as many blocks for each group."""
        return sum(self._lacking_slabs(num_blocks)) <= self.num_idle_slabs

    def _lacking_slabs(self, num_blocks: Sequence[int]) -> list[int]:
        """Return how many idle slabs each group needs for as many blocks."""
        return [
            -(-max(0, count - available) // per_slab)
            for count, available, per_slab in zip(num_blocks, self._available, self._per_slab, strict=True)
        ]

    def take_free(self, num_blocks: Sequence[int]) -> BlockIds | None:
        """Take blocks for each group: from held slabs first, then from idle ones, evicting if none is free."""
        needed = self._lacking_slabs(num_blocks)
        spare = self.num_idle_slabs - sum(needed)
        if spare < 0:
            return None
        spare = max(0, spare - self._reserve)
        taken: list[int] = []
        for group, count in enumerate(num_blocks):
            if not count:
                continue
            budget, end = needed[group] + spare, len(taken) + count
            while len(taken) < end:
                idle_before = self.num_idle_slabs
                self._take_some(group, end - len(taken), taken, budget)
                budget -= idle_before - self.num_idle_slabs
            spare = min(spare, budget)
        return np.array(taken, dtype=np.int32)

    def _take_some(self, group: int, count: int, taken: list[int], budget: int) -> None:
        """Take at least one block and at most ``count``, or make one free; use at most ``budget`` idle slabs."""
        has_free_slab = budget > 0 and bool(self._free_slabs)
        slab = next((each for each in self._open_held[group] if each != self._num_slabs), None)
        if slab is None and budget > 0:
            slab = next(iter(self._open_idle[group]), None)
        if slab is None and not has_free_slab and self._num_slabs in self._open_held[group]:
            slab = self._num_slabs
        if slab is not None:
            self._take_from(slab, group, count, taken)
        elif has_free_slab:
            self._take_free_slabs(group, count, taken, budget)
        elif budget > 0:
            slab, slab_priority = self._first_idle()
            priority = self._pool.first_priority(group)
            if priority is not None and priority <= slab_priority:
                self._pool.evict_first(group, min(count, self._per_slab[group]))
            else:
                self._pool.evict_among(self._blocks_of(slab), self._per_slab[self._group[slab]])
        else:
            # The rest after the last slab comes last.
            slab = next((each for each in self._cached_held[group] if each != self._num_slabs), self._num_slabs)
            self._pool.evict_among(self._blocks_of(slab), count)

    def _take_from(self, slab: int, group: int, count: int, taken: list[int]) -> None:
        free = self._free[slab]
        count = min(count, len(free))
        taken += free[len(free) - count :]
        del free[len(free) - count :]
        if not self._held[slab]:
            self._end_idle(slab)
        if not free:
            del self._open_held[group][slab]
        self._held[slab] += count
        self._available[group] -= count

    def _take_free_slabs(self, group: int, count: int, taken: list[int], budget: int) -> None:
        """Cut free slabs into blocks and take these; the last slab may keep some."""
        size, per_slab = self._ids_per_block[group], self._per_slab[group]
        while count > 0 and budget > 0 and self._free_slabs:
            slab = self._free_slabs.pop()
            first = self._null_ids + self._slab_ids * slab
            blocks = range(first, first + size * per_slab, size)
            self._group[slab] = group
            if count < per_slab:
                taken += blocks[:count]
                self._held[slab] = count
                self._free[slab] = [*reversed(blocks[count:])]
                self._open_held[group][slab] = None
                self._available[group] += per_slab - count
            else:
                taken += blocks
                self._held[slab] = per_slab
            count -= per_slab
            budget -= 1

    # --- changes of blocks --------------------------------------------------------------------------------------------

    def hold_cached(self, block_ids: AnyBlockIds) -> None:
        """Count cached blocks as held."""
        for slab, count in Counter(self._slabs_of(block_ids)).items():
            if not self._held[slab]:
                self._end_idle(slab)
            self._available[self._group[slab]] -= count
            self._held[slab] += count
            self._end_cached(slab, count)

    def cache_held(self, block_ids: AnyBlockIds, stamp: int) -> None:
        """Count held blocks as cached since ``stamp``."""
        for slab, count in Counter(self._slabs_of(block_ids)).items():
            self._cached[slab] += count
            if self._held[slab] > count:
                self._cached_held[self._group[slab]][slab] = None
            self._end_held(slab, count, stamp)

    def free_held(self, block_ids: AnyBlockIds, stamp: int) -> None:
        """List held blocks as free."""
        slabs = self._slabs_of(block_ids)
        self._list_free(block_ids, slabs)
        for slab, count in Counter(slabs).items():
            self._end_held(slab, count, stamp)

    def free_cached(self, block_ids: AnyBlockIds) -> None:
        """List cached blocks as free; an idle slab without cached blocks becomes free."""
        slabs = self._slabs_of(block_ids)
        self._list_free(block_ids, slabs)
        for slab, count in Counter(slabs).items():
            self._end_cached(slab, count)
            if not self._held[slab] and not self._cached[slab]:
                self._free_slab(slab)

    def _list_free(self, block_ids: AnyBlockIds, slabs: Iterable[int]) -> None:
        for block_id, slab in zip(block_ids.tolist(), slabs, strict=True):
            self._free[slab].append(block_id)
            if len(self._free[slab]) == 1:
                (self._open_held if self._held[slab] else self._open_idle)[self._group[slab]][slab] = None

    def _end_cached(self, slab: int, count: int) -> None:
        self._cached[slab] -= count
        if not self._cached[slab]:
            self._cached_held[self._group[slab]].pop(slab, None)

    def _end_held(self, slab: int, count: int, stamp: int) -> None:
        group = self._group[slab]
        self._held[slab] -= count
        if self._held[slab]:
            self._available[group] += count
        else:
            self._available[group] += count - self._per_slab[group]
            self._begin_idle(slab, group, stamp)

    # --- idle slabs ---------------------------------------------------------------------------------------------------

    def _begin_idle(self, slab: int, group: int, stamp: int) -> None:
        """Record that no block of a slab is held since ``stamp``."""
        self._idle[slab] = stamp
        self._cached_held[group].pop(slab, None)
        if self._open_held[group].pop(slab, 0) is None:
            self._open_idle[group][slab] = None
        if not self._cached[slab]:
            self._free_slab(slab)
            return
        if self._pool.has_policy:
            self._rank(slab)
            if len(self._by_priority) > 2 * len(self._idle) + MAX_STALE:
                self._by_priority.clear()
                for each in self._idle:
                    self._rank(each)

    def _rank(self, slab: int) -> None:
        """Put an idle slab into the order of priorities."""
        priority = int(self._pool.priorities_of(self._blocks_of(slab)).max())
        heappush(self._by_priority, (priority, self._idle[slab], slab))

    def _first_idle(self) -> tuple[int, int]:
        """Return the idle slab with the smallest priority, and that priority."""
        if not self._pool.has_policy:
            return next(iter(self._idle.items()), (0, _NEVER))
        while self._by_priority:
            priority, stamp, slab = self._by_priority[0]
            if self._idle.get(slab) == stamp:
                return slab, priority
            heappop(self._by_priority)
        return 0, _NEVER

    def _end_idle(self, slab: int) -> None:
        """Record that a block of an idle slab is about to be held."""
        group = self._group[slab]
        del self._idle[slab]
        self._available[group] += self._per_slab[group]
        if self._open_idle[group].pop(slab, 0) is None:
            self._open_held[group][slab] = None
        if self._cached[slab]:
            self._cached_held[group][slab] = None

    def _free_slab(self, slab: int) -> None:
        """Let an idle slab whose blocks are all free belong to no group."""
        del self._idle[slab]
        del self._open_idle[self._group[slab]][slab]
        self._group[slab] = _NO_GROUP
        self._free[slab] = []
        self._free_slabs.append(slab)

    # --- all slabs ----------------------------------------------------------------------------------------------------

    def resize(self, plan: KVCachePlan, reserve: int, stamp: int) -> None:
        """Put added slabs under all free ones, or remove the last ones, which are free.

        The rest after the last slab becomes the first added slab, or is removed.
        """
        rest, num_rest = self._num_slabs, self._num_rest
        before, after = len(self._group), plan.num_slabs
        self._num_slabs, self._num_rest, self._reserve = after, 0, reserve
        if num_rest and after > rest:
            group = self._group[rest]
            self._free[rest][:0] = self._blocks_of(rest)[num_rest:][::-1].tolist()
            self._open_held[group][rest] = None
            self._available[group] += self._per_slab[group] - num_rest - 1
            self._end_held(rest, 1, stamp)
        elif num_rest:
            del self._open_held[self._group[rest]][rest]
            self._available[self._group[rest]] -= num_rest
        num_added = max(0, after - before)
        self._free_slabs = [slab for slab in self._free_slabs if slab < after]
        self._free_slabs[:0] = range(after - 1, before - 1, -1)
        self._free = [*self._free[:after], *([] for _ in range(num_added))]
        self._group = self._group[:after] + [_NO_GROUP] * num_added
        self._held = self._held[:after] + [0] * num_added
        self._cached = self._cached[:after] + [0] * num_added

    def all_blocks(self) -> BlockIds:
        """Return the blocks of all slabs that are cut."""
        cut = [self._blocks_of(slab) for slab, group in enumerate(self._group) if group != _NO_GROUP]
        return np.concatenate(cut) if cut else np.zeros(0, dtype=np.int32)

    def free_blocks(self) -> BlockIds:
        """Return those of them that are free."""
        return np.array([block_id for free in self._free for block_id in free], dtype=np.int32)

    def count_idle_slabs(self, held: BlockIds) -> int:
        """Return how many slabs have none of the held blocks."""
        return self._num_slabs - sum(slab < self._num_slabs for slab in {*self._slabs_of(held)})

    def _slabs_of(self, block_ids: AnyBlockIds) -> list[int]:
        slabs: list[int] = ((block_ids - self._null_ids) // self._slab_ids).tolist()
        return slabs

    def _blocks_of(self, slab: int) -> BlockIds:
        """Return the blocks of a slab that is cut."""
        group = self._group[slab]
        first = self._null_ids + slab * self._slab_ids
        num_blocks = self._num_rest if slab == self._num_slabs else self._per_slab[group]
        return first + self._ids_per_block[group] * np.arange(num_blocks, dtype=np.int32)
