"""Who published each page, so that it is found through them, and what they know it by."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from kvframe.cache.free_list import BlockIds

Places = npt.NDArray[np.intp]
Indices = npt.NDArray[np.int32] | npt.NDArray[np.int64]
NO_OWNER = 0
"""The owner of a page that nobody published."""


class Owners:
    """Who published each page.

    What is published as it is let go of is noted as a whole, by when that was: most of it is given up as a whole. Who
    takes a part of it, or gives it to another owner, lets each page be noted before.
    """

    def __init__(self, num_places: int, places: Callable[[BlockIds], Places]) -> None:
        """Start with nothing published.

        Args:
            num_places: Places that pages may have.
            places: Returns the place of each of some pages.
        """
        self._places = places
        self._owner = np.full(num_places, NO_OWNER, dtype=np.int32)
        self._index = np.zeros(num_places, dtype=np.int32)
        self._whole: dict[int, tuple[int, BlockIds, Indices]] = {}

    def publish(self, owner: int | BlockIds, places: Places, indices: Indices) -> None:
        """Note of each page its owner, one for all or one of each, and what the owner knows it by."""
        self._owner[places] = owner
        self._index[places] = indices

    def retire(self, stamp: int, owner: int, block_ids: BlockIds, indices: Indices) -> None:
        """Note pages as a whole.

        Args:
            stamp: When they are let go of.
            owner: Who publishes them.
            block_ids: The pages; kept, and not to be changed.
            indices: What the owner knows each by; likewise.
        """
        self._whole[stamp] = owner, block_ids, indices

    def note(self, stamps: Iterable[int]) -> None:
        """Note each page of what was retired at some of these times, which may come several times."""
        for stamp in stamps if self._whole else ():
            whole = self._whole.pop(stamp, None)
            if whole is not None:
                self._note(*whole)

    def _note(self, owner: int, block_ids: BlockIds, indices: Indices) -> None:
        self.publish(owner, self._places(block_ids), indices)

    def of(self, places: Places) -> npt.NDArray[np.int32]:
        """Return the owner of each page; ``NO_OWNER`` of those that were retired as a whole."""
        return self._owner[places]

    def of_all(self, places: Places, stamps: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return the owner of each page, whenever it was let go of."""
        owners = self._owner[places]
        for stamp in self._whole.keys() & stamps.tolist() if self._whole else ():
            owners[stamps == stamp] = self._whole[stamp][0]
        return owners

    def take(self, places: Places, stamp: int) -> tuple[int | npt.NDArray[np.int32], Indices]:
        """Let pages be nobody's.

        Args:
            places: Theirs.
            stamp: When they were let go of; any time if that is not the same of all.

        Returns:
            Whose they were, an ``int`` if all were of one; and what each was known by.
        """
        whole = self._whole.pop(stamp, None)
        if whole is not None:
            owner, block_ids, indices = whole
            if len(block_ids) == len(places):
                return owner, indices
            self._note(owner, block_ids, indices)
        owners = self._owner[places]
        self._owner[places] = NO_OWNER
        data = owners.tobytes()
        is_of_one = data == data[: owners.itemsize] * len(owners)
        return int(owners[0]) if is_of_one else owners, self._index[places]

    def clear(self, places: Places) -> None:
        """Let pages be nobody's; none is retired as a part of a whole."""
        self._owner[places] = NO_OWNER

    def forget(self) -> None:
        """Let every page be nobody's."""
        self._owner[...] = NO_OWNER
        self._whole.clear()

    def grow(self, num_places: int) -> None:
        """Have so many places more."""
        self._owner = np.concatenate([self._owner, np.full(num_places, NO_OWNER, dtype=np.int32)])
        self._index = np.concatenate([self._index, np.zeros(num_places, dtype=np.int32)])
