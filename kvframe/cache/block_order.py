"""Which blocks are taken next: the free ones (``FreeList``), then cached ones in the order of their eviction.

That order is the one of their last use, or of the priorities of a policy. The pool reports each change of a block to
the list of free ones, which is a ``FreeList`` if all blocks are of one size, and ``Slabs`` otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvframe.cache.hints import HintedPages, Hints, KeptLimit
from kvframe.contract.errors import PluginError
from kvframe.contract.eviction import MOST_USES, EvictionPolicy, ReleasedPages
from kvframe.contract.foreign import call
from kvframe.planning.plan import KVCachePlan

BlockIds = npt.NDArray[np.int32]
"""``[n], int32, host``: block ids, each once."""
AnyBlockIds = BlockIds | npt.NDArray[np.intp]
"""Likewise; block ids in an order of eviction have the type of an index, so that they need not be converted."""
Groups = npt.NDArray[np.int64]
"""``[n], int64, host``: the group of each."""
FULL_SHARE = 32
"""The pool is nearly full if one block of so many, or fewer, is free."""
Numbers = npt.NDArray[np.int64]
PoolIndices = npt.NDArray[np.intp]
Where = slice | PoolIndices | npt.NDArray[np.bool_]
IsCurrent = Callable[[int | Numbers, AnyBlockIds], npt.NDArray[np.bool_]]
_NOT_RANKED = int(np.iinfo(np.int64).min)
MAX_STALE = 1 << 12
"""An order may have as many stale entries as blocks, and so many more."""
_LOOK_AHEAD = 512
"""Entries that are checked at once for the first one that is not stale."""
_ALL = slice(None)
_MEMORY = 2
"""After the release of so many times the pool's size, older counts are halved."""


class Cached(Protocol):
    """What a list of free blocks asks of the pool about cached ones (``BlockPool``)."""

    num_cached: int

    @property
    def eviction(self) -> EvictionPolicy:
        """The policy that orders them."""

    def first_priority(self, group: int) -> int | None:
        """Return the priority of the block of a group that is evicted first."""

    def priorities_of(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        """Return the priorities of blocks."""

    def evict_first(self, group: int, num_blocks: int) -> None:
        """Evict blocks of a group."""

    def evict_among(self, block_ids: BlockIds, num_blocks: int) -> None:
        """Evict some of these blocks."""


class FreeList:
    """Free blocks that serve any group: those of an only group, or of groups whose blocks are as large as a slab.

    Invariant: the lower part of the stack is exactly the blocks that are neither held nor cached.
    """

    def __init__(self, plan: KVCachePlan, pool: Cached) -> None:
        self._plan, self._pool = plan, pool
        self._per_slab = plan.groups[0].pages_per_slab if plan.groups else 1
        self._stack = self.all_blocks()[::-1].copy()
        self._num_free = self._num_blocks = len(self._stack)

    @staticmethod
    def fits(plan: KVCachePlan) -> bool:
        """Return whether any block of a plan serves any group."""
        return len(plan.groups) == 1 or all(group.page_bytes == plan.slab_bytes for group in plan.groups)

    @property
    def num_idle_slabs(self) -> int:
        """The number of slabs that the blocks that are not held would fill."""
        return (self._num_free + self._pool.num_cached) // self._per_slab

    @property
    def is_nearly_full(self) -> bool:
        """Whether nearly all blocks are held or cached."""
        return FULL_SHARE * self._num_free <= self._num_blocks

    def can_take(self, num_blocks: Sequence[int]) -> bool:
        """Return whether so many blocks are not held."""
        return sum(num_blocks) <= self._num_free + self._pool.num_cached

    def take_free(self, num_blocks: Sequence[int]) -> BlockIds | None:
        """Take free blocks for each group, evicting cached ones if too few are free; None if there are too few."""
        count = sum(num_blocks)
        if count > self._num_free:
            num_lacking = count - self._num_free
            if num_lacking > self._pool.num_cached:
                return None
            self._pool.evict_first(0, num_lacking)
        stop, self._num_free = self._num_free, self._num_free - count
        return self._stack[self._num_free : stop].copy()

    def move_blocks(self, block_ids: AnyBlockIds, held_change: int, cached_change: int, stamp: int) -> None:
        """Put blocks on top of the stack that are neither held nor cached now; the pool counts the others."""
        if held_change + cached_change < 0:
            start, self._num_free = self._num_free, self._num_free + len(block_ids)
            self._stack[start : self._num_free] = block_ids

    def rank_again(self, block_ids: AnyBlockIds, stamp: int) -> None:
        """Take cached blocks that got another priority; the pool orders them."""

    def resize(self, plan: KVCachePlan, reserve: int) -> None:
        """Put added blocks at the bottom of the stack, or remove the last blocks, which are all free."""
        free, num_before = self.free_blocks(), self._num_blocks
        self._plan = plan
        blocks = self.all_blocks()
        added_blocks, kept_blocks = blocks[num_before:][::-1], free[free <= blocks.max(initial=0)]
        self._num_blocks, self._num_free = len(blocks), len(added_blocks) + len(kept_blocks)
        self._stack = np.zeros(len(blocks), dtype=np.int32)
        self._stack[: self._num_free] = np.concatenate([added_blocks, kept_blocks])

    def all_blocks(self) -> BlockIds:
        """Return all blocks."""
        plan = self._plan
        if not plan.groups:
            return np.zeros(0, dtype=np.int32)
        first_slab, size = plan.null_bytes // plan.block_id_bytes, plan.groups[0].page_bytes // plan.block_id_bytes
        slabs = first_slab + plan.slab_bytes // plan.block_id_bytes * np.arange(plan.num_slabs, dtype=np.int32)
        return (slabs[:, None] + size * np.arange(self._per_slab, dtype=np.int32)).reshape(-1)

    def free_blocks(self) -> BlockIds:
        """Return the blocks on the stack."""
        return self._stack[: self._num_free].copy()

    def count_idle_slabs(self, held_blocks: BlockIds) -> int:
        """Return the number of slabs that all blocks but the given ones would fill."""
        return (self._num_blocks - len(held_blocks)) // self._per_slab


def of_groups(groups: int | Groups, where: Where) -> int | Groups:
    """Return the groups of some of the blocks; a single group stays single."""
    return groups if isinstance(groups, int) else groups[where]


def equal_runs(keys: int | Groups | BlockIds) -> list[tuple[int, Where]]:
    """Return the different keys in ascending order, each with its indices; an int is the key of all elements."""
    if isinstance(keys, int):
        return [(keys, _ALL)]
    if not len(keys):
        return []
    data, size = keys.tobytes(), keys.itemsize
    if data[size:] == data[:-size]:  # comparing bytes is faster than comparing with a number
        return [(keys.item(0), _ALL)]
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(keys)]
    return [(ordered.item(start), order[start:stop]) for start, stop in pairwise(starts)]


