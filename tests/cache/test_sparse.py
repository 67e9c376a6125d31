"""Types that store few blocks: which blocks get a page, which of these are kept, and which are hit again."""

from __future__ import annotations

import attrs
import pytest
from kvframe_testing.audit import findable_pages

from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.cache.stats import GroupLookups
from kvframe.contract.specs import ENCODER, KVCacheSpec
from tests.cache.plans import branch, encoder, evict, evict_all, full, ranged, state
from tests.support.managers import compute, make_manager


def resident(manager: KVCacheManager, name: str, group: int = 0) -> list[int]:
    return [index for index, block_id in enumerate(manager.block_ids(name)[group]) if block_id]


def test_only_stored_blocks_get_a_page() -> None:
    manager = make_manager(state(every=2), full())
    manager.start("a", list(range(30)))
    assert manager.extend("a", 22)
    # Every second one, the last one, and the one that ends at the last boundary before the last token.
    assert [1, 3, 4, 5] == resident(manager, "a")
    assert [0, 1, 2, 3, 4, 5] == resident(manager, "a", 1)
    assert [bool(page) for page in manager.tables[0].ids[0][:7]] == [False, True, False, True, True, True, False]


def test_making_room_again_changes_nothing_and_for_more_adds_what_is_stored() -> None:
    manager = make_manager(state(every=2))
    manager.start("a", list(range(30)))
    assert manager.extend("a", 10)
    before = manager.block_ids("a")
    assert [1, 2] == resident(manager, "a")
    assert manager.extend("a", 10)
    assert manager.extend("a", 9)
    assert before == manager.block_ids("a")
    assert manager.extend("a", 17)
    assert [1, 2, 3, 4] == resident(manager, "a")


def test_what_is_not_live_any_more_is_given_back_and_can_be_found() -> None:
    manager = make_manager(state(every=2))
    tokens = list(range(22))
    compute(manager, "a", tokens)
    assert [5] == resident(manager, "a")
    assert 16 == compute(manager, "b", [*tokens[:18], 90, 91])
    # Blocks are full at their ends only: the state at 22 is not part of a prefix.
    assert 20 == compute(manager, "c", [*tokens, 90])


def test_a_state_without_checkpoints_is_found_where_a_step_ended_and_before_its_last_token() -> None:
    manager = make_manager(state())
    tokens = list(range(20))
    compute(manager, "a", tokens, 7, 12, 20)
    manager.free("a")
    assert 4 == compute(manager, "b", [*tokens[:6], 90])
    assert 12 == compute(manager, "c", [*tokens[:15], 90])
    assert 16 == compute(manager, "d", tokens)


@pytest.mark.parametrize("specs", [[full(), state()], [full(16), state(block_size=4)], [full(4), state(block_size=16)]])
def test_a_request_that_comes_again_continues_before_its_last_token(specs: list[KVCacheSpec]) -> None:
    manager = make_manager(*specs)
    tokens = list(range(48))
    step = max(spec.block_size for spec in specs)
    assert 0 == compute(manager, "a", tokens)
    assert 48 - step == compute(manager, "b", tokens)


def test_a_shared_state_is_not_written_by_who_continues_from_it() -> None:
    manager = make_manager(state(every=1))
    tokens = list(range(8))
    compute(manager, "a", [*tokens, 1])
    assert 8 == manager.start("b", [*tokens, 2])
    shared = manager.block_ids("b")[0][1]
    assert (0, shared) in set(findable_pages(manager))
    assert manager.extend("b", 9)
    assert manager.block_ids("b")[0][2] not in (0, shared, manager.block_ids("a")[0][2])


def test_refused_tokens_leave_the_state_where_they_began() -> None:
    manager = make_manager(state(num_drafts=3), full())
    tokens = list(range(30))
    compute(manager, "a", tokens[:15])
    assert manager.extend("a", 19)
    assert [3, 4] == resident(manager, "a")
    manager.commit("a", tokens, 16)
    assert [3] == resident(manager, "a")
    assert [0, 1, 2, 3, 4] == resident(manager, "a", 1)
    assert manager.extend("a", 20)
    assert [3, 4] == resident(manager, "a")


