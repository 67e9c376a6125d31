"""Eviction: in which order cached blocks are evicted, least recently used first or as an eviction policy says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvframe.cache.free_list import BlockIds, Groups
from kvframe.contract.errors import PluginError
from kvframe.contract.eviction import MOST_USES, EvictionPolicy, LetGo
from kvframe.contract.foreign import call

Numbers = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]
Where = slice | Places | npt.NDArray[np.bool_]
Run = tuple[int, BlockIds]
"""The stamp of a release, and blocks in the order of eviction."""
IsCurrent = Callable[[int | Numbers, BlockIds], npt.NDArray[np.bool_]]
_NOT_RANKED = int(np.iinfo(np.int64).min)
_LOOK_AHEAD = 512
"""Entries that are checked at once for the first one that is not stale."""
_MEMORY = 2
"""After the release of so many times the pool's size, older counts are halved."""


def of_groups(groups: int | Groups, where: Where) -> int | Groups:
    """Return the groups of some of the blocks; a single group stays single."""
    return groups if isinstance(groups, int) else groups[where]


def all_equal(keys: Groups | BlockIds) -> bool:
    """Return whether all elements are equal."""
    # Comparing bytes is faster than comparing with a number.
    data = keys.tobytes()
    return data == data[: keys.itemsize] * len(keys)


def sorted_runs(keys: Groups | BlockIds) -> list[tuple[int, slice]]:
    """Return the different keys of a sorted array, each with where it stands."""
    starts = [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist(), len(keys)]
    return [(keys.item(start), slice(start, stop)) for start, stop in pairwise(starts)]


def equal_runs(keys: int | Groups | BlockIds) -> list[tuple[int, Where]]:
    """Return the different keys in ascending order, each with where it stands; an int is the key of all elements."""
    if isinstance(keys, int):
        return [(keys, slice(None))]
    if not len(keys) or all_equal(keys):
        return [(keys.item(0), slice(None))] if len(keys) else []
    order = np.argsort(keys, kind="stable")
    return [(key, order[where]) for key, where in sorted_runs(keys[order])]


class EvictionQueue:
    """Cached blocks in the order of eviction: the smallest priority first, of equal ones those released first.

    The entry of a block that is referenced again becomes stale. It stays until it is the first one or until too many
    are stale, and is recognised by its stamp: a block is released at most once with one stamp.

    Attributes:
        num_entries: Blocks in all queues, stale entries included.
    """

    def __init__(self, num_groups: int, is_current: IsCurrent, *, is_shared: bool) -> None:
        """Start empty.

        Args:
            num_groups: How many groups there are.
            is_current: Says of each block that was released at a stamp whether it has been cached since then.
            is_shared: Whether all groups share one queue: any block serves any group.
        """
        self.num_entries = self._num_runs = 0
        self._is_current = is_current
        self._is_shared = is_shared
        # The priority of all blocks of a run, a number that grows from run to run, and the run.
        self._queues: list[list[tuple[int, int, Run]]] = [[] for _ in range(1 if is_shared else num_groups)]

    def add_blocks(self, priorities: int | Numbers, stamp: int, block_ids: BlockIds, groups: int | Groups) -> None:
        """Add blocks that are released together, those first that are evicted first if priorities are equal.

        Args:
            priorities: Their priority, or the priority of each.
            stamp: Larger than any before.
            block_ids: The blocks.
            groups: Their group, or the group of each.
        """
        self.num_entries += len(block_ids)
        if isinstance(priorities, int):
            self._add_run(priorities, stamp, block_ids, groups)
            return
        for priority, where in equal_runs(priorities):
            self._add_run(priority, stamp, block_ids[where], of_groups(groups, where))

    def _add_run(self, priority: int, stamp: int, block_ids: BlockIds, groups: int | Groups) -> None:
        self._num_runs += 1
        if self._is_shared:
            heappush(self._queues[0], (priority, self._num_runs, (stamp, block_ids)))
            return
        for group, where in equal_runs(groups):
            heappush(self._queues[group], (priority, self._num_runs, (stamp, block_ids[where])))

    def first_priority(self, group: int) -> int | None:
        """Remove stale entries before a group's first block, and return its priority; None if there is none."""
        queue = self._queue_of(group)
        while queue:
            priority, _, (stamp, block_ids) = queue[0]
            is_current = self._is_current(stamp, block_ids[:_LOOK_AHEAD])
            num_stale = int(is_current.argmax()) if is_current.any() else len(is_current)
            if not num_stale:
                return priority
            self._pop_run(queue, num_stale)
        return None

    def pop_blocks(self, group: int, num_blocks: int, whole_run: int) -> BlockIds | None:
        """Remove the first ``num_blocks`` entries of a group, and more while all are stale; return the other blocks.

        A run of at most ``whole_run`` entries is removed as a whole.

        Returns:
            At least one block; None if there is none.
        """
        queue = self._queue_of(group)
        while queue:
            runs: list[Run] = []
            num_lacking = num_blocks
            while num_lacking > 0 and queue:
                runs.append(self._pop_run(queue, num_lacking, whole_run))
                num_lacking -= len(runs[-1][1])
            stamp, block_ids = runs[0] if len(runs) == 1 else _joined(runs)
            current: BlockIds = block_ids[self._is_current(stamp, block_ids)]
            if len(current):
                return current
            # That removes the stale entries that follow, many at once.
            self.first_priority(group)
        return None

    def _pop_run(self, queue: list[tuple[int, int, Run]], num_blocks: int, whole_run: int = 0) -> Run:
        """Remove at most ``num_blocks`` entries of the first run, or all if they are no more than ``whole_run``."""
        priority, number, (stamp, block_ids) = queue[0]
        if len(block_ids) <= max(num_blocks, whole_run):
            heappop(queue)
        else:
            queue[0] = priority, number, (stamp, block_ids[num_blocks:])
            block_ids = block_ids[:num_blocks]
        self.num_entries -= len(block_ids)
        return stamp, block_ids

    def _queue_of(self, group: int) -> list[tuple[int, int, Run]]:
        return self._queues[0 if self._is_shared else group]

    def all_runs(self) -> Iterator[Run]:
        """Go through the runs of all queues, stale entries included."""
        for queue in self._queues:
            yield from (run for _, _, run in queue)

    def remove_stale(self) -> None:
        """Remove all stale entries."""
        for queue in self._queues:
            current = [(each, number, (run[0], run[1][self._is_current(*run)])) for each, number, run in queue]
            queue[:] = [entry for entry in current if len(entry[2][1])]
            heapify(queue)
        self.num_entries = sum(len(block_ids) for _, block_ids in self.all_runs())

    def sort_by_stamp(self) -> None:
        """Let the stamp of its release be the priority of each block."""
        for queue in self._queues:
            queue[:] = [(run[0], number, run) for _, number, run in queue]
            heapify(queue)

    def remove_all(self) -> None:
        """Remove all entries."""
        for queue in self._queues:
            queue.clear()
        self.num_entries = 0


