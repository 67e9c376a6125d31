"""The policy: least recently used, but pages that will be used again are evicted later: by experience, or by hints."""

from __future__ import annotations

from typing import ClassVar

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.contract import MOST_USES, EvictionPolicy, ReleasedPages

MOST_PATIENCE = 1000


def _is_patience(policy: object, attribute: attrs.Attribute[float], value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MOST_PATIENCE:  # type: ignore[operator]
        raise ValueError(f"patience must be a number from 0 to {MOST_PATIENCE}, not {value!r}")


@attrs.frozen(kw_only=True)
class ScanResistant(EvictionPolicy):
    """Pages that were used again are not evicted for one-off prompts.

    A page's priority is the clock of its release, plus ``patience * (1 - new / its) ** 2`` times the size of the pool.
    Here, *new* is the recent share of never used pages that were hit again. *Its* is the largest such share of the
    pages that were used at most as often as this page. If new pages are hit as often as others, as in conversations,
    the policy equals least recently used. If they are rarely hit, one-off prompts are evicted first. No page is kept
    for ever: a priority is larger by ``patience`` times the pool at most.

    Hints go before experience. A page that is needed for some time (``keep_seconds``) counts as one that is always hit
    again; when the time is over, experience decides. A page that is not needed any more counts as one that was never
    hit, and was released one size of the pool earlier. A page that only less urgent requests use (a ``priority`` above
    0) counts as released half of that earlier, unless a request says that it needs it.

    Attributes:
        patience: The number of times that the pool may be refilled before a page is evicted whose kind is always hit
            again, if new pages are never hit, or that is needed by a hint; 0 is least recently used.
    """

    name: ClassVar[str] = "scan_resistant"

    patience: float = attrs.field(default=4.0, validator=_is_patience)

    def priorities(self, pages: ReleasedPages) -> npt.NDArray[np.int64]:
        """Return for each page the clock of its release, plus the delay of its kind."""
        worth = np.maximum.accumulate(pages.reuse)
        better = 1.0 - np.divide(worth[0], worth, out=np.ones_like(worth), where=worth > 0)
        later = (self.patience * better**2 * pages.capacity).astype(np.int64)
        delay = later[np.minimum(pages.uses, MOST_USES)]
        if pages.seconds_left is not None and self.patience:
            delay[pages.seconds_left > 0] = self.patience * pages.capacity
            delay[pages.seconds_left == 0] = -pages.capacity
            if pages.request_priorities is not None:
                delay[(pages.request_priorities > 0) & np.isnan(pages.seconds_left)] -= pages.capacity // 2
        priorities: npt.NDArray[np.int64] = pages.clock + delay
        return priorities
