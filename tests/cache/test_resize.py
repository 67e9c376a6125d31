"""The pool grows and shrinks at its end, between steps; no held block is changed."""

from __future__ import annotations

import pytest

from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import KVCacheSpec
from tests.cache.plans import full, make_plan, masked

MOST_RUNNING = 40
MIXTURES = [(full(),), (full(), full(8)), (full(), masked(2, window=5)), (full(4, 2), masked(window=5))]


def make_manager(*specs: KVCacheSpec, num_slabs: int) -> KVCacheManager:
    return KVCacheManager(make_plan(*specs, num_slabs=num_slabs), max_num_seqs=MOST_RUNNING, audited=True)


def fill(manager: KVCacheManager) -> list[str]:
    """Start requests until the blocks are used up; return those that have some."""
    names = []
    for number in range(MOST_RUNNING):
        tokens = [number] * 60
        manager.start(f"{number}", tokens)
        if not manager.extend(f"{number}", 60):
            manager.free(f"{number}")
            break
        manager.commit(f"{number}", tokens, 60)
        names.append(f"{number}")
    return names


def with_rest(*specs: KVCacheSpec, num_slabs: int = 16, rest: float = 0.8) -> KVCacheManager:
    plan = make_plan(*specs, num_slabs=num_slabs, rest=rest)
    assert 0 < plan.num_rest_pages < plan.groups[plan.rest_group].pages_per_slab
    return KVCacheManager(plan, max_num_seqs=MOST_RUNNING, audited=True)


MIXED = (full(2), masked(12, window=5))


def most(manager: KVCacheManager) -> int:
    """Return the number of blocks of two tokens that one request gets; it keeps running."""
    tokens = list(range(64))
    manager.start("most", tokens)
    for count in range(32):
        if not manager.extend("most", 2 * count + 2):
            return count
        manager.commit("most", tokens, 2 * count + 2)
    raise AssertionError


def after_slabs(manager: KVCacheManager) -> list[int]:
    """Return the number of the request's pages after the slabs, for each group."""
    plan = manager.plan
    end = (plan.null_bytes + plan.num_slabs * plan.slab_bytes) // plan.block_id_bytes
    return [sum(block >= end for block in ids) for ids in manager.block_ids("most")]


def test_the_pages_after_the_last_slab_serve_their_group_only() -> None:
    none, some = make_manager(*MIXED, num_slabs=6), with_rest(*MIXED, num_slabs=6)
    assert (6, 4) == (some.plan.groups[0].pages_per_slab, some.plan.num_rest_pages)
    # Four slabs if the window is in two blocks; with four pages more, it moves to where it is in one.
    assert (4 * 6, 4 + 4 * 6 + 2) == (most(none), most(some))
    assert [4, 0] == after_slabs(some)
    some.free("most")
    assert 0 == some.usage


def test_the_rest_is_used_last_but_before_a_cached_block_is_evicted() -> None:
    manager = with_rest(full(2, 2), masked(12, window=5), num_slabs=5)
    assert (3, 2) == (manager.plan.groups[0].pages_per_slab, manager.plan.num_rest_pages)
    cached, tokens = list(range(100, 112)), list(range(12))
    for name, of_name in (("cached", cached), ("most", tokens)):
        manager.start(name, of_name)
        assert manager.extend(name, 6)
        manager.commit(name, of_name, 6)
        if name == "cached":
            assert manager.extend(name, 12)
            manager.commit(name, of_name, 12)
            manager.free(name)
    # Three slabs are cached, two are held, and none is free.
    assert ([0, 0], 12) == (after_slabs(manager), manager.find([*cached, 1]))
    for count, rest in ((4, 1), (5, 2)):
        assert manager.extend("most", 2 * count)
        assert ([rest, 0], 12) == (after_slabs(manager), manager.find([*cached, 1]))
    assert manager.extend("most", 12)
    assert 0 == manager.find([*cached, 1])


