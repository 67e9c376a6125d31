"""Linear layers multiply by packed copies of their weights in a step, and by their own weights otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from kvframe_transformers.packed import PackedLinears, packable
from kvframe_transformers.plugin import kvframe_configure
from kvframe_transformers.shared_inputs import SharedInputs
from kvframe_transformers.testing import save_tiny
from torch import nn
from torch._dynamo import lookup_backend
from transformers import AutoModelForCausalLM

from kvframe import Engine, SamplingParams, Stack
from kvframe.contract import StackError

PROMPTS = [[5, 9, 17, 3], [7] * 11]


def stack_of(**settings: Any) -> Stack:
    return Stack.from_mapping({"cache": {"memory": "1MiB"}, "plugin": {"transformers": settings}})


def packs(engine: Engine) -> bool:
    """Return whether every linear layer of an engine's model is packed in a step; if not, none is."""
    model: Any = engine.model
    linear, patched = [module for module in model.model.modules() if type(module) is nn.Linear], []
    run = model._run

    def noting(*args: Any, **kwargs: Any) -> Any:
        patched.append({"forward" in vars(module) for module in linear})
        return run(*args, **kwargs)

    model._run = noting
    engine.generate([[3, 4]], SamplingParams(max_new_tokens=1))
    assert not any("forward" in vars(module) for module in linear)
    assert patched in ([{True}], [{False}])
    return patched == [{True}]


PACKED_DTYPES = [torch.float32, *([torch.bfloat16] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]


def test_a_dtype_that_the_processor_does_not_multiply_is_not_packed() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert (dtype in PACKED_DTYPES) == bool(packable(nn.Sequential(nn.Linear(8, 8)).to(dtype)))


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
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


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_layers_with_one_input_share_a_multiplication(dtype: torch.dtype) -> None:
    layers = nn.ModuleList([nn.Linear(40, 24), nn.Linear(40, 17, bias=False), nn.Linear(40, 9)]).to(dtype)
    first, second, third = layers
    rows, others = torch.randn(2, 1, 5, 40, dtype=dtype)
    with torch.inference_mode():
        expected, of_others = [layer(rows) for layer in layers], [layer(others) for layer in layers]
        packed = PackedLinears(layers, [(first, second)])  # type: ignore[list-item]
        assert (3, 2) == (len(packed), packed.num_products)
        packed.switch_on()
        for output, expected_output in zip([layer(rows) for layer in layers], expected, strict=True):
            torch.testing.assert_close(output, expected_output)
        # Each layer multiplies its own input, in any order of calls, also if the others got another input.
        torch.testing.assert_close(second(others), of_others[1])
        torch.testing.assert_close(first(rows), expected[0])
        torch.testing.assert_close(first(rows), expected[0])
        torch.testing.assert_close(second(others), of_others[1])
        torch.testing.assert_close(third(others), of_others[2])


def test_a_shared_multiplication_runs_once_and_keeps_nothing() -> None:
    layers = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 6)])
    first, second = layers
    packed = PackedLinears(layers, [(first, second)])  # type: ignore[list-item]
    packed.switch_on()
    rows = torch.randn(1, 3, 8)
    with torch.inference_mode(), torch.profiler.profile() as profiled:
        second(rows)
        first(rows)
    assert 1 == sum("mkldnn::_linear_pointwise" == event.name for event in profiled.events())
    alive = ref(rows)
    first(rows)  # the result of the second layer is kept
    packed.switch_off()
    del rows
    assert alive() is None


def test_layers_that_always_get_one_tensor_are_found() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.gate, self.twice, self.after = (nn.Linear(4, 4) for _ in range(5))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.query(rows) + self.twice(rows) + self.key(rows) + self.twice(rows)
            rows += 1.0
            return out + self.gate(rows) + self.after(out)

    model, inputs = Model(), SharedInputs()
    with torch.inference_mode(), inputs.recorded([module for module in model.modules() if type(module) is nn.Linear]):
        model(torch.randn(2, 4))
    assert [(model.query, model.key)] == inputs.groups()
    assert not model.query._forward_pre_hooks


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


def test_projections_of_one_input_are_joined_in_a_model(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    with Engine.from_pretrained(tmp_path, stack=stack_of(pack_weights=True)) as engine:
        model: Any = engine.model
        num_blocks = model.model.config.num_hidden_layers
        packed = model._mode.packed
        # Query, key and value; output; gate and up; down; and one head.
        assert (7 * num_blocks + 1, 4 * num_blocks + 1) == (len(packed), packed.num_products)


def test_a_model_that_needs_whole_outputs_shares_nothing(tmp_path: Path) -> None:
    class Flat(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(rows.view(-1)).view(rows.shape)

    save_tiny(tmp_path, "llama")
    model, params = AutoModelForCausalLM.from_pretrained(tmp_path), SamplingParams(max_new_tokens=6, ignore_eos=True)
    model.model.layers[0].mlp.act_fn = Flat()
    outputs = []
    for packed in (False, True):
        with Engine.from_model(model, stack=stack_of(pack_weights=packed)) as engine:
            outputs.append([output.token_ids for output in engine.generate(PROMPTS, params)])
            if packed:
                serving: Any = engine.model
                assert len(serving._mode.packed) == serving._mode.packed.num_products
    assert outputs[0] == outputs[1]


def test_a_compiled_model_multiplies_by_the_copies_too(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with Engine.from_pretrained(tmp_path, stack=stack_of(pack_weights=True)) as engine:
        model: Any = engine.model
        expected = [output.token_ids for output in engine.generate(PROMPTS, params)]
        num_products = []

        def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            calls = graph.graph.find_nodes(op="call_function", target=torch.ops.kvframe_transformers.multiply)
            num_products.append(len(calls))
            return lookup_backend("aot_eager")(graph, inputs)

        model.compile(counting)
        assert {model._mode.packed.num_products} == set(num_products)  # a trace may be made more than once
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
