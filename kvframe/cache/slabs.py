"""Free pages where groups' pages differ in size: slabs that are cut into pages of one group at a time."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvframe.cache.free_list import SHORT, BlockIds, Evictor
from kvframe.plan import KVCachePlan

_NO_GROUP = -1


class Slabs:
    """The slabs of a pool that several groups share.

    Invariant: a slab without held and cached pages belongs to no group. Every other one is cut into pages of its group;
    it is *idle* while none of them is held. Its free pages are listed; the slabs that have any are *open*.

    An allocation succeeds if and only if the free and cached pages in each group's slabs that are not idle, and as many
    idle slabs as the shortfall needs, cover it. What is left over behind the slabs is treated as a shorter one that is
    never idle, and of which pages are taken last, before any cached page is given up for it.
    """

    def __init__(self, plan: KVCachePlan, reserve: int) -> None:
        """Start with every slab free.

        Args:
            plan: The cut of the pool.
            reserve: Idle slabs that an allocation leaves alone as long as evicting its own group's cached pages serves
                it too.
        """
        num_groups, num_slabs = len(plan.groups), plan.num_slabs
        self.clock = 0
        self._num_slabs, self._num_rest, self._rest = num_slabs, 0, -1
        self._reserve = reserve
        self._null_ids = plan.null_bytes // plan.block_id_bytes
        self._slab_ids = plan.slab_bytes // plan.block_id_bytes if plan.groups else 1
        self._per_slab = [group.pages_per_slab for group in plan.groups]
        self._page_ids = [group.page_bytes // plan.block_id_bytes for group in plan.groups]
        self._group = [_NO_GROUP] * num_slabs
        self._held = [0] * num_slabs
        self._cached = [0] * num_slabs
        self._free_pages: list[list[int]] = [[] for _ in range(num_slabs)]
        self._free_slabs = list(range(num_slabs - 1, -1, -1))
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._open_held: list[dict[int, None]] = [{} for _ in range(num_groups)]
        self._open_idle: list[dict[int, None]] = [{} for _ in range(num_groups)]
        self._cached_held: list[dict[int, None]] = [{} for _ in range(num_groups)]
        self._available = [0] * num_groups
        if plan.num_rest_pages:
            self._add_rest(plan.rest_group, plan.num_rest_pages)

    def _add_rest(self, group: int, num_pages: int) -> None:
        """Have fewer pages than a slab's behind the last one, as if somebody held another one of them for ever."""
        self._rest = rest = self._num_slabs
        self._num_rest = num_pages
        self._group.append(group)
        self._held.append(1)
        self._cached.append(0)
        self._free_pages.append(self._pages_of(rest, group)[::-1].tolist())
        self._open_held[group][rest] = None
        self._available[group] += num_pages

    @property
    def num_idle_slabs(self) -> int:
        """Slabs without held pages: free, or with cached and free pages only."""
        return len(self._free_slabs) + len(self._idle)

    @property
    def is_short(self) -> bool:
        """Return whether nearly all slabs have held or cached pages."""
        return SHORT * len(self._free_slabs) <= self._num_slabs

    # --- taking -------------------------------------------------------------------------------------------------------

    def has_room(self, num_blocks: Sequence[int]) -> bool:
        """Return whether ``take`` would find as many pages for each group."""
        return sum(self._lacking_slabs(num_blocks)) <= self.num_idle_slabs

    def _lacking_slabs(self, num_blocks: Sequence[int]) -> list[int]:
        """Return how many idle slabs each group needs for as many pages."""
        return [
            -(-max(0, count - available) // pages)
            for count, available, pages in zip(num_blocks, self._available, self._per_slab, strict=True)
        ]

    def take(self, num_blocks: Sequence[int], evictor: Evictor) -> BlockIds | None:
        """Take pages for each group: from slabs in use first, then from idle ones, evicting where needed."""
        needed = self._lacking_slabs(num_blocks)
        spare = self.num_idle_slabs - sum(needed)
        if spare < 0:
            return None
        spare = max(0, spare - self._reserve)
        if self._num_rest:
            spare -= self._spare_rest(num_blocks, needed, spare)
        blocks: list[int] = []
        for group, count in enumerate(num_blocks):
            if not count:
                continue
            budget, end = needed[group] + spare, len(blocks) + count
            while len(blocks) < end:
                idle_before = self.num_idle_slabs
                self._take_some(group, end - len(blocks), blocks, budget, evictor)
                budget -= idle_before - self.num_idle_slabs
            spare = min(spare, budget)
        return np.array(blocks, dtype=np.int32)

    def _spare_rest(self, num_blocks: Sequence[int], needed: list[int], spare: int) -> int:
        """Let idle slabs serve what the pages after the last slab would, if so many are to spare; return how many.

        The reserve is not to spare: what the plan promises a lone request counts on these pages.

        Args:
            num_blocks: The pages wanted, per group.
            needed: The idle slabs that each group needs; changed.
            spare: How many there are besides and beyond the reserve.
        """
        group = self._group[self._rest]
        num_there = self._num_rest - (self._held[self._rest] - 1)
        lacking = max(0, num_blocks[group] - (self._available[group] - num_there))
        more = -(-lacking // self._per_slab[group]) - needed[group]
        if more > spare:
            return 0
        needed[group] += more
        return more

    def _take_some(self, group: int, count: int, blocks: list[int], num_claims: int, evictor: Evictor) -> None:
        """Take at least one page and at most ``count``, or make one free; claim at most ``num_claims`` idle slabs."""
        opened = self._first(self._open_held[group])
        if opened is None and num_claims > 0:
            opened = next(iter(self._open_idle[group]), None)
        if opened is None and not (self._free_slabs and num_claims > 0) and self._rest in self._open_held[group]:
            opened = self._rest
        if opened is not None:
            self._take_from(opened, group, count, blocks)
        elif num_claims <= 0:
            slab = self._first(self._cached_held[group])
            slab = self._rest if slab is None else slab
            evictor.evict_among(group, self._pages_of(slab, group), count)
        elif self._free_slabs:
            num_whole = min(count // self._per_slab[group], num_claims, len(self._free_slabs))
            if num_whole:
                self._take_whole(num_whole, group, blocks)
            else:
                self._cut(group)
        else:
            slab, slab_due = self._first_idle()
            page_due = evictor.first_priority(group)
            if page_due is not None and page_due <= slab_due:
                evictor.evict_group(group, min(count, self._per_slab[group]))
            else:
                owner = self._group[slab]
                evictor.evict_among(owner, self._pages_of(slab, owner), self._per_slab[owner])

    def _first(self, slabs: dict[int, None]) -> int | None:
        """Return the first of some slabs, but not what is left over behind them."""
        for slab in slabs:
            if slab != self._rest:
                return slab
        return None

    def _first_idle(self) -> tuple[int, int]:
        """Return the idle slab that is given up first, and when it is due: the longest idle, and since when."""
        return next(iter(self._idle.items()), (0, self.clock + 1))

    def _take_from(self, slab: int, group: int, count: int, blocks: list[int]) -> None:
        pages = self._free_pages[slab]
        count = min(count, len(pages))
        blocks += pages[len(pages) - count :]
        del pages[len(pages) - count :]
        if not self._held[slab]:
            self._wake(slab, group)
        if not pages:
            del self._open_held[group][slab]
        self._held[slab] += count
        self._available[group] -= count

    def _take_whole(self, num_slabs: int, group: int, blocks: list[int]) -> None:
        """Take all pages of free slabs."""
        slabs = self._free_slabs[len(self._free_slabs) - num_slabs :]
        del self._free_slabs[len(self._free_slabs) - num_slabs :]
        size, per_slab = self._page_ids[group], self._per_slab[group]
        for slab in slabs:
            first = self._null_ids + self._slab_ids * slab
            blocks += range(first, first + size * per_slab, size)
            self._group[slab] = group
            self._held[slab] = per_slab

    def _cut(self, group: int) -> None:
        slab = self._free_slabs.pop()
        self._group[slab] = group
        self._free_pages[slab] = self._pages_of(slab, group)[::-1].tolist()
        self._idle[slab] = self.clock
        self._open_idle[group][slab] = None

    # --- what becomes of pages ----------------------------------------------------------------------------------------

    def give(self, block_ids: BlockIds) -> None:
        """List pages as free in their slabs; an idle slab without cached pages becomes free."""
        for block_id, slab in zip(block_ids.tolist(), self._slabs_of(block_ids), strict=True):
            pages, group = self._free_pages[slab], self._group[slab]
            pages.append(block_id)
            if len(pages) == 1:
                (self._open_held if self._held[slab] else self._open_idle)[group][slab] = None
            if not self._held[slab] and not self._cached[slab]:
                self._return_slab(slab, group)

    def hold(self, group: int, block_ids: BlockIds) -> None:
        """Count cached pages as held."""
        self._available[group] -= len(block_ids)
        for slab, count in Counter(self._slabs_of(block_ids)).items():
            if not self._held[slab]:
                self._wake(slab, group)
            self._held[slab] += count
            self._cached[slab] -= count
            if not self._cached[slab]:
                self._cached_held[group].pop(slab, None)

    def let_go(self, block_ids: BlockIds, is_cached: npt.NDArray[np.bool_] | bool) -> None:
        """Count held pages as cached or as nothing; the latter have to be given before."""
        slabs = self._slabs_of(block_ids)
        counts = Counter(slabs)
        kept = Counter() if is_cached is False else counts if is_cached is True else Counter(compress(slabs, is_cached))
        for slab, count in kept.items():
            if not self._cached[slab]:
                self._cached_held[self._group[slab]][slab] = None
            self._cached[slab] += count
        for slab, count in counts.items():
            group = self._group[slab]
            self._available[group] += count
            self._held[slab] -= count
            if not self._held[slab]:
                self._sleep(slab, group)

    def uncache(self, block_ids: BlockIds) -> None:
        """Count cached pages as nothing; they have to be given after."""
        for slab, count in Counter(self._slabs_of(block_ids)).items():
            self._cached[slab] -= count
            if not self._cached[slab]:
                self._cached_held[self._group[slab]].pop(slab, None)

    def resize(self, plan: KVCachePlan, reserve: int) -> None:
        """Put the slabs that are new under all free ones, or take out those that go, which are free.

        What was left over behind the slabs becomes the first of the new ones, or goes.
        """
        if self._num_rest:
            self._end_rest(is_slab=plan.num_slabs > self._num_slabs)
        before, after = len(self._group), plan.num_slabs
        added = range(before, after)
        self._num_slabs, self._reserve = after, reserve
        self._free_slabs = [*reversed(added), *(slab for slab in self._free_slabs if slab < after)]
        self._group = [*self._group[:after], *(_NO_GROUP for _ in added)]
        self._free_pages = [*self._free_pages[:after], *([] for _ in added)]
        self._held = [*self._held[:after], *(0 for _ in added)]
        self._cached = [*self._cached[:after], *(0 for _ in added)]

    def _end_rest(self, *, is_slab: bool) -> None:
        """Let what is left over behind the slabs be a whole one, or nothing; then all of it is free."""
        rest, group, num_pages = self._rest, self._group[self._rest], self._num_rest
        self._num_rest, self._rest = 0, -1
        if is_slab:
            self._free_pages[rest][:0] = self._pages_of(rest, group)[num_pages:][::-1].tolist()
            self._open_held[group][rest] = None
            self._available[group] += self._per_slab[group] - num_pages
            self._held[rest] -= 1
            if not self._held[rest]:
                self._sleep(rest, group)
            return
        del self._group[rest], self._free_pages[rest], self._open_held[group][rest]
        del self._held[rest], self._cached[rest]
        self._available[group] -= num_pages

    def cut_pages(self) -> BlockIds:
        """Return the pages of all slabs that are cut."""
        group = np.array(self._group, dtype=np.int64)
        slabs = np.flatnonzero(group != _NO_GROUP)
        group = group[slabs]
        counts, sizes = np.array(self._per_slab)[group], np.array(self._page_ids)[group]
        counts[slabs == self._rest] = self._num_rest
        index = np.arange(max(self._per_slab))
        pages = (self._null_ids + self._slab_ids * slabs)[:, None] + sizes[:, None] * index
        return pages[index < counts[:, None]].astype(np.int32)

    def free_pages(self) -> BlockIds:
        """Return those of them that are free."""
        return np.array([page for pages in self._free_pages for page in pages], dtype=np.int32)

    def count_idle_slabs(self, held: BlockIds) -> int:
        """Return how many slabs have none of the pages that are held."""
        return self._num_slabs - sum(slab < self._num_slabs for slab in {*self._slabs_of(held)})

    # --- slabs --------------------------------------------------------------------------------------------------------

    def _slabs_of(self, block_ids: BlockIds) -> list[int]:
        slabs: list[int] = ((block_ids - self._null_ids) // self._slab_ids).tolist()
        return slabs

    def _pages_of(self, slab: int, group: int) -> BlockIds:
        first = self._null_ids + slab * self._slab_ids
        num_pages = self._num_rest if slab == self._rest else self._per_slab[group]
        return first + self._page_ids[group] * np.arange(num_pages, dtype=np.int32)

    def _wake(self, slab: int, group: int) -> None:
        """An idle slab is about to hold a page."""
        del self._idle[slab]
        self._available[group] += self._per_slab[group]
        if self._open_idle[group].pop(slab, 0) is None:
            self._open_held[group][slab] = None
        if self._cached[slab]:
            self._cached_held[group][slab] = None

    def _sleep(self, slab: int, group: int) -> None:
        """A slab holds no page any more."""
        self._available[group] -= self._per_slab[group]
        self._idle[slab] = self.clock
        self._cached_held[group].pop(slab, None)
        if self._per_slab[group] == 1 and self._cached[slab]:
            return
        if self._open_held[group].pop(slab, 0) is None:
            self._open_idle[group][slab] = None
        if not self._cached[slab]:
            self._return_slab(slab, group)

    def _return_slab(self, slab: int, group: int) -> None:
        if len(self._free_pages[slab]) == self._per_slab[group]:
            del self._idle[slab]
            del self._open_idle[group][slab]
            self._group[slab] = _NO_GROUP
            self._free_pages[slab] = []
            self._free_slabs.append(slab)


_NOTHING: BlockIds = np.zeros(0, dtype=np.int32)