def test_the_most_blocks_held_count_a_state_once() -> None:
    spec = state()
    assert 1 == spec.num_resident_blocks(6, 1)
    assert 2 == spec.num_resident_blocks(7, 2)
    # At a branch, a checkpoint is needed in addition to the old and the new state.
    assert 3 == spec.num_resident_blocks(6, 20)
    assert 3 == spec.peak_blocks(64, 16)
    assert 2 == spec.peak_blocks(64, 1)


# --- branches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [[state()], [full(), state()], [ranged(window=6), state(block_size=8), full(2)]])
def test_a_third_request_continues_from_where_the_second_parted_from_the_first(specs: list[KVCacheSpec]) -> None:
    manager = make_manager(*specs)
    shared = list(range(26))
    assert 0 == compute(manager, "a", [*shared, *range(90, 102)])
    assert 0 == compute(manager, "b", [*shared, *range(80, 92)], 5, 26, 38)
    assert 24 == compute(manager, "c", [*shared, 70, 71])
    assert 24 == compute(manager, "d", [*shared, 60])


def test_a_branch_is_known_beyond_the_life_of_the_pages_until_the_cache_is_reset() -> None:
    manager = make_manager(full(), state())
    tokens = list(range(26))
    compute(manager, "a", tokens)
    manager.free("a")
    evict_all(manager)
    compute(manager, "b", tokens)
    assert 24 == manager.start("c", tokens)
    manager.reset_prefix_cache()
    manager.start("d", tokens)
    assert 0 == branch(manager, "d")


def test_the_group_that_limits_a_hit_is_named() -> None:
    manager = make_manager(full(), state(), ranged(window=5))
    tokens = list(range(40))
    compute(manager, "a", tokens)
    assert 0 == compute(manager, "b", [*tokens[:34], 90])
    whole, states, window = manager.stats.lookups
    assert GroupLookups("full_attention", 75, 32, 0, 0) == whole
    assert GroupLookups("state", 75, 0, 0, 1) == states
    assert GroupLookups("range", 75, 32, 0, 0) == window
    assert (75, 0) == (manager.stats.queried_tokens, manager.stats.hit_tokens)


def test_several_groups_can_limit_a_hit_and_none_limits_what_nobody_has() -> None:
    manager = make_manager(full(), state(every=2))
    tokens = list(range(40))
    compute(manager, "nothing there", tokens)
    assert [0, 0] == [each.times_limiting for each in manager.stats.lookups]
    page = manager.block_ids("nothing there")[0][7]
    manager.free("nothing there")
    evict(manager, page)
    # States are kept at 8, 16, 24, 32, 36 and 40, and full attention's block from 28 to 32 was evicted.
    assert 24 == compute(manager, "b", tokens)
    assert [(28, 24, 1), (36, 24, 1)] == [
        (each.found_tokens, each.hit_tokens, each.times_limiting) for each in manager.stats.lookups
    ]


def test_a_block_that_is_too_large_for_a_hit_limits_it() -> None:
    manager = make_manager(full(4), full(32))
    tokens = list(range(40))
    compute(manager, "a", tokens[:30])
    assert 0 == compute(manager, "b", tokens[:30])
    assert [(28, 0), (0, 1)] == [(each.found_tokens, each.times_limiting) for each in manager.stats.lookups]


def test_a_lookup_counts_when_its_request_runs() -> None:
    manager = make_manager(full())
    tokens = list(range(10))
    for _ in range(5):
        manager.start("a", tokens)
        manager.free("a")
    compute(manager, "a", tokens)
    assert 10 == manager.stats.queried_tokens


def test_inputs_are_counted_in_their_groups() -> None:
    manager = make_manager(full(), encoder(4), encoder(2))
    inputs = {ENCODER: InputSequence(10, b"x")}
    for name in ("a", "b"):
        manager.start(name, [1, 2], inputs=inputs)
        assert manager.extend(name, 2)
        manager.commit(name, [1, 2], 2)
    assert [(20, 10, 10, 0), (20, 10, 10, 0)] == [attrs.astuple(each)[1:] for each in manager.stats.lookups[1:]]
    page = manager.block_ids("a")[1][0]
    manager.free("a")
    manager.free("b")
    evict(manager, page)
    manager.start("c", [1, 2], inputs=inputs)
    assert manager.extend("c", 2)
    manager.commit("c", [1, 2], 2)
    # If one group loses a part of an input, the other groups drop the input too.
    assert [(30, 10, 10, 0), (30, 10, 10, 0)] == [attrs.astuple(each)[1:] for each in manager.stats.lookups[1:]]
