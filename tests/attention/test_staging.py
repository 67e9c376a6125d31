"""The copy of a step's metadata to the device: one copy for all metadata, and the host never waits.

The device is torch's ``meta``, which holds no bytes: any read of a value raises, and every copy to it can be counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
import torch
from kvframe_chunked_local import ChunkedLocalSpec
from kvframe_cross_attention import CrossAttentionSpec
from kvframe_engine.running.model_runner import ModelRunner
from kvframe_kv_formats import Fp8TokenHead
from kvframe_testing.laws import ConformanceError
from kvframe_testing.staging import META, CopyCounter, check_staging
from kvframe_torch.backend import TorchBackend
from kvframe_triton.backend import TritonBackend

from kvframe.attention.batch_metadata import StepBatch
from kvframe.attention.layers import Layers
from kvframe.attention.nested import host_tensors, replace_tensors
from kvframe.attention.staging import ALIGNMENT, HOST, StagedMemory, Staging
from kvframe.attention.storage import KVCacheStorage, LocalCaches
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.config.stack import Stack
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder
from kvframe.contract.capture import GraphCapture, NotReplayableError
from kvframe.contract.description import ModelDescription
from kvframe.contract.formats import PLAIN, KVFormat
from kvframe.contract.metadata import RANGE_ENDS, Axis, CommonAttentionMetadata, Extension
from kvframe.contract.model import LoadedModel, ModelInput
from kvframe.contract.specs import LayerSpec
from kvframe.loading.plugins import load_plugins
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import plan_cache
from kvframe.selection.select import select_backends
from kvframe.selection.skipping import Skipping, find_skippable_layers
from tests.attention.attending import full, layer, local
from tests.attention.capturable import CapturableReference
from tests.attention.test_states import states
from tests.attention.test_steps import Decodes, ShortOnes
from tests.covering import keep
from tests.support.layers import share_caches
from tests.support.plugins import plugin


class OnHost(CapturableReference):
    """Builds on the host the metadata that its layers read on the device."""

    def make_builder(self) -> AttentionMetadataBuilder:
        class Builder(AttentionMetadataBuilder):
            on_host = frozenset({"seq_lens", "block_table"})
            table_fields = frozenset({"block_table"})

            def build(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
                assert {HOST} == {metadata.block_table.device, metadata.slot_mapping.device}
                return attrs.evolve(metadata, **self.refreshed_fields(metadata, metadata))

            def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
                return {"block_table": metadata.block_table.flip(1).flip(1)}

        return Builder()

    def attend(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, **_: Any) -> torch.Tensor:
        assert {META} == {metadata.block_table.device, metadata.seq_lens.device}
        return query.new_empty(query.shape)  # type: ignore[no-any-return]


class CopiesItself(TorchReferenceBackend):
    """Copies an index to the device by itself."""

    def make_builder(self) -> AttentionMetadataBuilder:
        class Builder(AttentionMetadataBuilder):
            def build(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
                last = metadata.query_start_loc_cpu[1:] - 1
                last.to(metadata.slot_mapping.device, non_blocking=True)
                return metadata

        return Builder()


class Triton(TritonBackend):
    """Plans steps as for a CUDA device, and computes nothing."""

    capabilities = attrs.evolve(TritonBackend.capabilities, devices=frozenset({"cpu"}))
    write_kv = AttentionBackend.write_kv

    @classmethod
    def unusable_reason(cls) -> str | None:
        return None

    def attend(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, **_: Any) -> torch.Tensor:
        assert {META} == {metadata.block_table.device, metadata.numbers.device}
        return query.new_empty(query.shape)  # type: ignore[no-any-return]


def every_kind_of_layer() -> tuple[LayerSpec, ...]:
    """Return layers of five cache groups, and three layers at the model's end that read another layer's cache."""
    chunks = ChunkedLocalSpec(block_size=4, num_kv_heads=1, head_size=4, chunk=6)
    cross = CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=4)
    layers = [
        *(layer("full", full()), layer("window", local()), layer("chunks", chunks), layer("cross", cross)),
        *(states("state"), layer("shares full", full()), layer("shares window", local())),
        layer("shares chunks", chunks),
    ]
    return share_caches(layers, {f"shares {name}": name for name in ("full", "window", "chunks")})


class Decoder(LoadedModel):
    """Calls its layers on tensors without bytes."""

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self.specs = layers
        self.num_new_inputs = 0
        self.description = ModelDescription(
            name="decoder", layers=(), max_model_len=64, vocab_size=8, max_input_lens={"encoder": 16}
        )

    def attach(self, layers: Layers) -> None:
        self.layers = layers

    def detach(self) -> None:
        """There is nothing to restore."""

    def self_check(self, run_packed: Any) -> None:
        """There is nothing to compare."""

    def compute_inputs(self, inputs: Any) -> None:
        self.num_new_inputs = sum(each.num_tokens for each in inputs.get("encoder", ()))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        assert {META} == {input_ids.device, positions.device, logits_indices.device}
        kept = self.layers.kept_rows
        for spec in self.specs:
            if spec.query is None:
                continue
            rows = len(positions) if kept is None or spec.name not in self.layers.skipped else len(kept)
            stored = self.num_new_inputs if spec.name == "cross" else rows
            query, key = torch.empty(rows, 2, 4, device=META), torch.empty(stored, 1, 4, device=META)
            output = self.layers[spec.name](query, key, key)
            assert (rows, 2, 4) == output.shape
        for state in self.layers.states.values():
            for part in state.step.rounds:
                part.write(state.pages, part.read(state.pages))
        return torch.empty(len(logits_indices) if kept is None else len(kept), 8, device=META)


def copies_of_a_step(
    backend: str, requests: Sequence[tuple[int, int]], kv_format: KVFormat = PLAIN, **options: Any
) -> list[str]:
    """Return the copies of a step of requests with so many computed and new tokens."""
    kinds = ("full_attention", "local", "chunked_local", "cross_attention")
    rules = [{"kind": kind, "backend": backend} for kind in kinds]
    stack = Stack.from_mapping({"model": {"prefill_skipping": "decode_only"}, "rules": rules})
    layers = tuple(
        attrs.evolve(each, spec=each.spec.in_format(kv_format)) if each.query is not None and each.spec else each
        for each in every_kind_of_layer()
    )
    grouping = group_layers(layers)
    plan = plan_cache(
        grouping, memory_bytes=400_000, max_model_len=64, max_num_batched_tokens=64, max_input_lens={"encoder": 16}
    )
    views = KVCacheStorage(plan, grouping, META).views
    skipped = find_skippable_layers(layers)
    assert 3 == len(skipped)
    ordered = plugin(
        "mine",
        backends={
            "decodes": Decodes,
            "short_ones": ShortOnes,
            "on_host": OnHost,
            "triton_here": Triton,
            "copies_itself": CopiesItself,
        },
    )
    choices = select_backends(
        layers, stack, load_plugins(stack.plugins, [ordered]).registry, "cpu", Skipping(tuple(skipped))
    )
    scratch = LocalCaches(layers, META, max_tokens=64, max_reqs=8)
    attention = Layers(layers, choices, grouping, views, META, skipped, scratch)
    assert 5 == len(grouping.groups)
    manager = KVCacheManager(plan, max_num_seqs=8, prefix_caching=False)
    model = Decoder(layers)
    model.attach(attention)
    runner = ModelRunner(model, attention, manager.tables, META, max_num_seqs=8, max_model_len=64)
    encoded = ModelInput(num_tokens=5, key=b"", data=None)
    for index, (num_computed, num_new) in enumerate(requests):
        manager.start(str(index), [0] * 64, inputs={"encoder": InputSequence(5, b"%d" % index)})
        assert manager.extend(str(index), num_computed + num_new)
        runner.set_row(manager.row(str(index)), [1] * (num_computed + num_new), {"encoder": encoded})
    computed, new = (np.array(each) for each in zip(*requests, strict=True))
    rows = np.array([manager.row(str(index)) for index in range(len(requests))])
    fresh = {int(row): encoded for row in rows[computed == 0]}
    with CopyCounter() as copies:
        batch = StepBatch(
            rows=rows, num_computed=computed, query_lens=new, generating_indices=np.cumsum(new) - 1, **options
        )
        logits = runner.forward(batch, {"encoder": fresh} if fresh else {})
    assert (len(requests), 8) == logits.shape
    found: list[str] = copies.names
    return found


DECODES = [(5, 1), (13, 1), (4, 1)]
MIXED = [(9, 1), (0, 7), (5, 3), (13, 1), (0, 2)]


@pytest.mark.parametrize("requests", [DECODES, MIXED])
@pytest.mark.parametrize("backend", ["torch", "torch_reference", "decodes", "short_ones", "on_host", "triton_here"])
def test_a_step_is_one_copy_for_all_groups_chains_and_orders(backend: str, requests: list[tuple[int, int]]) -> None:
    assert 1 == len(copies_of_a_step(backend, requests))


@pytest.mark.parametrize("requests", keep([DECODES, MIXED], MIXED))
@pytest.mark.parametrize("backend", ["torch", "torch_reference", "on_host", "triton_here"])
def test_what_is_copied_from_pages_of_another_format_is_in_that_one_copy(
    backend: str, requests: list[tuple[int, int]]
) -> None:
    assert 1 == len(copies_of_a_step(backend, requests, Fp8TokenHead()))


@pytest.mark.parametrize("requests", [DECODES, MIXED])
def test_a_builder_that_copies_by_itself_makes_nobody_wait(requests: list[tuple[int, int]]) -> None:
    assert 1 < len(copies_of_a_step("copies_itself", requests))


def test_extensions_with_a_host_copy_go_along() -> None:
    host = torch.zeros(sum(num_new for _, num_new in MIXED), dtype=torch.int32)
    extensions = {RANGE_ENDS: Extension(host.to(META), Axis.TOKEN, host)}
    assert 1 == len(copies_of_a_step("torch_reference", MIXED, extensions=extensions))


def test_what_asks_the_device_for_a_value_is_seen() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device=META)[0].item()


# --- the same check for any backend, as plugins run it ----------------------------------------------------------------


def test_the_torch_backend_needs_one_copy_for_layers_of_all_kinds() -> None:
    check_staging(TorchBackend)


class AsksTheDevice(TorchBackend):
    def attend(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, **named: Any) -> torch.Tensor:
        output = super().attend(layer, query, kv_cache, metadata, **named)
        return output if output.isfinite().all() else torch.zeros_like(output)


class IsTooShort(TorchBackend):
    def attend(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, **named: Any) -> torch.Tensor:
        return super().attend(layer, query, kv_cache, metadata, **named)[1:]


class CountsSteps(OnHost):
    """Has a number in its metadata that differs between steps, which a graph cannot read."""

    capabilities = attrs.evolve(OnHost.capabilities, returns_lse=False, capture=GraphCapture.ALWAYS)

    def make_builder(self) -> AttentionMetadataBuilder:
        @attrs.frozen(eq=False)
        class Counted:
            number: int

        class Builder(AttentionMetadataBuilder):
            capture = GraphCapture.ALWAYS
            on_host = frozenset({"seq_lens", "block_table"})
            number = 0

            def build(self, metadata: CommonAttentionMetadata) -> Counted:
                self.number += 1
                return Counted(self.number)

        return Builder()

    def attend(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, **_: Any) -> torch.Tensor:
        return query.new_empty(*query.shape[:2], kv_cache["v"].shape[-1])  # type: ignore[no-any-return]


class DeclaresNoCapture(CountsSteps):
    """Has a builder that can be captured, which its capabilities do not say."""

    capabilities = attrs.evolve(CountsSteps.capabilities, capture=GraphCapture.NEVER)


class ReadsUndeclared(OnHost):
    """Reads the block table on the host, and declares the lengths only."""

    def make_builder(self) -> AttentionMetadataBuilder:
        class Builder(AttentionMetadataBuilder):
            on_host = frozenset({"seq_lens"})

            def build(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
                return attrs.evolve(metadata, block_table=self.read(metadata))

            def read(self, metadata: CommonAttentionMetadata) -> torch.Tensor:
                return torch.tensor(metadata.block_table.tolist())

        return Builder()


class MixesUndeclared(ReadsUndeclared):
    """Chooses rows of the block table by an index on the host."""

    def make_builder(self) -> AttentionMetadataBuilder:
        class Builder(type(super().make_builder())):  # type: ignore[misc]
            def read(self, metadata: CommonAttentionMetadata) -> torch.Tensor:
                return metadata.block_table.index_select(0, torch.arange(metadata.num_reqs))

        return Builder()


class ServesNothing(TorchBackend):
    capabilities = attrs.evolve(TorchBackend.capabilities, masks=frozenset({"window"}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (CopiesItself, "CopiesItself on decodes, stored as plain, makes [0-9]+ copies to the device: aten._to_copy"),
        (AsksTheDevice, "AsksTheDevice on decodes, stored as plain, asks the device for a value"),
        (
            IsTooShort,
            r"layers.0: the output is \(2, 4, 8\), torch.float32, meta, not \(3, 4, 8\)",
        ),
        (CountsSteps, "CountsSteps on decodes of a graph, stored as plain, differs from what was captured: .*number"),
        (
            DeclaresNoCapture,
            r"DeclaresNoCapture declares capture = GraphCapture.NEVER in its capabilities, and its builder declares "
            "GraphCapture.ALWAYS: declare the builder's in both",
        ),
        (ReadsUndeclared, r"reads other fields on the host than on_host = \['seq_lens'\]"),
        (MixesUndeclared, r"reads other fields on the host .*: aten.index_select.* mixes tensors"),
        (ServesNothing, "ServesNothing serves no layer of the kit"),
    ],
)
def test_what_is_wrong_with_a_backend_is_said(wrong: type[AttentionBackend], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_staging(wrong)


# --- values that hold tensors -----------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Value:
    there: torch.Tensor
    here_cpu: torch.Tensor
    count: int = 3


class Pair(NamedTuple):
    first: Any
    second: Any


def test_tensors_go_over_wherever_they_lie_but_for_host_copies() -> None:
    one, other = torch.arange(5), torch.ones(2, 3, dtype=torch.float16)
    value = Value(one, one)
    given = {"values": [value, value], "pair": Pair(other, None), "text": ("a", 1)}
    found = Staging(META).to_device(given)
    assert isinstance(found["pair"], Pair)
    assert META == found["pair"].first.device
    assert (torch.Size([2, 3]), torch.float16) == (found["pair"].first.shape, found["pair"].first.dtype)
    first, second = found["values"]
    assert first is second, "what was one value is one still"
    assert META == first.there.device
    assert first.here_cpu is one
    assert found["text"] is given["text"]


@attrs.frozen(eq=False)
class Size:
    num_rows: int
    names: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class Sized:
    size: Size
    limits: Mapping[str, int]
    parent: Sized | None
    hidden: Any


def test_fields_that_are_declared_to_be_numbers_are_not_looked_into() -> None:
    one, other = torch.arange(5), torch.arange(3)
    lies = Size(num_rows=one)  # type: ignore[arg-type]
    inner = Sized(lies, {"most": one}, None, other)  # type: ignore[dict-item]
    assert [other] == host_tensors(Sized(Size(3), {"most": 4}, inner, None))
    found = replace_tensors(inner, lambda tensor: tensor.float())
    assert (lies, torch.float32) == (found.size, found.hidden.dtype)


def test_on_the_host_nothing_is_copied() -> None:
    value = Value(torch.arange(5), torch.arange(5))
    assert Staging(HOST).to_device(value) is value


def test_memory_that_is_kept_holds_each_steps_values_in_the_same_place() -> None:
    def step(start: int) -> tuple[Any, ...]:
        whole = torch.arange(start, start + 24, dtype=torch.int32).view(4, 6)
        return (whole[:, ::2], torch.tensor(start * 0.5), Value(torch.arange(start, start + 3), whole), whole[1])

    staging, memory = Staging(HOST), StagedMemory.of(step(0), HOST)
    first = staging.to_device(step(0), memory)
    second = staging.to_device(step(100), memory)
    expected = step(100)
    for place in (0, 1, 3):
        assert first[place] is second[place]
        assert torch.equal(expected[place], second[place])
        assert 0 == second[place].data_ptr() % ALIGNMENT - memory.memory.data_ptr() % ALIGNMENT
    assert torch.equal(expected[2].there, second[2].there)
    with pytest.raises(NotReplayableError, match="laid out"):
        staging.to_device((torch.arange(3),), memory)


def test_a_value_is_rebuilt_without_its_constructor() -> None:
    @attrs.frozen
    class Checked:
        tensor: torch.Tensor

        def __attrs_post_init__(self) -> None:
            assert self.tensor.dtype == torch.int64

    found = replace_tensors(Checked(torch.arange(3)), lambda tensor: tensor.float())
    assert torch.float32 == found.tensor.dtype
