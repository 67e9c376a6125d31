"""What is given up first where a policy says it: queues of cached pages, in the order in which they are due."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from kvframe.cache.eviction import CachedPages, Current, IsCurrent, Mixed
from kvframe.cache.free_list import BlockIds, Groups
from kvframe.cache.slabs import Slabs
from kvframe.errors import PluginError
from kvframe.eviction import MOST_USES, EvictionPolicy, LetGo
from kvframe.foreign import call
from kvframe.plan import KVCachePlan

_log = logging.getLogger("kvframe")
Dues = npt.NDArray[np.int64]
_Run = tuple[int, int, int, BlockIds, int | Groups]
"""When it is due, its stamp, a number that no other has, and its pages, the first to be given up first, with their
group or the group of each."""
_AT_ONCE, _NEVER = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)
_MEMORY = 2
"""How often the pool is filled anew until what was seen counts half."""
_SPARE = 1024
"""Entries of slabs that are not idle any more which are kept besides as many as there are idle slabs."""


class Reuse:
    """Which share of pages is found again, by how often they were used before.

    What was counted fades as time passes, so that the shares are those of late.
    """

    def __init__(self, num_pages: int) -> None:
        """Know nothing.

        Args:
            num_pages: Pages of the pool.
        """
        # As if so many pages of each kind had been let go of, and all found again: a few pages say little.
        self._assumed = max(16.0, num_pages / 16)
        self._found = np.full(MOST_USES + 1, self._assumed)
        self._let_go = np.full(MOST_USES + 1, self._assumed)

    def count_found(self, uses: npt.NDArray[np.int64]) -> None:
        """Take note of pages that were found, after so many uses each."""
        self._found += np.bincount(np.minimum(uses, MOST_USES), minlength=MOST_USES + 1)

    def count_let_go(self, uses: npt.NDArray[np.int64], passed: float) -> None:
        """Take note of pages that were let go of after so many uses each, when the pool was filled so often anew."""
        fading = float(0.5 ** (passed / _MEMORY))
        for counts in (self._found, self._let_go):
            counts *= fading
            counts += (1 - fading) * self._assumed
        self._let_go += np.bincount(np.minimum(uses, MOST_USES), minlength=MOST_USES + 1)

    def shares(self) -> npt.NDArray[np.float64]:
        """Return ``[MOST_USES + 1], float64``: for each number of uses, the share that was found again."""
        # What is found while another request holds it was not let go of.
        shares: npt.NDArray[np.float64] = np.minimum(self._found / self._let_go, 1.0)
        return shares


class PagesByDue(CachedPages):
    """Cached pages of every group, the first due first.

    An entry is told from a stale one by its stamp alone: a page is let go of once with a stamp, so whatever a policy
    says, two entries of a page are never both current.

    A policy that raises, or returns something else than it has to, is set aside: the pages that are cached, and all
    later ones, are given up by when they were let go of.

    Attributes:
        policy: Who says when pages are due; None once it is set aside.
        capacity: Bytes of the pool.
        num_orders: Policies that there were so far: dues before and after a change do not compare.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        page_bytes: Sequence[int],
        capacity: int,
        num_places: int,
        places: Callable[[BlockIds], npt.NDArray[np.intp]],
    ) -> None:
        """Start empty, and try the policy.

        Args:
            policy: Who says when pages are due.
            page_bytes: Of each group.
            capacity: Bytes of the pool.
            num_places: Places that pages may have.
            places: Returns the place of each of some pages, by which what is known of it is kept.

        Raises:
            PluginError: The policy raises, or returns something else than it has to.
        """
        super().__init__()
        self.policy: EvictionPolicy | None = policy
        self.num_orders = 1
        self._queues: list[list[_Run]] = [[] for _ in page_bytes]
        # What nobody has sorted by group yet; all of it where groups do not matter.
        self._unsorted: list[_Run] = []
        self._page_bytes = np.array(page_bytes, dtype=np.int64)
        self.capacity = capacity
        self._places = places
        self._uses = np.zeros(num_places, dtype=np.int64)
        self._due = np.full(num_places, _AT_ONCE)
        self._is_known = np.zeros(num_places, dtype=bool)
        self._clock = 0
        self._num_runs = 0
        self._reuse = Reuse(capacity // max(page_bytes, default=1))
        self._ask(policy, LetGo(1, np.array([0, 1, 1000]), np.full(3, 16), max(capacity, 1), self._reuse.shares()))

    # --- what is known of pages ---------------------------------------------------------------------------------------

    def count_uses(self, block_ids: BlockIds) -> None:
        """Take note that a request found pages; 0 for none."""
        places = self._places(block_ids[block_ids != 0])
        self._reuse.count_found(self._uses[places])
        self._uses[places] += 1

    def end(self, block_ids: BlockIds) -> None:
        """Take note that the content of pages ends."""
        places = self._places(block_ids)
        self._uses[places] = 0
        self._due[places] = _AT_ONCE
        self._is_known[places] = False

    def grow(self, num_new: int) -> None:
        """Have room for pages at so many places more."""
        self._uses = np.concatenate([self._uses, np.zeros(num_new, dtype=np.int64)])
        self._due = np.concatenate([self._due, np.full(num_new, _AT_ONCE)])
        self._is_known = np.concatenate([self._is_known, np.zeros(num_new, dtype=bool)])

    def dues(self, block_ids: BlockIds) -> Dues:
        """Return when pages are due; of those that are not cached, as soon as can be."""
        return self._due[self._places(block_ids)]

    # --- the queues ---------------------------------------------------------------------------------------------------

    def add(self, stamp: int, block_ids: BlockIds, group: int | Groups) -> None:
        """Put pages where they belong."""
        places = self._places(block_ids)
        num_bytes = (
            self._page_bytes[group]
            if not isinstance(group, int)
            else np.repeat(self._page_bytes[group], len(block_ids))
        )
        # One more for each time, so that no two times are equal.
        passed = 1 + int(num_bytes[~self._is_known[places]].sum())
        self._clock += passed
        self._is_known[places] = True
        uses = self._uses[places]
        self._reuse.count_let_go(uses, passed / max(self.capacity, 1))
        dues = self._dues(stamp, LetGo(self._clock, uses, num_bytes, self.capacity, self._reuse.shares()))
        self._due[places] = dues
        self.num_entries += len(block_ids)
        order = np.argsort(dues, kind="stable")
        block_ids, dues = block_ids[order], dues[order]
        group = group if isinstance(group, int) else group[order]
        starts = [0, *(np.flatnonzero(dues[1:] != dues[:-1]) + 1).tolist()]
        for start, stop in zip(starts, [*starts[1:], len(dues)], strict=True):
            self._num_runs += 1
            its = group if isinstance(group, int) else group[start:stop]
            heappush(self._unsorted, (int(dues[start]), stamp, self._num_runs, block_ids[start:stop], its))

    def _queue(self, group: int) -> list[_Run]:
        for due, stamp, number, block_ids, groups in self._unsorted:
            for each in (groups,) if isinstance(groups, int) else np.unique(groups).tolist():
                its = block_ids if isinstance(groups, int) else block_ids[groups == each]
                heappush(self._queues[each], (due, stamp, number, its, each))
        self._unsorted.clear()
        return self._queues[group]

    def first(self, group: int, current: Current) -> int | None:
        """Return when a group's first page is due; None if it has none."""
        queue = self._queue(group)
        while queue:
            due, stamp, _, block_ids, _ = queue[0]
            if len(current(stamp, block_ids, group)[0]):
                return due
            heappop(queue)
            self.num_entries -= len(block_ids)
        return None

    def take(self, group: int, num_pages: int, current: Current) -> BlockIds | None:
        """Take out at most as many of a group's pages, perhaps none of them; None if it has none."""
        queue = self._queue(group)
        return self._take(queue, num_pages, 0, current)[0] if queue else None

    def take_any(self, num_pages: int, uncut: int, current: Current) -> tuple[BlockIds, int | Groups] | None:
        """Take out pages of whatever group, perhaps none, and return them with their group; None if none is left."""
        return self._take(self._unsorted, num_pages, uncut, current) if self._unsorted else None

    def _take(self, queue: list[_Run], num_pages: int, uncut: int, current: Current) -> tuple[BlockIds, int | Groups]:
        due, stamp, number, block_ids, group = heappop(queue)
        self.num_entries -= len(block_ids)
        block_ids, group = current(stamp, block_ids, group)
        if len(block_ids) > max(num_pages, uncut):
            rest = group if isinstance(group, int) else group[num_pages:]
            heappush(queue, (due, stamp, number, block_ids[num_pages:], rest))
            self.num_entries += len(block_ids) - num_pages
            block_ids = block_ids[:num_pages]
            group = group if isinstance(group, int) else group[:num_pages]
        return block_ids, group

    def entries(self) -> Iterator[Mixed]:
        """Go through all entries, stale ones included."""
        for queue in (*self._queues, self._unsorted):
            yield from ((stamp, block_ids, group) for _, stamp, _, block_ids, group in queue)

    def keep(self, is_current: IsCurrent) -> None:
        """Leave out stale entries: all but those that ``is_current`` says of a stamp and pages."""
        for queue in (*self._queues, self._unsorted):
            kept: list[_Run] = []
            for due, stamp, number, block_ids, group in queue:
                current = is_current(stamp, block_ids)
                if current.any():
                    its = group if isinstance(group, int) else group[current]
                    kept.append((due, stamp, number, block_ids[current], its))
            queue[:] = kept
            heapify(queue)
        self.thinned.clear()
        self.num_entries = sum(len(block_ids) for _, block_ids, _ in self.entries())

    def clear(self) -> None:
        """Forget every entry, and how often pages were used."""
        for queue in (*self._queues, self._unsorted):
            queue.clear()
        self.thinned.clear()
        self.num_entries = 0
        self._uses[...] = 0
        self._is_known[...] = False

    # --- the policy ---------------------------------------------------------------------------------------------------

    def _dues(self, stamp: int, pages: LetGo) -> Dues:
        if self.policy is not None:
            try:
                return self._ask(self.policy, pages)
            except PluginError as error:
                _log.error("%s; it is set aside, and cached pages are given up by when they were used last", error)
                self._set_aside()
        return np.full(len(pages.num_bytes), stamp)

    def _ask(self, policy: EvictionPolicy, pages: LetGo) -> Dues:
        whose, count = f"eviction policy {policy.name!r}", len(pages.num_bytes)
        dues = call(f"{whose}: due()", policy.due, pages)
        if not isinstance(dues, np.ndarray) or dues.shape != (count,) or dues.dtype != np.int64:
            is_array = isinstance(dues, np.ndarray)
            given = f"{dues.dtype} of shape {dues.shape}" if is_array else f"{type(dues).__name__}"
            raise PluginError(f"{whose}: due() has to return int64 of shape ({count},), not {given}")
        return dues

    def _set_aside(self) -> None:
        """Order what is cached by stamps."""
        self.policy = None
        self.num_orders += 1
        for queue in (*self._queues, self._unsorted):
            queue[:] = [(stamp, stamp, number, block_ids, group) for _, stamp, number, block_ids, group in queue]
            heapify(queue)
        for stamp, block_ids, _ in sorted(self.entries(), key=_stamp):
            # A page's last entry is the current one, if one is.
            self._due[self._places(block_ids)] = stamp


def _stamp(entry: Mixed) -> int:
    return entry[0]


class SlabsByDue(Slabs):
    """Slabs of which the idle one whose last page is due first is given to another group first."""

    def __init__(self, plan: KVCachePlan, reserve: int, pages: PagesByDue) -> None:
        """Start with every slab free.

        Args:
            plan: The cut of the pool.
            reserve: As for ``Slabs``.
            pages: Who knows when pages are due.
        """
        super().__init__(plan, reserve)
        self._pages = pages
        self._num_orders = pages.num_orders
        self._order: list[tuple[int, int, int]] = []

    def _sleep(self, slab: int, group: int) -> None:
        super()._sleep(slab, group)
        if self._cached[slab]:
            self._rank(slab)

    def _rank(self, slab: int) -> None:
        """Put an idle slab with cached pages where it belongs."""
        self._idle[slab] = due = int(self._pages.dues(self._pages_of(slab, self._group[slab])).max())
        heappush(self._order, (due, self.clock, slab))
        if len(self._order) > 2 * len(self._idle) + _SPARE:
            self._order = [entry for entry in set(self._order) if self._idle.get(entry[2]) == entry[0]]
            heapify(self._order)

    def _first_idle(self) -> tuple[int, int]:
        if self._num_orders != self._pages.num_orders:
            self._num_orders = self._pages.num_orders
            self._order.clear()
            for slab in [slab for slab in self._idle if self._cached[slab]]:
                self._rank(slab)
        while self._order:
            due, _, slab = self._order[0]
            if self._idle.get(slab) == due:
                return slab, due
            heappop(self._order)
        return 0, _NEVER