class ReleaseOrder:
    """Cached blocks of one queue in the order of their release: the least recently used first.

    The entry of a block that is referenced again becomes stale. It is recognised by its stamp, because a block is
    released at most once with one stamp. When the arrays are full, stale entries are removed and the rest moves to
    larger arrays. Each of these takes few array operations for any number of entries. Block ids have the type of an
    index, so that the pool need not convert them again.
    """

    def __init__(self, is_current: IsCurrent) -> None:
        self._is_current = is_current
        self._start = self._stop = 0
        self._block_ids, self._stamps = np.empty(0, dtype=np.intp), np.empty(0, dtype=np.int64)

    def add(self, priorities: int | Numbers, stamp: int | Numbers, block_ids: AnyBlockIds) -> None:
        """Add blocks that are released together, in the order of their eviction; their stamp is their priority."""
        if self._stop + len(block_ids) > len(self._block_ids):
            self._grow(len(block_ids))
        start, self._stop = self._stop, self._stop + len(block_ids)
        self._block_ids[start : self._stop] = block_ids
        self._stamps[start : self._stop] = stamp

    def _grow(self, num_new: int) -> None:
        stamps, block_ids = self.entries()
        self._start, self._stop = 0, len(block_ids)
        capacity = 2 * (self._stop + num_new) + MAX_STALE
        self._block_ids, self._stamps = np.empty(capacity, dtype=np.intp), np.empty(capacity, dtype=np.int64)
        self._block_ids[: self._stop], self._stamps[: self._stop] = block_ids, stamps

    def first_priority(self) -> int | None:
        """Remove stale entries before the first block, and return its priority; None if there is none."""
        while self._start < self._stop:
            stamps, block_ids = self._first(_LOOK_AHEAD)
            is_current = self._is_current(stamps, block_ids)
            index = int(is_current.argmax())
            if is_current[index]:
                self._start += index
                return stamps.item(index)
            self._start += len(block_ids)
        return None

    def pop(self, num_blocks: int) -> AnyBlockIds | None:
        """Remove the first blocks, ``num_blocks`` at most and one at least; return None if there is none."""
        while self._start < self._stop:
            stamps, block_ids = self._first(num_blocks)
            self._start += len(block_ids)
            current: AnyBlockIds = block_ids[self._is_current(stamps, block_ids)]
            if len(current):
                return current
            # That removes the stale entries that follow, many at once.
            self.first_priority()
        return None

    def _first(self, max_blocks: int) -> tuple[Numbers, AnyBlockIds]:
        start, stop = self._start, min(self._stop, self._start + max_blocks)
        return self._stamps[start:stop], self._block_ids[start:stop]

    def entries(self) -> tuple[Numbers, AnyBlockIds]:
        """Return the stamps and ids of all blocks, without stale entries."""
        stamps, block_ids = self._first(self._stop - self._start)
        is_current = self._is_current(stamps, block_ids)
        return stamps[is_current], block_ids[is_current]


