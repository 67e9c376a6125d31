"""Grids of test parameters: few combinations in usual runs, all of them under ``-m whole``."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import combinations, product
from typing import Any

import pytest
from kvframe_testing.sample import cover


def cover_pairs(*columns: Iterable[Any]) -> list[Any]:
    """Return every combination of the columns' values, in order; those that usual runs leave out are marked ``whole``.

    Each pair of values of two columns is in a combination that usual runs have.

    Args:
        columns: The values of each parameter. A tuple stands for several parameters whose values go together.
    """
    values = [[*column] for column in columns]
    grid = [*product(*(range(len(column)) for column in values))]
    chosen = cover([{*combinations(enumerate(row), 2)} for row in grid], [1.0] * len(grid))
    return _mark(values, {grid[place] for place in chosen})


def cover_values(*columns: Iterable[Any], times: int = 1) -> list[Any]:
    """Return every combination as ``cover_pairs`` does, with fewer in usual runs: each value is in some of them.

    Columns are paired by place, and again with each column moved by one more place than the column before it.

    Args:
        columns: As for ``cover_pairs``. Values whose pairs matter are one column, of tuples.
        times: In how many combinations of usual runs each value is at least.
    """
    values = [[*column] for column in columns]
    longest = max(map(len, values))
    return _mark(
        values,
        {
            tuple((place + shift * index) % len(column) for index, column in enumerate(values))
            for shift in range(times)
            for place in range(longest)
        },
    )


def few(count: int, values: Iterable[Any]) -> list[Any]:
    """Return every value, in order; usual runs have ``count`` of them, evenly spaced, and the rest is marked ``whole``.

    Args:
        count: At least one, and at most as many as usual runs have of the values.
        values: As for ``keep``.
    """
    params = _as_params(values)
    usual = [index for index, param in enumerate(params) if not param.marks]
    assert 0 < count <= len(usual), f"{count} of {len(usual)} values"
    chosen = {usual[(2 * place + 1) * len(usual) // (2 * count)] for place in range(count)}
    return [
        param if index in chosen or param.marks else pytest.param(*param.values, marks=pytest.mark.whole)
        for index, param in enumerate(params)
    ]


def keep(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return every value, in order; those that usual runs leave out are marked ``whole``.

    Args:
        values: The values of a parameter, or combinations as ``cover_pairs`` and ``cover_values`` return them.
        kept: The values that usual runs have. A combination is kept if it contains one and its grid has kept it.
    """
    params = _as_params(values)
    unknown = [each for each in kept if not any(each in param.values for param in params)]
    assert not unknown, f"not among the values: {unknown}"
    return [
        param if any(each in param.values for each in kept) else pytest.param(*param.values, marks=pytest.mark.whole)
        for param in params
    ]


def _mark(values: list[list[Any]], chosen: Container[tuple[int, ...]]) -> list[Any]:
    """Return every combination of the columns' values, in order, marked ``whole`` unless its places are chosen."""
    return [
        pytest.param(
            *(part for column, index in zip(values, row, strict=True) for part in _parts(column[index])),
            marks=[] if row in chosen else pytest.mark.whole,
        )
        for row in product(*(range(len(column)) for column in values))
    ]


def _as_params(values: Iterable[Any]) -> list[Any]:
    return [each if hasattr(each, "marks") else pytest.param(*_parts(each)) for each in values]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
