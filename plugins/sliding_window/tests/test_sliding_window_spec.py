"""The sliding window's live ranges in plain numbers, and its fast derivations against the default ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
from kvframe_sliding_window import SlidingWindowSpec
from kvframe_testing.suites import SpecTests

from kvframe import FullAttentionSpec
from kvframe.contract import AttentionMask, SpecError


def sliding(window: int, num_sink_tokens: int = 0, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, window=window, num_sink_tokens=num_sink_tokens
    )


@pytest.mark.parametrize(
    ("n", "expected"), [(0, ()), (1, ((0, 1),)), (3, ((0, 3),)), (4, ((1, 4),)), (100, ((97, 100),))]
)
def test_a_window_of_4_keeps_the_last_3_tokens(n: int, expected: tuple[tuple[int, int], ...]) -> None:
    assert expected == sliding(4).live_ranges(n)


def test_a_window_of_1_keeps_nothing() -> None:
    assert () == sliding(1).live_ranges(5)


@pytest.mark.parametrize(
    ("n", "expected"), [(0, ()), (1, ((0, 1),)), (5, ((0, 5),)), (6, ((0, 2), (3, 6))), (100, ((0, 2), (97, 100)))]
)
def test_sinks_stay_and_touching_ranges_are_one(n: int, expected: tuple[tuple[int, int], ...]) -> None:
    assert expected == sliding(4, num_sink_tokens=2).live_ranges(n)


def test_sinks_stay_under_a_window_of_1() -> None:
    assert ((0, 2),) == sliding(1, num_sink_tokens=2).live_ranges(5)


def test_the_mask_says_the_same() -> None:
    assert AttentionMask(window=4, num_sink_tokens=2) == sliding(4, 2).mask


def test_retaining_all_is_full_attention_over_the_same_state() -> None:
    spec = attrs.evolve(sliding(4, 2), num_kv_heads=3, head_size_v=5, dtype="bfloat16")
    expected = FullAttentionSpec(block_size=4, num_kv_heads=3, head_size=8, head_size_v=5, dtype="bfloat16")
    assert expected == spec.retain_all()
    assert expected.state_tensors() == spec.state_tensors()


def test_a_long_request_holds_a_window_and_a_step() -> None:
    assert 3 == sliding(8, block_size=4).peak_blocks(1000, 1)
    assert 1 + 3 == sliding(8, num_sink_tokens=1, block_size=4).peak_blocks(1000, 1)


def test_windows_of_different_lengths_share_no_group() -> None:
    assert sliding(4).group_key != sliding(5).group_key


@pytest.mark.parametrize("window", [0, -1, 1.5, True])
def test_a_window_holds_at_least_the_token_itself(window: Any) -> None:
    with pytest.raises(SpecError, match=r"SlidingWindowSpec\.window must be a whole number of at least 1"):
        attrs.evolve(sliding(4), window=window)


@pytest.mark.parametrize("num_sink_tokens", [-1, 0.5, True])
def test_sink_tokens_are_not_negative(num_sink_tokens: Any) -> None:
    with pytest.raises(SpecError, match="num_sink_tokens must be a whole number of at least 0"):
        attrs.evolve(sliding(4), num_sink_tokens=num_sink_tokens)


def options_of(*windows: tuple[int, int]) -> Sequence[Mapping[str, Any]]:
    """Return the options of windows, each given with its number of sink tokens."""
    return [{"window": window, "num_sink_tokens": num_sink_tokens} for window, num_sink_tokens in windows]


class TestSlidingWindow(SpecTests):
    spec = "sliding_window"
    options = options_of((5, 0), (1, 2), (6, 5), (7, 40))


@pytest.mark.whole
class TestMoreWindows(SpecTests):
    spec = "sliding_window"
    options = options_of((1, 0), (4, 0), (4, 1))
