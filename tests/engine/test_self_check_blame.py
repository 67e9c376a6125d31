"""If a model fails its self-check, the error names the wrong part: the backend, the wrapper or the model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from kvframe_engine.diagnosis import _to_check
from kvframe_mla.backend import MLABackend

from kvframe import Engine, Setup, Stack
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract.backend import KVCache
from kvframe.contract.errors import BackendError, ModelError, WrapperError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import FieldUse, MetadataWrapper
from kvframe.loading.plugins import load_plugins
from tests.models.serving import TinyModel
from tests.support.commands import run
from tests.support.plugins import plugin

LAYERS = [f"model.layers.{index}.self_attn" for index in range(3)]


class IgnoresWindow(TorchReferenceBackend):
    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **named: Any
    ) -> torch.Tensor:
        assert layer.spec is not None
        full = attrs.evolve(layer, spec=layer.spec.retain_all())
        return super().attend(full, query, kv_cache, metadata, **named)


class WrongHeads(TorchReferenceBackend):
    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **named: Any
    ) -> torch.Tensor:
        return super().attend(layer, query.flip(1), kv_cache, metadata, **named).flip(1)


class WrongAtLayerOne(TorchReferenceBackend):
    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **named: Any
    ) -> torch.Tensor:
        output = super().attend(layer, query, kv_cache, metadata, **named)
        return output.roll(1, 2) if layer.name == LAYERS[1] else output


@attrs.frozen(kw_only=True)
class ForgetsBlocks(MetadataWrapper):
    """Replaces every block by the null page."""

    name: ClassVar[str] = "forgetful"
    fields: ClassVar[Mapping[str, FieldUse]] = {
        field.name: FieldUse.RESET for field in attrs.fields(CommonAttentionMetadata) if field.name != "extensions"
    }

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return attrs.evolve(metadata, block_table=torch.zeros_like(metadata.block_table))


class WrongLatents(MLABackend):
    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **named: Any
    ) -> torch.Tensor:
        return super().attend(layer, query, kv_cache, metadata, **named).flip(1)


BACKENDS = {"ignores_window": IgnoresWindow, "wrong_heads": WrongHeads, "wrong_at_layer_one": WrongAtLayerOne}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return with_wrong_plugins(TinyModel.save(tmp_path_factory.mktemp("blame"), "gemma3_text"))


def with_wrong_plugins(model: TinyModel) -> TinyModel:
    mine = plugin("mine", backends=BACKENDS, wrappers={"forgetful": ForgetsBlocks})
    return attrs.evolve(model, registry=load_plugins(plugins=[mine]).registry)


def engine_of(tiny: TinyModel, *rules: dict[str, Any], **tables: Any) -> Engine:
    stack = Stack.from_mapping({"cache": {"memory": "4MiB"}, "rules": list(rules), **tables})
    return Engine(
        tiny.loaded,
        Setup.of(tiny.loaded.description, stack, tiny.registry, dtype="float32"),
    )


def first_windowed(model: TinyModel) -> str:
    return next(layer.name for layer in model.loaded.description.layers if layer.options.get("window"))


@pytest.mark.parametrize("backend", ["ignores_window", "wrong_heads", "wrong_at_layer_one"])
def test_a_wrong_backend_is_named_with_the_layer_and_the_kit(model: TinyModel, backend: str) -> None:
    layer = {"ignores_window": first_windowed(model), "wrong_heads": LAYERS[0], "wrong_at_layer_one": LAYERS[1]}[
        backend
    ]
    with pytest.raises(BackendError) as refused:
        engine_of(model, {"layers": "*", "backend": backend})
    error = str(refused.value)
    assert f"{backend}' computes layer '{layer}' wrongly: " in error
    assert "its masks do not show" not in error
    assert "wrong_output" == refused.value.code
    assert error.endswith(f"check it: test '{backend}' by a class of kvframe_testing.suites")
    assert refused.value.__suppress_context__


MODULE = """
from kvframe.contract import hookimpl
from tests.engine.test_self_check_blame import WrongHeads

@hookimpl
def kvframe_register_backends(register):
    register("heads_of_a_file", WrongHeads)
