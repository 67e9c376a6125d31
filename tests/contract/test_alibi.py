"""ALiBi: a layer's declaration of its slopes, and what they subtract from scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_engine.dense_check import _DenseLayer
from kvframe_testing.reference import alibi_bias, dense_attention
from kvframe_testing.state import GridSpec

from kvframe.config.stack import Stack
from kvframe.contract.errors import SpecError
from kvframe.contract.specs import ENCODER, LayerSpec, QuerySpec, RelativeBias
from kvframe.loading.plugins import load_plugins
from kvframe.planning.layer_file import read_layer_file
from kvframe.planning.layer_specs import make_layer_specs


def query(**options: Any) -> QuerySpec:
    return QuerySpec(num_heads=2, head_size=8, scale=1.0, **options)


def test_a_head_loses_its_slope_for_each_token_between_query_and_key() -> None:
    bias = alibi_bias((0.5, 2.0), 1, 3)
    assert [[[-0.5, 0.0, -0.5], [-1.0, -0.5, 0.0]], [[-2.0, 0.0, -2.0], [-4.0, -2.0, 0.0]]] == bias.tolist()
    assert torch.float64 == bias.dtype


def test_slopes_may_come_as_a_list() -> None:
    assert (0.5, 0.25) == query(alibi_slopes=[0.5, 0.25]).alibi_slopes
    assert query().alibi_slopes is None


@pytest.mark.parametrize("slopes", [(0.5,), (0.5, 0.25, 0.1), (0.5, float("inf")), (0.5, True), (0.5, "1"), "ab", 0.5])
def test_slopes_are_a_finite_number_for_each_head(slopes: Any) -> None:
    with pytest.raises(SpecError, match="alibi_slopes must be a finite number for each of 2 heads"):
        query(alibi_slopes=slopes)


def test_a_layer_adds_one_bias_to_its_scores() -> None:
    with pytest.raises(SpecError, match="relative_bias and alibi_slopes; a layer adds only one"):
        query(alibi_slopes=(0.5, 0.25), relative_bias=RelativeBias(num_buckets=4, max_distance=9))


def test_there_is_no_distance_to_another_sequence() -> None:
    class CrossSpec(GridSpec):
        sequence = ENCODER

    spec = CrossSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32", causal=False)
    with pytest.raises(SpecError, match="layer 'a' has ALiBi slopes and attends to the encoder sequence"):
        LayerSpec(name="a", spec=spec, query=query(alibi_slopes=(0.5, 0.25)))


def test_the_dense_run_of_a_self_check_subtracts_slopes() -> None:
    spec = GridSpec(block_size=4, num_kv_heads=2, head_size=8)
    layer = LayerSpec(name="a", spec=spec, query=query(alibi_slopes=(0.5, 2.0)))
    assert layer.query is not None
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 6, 2, 8, generator=generator, dtype=torch.float64).unbind()
    bias = alibi_bias((0.5, 2.0), 0, 6)
    expected = dense_attention(layer.query, q, k, v, torch.ones(6, 6, dtype=torch.bool).tril(), bias=bias)
    torch.testing.assert_close(expected, _DenseLayer(layer, {}, "a")(q, k, v))


def test_a_layer_file_gives_slopes_as_a_list(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(
        'max_model_len = 64\n[[layers]]\nname = "a"\nkind = "full_attention"\nnum_kv_heads = 2\nhead_size = 8\n'
        "query = {alibi_slopes = [0.5, 0.25]}\n"
    )
    (layer,) = make_layer_specs(read_layer_file(path), load_plugins().registry, Stack(), "float32")
    assert layer.query is not None
    assert (0.5, 0.25) == layer.query.alibi_slopes
