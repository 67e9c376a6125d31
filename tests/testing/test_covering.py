"""Each pair of values is in the usual part of a grid."""

from __future__ import annotations

from itertools import combinations, product

from tests.covering import cover_pairs

COLUMNS = ("abcd", (1, 2, 3), (True, False))


def test_the_grid_is_whole_and_its_usual_part_has_every_pair_of_values() -> None:
    grid = cover_pairs(*COLUMNS)
    assert [*product(*COLUMNS)] == [param.values for param in grid]
    usual = [param.values for param in grid if not param.marks]
    assert 12 <= len(usual) <= 14
    for first, second in combinations(range(3), 2):
        pairs = {(values[first], values[second]) for values in usual}
        assert {*product(COLUMNS[first], COLUMNS[second])} == pairs


def test_values_that_go_together_are_several_parameters() -> None:
    assert [(1, 2, "a"), (1, 2, "b"), (3, 4, "a"), (3, 4, "b")] == [
        param.values for param in cover_pairs([(1, 2), (3, 4)], "ab")
    ]
