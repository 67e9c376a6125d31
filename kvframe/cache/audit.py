"""The audit: what must be true of a cache after every operation, worked out anew from what it consists of.

Free, held and cached pages are all pages there are, each in one of these states; what is counted is what is there. An
audit takes time in proportion to the pool: it is for tests, and for whoever suspects the cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvframe.cache.pool import BlockPool
from kvframe.plan import KVCachePlan


def audit_pool(pool: BlockPool, plan: KVCachePlan, holders: Mapping[int, int]) -> None:
    """Check a pool.

    Args:
        pool: The pool.
        plan: Its cut.
        holders: How many hold each page that somebody holds, by block id.

    Raises:
        AssertionError: Something is not as it must be; the text says what.
    """
    pages, unused = set(pool.pages().tolist()), pool.free_pages().tolist()
    held, free = set(holders), set(unused)
    cached = {page for page in pages if pool.num_holders(page) < 0}
    _require(len(free) == len(unused), "a free page is listed twice")
    _require(not held & free, "a page is held and free")
    _require(not held & cached, "a page is held and cached")
    _require(not cached & free, "a page is cached and free")
    _require(held | cached | free == pages, "pages were lost, or came from nowhere")
    _require(len(cached) == sum(pool.num_cached), "cached pages are miscounted")
    _require(len(held) == sum(pool.num_held), "held pages are miscounted")
    counted = {page: pool.num_holders(page) for page in holders}
    _require(counted == dict(holders), "the holders of pages are miscounted")
    num_bytes = sum(count * group.page_bytes for count, group in zip(pool.num_held, plan.groups, strict=True))
    _require(num_bytes == pool.held_bytes, "held bytes are miscounted")
    _require(
        pool.count_idle_slabs(np.fromiter(holders, dtype=np.int32)) == pool.num_idle_slabs, "idle slabs are miscounted"
    )


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise AssertionError(otherwise)
