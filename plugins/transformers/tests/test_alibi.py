"""The slopes of ALiBi are those that the model's own function makes."""

from __future__ import annotations

import pytest
import torch
from kvframe_transformers.alibi import is_alibi, slopes_of
from torch import nn
from transformers import BloomConfig, BloomModel, MptConfig, MptModel


@pytest.mark.parametrize("num_heads", [4, 6])
def test_the_slopes_of_bloom_and_mpt_are_those_of_their_biases(num_heads: int) -> None:
    with torch.device("meta"):
        bloom = BloomModel(BloomConfig(vocab_size=8, hidden_size=24, n_layer=1, n_head=num_heads))
        mpt = MptModel(MptConfig(vocab_size=8, d_model=24, n_layers=1, n_heads=num_heads))
    distances = torch.arange(9) - 8
    of_bloom = bloom.build_alibi_tensor(torch.ones(1, 9), num_heads, torch.float32)
    expected = torch.tensor(slopes_of(bloom, num_heads))[:, None] * distances
    torch.testing.assert_close(of_bloom[:, 0] - of_bloom[:, 0, -1:], expected)
    of_mpt = mpt.build_mpt_alibi_tensor(num_heads, 9)
    torch.testing.assert_close(of_mpt[:, 0], torch.tensor(slopes_of(mpt, num_heads))[:, None] * distances)


def test_a_model_without_such_a_function_has_no_slopes() -> None:
    with pytest.raises(LookupError, match="adds a number for each key to its scores, which is not that of ALiBi"):
        slopes_of(nn.Linear(2, 2), 4)


def test_a_mask_for_padding_is_equal_for_all_heads() -> None:
    assert is_alibi(torch.empty(4, 1, 9), 4, 9)
    assert is_alibi(torch.empty(1, 4, 1, 9), 4, 9)
    assert not is_alibi(torch.empty(1, 1, 1, 9), 4, 9)
    assert not is_alibi(torch.empty(1, 4, 9, 9), 4, 9)
    assert not is_alibi(torch.empty(1, 1, 9), 1, 9)
