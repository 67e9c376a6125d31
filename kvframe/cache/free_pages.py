"""Which pages are free: what a pool asks of whoever keeps them, and what that one asks of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvframe.plan import KVCachePlan

BlockIds = npt.NDArray[np.int32]
"""``[n], int32, host``: block ids, each once."""
Groups = npt.NDArray[np.int64]
"""``[n], int64, host``: the group of each."""
SHORT = 32
"""Pages are short where one in so many, or fewer, is free."""


class Evictor(Protocol):
    """Evicts cached pages: each comes back by ``give``, and perhaps others that are of no use without it."""

    def oldest(self, group: int) -> int | None:
        """Return when a group's first cached page is due; None if it has none."""

    def evict_oldest(self, group: int, num_pages: int) -> None:
        """Give up as many of a group's cached pages, or all if it has fewer."""

    def evict_oldest_of_any(self, num_pages: int, uncut: int) -> None:
        """Give up as many cached pages, of whatever group, or all if there are fewer.

        Args:
            num_pages: The pages wanted.
            uncut: Pages that were let go of together are given up together if they are no more than these.
        """

    def evict_among(self, group: int, block_ids: BlockIds, num_pages: int) -> None:
        """Give up the cached ones of some pages, the first due first, until ``num_pages`` are."""


class FreePages(Protocol):
    """Which pages are free. Who owns the others is not its concern, only whether they are held or cached.

    Attributes:
        clock: A stamp that is larger than any before.
    """

    clock: int

    @property
    def num_idle_slabs(self) -> int:
        """Return how many slabs have no held page."""

    @property
    def is_short(self) -> bool:
        """Return whether so few pages are free that what is cached has to be given up soon."""

    def has_room(self, num_blocks: Sequence[int]) -> bool:
        """Return whether ``take`` would find as many pages for each group."""

    def take(self, num_blocks: Sequence[int], evictor: Evictor) -> BlockIds | None:
        """Take pages for each group, which are held from now on.

        Returns:
            Their block ids, one group after the other; None, and nothing changed, if there are too few.
        """

    def give(self, block_ids: BlockIds) -> None:
        """Take back pages without content."""

    def hold(self, group: int, block_ids: BlockIds) -> None:
        """Take note that cached pages are held again."""

    def let_go(self, block_ids: BlockIds, is_cached: npt.NDArray[np.bool_] | bool) -> None:
        """Take note that pages are not held any more; those that are not cached are given back beside."""

    def uncache(self, block_ids: BlockIds) -> None:
        """Take note that cached pages are given up; they are given back beside."""

    def resize(self, plan: KVCachePlan, reserve: int) -> None:
        """Have as many slabs as a plan says, which is the same in all else; those that go have free pages only.

        Args:
            plan: The cut of the pool.
            reserve: Idle slabs that an allocation leaves alone as long as it can.
        """

    def cut_pages(self) -> BlockIds:
        """Return all pages that are cut."""

    def free_pages(self) -> BlockIds:
        """Return those of them that are free."""

    def count_idle_slabs(self, held: BlockIds) -> int:
        """Return how many slabs have none of the pages that are held."""
