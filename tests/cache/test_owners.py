"""The owners of published blocks: each one gets the blocks that it loses by eviction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvframe.cache.block_pool import NO_OWNER, BlockPool, Indices
from tests.cache.plans import full, make_plan

Pages = npt.NDArray[np.int32]
NUM_PAGES, OWNER, OTHER = 8, 3, 4


class Told(list[tuple[int, int]]):
    """Records the evicted blocks that owners get: the owner, and the owner's index of each block."""

    def take_down(self, owner: int, groups: int | npt.NDArray[np.int64], indices: Indices) -> None:
        assert {0} == {*np.atleast_1d(groups).tolist()}
        self += [(owner, index) for index in indices.tolist()]


def make_pool(told: Told, num_slabs: int = 2 * NUM_PAGES) -> BlockPool:
    return BlockPool(make_plan(full(), num_slabs=num_slabs, max_model_len=4 * NUM_PAGES), on_evicted=told.take_down)


def allocate_and_cache(pool: BlockPool, owner: int, shared: slice = slice(0)) -> Pages:
    """Return blocks that an owner knows by index, released tail first; some have another reference."""
    pages = pool.allocate_blocks((NUM_PAGES,))
    assert pages is not None
    pool.add_references(0, pages[shared])
    pool.publish_blocks(owner, pages, np.arange(NUM_PAGES))
    pool.release_blocks(pages[::-1].copy(), 0)
    assert [owner] * NUM_PAGES == pool.owners_of(pages).tolist()
    return pages


def hold_and_release(pool: BlockPool, pages: Pages) -> None:
    pool.add_references(0, pages[2:4])
    pool.release_blocks(pages[2:4], 0)


def evict_one(pool: BlockPool, pages: Pages) -> None:
    pool.evict_blocks(pages[5:6])


def evict_some(pool: BlockPool, pages: Pages) -> None:
    pool.evict_first(0, 3)


def discard_the_last(pool: BlockPool, pages: Pages) -> None:
    pool.discard_cached(pages[6:])


def publish_the_first_again(pool: BlockPool, pages: Pages) -> None:
    pool.publish_blocks(OTHER, pages[:3], np.arange(3))


def do_nothing(pool: BlockPool, pages: Pages) -> None:
    pass


@pytest.mark.parametrize(
    ("touch", "changed"),
    [
        (do_nothing, {}),
        (hold_and_release, {}),
        (evict_one, {}),
        (evict_some, {}),
        (discard_the_last, {6: None, 7: None}),
        (publish_the_first_again, {0: OTHER, 1: OTHER, 2: OTHER}),
    ],
)
def test_the_owner_of_each_block_is_told_of_its_eviction_whatever_happens_to_others(
    touch: Callable[[BlockPool, Pages], None], changed: dict[int, int | None]
) -> None:
    told = Told()
    pool = make_pool(told)
    pages = allocate_and_cache(pool, OWNER)
    assert pool.is_cached(pages).all()
    touch(pool, pages)
    owners = {index: changed.get(index, OWNER) for index in range(NUM_PAGES)}
    is_cached = pool.is_cached(pages)
    found = dict(zip(range(NUM_PAGES), pool.owners_of(pages).tolist(), strict=True))
    assert {index: owners[index] if is_cached[index] else NO_OWNER for index in owners} == found
    pool.evict_first(0, NUM_PAGES)
    assert sorted((owner, index) for index, owner in owners.items() if owner is not None) == sorted(told)
    assert [NO_OWNER] * NUM_PAGES == pool.owners_of(pages).tolist()


def test_published_blocks_with_other_references_stay_held() -> None:
    pool = make_pool(Told())
    pages = allocate_and_cache(pool, OWNER, shared=slice(2))
    assert [1, 1, *[0] * (NUM_PAGES - 2)] == pool.reference_counts(pages).tolist()
    pool.unpublish_all()
    assert [NO_OWNER] * NUM_PAGES == pool.owners_of(pages).tolist()
    assert 2 == sum(pool.blocks_held)
    assert 0 == pool.num_cached


def test_blocks_of_several_owners_are_evicted_together() -> None:
    told = Told()
    pool = make_pool(told, num_slabs=4 * NUM_PAGES)
    both = [allocate_and_cache(pool, owner) for owner in (OWNER, OTHER)]
    half = NUM_PAGES // 2
    pool.evict_blocks(np.concatenate([pages[:half] for pages in both]))
    assert [(owner, index) for owner in (OWNER, OTHER) for index in range(half)] == sorted(told)
    for owner, pages in zip((OWNER, OTHER), both, strict=True):
        assert [*[NO_OWNER] * half, *[owner] * half] == pool.owners_of(pages).tolist()
