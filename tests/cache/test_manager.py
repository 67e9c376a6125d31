"""The cache core: hits, shared pages, blocks for a lone request, evictions."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kvframe_testing.audit import audit_each_verb

from kvframe.cache.block_pool import BlockPool
from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import ENCODER, KVCacheSpec
from tests.cache.plans import encoder, full, make_plan, masked, ranged, state
from tests.support.engines import pool_of

SPECS = st.one_of(
    st.builds(full, st.sampled_from([1, 2, 4]), st.integers(1, 3)),
    st.builds(ranged, st.sampled_from([1, 2, 4]), st.integers(1, 3), window=st.integers(1, 9)),
    st.builds(ranged, st.sampled_from([2, 4]), st.just(1), window=st.integers(1, 6), num_sink_tokens=st.integers(1, 5)),
    st.builds(ranged, st.sampled_from([2, 4]), st.just(2), chunk=st.integers(1, 7)),
    st.builds(masked, st.sampled_from([2, 4]), st.integers(1, 3), window=st.integers(1, 9)),
    st.builds(masked, st.sampled_from([2, 4]), st.just(2), chunk=st.integers(1, 7)),
    st.builds(state, st.sampled_from([2, 4]), every=st.integers(0, 2)),
)
MAX_LEN, CHUNK = 40, 8


def live_tokens(spec: KVCacheSpec, n: int) -> set[int]:
    return {token for start, stop in spec.live_ranges(n) for token in range(start, stop)}


@given(specs=st.lists(SPECS, min_size=1, max_size=4), length=st.integers(1, MAX_LEN), data=st.data())
def test_a_lone_request_that_fits_never_lacks_a_page(
    specs: list[KVCacheSpec], length: int, data: st.DataObject
) -> None:
    specs = [*specs, encoder()]
    num_encoded = data.draw(st.integers(1, 24))
    plan = make_plan(*specs, max_model_len=MAX_LEN, max_num_batched_tokens=CHUNK)
    slabs = plan.num_slabs_for(plan.peak_blocks(length, {ENCODER: num_encoded}))
    manager = KVCacheManager(
        make_plan(*specs, num_slabs=slabs, max_model_len=MAX_LEN, max_num_batched_tokens=CHUNK), max_num_seqs=1
    )
    tokens = list(range(length))
    for repeat in range(2):
        inputs = {ENCODER: InputSequence(num_encoded, b"%d" % repeat)}
        done = manager.start(str(repeat), tokens, use_prefix=False, inputs=inputs)
        while done < length:
            target = min(length, done + data.draw(st.integers(1, CHUNK)))
            assert manager.extend(str(repeat), target)
            manager.commit(str(repeat), tokens, target)
            done = target
        manager.free(str(repeat))


@given(
    specs=st.lists(SPECS, min_size=1, max_size=3),
    length=st.integers(2, MAX_LEN),
    lost=st.sets(st.tuples(st.integers(0, 2), st.integers(0, MAX_LEN)), max_size=6),
)
def test_a_hit_is_the_longest_prefix_whose_live_ranges_are_held(
    specs: list[KVCacheSpec], length: int, lost: set[tuple[int, int]]
) -> None:
    plan = make_plan(*specs, num_slabs=400, max_model_len=MAX_LEN, max_num_batched_tokens=MAX_LEN)
    manager = KVCacheManager(plan, max_num_seqs=2)
    tokens = list(range(100, 100 + length))
    manager.start("first", tokens, use_prefix=False)
    assert manager.extend("first", length)
    blocks = manager.block_ids("first")
    manager.commit("first", tokens, length)
    manager.free("first")
    held = [
        {index for index, block_id in enumerate(ids[: length // group.block_size]) if block_id}
        for group, ids in zip(plan.groups, blocks, strict=True)
    ]
    for group, index in lost:
        if group < len(held) and index in held[group]:
            page = np.array([blocks[group][index]], dtype=np.int32)
            if pool_of(manager).is_cached(page)[0]:
                pool_of(manager).evict_blocks(page)
            held[group].discard(index)
    alignment = math.lcm(*(group.block_size for group in plan.groups))
    expected = max(
        n
        for n in range(0, length, alignment)
        if all(
            {token // group.block_size for token in live_tokens(group.spec, n)} <= held[group.index]
            for group in plan.groups
        )
    )
    assert expected == manager.start("second", tokens)


def test_requests_share_a_prefix_and_count_its_pages_once() -> None:
    manager = KVCacheManager(make_plan(full(), num_slabs=16), max_num_seqs=3)
    prompt = list(range(10))
    for name in ("a", "b", "c"):
        hit = manager.start(name, prompt)
        assert hit == (0 if name == "a" else 8)
        assert manager.extend(name, 10)
        manager.commit(name, prompt, 10)
    assert manager.num_held_pages == 2 + 3
    assert manager.stats.peak_bytes_held == 5 * manager.plan.groups[0].page_bytes
    assert manager.stats.hit_tokens == 16
    assert manager.stats.queried_tokens == 30


def test_a_request_that_begins_like_another_publishes_all_blocks_after_their_common_ones() -> None:
    manager = audit_each_verb(KVCacheManager(make_plan(full(), masked(window=5), num_slabs=40), max_num_seqs=2))
    prompts = {name: [1] * 8 + [token] * 24 for name, token in (("a", 2), ("b", 3))}
    # The second one starts before the first one has published anything, so it computes the common tokens too.
    for name, prompt in prompts.items():
        assert 0 == manager.start(name, prompt)
    for name, prompt in prompts.items():
        assert manager.extend(name, 32)
        manager.commit(name, prompt, 32)
    assert [32, 32] == [manager.find([*prompt, 9]) for prompt in prompts.values()]


def test_a_salt_separates_requests() -> None:
    manager = KVCacheManager(make_plan(full()), max_num_seqs=2)
    manager.start("a", list(range(9)), salt="tenant a")
    assert manager.extend("a", 9)
    manager.commit("a", list(range(9)), 9)
    assert manager.start("b", list(range(9)), salt="tenant b") == 0


def test_a_window_holds_no_more_than_its_live_range() -> None:
    manager = KVCacheManager(make_plan(ranged(block_size=4, window=6)), max_num_seqs=1)
    tokens = list(range(30))
    manager.start("a", tokens)
    for done in range(1, 31):
        assert manager.extend("a", done)
        manager.commit("a", tokens, done)
        assert manager.num_held_pages <= 3
    assert [0] * 6 == manager.block_ids("a")[0][:6]


def test_an_allocation_that_cannot_be_met_changes_nothing() -> None:
    pool = BlockPool(make_plan(full(), ranged(window=4), num_slabs=3))
    before = pool.num_idle_slabs
    pages = [group.pages_per_slab for group in make_plan(full(), ranged(window=4)).groups]
    assert pool.allocate_blocks([2 * pages[0], 2 * pages[1]]) is None
    assert before == pool.num_idle_slabs
    assert [0, 0] == pool.blocks_held
    assert pool.allocate_blocks([2 * pages[0], pages[1]]) is not None


def test_there_is_room_for_a_prompt_where_all_of_its_parts_find_theirs() -> None:
    plan = make_plan(full(), masked(window=8), num_slabs=10, max_num_batched_tokens=8)
    manager = KVCacheManager(plan, max_num_seqs=1)
    tokens = list(range(25))
    manager.start("a", tokens)
    # Six blocks; two of the window, while two more are computed.
    assert [True, False] == [manager.has_capacity("a", count) for count in (24, 25)]
    assert 0 == manager.num_held_pages
    for stop in (8, 16, 24):
        assert manager.extend("a", stop)
        manager.commit("a", tokens, stop)
    # Blocks that the request holds need not be free.
    assert manager.has_capacity("a", 24)


def test_least_recently_used_pages_are_evicted_first() -> None:
    manager = KVCacheManager(make_plan(full(), num_slabs=4, max_model_len=16), max_num_seqs=1)
    for name, first in (("old", 0), ("new", 50)):
        tokens = list(range(first, first + 5))
        manager.start(name, tokens)
        assert manager.extend(name, 5)
        manager.commit(name, tokens, 5)
        manager.free(name)
    manager.start("third", list(range(80, 93)), use_prefix=False)
    assert manager.extend("third", 12)
    manager.free("third")
    assert manager.start("old again", [0, 1, 2, 3, 4]) == 0
    manager.free("old again")
    assert manager.start("new again", [50, 51, 52, 53, 54]) == 4


def test_no_groups_take_nothing_and_hold_nothing() -> None:
    manager = KVCacheManager(make_plan(), max_num_seqs=1)
    assert manager.start("a", [1, 2, 3]) == 0
    assert manager.extend("a", 3)
    manager.commit("a", [1, 2, 3], 3)
    assert manager.block_ids("a") == []
    manager.free("a")
    assert not manager.prefix_caching


def test_a_model_that_keeps_nothing_has_room_for_all_its_requests() -> None:
    manager = KVCacheManager(make_plan(num_slabs=0), max_num_seqs=2)
    for name in ("one", "two"):
        manager.start(name, [1, 2, 3])
    rows = np.array([manager.row(name) for name in ("one", "two")])
    assert manager.extend_rows(rows, np.array([3, 3]))
    manager.commit_rows(rows, np.array([3, 3]))
