"""Types that store few blocks: which blocks get a page, what is kept of them, and what is found again."""

from __future__ import annotations

from kvframe.cache.manager import KVCacheManager
from kvframe.specs import KVCacheSpec
from tests.plans import full, make_plan, state


def make_manager(*specs: KVCacheSpec) -> KVCacheManager:
    return KVCacheManager(make_plan(*specs, num_slabs=60), max_num_seqs=4)


def resident(manager: KVCacheManager, name: str, group: int = 0) -> list[int]:
    return [index for index, block_id in enumerate(manager.block_ids(name)[group]) if block_id]


def run(manager: KVCacheManager, name: str, tokens: list[int], *steps: int) -> int:
    hit = manager.start(name, tokens)
    for num_tokens in steps or (len(tokens),):
        assert manager.extend(name, num_tokens)
        manager.commit(name, tokens, num_tokens)
    return hit


def test_only_stored_blocks_get_a_page() -> None:
    manager = make_manager(state(every=2), full())
    manager.start("a", list(range(30)))
    assert manager.extend("a", 22)
    assert [1, 3, 5] == resident(manager, "a")
    assert [0, 1, 2, 3, 4, 5] == resident(manager, "a", 1)
    assert [bool(page) for page in manager.tables[0].ids[0][:7]] == [False, True, False, True, False, True, False]


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
    run(manager, "a", tokens)
    assert [5] == resident(manager, "a")
    assert 16 == run(manager, "b", [*tokens[:18], 90, 91])
    # Blocks are full at their ends only: the state at 22 is of nobody's prefix.
    assert 16 == run(manager, "c", [*tokens, 90])


def test_a_state_without_checkpoints_is_found_where_a_step_ended() -> None:
    manager = make_manager(state())
    tokens = list(range(20))
    run(manager, "a", tokens, 7, 12, 20)
    manager.free("a")
    assert 12 == run(manager, "b", [*tokens[:19], 90])


def test_a_shared_state_is_not_written_by_who_continues_from_it() -> None:
    manager = make_manager(state(every=1))
    tokens = list(range(8))
    run(manager, "a", [*tokens, 1])
    shared = manager._pool.find(0, manager._entries["a"].keys[4].upto((), 0)[1])
    assert 8 == manager.start("b", [*tokens, 2])
    assert shared == manager.block_ids("b")[0][1]
    assert manager.extend("b", 9)
    assert manager.block_ids("b")[0][2] not in (0, shared, manager.block_ids("a")[0][2])


def test_refused_tokens_leave_the_state_where_they_began() -> None:
    manager = make_manager(state(num_drafts=3), full())
    tokens = list(range(30))
    run(manager, "a", tokens[:15])
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
    # A checkpoint where tokens part comes on top of the old state and the new one.
    assert 3 == spec.num_resident_blocks(6, 20)
    assert 3 == spec.peak_blocks(64, 16)
    assert 2 == spec.peak_blocks(64, 1)
