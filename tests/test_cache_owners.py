"""Whose the pages are that were published as they were let go of, whatever becomes of a part of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvframe.cache.block_pool import NO_OWNER, BlockPool
from tests.plans import full, make_plan

Pages = npt.NDArray[np.int32]
NUM_PAGES, OWNER, OTHER = 8, 3, 4
TAIL_FIRST = np.arange(NUM_PAGES, dtype=np.int32)[::-1]


class Recorder:
    """A keeper that takes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.num_whole = 0

    def lost_all(self, owner: int, group: int, num_pages: int) -> bool:
        self.num_whole += num_pages == NUM_PAGES
        return False

    def lost(self, owner: int, group: int, indices: npt.NDArray[np.int32]) -> None:
        assert 0 == group
        self.told += [(owner, index) for index in indices.tolist()]


def take_and_let_go(pool: BlockPool, pages: Pages) -> None:
    pool.add_references(0, pages[2:4])
    pool.release_blocks(pages[2:4], 0)


def give_up_one(pool: BlockPool, pages: Pages) -> None:
    pool.evict_blocks(0, pages[5:6])


def make_some_room(pool: BlockPool, pages: Pages) -> None:
    pool.evict_any(3, 0)


def drop_the_last(pool: BlockPool, pages: Pages) -> None:
    pool.discard_cached(0, pages[6:])


def hand_over_the_first(pool: BlockPool, pages: Pages) -> None:
    pool.hand_over(OTHER, pages[:3], np.arange(3))


def do_nothing(pool: BlockPool, pages: Pages) -> None:
    pass


@pytest.mark.parametrize(
    ("touch", "changed", "num_whole"),
    [
        (do_nothing, {}, 1),
        (take_and_let_go, {}, 0),
        (give_up_one, {}, 0),
        (make_some_room, {}, 0),
        (drop_the_last, {6: None, 7: None}, 0),
        (hand_over_the_first, {0: OTHER, 1: OTHER, 2: OTHER}, 0),
    ],
)
def test_each_page_has_its_owner_whatever_becomes_of_others_that_were_let_go_of_with_it(
    touch: Callable[[BlockPool, Pages], None], changed: dict[int, int | None], num_whole: int
) -> None:
    keeper = Recorder()
    pool = BlockPool(make_plan(full(), num_slabs=2 * NUM_PAGES, max_model_len=4 * NUM_PAGES), keeper=keeper)
    pages = pool.allocate_blocks((NUM_PAGES,))
    assert pages is not None
    pool.publish_and_release(OWNER, pages[::-1].copy(), TAIL_FIRST, 0)
    assert [OWNER] * NUM_PAGES == pool.owners_of(pages).tolist()
    assert pool.is_cached(pages).all()
    touch(pool, pages)
    owners = {index: changed.get(index, OWNER) for index in range(NUM_PAGES)}
    is_cached = pool.is_cached(pages)
    found = dict(zip(range(NUM_PAGES), pool.owners_of(pages).tolist(), strict=True))
    assert {index: owners[index] if is_cached[index] else NO_OWNER for index in owners} == found
    pool.evict_any(NUM_PAGES, NUM_PAGES)
    assert sorted((owner, index) for index, owner in owners.items() if owner is not None) == sorted(keeper.told)
    assert [NO_OWNER] * NUM_PAGES == pool.owners_of(pages).tolist()
    assert num_whole == keeper.num_whole


def test_pages_that_somebody_else_holds_are_published_and_not_let_go_of() -> None:
    keeper = Recorder()
    pool = BlockPool(make_plan(full(), num_slabs=2 * NUM_PAGES, max_model_len=4 * NUM_PAGES), keeper=keeper)
    pages = pool.allocate_blocks((NUM_PAGES,))
    assert pages is not None
    pool.add_references(0, pages[:2])
    pool.publish_and_release(OWNER, pages[::-1].copy(), TAIL_FIRST, 0)
    assert [OWNER] * NUM_PAGES == pool.owners_of(pages).tolist()
    assert [1, 1, *[0] * (NUM_PAGES - 2)] == pool.reference_counts(pages).tolist()
    pool.unpublish_all()
    assert [NO_OWNER] * NUM_PAGES == pool.owners_of(pages).tolist()
    assert 2 == sum(pool.blocks_held)
    assert 0 == pool.num_cached


def test_parts_of_what_several_owners_let_go_of_are_given_up_together() -> None:
    keeper = Recorder()
    pool = BlockPool(make_plan(full(), num_slabs=4 * NUM_PAGES, max_model_len=4 * NUM_PAGES), keeper=keeper)
    both = []
    for owner in (OWNER, OTHER):
        pages = pool.allocate_blocks((NUM_PAGES,))
        assert pages is not None
        pool.publish_and_release(owner, pages[::-1].copy(), TAIL_FIRST, 0)
        both.append(pages)
    half = NUM_PAGES // 2
    pool.evict_blocks(0, np.concatenate([pages[:half] for pages in both]))
    assert [(owner, index) for owner in (OWNER, OTHER) for index in range(half)] == sorted(keeper.told)
    for owner, pages in zip((OWNER, OTHER), both, strict=True):
        assert [*[NO_OWNER] * half, *[owner] * half] == pool.owners_of(pages).tolist()
