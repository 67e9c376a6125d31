"""Gives layers of a model another attention type, as a stack's rules or a program ask, if the model allows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from kvframe.config.stack import Stack
from kvframe.contract.description import LayerDescription, ModelDescription
from kvframe.contract.errors import SpecError, StackError
from kvframe.contract.foreign import call, safe_repr
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.planning.answers import ask_state_tensors

if TYPE_CHECKING:
    from kvframe.loading.registry import Registry


def retyped(description: ModelDescription, registry: Registry, stack: Stack) -> ModelDescription:
    """Return the description of a model whose layers have the types that the stack's rules give them.

    A type replaces only how long keys and values are kept and which of them a query sees. So the layer must attend, to
    its own tokens, and the type must store the same tensors, unless it defines its own attention.
    """
    return attrs.evolve(description, layers=tuple(_retyped(layer, registry, stack) for layer in description.layers))


def _retyped(layer: LayerDescription, registry: Registry, stack: Stack) -> LayerDescription:
    rule = stack.rule_for(layer.name, layer.kind)
    if rule.kind is None or rule.kind == layer.kind:
        return layer
    own: type[KVCacheSpec] = registry.specs.load(layer.kind)
    fields = {field.name for field in attrs.fields(registry.specs.load(rule.kind))}
    kept = {key: value for key, value in layer.options.items() if key in own.layout_fields & fields}
    made = attrs.evolve(layer, kind=rule.kind, options={**kept, **rule.spec})
    _check(layer, made, registry, str(stack.place_of_option("kind", layer.name, layer.kind)))
    return made


def _check(layer: LayerDescription, made: LayerDescription, registry: Registry, place: str) -> None:
    """Raise ``StackError`` if a layer cannot have the type that it was given."""
    if not layer.query:
        raise StackError(
            f"{place}: layer {layer.name!r} ({layer.kind}) keeps a state that the model computes, so it cannot have "
            f"the type {made.kind!r}; give other layers the type"
        )
    try:
        before, after = (_usual(registry, each) for each in (layer, made))
    except (TypeError, ValueError, SpecError):
        return  # the error about its options is raised where the layer's spec is made
    for what, one, two in (
        # A type that defines its attention stores what it needs of the same keys and values.
        ("stores", *((_stored(before), _stored(after)) if not after.defines_attention else ("", ""))),
        ("attends to the sequence", before.sequence, after.sequence),
        ("keeps tokens of the past", before.keeps_past, after.keeps_past),
    ):
        if one != two:
            raise StackError(
                f"{place}: layer {layer.name!r} ({layer.kind}) cannot have the type {made.kind!r}: its type {what} "
                f"{one}, and that one {two}"
            )


_OF_STORAGE = frozenset({"block_size", "dtype", "model_dtype", "format"})
"""Fields that say how state is stored, and not which tokens a query sees."""

EditLayer = Callable[[LayerDescription], LayerDescription]
"""Returns a layer, or one of the same name with another ``kind`` and ``options``."""


def edited(description: ModelDescription, edit: EditLayer | None, registry: Registry) -> ModelDescription:
    """Return the description of a model whose layers a program has changed by ``edit``.

    Raises:
        StackError: A layer cannot have the type that it is given, or something else of it was changed.
        UnknownNameError: There is no such type.
    """
    if edit is None:
        return description
    layers = []
    for layer in description.layers:
        made: Any = call(f"layers({layer.name!r})", edit, layer)
        if (
            not isinstance(made, LayerDescription)
            or attrs.evolve(made, kind=layer.kind, options=layer.options) != layer
        ):
            raise StackError(
                f"layers= returned {safe_repr(made)} for the layer {layer.name!r}; return the layer, or "
                "attrs.evolve(layer, kind=..., options=...)"
            )
        if made != layer:
            _check(layer, made, registry, "layers=")
        layers.append(made)
    return attrs.evolve(description, layers=tuple(layers))


def _usual(registry: Registry, layer: LayerDescription) -> KVCacheSpec:
    """Return a layer's spec with blocks of a usual size, only to compare it."""
    made: KVCacheSpec = registry.specs.load(layer.kind)(**{"block_size": 16, **layer.options})
    return made


def _stored(spec: KVCacheSpec) -> Mapping[str, tuple[int, ...]]:
    return {name: tensor.shape[1:] for name, tensor in ask_state_tensors(spec).items()}


def retyped_layers(description: ModelDescription, layers: tuple[LayerSpec, ...], registry: Registry) -> tuple[str, ...]:
    """Return the names of the layers that attend by another mask than the model's own forward."""
    served = {layer.name: layer for layer in layers}
    return tuple(
        layer.name
        for layer in description.layers
        if layer.query and layer.name in served and _is_another(layer, served[layer.name].spec, registry)
    )


def _is_another(layer: LayerDescription, spec: KVCacheSpec | None, registry: Registry) -> bool:
    """Return whether a spec is of another type than a description, or has another option besides its layout."""
    if spec is None:
        return False
    own: type[KVCacheSpec] = registry.specs.load(layer.kind)
    if type(spec) is not own:
        return True
    names = {field.name for field in attrs.fields(own)} - own.layout_fields - _OF_STORAGE
    try:
        described = own(**{"block_size": spec.block_size, **layer.options})
    except (TypeError, ValueError, SpecError):
        return True  # the stack gave an option that the type requires
    return any(getattr(spec, name) != getattr(described, name) for name in names)
