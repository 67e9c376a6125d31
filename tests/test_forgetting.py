"""When blocks die: the arithmetic for many positions at once against the live ranges of a spec."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe.cache.forgetting import NEVER, MovingGroups, forgetting_of
from kvframe.specs import AttentionMask, KVCacheSpec
from tests.plans import MaskedSpec, full, masked, ranged

MOVING = st.one_of(
    st.builds(masked, st.sampled_from([1, 4, 5, 16]), window=st.integers(1, 40)),
    st.builds(masked, st.sampled_from([1, 4, 5]), window=st.integers(1, 20), num_sink_tokens=st.integers(1, 30)),
    st.builds(masked, st.sampled_from([1, 4, 5, 16]), chunk=st.integers(1, 40)),
)


def dead_blocks(spec: KVCacheSpec, n: int) -> set[int]:
    """Return the blocks before the current one that no token from ``n`` on needs."""
    live = {block for start, stop in spec.live_blocks(n) for block in range(start, stop)}
    return set(range(n // spec.block_size)) - live


@given(spec=MOVING, n=st.integers(0, 300))
def test_dead_blocks_are_those_that_no_live_range_touches(spec: MaskedSpec, n: int) -> None:
    found = forgetting_of(spec)
    assert found is not None
    assert dead_blocks(spec, n) == set(range(found.first, found.dead(n)))


@given(specs=st.lists(MOVING, min_size=1, max_size=4), n=st.integers(0, 200))
def test_many_positions_give_what_each_gives(specs: list[MaskedSpec], n: int) -> None:
    specs = [spec for spec in specs if spec.block_size == specs[0].block_size]
    kinds = [(place, found) for place, spec in enumerate(specs) if (found := forgetting_of(spec)) is not None]
    moving = MovingGroups(kinds, 3)
    dead = moving.dead_at(np.array([n, n + 7]))
    assert [[kind.dead(n), kind.dead(n + 7)] for _, kind in kinds] == dead.tolist()
    nearest = int(moving.next_death(dead)[0])
    assert nearest == min(kind.next_death(kind.dead(n)) for _, kind in kinds)
    assert moving.dead_at(np.array([nearest - 1])).tolist() == moving.dead_at(np.array([n])).tolist()
    assert moving.dead_at(np.array([nearest])).tolist() != moving.dead_at(np.array([n])).tolist()


def test_a_type_that_keeps_all_forgets_nothing() -> None:
    found = forgetting_of(full())
    assert found is not None
    assert (0, NEVER) == (found.dead(10**6), found.next_death(0))


def test_a_type_without_a_mask_is_asked_for_its_live_ranges() -> None:
    assert forgetting_of(ranged(window=5)) is None


@pytest.mark.parametrize("wrong", [AttentionMask(window=6), AttentionMask(chunk=5), AttentionMask()])
def test_a_mask_that_says_something_else_than_the_live_ranges_is_not_believed(
    wrong: AttentionMask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MaskedSpec, "mask", wrong)
    assert forgetting_of(masked(2, window=9)) is None
