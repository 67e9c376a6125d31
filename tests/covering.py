"""Grids of test parameters: few combinations in usual runs, all of them under ``-m whole``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest

from kvframe.testing.sample import cover


def cover_pairs(*columns: Iterable[Any]) -> list[Any]:
    """Return every combination of the columns' values, in order; those that usual runs leave out are marked ``whole``.

    Each pair of values of two columns is in a combination that usual runs have.

    Args:
        columns: The values of each parameter. A tuple stands for several parameters whose values go together.
    """
    values = [[*column] for column in columns]
    grid = [*product(*(range(len(column)) for column in values))]
    chosen = {*cover([{*combinations(enumerate(row), 2)} for row in grid], [1.0] * len(grid))}
    return [
        pytest.param(
            *(part for column, index in zip(values, row, strict=True) for part in _parts(column[index])),
            marks=[] if place in chosen else pytest.mark.whole,
        )
        for place, row in enumerate(grid)
    ]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
