"""What another engine's block manager asks of a spec's live blocks, type by type, against the definition."""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np
import pytest

from kvframe import FullAttentionSpec, LiveBlocks, load_plugins
from kvframe.cache.live_range import LiveRange
from kvframe.contract import AttentionSpec, KVCacheSpec, TokenRange
from kvframe.contract.specs import blocks_of
from kvframe.planning.answers import Answers

SIZES = {"block_size": 4, "num_kv_heads": 1, "head_size": 8}
NUM_TOKENS, NUM_BLOCKS = 96, 24
TYPES: dict[str, dict[str, Any]] = {
    "sliding_window": {"window": 10},
    "sinks": {"window": 10, "num_sink_tokens": 6},
    "chunked_local": {"chunk": 12},
    "full_attention": {},
    "fading": {},
}


@attrs.frozen(kw_only=True)
class FadingSpec(AttentionSpec):
    """Every eighth token until a token number, and the last five: ranges die in the middle, and before others."""

    kind = "fading"

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        old = [(start, start + 1) for start in range(0, max(0, n - 5), 8) if n < 40 or start % 16]
        return (*old, *([(max(0, n - 5), n)] if n else []))


def make(name: str) -> tuple[KVCacheSpec, LiveBlocks]:
    kinds = {"fading": FadingSpec, "full_attention": FullAttentionSpec}
    spec_class: Any = kinds.get(name) or load_plugins().registry.specs.load(name.replace("sinks", "sliding_window"))
    spec = spec_class(**SIZES, **TYPES[name])
    return spec, LiveBlocks(spec, NUM_TOKENS)


def live_at(spec: KVCacheSpec, n: int) -> set[int]:
    """Return the full blocks that are live at a position."""
    return {block for span in spec.live_blocks(n) for block in range(*span) if (block + 1) * 4 <= n}


@pytest.mark.parametrize("name", TYPES)
def test_the_live_blocks_at_a_position_are_those_of_the_spec(name: str) -> None:
    spec, live = make(name)
    assert [sorted(live_at(spec, n)) for n in range(NUM_TOKENS)] == [live.at(n) for n in range(NUM_TOKENS)]


@pytest.mark.parametrize("name", TYPES)
def test_what_died_between_two_positions_is_what_was_live_or_new_and_is_not_live(name: str) -> None:
    spec, live = make(name)
    draw = random.Random(0)
    for _ in range(100):
        before, n = sorted(draw.sample(range(NUM_TOKENS), 2))
        full = set(range(before // 4, n // 4))
        assert sorted((live_at(spec, before) | full) - live_at(spec, n)) == sorted(live.died(before, n))
    assert [] == live.died(7, 7)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("step", [4, 8])
def test_a_hit_is_the_longest_prefix_whose_live_blocks_are_cached(name: str, step: int) -> None:
    spec, live = make(name)
    for seed in range(100):
        draw = random.Random(seed)
        cached = {block for block in range(NUM_BLOCKS) if draw.random() < 0.8}
        asked: list[int] = []

        def find(block: int, asked: list[int] = asked, cached: set[int] = cached) -> str | None:
            asked.append(block)
            return f"page of {block}" if block in cached else None

        most = draw.randint(0, NUM_TOKENS - 1)
        hit = live.longest_hit(find, most, step)
        longest = max(n for n in range(0, most + 1, step) if live_at(spec, n) <= cached)
        needed = live_at(spec, longest)
        assert [f"page of {block}" if block in needed else None for block in range(longest // 4)] == hit
        assert len(set(asked)) == len(asked)


def test_a_type_that_keeps_no_block_before_a_chunk_hits_at_its_start_without_any() -> None:
    _, live = make("chunked_local")
    assert [None] * 9 == live.longest_hit(lambda block: None, 40, 4)


@pytest.mark.parametrize("name", TYPES)
def test_a_mask_that_agrees_gives_the_deaths_of_blocks(name: str) -> None:
    spec, _ = make(name)
    live = LiveRange.of(Answers(spec), NUM_TOKENS)
    assert (name != "fading") is live.is_by_mask
    for n in range(NUM_TOKENS + 1):
        whole = {block for start, stop in blocks_of(spec.live_ranges(n), 4) for block in range(start, stop)}
        assert {block for block in whole if block < n // 4} == set(np.flatnonzero(live.deaths[: n // 4] > n).tolist())
