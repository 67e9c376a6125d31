"""Merging attention over parts of the keys: in plain numbers, and equal to attention over all of them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_testing.reference import dense_attention, dense_lse

from kvframe.contract import QuerySpec, merge_attention

NOTHING = -math.inf


def merged(*parts: tuple[float, float]) -> tuple[float, float]:
    """Return the merge of outputs and log-sum-exps of one query and head, with values of one element."""
    outputs = [torch.tensor([[[output]]], dtype=torch.float64) for output, _ in parts]
    output, lse = merge_attention(outputs, [torch.tensor([[lse]], dtype=torch.float64) for _, lse in parts])
    return output.item(), lse.item()


def test_parts_of_equal_weight_give_their_mean() -> None:
    assert (3.0, pytest.approx(math.log(2))) == merged((2.0, 0.0), (4.0, 0.0))


def test_a_part_counts_by_its_denominator() -> None:
    assert (pytest.approx(7.0), pytest.approx(math.log(4))) == merged((4.0, 0.0), (8.0, math.log(3)))


def test_one_part_is_itself() -> None:
    assert (5.0, 2.5) == merged((5.0, 2.5))


@pytest.mark.parametrize("output", [0.0, 9.0, math.nan])
def test_a_part_without_keys_does_not_count(output: float) -> None:
    assert (5.0, 2.5) == merged((5.0, 2.5), (output, NOTHING))


def test_no_keys_in_any_part_give_zeros_and_no_weight() -> None:
    assert (0.0, NOTHING) == merged((math.nan, NOTHING), (1.0, NOTHING))


def test_large_scores_do_not_overflow() -> None:
    assert (3.0, pytest.approx(1e4 + math.log(2))) == merged((2.0, 1e4), (4.0, 1e4))
    assert (4.0, 1e4) == merged((2.0, -1e4), (4.0, 1e4))


def test_the_output_keeps_its_dtype_and_is_merged_in_the_wider_one() -> None:
    parts = [torch.full((1, 1, 1), value, dtype=torch.bfloat16) for value in (1.0, 1.0, 1.0078125)]
    output, lse = merge_attention(parts, [torch.zeros(1, 1)] * 3)
    assert (torch.bfloat16, torch.float32) == (output.dtype, lse.dtype)
    assert 1.0 == output.item()


@given(ends=st.lists(st.integers(0, 12), max_size=4), seed=st.integers(0, 99), has_sinks=st.booleans())
def test_any_division_of_the_keys_gives_the_whole(ends: list[int], seed: int, has_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = QuerySpec(num_heads=4, head_size=3, scale=0.7, soft_cap=5.0)

    def draw(*shape: int) -> torch.Tensor:
        return 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key, value, bias = draw(5, 4, 3), draw(12, 2, 3), draw(12, 2, 6), draw(4, 5, 12)
    visible = torch.rand(5, 12, generator=generator) < 0.4
    sinks = draw(4) if has_sinks else None
    outputs, lses = [], []
    for index, (start, stop) in enumerate(itertools.pairwise([0, *sorted(ends), 12])):
        part = slice(start, stop)
        # The sinks are in one part.
        masking = (visible[:, part], None if index else sinks, bias[:, :, part])
        outputs.append(dense_attention(layer, query, key[part], value[part], *masking))
        lses.append(dense_lse(layer, query, key[part], *masking))
    output, lse = merge_attention(outputs, lses)
    torch.testing.assert_close(output, dense_attention(layer, query, key, value, visible, sinks, bias))
    torch.testing.assert_close(lse, dense_lse(layer, query, key, visible, sinks, bias))
