"""Restoring: a prefix whose pages are outside of the pool becomes a cached one, as if it had been computed here.

Pages with the same content that are cached already are used; only the others are fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.arguments import check_copies
from kvframe.cache.block_order import BlockIds
from kvframe.cache.block_table import GroupKinds, RowState
from kvframe.cache.coordinator import KVCacheCoordinator
from kvframe.cache.input_index import InputBlocks
from kvframe.cache.prefix_lookup import PrefixCache
from kvframe.cache.radix_tree import NO_MATCH, as_bytes

FetchPages = Callable[[int, Sequence[int], Sequence[int]], None]
"""Copies pages of a group to the pool: from some places outside of it to as many block ids. It may raise."""

Copies = Sequence[npt.NDArray[np.int64]]
"""Per group ``[num_blocks], int64, host``: the place of each block's copy outside of the pool; 0 for none."""


def restore_prefix(
    kinds: GroupKinds,
    coordinator: KVCacheCoordinator,
    cache: PrefixCache,
    row: int,
    state: RowState,
    copies: list[list[int]],
    fetch: FetchPages,
    *,
    is_caching: bool,
) -> bool:
    """Do ``KVCacheManager.restore`` through a free row, without the pin.

    If it returns False, because the pool has too few pages, or raises, it has changed nothing.
    """
    num_tokens = len(state.token_ids)
    as_bytes(state.token_ids, 0, num_tokens)  # raises at a token that cannot be read
    checked_copies = check_copies(copies, _needed_blocks(kinds, num_tokens, state.inputs))
    if not is_caching:
        return True
    if not _fill_row(coordinator, cache, row, state, checked_copies, fetch):
        return False
    try:
        cache.publisher.follow(row, 0, NO_MATCH)
        for blocks in state.inputs:
            cache.inputs.publish_input(blocks, kinds.tables[blocks.group].ids[row, : blocks.num_blocks])
        coordinator.commit_row(row, num_tokens)
    finally:
        coordinator.free_row(row)
    return True


def _needed_blocks(kinds: GroupKinds, num_tokens: int, inputs: Iterable[InputBlocks]) -> list[npt.NDArray[np.bool_]]:
    """Return per group ``[num_blocks], bool``: the blocks that a request needs to continue after a prefix."""
    needed_blocks = []
    for group in kinds.plan.groups:
        is_needed = np.zeros(0 if group.is_of_input else num_tokens // group.block_size, dtype=np.bool_)
        for start, stop in group.answers.live_blocks(num_tokens) if len(is_needed) else ():
            is_needed[start:stop] = True
        needed_blocks.append(is_needed)
    for blocks in inputs:
        needed_blocks[blocks.group] = np.ones(blocks.num_blocks, dtype=np.bool_)
    return needed_blocks


def _fill_row(
    coordinator: KVCacheCoordinator, cache: PrefixCache, row: int, state: RowState, copies: Copies, fetch: FetchPages
) -> bool:
    """Begin a free row with cached pages and fetched ones; leave it free if pages are short."""
    num_tokens = len(state.token_ids)
    cached_pages = _cached_pages(cache, state, copies)
    to_fetch = [
        np.flatnonzero((group_copies != 0) & (pages == 0))
        for group_copies, pages in zip(copies, cached_pages, strict=True)
    ]
    coordinator.begin_row(row, num_tokens, state)
    try:
        # These pages are held first, so that the allocation evicts none of them.
        for group, pages in enumerate(cached_pages):
            coordinator.reference_blocks(row, group, pages)
        gaps = [blocks.tolist() for blocks in to_fetch]
        new_pages = coordinator.allocator.allocate_for_rows(np.array([row]), np.array([num_tokens]), gaps)
        if new_pages is not None:
            for group, (blocks, pages) in enumerate(zip(to_fetch, new_pages, strict=True)):
                fetch(group, copies[group][blocks].tolist(), pages.tolist())
            return True
    except BaseException:
        coordinator.release_row(row)
        raise
    coordinator.release_row(row)
    return False


def _cached_pages(cache: PrefixCache, state: RowState, copies: Copies) -> list[BlockIds]:
    """Return per group, by block, the cached page with the content of each copy; 0 for none."""
    cached_pages = [np.zeros(len(group_copies), dtype=np.int32) for group_copies in copies]
    match = cache.tree.match_prefix(state.namespace, state.token_ids, len(state.token_ids))
    stack_pages = cache.tree.pages_of(match, match.length)
    for group, (s, g) in cache.tree.stack_indices.items():
        pages = stack_pages[s][g][: len(cached_pages[group])]
        cached_pages[group][: len(pages)] = pages
    for blocks in state.inputs:
        input_pages = cache.inputs.find_input(blocks)
        if input_pages is not None:
            cached_pages[blocks.group][:] = input_pages[: len(cached_pages[blocks.group])]
    for pages, group_copies in zip(cached_pages, copies, strict=True):
        pages[group_copies == 0] = 0
    return cached_pages
