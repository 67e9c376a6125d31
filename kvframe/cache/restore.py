"""Restoring: a prefix whose pages are outside of the pool becomes a cached one, as if it had been computed here.

Pages with the same content that are cached already are used; only the others are fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvframe.cache.block_table import GroupKinds, RowState
from kvframe.cache.coordinator import KVCacheCoordinator
from kvframe.cache.prefix_lookup import PrefixCache
from kvframe.cache.radix_tree import NO_MATCH, as_bytes

FetchPages = Callable[[int, Sequence[int], Sequence[int]], None]
"""Copies pages of a prefix to the pool: of a group, blocks given by their indices, to as many block ids. It may
raise."""


def restore_prefix(
    kinds: GroupKinds, coordinator: KVCacheCoordinator, cache: PrefixCache, row: int, state: RowState, fetch: FetchPages
) -> bool:
    """Do ``KVCacheManager.restore`` through a free row, without the pin.

    If it returns False, because the pool has too few pages, or raises, it has changed nothing.
    """
    num_tokens = len(state.token_ids)
    as_bytes(state.token_ids, 0, num_tokens)  # raises at a token that cannot be read
    if not _fill_row(kinds, coordinator, cache, row, state, fetch):
        return False
    try:
        cache.publisher.follow(row, 0, NO_MATCH)
        for blocks in state.inputs:
            cache.inputs.publish_input(blocks, kinds.tables[blocks.group].ids[row, : blocks.num_blocks])
        coordinator.commit_row(row, num_tokens)
    finally:
        coordinator.free_row(row)
    return True


def _fill_row(
    kinds: GroupKinds, coordinator: KVCacheCoordinator, cache: PrefixCache, row: int, state: RowState, fetch: FetchPages
) -> bool:
    """Begin a free row with cached pages and fetched ones; leave it free if pages are short."""
    num_tokens = len(state.token_ids)
    match = cache.tree.match_prefix(state.namespace, state.token_ids, num_tokens)
    all_needed = kinds.needed_blocks(num_tokens, state.inputs)
    cached_pages = [
        pages * is_needed
        for pages, is_needed in zip(cache.pages_of(match, num_tokens, state.inputs), all_needed, strict=True)
    ]
    missing_blocks = [
        np.flatnonzero(is_needed & (pages == 0)) for is_needed, pages in zip(all_needed, cached_pages, strict=True)
    ]
    coordinator.begin_row(row, num_tokens, state)
    try:
        # These pages are held first, so that the allocation evicts none of them.
        for group, pages in enumerate(cached_pages):
            coordinator.reference_blocks(row, group, pages)
        new_pages = coordinator.allocator.allocate_blocks(row, missing_blocks)
        if new_pages is not None:
            for group, (blocks, pages) in enumerate(zip(missing_blocks, new_pages, strict=True)):
                if len(blocks):
                    fetch(group, blocks.tolist(), pages.tolist())
            return True
    except BaseException:
        coordinator.release_row(row)
        raise
    coordinator.release_row(row)
    return False
