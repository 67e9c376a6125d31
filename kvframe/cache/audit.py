"""The audit: what must be true of a cache after every operation, worked out anew from what it consists of.

Free, held and cached pages are all pages there are, each in one of these states; what is counted is what is there. An
audit takes time in proportion to the pool: it is for tests, and for whoever suspects the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.block_pool import NO_OWNER, BlockPool
from kvframe.cache.block_table import BlockTables
from kvframe.cache.free_list import BlockIds
from kvframe.cache.tree import PrefixTree
from kvframe.plan import KVCachePlan

Flags = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]


def pages_in(tables: BlockTables) -> BlockIds:
    """Return the pages that block tables name, each as often as they do."""
    ids = [stack.ids[stack.ids != 0] for stack in tables.stacks]
    return np.concatenate(ids) if ids else np.zeros(0, dtype=np.int32)


def audit_rows(max_num_seqs: int, free: Sequence[int], taken: Sequence[int]) -> None:
    """Check that every row of the table is free or one request's.

    Args:
        max_num_seqs: Rows that there are.
        free: The rows that are free.
        taken: The rows of requests.

    Raises:
        AssertionError: They are not; the text says what.
    """
    _require(len(free) + len(taken) == max_num_seqs, "rows were lost, or came from nowhere")
    _require(len({*free, *taken}) == max_num_seqs, "a row is free and a request's, or two requests'")


def audit_free_rows(tables: BlockTables, free: Sequence[int], num_blocks: Counts, num_computed: Counts) -> None:
    """Check that rows that are free are as ones without a token, and that others name no pages after their last block.

    Args:
        tables: The block tables.
        free: The rows that are free.
        num_blocks: ``[num_groups, max_num_seqs], int64, host``: each row's blocks.
        num_computed: ``[max_num_seqs], int64, host``: each row's computed tokens.

    Raises:
        AssertionError: They are not; the text says what.
    """
    rows = list(free)
    _require(not num_blocks[:, rows].any() and not num_computed[rows].any(), "a free row has blocks or tokens")
    for group, table in enumerate(tables):
        is_after = np.arange(table.ids.shape[1]) >= num_blocks[group][:, None]
        _require(not (table.ids != 0)[is_after].any(), "a row names a page after its last block")


def audit_pool(pool: BlockPool, plan: KVCachePlan, held: BlockIds) -> None:
    """Check a pool.

    Args:
        pool: The pool.
        plan: Its cut.
        held: ``[n], int32, host``: the pages that somebody holds, each as often as it has holders.

    Raises:
        AssertionError: Something is not as it must be; the text says what.
    """
    pages, free = pool.all_blocks(), pool.free_blocks()
    # Pages are apart by the smallest of them at least.
    apart = max(1, min((group.page_bytes for group in plan.groups), default=1) // plan.block_id_bytes)
    places = pages // apart
    num_places = int(places.max(initial=0)) + 1
    num_holders = np.bincount(held // apart, minlength=num_places)[places]
    num_listed = np.bincount(free // apart, minlength=num_places)[places]
    counted = pool.reference_counts(pages)
    is_held, is_cached = num_holders > 0, pool.is_cached(pages)
    is_known = int(num_holders.sum()) == len(held) and int(num_listed.sum()) == len(free)
    if not is_known or np.count_nonzero(num_listed + is_held + is_cached == 1) < len(pages):
        _explain(is_held, is_cached, num_listed)
    num_cached = int(np.count_nonzero(is_cached))
    _require(sum(pool.blocks_cached) == num_cached == pool.num_cached, "cached pages are miscounted")
    _require(np.count_nonzero(is_held) == sum(pool.blocks_held), "held pages are miscounted")
    _require(bytes(num_holders[is_held]) == bytes(counted[is_held].astype(np.int64)), "holders are miscounted")
    num_bytes = sum(count * group.page_bytes for count, group in zip(pool.blocks_held, plan.groups, strict=True))
    _require(num_bytes == pool.held_bytes, "held bytes are miscounted")
    _require(pool.count_idle_slabs(pages[is_held]) == pool.num_idle_slabs, "idle slabs are miscounted")
    is_published = pool.owners_of(pages) != NO_OWNER
    _require(
        np.count_nonzero(is_published[is_cached]) == len(pages[is_cached]), "a page is cached that nobody can find"
    )
    _require(not np.count_nonzero(is_published & (num_listed > 0)), "a page is free and can be found")


def _explain(is_held: Flags, is_cached: Flags, num_listed: npt.NDArray[np.int64]) -> None:
    is_free = num_listed > 0
    _require(not (num_listed > 1).any(), "a free page is listed twice")
    _require(not (is_held & is_free).any(), "a page is held and free")
    _require(not (is_held & is_cached).any(), "a page is held and cached")
    _require(not (is_cached & is_free).any(), "a page is cached and free")
    raise AssertionError("pages were lost, or came from nowhere")


def audit_tree(tree: PrefixTree) -> None:
    """Check that what nodes say of their pages is what the pool and their own count say.

    Args:
        tree: The tree.

    Raises:
        AssertionError: Something is not as it must be; the text says what.
    """
    for node in tree.walk():
        listed = [pages[pages != 0] for pages in node.pages]
        _require(node.num_pages == sum(map(len, listed)), "a node's pages are miscounted")
        for pages in listed:
            _require(bool((tree.pool.owners_of(pages) == node.owner).all()), "a node names a page of another owner")


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise AssertionError(otherwise)
