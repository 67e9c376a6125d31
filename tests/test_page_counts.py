"""Counts of pages, of few groups and of many: one number each, or arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe.cache.page_counts import PageCounts

PAGE_BYTES = (100, 30, 7)
GROUPS = st.integers(0, len(PAGE_BYTES) - 1)
PAGES = st.lists(st.tuples(GROUPS, st.booleans()), min_size=1, max_size=6)


def said(counts: PageCounts) -> tuple[object, ...]:
    """Return what it says of the first groups, and of all together."""
    few = len(PAGE_BYTES)
    of_each = counts.held[:few], counts.peak_held[:few], counts.cached[:few]
    return (*of_each, counts.num_cached, counts.held_bytes, counts.peak_held_bytes)


@given(batches=st.lists(PAGES, min_size=1, max_size=8), num_more=st.sampled_from([0, 20]))
def test_pages_are_counted_through_their_lives_however_many_groups_there_are(
    batches: list[list[tuple[int, bool]]], num_more: int
) -> None:
    counts = PageCounts([*PAGE_BYTES, *[1] * num_more])
    held, cached = [0, 0, 0], [0, 0, 0]
    for batch in batches:
        for group, _ in batch:
            held[group] += 1
        counts.hold([sum(group == each for group, _ in batch) for each in range(len(PAGE_BYTES) + num_more)])
    peak, peak_bytes = list(held), sum(map(int.__mul__, held, PAGE_BYTES))
    for batch in batches:
        groups, is_cached = np.array([group for group, _ in batch]), np.array([kept for _, kept in batch])
        counts.let_go(groups, len(batch), bool(is_cached[0]) if len({*is_cached.tolist()}) == 1 else is_cached)
        for group, kept in batch:
            held[group] -= 1
            cached[group] += kept
    num_bytes = sum(map(int.__mul__, held, PAGE_BYTES))
    assert (held, peak, cached, sum(cached), num_bytes, peak_bytes) == said(counts)
    for group in range(len(PAGE_BYTES)):
        if cached[group]:
            counts.wake(group, cached[group])
            counts.let_go(group, cached[group], True)
            counts.end(group, cached[group] - 1)
    assert [min(1, count) for count in cached] == counts.cached[: len(PAGE_BYTES)]
    counts.end(np.flatnonzero(counts.cached), counts.num_cached)
    assert 0 == counts.num_cached == sum(counts.cached) == sum(counts.held) == counts.held_bytes


@pytest.mark.parametrize("num_more", [0, 20])
def test_what_is_held_again_counts_for_the_most_that_was_held(num_more: int) -> None:
    counts = PageCounts([*PAGE_BYTES, *[1] * num_more])
    rest = [0] * num_more
    counts.hold([2, 0, 0, *rest])
    counts.let_go(0, 2, True)
    counts.hold([1, 0, 3, *rest])
    counts.wake(0, 2)
    assert ([3, 0, 3], [3, 0, 3], [0, 0, 0], 0, 321, 321) == said(counts)
