"""The cache manager: what the engine says of a request's life, in one verb for each event."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from kvframe.cache.block_table import BlockTables
from kvframe.cache.coordinator import KVCacheCoordinator, PrefixHit, RequestBlocks
from kvframe.cache.pool import BlockPool
from kvframe.cache.prefix import PrefixKeys
from kvframe.plan import KVCachePlan


@attrs.define
class KVCacheStats:
    """What the cache did so far.

    Attributes:
        queried_tokens: Prompt tokens for which a prefix was looked up.
        hit_tokens: Of these, the tokens that were found.
        blocks_held: Per group, the pages held now; a page that several requests share counts once.
        peak_blocks_held: Per group, the most pages held at once.
        peak_bytes_held: The most bytes of held pages of all groups at once.
        num_evictions: Cached pages whose content was given up.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    blocks_held: list[int] = attrs.field(factory=list)
    peak_blocks_held: list[int] = attrs.field(factory=list)
    peak_bytes_held: int = 0
    num_evictions: int = 0


@attrs.define
class _Entry:
    blocks: RequestBlocks
    keys: dict[int, PrefixKeys]
    next_full: int = 0
    """Computed tokens from which on a block may be full that was not offered to the prefix index."""


class KVCacheManager:
    """The request table of the cache.

    Invariant: the pages that requests in the table reference are exactly the held pages of the pool.

    Attributes:
        plan: The plan that it manages.
        tables: One block table per group.
        prefix_caching: Whether computed blocks become findable; off where there is nothing to cache.
    """

    def __init__(self, plan: KVCachePlan, *, max_num_seqs: int, prefix_caching: bool = True) -> None:
        """Start with an empty pool.

        Args:
            plan: What was allocated.
            max_num_seqs: The most requests at a time.
            prefix_caching: Whether computed blocks become findable by later requests.
        """
        self.plan = plan
        self.prefix_caching = prefix_caching and bool(plan.groups)
        self.tables = BlockTables(max_num_seqs, plan.max_model_len, [group.block_size for group in plan.groups])
        reserve = plan.num_slabs_for(group.peak_blocks for group in plan.groups)
        self._pool = BlockPool(plan, reserve_slabs=min(reserve, plan.num_slabs))
        self._coordinator = KVCacheCoordinator(plan, self._pool, self.tables)
        self._block_sizes = sorted({group.block_size for group in plan.groups})
        self._entries: dict[str, _Entry] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._queried_tokens = 0
        self._hit_tokens = 0

    # --- one verb for each event in a request's life ---------------------------------------------------------------

    def start(self, request_id: str, token_ids: Sequence[int], *, salt: str = "", use_prefix: bool = True) -> int:
        """Take a request into the table, referencing its longest cached prefix.

        The last token is always left to compute: its logits are what the request is for.

        Args:
            request_id: Its name; not in the table.
            token_ids: Its tokens so far.
            salt: It shares blocks only with requests of the same salt.
            use_prefix: Whether to look for a cached prefix.

        Returns:
            The number of tokens that need not be computed.
        """
        assert request_id not in self._entries
        assert self._free_rows
        keys = {size: PrefixKeys(size, salt) for size in self._block_sizes} if self.prefix_caching else {}
        hit = PrefixHit(0, tuple([] for _ in self.plan.groups))
        if keys and use_prefix:
            max_tokens = len(token_ids) - 1
            hit = self._coordinator.find_prefix(
                {size: chain.upto(token_ids, max_tokens) for size, chain in keys.items()}, max_tokens
            )
            self._queried_tokens += len(token_ids)
            self._hit_tokens += hit.num_tokens
        self._entries[request_id] = _Entry(self._coordinator.start(self._free_rows.pop(), hit), keys)
        return hit.num_tokens

    def extend(self, request_id: str, num_tokens: int) -> bool:
        """Make room for a request's tokens ``[0, num_tokens)``.

        Returns:
            False, and nothing changed, if the pool cannot give the pages now.
        """
        return self._coordinator.extend(self._entries[request_id].blocks, num_tokens)

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Take note that the state of tokens ``[0, num_computed)`` is computed.

        Blocks that became full become findable; blocks that no later token needs are released.

        Args:
            request_id: A request in the table.
            token_ids: Its tokens, at least ``num_computed`` of them.
            num_computed: How many are computed.
        """
        entry = self._entries[request_id]
        if entry.keys and num_computed >= entry.next_full:
            keys = {size: chain.upto(token_ids, num_computed) for size, chain in entry.keys.items()}
            self._coordinator.publish(entry.blocks, keys, num_computed)
            entry.next_full = min(num_computed - num_computed % size + size for size in keys)
        self._coordinator.release_dead(entry.blocks, num_computed)

    def free(self, request_id: str) -> None:
        """Take a request out of the table; its findable blocks stay cached until they are evicted."""
        blocks = self._entries.pop(request_id).blocks
        self._coordinator.free(blocks)
        self._free_rows.append(blocks.row)

    def reset_prefix_cache(self) -> None:
        """Give up every cached page and make held ones unfindable."""
        self._pool.forget_cached()

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
        return KVCacheStats(
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            blocks_held=list(self._pool.num_held),
            peak_blocks_held=list(self._pool.peak_held),
            peak_bytes_held=self._pool.peak_held_bytes,
            num_evictions=self._pool.num_evictions,
        )

    @property
    def on_pages_freed(self) -> Callable[[int, list[int]], None] | None:
        """Called with a group and block ids whenever the content of pages ends; None for nobody."""
        return self._pool.on_pages_freed

    @on_pages_freed.setter
    def on_pages_freed(self, listener: Callable[[int, list[int]], None] | None) -> None:
        self._pool.on_pages_freed = listener
