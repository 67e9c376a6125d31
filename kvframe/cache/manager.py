"""The cache manager: what the engine says of a request's life, in one verb for each event."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import attrs

from kvframe.cache.block_table import BlockTables
from kvframe.cache.coordinator import KVCacheCoordinator, RequestBlocks
from kvframe.cache.inputs import InputSequence, input_blocks
from kvframe.cache.lookup import PrefixHit, PrefixLookup
from kvframe.cache.pool import BlockPool
from kvframe.cache.prefix import PrefixKeys
from kvframe.cache.stats import GroupLookups, KVCacheStats
from kvframe.cache.swap import HostPages, HostStore
from kvframe.plan import KVCachePlan

NO_INPUTS: Mapping[str, InputSequence] = MappingProxyType({})


@attrs.define
class _Entry:
    blocks: RequestBlocks
    keys: dict[int, PrefixKeys]
    uncounted: PrefixHit | None
    """What was found when it started, until it runs: a request that waits for room is looked up again and again."""
    next_full: int = 0
    """Computed tokens from which on a block may be full that was not offered to the prefix index; 0 where blocks of an
    input may not have been."""
    num_resets: int = 0
    """Resets of the prefix cache before it started."""


class KVCacheManager:
    """The request table of the cache.

    Invariant: the pages that requests in the table reference are exactly the held pages of the pool, and those of
    requests that are swapped out are exactly the held pages of the host store. A request is never both.

    Attributes:
        plan: The plan that it manages.
        tables: One block table per group.
        prefix_caching: Whether computed blocks become findable; off where there is nothing to cache.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        *,
        max_num_seqs: int,
        prefix_caching: bool = True,
        host_pages: HostPages | None = None,
    ) -> None:
        """Start with an empty pool.

        Args:
            plan: What was allocated.
            max_num_seqs: The most requests at a time.
            prefix_caching: Whether computed blocks become findable by later requests.
            host_pages: Where requests are swapped to; None if they cannot be.
        """
        self.plan = plan
        self.prefix_caching = prefix_caching and bool(plan.groups)
        self.tables = BlockTables(
            max_num_seqs,
            plan.max_model_len,
            [group.block_size for group in plan.groups],
            [group.spec.sequence for group in plan.groups],
            plan.max_input_lens,
        )
        reserve = plan.num_slabs_for(group.peak_blocks for group in plan.groups)
        self._pool = BlockPool(plan, reserve_slabs=min(reserve, plan.num_slabs))
        self._lookup = PrefixLookup(plan, self._pool)
        self._coordinator = KVCacheCoordinator(plan, self._pool, self.tables)
        self._block_sizes = sorted({group.block_size for group in plan.groups if not group.is_of_input})
        self._input_groups = tuple(group for group in plan.groups if group.is_of_input)
        self._host = None if host_pages is None else HostStore(plan, host_pages)
        self._entries: dict[str, _Entry] = {}
        self._swapped: dict[str, _Entry] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_resets = 0
        self._lookups = [GroupLookups(group.spec.kind) for group in plan.groups]

    # --- one verb for each event in a request's life ---------------------------------------------------------------

    def start(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        salt: str = "",
        use_prefix: bool = True,
        inputs: Mapping[str, InputSequence] = NO_INPUTS,
    ) -> int:
        """Take a request into the table, referencing its longest cached prefix and its cached inputs.

        The last token is always left to compute: its logits are what the request is for.

        Args:
            request_id: Its name; not in the table.
            token_ids: Its tokens so far.
            salt: It shares blocks only with requests of the same salt.
            use_prefix: Whether to look for a cached prefix, and for cached inputs.
            inputs: What it brings beside its tokens, by the name of the sequence, each within the plan's
                ``max_input_lens``. It shares blocks of tokens only with requests of equal inputs.

        Returns:
            The number of tokens that need not be computed.
        """
        assert request_id not in self._entries
        assert request_id not in self._swapped
        assert self._free_rows
        caches = self.prefix_caching
        keys = {size: PrefixKeys(size, salt, inputs) for size in self._block_sizes} if caches else {}
        of_inputs = input_blocks(self._input_groups, inputs, salt, are_cached=caches) if inputs else ()
        hit = PrefixHit(0, tuple([] for _ in self.plan.groups))
        if caches and use_prefix:
            known = {size: chain.upto(token_ids, len(token_ids) - 1) for size, chain in keys.items()}
            hit = self._lookup.find(known, len(token_ids), of_inputs)
        blocks = self._coordinator.start(self._free_rows.pop(), hit, of_inputs)
        self._entries[request_id] = _Entry(blocks, keys, hit, num_resets=self._num_resets)
        return hit.num_tokens

    def missing_inputs(self, request_id: str) -> frozenset[str]:
        """Return the inputs of a request whose state the next step has to compute; none after its first ``commit``."""
        return self._entries[request_id].blocks.missing

    def extend(self, request_id: str, num_tokens: int) -> bool:
        """Make room for a request's tokens ``[0, num_tokens)`` and, the first time, for all of its inputs.

        Returns:
            False, and nothing changed, if the pool cannot give the pages now.
        """
        return self._coordinator.extend(self._entries[request_id].blocks, num_tokens)

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Take note that the state of tokens ``[0, num_computed)`` is computed, and that of the request's inputs.

        Blocks that became full become findable; blocks that no later token needs are released.

        Args:
            request_id: A request in the table.
            token_ids: Its tokens, at least ``num_computed`` of them.
            num_computed: How many are computed; fewer than there was room made for where tokens were refused.
        """
        entry = self._entries[request_id]
        if self.prefix_caching and num_computed >= entry.next_full:
            keys = {size: chain.upto(token_ids, num_computed) for size, chain in entry.keys.items()}
            self._coordinator.publish(entry.blocks, keys, num_computed)
            if entry.uncounted is not None:
                for total, lookups in zip(self._lookups, entry.uncounted.lookups, strict=False):
                    total.add(lookups)
                entry.uncounted = None
            self._lookup.note(keys, entry.blocks.num_computed, num_computed)
            entry.next_full = min(
                (num_computed - num_computed % size + size for size in self._block_sizes), default=sys.maxsize
            )
        self._coordinator.commit(entry.blocks, num_computed)

    def swap_out(self, request_id: str) -> bool:
        """Move a request's resident pages, of all groups, to host memory and take it out of the table.

        Its findable blocks stay cached until they are evicted.

        Returns:
            False, and nothing changed, if the host has no room for all of them.

        Raises:
            RuntimeError: A copy failed; nothing changed.
        """
        entry = self._entries[request_id]
        copies = None if self._host is None else self._host.put(entry.blocks.block_ids)
        if copies is None:
            return False
        swapped = attrs.evolve(entry.blocks, row=-1, block_ids=copies)
        self.free(request_id)
        self._swapped[request_id] = attrs.evolve(entry, blocks=swapped)
        return True

    def swap_in(self, request_id: str, num_tokens: int, *, use_prefix: bool = True) -> bool:
        """Take a request that is swapped out into the table again, as it was, with room for tokens ``[0, num_tokens)``.

        Its pages come back to where the pool has room for them; their bytes are equal.

        Args:
            request_id: A request that is swapped out.
            num_tokens: The tokens to make room for, those that it has room for included.
            use_prefix: Whether to reference its own published blocks where they, or equal ones, can be found.

        Returns:
            False, and nothing changed, if the pool cannot give the pages now.

        Raises:
            RuntimeError: A copy failed; the request is still swapped out, and holds nothing of the pool.
        """
        assert self._free_rows
        assert self._host is not None
        entry = self._swapped[request_id]
        keys = {size: chain.upto((), 0) for size, chain in entry.keys.items()} if use_prefix else None
        resumed = self._coordinator.resume(self._free_rows[-1], entry.blocks, num_tokens, keys)
        if resumed is None:
            return False
        blocks, to_fill = resumed
        copies = entry.blocks.block_ids
        try:
            self._host.fetch(copies, to_fill)
        except BaseException:
            self._coordinator.free(blocks)
            raise
        self._free_rows.pop()
        self._host.free(copies)
        del self._swapped[request_id]
        self._entries[request_id] = resumed_entry = attrs.evolve(entry, blocks=blocks)
        if entry.num_resets == self._num_resets:
            # Its next commit offers all its blocks again: what was found by their keys may have been evicted.
            blocks.num_published = [0] * len(self.plan.groups)
            resumed_entry.next_full = 0
        return True

    def free(self, request_id: str) -> None:
        """Take a request out of the table, or give up its copy in host memory.

        The findable blocks of one in the table stay cached until they are evicted.
        """
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            assert self._host is not None
            self._host.free(swapped.blocks.block_ids)
            return
        blocks = self._entries.pop(request_id).blocks
        self._coordinator.free(blocks)
        self._free_rows.append(blocks.row)

    def reset_prefix_cache(self) -> None:
        """Give up every cached page and make held ones unfindable."""
        self._pool.forget_cached()
        self._lookup.forget()
        self._num_resets += 1

    # --- what is there ------------------------------------------------------------------------------------------------

    def row(self, request_id: str) -> int:
        """Return a request's row in every block table."""
        return self._entries[request_id].blocks.row

    def block_ids(self, request_id: str) -> list[list[int]]:
        """Return a request's block ids, one list per group; 0 where a block is not resident."""
        return [list(ids) for ids in self._entries[request_id].blocks.block_ids]

    @property
    def num_free_rows(self) -> int:
        """How many more requests the table takes."""
        return len(self._free_rows)

    @property
    def usage(self) -> float:
        """Share of the slabs that hold a page that a request needs."""
        return 1.0 - self._pool.num_idle_slabs / self.plan.num_slabs if self.plan.num_slabs else 0.0

    @property
    def num_held_pages(self) -> int:
        """Pages that a request in the table references: 0 when the table is empty."""
        return self._pool.num_held_pages

    @property
    def stats(self) -> KVCacheStats:
        """What the cache did so far, as a copy."""
        of_tokens = [
            lookups for lookups, group in zip(self._lookups, self.plan.groups, strict=True) if not group.is_of_input
        ]
        return KVCacheStats(
            queried_tokens=of_tokens[0].asked_tokens if of_tokens else 0,
            hit_tokens=of_tokens[0].hit_tokens if of_tokens else 0,
            lookups=[attrs.evolve(lookups) for lookups in self._lookups],
            blocks_held=list(self._pool.num_held),
            peak_blocks_held=list(self._pool.peak_held),
            peak_bytes_held=self._pool.peak_held_bytes,
            num_evictions=self._pool.num_evictions,
            host_bytes_held=0 if self._host is None else self._host.held_bytes,
            peak_host_bytes_held=0 if self._host is None else self._host.peak_held_bytes,
        )

    @property
    def on_pages_freed(self) -> Callable[[int, list[int]], None] | None:
        """Called with a group and block ids whenever the content of pages ends; None for nobody."""
        return self._pool.on_pages_freed

    @on_pages_freed.setter
    def on_pages_freed(self, listener: Callable[[int, list[int]], None] | None) -> None:
        self._pool.on_pages_freed = listener
