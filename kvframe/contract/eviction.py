"""Eviction policies: which cached pages are evicted first when a request needs pages.

A policy says once of each page that nobody holds any more when it is due; the page with the smallest due is given up
first. It is asked when pages are let go of, in the step's path, for all of them at once.

Nothing here imports NumPy or torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import attrs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


MOST_USES = 15
"""Pages that were used as often or more are counted as one kind."""


@attrs.frozen(eq=False)
class LetGo:
    """Pages that are let go of together, and what is known of them.

    Attributes:
        clock: How much content was let go of for the first time so far, these pages included, in bytes: what is let go
            of later has a larger one. Of two pages, what newcomers brought in between is the difference.
        uses: ``[n], int64, host``: how often each was found by a later request since its content was computed.
        num_bytes: ``[n], int64, host``: the size of each.
        capacity: Bytes of the pool: when the clock moves on by so many, the cache could have been filled anew.
        reuse: ``[MOST_USES + 1], float64, host``: of pages that were let go of lately after 0, 1, 2, … uses, the last
            for as many and more, the share that was found again; ones while nothing is known.
    """

    clock: int
    uses: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]
    capacity: int
    reuse: npt.NDArray[np.float64]


@attrs.frozen(kw_only=True)
class EvictionPolicy(ABC):
    """When cached pages are due: the base of every policy.

    A policy is a frozen value; its fields are the options that a stack gives. What it says depends on what it is given
    and on nothing else, so that one value serves any number of caches.
    """

    name: ClassVar[str]
    """The registered name (``"scan_resistant"``)."""

    @abstractmethod
    def due(self, pages: LetGo) -> npt.NDArray[np.int64]:
        """Return when pages are due.

        Of pages with one due, those that were let go of first go first; of those that were let go of together, the end
        of a prefix goes before its beginning. So that this holds for any two pages of a prefix, a page that was used
        more often is never due earlier than one that was let go of with it; and, as long as ``reuse`` is the same, one
        that is let go of later is never due earlier than one that was used as often.

        Args:
            pages: The pages. What it holds may be kept or written to.

        Returns:
            ``[n], int64, host``: any numbers; only their order counts.
        """


@attrs.frozen(kw_only=True)
class LeastRecentlyUsed(EvictionPolicy):
    """The page that was let go of first goes first. Built in: what holds where a stack names no policy."""

    name: ClassVar[str] = "lru"

    def due(self, pages: LetGo) -> npt.NDArray[np.int64]:
        """Return the clock for every page."""
        return pages.uses * 0 + pages.clock


LRU: EvictionPolicy = LeastRecentlyUsed()
"""The policy of caches for which nothing else is chosen."""
