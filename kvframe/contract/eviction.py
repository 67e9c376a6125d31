"""Eviction policies: which cached pages are evicted first when a request needs pages.

When requests release pages that stay cached, the policy gives each page a number, its priority: once, and for all pages
of the release together. The page with the smallest priority is evicted first. This happens in a step, so it must be
fast.

Nothing here imports NumPy or torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import attrs

from kvframe.contract.growth import Growing

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


MOST_USES = 15
"""Pages that were found this often, or more often, are counted together."""


@attrs.frozen(eq=False)
class ReleasedPages:
    """Pages that are released together, and what is known of them.

    Attributes:
        clock: Bytes of content that were released for the first time so far, these pages included. A later release has
            a larger clock; the difference of two clocks is the new content that was released in between.
        uses: ``[n], int64, host``: how many later requests found each page since its content was computed.
        num_bytes: ``[n], int64, host``: the size of each page.
        capacity: Bytes of the pool. While the clock advances by this much, the whole cache can be filled anew.
        reuse: ``[MOST_USES + 1], float64, host``: among pages that were released lately after 0, 1, 2, … uses (the last
            entry: ``MOST_USES`` or more), the share that was found again; ones while nothing is known.
        request_priorities: ``[n], int64, host``: the smallest priority that the senders of the requests hint that used
            each page: a smaller number is more urgent. None if no request of the cache had hints.
        seconds_left: ``[n], float64, host``: for how many more seconds each page will be needed, as these senders hint:
            0 if it is not needed any more, NaN if none says or the time is over. None if no request of the cache had
            hints.
    """

    clock: int
    uses: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]
    capacity: int
    reuse: npt.NDArray[np.float64]
    request_priorities: npt.NDArray[np.int64] | None = None
    seconds_left: npt.NDArray[np.float64] | None = None


@attrs.frozen(kw_only=True)
class EvictionPolicy(Growing, ABC):
    """In which order cached pages are evicted: the base of every policy.

    A policy is a frozen value; its fields are the options that a stack gives. Its answers depend on its arguments only,
    so one value can serve any number of caches.
    """

    name: ClassVar[str]
    """The registered name (``"scan_resistant"``)."""

    @abstractmethod
    def priorities(self, pages: ReleasedPages) -> npt.NDArray[np.int64]:
        """Return a priority for each page: the page with the smallest one is evicted first.

        Among pages with equal priorities, those released earlier are evicted first. Among pages released together, the
        end of a prefix is evicted before its beginning. For this to hold within every prefix, a policy keeps two laws:

        * of two pages released together, the one with more uses and no worse hints never gets the smaller priority;
        * of two pages with equal uses and hints, the one released later never gets the smaller priority while ``reuse``
          is the same.

        Hints are worse if the request priority is larger, or the page is needed for a shorter time. If no request says
        for how long a page is needed, it ranks between one that is needed for some time and one that is not. If the
        time ends for which a cached page is needed, the policy is asked for it once more.

        Args:
            pages: The pages. The policy may keep and change its arrays.

        Returns:
            ``[n], int64, host``: any numbers; only their order counts.
        """


@attrs.frozen(kw_only=True)
class LeastRecentlyUsed(EvictionPolicy):
    """Evicts the page that was released first. Built in: the policy of a stack that names none."""

    name: ClassVar[str] = "lru"

    def priorities(self, pages: ReleasedPages) -> npt.NDArray[np.int64]:
        """Return the clock for every page."""
        return pages.uses * 0 + pages.clock


LRU: EvictionPolicy = LeastRecentlyUsed()
"""The policy of a cache if none is chosen."""
