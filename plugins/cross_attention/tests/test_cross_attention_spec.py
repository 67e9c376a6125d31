"""Cross attention's live ranges in plain numbers, and the backends that serve it."""

from __future__ import annotations

import pytest
from kvframe_cross_attention import CrossAttentionSpec
from kvframe_testing.refusals import find_refusals
from kvframe_testing.suites import SpecTests

import kvframe
from kvframe import FullAttentionSpec
from kvframe.contract import ENCODER, TOKENS, AttentionMask, LayerSpec, PlanError, QuerySpec

CROSS = CrossAttentionSpec(block_size=4, num_kv_heads=2, head_size=8)
QUERY = QuerySpec(num_heads=4, head_size=8, scale=0.3)


class TestCrossAttention(SpecTests):
    spec = "cross_attention"


@pytest.mark.parametrize(("n", "expected"), [(0, ()), (1, ((0, 1),)), (1500, ((0, 1500),))])
def test_all_of_the_encoders_tokens_are_live(n: int, expected: tuple[tuple[int, int], ...]) -> None:
    assert expected == CROSS.live_ranges(n)


def test_it_is_about_the_encoders_sequence_and_knows_no_order() -> None:
    assert (ENCODER, AttentionMask(causal=False)) == (CROSS.sequence, CROSS.mask)


def test_it_shares_no_group_with_full_attention_and_keeps_its_form_without_hybrid() -> None:
    layers = [
        LayerSpec(name="self", spec=FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8), query=QUERY),
        LayerSpec(name="cross", spec=CROSS, query=QUERY),
        LayerSpec(name="self.1", spec=FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8), query=QUERY),
        LayerSpec(name="cross.1", spec=CROSS, query=QUERY),
    ]
    for hybrid in (True, False):
        groups = kvframe.group_layers(layers, hybrid=hybrid).groups
        assert [("self", "self.1"), ("cross", "cross.1")] == [group.layers for group in groups]
        assert [TOKENS, ENCODER] == [group.spec.sequence for group in groups]


def test_a_request_holds_the_blocks_of_its_encoders_tokens_however_long_it_is() -> None:
    layers = [
        LayerSpec(name="self", spec=FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8), query=QUERY),
        LayerSpec(name="cross", spec=CROSS, query=QUERY),
    ]
    grouping = kvframe.group_layers(layers)
    limits = {"memory_bytes": 2**20, "max_model_len": 448, "max_num_batched_tokens": 64}
    plan = kvframe.plan_cache(grouping, max_input_lens={ENCODER: 30}, **limits)
    assert (112, 8) == plan.peak_blocks(448)
    assert (1, 8) == plan.peak_blocks(1)
    assert (1, 3) == plan.peak_blocks(1, {ENCODER: 9})
    with pytest.raises(PlanError, match="max_encoder_len"):
        kvframe.plan_cache(grouping, **limits)


@pytest.mark.parametrize("backend", ["torch", "torch_reference"])
def test_the_built_in_backends_serve_it(backend: str) -> None:
    backend_class = kvframe.load_plugins().registry.backends.load(backend)
    assert [] == find_refusals(backend_class.capabilities, LayerSpec(name="cross", spec=CROSS, query=QUERY), "cpu")