def _joined(runs: Sequence[Run]) -> tuple[Numbers, BlockIds]:
    """Return the stamp of each block of several runs, and the blocks."""
    stamps, parts = zip(*runs, strict=True)
    return np.repeat(stamps, [len(part) for part in parts]), np.concatenate(parts)


class PolicyPriorities:
    """Asks an eviction policy for the priority of blocks, and keeps the data that the policy needs."""

    def __init__(self, policy: EvictionPolicy, page_bytes: Sequence[int], capacity: int, num_places: int) -> None:
        """Try the policy, with the bytes of a block of each group and of the pool.

        Raises:
            PluginError: The policy raises or answers wrongly.
        """
        self.policy = policy
        self._page_bytes = np.array(page_bytes, dtype=np.int64)
        self._capacity = max(capacity, 1)
        self._uses = np.zeros(num_places, dtype=np.int64)
        self._priority = np.full(num_places, _NOT_RANKED)
        self._clock = 0
        self._reuse = Reuse(capacity // max(page_bytes, default=1))
        self._ask(1, np.array([0, 1, 1000]), np.full(3, 16))

    def rank(self, places: Places, groups: int | Groups) -> Numbers:
        """Return the priority of the blocks at some places, which are released together.

        Raises:
            PluginError: The policy raises or answers wrongly.
        """
        num_bytes = np.broadcast_to(self._page_bytes[groups], len(places)).copy()
        # One more for each release, so that no two clocks are equal.
        passed = 1 + int(num_bytes[self._priority[places] == _NOT_RANKED].sum())
        self._clock += passed
        uses = self._uses[places]
        self._reuse.count_released(uses, passed / self._capacity)
        priorities = self._ask(self._clock, uses, num_bytes)
        self._priority[places] = priorities
        return priorities

    def _ask(self, clock: int, uses: Numbers, num_bytes: Numbers) -> Numbers:
        whose, count = f"eviction policy {self.policy.name!r}", len(uses)
        released = LetGo(clock, uses, num_bytes, self._capacity, self._reuse.shares())
        given = call(f"{whose}: due()", self.policy.due, released)
        if not isinstance(given, np.ndarray) or given.shape != (count,) or given.dtype != np.int64:
            is_array = isinstance(given, np.ndarray)
            what = f"{given.dtype} of shape {given.shape}" if is_array else type(given).__name__
            raise PluginError(f"{whose}: due() has to return int64 of shape ({count},), not {what}")
        return given

    def priorities_of(self, places: Places) -> Numbers:
        """Return the priorities of cached blocks; of free ones, the smallest number."""
        return self._priority[places]

    def count_uses(self, places: Places) -> None:
        """Count one more use of blocks that a request found."""
        self._reuse.count_found(self._uses[places])
        self._uses[places] += 1

    def forget_blocks(self, places: Places | slice) -> None:
        """Drop the data of the blocks at some places, because their content is gone."""
        self._uses[places] = 0
        self._priority[places] = _NOT_RANKED

    def resize(self, capacity: int, num_new: int) -> None:
        """Set another capacity in bytes, and add entries for more blocks."""
        self._capacity = max(capacity, 1)
        self._uses = np.append(self._uses, np.zeros(num_new, dtype=np.int64))
        self._priority = np.append(self._priority, np.full(num_new, _NOT_RANKED))


class Reuse:
    """Which share of released blocks is found again, by how often they were used before.

    Counts fade as content is released, so that the shares are recent ones.
    """

    def __init__(self, num_blocks: int) -> None:
        """Know nothing of a pool of so many blocks."""
        # As if so many blocks of each number of uses had been released, and all found again: a few blocks say little.
        self._assumed = max(16.0, num_blocks / 16)
        self._found = np.full(MOST_USES + 1, self._assumed)
        self._released = self._found.copy()

    def count_found(self, uses: Numbers) -> None:
        """Count blocks that were found, after so many uses each."""
        self._found += np.bincount(np.minimum(uses, MOST_USES), minlength=MOST_USES + 1)

    def count_released(self, uses: Numbers, passed: float) -> None:
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