class PriorityOrder:
    """Cached blocks of one queue in the order of their priorities, and blocks of one priority in that of their release.

    Entries of one release and one priority are a run. Stale ones are recognised by their stamp, as in a
    ``ReleaseOrder``, and removed run by run when too many are stale.
    """

    def __init__(self, is_current: IsCurrent) -> None:
        self._is_current = is_current
        # The priority of a run, a number that grows from run to run, its stamp, and its blocks.
        self._runs: list[tuple[int, int, int, AnyBlockIds]] = []
        self._num_runs = self._num_entries = self._num_kept = 0

    def add(self, priorities: int | Numbers, stamp: int, block_ids: AnyBlockIds) -> None:
        """Add blocks that are released together, each with its priority."""
        for priority, where in equal_runs(priorities):
            self._num_runs += 1
            # A copy, because the given array may be a part of a block table.
            heappush(self._runs, (priority, self._num_runs, stamp, block_ids[where].copy()))
        self._num_entries += len(block_ids)
        if self._num_entries > 2 * self._num_kept + MAX_STALE:
            self._remove_stale()

    def _remove_stale(self) -> None:
        current = [(*entry[:3], entry[3][self._is_current(*entry[2:])]) for entry in self._runs]
        self._runs = [entry for entry in current if len(entry[3])]
        heapify(self._runs)
        self._num_entries = self._num_kept = sum(len(entry[3]) for entry in self._runs)

    def first_priority(self) -> int | None:
        """Remove stale entries before the first block, and return its priority; None if there is none."""
        while self._runs:
            priority, _, stamp, block_ids = self._runs[0]
            block_ids = block_ids[:_LOOK_AHEAD]
            is_current = self._is_current(stamp, block_ids)
            index = int(is_current.argmax())
            if is_current[index]:
                self._take(index)
                return priority
            self._take(len(block_ids))
        return None

    def pop(self, num_blocks: int) -> AnyBlockIds | None:
        """Do what ``ReleaseOrder.pop`` does; the blocks of at most one run are returned at a time."""
        if self.first_priority() is None:
            return None
        _, _, stamp, block_ids = self._runs[0]
        block_ids = block_ids[:num_blocks]
        self._take(len(block_ids))
        current: AnyBlockIds = block_ids[self._is_current(stamp, block_ids)]
        return current

    def _take(self, count: int) -> None:
        """Remove the first entries of the first run."""
        priority, number, stamp, block_ids = self._runs[0]
        self._num_entries -= count
        if count < len(block_ids):
            self._runs[0] = priority, number, stamp, block_ids[count:]
        else:
            heappop(self._runs)

    def rank_by_release(self) -> None:
        """Order the blocks by their release from now on."""
        self._runs = [(stamp, number, stamp, block_ids) for _, number, stamp, block_ids in self._runs]
        heapify(self._runs)


