"""From block tables to attention: storage views, step metadata, the choice of backends, attention groups."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from kvframe.attention.batch_metadata import StepBatch, build_metadata
from kvframe.attention.layers import Layers
from kvframe.attention.storage import KVCacheStorage
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.cache.manager import KVCacheManager
from kvframe.config.stack import Stack
from kvframe.contract.backend import AttentionBackend, KVCache
from kvframe.contract.capabilities import Capabilities
from kvframe.contract.capture import GraphCapture
from kvframe.contract.description import LayerDescription, ModelDescription
from kvframe.contract.errors import BackendError, PlanError, SpecError, StackError, UnknownNameError
from kvframe.contract.metadata import Axis, CommonAttentionMetadata, Extension
from kvframe.contract.specs import LayerSpec, QuerySpec
from kvframe.contract.wrapper import FieldUse, MetadataWrapper
from kvframe.loading.plugins import PluginPolicy, load_plugins
from kvframe.planning.groups import group_layers
from kvframe.planning.layer_specs import make_layer_specs
from kvframe.planning.plan import plan_cache
from kvframe.selection.choice import Choice
from kvframe.selection.select import select_backends
from tests.cache.plans import full, make_plan, ranged
from tests.support.plugins import plugin

CPU = torch.device("cpu")


@attrs.frozen(kw_only=True)
class Halve(MetadataWrapper):
    """Marks the metadata that it gets."""

    name = "halve"
    fields = dict.fromkeys(attrs.fields_dict(CommonAttentionMetadata), FieldUse.CARRY)
    extensions = MappingProxyType({"seen": FieldUse.CARRY})
    by: int = 2

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        seen = metadata.extensions["seen"].values.sum() if "seen" in metadata.extensions else torch.zeros(())
        return attrs.evolve(metadata, extensions={"seen": Extension(seen + self.by, Axis.STEP)})


class Recorder(AttentionBackend):
    """Returns the mark in its metadata."""

    capabilities = Capabilities(
        devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), masks=frozenset({"causal"}), preference=99
    )

    def attend(self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **_: Any) -> torch.Tensor:
        seen = metadata.extensions.get("seen")
        return torch.zeros_like(query) if seen is None else torch.zeros_like(query) + seen.values


RECORDING = plugin("recording_plugin", wrappers={"halve": Halve}, backends={"recorder": Recorder})
QUERY = QuerySpec(num_heads=2, head_size=4, scale=0.5)


def attending(*names: str, **query: Any) -> list[LayerSpec]:
    return [LayerSpec(name=name, spec=full(), query=attrs.evolve(QUERY, **query)) for name in names]


def test_every_page_of_every_layer_is_its_own_bytes() -> None:
    specs = [full(block_size=2, num_kv_heads=1), ranged(block_size=3, num_kv_heads=2, window=4)]
    layers = [LayerSpec(name=f"{i}{j}", spec=spec) for i, spec in enumerate(specs) for j in range(2)]
    grouping = group_layers(layers)
    plan = plan_cache(grouping, memory_bytes=20_000, max_model_len=32, max_num_batched_tokens=8)
    storage = KVCacheStorage(plan, grouping, CPU)
    assert plan.total_bytes == storage.pool.numel()
    manager = KVCacheManager(plan, max_num_seqs=1)
    manager.start("a", list(range(12)))
    assert manager.extend("a", 12)
    value = 0.0
    written = []
    for group, ids in enumerate(manager.block_ids("a")):
        for layer in plan.groups[group].layers:
            for tensor in storage.views[layer].values():
                for block_id in ids:
                    value += 1
                    tensor[block_id] = value
                    written.append((tensor, block_id, value))
    assert all(bool((tensor[block_id] == value).all()) for tensor, block_id, value in written)
    null = [tensor[0] for views in storage.views.values() for tensor in views.values()]
    assert all(bool((page == 0).all()) for page in null)


def test_pages_are_filled_for_all_layers_of_their_group_only() -> None:
    grouping = group_layers([LayerSpec(name="a", spec=full()), LayerSpec(name="b", spec=ranged(window=4))])
    plan = plan_cache(grouping, memory_bytes=20_000, max_model_len=32, max_num_batched_tokens=8)
    storage = KVCacheStorage(plan, grouping, CPU)
    manager = KVCacheManager(plan, max_num_seqs=1)
    manager.start("r", [1, 2, 3])
    assert manager.extend("r", 3)
    (first,), (second,) = manager.block_ids("r")
    storage.fill(0, [first], float("nan"))
    assert bool(storage.views["a"]["k"][first].isnan().all())
    assert not bool(storage.views["b"]["v"][second].isnan().any())


def test_memory_that_is_not_there_is_a_plan_error() -> None:
    grouping = group_layers([LayerSpec(name="a", spec=full())])
    plan = plan_cache(grouping, memory_bytes=20_000, max_model_len=32, max_num_batched_tokens=8)
    with pytest.raises(PlanError, match=r"cpu has no \d+ bytes to give the cache; ask for less memory"):
        KVCacheStorage(attrs.evolve(plan, num_slabs=2**50), grouping, CPU)


def test_a_layer_that_shares_a_cache_sees_the_same_tensors() -> None:
    grouping = group_layers([LayerSpec(name="a", spec=full()), LayerSpec(name="b", spec=full(), shares_with="a")])
    plan = plan_cache(grouping, memory_bytes=20_000, max_model_len=32, max_num_batched_tokens=8)
    storage = KVCacheStorage(plan, grouping, CPU)
    assert storage.views["b"] is storage.views["a"]


def test_step_metadata_says_where_each_token_goes() -> None:
    plan = make_plan(full(block_size=4), max_model_len=32)
    manager = KVCacheManager(plan, max_num_seqs=2)
    manager.start("a", list(range(10)))
    manager.start("b", list(range(20, 26)))
    assert manager.extend("a", 6)
    assert manager.extend("b", 5)
    a, b = (manager.block_ids(name)[0] for name in "ab")
    batch = StepBatch(
        rows=np.array([manager.row("b"), manager.row("a")]),
        num_computed=np.array([0, 5]),
        query_lens=np.array([5, 1]),
        generating_indices=np.array([5]),
    )
    (metadata,) = build_metadata(batch, manager.tables, CPU)
    assert metadata.query_start_loc.tolist() == [0, 5, 6]
    assert metadata.seq_lens.tolist() == [5, 6]
    assert metadata.block_table.tolist() == [b, a]
    assert metadata.slot_mapping.tolist() == [*range(4 * b[0], 4 * b[0] + 4), 4 * b[1], 4 * a[1] + 1]
    assert (metadata.num_reqs, metadata.num_actual_tokens, metadata.max_query_len, metadata.max_seq_len) == (2, 6, 5, 6)
    assert metadata.generating_indices.tolist() == [5]


def test_a_core_without_another_backend_says_what_to_install(caplog: pytest.LogCaptureFixture) -> None:
    others = tuple(record.name for record in load_plugins().records if record.name != "builtin")
    bare = load_plugins(PluginPolicy(disabled=others)).registry
    named = Stack.from_mapping({"rules": [{"layers": "*", "backend": "torch_reference"}]})
    select_backends(attending("a"), named, bare, "cpu")
    select_backends(attending("a"), Stack(), load_plugins().registry, "cpu")
    assert [] == caplog.messages
    select_backends(attending("a"), Stack(), bare, "cpu")
    (message,) = caplog.messages
    assert "plugins/torch` adds one for serving models" in message


def test_auto_takes_the_highest_preference_and_says_why_not_the_others() -> None:
    host = load_plugins(plugins=[RECORDING])
    (choice,) = select_backends(attending("a"), Stack(), host.registry, "cpu")
    assert choice.backend.endswith(":recorder")
    reasons = {candidate.name: choice.why_not(candidate) for candidate in choice.candidates if not candidate.refusals}
    assert reasons[choice.backend] == ""
    assert {"kvframe-torch:torch", "kvframe:torch_reference"} < set(reasons)
    assert all("is preferred" in reason for name, reason in reasons.items() if name != choice.backend)
    (choice,) = select_backends(attending("a", soft_cap=30.0), Stack(), host.registry, "cpu")
    assert not choice.backend.endswith(":recorder")
    reasons = {candidate.name: choice.why_not(candidate) for candidate in choice.candidates}
    assert "does not cap scores" in next(reason for name, reason in reasons.items() if name.endswith(":recorder"))


def test_a_backend_is_asked_once_whether_it_can_run_here_however_many_layers_there_are() -> None:
    asked = []

    class Asked(Recorder):
        """Cannot run here."""

        @classmethod
        def unusable_reason(cls) -> str:
            asked.append(cls)
            return "there is no such device"

    registry = load_plugins(plugins=[plugin("asked_plugin", backends={"asked": Asked})]).registry
    choices = select_backends(attending("a", "b", "c"), Stack(), registry, "cpu")
    assert [Asked] == asked
    for choice in choices:
        (candidate,) = (candidate for candidate in choice.candidates if candidate.name.endswith(":asked"))
        assert "there is no such device" in choice.why_not(candidate)


class Captured(Recorder):
    """Says that decodes can be captured, and is preferred less."""

    capabilities = attrs.evolve(Recorder.capabilities, preference=98, capture=GraphCapture.DECODE)


def test_auto_takes_a_backend_that_can_be_captured_if_the_stack_names_sizes_of_graphs() -> None:
    mine = plugin("mine", backends={"captured": Captured})
    registry = load_plugins(plugins=[RECORDING, mine]).registry

    def chosen(graphs: Any, **rule: Any) -> Choice:
        stack = Stack.from_mapping({"model": {"graphs": graphs}, "rules": [{"layers": "*", **rule}]})
        return select_backends(attending("a"), stack, registry, "cpu")[0]

    for graphs in ("off", "auto"):
        assert chosen(graphs).backend.endswith(":recorder")
    choice = chosen([4])
    assert choice.backend.endswith(":captured")
    reasons = {candidate.name: choice.why_not(candidate) for candidate in choice.candidates}
    expected = (
        "can serve this layer; the stack names sizes of graphs, and its steps cannot be captured, as those of "
        f"{choice.backend} can"
    )
    assert {expected} == {reasons[name] for name in reasons if name.endswith((":recorder", ":torch_reference"))}
    # Graphs are no reason if the chosen backend cannot be captured either.
    alike = [attrs.evolve(each, in_graphs=False) for each in choice.candidates]
    none_captured = attrs.evolve(choice, candidates=tuple(alike))
    assert not [each.name for each in alike if "graphs" in none_captured.why_not(each)]
    # A chain that cannot be captured leaves nothing to choose by.
    assert chosen([4], wrappers=["halve"]).backend.endswith(":recorder")
    assert chosen([4], backend="recorder").backend.endswith(":recorder")


def test_a_named_backend_is_taken_or_refused_never_replaced() -> None:
    host = load_plugins(plugins=[RECORDING])
    stack = Stack.from_mapping({"rules": [{"layers": "*", "backend": "recorder"}]})
    with pytest.raises(BackendError, match=r"gives layer 'a' to backend 'recorder', which cannot serve it: .*cap"):
        select_backends(attending("a", soft_cap=30.0), stack, host.registry, "cpu")


def test_no_backend_for_a_device_is_one_sentence_with_every_reason() -> None:
    with pytest.raises(BackendError, match=r"no backend can serve layer 'a': .*runs on .*, not on tpu"):
        select_backends(attending("a"), Stack(), load_plugins().registry, "tpu")


class CompilesToFindOut(Recorder):
    @classmethod
    def unusable_reason(cls) -> str | None:
        raise AssertionError("asked about a device that it does not declare")


def test_a_backend_for_another_device_is_not_asked_whether_it_could_run() -> None:
    host = load_plugins(plugins=[plugin("compiling", backends={"compiles": CompilesToFindOut})])
    stack = Stack.from_mapping({"rules": [{"layers": "*", "backend": "compiles"}]})
    with pytest.raises(BackendError, match=r"cannot serve it: .*:compiles: runs on cpu, not on cuda$"):
        select_backends(attending("a", soft_cap=30.0), stack, host.registry, "cuda")


def test_a_wrappers_wrong_option_names_its_options() -> None:
    host = load_plugins(plugins=[RECORDING])
    stack = Stack.from_mapping({"rules": [{"layers": "*", "wrappers": [{"name": "halve", "bye": 3}]}]})
    with pytest.raises(StackError, match=r"wrapper 'halve': .*its options: by"):
        select_backends(attending("a"), stack, host.registry, "cpu")


def run_layers(layers: Sequence[LayerSpec], stack: Stack) -> tuple[Layers, KVCacheStorage]:
    host = load_plugins(plugins=[RECORDING])
    grouping = group_layers(layers)
    plan = plan_cache(grouping, memory_bytes=20_000, max_model_len=32, max_num_batched_tokens=8)
    storage = KVCacheStorage(plan, grouping, CPU)
    manager = KVCacheManager(plan, max_num_seqs=1)
    manager.start("r", [1, 2, 3])
    assert manager.extend("r", 3)
    attention = Layers(layers, select_backends(layers, stack, host.registry, "cpu"), grouping, storage.views, CPU)
    batch = StepBatch(
        rows=np.array([0]), num_computed=np.array([0]), query_lens=np.array([3]), generating_indices=np.array([2])
    )
    attention.begin_step(build_metadata(batch, manager.tables, CPU))
    return attention, storage


def test_layers_with_the_same_chain_and_backend_form_one_attention_group() -> None:
    stack = Stack.from_mapping({"rules": [{"layers": "wrapped*", "wrappers": ["halve", {"name": "halve", "by": 3}]}]})
    layers = attending("a", "wrapped1", "b", "wrapped2")
    attention, _ = run_layers(layers, stack)
    assert [("a", "b"), ("wrapped1", "wrapped2")] == [
        tuple(layer.name for layer in group.layers) for group in attention.groups
    ]
    query, kv = torch.zeros(3, 2, 4), torch.ones(3, 1, 4)
    assert bool((attention["a"](query, kv, kv) == 0).all())
    assert bool((attention["wrapped2"](query, kv, kv) == 5).all())


def test_a_sharing_layer_reads_and_does_not_write() -> None:
    layers = attending("a")
    layers.append(attrs.evolve(layers[0], name="b", shares_with="a"))
    attention, storage = run_layers(layers, Stack())
    query, kv = torch.zeros(3, 2, 4), torch.ones(3, 1, 4)
    attention["a"](query, kv, kv)
    before = storage.pool.clone()
    attention["b"](query, kv * 7, kv * 7)
    assert bool((before == storage.pool).all())
    assert before.view(torch.float32).sum().item() == 3 * 4 * 2


def description(kind: str, **options: Any) -> ModelDescription:
    layer = LayerDescription(
        name="layer.0",
        kind=kind,
        options={"num_kv_heads": 1, "head_size": 4, **options},
        query={"num_heads": 2, "head_size": 4, "scale": 0.5},
    )
    return ModelDescription(name="model", layers=(layer,), max_model_len=32)


def test_layer_specs_take_the_stacks_block_size_dtype_and_rules() -> None:
    registry = load_plugins().registry
    stack = Stack.from_mapping({"cache": {"block_size": 8}, "rules": [{"layers": "*", "spec": {"block_size": 32}}]})
    (layer,) = make_layer_specs(description("full_attention"), registry, stack, "bfloat16")
    assert full(block_size=32) == attrs.evolve(layer.spec, dtype="float32")  # type: ignore[type-var]
    assert layer.query == QUERY


def test_a_kind_that_no_plugin_provides_says_what_to_install() -> None:
    with pytest.raises(
        SpecError, match=r"'layer.0' needs the cache spec 'dilated', .* install a plugin that registers it"
    ):
        make_layer_specs(description("dilated"), load_plugins().registry, Stack(), "float32")


def test_a_kind_whose_plugin_is_disabled_says_so() -> None:
    stack = Stack.from_mapping({"plugins": {"disabled": ["chunked_local"]}})
    with pytest.raises(SpecError, match=r"plugins set aside: kvframe-chunked-local:chunked_local \(disabled"):
        make_layer_specs(description("chunked_local", chunk=4), load_plugins(stack.plugins).registry, stack, "float32")


@attrs.frozen(kw_only=True)
class EvenSpec(FullAttentionSpec):
    kind = "even"

    width: int = attrs.field(validator=attrs.validators.ge(2))


def test_a_value_that_a_specs_own_validator_refuses_is_the_layers_mistake() -> None:
    registry = load_plugins(plugins=[plugin("mine", specs={"even": EvenSpec})]).registry
    with pytest.raises(SpecError, match=r"layer 'layer.0' \(even\): .*: 'width' must be >= 2: 1"):
        make_layer_specs(description("even", width=1), registry, Stack(), "float32")


def test_an_option_that_a_spec_does_not_have_names_those_it_has() -> None:
    with pytest.raises(SpecError, match="there is no option named 'windwo'; known: block_size, dtype"):
        make_layer_specs(description("full_attention", windwo=3), load_plugins().registry, Stack(), "float32")


def test_an_unknown_backend_names_the_nearest() -> None:
    stack = Stack.from_mapping({"rules": [{"layers": "*", "backend": "torhc"}]})
    with pytest.raises(UnknownNameError, match="did you mean 'torch'"):
        select_backends(attending("a"), stack, load_plugins().registry, "cpu")
