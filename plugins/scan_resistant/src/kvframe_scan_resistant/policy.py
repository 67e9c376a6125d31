"""The policy: least recently used, with a later due for pages of the kind that is found again."""

from __future__ import annotations

from typing import ClassVar

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.contract import MOST_USES, EvictionPolicy, LetGo

MOST_PATIENCE = 1000


def _is_patience(policy: object, attribute: attrs.Attribute[float], value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MOST_PATIENCE:  # type: ignore[operator]
        raise ValueError(f"patience must be a number from 0 to {MOST_PATIENCE}, not {value!r}")


@attrs.frozen(kw_only=True)
class ScanResistant(EvictionPolicy):
    """Pages that were used again stay while one-off prompts pass.

    A page is due when it was let go of, and later by ``patience * (1 - new / its) ** 2`` times the size of the pool: of
    pages that were used as often as it, or less often, *its* is the largest share that was found again lately, and
    *new* the share of pages that were never used. Where new pages are found again as the others are, as those of
    conversations, this is least recently used. Where few are, one-off prompts go first. Nothing stays for ever: by
    ``patience`` times the pool, at most, is a page due later.

    Attributes:
        patience: So many times the pool may be filled anew before a page goes whose kind is always found again, when
            no new one ever is; 0 is least recently used.
    """

    name: ClassVar[str] = "scan_resistant"

    patience: float = attrs.field(default=4.0, validator=_is_patience)

    def due(self, pages: LetGo) -> npt.NDArray[np.int64]:
        """Return the clock, later by what the kind of each page is worth."""
        worth = np.maximum.accumulate(pages.reuse)
        better = 1.0 - np.divide(worth[0], worth, out=np.ones_like(worth), where=worth > 0)
        later = (self.patience * better**2 * pages.capacity).astype(np.int64)
        due: npt.NDArray[np.int64] = pages.clock + later[np.minimum(pages.uses, MOST_USES)]
        return due
