"""What is given up first: queues of cached pages, in the order in which they were let go of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvframe.cache.free_pages import BlockIds, Groups

Batch = tuple[int, BlockIds]
"""A stamp, and the pages that were let go of together, the first to be given up first."""


Mixed = tuple[int, BlockIds, int | Groups]
"""Likewise, with their group or the group of each."""


class LeastRecentlyUsed:
    """Cached pages of every group, the longest unused first.

    A page that is taken again is not looked for: its entry is stale, which whoever takes from a queue sees by the
    page's stamp, if that is among the thinned ones. So letting go of pages costs next to nothing, and sorting them
    waits until somebody needs room.

    Attributes:
        num_entries: Pages in all queues, stale entries included.
        unsorted: What nobody has sorted by group yet, the first to be given up first; all of it where groups do not
            matter.
        thinned: The stamps of which some entries are stale.
    """

    def __init__(self, num_groups: int) -> None:
        """Start empty."""
        self._queues: list[deque[Batch]] = [deque() for _ in range(num_groups)]
        self.unsorted: deque[Mixed] = deque()
        self.thinned: set[int] = set()
        self.num_entries = 0

    def add(self, stamp: int, block_ids: BlockIds, group: int | Groups) -> None:
        """Put pages at the end.

        Args:
            stamp: When: larger than any before.
            block_ids: The pages, the first to be given up first.
            group: Their group, or the group of each.
        """
        self.num_entries += len(block_ids)
        self.unsorted.append((stamp, block_ids, group))

    def note_taken(self, stamps: npt.NDArray[np.int64]) -> None:
        """Take note that pages are not cached any more.

        Args:
            stamps: ``[n], int64, host``: when each was let go of.
        """
        first = int(stamps[0])
        if np.count_nonzero(stamps == first) == len(stamps):
            self.thinned.add(first)
        else:
            self.thinned.update(np.unique(stamps).tolist())

    def queue(self, group: int) -> deque[Batch]:
        """Return a group's queue. Whoever takes pages from it, stale ones too, says so by ``num_entries``."""
        while self.unsorted:
            stamp, block_ids, groups = self.unsorted.popleft()
            if isinstance(groups, int):
                self._queues[groups].append((stamp, block_ids))
                continue
            for each in np.unique(groups).tolist():
                self._queues[each].append((stamp, block_ids[groups == each]))
        return self._queues[group]

    def entries(self) -> Iterator[Mixed]:
        """Go through all entries, stale ones included."""
        for group, queue in enumerate(self._queues):
            yield from ((stamp, block_ids, group) for stamp, block_ids in queue)
        yield from self.unsorted

    def keep(self, is_current: Callable[[int, BlockIds], npt.NDArray[np.bool_]]) -> None:
        """Leave out stale entries: all but those that ``is_current`` says of a stamp and pages."""
        for queue in self._queues:
            sorted_ = [(stamp, block_ids[is_current(stamp, block_ids)]) for stamp, block_ids in queue]
            queue.clear()
            queue.extend(each for each in sorted_ if len(each[1]))
        kept: deque[Mixed] = deque()
        for stamp, block_ids, group in self.unsorted:
            current = is_current(stamp, block_ids)
            if current.any():
                kept.append((stamp, block_ids[current], group if isinstance(group, int) else group[current]))
        self.unsorted = kept
        self.thinned.clear()
        self.num_entries = sum(len(block_ids) for _, block_ids, _ in self.entries())

    def clear(self) -> None:
        """Forget every entry."""
        self.unsorted.clear()
        for queue in self._queues:
            queue.clear()
        self.thinned.clear()
        self.num_entries = 0
