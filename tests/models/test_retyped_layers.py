"""Layers of a real model with another attention type, by rules, checked against dense attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from kvframe_transformers.testing import save_tiny

from kvframe import Engine, SamplingParams, Stack, describe, load_plugins, make_layer_specs
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract import (
    AttentionSpec,
    BackendError,
    KVFrameError,
    ModelError,
    StackError,
    TokenRange,
)
from tests.stacks import tables_of
from tests.support.plugins import plugin

PROMPTS = [[*range(3, 60)], [5, 6, 7], [*range(3, 30), 9]]


@attrs.frozen(kw_only=True)
class Anchors(AttentionSpec):
    """Every ``every``-th token stays, and the last ``recent`` ones."""

    kind = "anchors"
    every: int
    recent: int = 4

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        start = max(0, n - self.recent)
        anchors = tuple((token, token + 1) for token in range(0, start, self.every))
        return (*anchors, (start, n)) if start < n else anchors


class TurnedHeads(TorchReferenceBackend):
    """Returns the heads in another order, in layers of the type."""

    capabilities = attrs.evolve(TorchReferenceBackend.capabilities, preference=-(10**6))

    def attend(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, **options: Any) -> Any:
        output = super().attend(layer, query, kv_cache, metadata, **options)
        return output.flip(1) if layer.spec.kind == "anchors" else output


PLUGIN = plugin("anchors_of_a_test", specs={"anchors": Anchors}, backends={"turned_heads": TurnedHeads})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny-gemma-3"
    save_tiny(path, "gemma3_text")
    return path


def stack_of(*rules: dict[str, Any], **options: Any) -> Stack:
    return Stack.from_mapping({**tables_of(memory="4MiB", block_size=4, **options), "rules": rules})


def make_engine(path: Path, *rules: dict[str, Any], **options: Any) -> Engine:
    return Engine.from_pretrained(path, stack=stack_of(*rules), plugins=[PLUGIN], **options)


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    with engine:
        outputs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8, ignore_eos=True))
    return [tuple(output.token_ids) for output in outputs]


ANCHORS = {"layers": "*.0.*", "spec": {"kind": "anchors", "every": 3}}


def kinds(engine: Engine) -> dict[str, str]:
    return {layer: group.spec.kind for group in engine.plan.groups for layer in group.layers}


def test_a_rule_gives_layers_another_type_with_options_of_its_own(model: Path) -> None:
    with make_engine(model, ANCHORS) as engine:
        kinds_by_layer = kinds(engine)
        (spec,) = {group.spec for group in engine.plan.groups if group.spec.kind == "anchors"}
    assert isinstance(spec, Anchors)
    assert (3, 4) == (spec.every, spec.recent)
    assert {"model.layers.0.self_attn"} == {name for name, kind in kinds_by_layer.items() if kind == "anchors"}


def test_a_type_that_keeps_everything_changes_no_token(model: Path) -> None:
    everything = {"layers": "*", "spec": {"kind": "anchors", "every": 1}}
    full = {"layers": "*", "spec": {"kind": "full_attention"}}
    assert tokens_of(make_engine(model, full)) == tokens_of(make_engine(model, everything))


def test_another_type_changes_tokens(model: Path) -> None:
    assert tokens_of(make_engine(model, ANCHORS)) != tokens_of(make_engine(model))


def test_rules_for_the_kind_that_a_rule_gives_are_for_these_layers(model: Path) -> None:
    with make_engine(model, ANCHORS, {"kind": "anchors", "backend": "torch_reference"}) as engine:
        backends = {choice.layer: choice.backend for choice in engine.choices}
    assert "kvframe:torch_reference" == backends.pop("model.layers.0.self_attn")
    assert "kvframe:torch_reference" not in backends.values()


def test_the_layers_of_a_model_are_described_without_weights(model: Path) -> None:
    described = describe(model / "config.json")
    assert {"sliding_window", "full_attention"} == {layer.kind for layer in described.layers}
    assert "model.layers.0.self_attn" == described.layers[0].name


# --- the self-check ---------------------------------------------------------------------------------------------------


def test_a_backend_that_computes_the_type_wrongly_is_named(model: Path) -> None:
    with pytest.raises(BackendError, match=r"turned_heads' computes layer 'model\.layers\.0\.self_attn' wrongly"):
        make_engine(model, ANCHORS, {"kind": "anchors", "backend": "turned_heads"})


def test_the_model_alone_would_not_show_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The model's own forward has another mask in this layer, so the comparison with it fails for a right backend.
    monkeypatch.setattr("kvframe_engine.diagnosis.retyped_layers", lambda *_: ())
    with pytest.raises(KVFrameError, match="gives other logits in a packed batch than alone"):
        make_engine(model, ANCHORS)


def test_a_changed_window_is_compared_with_dense_attention_too(model: Path) -> None:
    with make_engine(model, {"kind": "sliding_window", "spec": {"window": 3}}) as engine:
        windows = {group.spec.window for group in engine.plan.groups if group.spec.kind == "sliding_window"}  # type: ignore[attr-defined]
    assert {3} == windows


def test_a_model_with_its_own_types_is_compared_with_its_own_forward(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvframe_engine.diagnosis.check_densely", lambda *_: pytest.fail("compared densely"))
    make_engine(model).close()
    make_engine(model, {"layers": "*", "spec": {"block_size": 8}}).close()


def test_a_model_with_an_encoder_is_not_compared(tmp_path: Path) -> None:
    save_tiny(tmp_path / "bart", "bart")
    rule = {"layers": "*decoder*self_attn*", "spec": {"kind": "anchors", "every": 2}}
    with pytest.raises(ModelError, match=r"has an encoder and layers of other types.*self_check = false"):
        make_engine(tmp_path / "bart", rule)


# --- what a layer can be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "rule", "message"),
    [
        ("gemma3_text", {"layers": "*", "spec": {"kind": "nothing"}}, r"rules\[0\]\.spec\.kind: .*named 'nothing'"),
        ("gemma3_text", {"layers": "*", "spec": {"kind": 3}}, r"spec\.kind must be the registered name of a type"),
        ("gemma3_text", {"layers": "*", "spec": {"kind": "anchors"}}, r"the cache spec 'anchors' needs every"),
        ("gemma3_text", {"layers": "*", "spec": {"kind": "anchors", "evry": 3}}, r"no option named 'evry'"),
        ("gemma3_text", {"layers": "*", "spec": {"kind": "cross_attention"}}, r"attends to the sequence tokens, and"),
        ("gemma3_text", {"layers": "*", "spec": {"kind": "encoder_only"}}, r"keeps tokens of the past True, and"),
        (
            "gemma3_text",
            {"layers": "*", "spec": {"kind": "mla", "latent_size": 8, "rope_size": 4, "head_size_v": 8}},
            r"cannot have the type 'mla': its type stores \{'k': .*'latent'",
        ),
        ("mamba", {"layers": "*", "spec": {"kind": "anchors", "every": 3}}, r"keeps a state that the model computes"),
    ],
)
def test_a_type_that_a_layer_cannot_have_is_refused(
    family: str, rule: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path / family, family)
    registry = load_plugins(plugins=[PLUGIN]).registry
    description = describe(tmp_path / family)

    def make() -> None:
        stack = stack_of(rule)
        stack.check(registry)
        make_layer_specs(description, registry, stack, "float32")

    with pytest.raises(KVFrameError, match=message):
        make()


def test_a_rule_that_gives_a_kind_is_for_some_layer() -> None:
    stack = stack_of({"layers": "a*", "spec": {"kind": "other"}}, {"kind": "other", "backend": "x"})
    stack.check_layers("m", {"a": "full_attention"})
    with pytest.raises(StackError, match=r"rules\[1\] .* is for no layer of m"):
        stack_of({"layers": "a", "spec": {"kind": "b"}}, {"kind": "other", "backend": "x"}).check_layers(
            "m", {"a": "c"}
        )
