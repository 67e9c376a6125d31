"""The conformance kit checks the declarations of metadata builders, and finds each bug."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import attrs
import pytest
import torch
from kvframe_testing.case import Case, Request
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import make_layer
from kvframe_testing.laws import ConformanceError

from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder, KVCache
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.order import BatchOrder, split_batch
from kvframe.contract.specs import LayerSpec

LAYER = make_layer(TorchReferenceBackend.capabilities, block_size=4)
MIXED = Case(name="mixed", layer=LAYER, requests=(Request(0, 9), Request(13, 1), Request(6, 5), Request(7, 1)))


@attrs.frozen(eq=False)
class Built:
    common: CommonAttentionMetadata
    block_table: torch.Tensor


class Builder(AttentionMetadataBuilder):
    """Splits its batches, and declares which of its fields depend on the block table."""

    batch_order = BatchOrder()
    table_fields = frozenset({"block_table"})

    def build(self, metadata: CommonAttentionMetadata) -> Built:
        split = split_batch(metadata, self.batch_order)
        assert (2, 2) == (split.num_decodes, split.num_longer)
        return Built(metadata, metadata.block_table)

    def refreshed_fields(self, built: Built, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        return {"block_table": metadata.block_table}


class RefreshesAnotherField(Builder):
    def refreshed_fields(self, built: Built, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        return {"common": metadata}


class RefreshesNothing(Builder):
    def refreshed_fields(self, built: Built, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        return {"block_table": built.block_table}


class BuildsTogetherOtherwise(Builder):
    @classmethod
    def build_together(cls, builds: Sequence[tuple[Self, CommonAttentionMetadata]]) -> list[Any]:
        return [attrs.evolve(built, block_table=built.block_table.flip(0)) for built in super().build_together(builds)]


def backend_with(builder: Callable[[], AttentionMetadataBuilder]) -> type[AttentionBackend]:
    class Backend(TorchReferenceBackend):
        capabilities = attrs.evolve(TorchReferenceBackend.capabilities, returns_lse=False)

        def make_builder(self) -> AttentionMetadataBuilder:
            return builder()

        def attend(
            self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **options: Any
        ) -> torch.Tensor:
            common = attrs.evolve(metadata.common, block_table=metadata.block_table)
            return super().attend(layer, query, kv_cache, common, **options)

    return Backend


def test_a_builder_gets_the_order_that_it_asks_for_and_outputs_come_back_in_the_batchs() -> None:
    check_backend(backend_with(Builder), MIXED)


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (
            RefreshesAnotherField,
            r"refreshed_fields returned \['common'\], and the declared .* are \['block_table'\]",
        ),
        (RefreshesNothing, "with refreshed metadata, .* queries are wrong"),
        (BuildsTogetherOtherwise, r"mixed: \d+ of 16 queries are wrong"),
    ],
)
def test_the_kit_says_what_a_wrong_builder_got_wrong(builder: type[Builder], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_backend(backend_with(builder), MIXED)


def test_a_backend_without_a_builder_is_told_what_it_returned() -> None:
    class Lacking(TorchReferenceBackend):
        def make_builder(self) -> Any:
            return None

    layer = make_layer(Lacking.capabilities)
    with pytest.raises(ConformanceError, match=r"make_builder\(\).*it returned None, which declares no "):
        check_backend(Lacking, Case(name="one", layer=layer, requests=(Request(0, 4),)))
