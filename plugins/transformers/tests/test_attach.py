"""Attaching routes every attention layer through the engine; detaching restores the model completely."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.model import TransformersModel
from kvframe_transformers.routing import RUN_TIME
from kvframe_transformers.testing import save_tiny
from transformers import AttentionMaskInterface

from kvframe.contract import ModelError


def load(path: Path, family: str, **overrides: Any) -> TransformersModel:
    save_tiny(path, family, **overrides)
    model = TransformersAdapter().load(path, device="cpu", dtype="float32")
    assert isinstance(model, TransformersModel)
    return model


def plain_logits(model: TransformersModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model.model(torch.arange(12)[None]).logits
    return logits


def test_no_mask_is_built_while_attached() -> None:
    assert RUN_TIME not in AttentionMaskInterface()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_detaching_gives_back_the_very_logits(family: str, tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, family)
    before, implementation = plain_logits(model), model.model.config._attn_implementation
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    model.self_check(partial(layers.run_packed, model))
    model.detach()
    assert implementation == model.model.config._attn_implementation
    assert torch.equal(before, plain_logits(model))


def test_detaching_leaves_no_hook(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "llama")
    model.attach(dense_layers(model.description.layers))
    model.detach()
    assert [] == [m for m in model.model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_detaching_twice_is_harmless(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "llama")
    before = plain_logits(model)
    model.attach(dense_layers(model.description.layers))
    model.detach()
    model.detach()
    assert torch.equal(before, plain_logits(model))


def test_a_detached_model_can_be_attached_again(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "llama")
    for _ in range(2):
        layers = dense_layers(model.description.layers)
        model.attach(layers)
        model.self_check(partial(layers.run_packed, model))
        model.detach()


def test_two_models_run_in_turns(tmp_path: Path, dense_layers: Any) -> None:
    models = [load(tmp_path / family, family) for family in ("gemma2", "llama")]
    expected = [plain_logits(model)[0] for model in models]
    engines = [(model, dense_layers(model.description.layers)) for model in models]
    for model, layers in engines:
        model.attach(layers)
    for tokens in (list(range(5)), list(range(5, 12))):
        for (model, layers), want in zip(engines, expected, strict=True):
            logits = layers.step(model, {0: tokens})[0]
            torch.testing.assert_close(logits, want[tokens[0] : tokens[-1] + 1], rtol=0, atol=2e-4)


def test_only_the_wanted_logits_are_computed(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "llama")
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    layers.batch = [(0, 6)]
    logits = model.forward(torch.arange(6), torch.arange(6), torch.tensor([5, 2]))
    model.detach()
    torch.testing.assert_close(logits, plain_logits(model)[0, [5, 2]], rtol=0, atol=2e-4)


def test_a_step_may_want_no_logits(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "llama")
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    layers.batch = [(0, 6)]
    assert (0, 128) == model.forward(torch.arange(6), torch.arange(6), torch.tensor([], dtype=torch.int64)).shape


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4_text", "deepseek_v3", "qwen3_next"])
def test_an_attached_model_computes_as_before_outside_of_a_step(family: str, tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, family)
    logits, attributes = plain_logits(model), [dict(vars(module)) for module in model.model.modules()]
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    assert torch.equal(logits, plain_logits(model))
    assert attributes == [dict(vars(module)) for module in model.model.modules()]


def test_a_step_runs_in_evaluation_mode_and_gives_the_modes_back(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "opt", dropout=0.5)
    expected = plain_logits(model)[0]
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    model.model.train()
    assert not torch.equal(expected, plain_logits(model)[0])
    model.model.model.decoder.layers[1].eval()
    modes = [module.training for module in model.model.modules()]
    logits = layers.step(model, {0: list(range(12))})[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
    assert modes == [module.training for module in model.model.modules()]


def test_a_described_layer_that_is_not_there_is_named(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "llama")
    extra = attrs.evolve(model.description.layers[0], name="model.layers.9.self_attn")
    model.description = attrs.evolve(model.description, layers=(*model.description.layers, extra))
    with pytest.raises(ModelError, match=r"has no module 'model.layers.9.self_attn'"):
        model.attach(dense_layers(model.description.layers))


def test_a_layer_that_is_not_reached_is_named_and_the_model_is_as_before(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "llama")
    before = plain_logits(model)
    extra = attrs.evolve(model.description.layers[0], name="model.layers.1.mlp")
    model.description = attrs.evolve(model.description, layers=(*model.description.layers, extra))
    with pytest.raises(ModelError, match=r"'model.layers.1.mlp' of .* does not run through"):
        model.attach(dense_layers(model.description.layers))
    assert torch.equal(before, plain_logits(model))


def test_a_scale_other_than_planned_is_refused(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "llama")
    model.model.model.layers[2].self_attn.scaling = 0.5
    with pytest.raises(ModelError, match=r"'model.layers.2.self_attn' asks for scale 0.5 .* planned with 0.25"):
        model.attach(dense_layers(model.description.layers))


def test_the_self_check_names_the_first_layer_that_differs(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "gemma3_text")
    wrong = [
        attrs.evolve(layer, options={**layer.options, "window": 7}) if index == 1 else layer
        for index, layer in enumerate(model.description.layers)
    ]
    layers = dense_layers(wrong)
    model.attach(layers)
    with pytest.raises(
        ModelError, match=r"gives other logits in a packed batch than alone, from layer 'model.layers.1\."
    ):
        model.self_check(partial(layers.run_packed, model))


def test_the_self_check_refuses_what_is_not_finite(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "llama")
    layers = dense_layers(model.description.layers)
    model.attach(layers)

    def run_packed(prompts: list[list[int]], last_only: bool = False) -> list[torch.Tensor]:
        return [logits * float("nan") for logits in layers.run_packed(model, prompts)]

    with pytest.raises(ModelError, match="though every attention layer's output agrees"):
        model.self_check(run_packed)


def test_the_self_check_accepts_bfloat16(tmp_path: Path, dense_layers: Any) -> None:
    save_tiny(tmp_path, "gemma2")
    model = TransformersAdapter().load(tmp_path, device="cpu", dtype="bfloat16")
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    model.self_check(partial(layers.run_packed, model))
