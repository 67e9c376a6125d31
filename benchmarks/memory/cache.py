"""The cache that traffic is run on, kvframe's manager over some plan, and where the bytes of its pool are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from benchmarks.memory.traces import Tokens
from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import TOKENS, KVCacheSpec
from kvframe.planning.plan import KVCachePlan


@attrs.frozen(kw_only=True)
class MemoryUse:
    """Where the bytes of a pool are at one moment; together they are all of it.

    Attributes:
        needed: In pages that requests hold, what their coming tokens read.
        unfinished: In these pages, capacity without tokens, either for later ones or left by earlier ones.
        partly_used: Free pages in slabs with held pages: of use to the same group only.
        cached: Cached pages in such slabs: prefixes that can be found, in memory of use to the same group only.
        padding: What no page can ever use: ends of slabs, room for layers that are not there or to make states as
            large as blocks, and what is left over of the memory.
        idle: What any group can take.
    """

    needed: int
    unfinished: int
    partly_used: int
    cached: int
    padding: int
    idle: int

    @property
    def used(self) -> float:
        """Share of the pool that no other request could get."""
        taken = self.needed + self.unfinished + self.padding
        return taken / (taken + self.partly_used + self.cached + self.idle)


class Cache:
    """A manager, and the pages that hold something."""

    def __init__(self, plan: KVCachePlan, max_num_seqs: int) -> None:
        """Start with an empty pool."""
        self._plan = plan
        self._manager = KVCacheManager(plan, max_num_seqs=max_num_seqs)
        self._manager.on_pages_freed = self._forget
        self._filled: list[set[int]] = [set() for _ in plan.groups]
        self._num_seen: dict[str, list[int]] = {}
        self.commit = self._manager.commit
        self.has_room = self._manager.has_room

    def start(
        self, request_id: str, token_ids: Tokens[int], *, use_prefix: bool, inputs: Mapping[str, InputSequence]
    ) -> int:
        """Take a request in, on its longest cached prefix; returns the tokens of that."""
        self._num_seen[request_id] = [0] * len(self._plan.groups)
        return self._manager.start(request_id, token_ids, use_prefix=use_prefix, inputs=inputs)

    def extend(self, request_id: str, num_tokens: int) -> bool:
        """Make room for tokens ``[0, num_tokens)``; False, and nothing changed, if there is none."""
        if not self._manager.extend(request_id, num_tokens):
            return False
        num_seen = self._num_seen[request_id]
        for group, ids in enumerate(self._manager.block_ids(request_id)):
            # The block that was the last one may have been without a page.
            self._filled[group].update(ids[max(0, num_seen[group] - 1) :])
            num_seen[group] = len(ids)
        return True

    def free(self, request_id: str) -> None:
        """Give back everything that a request holds."""
        del self._num_seen[request_id]
        self._manager.free(request_id)

    def _forget(self, group: int, block_ids: list[int]) -> None:
        self._filled[group].difference_update(block_ids)

    @property
    def use(self) -> float:
        """Share of the slabs with a held page."""
        return self._manager.usage

    def memory_use(self, computed: Mapping[str, int]) -> MemoryUse:
        """Return where the pool's bytes are.

        Args:
            computed: The computed tokens of each request.
        """
        plan = self._plan
        tables = {request: self._manager.block_ids(request) for request in computed}
        needed = unfinished = cached = free = tails = held_slabs = 0
        for group in plan.groups:
            rows = {request: np.asarray(ids[group.index], dtype=np.int64) for request, ids in tables.items()}
            held = _distinct(np.concatenate([np.zeros(0, np.int64), *rows.values()]))
            slabs = np.unique(self._slab_of(held))
            slabs = slabs[slabs < plan.num_slabs]
            num_rest = plan.num_rest_pages if group.index == plan.rest_group else 0
            num_pages = len(slabs) * group.pages_per_slab + num_rest
            filled = _distinct(np.fromiter(self._filled[group.index], dtype=np.int64))
            num_filled = np.count_nonzero(np.isin(self._slab_of(filled), [*slabs, plan.num_slabs]))
            empty = sum(
                empty_tokens(group.spec, int(np.count_nonzero(row)), computed[request]) for request, row in rows.items()
            )
            num_bytes = len(held) * group.page_bytes
            empty_bytes = min(num_bytes, empty * group.page_bytes // group.block_size)
            needed += num_bytes - empty_bytes
            unfinished += empty_bytes
            cached += (num_filled - len(held)) * group.page_bytes
            free += (num_pages - num_filled) * group.page_bytes
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

    def _slab_of(self, block_ids: Any) -> Any:
        return (block_ids * self._plan.block_id_bytes - self._plan.null_bytes) // self._plan.slab_bytes


def _distinct(block_ids: Any) -> Any:
    """Return each block id once, without the null page's."""
    return np.unique(block_ids[block_ids > 0])


def empty_tokens(spec: KVCacheSpec, num_held: int, num_computed: int) -> int:
    """Return the tokens that a request's blocks of a group have room for and that no coming token reads."""
    if spec.is_per_block or spec.sequence != TOKENS:
        return 0
    live = sum(stop - start for start, stop in spec.live_ranges(num_computed))
    return max(0, num_held * spec.block_size - live)
