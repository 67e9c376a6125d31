"""Pins: cached prefixes that are not evicted until they are unpinned."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from kvframe.cache.block_order import BlockIds
from kvframe.cache.block_pool import BlockPool
from kvframe.cache.prefix_lookup import PrefixHit
from kvframe.contract.errors import RequestError
from kvframe.planning.plan import KVCachePlan


@attrs.define(eq=False)
class Pin:
    """A cached prefix that is kept.

    Attributes:
        num_tokens: Its tokens, whole blocks in every group.
        blocks: Per group, by block index, the pages that a request needs to continue after the prefix; 0 for a block
            that it does not need. For an input, the pages of all its blocks.
        is_held: Whether the pages are kept: until ``unpin``, or until the cache is reset.
    """

    num_tokens: int
    blocks: list[BlockIds]
    is_held: bool = True


class Pins:
    """Holds the pages of pins, and checks that the longest request still fits into the rest of the pool.

    Invariant: the pool counts one holder of a page for each pin of it that ``is_held``.
    """

    def __init__(self, plan: KVCachePlan, pool: BlockPool) -> None:
        self.plan = plan
        self._pool = pool
        self._pins: dict[int, Pin] = {}

    def pin_prefix(self, hit: PrefixHit, *, checks_capacity: bool = True) -> Pin:
        """Hold the pages that a request needs to continue after a hit; refuse if the longest request no longer fits."""
        pin = Pin(hit.num_tokens, [hit.needed_pages(group) for group in self.plan.groups])
        if checks_capacity:
            self._check_capacity(pin)
        for group, ids in enumerate(pin.blocks):
            self._pool.add_references(group, ids[ids != 0])
        self._pins[id(pin)] = pin
        return pin

    def unpin_prefix(self, pin: Pin) -> None:
        """Release a pin's pages, which stay cached until they are evicted; do nothing if they were released before."""
        if self._pins.pop(id(pin), None) is None:
            return
        pin.is_held = False
        for group, ids in enumerate(pin.blocks):
            self._pool.release_blocks(ids[ids != 0][::-1], group)

    def unpin_all(self) -> None:
        """Release the pages of every pin."""
        for pin in list(self._pins.values()):
            self.unpin_prefix(pin)

    def fit_into(self, plan: KVCachePlan) -> bool:
        """Return whether the longest request still fits if all pins stay and the pool has a plan's number of slabs."""
        if plan.num_slabs >= self.plan.num_slabs or not len(self.pinned_pages()):
            return True
        needed, left = self._needed_and_left(plan, self._pins.values())
        return needed <= left

    def pinned_pages(self) -> BlockIds:
        """Return the pages of all pins, each as often as it is pinned."""
        return _pages_of(self._pins.values())

    def _check_capacity(self, pin: Pin) -> None:
        plan, others = self.plan, tuple(self._pins.values())
        needed_before, left_before = self._needed_and_left(plan, others)
        needed, left = self._needed_and_left(plan, (*others, pin))
        # Pages that are pinned already take no more capacity.
        if needed - left > max(0, needed_before - left_before):
            raise RequestError(
                f"with these {pin.num_tokens} tokens pinned, {left} of the cache's {plan.num_slabs} slabs are left, "
                f"but a request of {plan.max_model_len} tokens, the most there may be, takes {needed}; give the cache "
                "more memory, lower max_model_len, or unpin others",
                code="no_capacity",
            )

    def _needed_and_left(self, plan: KVCachePlan, pins: Iterable[Pin]) -> tuple[int, int]:
        """Return the slabs that the longest request needs, and those without a page of some pins, in a smaller plan."""
        pages = np.unique(_pages_of(pins))
        needed = plan.num_slabs_for(plan.peak_blocks(plan.max_model_len))
        num_removed = self.plan.num_slabs - plan.num_slabs
        return needed, self._pool.free_list.count_idle_slabs(pages) - num_removed


def _pages_of(pins: Iterable[Pin]) -> BlockIds:
    parts = [ids[ids != 0] for pin in pins for ids in pin.blocks]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
