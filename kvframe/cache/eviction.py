"""Eviction: in which order cached blocks are evicted, least recently used first or as an eviction policy says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvframe.cache.free_list import BlockIds, Groups
from kvframe.contract.errors import PluginError
from kvframe.contract.eviction import MOST_USES, EvictionPolicy, LetGo
from kvframe.contract.foreign import call

_log = logging.getLogger("kvframe")
Priorities = npt.NDArray[np.int64]
"""``[n], int64, host``: the priority of each block; the smallest is evicted first."""
Where = slice | npt.NDArray[np.intp] | npt.NDArray[np.bool_]
IsCurrent = Callable[[int, BlockIds], npt.NDArray[np.bool_]]
"""Says of each block that was released at a stamp whether it has been cached since then."""
_Run = tuple[int, int, int, BlockIds, int | Groups]
"""Blocks that were released together and have one priority: the priority, a number that grows from run to run, the
stamp of the release, the blocks in the order of eviction, and their group or the group of each."""
_NOT_CACHED = int(np.iinfo(np.int64).min)
_LOOK_AHEAD = 512
"""Entries that are checked for the first one that is not stale; then 16 times as many, and so on."""
_MEMORY = 2
"""After so many times the pool's size of released content, what was counted counts half."""


Run = tuple[int, BlockIds, int | Groups]
"""The stamp of a release, its blocks, and their group or the group of each."""


def joined_runs(runs: Sequence[Run]) -> tuple[BlockIds, int | Groups]:
    """Return the blocks of several runs, and their group or the group of each."""
    _, block_ids, groups = runs[0]
    if len(runs) == 1:
        return block_ids, groups
    joined = np.concatenate([block_ids for _, block_ids, _ in runs])
    if all(type(of_run) is int and of_run == groups for _, _, of_run in runs):
        return joined, groups
    return joined, np.concatenate(
        [np.full(len(block_ids), of_run) if isinstance(of_run, int) else of_run for _, block_ids, of_run in runs]
    )


def of_groups(groups: int | Groups, where: Where) -> int | Groups:
    """Return the groups of some of the blocks; a single group stays single."""
    return groups if isinstance(groups, int) else groups[where]


def all_equal(keys: Groups | BlockIds) -> bool:
    """Return whether all elements are equal."""
    # Comparing bytes is faster than comparing with a number.
    data = keys.tobytes()
    return data == data[: keys.itemsize] * len(keys)


def equal_runs(keys: int | Groups | BlockIds) -> list[tuple[int, Where]]:
    """Return the different keys in ascending order, each with where it stands, in O(n log n).

    Args:
        keys: The key of each element, or the key of all of them.
    """
    if isinstance(keys, int):
        return [(keys, slice(None))]
    if not len(keys) or all_equal(keys):
        return [(keys.item(0), slice(None))] if len(keys) else []
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist(), len(keys)]
    return [(int(keys[start]), order[start:stop]) for start, stop in pairwise(starts)]


