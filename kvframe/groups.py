"""Grouping: a model's layers become groups that share one block table each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from kvframe.errors import SpecError, UnknownNameError
from kvframe.specs import KVCacheSpec, LayerSpec, QuerySpec

if TYPE_CHECKING:
    from kvframe.model.description import LayerDescription, ModelDescription
    from kvframe.registry import Registry
    from kvframe.stack import Stack


@attrs.frozen(kw_only=True)
class KVCacheGroup:
    """Layers that share one block table.

    Attributes:
        index: The group's number; block tables and metadata are listed by it.
        spec: What is stored, and for which past tokens; layers may differ from it in their layout only.
        layers: Names of the layers that keep state in this group, in the model's order.
        stored: What each of these layers stores, in the same order.
    """

    index: int
    spec: KVCacheSpec
    layers: tuple[str, ...]
    stored: tuple[KVCacheSpec, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: one block of tokens for every layer of the group."""
        return sum(spec.block_bytes for spec in self.stored)


@attrs.frozen(kw_only=True)
class Grouping:
    """The groups of a model, and the layers that follow another layer's.

    Attributes:
        groups: The groups, in the order of their first layers; empty for a model that keeps nothing.
        follows: For each layer that shares a cache, the layer whose cache it reads.
    """

    groups: tuple[KVCacheGroup, ...]
    follows: Mapping[str, str]

    def group_of(self, layer: str) -> KVCacheGroup:
        """Return the group whose block table ``layer`` reads."""
        target = self.follows.get(layer, layer)
        return next(group for group in self.groups if target in group.layers)


def make_layer_specs(
    description: ModelDescription, registry: Registry, stack: Stack, dtype: str
) -> tuple[LayerSpec, ...]:
    """Turn a model's described layers into layer specs, by the registry's spec types and the stack's rules.

    Args:
        description: The model.
        registry: Where kinds are looked up.
        stack: Its block size, its KV dtype and its rules' spec options.
        dtype: The model's dtype, which the cache has too unless the stack says otherwise.

    Raises:
        SpecError: No plugin provides a layer's kind, or the options do not fit it.
    """
    cache_dtype = dtype if stack.cache.dtype == "auto" else stack.cache.dtype
    return tuple(_layer_spec(layer, registry, stack, cache_dtype) for layer in description.layers)


def _layer_spec(layer: LayerDescription, registry: Registry, stack: Stack, dtype: str) -> LayerSpec:
    try:
        spec_class = registry.specs.load(layer.kind)
    except UnknownNameError as error:
        raise SpecError(
            f"layer {layer.name!r} needs the cache spec {layer.kind!r}, which no plugin provides "
            f"({', '.join(registry.specs.names())} are there); install a plugin that registers it, "
            f"such as kvframe-{layer.kind.replace('_', '-')}"
        ) from error
    options = {
        "block_size": stack.cache.block_size,
        "dtype": dtype,
        **layer.options,
        **stack.rule_for(layer.name, layer.kind).spec,
    }
    fields = {field.name for field in attrs.fields(spec_class)}
    if "dtype" not in fields:
        options.pop("dtype")
    unknown = sorted(set(options) - fields)
    if unknown:
        raise SpecError(
            f"layer {layer.name!r}: the cache spec {layer.kind!r} has no option {', '.join(unknown)}; "
            f"it has {', '.join(sorted(fields))}"
        )
    required = {field.name for field in attrs.fields(spec_class) if field.init and field.default is attrs.NOTHING}
    if missing := sorted(required - set(options)):
        raise SpecError(f"layer {layer.name!r}: the cache spec {layer.kind!r} needs {', '.join(missing)}")
    try:
        query = QuerySpec(**layer.query) if layer.query else None
        return LayerSpec(name=layer.name, spec=spec_class(**options), query=query, shares_with=layer.shares_with)
    except (SpecError, TypeError) as error:
        raise SpecError(f"layer {layer.name!r} ({layer.kind}): {error}") from error


def group_layers(layers: Sequence[LayerSpec], *, hybrid: bool = True) -> Grouping:
    """Group layers whose specs differ in their layout at most.

    Args:
        layers: The model's layers, in the order they run.
        hybrid: Whether each type keeps only its live range; False stores every past token for all that can.

    Raises:
        SpecError: Two layers have one name, or a shared cache is not there to be read.
    """
    by_name = {layer.name: layer for layer in layers}
    if len(by_name) != len(layers):
        names = [layer.name for layer in layers]
        raise SpecError(f"two layers are named {next(name for name in names if names.count(name) > 1)!r}")
    members: dict[tuple[object, ...], list[tuple[str, KVCacheSpec]]] = {}
    follows: dict[str, str] = {}
    for layer in layers:
        if layer.shares_with is not None:
            follows[layer.name] = _cache_owner(layer, by_name)
        elif layer.spec is not None:
            stored = layer.spec if hybrid else layer.spec.retain_all()
            members.setdefault(stored.group_key, []).append((layer.name, stored))
    groups = tuple(
        KVCacheGroup(
            index=index,
            spec=group[0][1],
            layers=tuple(name for name, _ in group),
            stored=tuple(stored for _, stored in group),
        )
        for index, group in enumerate(members.values())
    )
    return Grouping(groups=groups, follows=follows)


def _cache_owner(layer: LayerSpec, by_name: Mapping[str, LayerSpec]) -> str:
    """Follow a chain of sharing layers to the one that keeps the cache."""
    seen = [layer.name]
    while layer.shares_with is not None:
        target = by_name.get(layer.shares_with)
        if target is None:
            raise UnknownNameError("layer", layer.shares_with, by_name, f"{layer.name!r} shares its cache")
        if target.name in seen:
            raise SpecError(f"layers share each other's caches in a circle: {' → '.join([*seen, target.name])}")
        seen.append(target.name)
        layer = target
    if layer.spec is None:
        raise SpecError(f"layer {seen[0]!r} shares the cache of {layer.name!r}, which keeps none")
    return layer.name
