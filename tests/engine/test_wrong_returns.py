"""A wrong return value of a backend, a builder, a model adapter or a state mixer is reported by the plugin's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import pytest
import torch

from kvframe.attention.copies import CopyingBackend, CopyScratch
from kvframe.attention.staging import HOST
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.config.stack import Stack
from kvframe.contract.backend import AttentionMetadataBuilder, KVCache
from kvframe.contract.errors import BackendError, ModelError, PluginError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import LayerSpec
from kvframe.contract.state import StateRound, StateRun
from tests.attention.attending import MIXED, Bench, layer, local
from tests.engine.scripted_model import ScriptedModel
from tests.support.plugins import plugin


def bench_of(backend: type, num_layers: int = 1) -> Bench:
    """Return layers, each in a cache group of its own, on a backend."""
    stack = Stack.from_mapping({"rules": [{"layers": "*", "backend": "mine"}]})
    layers = [layer(f"layer {index}", local(60 + index)) for index in range(num_layers)]
    return Bench(layers, stack, [plugin("mine", backends={"mine": backend})])


# --- backends ---------------------------------------------------------------------------------------------------------


class Returns(TorchReferenceBackend):
    """Returns a changed version of the right output."""

    change: ClassVar[Callable[[torch.Tensor], Any]] = staticmethod(lambda output: output)

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **named: Any
    ) -> torch.Tensor:
        output = super().attend(layer, query, kv_cache, metadata, **named)
        changed: torch.Tensor = type(self).change(output)
        return changed


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda output: None, "a 'NoneType'"),
        (lambda output: (output, None), "a 'tuple'"),
        (lambda output: output.numpy(), "a 'ndarray'"),
        (lambda output: output[:-1], r"a tensor \[\d+, 2, 4\] of torch.float32 on cpu"),
        (lambda output: output.flatten(1), r"a tensor \[\d+, 8\] of torch.float32 on cpu"),
        (lambda output: output.transpose(1, 2), r"a tensor \[\d+, 4, 2\] of torch.float32 on cpu"),
        (lambda output: output[:, :1], r"a tensor \[\d+, 1, 4\] of torch.float32 on cpu"),
        (lambda output: output.double(), r"a tensor \[\d+, 2, 4\] of torch.float64 on cpu"),
        (lambda output: output.to("meta"), r"a tensor \[\d+, 2, 4\] of torch.float32 on meta"),
    ],
)
def test_an_output_that_was_not_agreed_is_refused_by_name(change: Callable[[torch.Tensor], Any], found: str) -> None:
    Returns.change = staticmethod(change)
    expected = r"and not a tensor \[\d+, 2, 4\] of torch.float32 on cpu: this is a mistake in the backend's attend"
    with pytest.raises(BackendError, match=f"mine' returned {found} for layer 'layer 0', {expected}") as refused:
        bench_of(Returns).run(MIXED)
    assert "wrong_output" == refused.value.code


def test_an_output_that_was_agreed_is_handed_on() -> None:
    Returns.change = staticmethod(lambda output: output)
    bench = bench_of(Returns)
    assert torch.allclose(bench.dense(bench.layers[0], MIXED), bench.run(MIXED)["layer 0"], atol=1e-5)


def test_a_backend_without_a_builder_is_refused_at_set_up() -> None:
    class NoBuilder(TorchReferenceBackend):
        def make_builder(self) -> AttentionMetadataBuilder:
            return None  # type: ignore[return-value]

    says = r"mine', of layer 'layer 0': make_builder\(\) failed: .*it returned None, which declares no capture"
    with pytest.raises(BackendError, match=says):
        bench_of(NoBuilder)


def test_a_backend_on_copies_without_a_builder_is_refused_too() -> None:
    layers = [layer("layer", local())]
    inner = type("NoBuilder", (TorchReferenceBackend,), {"make_builder": lambda self: None})(layers, HOST)
    with pytest.raises(PluginError, match="it returned None, which declares no capture"):
        CopyingBackend(inner, layers, HOST, CopyScratch(HOST)).make_builder()


# --- builders ---------------------------------------------------------------------------------------------------------


class Refreshing(AttentionMetadataBuilder):
    """Passes the metadata on, and takes over another group's metadata."""

    table_fields = frozenset({"block_table", "slot_mapping"})
    reuse_key = 0  # type: ignore[assignment]

    def build(self, metadata: CommonAttentionMetadata) -> Any:
        return metadata

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        return {"block_table": metadata.block_table, "slot_mapping": metadata.slot_mapping}


