"""What is given up, in which order, and what is left of a hit: loss in part costs a part."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

import numpy as np
import pytest

from kvframe.cache.manager import KVCacheManager
from kvframe.specs import KVCacheSpec
from tests.plans import encoder, evict, evict_all, full, make_plan, masked, ranged, state


def make_manager(*specs: KVCacheSpec, num_slabs: int = 600, max_num_seqs: int = 4) -> KVCacheManager:
    return KVCacheManager(make_plan(*specs, num_slabs=num_slabs, max_model_len=2048), max_num_seqs=max_num_seqs)


def run(manager: KVCacheManager, name: str, tokens: list[int]) -> int:
    hit = manager.start(name, tokens)
    assert manager.extend(name, len(tokens))
    manager.commit(name, tokens, len(tokens))
    manager.audit()
    return hit


def serve(manager: KVCacheManager, tokens: list[int]) -> int:
    hit = run(manager, "served", tokens)
    manager.free("served")
    return hit


@pytest.mark.parametrize("specs", [[full()], [full(), masked(window=32)], [full(), masked(4, 3, window=32)]])
def test_of_five_requests_with_a_common_prefix_all_but_the_first_find_it(specs: list[KVCacheSpec]) -> None:
    manager = make_manager(*specs)
    shared = list(range(1000, 1512))
    hits = [serve(manager, [*shared, *range(sibling * 100, sibling * 100 + 90)]) for sibling in range(5)]
    assert [0, 512, 512, 512, 512] == hits


def test_a_prefix_is_given_up_from_its_end() -> None:
    manager = make_manager(full())
    tokens = list(range(64))
    serve(manager, tokens)
    found = []
    for _ in range(16):
        found.append(manager.find([*tokens, 1]))
        manager._pool.evict_oldest(0, 1)
    assert list(range(64, 0, -4)) == found
    assert 0 == manager.find([*tokens, 1])


def test_what_hangs_on_a_lost_block_is_given_up_with_it() -> None:
    manager = make_manager(full(), masked(window=9))
    shared = list(range(40))
    for start in (100, 200, 300):
        serve(manager, [*shared, *range(start, start + 20)])
    first = manager.start("a", [*shared, 100])
    page = manager.block_ids("a")[0][2]
    manager.free("a")
    assert 40 == first
    evict(manager, 0, page)
    # Two blocks of the prefix are left, and what windows kept of them.
    assert 2 == manager._pool.counts.cached[0]
    assert manager._pool.counts.cached[1] <= 2
    assert 8 == manager.find([*shared, 100])
    manager.audit()


def test_what_a_running_request_holds_is_found_again_when_the_lost_block_is_computed_again() -> None:
    manager = make_manager(full(), max_num_seqs=3)
    shared = list(range(12))
    tokens = [*shared, *range(50, 62)]
    # Both compute the prefix: only the first one's blocks are found, and the second goes on from them in the tree.
    assert 0 == manager.start("first", shared)
    assert 0 == manager.start("second", tokens)
    for name, end in (("first", 12), ("second", 24)):
        assert manager.extend(name, end)
        manager.commit(name, tokens if name == "second" else shared, end)
    page = manager.block_ids("first")[0][1]
    manager.free("first")
    evict(manager, 0, page)
    assert 4 == manager.find([*tokens, 1])
    assert 4 == run(manager, "third", [*shared, 1])
    assert 24 == manager.find([*tokens, 1])


def test_a_window_that_lost_a_block_costs_the_tokens_that_need_it() -> None:
    manager = make_manager(full(), masked(window=9))
    tokens = list(range(64))
    serve(manager, [*tokens, 1])
    manager.start("a", [*tokens, 2])
    lost = manager.block_ids("a")[1][-1]
    manager.free("a")
    evict(manager, 1, lost)
    # The window's earlier blocks were let go of as it moved, and are still there.
    assert 60 == manager.find([*tokens, 2])
    manager.audit()


def num_calls(work: Callable[[], None]) -> int:
    """Return how many Python functions something calls."""
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls["call"]


def test_a_page_costs_no_more_to_give_up_where_many_prefixes_go_on() -> None:
    costs, costs_of_useless = [], []
    for num_continuations in (4, 64):
        manager = make_manager(full(), masked(window=9), ranged(window=13), num_slabs=2000)
        shared = list(range(40))
        for each in range(num_continuations):
            serve(manager, [*shared, *range(100 + 20 * each, 120 + 20 * each)])
        manager.start("a", [*shared, 1])
        pages = [[page for page in ids if page] for ids in manager.block_ids("a")]
        manager.free("a")
        # The first time, somebody looks which of them have all of their pages.
        evict(manager, 1, pages[1][-1])
        costs.append(num_calls(partial(evict, manager, 1, pages[1][-2])))
        before = manager._pool.num_evictions
        # Of each continuation, the first window's first block is only needed by what is lost with this.
        calls = num_calls(partial(evict, manager, 2, pages[2][-1]))
        costs_of_useless.append(calls / (manager._pool.num_evictions - before))
        manager.audit()
        assert 60 == manager.find([*shared, *range(100, 120), 1])
    assert costs[0] == costs[1]
    assert costs_of_useless[0] >= costs_of_useless[1]


def test_a_continuation_that_needs_a_lost_block_is_given_up_though_another_does_not() -> None:
    manager = make_manager(full(), masked(window=9))
    shared = list(range(40))
    for tokens in ([100, 101, 102, 103], list(range(200, 220))):
        serve(manager, [*shared, *tokens])
    manager.start("a", [*shared, 1])
    lost = manager.block_ids("a")[1][-1]
    manager.free("a")
    before = manager._pool.counts.cached
    evict(manager, 1, lost)
    assert [before[0] - 1, before[1] - 2] == manager._pool.counts.cached
    assert [36, 60] == [manager.find([*shared, *range(100, 105)]), manager.find([*shared, *range(200, 221)])]
    manager.audit()


@pytest.mark.parametrize("specs", [[full()], [full(), masked(window=4096)]])
def test_where_every_token_is_needed_all_that_is_cached_is_found_whatever_is_lost(specs: list[KVCacheSpec]) -> None:
    draw = Random(7)
    manager = make_manager(*specs)
    prompts = [[0] * 4 * draw.randint(1, 6) + [1] * 4 * draw.randint(0, 4) + [2] * 4 * each for each in range(1, 9)]
    for tokens in prompts:
        serve(manager, tokens)
    while any(manager._pool.counts.cached):
        group, page = draw.choice(sorted(manager.published()))
        evict(manager, group, page)
        found = {tuple(tokens[:end]) for tokens in prompts for end in range(4, manager.find([*tokens, 3]) + 1, 4)}
        assert {len(found)} == set(manager._pool.counts.cached)
    manager.audit()


def test_a_longer_unused_prefix_is_given_up_before_a_shorter_unused_one() -> None:
    manager = make_manager(full(), num_slabs=40)
    prompts = [list(range(start, start + 40)) for start in (0, 100, 200)]
    for tokens in prompts:
        serve(manager, tokens)
    serve(manager, prompts[0])
    serve(manager, list(range(300, 400)))
    assert [36, 0] == [manager.find(prompts[0]), manager.find(prompts[1])]


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("spec", [masked(window=4), ranged(window=4), state(every=1)], ids=["mask", "asked", "state"])
def test_what_a_request_passes_is_given_up_before_what_others_left(spec: KVCacheSpec, num_rows: int) -> None:
    manager = make_manager(spec, num_slabs=64)
    earlier = list(range(9))
    serve(manager, earlier)
    names = [f"row {row}" for row in range(num_rows)]
    for row, name in enumerate(names):
        manager.start(name, list(range(1000 * row + 1000, 1000 * row + 1400)))
    rows = np.array([manager.row(name) for name in names], dtype=np.int64)
    # Each passes 100 blocks, of 64 that there are.
    for count in range(1, 401):
        assert manager.extend_rows(rows, np.full(num_rows, count))
        manager.commit_rows(rows, np.full(num_rows, count))
    manager.audit()
    assert 8 == manager.find(earlier)


def test_after_a_reset_nothing_is_found_and_what_ran_publishes_nothing() -> None:
    manager = make_manager(full(), encoder())
    tokens = list(range(30))
    manager.start("a", tokens)
    assert manager.extend("a", 10)
    manager.commit("a", tokens, 10)
    manager.reset_prefix_cache()
    assert manager.extend("a", 30)
    manager.commit("a", tokens, 30)
    manager.free("a")
    assert 0 == manager.find([*tokens, 1])
    assert [0, 0] == manager._pool.counts.cached
    assert 0 == serve(manager, tokens)
    assert 28 == manager.find([*tokens, 1])


def test_looking_for_a_prefix_takes_nothing() -> None:
    manager = make_manager(full())
    serve(manager, list(range(30)))
    assert 28 == manager.find(list(range(30)))
    assert 28 == manager.find(array("I", range(30)))
    assert 0 == manager.find(list(range(30)), salt="other")
    assert (0, 30) == (manager.num_held_pages, manager.stats.queried_tokens)


def test_tokens_may_be_arrays_that_grow() -> None:
    manager = make_manager(full())
    tokens = array("I", range(10))
    manager.start("a", tokens)
    for _ in range(20):
        assert manager.extend("a", len(tokens))
        manager.commit("a", tokens, len(tokens))
        tokens.append(len(tokens))
    assert 28 == manager.find(list(range(40)))


def test_stale_entries_of_the_queues_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframe.cache.pool._MAX_STALE", 8)
    manager = make_manager(full(), state())
    for _ in range(40):
        serve(manager, list(range(30)))
        assert manager._pool._cached.num_entries <= 2 * sum(manager._pool.counts.cached) + 8 + 16
    evict_all(manager)
    assert [0, 0] == manager._pool.counts.cached


@pytest.mark.parametrize("specs", [[full()], [full(), masked(window=9)]])
def test_a_salt_of_which_nothing_is_cached_leaves_nothing_behind(specs: list[KVCacheSpec]) -> None:
    manager = make_manager(*specs)
    for salt in map(str, range(5)):
        manager.start("a", list(range(30)), salt=salt)
        assert manager.extend("a", 30)
        manager.commit("a", list(range(30)), 30)
        manager.free("a")
    assert 5 == len(manager._tree._roots)
    manager.start("only looked up", list(range(30)), salt="another")
    evict_all(manager)
    assert 0 == len(manager._tree._roots)
