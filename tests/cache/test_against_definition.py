"""The cache manager agrees with the model of its definition: random mixtures of types, random sequences of calls."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.contract.specs import KVCacheSpec
from tests.cache.lives import KINDS, LEAST_SLABS, MOST_GROUPS, MOST_SLABS, Lives, Tally, draw_lives

NUM_EVENTS = 400
SPECS = st.one_of(
    *(st.builds(make, **{name: st.sampled_from(values) for name, values in options.items()}) for make, options in KINDS)
)


def test_whatever_happens_the_cache_is_as_defined() -> None:
    check_lives(num_examples=10, least_operations=10_000)


@pytest.mark.whole
def test_whatever_happens_for_longer_the_cache_is_as_defined() -> None:
    check_lives(num_examples=200, least_operations=200_000)


def check_lives(num_examples: int, least_operations: int) -> None:
    tally = Tally()

    @settings(max_examples=num_examples, deadline=None)
    @given(
        specs=st.lists(SPECS, max_size=MOST_GROUPS),
        num_slabs=st.integers(LEAST_SLABS, MOST_SLABS),
        prefix_caching=st.integers(0, 9),
        seed=st.integers(0, 2**32),
        num_events=st.integers(1, 600),
    )
    def live(specs: list[KVCacheSpec], num_slabs: int, prefix_caching: int, seed: int, num_events: int) -> None:
        lives = Lives(specs, num_slabs, bool(prefix_caching), seed, tally)
        for _ in range(num_events):
            lives.happen()
        lives.end()

    live()
    for seed in count():
        if tally.num_operations >= least_operations:
            break
        lives = draw_lives(seed, tally, check_every=10)
        for _ in range(NUM_EVENTS):
            lives.happen()
        lives.end()
