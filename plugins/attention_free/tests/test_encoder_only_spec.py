"""The spec of encoders: its live range is empty, its layers are in no group, and it keeps the laws."""

from __future__ import annotations

import pytest
from kvframe_attention_free import EncoderOnlySpec
from kvframe_testing.suites import SpecTests

from kvframe import group_layers, load_plugins, plan_cache
from kvframe.contract import LayerSpec, QuerySpec, SpecError


def encoder_only(**options: int) -> EncoderOnlySpec:
    return EncoderOnlySpec(**{"block_size": 4, "num_kv_heads": 2, "head_size": 8, **options})


class TestEncoderOnly(SpecTests):
    spec = "encoder_only"


def test_no_token_of_the_past_is_live() -> None:
    assert {()} == {encoder_only().live_ranges(n) for n in range(100)}


def test_a_token_sees_those_that_come_later() -> None:
    assert frozenset({"bidirectional"}) == encoder_only().mask.features


def test_a_token_may_see_a_window_around_it() -> None:
    mask = encoder_only(window=3, lookahead=1).mask
    assert [4, 5, 6, 7] == [key for key in range(20) if mask.sees(6, key)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 3}, "has a window and a lookahead, or neither"),
        ({"lookahead": 3}, "has a window and a lookahead, or neither"),
        ({"window": 0, "lookahead": 3}, "window must be a whole number of at least 1, not 0"),
        ({"window": 3, "lookahead": -1}, "lookahead must be a whole number of at least 0, not -1"),
    ],
)
def test_a_window_has_two_sizes(options: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        encoder_only(**options)


def test_a_request_holds_no_block_however_long_it_is() -> None:
    assert 0 == encoder_only().peak_blocks(0, 8)
    assert {()} == {encoder_only().live_blocks(n) for n in range(100)}


def test_its_layers_are_in_no_group_and_nothing_is_allocated() -> None:
    query = QuerySpec(num_heads=2, head_size=8, scale=1.0)
    layers = [LayerSpec(name=f"layers.{index}", spec=encoder_only(), query=query) for index in range(3)]
    grouping = group_layers(layers)
    plan = plan_cache(grouping, memory_bytes=1 << 20, max_model_len=64, max_num_batched_tokens=64)
    assert () == grouping.groups
    assert ("layers.0", "layers.1", "layers.2") == grouping.step_local
    assert (0, 0) == (plan.num_slabs, plan.total_bytes)


def test_it_is_registered() -> None:
    assert EncoderOnlySpec is load_plugins().registry.specs.load("encoder_only")
