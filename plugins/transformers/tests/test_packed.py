"""Linear layers multiply by packed copies of their weights in a step, and by their own weights otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers.packed import PackedLinears
from kvframe_transformers.plugin import kvframe_configure
from kvframe_transformers.testing import save_tiny
from torch import nn

from kvframe import Engine, SamplingParams, Stack
from kvframe.contract import StackError

PROMPTS = [[5, 9, 17, 3], [7] * 11]


def stack_of(**settings: Any) -> Stack:
    return Stack.from_mapping({"cache": {"memory": "1MiB"}, "plugin": {"transformers": settings}})


def packs(engine: Engine) -> bool:
    """Return whether every linear layer of an engine's model is packed in a step; if not, none is."""
    model: Any = engine.model
    linear, found = [module for module in model.model.modules() if type(module) is nn.Linear], []
    run = model._run

    def noting(*args: Any, **kwargs: Any) -> Any:
        found.append({"forward" in vars(module) for module in linear})
        return run(*args, **kwargs)

    model._run = noting
    engine.generate([[3, 4]], SamplingParams(max_new_tokens=1))
    assert not any("forward" in vars(module) for module in linear)
    assert found in ([{True}], [{False}])
    return found == [{True}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_layer_computes_what_it_did(dtype: torch.dtype) -> None:
    first = nn.Linear(40, 24)
    layers = nn.Sequential(first, nn.Linear(24, 17, bias=False)).to(dtype)
    rows = torch.randn(1, 5, 40, dtype=dtype)
    with torch.inference_mode():
        expected = layers(rows)
        packed = PackedLinears(layers)
        assert 2 == len(packed)
        # The copies are used: the layers' own weights may hold anything.
        with torch.no_grad():
            first.weight.fill_(torch.nan)
        assert layers(rows).isnan().all()
        packed.switch_on()
        torch.testing.assert_close(layers(rows), expected)
        packed.switch_off()
        assert layers(rows).isnan().all()


def test_other_layers_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    assert 0 == len(PackedLinears(nn.Sequential(Special(4, 4), nn.Linear(4, 4, dtype=torch.float64), nn.LayerNorm(4))))


def test_a_packed_model_generates_the_same(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    params, outputs = SamplingParams(max_new_tokens=12, ignore_eos=True), []
    for packed in (False, True):
        with Engine.from_pretrained(tmp_path, stack=stack_of(pack_weights=packed)) as engine:
            assert packed is packs(engine)
            outputs.append([output.token_ids for output in engine.generate(PROMPTS, params)])
    assert outputs[0] == outputs[1]


def test_a_compiled_model_multiplies_by_the_copies_too(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with Engine.from_pretrained(tmp_path, stack=stack_of(pack_weights=True)) as engine:
        model: Any = engine.model
        expected = [output.token_ids for output in engine.generate(PROMPTS, params)]
        model.compile("aot_eager")
        with torch.no_grad():
            for layer in model.model.modules():
                if type(layer) is nn.Linear:
                    layer.weight.fill_(torch.nan)
        assert expected == [output.token_ids for output in engine.generate(PROMPTS, params)]
        # One graph, also if this is the first model that is compiled in the process.
        assert (1, 0) == (model.compiled.num_graphs, model.compiled.num_graph_breaks)


@pytest.mark.parametrize("settings", [{"pack_weights": 1}, {"pack": True}])
def test_other_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(StackError, match="takes only pack_weights, true or false"):
        kvframe_configure(settings)


def test_a_stack_without_settings_packs_nothing(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    kvframe_configure({"pack_weights": True})
    with Engine.from_pretrained(tmp_path, stack=Stack.from_mapping({"cache": {"memory": "1MiB"}})) as engine:
        assert not packs(engine)
