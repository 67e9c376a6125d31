"""The learned bias by distance: T5's buckets, a layer's declaration, and the tensor that its model binds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_testing.reference import relative_bias
from kvframe_testing.state import GridSpec
from transformers.models.t5.modeling_t5 import T5Attention

from kvframe.config.stack import Stack
from kvframe.contract.errors import BackendError, SpecError
from kvframe.contract.relative_bias import bias_by_distance, bias_columns, distance_buckets
from kvframe.contract.specs import ENCODER, LayerSpec, RelativeBias
from kvframe.loading.plugins import load_plugins
from kvframe.planning.layer_file import read_layer_file
from kvframe.planning.layer_specs import make_layer_specs
from tests.attention.attending import QUERY, Bench, full

BIAS = RelativeBias(num_buckets=4, max_distance=9)


def biased(name: str) -> LayerSpec:
    return LayerSpec(name=name, spec=full(), query=attrs.evolve(QUERY, relative_bias=BIAS))


# --- buckets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (12, 20), (5, 3), (32, 64), (64, 999)])
def test_buckets_are_those_of_transformers(num_buckets: int, max_distance: int, both_ways: bool) -> None:
    bias = RelativeBias(num_buckets=num_buckets, max_distance=max_distance, bidirectional=both_ways)
    distance = torch.arange(-3 * max_distance, 3 * max_distance)
    expected = T5Attention._relative_position_bucket(distance, both_ways, num_buckets, max_distance)
    buckets = distance_buckets(bias)[bias_columns(distance, max_distance)]
    assert expected.tolist() == buckets.tolist()


def test_half_of_the_buckets_are_single_distances() -> None:
    assert [3, 3, 3, 3, 3, 2, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] == distance_buckets(BIAS).tolist()
    both_ways = distance_buckets(attrs.evolve(BIAS, num_buckets=8, max_distance=4, bidirectional=True))
    assert [3, 3, 2, 1, 0, 5, 6, 7, 7] == both_ways.tolist()


def test_the_kit_and_the_backends_count_the_same_buckets() -> None:
    table = torch.arange(8.0).view(4, 2)
    dense = relative_bias(BIAS, table, 3, 30)
    distance = torch.arange(30) - torch.arange(3, 30)[:, None]
    assert torch.equal(dense, bias_by_distance(BIAS, table)[:, bias_columns(distance, 9)])


# --- the declaration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"num_buckets": 1, "max_distance": 9}, "2 buckets"),
        ({"num_buckets": 3, "max_distance": 9, "bidirectional": True}, "4 buckets"),
        ({"num_buckets": 32, "max_distance": 16}, "a distance of more than 16"),
    ],
)
def test_a_bias_without_both_kinds_of_buckets_is_refused(options: dict[str, Any], least: str) -> None:
    with pytest.raises(SpecError, match=f"at least .*{least}"):
        RelativeBias(**options)


def test_a_bias_over_the_keys_of_another_sequence_is_refused() -> None:
    class CrossSpec(GridSpec):
        sequence = ENCODER

    spec = CrossSpec(block_size=4, num_kv_heads=1, head_size=4, causal=False)
    with pytest.raises(SpecError, match="layer 'x' has a relative bias and attends to the encoder sequence"):
        LayerSpec(name="x", spec=spec, query=attrs.evolve(QUERY, relative_bias=BIAS))


def test_a_layer_file_declares_a_bias(tmp_path: Path) -> None:
    path = tmp_path / "t5.toml"
    path.write_text("""
        max_model_len = 64
        [[layers]]
        name = "decoder.{}"
        kind = "full_attention"
        num_kv_heads = 2
        head_size = 8
        query = { relative_bias = { num_buckets = 32, max_distance = 128 } }
    """)
    description = read_layer_file(path)
    (layer,) = make_layer_specs(description, load_plugins().registry, Stack(), "float32")
    assert layer.query is not None
    assert RelativeBias(num_buckets=32, max_distance=128) == layer.query.relative_bias


# --- the model's tensor -----------------------------------------------------------------------------------------------


def test_a_step_of_layers_that_were_bound_no_bias_is_refused_by_name() -> None:
    bench = Bench([biased("L0"), biased("L1"), biased("L2")])
    bench.attention["L1"].bind({"relative_bias": torch.zeros(4, 2)})
    with pytest.raises(BackendError, match="the layers 'L0', 'L2' need learned tensors, and the model bound none"):
        bench.attention.begin_step([])


@pytest.mark.parametrize("parameters", [{}, {"relative_bias": torch.zeros(2, 4)}])
def test_a_bias_of_another_shape_is_refused(parameters: dict[str, torch.Tensor]) -> None:
    with pytest.raises(BackendError, match=r"'L0' needs the learned tensor 'relative_bias' of shape \(4, 2\), and the"):
        Bench([biased("L0")]).attention["L0"].bind(parameters)
