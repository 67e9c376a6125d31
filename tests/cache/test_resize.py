"""The pool grows and shrinks at its end, between steps; no held block is changed."""

from __future__ import annotations

import pytest
from kvframe_testing.audit import audit_each_verb, findable_pages

from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import KVCacheSpec
from tests.cache.plans import full, masked
from tests.support import managers

MOST_RUNNING = 40
MIXTURES = [(full(),), (full(), full(8)), (full(), masked(2, window=5)), (full(4, 2), masked(window=5))]


def make_manager(*specs: KVCacheSpec, num_slabs: int) -> KVCacheManager:
    return audit_each_verb(managers.make_manager(*specs, num_slabs=num_slabs, max_num_seqs=MOST_RUNNING))


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


MIXED = (full(2), masked(12, window=5))


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
    blocks, published = [manager.block_ids(name) for name in names], set(findable_pages(manager))
    assert not manager.resize(4)
    assert (blocks, published) == ([manager.block_ids(name) for name in names], set(findable_pages(manager)))
    assert 40 == manager.plan.num_slabs


@pytest.mark.parametrize("specs", MIXTURES)
def test_cached_pages_at_the_end_are_evicted_and_others_stay(specs: tuple[KVCacheSpec, ...]) -> None:
    manager = make_manager(*specs, num_slabs=40)
    names = fill(manager)
    for name in names:
        manager.free(name)
    assert manager.resize(20)
    end = manager.plan.total_bytes // manager.plan.block_id_bytes
    left = {page for _, page in findable_pages(manager)}
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


def pinned(num_tokens: int, *, num_slabs: int) -> KVCacheManager:
    """Return a manager of a lone group with so many pinned tokens; its longest request takes 16 slabs."""
    manager, tokens = make_manager(full(), num_slabs=num_slabs), list(range(num_tokens))
    manager.start("pinned", tokens)
    assert manager.extend("pinned", num_tokens)
    manager.commit("pinned", tokens, num_tokens)
    manager.free("pinned")
    assert num_tokens == manager.pin(tokens, checks_capacity=False).num_tokens
    return manager


def test_a_pool_shrinks_as_long_as_the_longest_request_fits_beside_the_pins() -> None:
    manager = pinned(12, num_slabs=21)
    assert [True, False] == [manager.resize(3 + 16), manager.resize(3 + 15)]
    manager.reset_prefix_cache()
    assert manager.resize(1)


def test_pins_that_take_too_much_prevent_neither_growth_nor_the_same_size() -> None:
    manager = pinned(20, num_slabs=20)
    assert [True, False, True] == [manager.resize(count) for count in (20, 19, 22)]
