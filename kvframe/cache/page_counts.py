"""How many pages of each group somebody holds, how many are cached, and the most that were held at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.free_list import Groups

_FEW = 8
"""Groups up to which one number each is faster than arrays."""


class PageCounts:
    """Counts of pages.

    Attributes:
        held_bytes: Bytes of held pages.
        peak_held_bytes: The most of them at once.
        num_cached: Cached pages of all groups.
    """

    def __init__(self, page_bytes: Sequence[int]) -> None:
        """Start with none.

        Args:
            page_bytes: Bytes of a page of each group.
        """
        self._bytes_of = tuple(page_bytes)
        self._page_bytes = np.array(page_bytes, dtype=np.int64)
        self._held, self._peak_held, self._cached = np.zeros((3, len(page_bytes)), dtype=np.int64)
        # Single numbers are read and written several times as fast in these.
        self._held_of, self._peak_of, self._cached_of = self._held.data, self._peak_held.data, self._cached.data
        self.held_bytes = self.peak_held_bytes = self.num_cached = 0

    @property
    def held(self) -> list[int]:
        """Per group, the pages that somebody holds."""
        pages: list[int] = self._held.tolist()
        return pages

    @property
    def peak_held(self) -> list[int]:
        """Per group, the most of them at once."""
        pages: list[int] = self._peak_held.tolist()
        return pages

    @property
    def cached(self) -> list[int]:
        """Per group, the cached pages."""
        pages: list[int] = self._cached.tolist()
        return pages

    def hold(self, num_pages: Sequence[int]) -> None:
        """Count so many more pages of each group as held."""
        if len(num_pages) <= _FEW:
            held, peak_held = self._held_of, self._peak_of
            for group, count in enumerate(num_pages):
                if count:
                    held[group] = num_held = held[group] + count
                    self.held_bytes += count * self._bytes_of[group]
                    if num_held > peak_held[group]:
                        peak_held[group] = num_held
        else:
            counts = np.array(num_pages, dtype=np.int64)
            self._held += counts
            np.maximum(self._peak_held, self._held, out=self._peak_held)
            self.held_bytes += int(counts @ self._page_bytes)
        if self.held_bytes > self.peak_held_bytes:
            self.peak_held_bytes = self.held_bytes

    def wake(self, group: int, num_pages: int) -> None:
        """Count cached pages of a group as held."""
        self._cached_of[group] -= num_pages
        self.num_cached -= num_pages
        self._held_of[group] += num_pages
        self._peak_of[group] = max(self._peak_of[group], self._held_of[group])
        self.held_bytes += num_pages * self._bytes_of[group]
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)

    def let_go(self, group: int | Groups, num_pages: int, is_cached: npt.NDArray[np.bool_] | bool) -> None:
        """Count held pages as cached or as nothing.

        Args:
            group: Their group, or the group of each.
            num_pages: How many they are.
            is_cached: Whether they are cached, all or each.
        """
        num_cached = num_pages if is_cached is True else 0 if is_cached is False else int(np.count_nonzero(is_cached))
        if isinstance(group, int):
            self._held_of[group] -= num_pages
            self.held_bytes -= num_pages * self._bytes_of[group]
            if num_cached:
                self._cached_of[group] += num_cached
                self.num_cached += num_cached
            return
        counts = np.bincount(group, minlength=len(self._held))
        self._held -= counts
        self.held_bytes -= int(counts @ self._page_bytes)
        if num_cached:
            self._cached += counts if num_cached == num_pages else np.bincount(group[is_cached], minlength=len(counts))
            self.num_cached += num_cached

    def end(self, group: int | Groups, num_pages: int) -> None:
        """Count cached pages, of one group or each of its own, as nothing."""
        self.num_cached -= num_pages
        if isinstance(group, int):
            self._cached_of[group] -= num_pages
        else:
            self._cached -= np.bincount(group, minlength=len(self._cached))
