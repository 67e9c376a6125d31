"""The block pool: reference counts of blocks, which of them are published, and which are evicted to allocate others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.block_order import (
    AnyBlockIds,
    BlockIds,
    FreeList,
    Groups,
    Numbers,
    PolicyPriorities,
    PoolIndices,
    PriorityOrder,
    ReleaseOrder,
    equal_runs,
    of_groups,
)
from kvframe.cache.hints import NO_HINTS, Hints, KeptLimit
from kvframe.cache.slabs import Slabs
from kvframe.contract.errors import PluginError
from kvframe.contract.eviction import LRU, EvictionPolicy
from kvframe.contract.foreign import safe_text
from kvframe.planning.plan import KVCachePlan

_log = logging.getLogger("kvframe")
Indices = npt.NDArray[np.int32] | npt.NDArray[np.int64]
_INDEX = np.dtype(np.intp)
NO_OWNER = 0
"""The owner of a block that is not published."""


class BlockPool:
    """Blocks, shared by reference counts. A published block has an *owner*, a number of the index that finds it.

    Invariant: every block is exactly one of *free*, *held* (it has references) or *cached* (published, no references).

    Attributes:
        free_list: The free blocks.
        blocks_held: Per group, the held blocks.
        peak_blocks_held: Per group, the most of them at once.
        held_bytes: Bytes of held blocks.
        peak_held_bytes: The most of them at once.
        num_cached: Cached blocks of all groups.
        blocks_evicted: Per group, the cached blocks that were evicted so far.
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
            plan: How the pool is divided.
            reserve_slabs: Idle slabs that are kept for the longest request if evicting a group's own blocks is enough.
            on_evicted: Called with an owner and its evicted blocks' groups and indices; None if none is published.
            eviction: Which cached blocks are evicted first; the least recently used ones if None.
        """
        self._page_bytes = [group.page_bytes for group in plan.groups]
        # Block ids differ by the size of the smallest block at least, so that their quotients by it differ.
        self._divisor = min((num_bytes // plan.block_id_bytes for num_bytes in self._page_bytes), default=1)
        num_indices = self._num_indices(plan)
        self._policy = None
        if eviction is not None and eviction != LRU:
            self._policy = PolicyPriorities(eviction, self._page_bytes, plan.total_bytes, num_indices)
        is_shared = FreeList.fits(plan)
        # The orders of eviction: one for each group, or one if any block serves any group.
        self._num_orders = 1 if is_shared else len(plan.groups)
        self._orders = self._new_orders()
        self._ending = PriorityOrder(self._is_current)
        self.free_list: FreeList | Slabs = FreeList(plan, self) if is_shared else Slabs(plan, self, reserve_slabs)
        self._on_evicted = on_evicted
        # Of a cached block, the stamp of its release; of a held one, minus the references beyond the first. Zero for a
        # free one too: allocating and freeing need not write it.
        self._state = np.zeros(num_indices, dtype=np.int64)
        self._owner, self._index = np.zeros((2, num_indices), dtype=np.int32)
        # Of a cached block, its group; None if there is one group only.
        self._group = np.zeros(num_indices, dtype=np.int64) if len(plan.groups) > 1 else None
        self._stamp = self._num_more_references = 0
        self.blocks_held, self.peak_blocks_held = [0] * len(plan.groups), [0] * len(plan.groups)
        self.held_bytes = self.peak_held_bytes = self.num_cached = 0
        self.blocks_evicted = [0] * len(plan.groups)
        self.on_pages_freed: Callable[[int, list[int]], None] | None = None
        self.on_removed: Callable[[AnyBlockIds], None] | None = None

    # --- counts -------------------------------------------------------------------------------------------------------

    @property
    def num_idle_slabs(self) -> int:
        """Slabs without held blocks."""
        return self.free_list.num_idle_slabs

    @property
    def eviction(self) -> EvictionPolicy:
        """The policy that gives cached blocks their priorities; with ``LRU`` they are the stamps of the releases."""
        return LRU if self._policy is None else self._policy.policy

    def is_cached(self, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Return whether each block is cached: ``[n], bool, host``."""
        is_cached: npt.NDArray[np.bool_] = self._state[self._pool_indices(block_ids)] > 0
        return is_cached

    def reference_counts(self, block_ids: BlockIds) -> Numbers:
        """Return the reference count of each block: 0 of a cached one; 1 of a free one."""
        states = self._state[self._pool_indices(block_ids)]
        return np.where(states > 0, 0, 1 - states)

    def owners_of(self, block_ids: BlockIds) -> npt.NDArray[np.int32]:
        """Return the owner of each block; ``NO_OWNER`` of those that are not published."""
        return self._owner[self._pool_indices(block_ids)]

    # --- references ---------------------------------------------------------------------------------------------------

    def allocate_blocks(self, num_blocks: Sequence[int]) -> BlockIds | None:
        """Allocate blocks of each group, evicting cached ones if too few are free.

        Returns:
            Their ids, one group after the other, each with one reference; None if there are too few.
        """
        block_ids = self.free_list.take_free(num_blocks)
        if block_ids is not None:
            for group, count in enumerate(num_blocks):
                if count:
                    self._count_held(group, count)
        return block_ids

    def _count_held(self, group: int, count: int) -> None:
        """Count more blocks of a group as held, or fewer if ``count`` is negative."""
        self.blocks_held[group] = num_held = self.blocks_held[group] + count
        if num_held > self.peak_blocks_held[group]:
            self.peak_blocks_held[group] = num_held
        self.held_bytes = num_bytes = self.held_bytes + count * self._page_bytes[group]
        if num_bytes > self.peak_held_bytes:
            self.peak_held_bytes = num_bytes

    def add_references(self, group: int, block_ids: BlockIds) -> None:
        """Add one reference to each block, held or cached."""
        pool_indices = self._pool_indices(block_ids)
        states = self._state[pool_indices]
        is_cached = states > 0
        num_cached = int(np.count_nonzero(is_cached))
        self._num_more_references += len(block_ids) - num_cached
        # Zero for cached blocks, one less for held ones.
        self._state[pool_indices] = np.minimum(states, 1) - 1
        if num_cached:
            self.num_cached -= num_cached
            self.free_list.move_blocks(block_ids[is_cached], 1, -1, self._stamp)
            self._count_held(group, num_cached)

    def release_blocks(self, block_ids: BlockIds, groups: int | Groups) -> None:
        """Remove a reference of each block; one without any is cached, in this order, or freed if unpublished."""
        if self._num_more_references:
            pool_indices = self._pool_indices(block_ids)
            if np.count_nonzero(self._state[pool_indices]):
                is_last = self._remove_shared(pool_indices)
                block_ids, groups = block_ids[is_last], of_groups(groups, is_last)
        if not len(block_ids):
            return
        self._begin_release(groups, len(block_ids))
        if self._on_evicted is not None:
            pool_indices = self._pool_indices(block_ids)
            is_published = self._owner[pool_indices] != NO_OWNER
            num_published = np.count_nonzero(is_published)
            if num_published == len(block_ids):
                self._cache(block_ids, pool_indices, groups)
                return
            if num_published:
                self._cache(block_ids[is_published], pool_indices[is_published], of_groups(groups, is_published))
                block_ids, groups = block_ids[~is_published], of_groups(groups, ~is_published)
        self.free_list.move_blocks(block_ids, -1, 0, self._stamp)
        self._end_content(block_ids, groups)

    def publish_and_release(
        self, owner: int | BlockIds, block_ids: BlockIds, indices: Indices, groups: int | Groups
    ) -> None:
        """Publish blocks that are not published, and release them, in fewer steps than two calls."""
        ids = block_ids.astype(_INDEX)
        pool_indices = self._pool_indices(ids)
        self._owner[pool_indices], self._index[pool_indices] = owner, indices
        if self._num_more_references:
            self.release_blocks(block_ids, groups)
            return
        self._begin_release(groups, len(block_ids))
        self._cache(ids, pool_indices, groups)

    def _begin_release(self, groups: int | Groups, num_blocks: int) -> None:
        """Count blocks as no longer held, at a new stamp."""
        self._stamp += 1
        if isinstance(groups, int):
            self._count_held(groups, -num_blocks)
            return
        for group, count in enumerate(np.bincount(groups).tolist()):
            self._count_held(group, -count)

    def _remove_shared(self, pool_indices: PoolIndices) -> PoolIndices:
        """Remove one reference of blocks that may have several; return the first index of each that has none left."""
        np.add.at(self._state, pool_indices, 1)
        # The state of a block without references is one too high now.
        last_indices = np.flatnonzero(self._state[pool_indices] > 0)
        last_indices = last_indices[np.sort(np.unique(pool_indices[last_indices], return_index=True)[1])]
        self._state[pool_indices[last_indices]] = 0
        self._num_more_references -= len(pool_indices) - len(last_indices)
        return last_indices

    def _cache(self, block_ids: AnyBlockIds, pool_indices: PoolIndices, groups: int | Groups) -> None:
        """Cache published blocks without references."""
        self._state[pool_indices] = self._stamp
        if self._group is not None:
            self._group[pool_indices] = groups
        self.num_cached += len(block_ids)
        priorities = self._stamp if self._policy is None else self._rank(self._policy.rank, pool_indices, groups)
        self._order(priorities, block_ids, groups)
        self.free_list.move_blocks(block_ids, -1, 1, self._stamp)
        if self.is_hinted:
            self._note_ends(block_ids, pool_indices)

    def _order(self, priorities: int | Numbers, block_ids: AnyBlockIds, groups: int | Groups) -> None:
        """Put cached blocks, which have the last stamp, into the order of their eviction."""
        if self._num_orders == 1:
            self._orders[0].add(priorities, self._stamp, block_ids)
        else:
            for group, where in equal_runs(groups):
                group_priorities = priorities if isinstance(priorities, int) else priorities[where]
                self._orders[group].add(group_priorities, self._stamp, block_ids[where])

    def _rank(
        self, rank: Callable[[PoolIndices, int | Groups], Numbers], pool_indices: PoolIndices, groups: int | Groups
    ) -> int | Numbers:
        """Return a policy's priorities; if it fails, remove it: stamps of releases are the priorities from now on."""
        policy = self._policy
        assert policy is not None
        try:
            return rank(pool_indices, groups)
        except PluginError as error:
            why = str(error)
        except KeyboardInterrupt:  # Ctrl-C waits here, so the policy raised it
            why = f"eviction policy {policy.policy.name!r}: priorities() failed: KeyboardInterrupt"
        _log.error("%s; it is set aside, and the least recently used blocks are evicted first", why)
        self._policy = None
        for order in self._orders:
            if isinstance(order, PriorityOrder):
                order.rank_by_release()
        return self._stamp

    # --- hints --------------------------------------------------------------------------------------------------------

    @property
    def is_hinted(self) -> bool:
        """Whether a request had hints that the policy is given."""
        return self._policy is not None and self._policy.hinted is not None

    def takes_hints(self, hints: Hints) -> bool:
        """Return whether the policy is given the hints of a request: not if no request has had any."""
        return self._policy is not None and (self._policy.hinted is not None or hints != NO_HINTS)

    def may_be_needed(self, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Return whether each block may be needed again, as far as requests hint: ``[n], bool, host``."""
        if self._policy is None or self._policy.hinted is None:
            return np.ones(len(block_ids), dtype=np.bool_)
        return self._policy.hinted.may_be_needed(self._pool_indices(block_ids))

    def hint_blocks(self, block_ids: BlockIds, groups: Groups, hints: Hints, owner: str, limit: KeptLimit) -> None:
        """Record the hints of a request that used blocks, before it releases the last ones; nothing without a policy.

        Args:
            block_ids: The blocks.
            groups: Their groups.
            hints: The hints.
            owner: Whose request it is.
            limit: How much its owner may keep; the same at each call.
        """
        self._end_hints()
        if self._policy is not None:
            pool_indices = self._pool_indices(block_ids)
            replaced_ids = self._policy.use(block_ids, pool_indices, groups, hints, owner, limit)
            cached_ids = np.concatenate([block_ids, replaced_ids])
            cached_ids = cached_ids[self.is_cached(cached_ids)]
            if len(cached_ids):
                self._rank_again(self._policy, cached_ids)
                if self.is_hinted:
                    self._note_ends(cached_ids, self._pool_indices(cached_ids))

    def _note_ends(self, block_ids: AnyBlockIds, pool_indices: PoolIndices) -> None:
        """Record until when cached blocks are needed."""
        assert self._policy is not None
        assert self._policy.hinted is not None
        ends = self._policy.hinted.ends(pool_indices)
        if np.count_nonzero(ends):
            self._ending.add(ends[ends > 0], self._stamp, block_ids[ends > 0])
        self._end_hints()

    def _end_hints(self) -> None:
        """Rank cached blocks again that were needed until now."""
        while self._policy is not None and (hinted := self._policy.hinted) is not None:
            end = self._ending.first_priority()
            if end is None or end > hinted.now_ms():
                return
            block_ids = self._ending.pop(len(self._state))
            assert block_ids is not None
            hinted.stop(self._pool_indices(block_ids))
            self._rank_again(self._policy, block_ids)

    def _rank_again(self, policy: PolicyPriorities, block_ids: AnyBlockIds) -> None:
        """Rank cached blocks again whose hints have changed."""
        pool_indices = self._pool_indices(block_ids)
        self._stamp += 1
        # With another stamp, their entries in the order become stale.
        self._state[pool_indices] = self._stamp
        groups = self._groups_of(pool_indices)
        self._order(self._rank(policy.rank_again, pool_indices, groups), block_ids, groups)
        self.free_list.rank_again(block_ids, self._stamp)

    # --- publishing ---------------------------------------------------------------------------------------------------

    def publish_blocks(self, owner: int | BlockIds, block_ids: BlockIds, indices: Indices) -> None:
        """Publish held or cached blocks under an owner, or one each, at its indices; ``NO_OWNER`` unpublishes them."""
        pool_indices = self._pool_indices(block_ids)
        self._owner[pool_indices] = owner
        self._index[pool_indices] = indices

    def unpublish_all(self) -> None:
        """Evict every cached block and unpublish held ones, without calling ``on_evicted``."""
        self._owner[...] = NO_OWNER
        self.discard_cached(self.free_list.all_blocks())
        self._orders, self._ending = self._new_orders(), PriorityOrder(self._is_current)
        if self._policy is not None:
            self._policy.forget_blocks(slice(None))

    def count_uses(self, block_ids: BlockIds) -> None:
        """Report to the eviction policy that a request found blocks; 0 for none."""
        if self._policy is not None:
            self._policy.count_uses(self._pool_indices(block_ids[block_ids != 0]))

    # --- eviction -----------------------------------------------------------------------------------------------------

    def evict_blocks(self, block_ids: AnyBlockIds) -> None:
        """Evict cached blocks, and call ``on_evicted`` once for each owner."""
        assert self._on_evicted is not None
        pool_indices = self._pool_indices(block_ids)
        owners, indices, groups = self._owner[pool_indices], self._index[pool_indices], self._groups_of(pool_indices)
        self._end_cached(block_ids, pool_indices, groups)
        for owner, where in equal_runs(owners):
            self._on_evicted(owner, of_groups(groups, where), indices[where])

    def discard_cached(self, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Evict the cached ones of some blocks, 0 for none, without calling ``on_evicted``; return which these are."""
        pool_indices = self._pool_indices(block_ids)
        is_cached: npt.NDArray[np.bool_] = (self._state[pool_indices] > 0) & (block_ids != 0)
        if np.count_nonzero(is_cached):
            pool_indices = pool_indices[is_cached]
            self._end_cached(block_ids[is_cached], pool_indices, self._groups_of(pool_indices))
        return is_cached

    def first_priority(self, group: int) -> int | None:
        """Return the priority of the block of a group that is evicted first; None if the group has no cached block."""
        return self._order_of(group).first_priority()

    def evict_first(self, group: int, num_blocks: int) -> None:
        """Evict cached blocks of a group by their priority, until ``num_blocks`` are evicted or none is left."""
        order = self._order_of(group)
        while num_blocks > 0 and (block_ids := order.pop(num_blocks)) is not None:
            self.evict_blocks(block_ids)
            num_blocks -= len(block_ids)

    def evict_among(self, block_ids: BlockIds, num_blocks: int) -> None:
        """Evict the cached ones of some blocks in the order of their priority, until ``num_blocks`` are evicted."""
        block_ids = block_ids[self.is_cached(block_ids)]
        self.evict_blocks(block_ids[np.argsort(self.priorities_of(block_ids), kind="stable")[:num_blocks]])

    def _end_cached(self, block_ids: AnyBlockIds, pool_indices: PoolIndices, groups: int | Groups) -> None:
        """Free cached blocks."""
        self._state[pool_indices] = 0
        self._owner[pool_indices] = NO_OWNER
        self.num_cached -= len(block_ids)
        for group, where in equal_runs(groups):
            self.blocks_evicted[group] += len(block_ids[where])
        if self.on_removed is not None:
            self.on_removed(block_ids)
        self.free_list.move_blocks(block_ids, 0, -1, self._stamp)
        self._end_content(block_ids, groups)

    def _end_content(self, block_ids: AnyBlockIds, groups: int | Groups) -> None:
        """Report to the policy and the listener that the content of blocks ended. A listener that raises is removed."""
        if self._policy is not None:
            self._policy.forget_blocks(self._pool_indices(block_ids))
        if self.on_pages_freed is not None:
            try:
                for group, where in equal_runs(groups):
                    self.on_pages_freed(group, block_ids[where].tolist())
            except BaseException as error:
                _log.error("on_pages_freed raises %s; it was removed", safe_text(error))
                self.on_pages_freed = None

    # --- size ---------------------------------------------------------------------------------------------------------

    def resize(self, plan: KVCachePlan, reserve_slabs: int) -> bool:
        """Change the number of slabs, and evict cached blocks of removed ones; return False if one is held."""
        end = plan.total_bytes // plan.block_id_bytes
        blocks = self.free_list.all_blocks()
        removed_blocks = blocks[blocks >= end]
        cached_blocks = removed_blocks[self.is_cached(removed_blocks)]
        if len(cached_blocks) + np.count_nonzero(self.free_list.free_blocks() >= end) < len(removed_blocks):
            return False
        if len(cached_blocks):
            self.evict_blocks(cached_blocks)
        # Stale entries of removed blocks may be left in the queue: the arrays never shrink.
        num_new = max(0, self._num_indices(plan) - len(self._state))
        self._state = np.append(self._state, np.zeros(num_new, dtype=np.int64))
        self._owner, self._index = (
            np.append(array, np.zeros(num_new, array.dtype)) for array in (self._owner, self._index)
        )
        if self._group is not None:
            self._group = np.append(self._group, np.zeros(num_new, dtype=np.int64))
        if self._policy is not None:
            self._policy.resize(plan.total_bytes, num_new)
        self.free_list.resize(plan, reserve_slabs)
        return True

    # --- inside -------------------------------------------------------------------------------------------------------

    def _new_orders(self) -> list[ReleaseOrder | PriorityOrder]:
        kind = ReleaseOrder if self._policy is None else PriorityOrder
        return [kind(self._is_current) for _ in range(self._num_orders)]

    def _order_of(self, group: int) -> ReleaseOrder | PriorityOrder:
        return self._orders[group if self._num_orders > 1 else 0]

    def _num_indices(self, plan: KVCachePlan) -> int:
        return plan.total_bytes // plan.block_id_bytes // self._divisor + 1 if plan.groups else 1

    def _pool_indices(self, block_ids: AnyBlockIds) -> PoolIndices:
        """Return the indices of blocks in the arrays of this pool."""
        # NumPy takes such an index several times as fast as a shorter one.
        pool_indices: PoolIndices = block_ids if block_ids.dtype is _INDEX else block_ids.astype(_INDEX)  # type: ignore[assignment]
        return pool_indices if self._divisor == 1 else pool_indices // self._divisor

    def _groups_of(self, pool_indices: PoolIndices) -> int | Groups:
        """Return the group of each cached block, or of all if there is one group."""
        return 0 if self._group is None else self._group[pool_indices]

    def _is_current(self, stamp: int | Numbers, block_ids: AnyBlockIds) -> npt.NDArray[np.bool_]:
        """Return whether each block is cached since its release at a stamp: ``[n], bool, host``."""
        is_current: npt.NDArray[np.bool_] = self._state[self._pool_indices(block_ids)] == stamp
        return is_current

    def priorities_of(self, block_ids: BlockIds) -> Numbers:
        """Return the eviction priority of cached blocks; of other blocks, a smaller number than theirs."""
        pool_indices = self._pool_indices(block_ids)
        return (self._state if self._policy is None else self._policy.priority)[pool_indices]
