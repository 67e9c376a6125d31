"""The block pool's counts: blocks and bytes that are held, now and at most, and cached blocks, of each group."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kvframe_testing.audit import count_cached

from kvframe.cache.block_pool import BlockPool
from tests.cache.plans import full, make_plan, masked

SPECS = (full(), masked(window=9), masked(2, 3, window=5))
GROUPS = st.integers(0, len(SPECS) - 1)
BLOCKS = st.lists(st.tuples(GROUPS, st.booleans()), min_size=1, max_size=6)


def make_pool() -> tuple[BlockPool, list[int]]:
    """Return a pool of three groups, and the bytes of a block of each."""
    plan = make_plan(*SPECS, num_slabs=60)
    return BlockPool(plan, on_evicted=lambda owner, group, indices: None), [group.page_bytes for group in plan.groups]


@settings(deadline=None, derandomize=True)
@given(batches=st.lists(BLOCKS, min_size=1, max_size=8))
def test_blocks_are_counted_as_held_then_as_cached_or_free(batches: list[list[tuple[int, bool]]]) -> None:
    pool, page_bytes = make_pool()
    held, cached, released = [0, 0, 0], [0, 0, 0], []
    for batch in batches:
        batch.sort()
        taken = pool.allocate_blocks([sum(group == each for group, _ in batch) for each in range(len(SPECS))])
        assert taken is not None
        groups, is_published = np.array([group for group, _ in batch]), np.array([kept for _, kept in batch])
        pool.publish_blocks(1, taken[is_published], taken[is_published])
        released.append((taken, groups))
        for group, kept in batch:
            held[group] += 1
            cached[group] += kept
    num_bytes = sum(map(int.__mul__, held, page_bytes))
    assert (held, num_bytes, [0, 0, 0]) == (pool.blocks_held, pool.held_bytes, count_cached(pool))
    for taken, groups in released:
        pool.release_blocks(taken, groups)
    assert ([0, 0, 0], 0) == (pool.blocks_held, pool.held_bytes)
    assert (cached, sum(cached)) == (count_cached(pool), pool.num_cached)
    assert (held, num_bytes) == (pool.peak_blocks_held, pool.peak_held_bytes)
    for group, count in enumerate(cached):
        pool.evict_first(group, count)
    assert ([0, 0, 0], 0, cached) == (count_cached(pool), pool.num_cached, pool.blocks_evicted)


def test_cached_blocks_that_are_held_again_count_for_the_most_held_blocks() -> None:
    pool, page_bytes = make_pool()
    taken = pool.allocate_blocks([2, 0, 0])
    assert taken is not None
    pool.publish_blocks(1, taken, taken)
    pool.release_blocks(taken, 0)
    assert pool.allocate_blocks([1, 0, 3]) is not None
    pool.add_references(0, taken)
    assert ([3, 0, 3], [3, 0, 3]) == (pool.blocks_held, pool.peak_blocks_held)
    num_bytes = 3 * page_bytes[0] + 3 * page_bytes[2]
    assert (num_bytes, num_bytes) == (pool.held_bytes, pool.peak_held_bytes)
