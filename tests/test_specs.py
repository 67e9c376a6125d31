"""The laws of cache specs, and the faster derivations against the general ones."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.errors import SpecError, UnknownNameError
from kvframe.specs import AttentionMask, KVCacheSpec, StateTensor
from kvframe.testing.laws import ConformanceError, check_spec


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8)


def test_full_attention_keeps_the_whole_past() -> None:
    assert () == full().live_ranges(0)
    assert ((0, 7),) == full().live_ranges(7)


def test_full_attention_holds_a_block_for_every_started_one() -> None:
    assert 3 == full(4).peak_blocks(9, 2)
    assert 0 == full(4).peak_blocks(0, 2)


@given(block_size=st.integers(1, 20), num_tokens=st.integers(0, 100), max_new=st.integers(1, 40))
def test_full_attention_peak_equals_the_general_one(block_size: int, num_tokens: int, max_new: int) -> None:
    spec = full(block_size)
    assert KVCacheSpec.peak_blocks(spec, num_tokens, max_new) == spec.peak_blocks(num_tokens, max_new)


@given(block_size=st.integers(1, 20), n=st.integers(0, 100), num_new=st.integers(1, 40))
def test_full_attention_residency_equals_the_general_one(block_size: int, n: int, num_new: int) -> None:
    spec = full(block_size)
    assert KVCacheSpec.num_resident_blocks(spec, n, num_new) == spec.num_resident_blocks(n, num_new)


def test_full_attention_is_plain_causal() -> None:
    assert AttentionMask() == full().mask
    assert full() == full().retain_all()


def test_a_block_is_one_key_and_one_value_per_token_and_head() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, head_size_v=4, dtype="bfloat16")
    assert {"k": StateTensor((16, 2, 8), "bfloat16"), "v": StateTensor((16, 2, 4), "bfloat16")} == spec.state_tensors()
    assert 16 * 2 * (8 + 4) * 2 == spec.block_bytes


def test_value_vectors_are_as_long_as_keys_unless_said() -> None:
    assert 8 == full().head_size_v


def test_each_tensor_of_a_block_is_aligned_to_16_bytes() -> None:
    spec = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=3)
    assert 16 + 16 == spec.block_bytes


def test_layers_that_differ_in_layout_only_share_a_group() -> None:
    wide = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float16")
    assert wide.group_key == full(4).group_key
    assert full(8).group_key != full(4).group_key


@pytest.mark.parametrize("field", ["block_size", "num_kv_heads", "head_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_sizes_are_whole_numbers_of_at_least_one(field: str, value: Any) -> None:
    with pytest.raises(SpecError, match=rf"FullAttentionSpec\.{field} must be a whole number"):
        attrs.evolve(full(), **{field: value})


def test_an_unknown_dtype_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'float16'"):
        FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="floot16")


def test_mask_features_say_what_a_backend_needs() -> None:
    assert frozenset({"causal"}) == AttentionMask().features
    assert frozenset({"bidirectional"}) == AttentionMask(causal=False).features
    assert frozenset({"causal", "window", "sink_tokens"}) == AttentionMask(window=3, num_sink_tokens=1).features


class Alternating(FullAttentionSpec):
    """Every second token stays live: many separate ranges, for the derivations of the base class."""

    def live_ranges(self, n: int) -> tuple[tuple[int, int], ...]:
        return tuple((i, i + 1) for i in range(0, n, 2))


def test_live_blocks_merge_ranges_that_touch_the_same_block() -> None:
    spec = Alternating(block_size=4, num_kv_heads=1, head_size=8)
    assert ((0, 3),) == spec.live_blocks(10)


def test_live_blocks_stay_apart_where_a_block_is_dead() -> None:
    spec = Alternating(block_size=1, num_kv_heads=1, head_size=8)
    assert ((0, 1), (2, 3), (4, 5)) == spec.live_blocks(5)


def test_residency_counts_live_blocks_and_new_ones_once() -> None:
    spec = Alternating(block_size=1, num_kv_heads=1, head_size=8)
    assert 3 + 2 == KVCacheSpec.num_resident_blocks(spec, 5, 2)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_full_attention_keeps_the_laws(block_size: int) -> None:
    check_spec(full(block_size), 40)


class Remembers(FullAttentionSpec):
    """Breaks the law of forgetting: the first token comes back at position 5."""

    def live_ranges(self, n: int) -> tuple[tuple[int, int], ...]:
        return ((0, n),) if n >= 5 or n == 1 else ()


class LooksAhead(FullAttentionSpec):
    """Breaks the law of the past."""

    def live_ranges(self, n: int) -> tuple[tuple[int, int], ...]:
        return ((0, n + 1),)


class Miscounts(FullAttentionSpec):
    """Overrides a derivation with another answer."""

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        return 1


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Remembers, r"forgetting: tokens \[0, 1, 2, 3\] are live at 5"),
        (LooksAhead, r"past: live_ranges\(0\)"),
        (Miscounts, r"peak_blocks\(0, 1\) is 1"),
    ],
)
def test_a_broken_spec_is_told_which_law(broken: type[FullAttentionSpec], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_spec(broken(block_size=4, num_kv_heads=1, head_size=8), 20)
