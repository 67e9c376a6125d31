"""What a request's owner learns of its lookup: how much was found, by which group it was limited, and why."""

from __future__ import annotations

from collections.abc import Sequence

from kvframe.cache.manager import KVCacheManager
from kvframe.cache.stats import FoundPrefix
from tests.cache.plans import evict, full, masked, state
from tests.support.managers import make_manager, serve


def found(manager: KVCacheManager, tokens: Sequence[int], salt: str = "", use_prefix: bool = True) -> FoundPrefix:
    """Start a request, and end it; return what it found."""
    hit = manager.start("second", tokens, salt=salt, use_prefix=use_prefix)
    result = manager.found_prefix("second")
    manager.free("second")
    assert hit == result.num_tokens
    return result


TOKENS = list(range(22))


def test_all_blocks_before_the_last_token_need_no_reason() -> None:
    manager = make_manager(full())
    serve(manager, TOKENS)
    assert FoundPrefix(num_tokens=20, known_tokens=20, of_groups={0: 20}) == found(manager, TOKENS)
    assert FoundPrefix(num_tokens=16, known_tokens=16, of_groups={0: 16}) == found(manager, TOKENS[:20])
    assert FoundPrefix() == found(manager, TOKENS[:3])


def test_tokens_that_no_request_of_the_salt_had_are_the_reason() -> None:
    manager = make_manager(full())
    serve(manager, TOKENS, salt="mine")
    assert FoundPrefix(why="its first block is not cached for a request of its salt and inputs") == found(
        manager, TOKENS, salt="other"
    )
    assert FoundPrefix(
        num_tokens=8,
        known_tokens=8,
        of_groups={0: 8},
        why="from token 8 on, its blocks are not those of an earlier request",
    ) == found(manager, [*TOKENS[:9], *range(90, 99)], salt="mine")


def test_a_type_that_stores_few_blocks_is_named() -> None:
    manager = make_manager(state(), full())
    serve(manager, TOKENS)
    assert FoundPrefix(
        num_tokens=0,
        known_tokens=12,
        of_groups={0: 0, 1: 12},
        limited_by=(0,),
        why="group 0 (state) keeps states at few blocks' ends, and has none after token 0",
    ) == found(manager, [*TOKENS[:13], *range(90, 99)])


def test_blocks_that_are_larger_than_those_of_others_are_named() -> None:
    manager = make_manager(state(8, every=1), full())
    serve(manager, TOKENS)
    assert FoundPrefix(
        num_tokens=8,
        known_tokens=12,
        of_groups={0: 8, 1: 12},
        limited_by=(0,),
        why="group 0 (state) has blocks of 8 tokens, and the next one ends after the 12 tokens that are known",
    ) == found(manager, [*TOKENS[:13], *range(90, 99)])


def test_a_type_that_keeps_no_state_to_continue_from_is_named() -> None:
    manager = make_manager(state(1 << 30), full())
    serve(manager, TOKENS)
    why = "group 0 (state) keeps no state that a later request could continue from"
    assert (why, {0: 0, 1: 20}) == ((last := found(manager, TOKENS)).why, last.of_groups)


def test_evicted_blocks_are_the_reason() -> None:
    manager = make_manager(full(), masked(window=9))
    manager.start("first", TOKENS)
    assert manager.extend("first", 22)
    third = manager.block_ids("first")[1][3]
    manager.commit("first", TOKENS, 22)
    manager.free("first")
    evict(manager, third)
    assert FoundPrefix(
        num_tokens=12,
        known_tokens=20,
        of_groups={0: 20, 1: 12},
        limited_by=(1,),
        why="group 1 (masked) lacks blocks after token 12, which were evicted",
    ) == found(manager, TOKENS)


def test_a_last_known_block_that_was_evicted_is_the_reason() -> None:
    manager = make_manager(full())
    manager.start("first", TOKENS)
    assert manager.extend("first", 22)
    last = manager.block_ids("first")[0][4]
    manager.commit("first", TOKENS, 22)
    manager.free("first")
    evict(manager, last)
    result = found(manager, TOKENS)
    assert (16, 20, "the blocks after token 16 were evicted") == (result.num_tokens, result.known_tokens, result.why)


def test_each_group_is_named_if_others_have_its_block_size() -> None:
    manager = make_manager(full(), full(2, num_kv_heads=3), masked(window=9))
    assert [4, 2, 4] == [group.block_size for group in manager.plan.groups]
    manager.start("first", TOKENS)
    assert manager.extend("first", 22)
    third = manager.block_ids("first")[2][3]
    manager.commit("first", TOKENS, 22)
    manager.free("first")
    evict(manager, third)
    result = found(manager, TOKENS)
    assert ({0: 20, 1: 20, 2: 12}, (2,)) == (result.of_groups, result.limited_by)


def test_a_request_that_looks_nothing_up_says_so() -> None:
    manager = make_manager(full())
    serve(manager, TOKENS)
    assert FoundPrefix(why="no prefix was looked up") == found(manager, TOKENS, use_prefix=False)
    manager = make_manager(full(), prefix_caching=False)
    assert FoundPrefix(why="no prefix was looked up") == found(manager, TOKENS)