class TooFew(Refreshing):
    @classmethod
    def build_together(cls, builds: Sequence[tuple[Self, CommonAttentionMetadata]]) -> list[Any]:
        return super().build_together(builds)[1:]


class BuildsNothing(Refreshing):
    @classmethod
    def build_together(cls, builds: Sequence[tuple[Self, CommonAttentionMetadata]]) -> list[Any]:
        return None  # type: ignore[return-value]


class RefreshesOthers(Refreshing):
    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        return {"block_tables": metadata.block_table}


class RefreshesOne(Refreshing):
    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        return {"block_table": metadata.block_table}


class RefreshesMore(Refreshing):
    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        return {**super().refreshed_fields(built, metadata), "causal": True}


class FinishesNothing(Refreshing):
    def finish(self, built: Any) -> Any:
        return None


def on(builder: type[AttentionMetadataBuilder]) -> type[TorchReferenceBackend]:
    """Return a backend with a builder."""
    return type("Mine", (TorchReferenceBackend,), {"make_builder": lambda self: builder()})


def test_a_builder_that_takes_over_what_another_group_built_is_right() -> None:
    bench = bench_of(on(Refreshing), num_layers=2)
    outputs = bench.run(MIXED)
    for each in bench.layers:
        assert torch.allclose(bench.dense(each, MIXED), outputs[each.name], atol=1e-5)


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (TooFew, "build_together returned 0 values for 1 builders, and not one for each"),
        (BuildsNothing, "build_together returned a 'NoneType' for 1 builders"),
        (
            RefreshesOthers,
            r"refreshed_fields returned \['block_tables'\], and the declared table_fields are \['block_t",
        ),
        (
            RefreshesOne,
            r"refreshed_fields returned \['block_table'\], and the declared table_fields are \['block_table",
        ),
        (
            RefreshesMore,
            r"refreshed_fields returned \['block_table', 'causal', 'slot_mapping'\], and the declared table_fields are",
        ),
        (FinishesNothing, r"what it built, a 'NoneType', has no fields \['block_table', 'slot_mapping'\] to replace"),
    ],
)
def test_what_a_builder_returns_and_was_not_agreed_is_refused_by_name(
    builder: type[AttentionMetadataBuilder], message: str
) -> None:
    name = f"tests.engine.test_wrong_returns:{builder.__name__}"
    with pytest.raises(BackendError, match=f"the metadata builder {name} makes a mistake: {message}") as refused:
        bench_of(on(builder), num_layers=2).run(MIXED)
    assert "wrong_metadata" == refused.value.code


# --- model adapters ---------------------------------------------------------------------------------------------------


class Gives(ScriptedModel):
    """Returns a changed version of the right logits."""

    change: ClassVar[Callable[[torch.Tensor], Any]] = staticmethod(lambda logits: logits)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = type(self).change(super().forward(input_ids, positions, logits_indices))
        return changed


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda logits: None, "a 'NoneType'"),
        (lambda logits: logits[:-1], r"\[1, 256\]"),
        (lambda logits: logits.unsqueeze(0), r"\[1, 2, 256\]"),
    ],
)
def test_logits_of_other_rows_than_asked_for_are_refused(change: Callable[[torch.Tensor], Any], found: str) -> None:
    Gives.change = staticmethod(lambda logits: logits)
    with Gives("abc").engine() as engine:
        Gives.change = staticmethod(change)
        engine.add_request([1, 2])
        engine.add_request([3])
        with pytest.raises(
            ModelError, match=rf"scripted: its model adapter's forward returned {found}, and not a tensor"
        ):
            engine.step()


def test_a_state_of_another_shape_is_not_spread_over_requests() -> None:
    pages = {"state": torch.zeros(5, 1, 3)}
    page, place = torch.tensor([1, 2]), torch.tensor([0, 0])
    round_of_two = StateRound(torch.arange(2), page, place, page, place)
    with pytest.raises(ModelError, match=r"a state 'state' of the shape \[1, 3\], and its page takes \[2, 3\]"):
        round_of_two.write(pages, {"state": torch.ones(1, 3)})
    with pytest.raises(ModelError, match=r"a state 'state' of the shape \[1, 1\], and its page takes \[1, 3\]"):
        StateRun(0, 1, None, (1, 0)).write(pages, {"state": torch.ones(1, 1)})
    assert not pages["state"].any()
    round_of_two.write(pages, {"state": torch.ones(2, 3)})
    assert 6 == pages["state"].sum()
