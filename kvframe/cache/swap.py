"""Swapping: rows whose pages are copied to host memory and back, and prefixes whose pages are restored from a file.

A row that is swapped in references cached pages that have the same content as its copies. Only the others are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.arguments import check_copies
from kvframe.cache.block_order import BlockIds
from kvframe.cache.block_pool import BlockPool
from kvframe.cache.block_table import GroupKinds, RowNumbers, RowState
from kvframe.cache.coordinator import KVCacheCoordinator
from kvframe.cache.host_pages import HostPages
from kvframe.cache.input_index import InputBlocks
from kvframe.cache.prefix_lookup import PrefixCache
from kvframe.cache.radix_tree import NO_MATCH, as_bytes, num_readable
from kvframe.contract.errors import RequestError

FetchPages = Callable[[int, Sequence[int], Sequence[int]], None]
"""Copies pages of a group to the pool: from some places outside of it to as many block ids. It may raise."""


@attrs.frozen
class StoredRow:
    """The data from which a row is restored when its pages are outside of the pool.

    ``copies`` is per group ``[num_blocks], int64, host``: the index of each block's copy; 0 for a block without a copy.
    """

    copies: list[npt.NDArray[np.int64]]
    num_computed: int

    @property
    def pages(self) -> BlockIds:
        """``[n], int32, host``: the copies of all groups, without 0."""
        copies = [group_copies[group_copies != 0] for group_copies in self.copies]
        return np.concatenate([np.zeros(0, dtype=np.int32), *copies]).astype(np.int32)


class Swapper:
    """Copies rows to host memory, whose pages are ``host_pool``, and back, and restores saved prefixes.

    A method that returns False, returns None or raises has changed nothing.
    """

    def __init__(
        self,
        kinds: GroupKinds,
        numbers: RowNumbers,
        coordinator: KVCacheCoordinator,
        cache: PrefixCache,
        host_pages: HostPages | None,
        host_pool: BlockPool | None,
    ) -> None:
        self._plan = kinds.plan
        self._tables, self._numbers = kinds.tables, numbers
        self._coordinator, self._cache = coordinator, cache
        self._host_pages, self.host_pool = host_pages, host_pool

    def swap_out_row(self, row: int) -> StoredRow | None:
        """Copy a row's resident pages to host memory, and keep them; return None if too few host pages are free."""
        if self._host_pages is None or self.host_pool is None:
            return None
        blocks = [np.array(ids, dtype=np.int64) for ids in self._coordinator.blocks(row)]
        counts = [int(np.count_nonzero(ids)) for ids in blocks]
        host_ids = self.host_pool.allocate_blocks(counts)
        if host_ids is None:
            return None
        copies, num_used = [np.zeros_like(ids) for ids in blocks], 0
        for ids, group_copies, count in zip(blocks, copies, counts, strict=True):
            group_copies[ids != 0] = host_ids[num_used : num_used + count]
            num_used += count
        stored_row = StoredRow(copies, self._numbers.num_computed.item(row))
        try:
            for group, (ids, group_copies) in enumerate(zip(blocks, copies, strict=True)):
                self._host_pages.copy_out(group, ids[ids != 0].tolist(), group_copies[ids != 0].tolist())
        except BaseException:
            self.release_copies(stored_row)
            raise
        return stored_row

    def swap_in_row(
        self, row: int, state: RowState, stored_row: StoredRow, num_tokens: int, *, use_prefix: bool
    ) -> bool:
        """Fill a free row from host memory with blocks for ``num_tokens`` tokens, and release the copies."""
        assert self._host_pages is not None
        if not self._fill_row(row, state, stored_row, num_tokens, self._host_pages.copy_in, use_prefix=use_prefix):
            return False
        self.release_copies(stored_row)
        return True

    def release_copies(self, stored_row: StoredRow) -> None:
        """Release the pages of a row in host memory."""
        assert self.host_pool is not None
        for group, copies in enumerate(stored_row.copies):
            self.host_pool.release_blocks(copies[copies != 0].astype(np.int32), group)

    def restore_prefix(
        self, row: int, state: RowState, copies: list[list[int]], fetch: FetchPages, *, is_caching: bool
    ) -> bool:
        """Do ``KVCacheManager.restore`` through a free row, without the pin; return False if pages are short."""
        num_tokens = len(state.token_ids)
        as_bytes(state.token_ids, 0, num_tokens)
        stored_row = StoredRow(check_copies(copies, self._needed_blocks(num_tokens, state.inputs)), num_tokens)
        if not is_caching:
            return True
        if not self._fill_row(row, state, stored_row, num_tokens, fetch, use_prefix=True):
            return False
        try:
            self._cache.publisher.follow(row, 0, NO_MATCH)
            for blocks in state.inputs:
                self._cache.inputs.publish_input(blocks, self._tables[blocks.group].ids[row, : blocks.num_blocks])
            self._coordinator.commit_row(row, num_tokens)
        finally:
            self._coordinator.free_row(row)
        return True

    def _needed_blocks(self, num_tokens: int, inputs: Iterable[InputBlocks]) -> list[npt.NDArray[np.bool_]]:
        """Return per group ``[num_blocks], bool``: the blocks that a request needs to continue after a prefix."""
        needed_blocks = []
        for group in self._plan.groups:
            is_needed = np.zeros(0 if group.is_of_input else num_tokens // group.block_size, dtype=np.bool_)
            for start, stop in group.answers.live_blocks(num_tokens) if len(is_needed) else ():
                is_needed[start:stop] = True
            needed_blocks.append(is_needed)
        for blocks in inputs:
            needed_blocks[blocks.group] = np.ones(blocks.num_blocks, dtype=np.bool_)
        return needed_blocks

    def _fill_row(
        self, row: int, state: RowState, stored_row: StoredRow, num_tokens: int, fetch: FetchPages, *, use_prefix: bool
    ) -> bool:
        """Begin a free row as it was stored, from cached pages and copies; leave it free if pages are short."""
        cached_pages = [np.zeros(len(copies), dtype=np.int32) for copies in stored_row.copies]
        if use_prefix:
            self._find_cached(state, stored_row, cached_pages)
        to_fetch = [
            np.flatnonzero((copies != 0) & (pages == 0))
            for copies, pages in zip(stored_row.copies, cached_pages, strict=True)
        ]
        self._coordinator.begin_row(row, stored_row.num_computed, state)
        try:
            # These pages are held first, so that the allocation evicts none of them.
            for group, pages in enumerate(cached_pages):
                self._coordinator.reference_blocks(row, group, pages)
            gaps = [blocks.tolist() for blocks in to_fetch]
            new_pages = self._coordinator.allocator.allocate_for_rows(np.array([row]), np.array([num_tokens]), gaps)
            if new_pages is not None:
                for group, (blocks, pages) in enumerate(zip(to_fetch, new_pages, strict=True)):
                    fetch(group, stored_row.copies[group][blocks].tolist(), pages.tolist())
                return True
        except BaseException:
            self._coordinator.release_row(row)
            raise
        self._coordinator.release_row(row)
        return False

    def _find_cached(self, state: RowState, stored_row: StoredRow, cached_pages: Sequence[BlockIds]) -> None:
        """Write per group, by block, the cached pages with the content of a row's copies into ``cached_pages``."""
        tree, num_tokens = self._cache.tree, stored_row.num_computed
        try:
            match = tree.match_prefix(state.namespace, state.token_ids, num_tokens)
        except RequestError:
            # The request published no block from its first unreadable token on.
            match = tree.match_prefix(state.namespace, state.token_ids, min(num_tokens, num_readable(state.token_ids)))
        stack_pages = tree.pages_of(match, match.length)
        for group, (s, g) in tree.stack_indices.items():
            pages = stack_pages[s][g][: len(cached_pages[group])]
            cached_pages[group][: len(pages)] = pages
        for blocks in state.inputs:
            input_pages = self._cache.inputs.find_input(blocks)
            if input_pages is not None and blocks.sequence not in state.missing_inputs:
                pages = input_pages[: len(cached_pages[blocks.group])]
                cached_pages[blocks.group][: len(pages)] = pages
        for pages, copies in zip(cached_pages, stored_row.copies, strict=True):
            pages[copies == 0] = 0