class EvictionQueue:
    """Cached blocks in the order of eviction: the smallest priority first, of equal ones those released first.

    Without a policy the priority of a block is the stamp of its release (LRU). A policy that raises or answers wrongly
    is set aside, and all priorities become stamps.

    The entry of a block that is referenced again becomes stale. It stays until it is the first one or until too many
    are stale, and is recognised by its stamp: a block is released at most once with one stamp.

    Attributes:
        num_entries: Blocks in all queues, stale entries included.
        policy: What an eviction policy says of blocks; None for LRU.
        on_reorder: Called when a policy was set aside: priorities before and after it do not compare.
    """

    def __init__(self, num_groups: int, policy: PolicyPriorities | None, *, is_shared: bool) -> None:
        """Start empty.

        Args:
            num_groups: How many groups there are.
            policy: What an eviction policy says of blocks; None for LRU.
            is_shared: Whether all groups share one queue: any block serves any group.
        """
        self.num_entries = 0
        self.policy = policy
        self.on_reorder: Callable[[], None] | None = None
        self._is_shared = is_shared
        self._queues: list[list[_Run]] = [[] for _ in range(1 if is_shared else num_groups)]
        self._num_runs = 0

    def add_blocks(self, stamp: int, block_ids: BlockIds, groups: int | Groups) -> None:
        """Add blocks that are released together.

        Args:
            stamp: Larger than any before.
            block_ids: The blocks; of equal priority, the first is evicted first.
            groups: Their group, or the group of each.
        """
        self.num_entries += len(block_ids)
        priorities = self._priorities(stamp, block_ids, groups)
        if isinstance(priorities, int):
            self._add_run(priorities, stamp, block_ids, groups)
            return
        for priority, where in equal_runs(priorities):
            self._add_run(priority, stamp, block_ids[where], of_groups(groups, where))

    def _add_run(self, priority: int, stamp: int, block_ids: BlockIds, groups: int | Groups) -> None:
        """Add blocks of one priority, to the queue of each group if there are several queues."""
        self._num_runs += 1
        if self._is_shared:
            heappush(self._queues[0], (priority, self._num_runs, stamp, block_ids, groups))
            return
        for group, where in equal_runs(groups):
            heappush(self._queues[group], (priority, self._num_runs, stamp, block_ids[where], group))

    def first_priority(self, group: int, is_current: IsCurrent) -> int | None:
        """Remove stale entries before a group's first block, and return its priority; None if there is none."""
        runs, num_checked = self._runs_of(group), _LOOK_AHEAD
        while runs:
            priority, _, stamp, block_ids, _ = runs[0]
            is_cached = is_current(stamp, block_ids[:num_checked])
            num_checked *= 16
            num_stale = int(is_cached.argmax()) if is_cached.any() else len(is_cached)
            if not num_stale:
                return priority
            self.pop_run(group, num_stale)
        return None

    def pop_runs(self, group: int, num_blocks: int, whole_run: int) -> list[Run]:
        """Remove entries as ``pop_run`` does, until there are ``num_blocks`` or none is left."""
        runs = []
        while num_blocks > 0 and (run := self.pop_run(group, num_blocks, whole_run)) is not None:
            runs.append(run)
            num_blocks -= len(run[1])
        return runs

    def pop_run(self, group: int, num_blocks: int, whole_run: int = 0) -> Run | None:
        """Remove at most ``num_blocks`` entries of a group's first run, stale ones included.

        Args:
            group: The group; of no meaning if all groups share one queue.
            num_blocks: The most entries.
            whole_run: A run of at most so many entries is removed as a whole.

        Returns:
            The stamp, the blocks, and their group or the group of each; None if no run is left.
        """
        runs = self._runs_of(group)
        if not runs:
            return None
        priority, number, stamp, block_ids, groups = runs[0]
        if len(block_ids) <= max(num_blocks, whole_run):
            heappop(runs)
        else:
            rest = slice(num_blocks, None)
            runs[0] = priority, number, stamp, block_ids[rest], of_groups(groups, rest)
            block_ids, groups = block_ids[:num_blocks], of_groups(groups, slice(num_blocks))
        self.num_entries -= len(block_ids)
        return stamp, block_ids, groups

    def _runs_of(self, group: int) -> list[_Run]:
        return self._queues[0 if self._is_shared else group]

    def all_entries(self) -> Iterator[tuple[int, BlockIds, int | Groups]]:
        """Go through all entries, stale ones included: stamp, blocks, and their group or the group of each."""
        for runs in self._queues:
            yield from ((stamp, block_ids, groups) for _, _, stamp, block_ids, groups in runs)

    def remove_stale(self, is_current: IsCurrent) -> None:
        """Remove all stale entries."""
        for runs in self._queues:
            kept: list[_Run] = []
            for priority, number, stamp, block_ids, groups in runs:
                is_cached = is_current(stamp, block_ids)
                if is_cached.any():
                    kept.append((priority, number, stamp, block_ids[is_cached], of_groups(groups, is_cached)))
            runs[:] = kept
            heapify(runs)
        self.num_entries = sum(len(block_ids) for _, block_ids, _ in self.all_entries())

    def remove_all(self) -> None:
        """Remove all entries."""
        for runs in self._queues:
            runs.clear()
        self.num_entries = 0

    def _priorities(self, stamp: int, block_ids: BlockIds, groups: int | Groups) -> int | Priorities:
        """Return the priority of each block, or of all of them."""
        if self.policy is None:
            return stamp
        try:
            return self.policy.rank(block_ids, groups)
        except PluginError as error:
            _log.error("%s; it is set aside, and the least recently used blocks are evicted first", error)
        self.policy = None
        for runs in self._queues:
            runs[:] = [(old_stamp, number, old_stamp, ids, its) for _, number, old_stamp, ids, its in runs]
            heapify(runs)
        if self.on_reorder is not None:
            self.on_reorder()
        return stamp


