"""Which blocks are evicted, in which order, and what remains of a hit: a partial loss costs a part."""

from __future__ import annotations

import gc
import sys
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kvframe_testing.audit import audit, count_cached

from kvframe.cache.block_order import AnyBlockIds, BlockIds, Numbers, ReleaseOrder
from kvframe.cache.block_pool import BlockPool
from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import ENCODER, KVCacheSpec
from tests.cache.plans import encoder, evict, evict_all, full, make_plan, masked, ranged, state
from tests.support import managers
from tests.support.engines import pool_of
from tests.support.managers import compute, serve


def make_manager(*specs: KVCacheSpec, num_slabs: int = 600, **options: Any) -> KVCacheManager:
    return managers.make_manager(*specs, num_slabs=num_slabs, max_model_len=2048, **options)


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
        pool_of(manager).evict_first(0, 1)
    assert list(range(64, 0, -4)) == found
    assert 0 == manager.find([*tokens, 1])


@pytest.mark.parametrize("specs", [[full()], [full(), masked(window=9)], [full(8), masked(4, 3, window=9)]])
def test_an_evicted_end_is_filled_in_by_a_request_that_continues(specs: list[KVCacheSpec]) -> None:
    manager = make_manager(*specs)
    tokens = list(range(64))
    manager.start("one", tokens)
    assert manager.extend("one", 64)
    blocks = manager.block_ids("one")
    manager.commit("one", tokens, 64)
    manager.free("one")
    for pages in blocks:
        for page in pages[len(pages) // 2 :]:
            evict(manager, page)
    assert 32 == serve(manager, [*tokens, *range(100, 132)])
    assert [64, 96] == [manager.find([*tokens, 1]), manager.find([*tokens, *range(100, 132), 1])]
    assert 2 == len(list(manager._cache.tree.walk()))


def test_a_branch_in_an_evicted_end_drops_the_tokens_after_it() -> None:
    manager = make_manager(full())
    tokens = list(range(64))
    serve(manager, tokens)
    pool_of(manager).evict_first(0, 10)
    assert 24 == serve(manager, [*tokens[:40], *range(100, 124)])
    assert [(0, 40), (40, 64)] == [(node.start, node.stop) for node in manager._cache.tree.walk()]
    assert [64, 40] == [manager.find([*tokens[:40], *range(100, 124), 1]), manager.find([*tokens, 1])]
    evict_all(manager)
    assert [] == list(manager._cache.tree.walk())
    audit(manager)


def test_what_comes_after_a_lost_block_is_found_again_when_the_block_is_computed_again() -> None:
    manager = make_manager(full(), masked(window=9))
    shared = list(range(40))
    prompts = [[*shared, *range(start, start + 20), 1] for start in (100, 200, 300)]
    for tokens in prompts:
        serve(manager, tokens)
    assert 40 == manager.start("a", [*shared, 1])
    page = manager.block_ids("a")[0][2]
    manager.free("a")
    before = count_cached(pool_of(manager))
    evict(manager, page)
    assert [before[0] - 1, before[1]] == count_cached(pool_of(manager))
    assert [8, 8, 8] == [manager.find(tokens) for tokens in prompts]
    assert 8 == serve(manager, shared)
    assert [60, 60, 60] == [manager.find(tokens) for tokens in prompts]


def test_what_a_running_request_holds_is_found_again_when_the_lost_block_is_computed_again() -> None:
    manager = make_manager(full(), max_num_seqs=3)
    shared = list(range(12))
    tokens = [*shared, *range(50, 62)]
    # Both compute the prefix. Only the blocks of the first one are found, and the second continues after them.
    assert 0 == manager.start("first", shared)
    assert 0 == manager.start("second", tokens)
    for name, end in (("first", 12), ("second", 24)):
        assert manager.extend(name, end)
        manager.commit(name, tokens if name == "second" else shared, end)
    page = manager.block_ids("first")[0][1]
    manager.free("first")
    evict(manager, page)
    assert 4 == manager.find([*tokens, 1])
    assert 4 == compute(manager, "third", [*shared, 1])
    assert 24 == manager.find([*tokens, 1])


def test_a_window_that_lost_a_block_costs_the_tokens_that_need_it() -> None:
    manager = make_manager(full(), masked(window=9))
    tokens = list(range(64))
    serve(manager, [*tokens, 1])
    manager.start("a", [*tokens, 2])
    lost = manager.block_ids("a")[1][-1]
    manager.free("a")
    evict(manager, lost)
    # The window's earlier blocks were released as it moved, and are still cached.
    assert 60 == manager.find([*tokens, 2])
    audit(manager)


def num_calls(work: Callable[[], None]) -> int:
    """Return the number of Python functions that ``call`` calls."""
    calls = Counter[str]()
    gc.disable()  # a collection may call functions of others
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls["call"]


def cost_of_eviction(manager: KVCacheManager) -> float:
    """Return the most Python function calls for an eviction of one page, until no page is cached."""
    most, pool = 0.0, pool_of(manager)
    while pool.num_cached:
        before = pool.num_cached
        # Of blocks that were released together, those of the last group are evicted first.
        first = [(pool.first_priority(group), -group) for group in range(len(manager.plan.groups))]
        _, group = min((priority, group) for priority, group in first if priority is not None)
        calls = num_calls(partial(pool.evict_first, -group, 1))
        most = max(most, calls / max(1, before - pool.num_cached))
    audit(manager)
    return most


SPECS = ([full()], [full(), masked(window=9), ranged(window=13)], [full(), state(every=3)])


@pytest.mark.parametrize("specs", SPECS, ids=["full", "windows", "states"])
def test_evicting_a_page_costs_the_same_in_wide_trees(specs: list[KVCacheSpec]) -> None:
    costs = []
    for num_continuations in (8, 64):
        manager = make_manager(*specs, num_slabs=4000)
        shared = list(range(40))
        for each in range(num_continuations):
            serve(manager, [*shared, *range(100 + 20 * each, 120 + 20 * each)])
        costs.append(cost_of_eviction(manager))
    assert costs[0] >= costs[1]


@pytest.mark.parametrize("specs", SPECS, ids=["full", "windows", "states"])
def test_evicting_a_page_costs_the_same_in_deep_trees(specs: list[KVCacheSpec]) -> None:
    costs = []
    for num_turns in (8, 64):
        manager = make_manager(*specs, num_slabs=4000)
        history: list[int] = []
        for turn in range(num_turns):
            history += [3 * turn] * 12
            # The reasoning tokens are not in the next turn's prompt, so the tree branches at each turn.
            serve(manager, [*history, *[3 * turn + 1] * 16])
            history += [3 * turn + 2] * 8
        costs.append(cost_of_eviction(manager))
    # Some evictions also remove a node, which is a call or two; the trees differ in depth by a factor of eight.
    assert 1.1 * costs[0] >= costs[1]


def test_a_lost_block_costs_the_continuations_that_need_it() -> None:
    manager = make_manager(full(), masked(window=9))
    shared = list(range(40))
    for tokens in ([100, 101, 102, 103], list(range(200, 220))):
        serve(manager, [*shared, *tokens])
    manager.start("a", [*shared, 1])
    lost = manager.block_ids("a")[1][-1]
    manager.free("a")
    evict(manager, lost)
    assert [36, 60] == [manager.find([*shared, *range(100, 105)]), manager.find([*shared, *range(200, 221)])]
    audit(manager)


@pytest.mark.parametrize("spec", [masked(window=1), masked(chunk=8)], ids=["window", "chunk"])
def test_a_block_that_no_hit_can_need_is_not_kept(spec: KVCacheSpec) -> None:
    manager = make_manager(full(), spec)
    serve(manager, list(range(32)))
    assert [8, 4 if spec.mask is not None and spec.mask.chunk else 0] == count_cached(pool_of(manager))
    assert 32 == manager.find([*range(32), 1])


def test_an_input_of_which_a_part_is_lost_is_evicted_in_all_groups() -> None:
    manager = make_manager(full(), encoder(4), encoder(2))
    manager.start("a", [1, 2], inputs={ENCODER: InputSequence(10, b"x")})
    assert manager.extend("a", 2)
    manager.commit("a", [1, 2], 2)
    page = manager.block_ids("a")[2][3]
    manager.free("a")
    assert [0, 3, 5] == count_cached(pool_of(manager))
    evict(manager, page)
    assert [0, 0, 0] == count_cached(pool_of(manager))
    audit(manager)


def test_blocks_that_end_together_nowhere_are_not_kept() -> None:
    # Without a prefix cache, a state's block may be as long as any request, and blocks of other groups have any size.
    manager = make_manager(masked(5, window=8), state(2**30), masked(3, window=8))
    serve(manager, list(range(40)))
    assert 0 == manager.find([*range(40), 1])
    assert [0, 0, 0] == count_cached(pool_of(manager))


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
    # Each request uses 100 blocks; there are 64.
    for count in range(1, 401):
        assert manager.extend_rows(rows, np.full(num_rows, count))
        manager.commit_rows(rows, np.full(num_rows, count))
    audit(manager)
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
    assert [0, 0] == count_cached(pool_of(manager))
    assert 0 == serve(manager, tokens)
    assert 28 == manager.find([*tokens, 1])


def test_looking_for_a_prefix_takes_nothing() -> None:
    manager = make_manager(full())
    serve(manager, list(range(30)))
    assert 28 == manager.find(list(range(30)))
    assert 28 == manager.find(array("I", range(30)))
    assert 0 == manager.find(list(range(30)), salt="other")
    assert (0, 30) == (manager.num_held_pages, manager.stats.queried_tokens)


def slabs_of(num_slabs: int, reserve_slabs: int = 0) -> tuple[BlockPool, list[int]]:
    """Return a pool of slabs for two groups, and the pages of a slab in each group: three, and two."""
    plan = make_plan(masked(window=9, num_kv_heads=2), full(num_kv_heads=3), num_slabs=num_slabs)
    pool = BlockPool(plan, reserve_slabs=reserve_slabs, on_evicted=lambda owner, groups, indices: None)
    return pool, [group.pages_per_slab for group in plan.groups]


def fill_a_slab(pool: BlockPool, per_slab: list[int], group: int, num_cached: int) -> BlockIds:
    """Take a slab's blocks for a group, and cache the first of them; return these."""
    blocks = pool.allocate_blocks([size * (each == group) for each, size in enumerate(per_slab)])
    assert blocks is not None
    pool.publish_blocks(1, blocks[:num_cached], np.arange(num_cached))
    pool.release_blocks(blocks[:num_cached], group)
    return blocks[:num_cached]


def test_idle_slabs_that_are_reserved_keep_their_cached_blocks() -> None:
    pool, sizes = slabs_of(8, reserve_slabs=8)
    per_slab = sizes[0]
    assert per_slab >= 2
    idle, of_held_slab = fill_a_slab(pool, sizes, 0, per_slab), fill_a_slab(pool, sizes, 0, 1)
    # The block in the held slab is evicted, though those in the idle slab were released before it.
    assert of_held_slab.tolist() == pool.allocate_blocks([1, 0]).tolist()  # type: ignore[union-attr]
    assert [True] * per_slab == pool.is_cached(idle).tolist()


def test_an_idle_slab_that_lost_a_block_is_as_old_as_before() -> None:
    pool, sizes = slabs_of(3)
    idle, of_held_slab, _ = (fill_a_slab(pool, sizes, *each) for each in ((0, sizes[0]), (1, 1), (0, 0)))
    pool.evict_blocks(idle[:1])
    # The idle slab was released before the cached block of the other group, so its blocks are evicted first.
    assert pool.allocate_blocks([0, 1]) is not None
    assert ([False] * len(idle), [True]) == (pool.is_cached(idle).tolist(), pool.is_cached(of_held_slab).tolist())


def test_a_group_that_takes_a_spare_slab_leaves_none_for_the_next_group() -> None:
    pool, sizes = slabs_of(3)
    of_window, of_full = fill_a_slab(pool, sizes, 0, 1), fill_a_slab(pool, sizes, 1, 1)
    # Both groups could evict a block of their own instead of taking the free slab.
    taken = pool.allocate_blocks([1, 1])
    assert taken is not None
    assert [True, False] == pool.is_cached(np.concatenate([of_window, of_full])).tolist()
    assert of_full.tolist() == taken[1:].tolist()


def test_a_held_slab_whose_cached_blocks_are_evicted_stays_held() -> None:
    pool, _ = slabs_of(8)
    blocks = pool.allocate_blocks([2, 0])
    assert blocks is not None
    pool.publish_blocks(1, blocks[:1], np.arange(1))
    pool.release_blocks(blocks[:1], 0)
    assert 7 == pool.num_idle_slabs
    pool.evict_blocks(blocks[:1])
    assert (7, [1, 0]) == (pool.num_idle_slabs, pool.blocks_held)


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
    monkeypatch.setattr("kvframe.cache.block_order.MAX_STALE", 8)
    manager = make_manager(full(), state())
    capacities = []
    for _ in range(40):
        serve(manager, list(range(30)))
        capacities.append([len(order._block_ids) for order in pool_of(manager)._orders])  # type: ignore[union-attr]
    assert capacities[4] == capacities[-1]
    evict_all(manager)
    assert [0, 0] == count_cached(pool_of(manager))


@pytest.mark.parametrize("specs", [[full()], [full(), masked(window=9)]])
def test_a_salt_of_which_nothing_is_cached_leaves_nothing_behind(specs: list[KVCacheSpec]) -> None:
    manager = make_manager(*specs)
    for salt in map(str, range(5)):
        manager.start("a", list(range(30)), salt=salt)
        assert manager.extend("a", 30)
        manager.commit("a", list(range(30)), 30)
        manager.free("a")
    assert 5 == len(manager._cache.tree._roots)
    manager.start("only looked up", list(range(30)), salt="another")
    evict_all(manager)
    assert 0 == len(manager._cache.tree._roots)


def test_a_block_that_ends_in_what_only_this_request_has_is_kept_though_it_begins_before() -> None:
    # Blocks of four tokens and of three: after five common tokens, the second block of three ends in each one's own.
    manager = make_manager(full(), masked(3, window=9))
    shared = list(range(5))
    prompts = {name: [*shared, *range(start, start + 20)] for name, start in (("first", 100), ("second", 200))}
    for name, tokens in prompts.items():
        assert 0 == manager.start(name, tokens)
        assert manager.extend(name, 7)
        manager.commit(name, tokens, 7)
    rows = np.array([manager.row(name) for name in prompts])
    for num_computed in range(8, 21):
        assert manager.extend_rows(rows, np.full(2, num_computed))
        manager.commit_rows(rows, np.full(2, num_computed))
    audit(manager)
    for name, tokens in prompts.items():
        assert 0 == manager.block_ids(name)[1][1]
        # Nine tokens from the fifth on are needed for the next one: either its block is found, or nothing is.
        assert 12 == manager.find([*tokens[:12], 1])


def test_many_small_releases_cost_few_checks() -> None:
    checks: list[int] = []

    def is_current(stamps: int | Numbers, block_ids: AnyBlockIds) -> npt.NDArray[np.bool_]:
        checks.append(len(block_ids))
        return np.asarray(stamps) >= num_releases - 10

    num_releases = 50_000
    order = ReleaseOrder(is_current)
    for stamp in range(num_releases):
        order.add(stamp, stamp, np.array([stamp], dtype=np.int32))
    assert num_releases - 10 == order.first_priority()
    assert len(checks) < 200
    assert sum(checks) < 3 * num_releases
    assert [*range(num_releases - 10, num_releases)] == order.entries()[1].tolist()


@pytest.mark.parametrize("specs", [[masked(2, window=5)], [masked(2, window=5), masked(2, 3, window=7)]])
def test_in_a_nearly_full_pool_blocks_that_a_request_passed_evict_no_others(specs: list[KVCacheSpec]) -> None:
    manager = KVCacheManager(make_plan(*specs, num_slabs=14), max_num_seqs=2)
    cached, tokens = list(range(100, 110)), list(range(60))
    serve(manager, cached)
    manager.start("running", tokens)
    evicted = []
    for end in range(2, 61, 2):
        assert manager.extend("running", end)
        manager.commit("running", tokens, end)
        evicted.append(manager.stats.num_evictions)
    assert evicted[-10] == evicted[-1]


@pytest.mark.parametrize(
    "specs", [[state()], [state(), full()], [state(8), masked(2, window=5)], [masked(4, window=6)]], ids=str
)
def test_in_a_nearly_full_pool_requests_are_continued_where_they_ended(specs: list[KVCacheSpec]) -> None:
    for end in range(21, 38):
        manager = KVCacheManager(make_plan(*specs, num_slabs=40), max_num_seqs=2)
        for number in range(1, 12):
            serve(manager, list(range(1000 * number, 1000 * number + 40)))
        tokens = list(range(100, 150))
        manager.start("one", tokens)
        for target in (13, *range(20, end + 1)):
            assert manager.extend("one", target)
            manager.commit("one", tokens, target)
        manager.free("one")
        alignment = manager.plan.alignment
        # A window that dies within a block may lack a block for one more token.
        expected = {(end - known) // alignment * alignment for known in (0, 1)}
        assert manager.start("one", tokens) in expected, end