@pytest.mark.parametrize("is_held", [False, True])
def test_the_rest_becomes_part_of_a_slab_when_a_pool_grows(is_held: bool) -> None:
    manager, whole = with_rest(*MIXED, num_slabs=20, rest=0.5), make_manager(*MIXED, num_slabs=30)
    names = fill(manager)
    blocks, published = [manager.block_ids(name) for name in names], set(manager.published())
    for name in names if not is_held else ():
        manager.free(name)
    assert manager.resize(30)
    assert (30, 0) == (manager.plan.num_slabs, manager.plan.num_rest_pages)
    assert published <= set(manager.published())
    if is_held:
        assert blocks == [manager.block_ids(name) for name in names]
        for name in names:
            manager.free(name)
    manager.reset_prefix_cache()
    assert 0 == manager.usage
    assert len(fill(whole)) == len(fill(manager))


def test_the_rest_is_removed_when_a_pool_shrinks_unless_a_page_of_it_is_held() -> None:
    manager = with_rest(*MIXED, num_slabs=6)
    most(manager)
    assert not manager.resize(6)
    assert 4 == manager.plan.num_rest_pages
    manager.free("most")
    assert manager.resize(6)
    assert (6, 0) == (manager.plan.num_slabs, manager.plan.num_rest_pages)
    assert 4 * 6 == most(manager)


@pytest.mark.parametrize("specs", MIXTURES)
def test_a_pool_that_grew_is_as_large_as_one_that_was_made_so(specs: tuple[KVCacheSpec, ...]) -> None:
    grown, whole = make_manager(*specs, num_slabs=20), make_manager(*specs, num_slabs=60)
    first = fill(grown)
    assert grown.resize(60)
    assert 60 == grown.plan.num_slabs
    for name in first:
        grown.free(name)
    assert 1.0 == 1 - grown.usage
    assert len(fill(whole)) == len(fill(grown))


@pytest.mark.parametrize("specs", MIXTURES)
def test_a_pool_does_not_shrink_while_its_last_pages_are_held(specs: tuple[KVCacheSpec, ...]) -> None:
    manager = make_manager(*specs, num_slabs=40)
    names = fill(manager)
    blocks, published = [manager.block_ids(name) for name in names], set(manager.published())
    assert not manager.resize(4)
    assert (blocks, published) == ([manager.block_ids(name) for name in names], set(manager.published()))
    assert 40 == manager.plan.num_slabs


@pytest.mark.parametrize("specs", MIXTURES)
def test_cached_pages_at_the_end_are_evicted_and_others_stay(specs: tuple[KVCacheSpec, ...]) -> None:
    manager = make_manager(*specs, num_slabs=40)
    names = fill(manager)
    for name in names:
        manager.free(name)
    assert manager.resize(20)
    end = manager.plan.total_bytes // manager.plan.block_id_bytes
    left = {page for _, page in manager.published()}
    assert left
    assert all(page < end for page in left)
    manager.reset_prefix_cache()
    assert fill(make_manager(*specs, num_slabs=20)) == fill(manager)


def test_a_pool_of_nothing_has_no_size() -> None:
    manager = make_manager(num_slabs=0)
    assert manager.resize(0)


def test_after_a_change_of_size_slabs_are_kept_for_the_longest_request() -> None:
    plan = make_manager(*MIXED, num_slabs=20).plan
    needed = plan.num_slabs_for(group.peak_blocks for group in plan.groups)
    manager = make_manager(*MIXED, num_slabs=needed - 1)
    assert manager.resize(needed + 2)
    for name in ("ended", "running"):
        manager.start(name, list(range(7)), use_prefix=False)
        assert manager.extend(name, 6)
        manager.commit(name, list(range(7)), 6)
    manager.free("ended")
    # Three cached blocks share a slab with the running request's block. All slabs without a held block are kept.
    assert manager.extend("running", 8)
    assert [1, 0] == manager.stats.blocks_evicted
    assert manager.resize(needed + 3)
    assert manager.extend("running", 10)
    assert [1, 0] == manager.stats.blocks_evicted