class PolicyPriorities:
    """Asks an eviction policy for the priority of blocks, and keeps what it is told of them."""

    def __init__(
        self,
        policy: EvictionPolicy,
        page_bytes: Sequence[int],
        capacity: int,
        num_places: int,
        places: Callable[[BlockIds], npt.NDArray[np.intp]],
    ) -> None:
        """Try the policy.

        Args:
            policy: The policy.
            page_bytes: Bytes of a block of each group.
            capacity: Bytes of the pool.
            num_places: The length of arrays with an entry for each block.
            places: Returns where the entries of blocks are.

        Raises:
            PluginError: The policy raises or answers wrongly.
        """
        self.policy = policy
        self._page_bytes = np.array(page_bytes, dtype=np.int64)
        self._capacity = max(capacity, 1)
        self._places = places
        self._uses = np.zeros(num_places, dtype=np.int64)
        self._priority = np.full(num_places, _NOT_CACHED)
        self._was_released = np.zeros(num_places, dtype=np.bool_)
        self._clock = 0
        self._reuse = Reuse(capacity // max(page_bytes, default=1))
        self._ask(LetGo(1, np.array([0, 1, 1000]), np.full(3, 16), self._capacity, self._reuse.shares()))

    def rank(self, block_ids: BlockIds, groups: int | Groups) -> Priorities:
        """Return the priority of blocks that are released together.

        Raises:
            PluginError: The policy raises or answers wrongly.
        """
        places = self._places(block_ids)
        num_bytes = np.broadcast_to(self._page_bytes[groups], len(block_ids)).copy()
        # One more for each release, so that no two clocks are equal.
        passed = 1 + int(num_bytes[~self._was_released[places]].sum())
        self._clock += passed
        self._was_released[places] = True
        uses = self._uses[places]
        self._reuse.count_released(uses, passed / self._capacity)
        priorities = self._ask(LetGo(self._clock, uses, num_bytes, self._capacity, self._reuse.shares()))
        self._priority[places] = priorities
        return priorities

    def _ask(self, blocks: LetGo) -> Priorities:
        whose, count = f"eviction policy {self.policy.name!r}", len(blocks.num_bytes)
        given = call(f"{whose}: due()", self.policy.due, blocks)
        if not isinstance(given, np.ndarray) or given.shape != (count,) or given.dtype != np.int64:
            is_array = isinstance(given, np.ndarray)
            what = f"{given.dtype} of shape {given.shape}" if is_array else type(given).__name__
            raise PluginError(f"{whose}: due() has to return int64 of shape ({count},), not {what}")
        return given

    def priorities_of(self, block_ids: BlockIds) -> Priorities:
        """Return the priorities of cached blocks; of others, the smallest number."""
        return self._priority[self._places(block_ids)]

    def count_uses(self, block_ids: BlockIds) -> None:
        """Count one more use of blocks that a request found; 0 for none."""
        places = self._places(block_ids[block_ids != 0])
        self._reuse.count_found(self._uses[places])
        self._uses[places] += 1

    def forget_blocks(self, where: npt.NDArray[np.intp] | slice) -> None:
        """Forget what is known of the blocks at some places: their content ends."""
        self._uses[where] = 0
        self._priority[where] = _NOT_CACHED
        self._was_released[where] = False

    def resize_arrays(self, capacity: int, num_places: int) -> None:
        """Have another capacity in bytes, and arrays of at least ``num_places`` entries."""
        self._capacity = max(capacity, 1)
        num_new = max(0, num_places - len(self._uses))
        self._uses = np.concatenate([self._uses, np.zeros(num_new, dtype=np.int64)])
        self._priority = np.concatenate([self._priority, np.full(num_new, _NOT_CACHED)])
        self._was_released = np.concatenate([self._was_released, np.zeros(num_new, dtype=np.bool_)])


class Reuse:
    """Which share of released blocks is found again, by how often they were used before.

    What was counted fades as content is released, so that the shares are recent ones.
    """

    def __init__(self, num_blocks: int) -> None:
        """Know nothing of a pool of so many blocks."""
        # As if so many blocks of each number of uses had been released, and all found again: a few blocks say little.
        self._assumed = max(16.0, num_blocks / 16)
        self._found = np.full(MOST_USES + 1, self._assumed)
        self._released = np.full(MOST_USES + 1, self._assumed)

    def count_found(self, uses: npt.NDArray[np.int64]) -> None:
        """Count blocks that were found, after so many uses each."""
        self._found += np.bincount(np.minimum(uses, MOST_USES), minlength=MOST_USES + 1)

    def count_released(self, uses: npt.NDArray[np.int64], passed: float) -> None:
        """Count released blocks, after so many uses each; ``passed`` is how often the pool was filled since."""
        fading = float(0.5 ** (passed / _MEMORY))
        for counts in (self._found, self._released):
            counts *= fading
            counts += (1 - fading) * self._assumed
        self._released += np.bincount(np.minimum(uses, MOST_USES), minlength=MOST_USES + 1)

    def shares(self) -> npt.NDArray[np.float64]:
        """Return ``[MOST_USES + 1], float64``: for each number of uses, the share that was found again."""
        # A block that is found while another request holds it was found without a release.
        shares: npt.NDArray[np.float64] = np.minimum(self._found / self._released, 1.0)
        return shares
