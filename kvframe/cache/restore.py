"""Restoring: a prefix whose pages are outside of the pool becomes a cached one, as if it had been computed here.

Pages with the same content that are cached already are used; only the others are fetched.
"""

from __future__ import annotations

import numpy as np

from kvframe.cache.block_table import GroupKinds, RowState
from kvframe.cache.coordinator import FillPages, KVCacheCoordinator
from kvframe.cache.prefix_lookup import PrefixCache
from kvframe.cache.radix_tree import NO_MATCH, as_bytes


def restore_prefix(
    kinds: GroupKinds, coordinator: KVCacheCoordinator, cache: PrefixCache, row: int, state: RowState, fetch: FillPages
) -> bool:
    """Do ``KVCacheManager.restore`` through a free row, without the pin.

    If it returns False, because the pool has too few pages, or raises, it has changed nothing.
    """
    num_tokens = len(state.token_ids)
    as_bytes(state.token_ids, 0, num_tokens)  # raises at a token that cannot be read
    match = cache.tree.match_prefix(state.namespace, state.token_ids, num_tokens)
    cached_pages, missing_blocks = [], []
    for pages, is_needed in zip(
        cache.pages_of(match, num_tokens, state.inputs), kinds.needed_blocks(num_tokens, state.inputs), strict=True
    ):
        cached_pages.append(pages * is_needed)
        missing_blocks.append(np.flatnonzero(is_needed & (pages == 0)))
    if not coordinator.fill_row(row, num_tokens, state, cached_pages, missing_blocks, fetch):
        return False
    try:
        cache.publisher.follow(row, 0, NO_MATCH)
        for blocks in state.inputs:
            cache.inputs.publish_input(blocks, kinds.tables[blocks.group].ids[row, : blocks.num_blocks])
        coordinator.commit_row(row, num_tokens)
    finally:
        coordinator.free_row(row)
    return True
