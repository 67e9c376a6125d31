"""Count what the bytes of a cache's pool are used for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import TOKENS, KVCacheSpec


@attrs.frozen(kw_only=True)
class MemoryUse:
    """The bytes of a pool at one moment by their use. Together they are the whole pool.

    Attributes:
        needed: The part of held pages that coming tokens read.
        unfinished: The part of held pages for tokens that do not exist yet, or that a window has passed.
        partly_used: Free pages in slabs with held pages; only the slab's group can take them.
        cached: Cached pages in such slabs: prefixes that can be found, in memory that only the slab's group can take.
        padding: Bytes that no page can use: ends of slabs, space for layers that do not exist or that makes states as
            large as blocks, and the rest of the memory.
        idle: Bytes that any group can take.
    """

    needed: int
    unfinished: int
    partly_used: int
    cached: int
    padding: int
    idle: int

    @property
    def used(self) -> float:
        """The share of the pool that no other request could get."""
        taken = self.needed + self.unfinished + self.padding
        return taken / (taken + self.partly_used + self.cached + self.idle)


def memory_use(manager: KVCacheManager, computed: Mapping[str, int]) -> MemoryUse:
    """Return the use of a manager's pool.

    Args:
        manager: The manager.
        computed: The number of computed tokens of each running request.
    """
    plan = manager.plan
    tables = {request: manager.block_ids(request) for request in computed}
    findable: list[list[int]] = [[] for _ in plan.groups]
    for index, block_id in manager.published():
        findable[index].append(block_id)

    def slab_of(block_ids: Any) -> Any:
        return (block_ids * plan.block_id_bytes - plan.null_bytes) // plan.slab_bytes

    needed = unfinished = cached = free = tails = held_slabs = 0
    for group, found in zip(plan.groups, findable, strict=True):
        rows = {request: np.asarray(ids[group.index], dtype=np.int64) for request, ids in tables.items()}
        held = np.unique(np.concatenate([np.zeros(1, np.int64), *rows.values()]))[1:]
        slabs = np.unique(slab_of(held))
        slabs = slabs[slabs < plan.num_slabs]
        num_rest = plan.num_rest_pages if group.index == plan.rest_group else 0
        num_pages = len(slabs) * group.pages_per_slab + num_rest
        unheld = np.setdiff1d(np.array(found, dtype=np.int64), held)
        num_cached = int(np.count_nonzero(np.isin(slab_of(unheld), [*slabs, plan.num_slabs])))
        empty = sum(
            empty_tokens(group.spec, int(np.count_nonzero(row)), computed[request]) for request, row in rows.items()
        )
        num_bytes = len(held) * group.page_bytes
        empty_bytes = min(num_bytes, empty * group.page_bytes // group.block_size)
        needed += num_bytes - empty_bytes
        unfinished += empty_bytes
        cached += num_cached * group.page_bytes
        free += (num_pages - len(held) - num_cached) * group.page_bytes
        tails += len(slabs) * (plan.slab_bytes - group.pages_per_slab * group.page_bytes)
        held_slabs += len(slabs)
    return MemoryUse(
        needed=needed,
        unfinished=unfinished,
        partly_used=free,
        cached=cached,
        padding=tails + plan.memory_bytes - plan.num_slabs * plan.slab_bytes - plan.rest_bytes,
        idle=(plan.num_slabs - held_slabs) * plan.slab_bytes,
    )


def empty_tokens(spec: KVCacheSpec, num_held: int, num_computed: int) -> int:
    """Return the tokens' places in a request's blocks of a group that no coming token reads."""
    if spec.is_per_block or spec.sequence != TOKENS:
        return 0
    live = sum(stop - start for start, stop in spec.live_ranges(num_computed))
    return max(0, num_held * spec.block_size - live)
