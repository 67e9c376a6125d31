"""Attention at run time: layers that find their cache, their backend and the step's metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from kvframe.attention.backend import AttentionBackend, KVCache
from kvframe.attention.metadata import CommonAttentionMetadata
from kvframe.attention.selection import Choice
from kvframe.attention.wrapper import WrapperChain, apply_chain
from kvframe.errors import BackendError
from kvframe.groups import Grouping
from kvframe.specs import LayerSpec


@attrs.frozen(kw_only=True, eq=False)
class AttentionGroup:
    """The layers of one cache group that have the same spec, query side, wrapper chain and backend.

    Their metadata is built once a step.

    Attributes:
        cache_group: Index of the cache group.
        layers: The layers, in the model's order.
        wrappers: Their wrapper chain.
        backend_name: The registered name of their backend.
        backend: The backend's instance for this group.
    """

    cache_group: int
    layers: tuple[LayerSpec, ...]
    wrappers: WrapperChain
    backend_name: str
    backend: AttentionBackend


class _GroupStep:
    """What one attention group holds while a step runs."""

    def __init__(self, group: AttentionGroup) -> None:
        self.group = group
        self.builder = group.backend.make_builder()
        self.metadata: Any = None
        self.slots: tuple[torch.Tensor, torch.Tensor] | None = None


class AttentionLayer:
    """One layer, as the model calls it."""

    def __init__(self, spec: LayerSpec, kv_cache: KVCache, step: _GroupStep) -> None:
        self.spec = spec
        self._kv_cache = kv_cache
        self._step = step
        self._backend = step.group.backend
        self._writes = spec.shares_with is None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the step's keys and values, and attend.

        Args:
            query: ``[num_tokens, num_heads, head_size], device``.
            key: ``[num_tokens, num_kv_heads, head_size], device``; ignored by a layer that shares a cache.
            value: ``[num_tokens, num_kv_heads, head_size_v], device``; likewise.
            sinks: ``[num_heads], device``: learned sink logits; None unless the layer has them.

        Returns:
            ``[num_tokens, num_heads, head_size_v], device``.
        """
        step = self._step
        if self._writes:
            assert key is not None
            assert value is not None
            assert step.slots is not None
            self._backend.write_kv(key, value, self._kv_cache, step.slots)
        return self._backend.forward(self.spec, query, self._kv_cache, step.metadata, sinks)


class AttentionLayers(Mapping[str, AttentionLayer]):
    """All attention layers of a model, by name.

    Invariant: between ``begin_step`` and the next, every layer of a group reads the same metadata.

    Attributes:
        groups: The attention groups, in the order of their first layers.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        choices: Sequence[Choice],
        grouping: Grouping,
        views: Mapping[str, KVCache],
        device: torch.device,
    ) -> None:
        """Group the layers and make one backend instance per group.

        Args:
            layers: The model's layers.
            choices: Each layer's wrapper chain and backend, in the same order.
            grouping: The cache groups.
            views: Each layer's state tensors.
            device: Where the backends run.

        Raises:
            BackendError: A backend could not be set up.
        """
        members: dict[Any, list[tuple[LayerSpec, Choice]]] = {}
        for layer, choice in zip(layers, choices, strict=True):
            cache_group = grouping.group_of(layer.name).index
            key = (cache_group, choice.wrappers, choice.backend, layer.spec, layer.query)
            members.setdefault(key, []).append((layer, choice))
        steps = []
        self._layers: dict[str, AttentionLayer] = {}
        for (cache_group, wrappers, backend_name, *_), group in members.items():
            specs = tuple(layer for layer, _ in group)
            step = _GroupStep(
                AttentionGroup(
                    cache_group=cache_group,
                    layers=specs,
                    wrappers=wrappers,
                    backend_name=backend_name,
                    backend=_make_backend(group[0][1], specs, device),
                )
            )
            steps.append(step)
            for layer in specs:
                self._layers[layer.name] = AttentionLayer(layer, views[layer.name], step)
        self._steps = tuple(steps)
        self.groups = tuple(step.group for step in steps)

    def begin_step(self, metadata: Sequence[CommonAttentionMetadata]) -> None:
        """Build every attention group's metadata of a step.

        Args:
            metadata: The batch, one value per cache group.
        """
        slots = [
            (
                torch.div(common.slot_mapping, common.block_size, rounding_mode="floor"),
                common.slot_mapping % common.block_size,
            )
            for common in metadata
        ]
        for step in self._steps:
            group = step.group
            step.slots = slots[group.cache_group]
            step.metadata = step.builder.build(apply_chain(group.wrappers, metadata[group.cache_group]))

    def __getitem__(self, name: str) -> AttentionLayer:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def _make_backend(choice: Choice, layers: tuple[LayerSpec, ...], device: torch.device) -> AttentionBackend:
    try:
        return choice.backend_class(layers, device)
    except Exception as error:
        raise BackendError(
            f"backend {choice.backend!r} could not be set up for {layers[0].name!r}: {type(error).__name__}: {error}"
        ) from error
