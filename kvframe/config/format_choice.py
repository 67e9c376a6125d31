"""Makes the KV format that a stack, a rule or a layer file names, and puts it into the layers that it covers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvframe.config.options import Use, make_with_options
from kvframe.contract.errors import KVFrameError, PluginError, SpecError, StackError
from kvframe.contract.formats import PLAIN, KVFormat

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.contract.specs import KVCacheSpec, LayerSpec
    from kvframe.loading.registry import Registry

_FORM = 'a format is given by its name, or as a table of a name and options: { name = "fp8_tensor", k_scale = 0.5 }'


def default_format(stack: Stack, registry: Registry) -> KVFormat:
    """Return the format of the layers for which no rule chooses another, that of ``[cache] format``."""
    if stack.cache.format is None:
        return PLAIN
    try:
        return make_format(stack.cache.format, registry)
    except KVFrameError as error:
        raise StackError(f"{stack.source}: cache.format: {error}") from error


def make_format(given: Any, registry: Registry) -> KVFormat:
    """Return the format that a stack, a rule or a layer file names.

    It is given as a name, a table of ``name`` and options, a ``Use``, or the format itself.

    Raises:
        SpecError: It is given otherwise, or the options do not fit the format.
        UnknownNameError: No plugin provides the format.
        ContestedNameError: Several plugins do.
        PluginError: It cannot be imported, or fails.
    """
    if isinstance(given, KVFormat):
        return given
    use = _as_use(given)
    format_class: type[KVFormat] = type(PLAIN) if use.name == PLAIN.name else registry.formats.load(use.name)
    try:
        return make_with_options(format_class, use.options)
    except ValueError as error:
        raise SpecError(f"KV format {use.name!r}: {error}") from error
    except PluginError as error:
        raise PluginError(f"KV format {use.name!r}: {error}") from error


def _as_use(choice: Any) -> Use:
    if isinstance(choice, Use):
        return choice
    if isinstance(choice, str):
        return Use(choice)
    if isinstance(choice, Mapping) and isinstance(choice.get("name"), str):
        return Use(choice["name"], {key: option for key, option in choice.items() if key != "name"})
    raise SpecError(f"{_FORM}, not {choice!r}")


def store_in(spec: KVCacheSpec, given: KVFormat | None, default: KVFormat) -> KVCacheSpec:
    """Return a layer's spec in the format that was chosen for it, or in that of all other layers.

    A type that stores other state than keys and values, or keeps no state after a step, is not changed by the default.
    Raises ``SpecError`` if the chosen format does not fit the state that the layer stores.
    """
    if given is None:
        stored = spec.in_format(default) if spec.keeps_past else spec
    elif given != PLAIN and not spec.keeps_past:
        raise SpecError(f"it keeps no state after a step, so there is nothing to store as {given.name}")
    else:
        stored = spec.in_format(given)
        if stored.kv_format != given:
            raise SpecError(f"it stores other state than keys and values, which {given.name} cannot store")
    if stored.kv_format != PLAIN:
        stored.state_tensors()  # raises for sizes and dtypes that the format cannot store
    return stored


def follow_owners(layers: Sequence[LayerSpec], chosen: Collection[str]) -> tuple[LayerSpec, ...]:
    """Return the layers; those that share a cache get the format of the layer that keeps it.

    Layers whose format was ``chosen`` keep it. Errors in how layers share caches are left to ``group_layers``.
    """
    by_name = {layer.name: layer for layer in layers}
    followed = []
    for layer in layers:
        owner, steps = layer, 0
        while owner.shares_with in by_name and steps < len(layers):
            owner, steps = by_name[owner.shares_with], steps + 1
        if owner is not layer and layer.name not in chosen and layer.spec is not None and owner.spec is not None:
            layer = attrs.evolve(layer, spec=layer.spec.in_format(owner.spec.kv_format))
        followed.append(layer)
    return tuple(followed)
