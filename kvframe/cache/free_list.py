"""The free list: a stack of free blocks of one size. The pool reports each change of a block to it, or to ``Slabs``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvframe.contract.eviction import EvictionPolicy
from kvframe.planning.plan import KVCachePlan

BlockIds = npt.NDArray[np.int32]
"""``[n], int32, host``: block ids, each once."""
AnyBlockIds = BlockIds | npt.NDArray[np.intp]
"""Likewise; block ids in an order of eviction have the type of an index, so that they need not be converted."""
Groups = npt.NDArray[np.int64]
"""``[n], int64, host``: the group of each."""
FULL_SHARE = 32
"""The pool is nearly full if one block of so many, or fewer, is free."""


class Cached(Protocol):
    """What a list of free blocks asks of the pool about cached ones (``BlockPool``)."""

    num_cached: int

    @property
    def eviction(self) -> EvictionPolicy:
        """The policy that orders them."""

    def first_priority(self, group: int) -> int | None:
        """Return the priority of the block of a group that is evicted first."""

    def priorities_of(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        """Return the priorities of blocks."""

    def evict_first(self, group: int, num_blocks: int) -> None:
        """Evict blocks of a group."""

    def evict_among(self, block_ids: BlockIds, num_blocks: int) -> None:
        """Evict some of these blocks."""


class FreeList:
    """Free blocks that serve any group: those of an only group, or of groups whose blocks are as large as a slab.

    Invariant: the lower part of the stack is exactly the blocks that are neither held nor cached.
    """

    def __init__(self, plan: KVCachePlan, pool: Cached) -> None:
        self._plan, self._pool = plan, pool
        self._per_slab = plan.groups[0].pages_per_slab if plan.groups else 1
        self._stack = self.all_blocks()[::-1].copy()
        self._num_free = self._num_blocks = len(self._stack)

    @staticmethod
    def fits(plan: KVCachePlan) -> bool:
        """Return whether any block of a plan serves any group."""
        return len(plan.groups) == 1 or all(group.page_bytes == plan.slab_bytes for group in plan.groups)

    @property
    def num_idle_slabs(self) -> int:
        """The number of slabs that the blocks that are not held would fill."""
        return (self._num_free + self._pool.num_cached) // self._per_slab

    @property
    def is_nearly_full(self) -> bool:
        """Whether nearly all blocks are held or cached."""
        return FULL_SHARE * self._num_free <= self._num_blocks

    def can_take(self, num_blocks: Sequence[int]) -> bool:
        """Return whether so many blocks are not held."""
        return sum(num_blocks) <= self._num_free + self._pool.num_cached

    def take_free(self, num_blocks: Sequence[int]) -> BlockIds | None:
        """Take free blocks for each group, evicting cached ones if too few are free; None if there are too few."""
        count = sum(num_blocks)
        if count > self._num_free:
            num_lacking = count - self._num_free
            if num_lacking > self._pool.num_cached:
                return None
            self._pool.evict_first(0, num_lacking)
        before, self._num_free = self._num_free, self._num_free - count
        return self._stack[self._num_free : before].copy()

    def move_blocks(self, block_ids: AnyBlockIds, held: int, cached: int, stamp: int) -> None:
        """Put blocks on top of the stack that are neither held nor cached now; the pool counts the others."""
        if held + cached < 0:
            before, self._num_free = self._num_free, self._num_free + len(block_ids)
            self._stack[before : self._num_free] = block_ids

    def resize(self, plan: KVCachePlan, reserve: int) -> None:
        """Put added blocks at the bottom of the stack, or remove the last blocks, which are all free."""
        free, before = self.free_blocks(), self._num_blocks
        self._plan = plan
        blocks = self.all_blocks()
        added, kept = blocks[before:][::-1], free[free <= blocks.max(initial=0)]
        self._num_blocks, self._num_free = len(blocks), len(added) + len(kept)
        self._stack = np.zeros(len(blocks), dtype=np.int32)
        self._stack[: self._num_free] = np.concatenate([added, kept])

    def all_blocks(self) -> BlockIds:
        """Return all blocks."""
        plan = self._plan
        if not plan.groups:
            return np.zeros(0, dtype=np.int32)
        first, size = plan.null_bytes // plan.block_id_bytes, plan.groups[0].page_bytes // plan.block_id_bytes
        slabs = first + plan.slab_bytes // plan.block_id_bytes * np.arange(plan.num_slabs, dtype=np.int32)
        return (slabs[:, None] + size * np.arange(self._per_slab, dtype=np.int32)).reshape(-1)

    def free_blocks(self) -> BlockIds:
        """Return the blocks on the stack."""
        return self._stack[: self._num_free].copy()

    def count_idle_slabs(self, held: BlockIds) -> int:
        """Return the number of slabs that all blocks but the given ones would fill."""
        return (self._num_blocks - len(held)) // self._per_slab
