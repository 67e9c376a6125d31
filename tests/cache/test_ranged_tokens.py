"""Tokens of prompts with ranges, as the cache compares them, and what of them may be published."""

from __future__ import annotations

from array import array
from typing import Any

from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.cache.radix_tree import RangedTokens, before_range, whole_ranges
from kvframe.contract.specs import ENCODER
from tests.cache.plans import encoder, full, make_plan, masked
from tests.support.managers import compute, make_manager

TOKENS = [*range(10, 34)]


def test_a_range_is_divided_only_between_its_tokens() -> None:
    assert [3, 4, 4, 4, 7, 7, 9, 10] == [before_range([(4, 7), (7, 9)], stop) for stop in (3, 4, 5, 6, 7, 8, 9, 10)]
    # With blocks of 4, what ends within the second range ends within the first too.
    assert [0, 4, 4, 12] == [whole_ranges([(4, 7), (7, 9)], stop, 4) for stop in (3, 7, 11, 12)]
    assert 0 == whole_ranges([(2, 7), (7, 9)], 11, 4)


def test_the_first_token_of_a_range_says_its_length() -> None:
    tokens = array("I", [1, 2, 3, 4, 5])
    ranged = RangedTokens(tokens, [(1, 3), (3, 5)])
    first, second = 1 << 31 | 2 << 19 | 2, 1 << 31 | 2 << 19 | 4
    assert [1, first, 3, second, 5] == [*ranged]
    assert (5, [first, 3], first, 5) == (len(ranged), [*ranged[1:3]], ranged[1], ranged[-1])
    tokens.append(6)
    assert [second, 5, 6] == [*ranged[3:]]


def start(manager: KVCacheManager, name: str, tokens: list[int], ranges: list[tuple[int, int]]) -> int:
    num_hit = compute(manager, name, RangedTokens(array("I", tokens), ranges), ranges=ranges)
    manager.free(name)
    return num_hit


def manager_of(*specs: Any) -> KVCacheManager:
    return make_manager(*specs, num_slabs=99, audited=True)


def test_a_pin_holds_whole_ranges() -> None:
    manager = manager_of(full())
    ranges = [(6, 15)]
    start(manager, "a", TOKENS, ranges)

    def pinned(tokens: list[int], ranges: list[tuple[int, int]]) -> int:
        pin = manager.pin(RangedTokens(array("I", tokens), ranges), ranges=ranges)
        manager.unpin(pin)
        return pin.num_tokens

    assert 24 == pinned(TOKENS, ranges)
    assert 4 == pinned(TOKENS, [(6, 14)])
    # The first eight tokens of the range are the same, but their state depends on all of them.
    assert 4 == pinned([*TOKENS[:14], 1, *TOKENS[15:]], ranges)


def test_a_restored_prefix_takes_no_page_of_another_range() -> None:
    ranges, other = [(6, 15)], [*TOKENS[:13], 1, *TOKENS[14:]]
    manager = manager_of(full())
    fetched: list[int] = []

    def restore(tokens: list[int]) -> int:
        pin = manager.restore(
            RangedTokens(array("I", tokens), ranges),
            [[*range(1, 7)]],
            lambda group, copies, block_ids: fetched.extend(copies),
            ranges=ranges,
        )
        assert pin is not None
        manager.unpin(pin)
        return pin.num_tokens

    assert (24, [1, 2, 3, 4, 5, 6]) == (restore(TOKENS), fetched)
    fetched.clear()
    # Only the block before the range is the same. From the range on, nothing is cached for the second one.
    assert (4, [2, 3, 4, 5, 6]) == (restore(other), fetched)
    assert [20, 4] == [start(manager, name, tokens, ranges) for name, tokens in (("a", TOKENS), ("b", other))]


def test_a_hit_before_a_range_ends_within_no_earlier_one() -> None:
    manager, ranges = manager_of(full()), [(2, 7), (7, 15)]
    assert 0 == start(manager, "a", TOKENS, ranges)
    # The second range differs, and the last whole block before it ends within the first.
    assert 0 == start(manager, "b", [*TOKENS[:13], 1, *TOKENS[14:]], ranges)


def test_a_fork_publishes_no_part_of_a_range_after_that_of_another_request() -> None:
    plan, ranges, other = make_plan(full(), num_slabs=99), [(6, 15)], [*TOKENS[:13], 1, *TOKENS[14:]]
    manager = KVCacheManager(plan, max_num_seqs=4, copier=lambda group, pages, copies: None, audited=True)
    start(manager, "a", TOKENS, ranges)
    ranged = RangedTokens(array("I", other), ranges)
    assert 4 == manager.start("b", ranged, ranges=ranges)
    manager.fork("b", "c", ranged)
    assert manager.extend("c", len(other))
    manager.commit("c", ranged, len(other))
    assert 4 == start(manager, "d", other, ranges)


def test_the_inputs_of_a_prompt_whose_hit_is_shortened_are_found() -> None:
    manager, ranges, inputs = manager_of(full(), encoder()), [(6, 15)], {ENCODER: InputSequence(9, b"x")}
    for name, tokens, hit in (("a", TOKENS, 0), ("b", [*TOKENS[:13], 1, *TOKENS[14:]], 4)):
        ranged = RangedTokens(array("I", tokens), ranges)
        assert hit == manager.start(name, ranged, ranges=ranges, inputs=inputs)
        assert frozenset(() if hit else (ENCODER,)) == manager.missing_inputs(name)
        assert manager.extend(name, len(tokens))
        manager.commit(name, ranged, len(tokens))


def test_a_hit_ends_at_no_place_within_a_range() -> None:
    for specs in ((full(),), (full(), masked(window=40))):
        manager = manager_of(*specs)
        assert 0 == start(manager, "a", TOKENS, [(6, 15)])
        assert 20 == start(manager, "b", TOKENS, [(6, 15)])
        assert 4 == start(manager, "c", TOKENS, [(6, 14)])
        assert 4 == start(manager, "d", TOKENS, [])
        assert 16 == start(manager, "e", [*TOKENS[:17], 1, 2, 3], [(6, 15)])
        # Of two ranges that begin alike, blocks of the first one stand for no part of the second.
        other = [*TOKENS[:13], 1, *TOKENS[14:]]
        assert [4, 4] == [start(manager, name, other, [(6, 15)]) for name in "fg"]
        assert 4 == start(manager, "h", TOKENS[:15], [(6, 15)])
