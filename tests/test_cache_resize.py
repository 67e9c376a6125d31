"""The pool grows and shrinks at its end, between steps: nothing that somebody holds is touched."""

from __future__ import annotations

import pytest

from kvframe.cache.manager import KVCacheManager
from kvframe.specs import KVCacheSpec
from tests.plans import full, make_plan, masked

MOST_RUNNING = 40
MIXTURES = [(full(),), (full(), full(8)), (full(), masked(2, window=5)), (full(4, 2), masked(window=5))]


def make_manager(*specs: KVCacheSpec, num_slabs: int) -> KVCacheManager:
    return KVCacheManager(make_plan(*specs, num_slabs=num_slabs), max_num_seqs=MOST_RUNNING, audited=True)


def fill(manager: KVCacheManager) -> list[str]:
    """Start requests until there is no room; return those that have some."""
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
def test_a_pool_does_not_shrink_under_who_holds_its_end(specs: tuple[KVCacheSpec, ...]) -> None:
    manager = make_manager(*specs, num_slabs=40)
    names = fill(manager)
    blocks, published = [manager.block_ids(name) for name in names], set(manager.published())
    assert not manager.resize(4)
    assert (blocks, published) == ([manager.block_ids(name) for name in names], set(manager.published()))
    assert 40 == manager.plan.num_slabs


@pytest.mark.parametrize("specs", MIXTURES)
def test_cached_pages_at_the_end_are_given_up_and_others_stay(specs: tuple[KVCacheSpec, ...]) -> None:
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