"""


def test_the_command_that_the_error_gives_runs_the_kit(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_plugin.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("wrong_plugin")
    model = attrs.evolve(model, registry=load_plugins(plugins=[mine]).registry)
    with pytest.raises(BackendError) as refused:
        engine_of(model, {"layers": "*", "backend": "heads_of_a_file"})
    *_, command = str(refused.value).strip("`").split("check it: `")
    assert f"kvframe check {tmp_path / 'wrong_plugin.py'} --kind backend" == command
    result = run(*command.split()[1:], "--only", "full-block=16-decode")
    assert (1, True) == (result.exit_code, "heads_of_a_file" in result.stdout), result.output


def test_what_is_packaged_is_checked_by_its_name() -> None:
    registry = load_plugins().registry
    assert "`kvframe check torch --kind backend`" == _to_check(registry, "backend", "kvframe-torch:torch")
    assert "`kvframe check chunked_local --kind wrapper`" == _to_check(registry, "wrapper", "chunked_local")


def test_a_wrong_backend_of_some_layers_is_found_among_right_ones(model: TinyModel) -> None:
    rules = [{"layers": "*", "backend": "torch"}, {"layers": LAYERS[2], "backend": "wrong_heads"}]
    with pytest.raises(BackendError, match=rf"wrong_heads' computes layer '{LAYERS[2]}' wrongly"):
        engine_of(model, *rules)


def test_a_wrong_wrapper_is_named_with_the_layer(model: TinyModel) -> None:
    rules = [{"layers": LAYERS[1], "wrappers": ["forgetful"]}]
    with pytest.raises(WrapperError, match=rf"\['forgetful'\] change what layer '{LAYERS[1]}' computes") as refused:
        engine_of(model, *rules)
    assert "wrong_output" == refused.value.code


def test_a_model_that_is_misread_is_blamed_itself(model: TinyModel) -> None:
    loaded, description = model.loaded, model.loaded.description
    misread = [
        attrs.evolve(layer, options={**layer.options, "window": 3}) if layer.options.get("window") else layer
        for layer in description.layers
    ]
    loaded.description = attrs.evolve(description, layers=tuple(misread))
    try:
        with pytest.raises(ModelError, match="it attends in a way that its masks do not show"):
            engine_of(model, {"layers": "*", "backend": "torch"})
    finally:
        loaded.description = description


def test_a_model_that_is_wrong_only_when_it_is_compiled_is_to_be_left_uncompiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def miscompile(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return lambda *given: [2 * each if each.is_floating_point() else each for each in graph(*given)]

    model = TinyModel.save(tmp_path, "llama", num_hidden_layers=1)
    monkeypatch.setattr(model.loaded, "compile", partial(model.loaded.compile, miscompile))
    with pytest.raises(ModelError) as refused:
        engine_of(model, model={"compile": True})
    name = model.loaded.description.name
    expected = f"{name} passes its self-check only if it is not compiled: leave compile out of the stack"
    assert expected == str(refused.value)
    engine_of(model).close()


def test_a_backend_that_the_reference_cannot_stand_for_is_named_beside_the_model(tmp_path: Path) -> None:
    model = TinyModel.save(tmp_path, "minicpm3")
    mine = plugin("mine", backends={"wrong_latents": WrongLatents})
    model = attrs.evolve(model, registry=load_plugins(plugins=[mine]).registry)
    with pytest.raises(ModelError) as refused:
        engine_of(model, {"layers": "*", "backend": "wrong_latents"})
    own, others = str(refused.value).split(". The fault may also be that of ")
    assert "it attends in a way that its masks do not show" in own
    assert others.startswith(
        f"backend 'mine:wrong_latents', of layer '{LAYERS[0]}': it could not be compared with 'kvframe:torch_reference'"
        ", which reads the state tensors k, v, not latent; check it: test 'wrong_latents' by a class"
    )


def test_the_model_has_its_own_attention_again_after_all_of_this(model: TinyModel) -> None:
    with pytest.raises(BackendError):
        engine_of(model, {"layers": "*", "backend": "wrong_heads"})
    engine_of(model, {"layers": "*", "backend": "torch"}).close()
