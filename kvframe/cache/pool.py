"""The block pool: who owns which page, what is findable by its prefix key, and what is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvframe.plan import KVCachePlan

PrefixKey = bytes
_NO_GROUP = -1


class BlockPool:
    """Pages cut from slabs, shared by reference count.

    Invariant: every page of a slab is exactly one of *free*, *held* (referenced) or *cached* (unreferenced, but
    findable by its prefix key), and a slab without held and cached pages belongs to no group.

    A slab is *idle* while none of its pages is held; idle slabs can change their group. An allocation succeeds if and
    only if the free and cached pages in each group's other slabs, and as many idle slabs as the shortfall needs,
    cover it.

    Attributes:
        num_held: Per group, the pages that at least one request references.
        peak_held: Per group, the most of them at once.
        held_bytes: Bytes of all referenced pages.
        peak_held_bytes: The most of them at once.
        num_evictions: Cached pages whose content was given up so far.
        on_pages_freed: Called with a group and block ids whenever the content of pages ends; None for nobody.
    """

    def __init__(self, plan: KVCachePlan, *, reserve_slabs: int = 0) -> None:
        """Start with every slab free.

        Args:
            plan: The cut of the pool.
            reserve_slabs: Idle slabs that an allocation leaves alone as long as evicting its own group's cached
                pages serves it too: so that a lone request always finds the slabs that the plan promised it.
        """
        self._plan = plan
        self._reserve = reserve_slabs
        self._pages_per_slab = [group.pages_per_slab for group in plan.groups]
        self._page_ids = [group.page_bytes // plan.block_id_bytes for group in plan.groups]
        self._null_ids = plan.null_bytes // plan.block_id_bytes
        self._slab_ids = plan.slab_bytes // plan.block_id_bytes if plan.groups else 1
        num_slabs = plan.num_slabs
        self._slab_group = [_NO_GROUP] * num_slabs
        self._slab_held = [0] * num_slabs
        self._slab_cached = [0] * num_slabs
        self._slab_free_pages: list[list[int]] = [[] for _ in range(num_slabs)]
        self._free_slabs = list(range(num_slabs - 1, -1, -1))
        self._idle_slabs: OrderedDict[int, int] = OrderedDict()
        self._open_held: list[dict[int, None]] = [{} for _ in plan.groups]
        self._open_idle: list[dict[int, None]] = [{} for _ in plan.groups]
        self._available = [0] * len(plan.groups)
        self._references: dict[int, int] = {}
        self._key_of: dict[int, PrefixKey] = {}
        self._index: list[dict[PrefixKey, int]] = [{} for _ in plan.groups]
        self._cached: list[OrderedDict[int, int]] = [OrderedDict() for _ in plan.groups]
        self._clock = 0
        self.num_held = [0] * len(plan.groups)
        self.peak_held = [0] * len(plan.groups)
        self.held_bytes = 0
        self.peak_held_bytes = 0
        self.num_evictions = 0
        self.on_pages_freed: Callable[[int, list[int]], None] | None = None

    # --- what is there ------------------------------------------------------------------------------------------

    @property
    def num_idle_slabs(self) -> int:
        """Slabs that hold no referenced page: free, or with cached pages only."""
        return len(self._free_slabs) + len(self._idle_slabs)

    @property
    def num_held_pages(self) -> int:
        """Pages that at least one request references."""
        return len(self._references)

    @property
    def num_cached_pages(self) -> int:
        """Pages that nobody references and that a prefix hit can still take."""
        return sum(len(cached) for cached in self._cached)

    def find(self, group: int, key: PrefixKey) -> int:
        """Return the block id of a group's page with this prefix key; 0 if none is findable."""
        return self._index[group].get(key, 0)

    # --- what happens to pages ------------------------------------------------------------------------------------

    def allocate(self, num_blocks: Sequence[int]) -> list[list[int]] | None:
        """Take pages for each group, evicting cached ones where needed.

        Args:
            num_blocks: Pages wanted, per group.

        Returns:
            Block ids per group, each referenced once; None, and nothing changed, if there are not enough.
        """
        needed = self._slabs_needed(num_blocks)
        spare = self.num_idle_slabs - sum(needed)
        if spare < 0:
            return None
        spare = max(0, spare - self._reserve)
        taken: list[list[int]] = []
        for group, count in enumerate(num_blocks):
            blocks: list[int] = []
            budget = needed[group] + spare
            for _ in range(count):
                idle_before = self.num_idle_slabs
                block_id = self._take(group, may_claim=budget > 0)
                self._reference_free(group, block_id)
                blocks.append(block_id)
                budget -= idle_before - self.num_idle_slabs
            spare = min(spare, budget)
            taken.append(blocks)
        return taken

    def reference(self, group: int, block_id: int) -> None:
        """Add a reference to a held or cached page."""
        count = self._references.get(block_id, 0)
        if count == 0:
            del self._cached[group][block_id]
            slab = self._slab_of(block_id)
            self._slab_cached[slab] -= 1
            self._hold(group, slab)
        self._references[block_id] = count + 1

    def release(self, group: int, block_ids: Sequence[int]) -> None:
        """Drop one reference of each page, in the order in which they shall be evicted."""
        ended: list[int] = []
        for block_id in block_ids:
            count = self._references[block_id] - 1
            if count:
                self._references[block_id] = count
                continue
            del self._references[block_id]
            slab = self._slab_of(block_id)
            self._clock += 1
            if block_id in self._key_of:
                self._cached[group][block_id] = self._clock
                self._slab_cached[slab] += 1
            else:
                self._free_page(group, slab, block_id)
                ended.append(block_id)
            self._unhold(group, slab)
        self._tell_freed(group, ended)

    def publish(self, group: int, block_id: int, key: PrefixKey) -> None:
        """Make a held page findable, unless another page is already found by that key."""
        if self._index[group].setdefault(key, block_id) == block_id:
            self._key_of[block_id] = key

    def forget_cached(self) -> None:
        """Give up every cached page and make held ones unfindable."""
        for group, cached in enumerate(self._cached):
            for block_id in list(cached):
                self._evict(group, block_id)
            self._index[group].clear()
        self._key_of.clear()

    # --- slabs ------------------------------------------------------------------------------------------------------

    def _slabs_needed(self, num_blocks: Sequence[int]) -> list[int]:
        return [
            -(-max(0, count - available) // pages)
            for count, available, pages in zip(num_blocks, self._available, self._pages_per_slab, strict=True)
        ]

    def _slab_of(self, block_id: int) -> int:
        return (block_id - self._null_ids) // self._slab_ids

    def _take(self, group: int, *, may_claim: bool) -> int:
        """Free one page of ``group`` if none is, and return it; the slab it lies in is not yet counted as held."""
        open_held = self._open_held[group]
        if open_held:
            return self._slab_free_pages[next(iter(open_held))][-1]
        cached = self._cached[group]
        if may_claim:
            if self._open_idle[group]:
                return self._slab_free_pages[next(iter(self._open_idle[group]))][-1]
            if not self._free_slabs:
                slab, idle_since = next(iter(self._idle_slabs.items()), (0, self._clock + 1))
                oldest, freed_at = next(iter(cached.items()), (0, self._clock + 1))
                if freed_at <= idle_since:
                    self._evict(group, oldest)
                    return self._cut(group) if self._free_slabs else oldest
                self._reclaim(slab)
            return self._cut(group)
        for block_id in cached:
            if self._slab_held[self._slab_of(block_id)]:
                self._evict(group, block_id)
                return block_id
        raise AssertionError("the count of available pages disagrees with the pages")

    def _cut(self, group: int) -> int:
        slab = self._free_slabs.pop()
        self._slab_group[slab] = group
        first = self._null_ids + slab * self._slab_ids
        size = self._page_ids[group]
        pages = [first + index * size for index in range(self._pages_per_slab[group] - 1, -1, -1)]
        self._slab_free_pages[slab] = pages
        self._idle_slabs[slab] = self._clock
        self._open_idle[group][slab] = None
        return pages[-1]

    def _reclaim(self, slab: int) -> None:
        group = self._slab_group[slab]
        first, size = self._null_ids + slab * self._slab_ids, self._page_ids[group]
        for block_id in range(first, first + size * self._pages_per_slab[group], size):
            if block_id in self._cached[group]:
                self._evict(group, block_id)

    def _hold(self, group: int, slab: int) -> None:
        """Count one more held page of a slab."""
        if self._slab_held[slab] == 0:
            del self._idle_slabs[slab]
            self._available[group] += self._pages_per_slab[group]
            if self._open_idle[group].pop(slab, 0) is None:
                self._open_held[group][slab] = None
        self._slab_held[slab] += 1
        self.num_held[group] += 1
        self.peak_held[group] = max(self.peak_held[group], self.num_held[group])
        self.held_bytes += self._plan.groups[group].page_bytes
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)
        self._available[group] -= 1

    def _unhold(self, group: int, slab: int) -> None:
        """Count one held page of a slab less."""
        self._slab_held[slab] -= 1
        self.num_held[group] -= 1
        self.held_bytes -= self._plan.groups[group].page_bytes
        self._available[group] += 1
        if self._slab_held[slab] == 0:
            self._available[group] -= self._pages_per_slab[group]
            self._idle_slabs[slab] = self._clock
            if self._open_held[group].pop(slab, 0) is None:
                self._open_idle[group][slab] = None
            self._return_if_empty(group, slab)

    def _return_if_empty(self, group: int, slab: int) -> None:
        if self._slab_held[slab] == 0 and self._slab_cached[slab] == 0:
            del self._idle_slabs[slab]
            del self._open_idle[group][slab]
            self._slab_group[slab] = _NO_GROUP
            self._slab_free_pages[slab] = []
            self._free_slabs.append(slab)

    # --- pages ------------------------------------------------------------------------------------------------------

    def _reference_free(self, group: int, block_id: int) -> None:
        slab = self._slab_of(block_id)
        pages = self._slab_free_pages[slab]
        last = pages.pop()
        assert last == block_id
        self._references[block_id] = 1
        self._hold(group, slab)
        if not pages:
            del self._open_held[group][slab]

    def _free_page(self, group: int, slab: int, block_id: int) -> None:
        pages = self._slab_free_pages[slab]
        pages.append(block_id)
        if len(pages) == 1:
            opened = self._open_held if self._slab_held[slab] else self._open_idle
            opened[group][slab] = None

    def _evict(self, group: int, block_id: int) -> None:
        """Give up a cached page's content."""
        slab = self._slab_of(block_id)
        del self._cached[group][block_id]
        del self._index[group][self._key_of.pop(block_id)]
        self._slab_cached[slab] -= 1
        self.num_evictions += 1
        self._free_page(group, slab, block_id)
        self._return_if_empty(group, slab)
        self._tell_freed(group, [block_id])

    def _tell_freed(self, group: int, block_ids: list[int]) -> None:
        if self.on_pages_freed is not None and block_ids:
            self.on_pages_freed(group, block_ids)
