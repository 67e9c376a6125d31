"""Attends to the keys of each query in parts, as a wrapper divides them, and merges the results.

The backend and its builder work on one part at a time, and do not know of the other parts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch

from kvframe.attention.request_order import Permutation, is_ordered, permute
from kvframe.attention.returned import make_builder
from kvframe.attention.wrapping import divide_keys
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder, KVCache
from kvframe.contract.merging import merge_attention
from kvframe.contract.metadata import DEVICE_FIELDS, CommonAttentionMetadata
from kvframe.contract.slots import Slots
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import MetadataWrapper


@attrs.frozen(eq=False)
class PartsMetadata:
    """What the layers of an attention group read in a step.

    Attributes:
        built: What the backend's own builder made, for each part.
        orders: For each part, the permutation into the order that this builder asks for; None if it is in that order.
    """

    built: tuple[Any, ...]
    orders: tuple[Permutation | None, ...]


class MergingBackend(AttentionBackend):
    """A backend that runs once for each part of the keys."""

    def __init__(
        self, inner: AttentionBackend, wrapper: MetadataWrapper, layers: Sequence[LayerSpec], device: torch.device
    ) -> None:
        """Wrap a backend.

        Args:
            inner: The backend; it returns the log-sum-exp.
            wrapper: The wrapper that divides the keys, the last one of the layers' chain.
            layers: The layers.
            device: Where their caches lie.
        """
        super().__init__(layers, device)
        self.inner = inner
        self._wrapper = wrapper

    def bind(self, layer: LayerSpec, parameters: Mapping[str, torch.Tensor]) -> None:
        """Pass the layer's learned tensors on to the backend."""
        self.inner.bind(layer, parameters)

    def make_builder(self) -> MergingBuilder:
        """Return the backend's builder, inside one that divides the keys."""
        return MergingBuilder(make_builder(self.inner), self._wrapper, self.layers)

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        """Let the backend store new tokens."""
        self.inner.write_kv(key, value, kv_cache, slots)

    def forward(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Let the backend attend to one part after the other, and merge its results."""
        return self.forward_with_lse(layer, query, kv_cache, metadata, sinks)[0]

    def forward_with_lse(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the backend attend to one part after the other, and merge its results."""
        assert isinstance(metadata, PartsMetadata)
        outputs: list[torch.Tensor] = []
        lses: list[torch.Tensor] = []
        for built, order in zip(metadata.built, metadata.orders, strict=True):
            # The sinks are in one part.
            given = None if outputs else sinks
            rows = query if order is None else query.index_select(0, order.tokens)
            output, lse = self.inner.forward_with_lse(layer, rows, kv_cache, built, given)
            if order is not None:
                output, lse = output.index_select(0, order.inverse), lse.index_select(0, order.inverse)
            outputs.append(output)
            lses.append(lse)
        return merge_attention(outputs, lses)


class MergingBuilder(AttentionMetadataBuilder):
    """Divides the keys of a step, and lets the backend's own builder build for each part."""

    def __init__(self, inner: AttentionMetadataBuilder, wrapper: MetadataWrapper, layers: Sequence[LayerSpec]) -> None:
        """Wrap a builder.

        Args:
            inner: The backend's builder.
            wrapper: The wrapper that divides the keys.
            layers: The group's layers.
        """
        self.inner = inner
        self.on_host = None if inner.on_host is None else DEVICE_FIELDS
        self._wrapper = wrapper
        self._layers = layers

    @property
    def reuse_key(self) -> Hashable:
        """The wrapper, and the key of the backend's own builder."""
        key = self.inner.reuse_key
        return self._wrapper, (self._layers[0].spec, self._layers[0].query) if key is None else key

    def build(self, metadata: CommonAttentionMetadata) -> PartsMetadata:
        """Return the backend's own metadata of each part."""
        built, orders = [], []
        for part in divide_keys(self._wrapper, metadata, [layer.name for layer in self._layers]):
            common, permutation, order = part, None, self.inner.batch_order
            if order is not None and not is_ordered(order, part):
                common, permutation = permute(part, order)
            built.extend(self.inner.build_together([(self.inner, common)]))
            orders.append(permutation)
        return PartsMetadata(tuple(built), tuple(orders))

    def finish(self, built: Any) -> PartsMetadata:
        """Let the backend's builder finish what it built for each part."""
        finished: PartsMetadata = attrs.evolve(built, built=tuple(self.inner.finish(each) for each in built.built))
        return finished


def merged_over(
    backend: AttentionBackend, wrappers: Sequence[MetadataWrapper], layers: Sequence[LayerSpec], device: torch.device
) -> AttentionBackend:
    """Return the backend, or one that runs it once for each part if the chain divides the keys.

    Args:
        backend: The backend for layers after the chain.
        wrappers: The layers' wrapper chain.
        layers: The layers, as the chain leaves them.
        device: Where their caches lie.
    """
    if not wrappers or wrappers[-1].num_parts == 1:
        return backend
    return MergingBackend(backend, wrappers[-1], layers, device)
