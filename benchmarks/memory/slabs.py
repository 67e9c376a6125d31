"""kvframe's pool as a model: slabs that are cut into pages, by a choice of where a group takes its pages."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence

import attrs

from benchmarks.memory.pools import Key

PLACEMENTS = ("first opened", "last freed", "lowest", "fullest")
"""In which of its slabs a group takes a free page: the one that has had free pages for longest, the one where a page
was freed last, the one with the lowest address, or the one with the most held pages."""

REUSES = ("oldest", "fullest")
"""Which cached page a group gives up where idle slabs are few: the one unused for longest, or one of the slab with the
most held pages."""


@attrs.define
class _Slab:
    """A slab. Each of its pages is in ``free``, in ``cached`` with the time since when, or held."""

    number: int
    group: int = -1
    num_held: int = 0
    free: list[int] = attrs.field(factory=list)
    cached: dict[int, int] = attrs.field(factory=dict)
    opened: int = 0
    freed: int = 0


class SlabPool:
    """Slabs that are cut into pages of one group at a time, by a choice of placement: kvframe's pool as a model.

    A page is free, held, or cached: held by nobody, and found by its key. A slab without held pages is idle, and can be
    cut anew for any group; its cached pages then are lost.
    """

    def __init__(
        self,
        pages_per_slab: Sequence[int],
        num_slabs: int,
        *,
        reserve: int = 0,
        placement: str = "first opened",
        reuse: str = "oldest",
    ) -> None:
        """Start with every slab empty.

        Args:
            pages_per_slab: For each group.
            num_slabs: How many there are.
            reserve: Idle slabs that a group leaves alone as long as its own cached pages in other slabs serve it too.
            placement: One of ``PLACEMENTS``.
            reuse: One of ``REUSES``.
        """
        self._pages = tuple(pages_per_slab)
        self._stride = max(pages_per_slab)
        self._reserve = reserve
        self._placement, self._reuse = placement, reuse
        self.slabs = [_Slab(number) for number in range(num_slabs)]
        self._empty = list(reversed(self.slabs))
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._with_free: list[list[tuple[int, int]]] = [[] for _ in self._pages]
        self._with_cached: list[list[tuple[int, int]]] = [[] for _ in self._pages]
        self._cached: list[OrderedDict[int, int]] = [OrderedDict() for _ in self._pages]
        self._available = [0] * len(self._pages)
        self._holders: dict[int, int] = {}
        self._key_of: dict[int, Key] = {}
        self._index: dict[Key, int] = {}
        self._clock = 0

    @property
    def num_idle(self) -> int:
        """Slabs without a held page."""
        return len(self._empty) + len(self._idle)

    def find(self, key: Key) -> int:
        """Return the page with this key; 0 if there is none."""
        return self._index.get(key, 0)

    def publish(self, block: int, key: Key) -> None:
        """Make a held page findable, unless another one is already found by that key."""
        if self._index.setdefault(key, block) == block:
            self._key_of[block] = key

    def has_room(self, num_blocks: Sequence[int]) -> bool:
        """Return whether ``allocate`` would find as many pages for each group."""
        return sum(self._lacking_slabs(num_blocks)) <= self.num_idle

    def _lacking_slabs(self, num_blocks: Sequence[int]) -> list[int]:
        """Return how many idle slabs each group needs for as many pages."""
        return [
            -(-max(0, count - available) // pages)
            for count, available, pages in zip(num_blocks, self._available, self._pages, strict=True)
        ]

    def allocate(self, num_blocks: Sequence[int]) -> list[list[int]] | None:
        """Take pages for each group, evicting where needed; None, and nothing changed, if there are not enough."""
        needed = self._lacking_slabs(num_blocks)
        spare = self.num_idle - sum(needed)
        if spare < 0:
            return None
        spare = max(0, spare - self._reserve)
        taken = []
        for group, count in enumerate(num_blocks):
            budget = needed[group] + spare
            pages = []
            for _ in range(count):
                idle_before = self.num_idle
                pages.append(self._take(group, may_claim=budget > 0))
                budget -= idle_before - self.num_idle
            spare = min(spare, budget)
            taken.append(pages)
        return taken

    def reference(self, group: int, block: int) -> None:
        """Hold a page once more."""
        count = self._holders.get(block, 0)
        if not count:
            slab = self._slab_of(block)
            del slab.cached[block]
            del self._cached[group][block]
            self._hold(slab)
        self._holders[block] = count + 1

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """Hold each page once less, in the order in which they shall be evicted."""
        for block in blocks:
            count = self._holders[block] - 1
            if count:
                self._holders[block] = count
                continue
            del self._holders[block]
            slab = self._slab_of(block)
            self._clock += 1
            if block in self._key_of:
                slab.cached[block] = self._cached[group][block] = self._clock
            else:
                self._free(slab, block)
            slab.num_held -= 1
            self._available[group] += 1
            if not slab.num_held:
                self._available[group] -= self._pages[group]
                self._idle[slab.number] = self._clock
                self._empty_if_unused(slab)
            else:
                self._note(slab)

    # --- which page ---------------------------------------------------------------------------------------------------

    def _take(self, group: int, *, may_claim: bool) -> int:
        slab = self._best(self._with_free[group], group, self._free_rank)
        if slab is None and may_claim:
            slab = self._claim(group)
        if slab is None:
            slab = self._best(self._with_cached[group], group, self._cached_rank)
            assert slab is not None, "the count of available pages disagrees with the pages"
            self._evict(next(iter(slab.cached)))
        block = slab.free.pop()
        self._holders[block] = 1
        self._hold(slab)
        return block

    def _claim(self, group: int) -> _Slab:
        """Return a slab of the group with a free page, of those that nobody holds a page of."""
        if not self._empty:
            number, idle_since = next(iter(self._idle.items()))
            oldest, cached_at = next(iter(self._cached[group].items()), (0, self._clock + 1))
            if cached_at <= idle_since:
                slab = self._slab_of(oldest)
                self._evict(oldest)
                if slab.group >= 0:
                    return slab
            else:
                for block in list(self.slabs[number].cached):
                    self._evict(block)
        slab = self._empty.pop()
        slab.group = group
        first = slab.number * self._stride + 1
        slab.free = list(range(first + self._pages[group] - 1, first - 1, -1))
        slab.opened = self._clock
        self._idle[slab.number] = self._clock
        return slab

    def _best(self, heap: list[tuple[int, int]], group: int, rank: Callable[[_Slab], int | None]) -> _Slab | None:
        """Return the group's slab of the lowest rank; what a heap says of a slab that changed since is dropped."""
        while heap:
            slab = self.slabs[heap[0][1]]
            if slab.group == group and rank(slab) == heap[0][0]:
                return slab
            heapq.heappop(heap)
        return None

    def _free_rank(self, slab: _Slab) -> int | None:
        """Return when a slab's turn to give a free page is; None where it has none, or is idle."""
        if not slab.free or not slab.num_held:
            return None
        return {
            "first opened": slab.opened,
            "last freed": -slab.freed,
            "lowest": slab.number,
            "fullest": -slab.num_held,
        }[self._placement]

    def _cached_rank(self, slab: _Slab) -> int | None:
        """Return when a slab's turn to give up a cached page is; None where it has none, or is idle."""
        if not slab.cached or not slab.num_held:
            return None
        return -slab.num_held if self._reuse == "fullest" else next(iter(slab.cached.values()))

    def _note(self, slab: _Slab) -> None:
        """Put a slab that changed where it is found."""
        for heap, rank in (
            (self._with_free[slab.group], self._free_rank(slab)),
            (self._with_cached[slab.group], self._cached_rank(slab)),
        ):
            if rank is not None:
                heapq.heappush(heap, (rank, slab.number))

    # --- what happens to a page ---------------------------------------------------------------------------------------

    def _slab_of(self, block: int) -> _Slab:
        return self.slabs[(block - 1) // self._stride]

    def _hold(self, slab: _Slab) -> None:
        if not slab.num_held:
            del self._idle[slab.number]
            self._available[slab.group] += self._pages[slab.group]
        slab.num_held += 1
        self._available[slab.group] -= 1
        self._note(slab)

    def _free(self, slab: _Slab, block: int) -> None:
        if not slab.free:
            slab.opened = self._clock
        slab.free.append(block)
        slab.freed = self._clock

    def _evict(self, block: int) -> None:
        slab = self._slab_of(block)
        del slab.cached[block]
        del self._cached[slab.group][block]
        del self._index[self._key_of.pop(block)]
        self._free(slab, block)
        self._empty_if_unused(slab)

    def _empty_if_unused(self, slab: _Slab) -> None:
        if not slab.num_held and not slab.cached:
            del self._idle[slab.number]
            slab.group, slab.free = -1, []
            self._empty.append(slab)
