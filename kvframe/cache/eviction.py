"""What is given up first: queues of cached pages, in some order, and in that in which they were let go of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvframe.cache.free_list import BlockIds, Groups

Batch = tuple[int, BlockIds]
"""A stamp, and the pages that were let go of together, the first to be given up first."""


Mixed = tuple[int, BlockIds, int | Groups]
"""Likewise, with their group or the group of each."""


Current = Callable[[int, BlockIds, "int | Groups"], tuple[BlockIds, "int | Groups"]]
"""Returns those of pages that were let go of together that are still cached since then, and their groups."""

IsCurrent = Callable[[int, BlockIds], npt.NDArray[np.bool_]]
"""Returns of each of them whether it is."""


class CachedPages(ABC):
    """Cached pages of every group, the first to be given up first.

    A page that is taken again is not looked for: its entry is stale, which whoever takes from a queue sees by the
    page's stamp, if that is among the thinned ones.

    Attributes:
        num_entries: Pages in all queues, stale entries included.
        thinned: The stamps of which some entries are stale.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.thinned: set[int] = set()
        self.num_entries = 0

    @abstractmethod
    def add(self, stamp: int, block_ids: BlockIds, group: int | Groups) -> None:
        """Take in pages that are let go of together.

        Args:
            stamp: When: larger than any before.
            block_ids: The pages, the first to be given up first.
            group: Their group, or the group of each.
        """

    @abstractmethod
    def first(self, group: int, current: Current) -> int | None:
        """Return when a group's first page is due; None if it has none."""

    @abstractmethod
    def take(self, group: int, num_pages: int, current: Current) -> BlockIds | None:
        """Take out at most as many of a group's pages, perhaps none of them; None if it has none."""

    @abstractmethod
    def take_any(self, num_pages: int, uncut: int, current: Current) -> tuple[BlockIds, int | Groups] | None:
        """Take out pages of whatever group, perhaps none, and return them with their group; None if none is left.

        Args:
            num_pages: At most so many,
            uncut: or those that were let go of together and are no more than these.
            current: Leaves out stale entries.
        """

    @abstractmethod
    def entries(self) -> Iterator[Mixed]:
        """Go through all entries, stale ones included."""

    @abstractmethod
    def keep(self, is_current: IsCurrent) -> None:
        """Leave out stale entries: all but those that ``is_current`` says of a stamp and pages."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every entry."""

    def note_taken(self, stamps: npt.NDArray[np.int64]) -> list[int]:
        """Take note that pages are not cached any more.

        Args:
            stamps: ``[n], int64, host``: when each was let go of.

        Returns:
            These times, each once.
        """
        first = int(stamps[0])
        times = [first] if np.count_nonzero(stamps == first) == len(stamps) else np.unique(stamps).tolist()
        self.thinned.update(times)
        return times


class LeastRecentlyUsed(CachedPages):
    """The longest unused pages first.

    Letting go of pages costs next to nothing, and sorting them waits until somebody needs room.
    """

    def __init__(self, num_groups: int) -> None:
        """Start empty."""
        super().__init__()
        self._queues: list[deque[Batch]] = [deque() for _ in range(num_groups)]
        # What nobody has sorted by group yet, the first to be given up first; all of it where groups do not matter.
        self._unsorted: deque[Mixed] = deque()

    def add(self, stamp: int, block_ids: BlockIds, group: int | Groups) -> None:
        """Put pages at the end."""
        self.num_entries += len(block_ids)
        self._unsorted.append((stamp, block_ids, group))

    def first(self, group: int, current: Current) -> int | None:
        """Return when a group's longest unused page was let go of; None if it has none."""
        queue = self._queue(group)
        while queue:
            stamp, block_ids = queue[0]
            if len(current(stamp, block_ids, group)[0]):
                return stamp
            queue.popleft()
            self.num_entries -= len(block_ids)
        return None

    def take(self, group: int, num_pages: int, current: Current) -> BlockIds | None:
        """Take out at most as many of a group's pages, perhaps none of them; None if it has none."""
        queue = self._queue(group)
        if not queue:
            return None
        stamp, block_ids = queue.popleft()
        self.num_entries -= len(block_ids)
        block_ids, _ = current(stamp, block_ids, group)
        if len(block_ids) > num_pages:
            queue.appendleft((stamp, block_ids[num_pages:]))
            self.num_entries += len(block_ids) - num_pages
            block_ids = block_ids[:num_pages]
        return block_ids

    def take_any(self, num_pages: int, uncut: int, current: Current) -> tuple[BlockIds, int | Groups] | None:
        """Take out pages of whatever group, perhaps none, and return them with their group; None if none is left."""
        queue = self._unsorted
        if not queue:
            return None
        stamp, block_ids, group = queue.popleft()
        self.num_entries -= len(block_ids)
        block_ids, group = current(stamp, block_ids, group)
        if len(block_ids) > max(num_pages, uncut):
            rest = group if isinstance(group, int) else group[num_pages:]
            queue.appendleft((stamp, block_ids[num_pages:], rest))
            self.num_entries += len(block_ids) - num_pages
            block_ids = block_ids[:num_pages]
            group = group if isinstance(group, int) else group[:num_pages]
        return block_ids, group

    def _queue(self, group: int) -> deque[Batch]:
        while self._unsorted:
            stamp, block_ids, groups = self._unsorted.popleft()
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
        yield from self._unsorted

    def keep(self, is_current: IsCurrent) -> None:
        """Leave out stale entries: all but those that ``is_current`` says of a stamp and pages."""
        for queue in self._queues:
            sorted_ = [(stamp, block_ids[is_current(stamp, block_ids)]) for stamp, block_ids in queue]
            queue.clear()
            queue.extend(each for each in sorted_ if len(each[1]))
        kept: deque[Mixed] = deque()
        for stamp, block_ids, group in self._unsorted:
            current = is_current(stamp, block_ids)
            if current.any():
                kept.append((stamp, block_ids[current], group if isinstance(group, int) else group[current]))
        self._unsorted = kept
        self.thinned.clear()
        self.num_entries = sum(len(block_ids) for _, block_ids, _ in self.entries())

    def clear(self) -> None:
        """Forget every entry."""
        self._unsorted.clear()
        for queue in self._queues:
            queue.clear()
        self.thinned.clear()
        self.num_entries = 0
