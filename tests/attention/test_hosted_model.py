"""A model in another serving engine: its layers' specs, the layers of each of the engine's groups, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from kvframe import HostedModel, Registry, Stack, load_plugins
from kvframe.contract import BackendError, LayerDescription, ModelDescription, SpecError, StackError

CPU = torch.device("cpu")
SIZES = {"num_kv_heads": 2, "head_size": 8, "head_size_v": 8}
QUERY = {"num_heads": 4, "head_size": 8, "scale": 0.5}
PAGES = {"k": torch.float32, "v": torch.float32}
SKIPPING = {"model": {"prefill_skipping": "decode_only"}}
SHARED = {"a": None, "b": "a"}


@pytest.fixture
def registry() -> Registry:
    return load_plugins().registry


def make(
    registry: Registry,
    stack: Mapping[str, Any] | None = None,
    owners: Mapping[str, str | None] | None = None,
    kind: str = "full_attention",
    **how: Any,
) -> HostedModel:
    """Return a model with a layer of one kind for each owner of a cache."""
    owners = {"a": None, "b": None} if owners is None else owners
    layers = tuple(
        LayerDescription(name=name, kind=kind, options=SIZES, query=QUERY, shares_with=owner)
        for name, owner in owners.items()
    )
    rules = {"rules": [{"layers": "*", "backend": "torch"}], **(stack or {})}
    given = {"stored": dict.fromkeys(owners, PAGES), **how}
    description = ModelDescription(name="made", layers=layers, max_model_len=64)
    return HostedModel(description, Stack.from_mapping(rules), registry, torch.float32, **given)


def test_layers_get_the_types_and_options_of_the_stacks_rules(registry: Registry) -> None:
    window = {"kind": "sliding_window", "window": 6, "num_sink_tokens": 3}
    model = make(registry, {"rules": [{"layers": "b", "spec": window}, {"layers": "*", "backend": "torch"}]})
    full, other = (layer.spec for layer in model.layers.values())
    assert full is not None
    assert other is not None
    assert ("full_attention", "float32") == (full.kind, full.state_tensors()["k"].dtype)
    assert ((0, 3), (15, 20)) == other.live_ranges(20)


@pytest.mark.parametrize("drafts", [{"name": "draft_model", "model": "small"}, "mtp", "ngram"])
def test_a_proposer_is_refused_because_another_host_would_not_call_it(registry: Registry, drafts: Any) -> None:
    with pytest.raises(BackendError, match="only kvframe's own engine calls proposers") as refused:
        make(registry, {"model": {"drafts": drafts}})
    assert "drafts" == refused.value.code


def test_a_group_is_served_in_the_hosts_blocks_and_may_read_a_cache_that_is_served_elsewhere(
    registry: Registry,
) -> None:
    model = make(registry, owners=SHARED)
    assert not model.skipped
    hosted = model.serve(["b"], 4, CPU)
    assert [("b", "kvframe-torch:torch")] == [(choice.layer, choice.backend) for choice in hosted.choices]
    assert ["a", "b"] == [choice.layer for choice in model.serve(["a", "b"], 8, CPU).choices]


def test_the_last_layers_that_share_a_cache_are_skipped_if_host_and_stack_agree(registry: Registry) -> None:
    assert {"b"} == make(registry, SKIPPING, SHARED, skips=True).skipped
    assert not make(registry, SKIPPING).skipped  # no layer could be skipped
    with pytest.raises(BackendError, match=r"such as .b. .* host does, and no wrapper is named in model\.prefill"):
        make(registry, None, SHARED, skips=True)
    with pytest.raises(BackendError, match="the host does not, and a wrapper is named"):
        make(registry, SKIPPING, SHARED)


@pytest.mark.parametrize(
    ("stack", "how", "held"),
    [
        ({}, {"stored": {"a": PAGES, "b": {"latent": torch.float32}}}, "'b' .* hold latent"),
        ({"cache": {"dtype": "bfloat16"}}, {}, r"'a' stores k \(bfloat16\), v \(bfloat16\), .* hold k \(float32\)"),
        ({}, {"stored": dict.fromkeys("ab", dict.fromkeys("kv", torch.float16))}, r"'a' .* hold k \(float16\)"),
        ({"cache": {"format": "int8_token_head"}}, {}, "'a' stores .*k.*, and its pages"),
    ],
)
def test_a_layer_that_stores_something_else_than_the_hosts_pages_hold_is_refused(
    registry: Registry, stack: Mapping[str, Any], how: Mapping[str, Any], held: str
) -> None:
    with pytest.raises(BackendError, match=held):
        make(registry, stack, **how)


def test_a_rule_for_no_layer_is_refused_unless_other_ranks_have_layers(registry: Registry) -> None:
    rules = {"rules": [{"layers": "c", "backend": "torch"}]}
    with pytest.raises(StackError, match="is for no layer of made"):
        make(registry, rules)
    assert ["a", "b"] == [*make(registry, rules, is_part=True).layers]


def test_a_kind_that_no_plugin_provides_is_named(registry: Registry) -> None:
    with pytest.raises(SpecError, match="needs the cache spec 'no_such', which no plugin provides"):
        make(registry, kind="no_such")
