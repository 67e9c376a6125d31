"""Attention groups: layers of one cache group with the same wrapper chain and backend share their metadata."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch

from kvframe.attention.copies import CopyScratch, make_on_copies
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder
from kvframe.contract.capabilities import Capabilities
from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import BackendError, PluginError
from kvframe.contract.foreign import call
from kvframe.contract.metadata import RANGE_ENDS
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import FieldUse
from kvframe.loading.claims import check_declared
from kvframe.planning.groups import Grouping
from kvframe.selection.choice import Choice, Identity, WrapperChain, chain_capture
from kvframe.selection.refusals import Refusal, find_not_causal, needs_copies

_PASSED = (FieldUse.CARRY, FieldUse.SLICE)


@attrs.frozen(kw_only=True, eq=False)
class AttentionGroup:
    """The layers of one cache group that have the same spec, query side, wrapper chain and backend.

    Attributes:
        cache_group: Index of the cache group. For step-local layers, which have none, the index of their metadata,
            which follows that of all cache groups.
        layers: The layers: those that keep a cache, then those that read another layer's, each in the model's order.
        wrapped: Any of the layers, as the backend after the chain sees it.
        wrappers: Their wrapper chain.
        wrapper_ids: The identity of each wrapper: its class and its parameters.
        backend_name: The registered name of their backend.
        backend_id: The identity of the backend: its class and its parameters.
        backend: The backend's instance for this group.
        builder: Its metadata builder.
        not_causal: Why its backend cannot take a batch that is not causal; None if it can.
        takes_ranges: Whether its wrappers and its backend honour ``RANGE_ENDS``.
    """

    cache_group: int
    layers: tuple[LayerSpec, ...]
    wrapped: LayerSpec
    wrappers: WrapperChain
    wrapper_ids: tuple[Identity, ...]
    backend_name: str
    backend_id: Identity
    backend: AttentionBackend
    builder: AttentionMetadataBuilder
    not_causal: Refusal | None
    takes_ranges: bool = False

    @property
    def writes(self) -> bool:
        """Whether a layer of the group keeps a cache."""
        return any(layer.shares_with is None for layer in self.layers)

    @property
    def sequence(self) -> str:
        """Which sequence of a request its layers keep state of."""
        spec = self.layers[0].spec
        assert spec is not None
        return spec.sequence

    @property
    def capture(self) -> GraphCapture:
        """The batches for which the group's chain and builder can be captured.

        A builder that asks for an order may get a permutation in one step and none in the next. This cannot happen if
        all requests are of one kind. A wrapper with effects may turn requests of equal lengths into requests of
        several lengths, unless each computes a single token.
        """
        limit = GraphCapture.ALWAYS if self.builder.batch_order is None else GraphCapture.UNIFORM
        if any(wrapper.effects for wrapper in self.wrappers) and self.builder.capture == GraphCapture.UNIFORM:
            limit = min(limit, GraphCapture.DECODE)
        return min(chain_capture(self.wrappers), self.builder.capture, limit)

    @property
    def reuse_key(self) -> Hashable:
        """A key that is equal for groups that can share built metadata, if their wrapped metadata is the same."""
        key = self.builder.reuse_key
        return self.backend_id, (self.wrapped.spec, self.wrapped.query) if key is None else key


def form_groups(
    layers: Sequence[LayerSpec],
    choices: Sequence[Choice],
    grouping: Grouping,
    device: torch.device,
    local: Mapping[str, int],
    scratch: Callable[[], CopyScratch],
) -> tuple[AttentionGroup, ...]:
    """Return the attention groups, in the order of their first layers, with one backend instance each.

    Args:
        layers: The model's attention layers, in the order they run.
        choices: Each layer's wrapper chain and backend, in the same order.
        grouping: The cache groups.
        device: Where the backends run.
        local: For each step-local layer, the index of its metadata among theirs.
        scratch: Returns memory for copies of pages, for backends that do not read their layers' format.

    Raises:
        BackendError: A backend could not be set up; names the backend, the layer and the method.
    """
    num_cache_groups = len(grouping.groups)
    members: dict[Any, list[tuple[LayerSpec, Choice]]] = {}
    for layer, choice in zip(layers, choices, strict=True):
        local_index = local.get(layer.name)
        cache_group = grouping.group_of(layer.name).index if local_index is None else num_cache_groups + local_index
        key = (cache_group, choice.wrapper_ids, choice.backend_id, layer.spec, layer.query)
        members.setdefault(key, []).append((layer, choice))
    formed = []
    for (cache_group, *_), group in members.items():
        choice = group[0][1]
        backend, builder = _set_up(choice, [member_choice.wrapped for _, member_choice in group], device, scratch)
        formed.append(
            AttentionGroup(
                cache_group=cache_group,
                layers=tuple(sorted((layer for layer, _ in group), key=lambda layer: layer.shares_with is not None)),
                wrapped=choice.wrapped,
                wrappers=choice.wrappers,
                wrapper_ids=choice.wrapper_ids,
                backend_name=choice.backend,
                backend_id=choice.backend_id,
                backend=backend,
                builder=builder,
                not_causal=find_not_causal(choice.backend_class.capabilities),
                takes_ranges=honours_ranges(choice.backend_class.capabilities, choice.wrappers),
            )
        )
    return tuple(formed)


def honours_ranges(capabilities: Capabilities, wrappers: WrapperChain) -> bool:
    """Return whether a chain hands ``RANGE_ENDS`` on to a backend that honours it."""
    return "ranges" in capabilities.masks and all(wrapper.extensions.get(RANGE_ENDS) in _PASSED for wrapper in wrappers)


def make_backend(
    backend_class: type[AttentionBackend],
    layers: Sequence[LayerSpec],
    device: torch.device,
    options: Any,
    scratch: Callable[[], CopyScratch],
) -> AttentionBackend:
    """Return a backend for layers that its capabilities cover; it works on copies if it does not read their format.

    Args:
        backend_class: The backend.
        layers: All with the same spec and query side.
        device: Where their caches lie.
        options: An instance of its ``options_class``; None if it has none.
        scratch: Returns memory for copies.
    """
    further = () if options is None else (options,)
    if needs_copies(backend_class.capabilities, layers[0]):
        return make_on_copies(backend_class, layers, device, further, scratch())
    return backend_class(layers, device, *further)


def _set_up(
    choice: Choice, layers: Sequence[LayerSpec], device: torch.device, scratch: Callable[[], CopyScratch]
) -> tuple[AttentionBackend, AttentionMetadataBuilder]:
    """Return a backend's instance for a group, and its builder."""
    label = f"backend {choice.backend!r}, of layer {layers[0].name!r}: "
    arguments = (choice.backend_class, layers, device, choice.backend_options, scratch)
    try:
        backend = call(f"{label}__init__()", make_backend, *arguments)
        builder = call(f"{label}make_builder()", backend.make_builder)
        call(f"{label}make_builder()", check_declared, AttentionMetadataBuilder, builder)
        call(f"{label}reuse_key of its builder", lambda: hash(builder.reuse_key))
        return backend, builder
    except PluginError as error:
        raise BackendError(str(error)) from error.__cause__
