"""Free pages: what a block pool asks of the class that lists them, and the list for pages that are all of one size."""

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
_MAX_UNCUT = 256
"""Pages that were let go of together are given up together, though fewer are needed, if they are no more than these,
and a small part of the pool: a prefix is given up in few pieces."""


class Evictor(Protocol):
    """Evicts cached pages: each comes back by ``give``, and perhaps others that are of no use without it."""

    def first_priority(self, group: int) -> int | None:
        """Return when a group's first cached page is due; None if it has none."""

    def evict_group(self, group: int, num_pages: int) -> None:
        """Give up as many of a group's cached pages, or all if it has fewer."""

    def evict_any(self, num_pages: int, uncut: int) -> None:
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


class FreeList:
    """Pages that serve any group: those of a lone group, or of groups whose pages are all as large as a slab.

    Invariant: the lower part of the stack is exactly the pages that are neither held nor cached.
    """

    def __init__(self, plan: KVCachePlan) -> None:
        """Start with every page free, those at the pool's start on top."""
        self._plan = plan
        self._per_slab = plan.groups[0].pages_per_slab if plan.groups else 1
        self.clock = 0
        self._stack = self.cut_pages()[::-1].copy()
        self._num_free = self._num_pages = len(self._stack)
        self._num_held = 0
        self._uncut = min(_MAX_UNCUT, self._num_pages // 32)

    @staticmethod
    def fit(plan: KVCachePlan) -> bool:
        """Return whether a plan's pages are such."""
        return len(plan.groups) == 1 or all(group.page_bytes == plan.slab_bytes for group in plan.groups)

    @property
    def num_idle_slabs(self) -> int:
        """Slabs' worth of pages that are not held."""
        return (self._num_pages - self._num_held) // self._per_slab

    @property
    def is_short(self) -> bool:
        """Return whether nearly all pages are held or cached."""
        return SHORT * self._num_free <= self._num_pages

    def has_room(self, num_blocks: Sequence[int]) -> bool:
        """Return whether as many pages are not held."""
        return sum(num_blocks) <= self._num_pages - self._num_held

    def take(self, num_blocks: Sequence[int], evictor: Evictor) -> BlockIds | None:
        """Take pages from the top of the stack."""
        count = sum(num_blocks)
        if count > self._num_pages - self._num_held:
            return None
        if count > self._num_free:
            evictor.evict_any(count - self._num_free, self._uncut)
        self._num_held += count
        before, self._num_free = self._num_free, self._num_free - count
        return self._stack[self._num_free : before].copy()

    def give(self, block_ids: BlockIds) -> None:
        """Put pages on top of the stack."""
        before, self._num_free = self._num_free, self._num_free + len(block_ids)
        self._stack[before : self._num_free] = block_ids

    def hold(self, group: int, block_ids: BlockIds) -> None:
        """Count them."""
        self._num_held += len(block_ids)

    def let_go(self, block_ids: BlockIds, is_cached: npt.NDArray[np.bool_] | bool) -> None:
        """Count them."""
        self._num_held -= len(block_ids)

    def uncache(self, block_ids: BlockIds) -> None:
        """Do nothing: a page has no slab to leave."""

    def resize(self, plan: KVCachePlan, reserve: int) -> None:
        """Put the pages that are new under all others, or take out those that go."""
        free, before = self.free_pages(), self._num_pages
        self._plan = plan
        pages = self.cut_pages()
        kept = free[free <= pages[-1]] if len(pages) else free[:0]
        self._num_pages, self._num_free = len(pages), len(pages[before:]) + len(kept)
        self._stack = np.zeros(len(pages), dtype=np.int32)
        self._stack[: self._num_free] = np.concatenate([pages[before:][::-1], kept])
        self._uncut = min(_MAX_UNCUT, self._num_pages // 32)

    def cut_pages(self) -> BlockIds:
        """Return all pages."""
        plan = self._plan
        if not plan.groups:
            return np.zeros(0, dtype=np.int32)
        first, size = plan.null_bytes // plan.block_id_bytes, plan.groups[0].page_bytes // plan.block_id_bytes
        slabs = first + plan.slab_bytes // plan.block_id_bytes * np.arange(plan.num_slabs, dtype=np.int32)
        return (slabs[:, None] + size * np.arange(self._per_slab, dtype=np.int32)).reshape(-1)

    def free_pages(self) -> BlockIds:
        """Return the pages on the stack."""
        return self._stack[: self._num_free].copy()

    def count_idle_slabs(self, held: BlockIds) -> int:
        """Return how many slabs' worth of pages are not held."""
        return (self._num_pages - len(held)) // self._per_slab
