"""Pins: cached prefixes that stay, however much others need room, until whoever pinned them lets go."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from kvframe.cache.block_pool import BlockPool
from kvframe.cache.free_list import BlockIds
from kvframe.cache.prefix_lookup import PrefixHit
from kvframe.errors import RequestError
from kvframe.plan import KVCachePlan


@attrs.define(eq=False)
class Pin:
    """A cached prefix that somebody keeps.

    Attributes:
        num_tokens: Its tokens, whole blocks in every group.
        blocks: Per group, by block index, the pages that a request needs to go on behind it; 0 for a block that it does
            not need. Of an input, the pages of all its blocks.
        is_held: Whether they are kept: until ``unpin``, or until the cache is reset.
    """

    num_tokens: int
    blocks: list[BlockIds]
    is_held: bool = True


class Pins:
    """Holds the pages of pins, and sees to it that requests still have room beside them.

    Invariant: each page of each pin that ``is_held`` has one holder for it in the pool.

    Attributes:
        plan: The groups, and how many slabs there are.
    """

    def __init__(self, plan: KVCachePlan, pool: BlockPool) -> None:
        """Start with none.

        Args:
            plan: The groups.
            pool: The pages.
        """
        self.plan = plan
        self._pool = pool
        self._pins: dict[int, Pin] = {}

    def pin(self, hit: PrefixHit, *, checks_room: bool = True) -> Pin:
        """Hold what a request needs to go on behind a prefix that was found.

        Args:
            hit: What was found.
            checks_room: Whether a request of the greatest length must still have room.

        Raises:
            RequestError: It has not (``no_room``); nothing changed.
        """
        pin = Pin(hit.num_tokens, [self._needed(group, hit) for group in range(len(self.plan.groups))])
        if checks_room:
            self._check_room(pin)
        for group, ids in enumerate(pin.blocks):
            held = ids[ids != 0]
            if len(held):
                self._pool.add_references(group, held)
        self._pins[id(pin)] = pin
        return pin

    def unpin(self, pin: Pin) -> None:
        """Let go of a pin's pages, which stay cached until they are evicted; nothing if it is not held any more."""
        if self._pins.pop(id(pin), None) is None:
            return
        pin.is_held = False
        for group, ids in enumerate(pin.blocks):
            held = ids[ids != 0][::-1]
            if len(held):
                self._pool.release_blocks(held, group)

    def unpin_all(self) -> None:
        """Let go of every pin."""
        for pin in list(self._pins.values()):
            self.unpin(pin)

    def leave_room(self, plan: KVCachePlan) -> bool:
        """Return whether a pool that has more slabs, or fewer, has room for the longest request beside all pins."""
        pages = self.pages()
        if plan.num_slabs > self.plan.num_slabs or not len(pages):
            return True
        needed, left = self._needed_and_left(plan, pages)
        return needed <= left

    def pages(self) -> BlockIds:
        """Return the pages that are held, each as often as there are pins of it."""
        return _pages_of(self._pins.values())

    def _needed(self, group: int, hit: PrefixHit) -> BlockIds:
        planned = self.plan.groups[group]
        if planned.is_of_input:
            found = hit.inputs.get(planned.spec.sequence, {}).get(group)
            return np.zeros(0, dtype=np.int32) if found is None else found.copy()
        blocks = np.zeros(hit.num_tokens // planned.block_size, dtype=np.int32)
        for start, stop in planned.answers.live_blocks(hit.num_tokens) if hit.num_tokens else ():
            blocks[start:stop] = hit.pages(group)[start:stop]
        return blocks

    def _needed_and_left(self, plan: KVCachePlan, pinned: BlockIds) -> tuple[int, int]:
        """Return how many slabs a request of the greatest length takes beside pinned pages, and how many are left.

        Args:
            plan: The plan, as it is or with fewer slabs.
            pinned: ``[n], int32, host``: the pinned pages.
        """
        pages = np.unique(pinned)
        first_rest = (self.plan.null_bytes + self.plan.num_slabs * self.plan.slab_bytes) // self.plan.block_id_bytes
        num_rest_pages = max(0, plan.num_rest_pages - int(np.count_nonzero(pages >= first_rest)))
        fewer = self.plan.num_slabs - plan.num_slabs
        needed = plan.num_slabs_for(plan.peak_blocks(plan.max_model_len), num_rest_pages)
        return needed, self._pool.count_idle_slabs(pages) - fewer

    def _check_room(self, pin: Pin) -> None:
        plan, others = self.plan, tuple(self._pins.values())
        needed_before, left_before = self._needed_and_left(plan, _pages_of(others))
        needed, left = self._needed_and_left(plan, _pages_of((*others, pin)))
        # What is pinned already takes nothing more.
        if needed - left > max(0, needed_before - left_before):
            raise RequestError(
                f"with these {pin.num_tokens} tokens pinned, {left} of the cache's {plan.num_slabs} slabs are left, "
                f"but a request of {plan.max_model_len} tokens, the most there may be, takes {needed}; give the cache "
                "more memory, lower max_model_len, or unpin others",
                code="no_room",
            )


def _pages_of(pins: Iterable[Pin]) -> BlockIds:
    parts = [ids[ids != 0] for pin in pins for ids in pin.blocks]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
