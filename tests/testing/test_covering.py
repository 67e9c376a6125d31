"""Each value, or each pair of values, is in the usual part of a grid."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest

from tests.covering import cover_pairs, cover_values, few, keep

COLUMNS = ("abcd", (1, 2, 3), (True, False))


def test_the_grid_is_whole_and_its_usual_part_has_every_pair_of_values() -> None:
    grid = cover_pairs(*COLUMNS)
    assert [*product(*COLUMNS)] == [param.values for param in grid]
    usual = [param.values for param in grid if not param.marks]
    assert 12 <= len(usual) <= 14
    for first, second in combinations(range(3), 2):
        pairs = {(values[first], values[second]) for values in usual}
        assert {*product(COLUMNS[first], COLUMNS[second])} == pairs


@pytest.mark.parametrize("times", [1, 2, 3])
def test_each_value_is_in_the_usual_part_as_often_as_asked(times: int) -> None:
    grid = cover_values(*COLUMNS, times=times)
    assert [*product(*COLUMNS)] == [param.values for param in grid]
    usual = [param.values for param in grid if not param.marks]
    assert 4 * times == len(usual)
    for index, column in enumerate(COLUMNS):
        counts = Counter(values[index] for values in usual)
        assert {*column} == {*counts}
        assert min(counts.values()) >= times


def test_what_is_in_the_usual_part_twice_is_beside_another_value() -> None:
    usual = [param.values for param in cover_values("abc", (1, 2, 3), times=2) if not param.marks]
    assert [("a", 1), ("a", 2), ("b", 2), ("b", 3), ("c", 1), ("c", 3)] == usual


def test_values_that_go_together_are_several_parameters() -> None:
    assert [(1, 2, "a"), (1, 2, "b"), (3, 4, "a"), (3, 4, "b")] == [
        param.values for param in cover_pairs([(1, 2), (3, 4)], "ab")
    ]


def test_named_values_are_kept_and_the_others_are_whole() -> None:
    assert [("a", True), ("b", False), ("c", True)] == [
        (*param.values, not param.marks) for param in keep("abc", "a", "c")
    ]
    usual = [param.values for param in keep(cover_values("abc", (1, 2)), "b", "c") if not param.marks]
    assert [("b", 2), ("c", 1)] == usual
    with pytest.raises(AssertionError, match="not among the values: \\['d'\\]"):
        keep("abc", "d")


def test_few_values_lie_as_far_apart_as_they_can_and_the_others_are_whole() -> None:
    grid = few(2, "abcdef")
    assert [*"abcdef"] == [value for param in grid for value in param.values]
    assert [("b",), ("e",)] == [param.values for param in grid if not param.marks]
    assert [("c",)] == [param.values for param in few(1, keep("abcde", "a", "c", "e")) if not param.marks]
    with pytest.raises(AssertionError, match="3 of 2 values"):
        few(3, keep("abc", "a", "b"))
