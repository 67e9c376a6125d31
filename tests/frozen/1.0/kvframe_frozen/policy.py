"""An eviction policy: pages that later requests found stay longer. Replace ``priorities`` by your own."""

from __future__ import annotations

from typing import ClassVar

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.contract import EvictionPolicy, ReleasedPages


@attrs.frozen(kw_only=True)
class FrozenEviction(EvictionPolicy):
    """Evicts pages that were found after those that were not, unless they are older by the size of the pool."""

    name: ClassVar[str] = "frozen_eviction"

    def priorities(self, pages: ReleasedPages) -> npt.NDArray[np.int64]:
        """Return a number for each page; the smallest is evicted first."""
        return pages.clock + (pages.uses > 0) * np.int64(pages.capacity)
