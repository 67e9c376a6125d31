"""The arrays of live ranges for all positions agree with the spec: when blocks die, and what hits need."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe.cache.live_range import NEVER, LiveRange, longest_common_prefix
from kvframe.contract.specs import AttentionMask, KVCacheSpec, TokenRange
from kvframe.planning.answers import Answers
from tests.cache.plans import MaskedSpec, RangeSpec, full, masked, ranged, state

LONGEST = 120
SIZES = st.sampled_from([1, 4, 5, 16])
SPECS = st.one_of(
    st.builds(make, SIZES, window=st.integers(1, 40), num_sink_tokens=st.integers(0, 30)) for make in (masked, ranged)
) | st.one_of(
    st.builds(masked, SIZES, chunk=st.integers(1, 40)),
    st.builds(ranged, SIZES, chunk=st.integers(1, 40)),
    st.builds(state, SIZES),
    st.builds(full, SIZES),
)


def live_range(spec: KVCacheSpec, longest: int = LONGEST) -> LiveRange:
    return LiveRange.of(Answers(spec), longest)


def live_blocks(spec: KVCacheSpec, n: int) -> set[int]:
    """Return the whole blocks of a prefix that token ``n`` needs."""
    live = {block for start, stop in spec.live_blocks(n) for block in range(start, stop)}
    return {block for block in live if (block + 1) * spec.block_size <= n}


@given(spec=SPECS, n=st.integers(0, LONGEST))
def test_a_whole_block_is_live_until_it_dies(spec: KVCacheSpec, n: int) -> None:
    deaths = live_range(spec).deaths
    num_whole = n // spec.block_size
    assert live_blocks(spec, n) == {block for block in range(num_whole) if deaths[block] > n}


@given(spec=SPECS, pages=st.lists(st.booleans(), max_size=LONGEST), num_tokens=st.integers(0, LONGEST))
def test_the_longest_prefix_has_a_page_for_all_that_is_live(
    spec: KVCacheSpec, pages: list[bool], num_tokens: int
) -> None:
    size = spec.block_size
    pages = pages[: LONGEST // size]
    prefix_len = live_range(spec).longest_prefix(np.array(pages, dtype=np.int32), num_tokens)
    ends = range(0, min(num_tokens, len(pages) * size) + 1, size)
    assert max(n for n in ends if all(pages[block] for block in live_blocks(spec, n))) == prefix_len


@given(specs=st.lists(SPECS, min_size=1, max_size=3), data=st.data())
def test_the_longest_common_prefix_is_one_of_every_group(specs: list[KVCacheSpec], data: st.DataObject) -> None:
    step = int(np.lcm.reduce([spec.block_size for spec in specs]))
    pages = [
        data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in (LONGEST // s.block_size for s in specs)
    ]
    pages_by_group = [
        (live_range(spec), np.array(group_pages, dtype=np.int32))
        for spec, group_pages in zip(specs, pages, strict=True)
    ]
    ends = range(0, LONGEST + 1, step)
    expected = max(
        n
        for n in ends
        if all(
            group_pages[block] for spec, group_pages in zip(specs, pages, strict=True) for block in live_blocks(spec, n)
        )
    )
    assert expected == longest_common_prefix(pages_by_group, step, LONGEST)


@given(spec=SPECS, factor=st.integers(1, 3))
def test_a_block_is_needed_if_some_hit_needs_it(spec: KVCacheSpec, factor: int) -> None:
    step = factor * spec.block_size
    needed = live_range(spec).needed(step, LONGEST)
    of_hits = [live_blocks(spec, n) for n in range(0, LONGEST + 1, step)]
    assert [any(block in hit_blocks for hit_blocks in of_hits) for block in range(len(needed))] == needed.tolist()


def test_a_type_that_keeps_all_forgets_nothing() -> None:
    assert live_range(full(), 10**5).never_dies
    assert not live_range(masked(window=9), 10**5).never_dies
    # The longest request does not reach the end of the window.
    assert live_range(masked(window=200), 100).never_dies


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(full(), True), (masked(window=2), True), (state(), True), (masked(window=1), False), (masked(chunk=8), False)],
)
def test_some_types_need_the_last_token(spec: KVCacheSpec, expected: bool) -> None:
    assert expected == live_range(spec).needs_last


@pytest.mark.parametrize("wrong", [AttentionMask(window=6), AttentionMask(chunk=5)])
def test_a_mask_that_says_something_else_than_the_live_ranges_is_not_believed(
    wrong: AttentionMask, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = live_range(ranged(2, window=9)).deaths.tolist()
    monkeypatch.setattr(MaskedSpec, "mask", wrong)
    assert expected == live_range(masked(2, window=9)).deaths.tolist()


def test_a_spec_is_asked_a_few_times_for_each_block() -> None:
    calls: list[int] = []

    class Asked(RangeSpec):
        def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
            calls.append(n)
            return super().live_ranges(n)

    deaths = live_range(Asked(block_size=16, num_kv_heads=1, head_size=4, window=1000), 16_000).deaths
    assert 1000 == len(deaths)
    assert [16 + 999, 32 + 999, NEVER] == [deaths[0], deaths[1], deaths[-1]]
    assert len(calls) <= 4 * len(deaths)
