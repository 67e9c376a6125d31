"""The audit: checks that every page of a cache is free, held or cached, and that all counts of the cache are right.

It takes time in proportion to the pool: it is for tests, and for ``[cache] audit``, in which it follows every verb. A
check that fails raises an ``AssertionError`` whose text says what is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from kvframe.cache.block_order import AnyBlockIds, BlockIds, ReleaseOrder
from kvframe.cache.block_pool import NO_OWNER, BlockPool
from kvframe.cache.block_table import BlockTables, Counts
from kvframe.cache.manager import KVCacheManager
from kvframe.cache.radix_tree import RadixTree
from kvframe.planning.plan import KVCachePlan

M = TypeVar("M", bound=KVCacheManager)
READERS = frozenset(("block_ids", "find", "has_capacity", "may_be_needed", "missing_inputs", "record_copies", "row"))
"""Public methods of the manager that change no page; watchers call some of them within another verb.

``audit_each_verb`` audits after all others."""


def audit(manager: KVCacheManager) -> None:
    """Check that every page is free, held or cached, and that pages and rows are counted right.

    Raises:
        AssertionError: A check fails; the text names it.
    """
    tables, numbers = manager.tables, manager._numbers
    taken_rows = [entry.row for entry in manager._entries.values()]
    _audit_rows(tables, manager._rows.free, taken_rows, numbers.num_blocks, numbers.num_computed)
    held_pages = np.concatenate([pages_in(tables), manager._pins.pinned_pages()])
    audit_pool(manager._pool, manager.plan, held_pages)
    _audit_tree(manager._cache.tree)


def audit_each_verb(manager: M) -> M:
    """Let a manager's verbs audit it when they return or raise; return the manager."""
    for name in dir(type(manager)):
        if not name.startswith("_") and name not in READERS and callable(getattr(type(manager), name)):
            setattr(manager, name, _audited(manager, name))
    return manager


def _audited(manager: KVCacheManager, name: str) -> Callable[..., Any]:
    verb = getattr(manager, name)

    @functools.wraps(verb)
    def audited(*args: Any, **kwargs: Any) -> Any:
        try:
            return verb(*args, **kwargs)
        finally:
            try:
                audit(manager)
            except AssertionError as error:
                raise AssertionError(f"the cache is broken after {name!r}: {error}") from error

    return audited


def findable_pages(manager: KVCacheManager) -> Iterator[tuple[int, int]]:
    """Yield the group and block id of each page that a lookup can find."""
    tree = manager._cache.tree
    for node in tree.walk():
        for pages, groups in zip(node.pages, tree.groups, strict=True):
            for group, row in zip(groups, pages, strict=True):
                yield from ((group, page) for page in row[row != 0].tolist())
    for blocks, pages in manager._cache.inputs.entries.values():
        yield from ((blocks.group, page) for page in pages[pages != 0].tolist())


def count_cached(pool: BlockPool) -> list[int]:
    """Return the cached blocks of each group, as the orders of their eviction have them."""
    block_ids: list[AnyBlockIds] = [np.zeros(0, dtype=np.intp)]
    for order in pool._orders:
        if isinstance(order, ReleaseOrder):
            block_ids.append(order.entries()[1])
        else:
            block_ids += [run[order._is_current(stamp, run)] for _, _, stamp, run in order._runs]
    pool_indices = pool._pool_indices(np.concatenate(block_ids).astype(np.intp))
    groups = np.broadcast_to(pool._groups_of(pool_indices), len(pool_indices))
    counts: list[int] = np.bincount(groups, minlength=len(pool.blocks_held)).tolist()
    return counts


def pages_in(tables: BlockTables) -> BlockIds:
    """Return the pages in block tables, each as often as it is there."""
    ids = [stack.ids[stack.ids != 0] for stack in tables.stacks]
    return np.concatenate(ids) if ids else np.zeros(0, dtype=np.int32)


def _audit_rows(
    tables: BlockTables, free: Sequence[int], taken_rows: Sequence[int], num_blocks: Counts, num_computed: Counts
) -> None:
    """Check that every row is free or belongs to one request, and that no page is in a column that is not in use."""
    rows = list(free)
    _require(len(free) + len(taken_rows) == len(num_computed), "rows were lost, or came from nowhere")
    _require(len({*free, *taken_rows}) == len(num_computed), "a row is free and a request's, or two requests'")
    _require(not num_blocks[:, rows].any() and not num_computed[rows].any(), "a free row has blocks or tokens")
    for group, table in enumerate(tables):
        is_after = np.arange(table.ids.shape[1]) >= num_blocks[group][:, None]
        _require(not (table.ids != 0)[is_after].any(), "a row names a page after its last block")


def audit_pool(pool: BlockPool, plan: KVCachePlan, held_blocks: BlockIds) -> None:
    """Check that a pool's pages are free, held or cached, and counted.

    ``held_blocks`` names each page as often as it has holders.
    """
    pages, free = pool.free_list.all_blocks(), pool.free_list.free_blocks()
    # Different pages are at least as far apart as the smallest page is long.
    apart = max(1, min((group.page_bytes for group in plan.groups), default=1) // plan.block_id_bytes)
    indices = pages // apart
    num_indices = int(indices.max(initial=0)) + 1
    num_holders = np.bincount(held_blocks // apart, minlength=num_indices)[indices]
    num_listed = np.bincount(free // apart, minlength=num_indices)[indices]
    counted = pool.reference_counts(pages)
    is_held, is_cached, is_free = num_holders > 0, pool.is_cached(pages), num_listed > 0
    _require(not (num_listed > 1).any(), "a free page is listed twice")
    _require(not (is_held & is_free).any(), "a page is held and free")
    _require(not (is_held & is_cached).any(), "a page is held and cached")
    _require(not (is_cached & is_free).any(), "a page is cached and free")
    is_known = int(num_holders.sum()) == len(held_blocks) and int(num_listed.sum()) == len(free)
    _require(is_known and bool((is_held | is_cached | is_free).all()), "pages were lost, or came from nowhere")

    num_cached = int(np.count_nonzero(is_cached))
    _require(sum(count_cached(pool)) == num_cached == pool.num_cached, "cached pages are miscounted")
    _require(np.count_nonzero(is_held) == sum(pool.blocks_held), "held pages are miscounted")
    _require(np.array_equal(num_holders[is_held], counted[is_held]), "holders are miscounted")
    num_bytes = sum(count * group.page_bytes for count, group in zip(pool.blocks_held, plan.groups, strict=True))
    _require(num_bytes == pool.held_bytes, "held bytes are miscounted")
    _require(pool.free_list.count_idle_slabs(pages[is_held]) == pool.num_idle_slabs, "idle slabs are miscounted")
    is_published = pool.owners_of(pages) != NO_OWNER
    _require(bool(is_published[is_cached].all()), "a page is cached that no lookup can find")
    _require(not (is_published & is_free).any(), "a page is free and can be found")


def _audit_tree(tree: RadixTree) -> None:
    """Check that every node counts its pages right, and that the pool has it as their owner."""
    for node in tree.walk():
        node_pages = [pages[pages != 0] for pages in node.pages]
        _require(node.num_pages == sum(map(len, node_pages)), "a node's pages are miscounted")
        for pages in node_pages:
            _require(bool((tree.pool.owners_of(pages) == node.owner).all()), "a node names a page of another owner")


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise AssertionError(otherwise)
