"""A module that attends several times in a forward has a layer for each of its calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.calls import name_of_call, path_of
from kvframe_transformers.checkpoint import quiet
from kvframe_transformers.model import TransformersModel
from kvframe_transformers.routing import RunningStep, attend_now, running
from transformers import AutoConfig, AutoModelForCausalLM

from kvframe.contract import ModelError


@pytest.fixture
def saved(tmp_path: Path) -> tuple[TransformersModel, Any]:
    """Return a tiny DiffLlama, loaded by the adapter, and as transformers made it."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("diffllama", vocab_size=128, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    with quiet():
        plain = AutoModelForCausalLM.from_config(config).eval()
        plain.save_pretrained(tmp_path)
    model = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    assert isinstance(model, TransformersModel)
    return model, plain


def test_the_first_call_has_the_name_of_its_module() -> None:
    assert ["a.attn", "a.attn#2", "a.attn#3"] == [name_of_call("a.attn", number) for number in (1, 2, 3)]
    assert ["a.attn", "a.attn"] == [path_of("a.attn"), path_of("a.attn#2")]


def test_packed_prompts_give_the_plain_logits(saved: tuple[TransformersModel, Any], dense_layers: Any) -> None:
    model, plain = saved
    prompts = [[3, 9, 4], [7, 1, 8, 2, 6, 5, 3]]
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    for prompt, logits in zip(prompts, layers.run_packed(model, prompts), strict=True):
        with torch.inference_mode():
            expected = plain(torch.tensor([prompt]), use_cache=False).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_call_more_than_planned_is_refused(saved: tuple[TransformersModel, Any], dense_layers: Any) -> None:
    model, _ = saved
    model.attach(dense_layers(model.description.layers))
    module = model.model.model.layers[0].self_attn
    rows = torch.zeros(2, 2, 16)
    step = RunningStep(model._routes, torch.arange(2), num_calls={module: 2})
    with running(step), pytest.raises(ModelError, match="attends 3 times in a step; 2 were planned"):
        attend_now(module, rows, rows, rows)


def test_such_a_model_is_not_compiled(saved: tuple[TransformersModel, Any], dense_layers: Any) -> None:
    model, _ = saved
    model.attach(dense_layers(model.description.layers))
    with pytest.raises(ModelError, match="attends several times in a forward, so the model cannot be compiled"):
        model.compile()
