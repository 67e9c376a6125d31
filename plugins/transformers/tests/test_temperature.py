"""In a step, a model's temperatures are computed from the true positions of a packed batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.model import TransformersModel
from kvframe_transformers.temperature import Temperature, temperature_of
from kvframe_transformers.testing import save_tiny
from torch import nn

from kvframe.contract import ModelError


@pytest.fixture
def model(tmp_path: Path) -> TransformersModel:
    save_tiny(tmp_path, "llama4_text")
    loaded = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    assert isinstance(loaded, TransformersModel)
    return loaded


def attentions(model: TransformersModel) -> list[Any]:
    return [layer.self_attn for layer in model.model.model.layers]


def scale(floor_scale: float, attn_scale: float, query: torch.Tensor, positions: list[int]) -> torch.Tensor:
    module = SimpleNamespace(floor_scale=floor_scale, attn_scale=attn_scale)
    return Temperature(module).scale(query, torch.tensor(positions))


def test_the_factor_grows_by_the_logarithm_of_the_steps() -> None:
    scaled = scale(4, 0.5, torch.ones(5, 1, 1), [0, 2, 3, 6, 7])
    # 1 + log(1 + 0) / 2, 1 + log(1 + 1) / 2, 1 + log(1 + 2) / 2
    expected = torch.tensor([1.0, 1.0, 1.34657359, 1.34657359, 1.54930614])
    torch.testing.assert_close(scaled.flatten(), expected)


def test_a_scaled_query_keeps_its_dtype() -> None:
    assert torch.bfloat16 == scale(4, 0.5, torch.ones(1, 2, 4, dtype=torch.bfloat16), [9]).dtype


def test_only_layers_without_rotary_positions_have_a_temperature(model: TransformersModel) -> None:
    assert [False, True, False, True] == [temperature_of(attention) is not None for attention in attentions(model)]


def test_a_module_without_the_switch_has_no_temperature() -> None:
    assert temperature_of(nn.Linear(2, 2)) is None


def test_the_switch_is_off_in_a_step_and_then_what_it_was(model: TransformersModel, dense_layers: Any) -> None:
    attentions(model)[3].attn_temperature_tuning = 4  # as older configs have it
    model.attach(dense_layers(model.description.layers))
    assert model._mode is not None
    with model._mode.on():
        assert [True, False, True, False] == [attention.attn_temperature_tuning for attention in attentions(model)]
    assert [True, True, True, 4] == [attention.attn_temperature_tuning for attention in attentions(model)]


def test_the_self_check_sees_the_formula_of_a_model_with_long_steps(
    tmp_path: Path, dense_layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "llama4_text", floor_scale=8192)
    model: Any = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    model.self_check(partial(layers.run_packed, model))
    assert [8192] * 4 == [layer.self_attn.floor_scale for layer in model.model.model.layers]
    monkeypatch.setattr(Temperature, "scale", lambda self, query, positions: query)
    with pytest.raises(ModelError, match=r"from layer 'model.layers.1.self_attn' on"):
        model.self_check(partial(layers.run_packed, model))


def test_one_token_is_scaled_by_its_position_not_by_its_place_in_the_batch(
    model: TransformersModel, dense_layers: Any
) -> None:
    tokens = list(range(30))
    with torch.inference_mode():
        expected = model.model(torch.tensor([tokens])).logits[0]
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    layers.step(model, {0: tokens[:29], 1: tokens[:12]})
    logits = layers.step(model, {1: tokens[12:13], 0: tokens[29:]})
    torch.testing.assert_close(torch.cat([logits[1], logits[0]]), expected[[12, 29]], rtol=0, atol=2e-4)