class PolicyPriorities:
    """Asks a policy for the ``priority`` of blocks, by index, and keeps the data that the policy needs.

    That is how often each block was used, and which share of released blocks was found again, by their uses before.
    These counts fade as content is released, so that the shares are recent ones.
    """

    def __init__(self, policy: EvictionPolicy, page_bytes: Sequence[int], capacity: int, num_indices: int) -> None:
        """Try the policy, with the bytes of a block of each group and of the pool; it may raise a ``PluginError``.

        ``hinted`` holds the hints of requests, once there are any.
        """
        self.hinted: HintedPages | None = None
        self.policy = policy
        self._page_bytes = np.array(page_bytes, dtype=np.int64)
        self._capacity = max(capacity, 1)
        self._uses = np.zeros(num_indices, dtype=np.int64)
        self.priority = np.full(num_indices, _NOT_RANKED)
        self._clock = 0
        # The counts begin as if so many blocks of each number of uses had been released and found again: the first few
        # blocks change the shares little.
        self._assumed = max(16.0, capacity // max(page_bytes, default=1) / 16)
        self._num_found = np.full(MOST_USES + 1, self._assumed)
        self._num_released = self._num_found.copy()
        uses, sizes = np.array([0, 1, 1000]), np.full(3, 16)
        self._ask(1, uses, sizes, np.array([-1, 0, 5]), np.array([3.0, math.nan, 0.0]))

    def rank(self, pool_indices: PoolIndices, groups: int | Groups) -> Numbers:
        """Return the priority of blocks that are released together; a wrong answer raises a ``PluginError``."""
        num_bytes = np.broadcast_to(self._page_bytes[groups], len(pool_indices)).copy()
        # One more for each release, so that no two clocks are equal.
        clock_step = 1 + int(num_bytes[self.priority[pool_indices] == _NOT_RANKED].sum())
        self._clock += clock_step
        uses = self._uses[pool_indices]
        fading = float(0.5 ** (clock_step / self._capacity / _MEMORY))
        for counts in (self._num_found, self._num_released):
            counts *= fading
            counts += (1 - fading) * self._assumed
        self._num_released += _count(uses)
        return self._rank(pool_indices, uses, num_bytes)

    def rank_again(self, pool_indices: PoolIndices, groups: int | Groups) -> Numbers:
        """Return the priority of cached blocks whose hints have changed; a wrong answer raises a ``PluginError``."""
        num_bytes = np.broadcast_to(self._page_bytes[groups], len(pool_indices)).copy()
        return self._rank(pool_indices, self._uses[pool_indices], num_bytes)

    def _rank(self, pool_indices: PoolIndices, uses: Numbers, num_bytes: Numbers) -> Numbers:
        hints: tuple[Any, ...] = ()
        if self.hinted is not None:
            hints = self.hinted.levels(pool_indices), self.hinted.seconds_left(pool_indices)
        priorities = self._ask(self._clock, uses, num_bytes, *hints)
        self.priority[pool_indices] = priorities
        return priorities

    def use(
        self,
        block_ids: BlockIds,
        pool_indices: PoolIndices,
        groups: Groups,
        hints: Hints,
        owner: str,
        limit: KeptLimit,
    ) -> BlockIds:
        """Record the hints of a request that used blocks; return blocks that are not needed any more."""
        if self.hinted is None:
            max_kept_bytes = int(limit.share * self._capacity)
            is_used = self.priority != _NOT_RANKED
            # The request may have released some of its own blocks already.
            is_used[pool_indices] = self._uses[pool_indices] > 0
            self.hinted = HintedPages(is_used, limit.now, max_kept_bytes)
        return self.hinted.use(block_ids, pool_indices, self._page_bytes[groups], hints, owner)

    def _ask(self, clock: int, uses: Numbers, num_bytes: Numbers, *hints: Any) -> Numbers:
        label, count = f"eviction policy {self.policy.name!r}", len(uses)
        # A block that is found while another request holds it was found without a release.
        shares = np.minimum(self._num_found / self._num_released, 1.0)
        pages = ReleasedPages(clock, uses, num_bytes, self._capacity, shares, *hints)
        priorities = call(f"{label}: priorities()", self.policy.priorities, pages)
        if not isinstance(priorities, np.ndarray) or priorities.shape != (count,) or priorities.dtype != np.int64:
            is_array = isinstance(priorities, np.ndarray)
            answer = f"{priorities.dtype} of shape {priorities.shape}" if is_array else type(priorities).__name__
            raise PluginError(f"{label}: priorities() has to return int64 of shape ({count},), not {answer}")
        return priorities

    def count_uses(self, pool_indices: PoolIndices) -> None:
        """Count one more use of blocks that a request found."""
        self._num_found += _count(self._uses[pool_indices])
        self._uses[pool_indices] += 1

    def forget_blocks(self, pool_indices: PoolIndices | slice) -> None:
        """Drop the data of the blocks at some indices, because their content ended."""
        self._uses[pool_indices] = 0
        self.priority[pool_indices] = _NOT_RANKED
        if self.hinted is not None:
            self.hinted.forget(pool_indices)

    def resize(self, capacity: int, num_new: int) -> None:
        """Set another capacity in bytes, and add entries for more blocks."""
        if self.hinted is not None:
            self.hinted.resize(num_new, self.hinted.max_kept_bytes * max(capacity, 1) // self._capacity)
        self._capacity = max(capacity, 1)
        self._uses = np.append(self._uses, np.zeros(num_new, dtype=np.int64))
        self.priority = np.append(self.priority, np.full(num_new, _NOT_RANKED))


def _count(uses: Numbers) -> Numbers:
    """Return ``[MOST_USES + 1]``: how many blocks have each number of uses."""
    return np.bincount(np.minimum(uses, MOST_USES), minlength=MOST_USES + 1)
