"""Makes the layer specs of a described model, with the types, options and formats that a stack or a program gives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import attrs

from kvframe.config.choices import default_format, make_format
from kvframe.contract.description import LayerDescription, ModelDescription
from kvframe.contract.errors import (
    ContestedNameError,
    KVFrameError,
    PluginError,
    SpecError,
    StackError,
    UnknownNameError,
)
from kvframe.contract.foreign import call, safe_repr
from kvframe.contract.formats import PLAIN, KVFormat
from kvframe.contract.specs import KVCacheSpec, LayerSpec, QuerySpec
from kvframe.planning.answers import STATE_TENSORS, are_state_tensors, ask, ask_state_tensors
from kvframe.planning.groups import num_rollback_states
from kvframe.planning.spec_check import check_prompt_budget

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.loading.registry import Registry


def make_layer_specs(
    description: ModelDescription, registry: Registry, stack: Stack, dtype: str, num_drafts: int = 0
) -> tuple[LayerSpec, ...]:
    """Return the layer specs of a model's described layers, made by the registered spec types and the stack's rules.

    Args:
        description: The model.
        registry: Where kinds are looked up.
        stack: Its block size, KV dtype and format, and the spec options of its rules.
        dtype: The model's dtype, and the cache's unless the stack says otherwise. A spec's field ``dtype`` is set to
            the cache's, its field ``model_dtype`` to the model's. A field ``format`` may be given by name; a layer
            that shares a cache has the format of the cache's owner.
        num_drafts: The most draft tokens of a request in a step.

    Raises:
        StackError: The stack's format cannot be used, a rule matches no layer or gives a spec an unknown option, or a
            layer cannot go back by ``num_drafts`` tokens.
        SpecError: No plugin provides a layer's kind, or the options do not fit it.
    """
    stack.check_layers(description.name, {layer.name: layer.kind for layer in description.layers})
    described_layers = [_retyped(layer, registry, stack) for layer in description.layers]
    cache_dtype = dtype if stack.cache.dtype == "auto" else stack.cache.dtype
    dtypes = {"dtype": cache_dtype, "model_dtype": dtype}
    kv_format = default_format(stack.cache.format, registry)
    formatted_names = {
        layer.name
        for layer in described_layers
        if "format" in {**layer.options, **stack.rule_for(layer.name, layer.kind).spec}
    }
    layers = [
        spec
        for layer in described_layers
        for spec in with_entries(_layer_spec(layer, registry, stack, dtypes, kv_format), layer.inputs)
    ]
    layers = [_with_drafts(layer, num_drafts, stack) if num_drafts else layer for layer in layers]
    return _in_owners_formats(layers, formatted_names)


def with_entries(layer: LayerSpec, model_inputs: frozenset[str]) -> Iterator[LayerSpec]:
    """Yield a layer, and the entries that its type declares, if the model gives the inputs that the type needs."""
    yield layer
    spec = layer.spec
    if spec is None:
        return
    if spec.prompt_budget is not None:
        check_prompt_budget(layer)
    elif not spec.defines_attention:
        if spec.entries or (layer.query is not None and spec.inputs(layer.query)):
            raise SpecError(
                f"layer {layer.name!r}: its type {spec.kind!r} has entries or inputs, and no dense_attention that says "
                "what it does with them"
            )
        return
    if layer.query is not None and spec.defines_attention:
        query = layer.query
        missing = sorted(ask(spec, "inputs(query)", lambda: set(spec.inputs(query))) - model_inputs)
        if missing:
            raise SpecError(
                f"layer {layer.name!r}: its type {spec.kind!r} needs the input {missing[0]!r} with each call, and the "
                f"model gives {', '.join(sorted(model_inputs)) or 'none'}; only a model adapter that gives it "
                "can serve the type"
            )
    entries = ask(
        spec,
        "entries",
        lambda: {name: (entry, entry.sequence, {**entry.entries}) for name, entry in spec.entries.items()},
    )
    for name, (entry, sequence, inner_entries) in entries.items():
        if layer.shares_with is not None:
            raise SpecError(f"layer {layer.name!r} shares a cache, and its type {spec.kind!r} keeps entries of its own")
        if sequence != spec.sequence or inner_entries:
            raise SpecError(
                f"layer {layer.name!r}: the entry {name!r} of its type {spec.kind!r} must have no entries itself, and "
                f"be of the sequence {spec.sequence!r}, not {sequence!r}"
            )
        yield LayerSpec(name=f"{layer.name}/{name}", spec=entry, entry_of=layer.name)


def _with_drafts(layer: LayerSpec, num_drafts: int, stack: Stack) -> LayerSpec:
    """Return a layer whose requests may have so many draft tokens in a step."""
    if layer.spec is None:
        return layer
    spec = ask(layer.spec, "with_drafts", partial(layer.spec.with_drafts, num_drafts))
    num_kept_states = max(num_rollback_states(spec), spec.states_per_block - 1)
    if layer.query is None and layer.entry_of is None and num_kept_states < num_drafts:
        raise StackError(
            f"{stack.source}: model.drafts computes up to {num_drafts} draft tokens of a request, but the layer "
            f"{layer.name!r} of the kind {spec.kind!r} keeps {num_kept_states} states to go back to; leave the key "
            "out, or use a type whose with_drafts() keeps them"
        )
    return attrs.evolve(layer, spec=spec)


def _layer_spec(
    layer: LayerDescription, registry: Registry, stack: Stack, dtypes: Mapping[str, str], kv_format: KVFormat
) -> LayerSpec:
    try:
        spec_class = registry.specs.load(layer.kind)
    except UnknownNameError as error:
        raise SpecError(
            f"layer {layer.name!r} needs the cache spec {layer.kind!r}, which no plugin provides "
            f"(known: {', '.join(registry.specs.names())}); install a plugin that registers it: "
            "docs/plugins.md lists those of kvframe" + (f"; {error.hint}" if error.hint else "")
        ) from error
    fields = {field.name for field in attrs.fields(spec_class)}
    options = {
        "block_size": stack.cache.block_size,
        **dtypes,
        **layer.options,
        **stack.rule_for(layer.name, layer.kind).spec,
    }
    for name in set(dtypes) - fields:
        options.pop(name)
    unknown_options = sorted(set(options) - fields)
    if unknown_options:
        problem = UnknownNameError("option", unknown_options[0], fields)
        key = stack.key_of_option(unknown_options[0], layer.name, layer.kind)
        if key is not None:
            raise StackError(f"{key}: the cache spec {layer.kind!r} of layer {layer.name!r}: {problem}")
        raise SpecError(f"layer {layer.name!r}: the cache spec {layer.kind!r}: {problem}")
    required_fields = {
        field.name for field in attrs.fields(spec_class) if field.init and field.default is attrs.NOTHING
    }
    if missing_fields := sorted(required_fields - set(options)):
        raise SpecError(f"layer {layer.name!r}: the cache spec {layer.kind!r} needs {', '.join(missing_fields)}")
    # A type that stores other state than keys and values may use the field name ``format`` for something else.
    field = attrs.fields_dict(spec_class).get("format")
    takes_format = field is not None and isinstance(field.default, KVFormat)
    format_choice = options.pop("format", None) if takes_format else None
    try:
        query = QuerySpec(**layer.query) if layer.query else None
        spec = call("making its cache spec", partial(spec_class, **options), passes=(KVFrameError,))
        layer_format = None if format_choice is None else make_format(format_choice, registry)
        spec = _in_format(spec, layer_format, default=kv_format)
        make_layer = partial(
            LayerSpec, name=layer.name, spec=spec, query=query, shares_with=layer.shares_with, entry_of=layer.entry_of
        )
        return call(f"spec {layer.kind!r}: check_query()", make_layer, passes=(SpecError,))
    except (SpecError, UnknownNameError, ContestedNameError, PluginError, TypeError, ValueError) as error:
        raise SpecError(f"layer {layer.name!r} ({layer.kind}): {error}") from error


def _in_format(spec: KVCacheSpec, kv_format: KVFormat | None, default: KVFormat) -> KVCacheSpec:
    """Return a layer's spec in the format that was chosen for it, or in the default one.

    A type that stores other state than keys and values, or keeps no state after a step, is not changed by the default.
    Raises ``SpecError`` if the chosen format does not fit the state that the layer stores.
    """
    if kv_format is None:
        spec = spec.in_format(default) if spec.keeps_past else spec
    elif kv_format != PLAIN and not spec.keeps_past:
        raise SpecError(f"it keeps no state after a step, so there is nothing to store as {kv_format.name}")
    else:
        spec = spec.in_format(kv_format)
        if spec.kv_format != kv_format:
            raise SpecError(f"it stores other state than keys and values, which {kv_format.name} cannot store")
    if spec.kv_format != PLAIN:
        label = f"KV format {spec.kv_format.name!r}"
        # Raises for sizes and dtypes that the format cannot store.
        tensors = call(f"{label}: state_tensors()", spec.state_tensors, passes=(KVFrameError,))
        if not are_state_tensors(tensors):
            raise SpecError(f"{label}: state_tensors() is {safe_repr(tensors)}; expected {STATE_TENSORS}")
    return spec


def _in_owners_formats(layers: Sequence[LayerSpec], formatted_names: Collection[str]) -> tuple[LayerSpec, ...]:
    """Return the layers; those that share a cache get the format of the layer that keeps it.

    Layers whose format was chosen are ``formatted_names``, and keep it. Errors in how layers share caches are left to
    ``group_layers``.
    """
    by_name = {layer.name: layer for layer in layers}
    results = []
    for layer in layers:
        owner, steps = layer, 0
        while owner.shares_with in by_name and steps < len(layers):
            owner, steps = by_name[owner.shares_with], steps + 1
        if (
            owner is not layer
            and layer.name not in formatted_names
            and layer.spec is not None
            and owner.spec is not None
        ):
            layer = attrs.evolve(layer, spec=layer.spec.in_format(owner.spec.kv_format))
        results.append(layer)
    return tuple(results)


# --- other types than those that the adapter describes ----------------------------------------------------------------


def _retyped(layer: LayerDescription, registry: Registry, stack: Stack) -> LayerDescription:
    """Return a layer with the type that the stack's rules give it.

    A type replaces only how long keys and values are kept and which of them a query sees. So the layer must attend, to
    its own tokens, and the type must store the same tensors, unless it defines its own attention.
    """
    rule = stack.rule_for(layer.name, layer.kind)
    if rule.kind is None or rule.kind == layer.kind:
        return layer
    own_class: type[KVCacheSpec] = registry.specs.load(layer.kind)
    fields = {field.name for field in attrs.fields(registry.specs.load(rule.kind))}
    layout = {key: value for key, value in layer.options.items() if key in own_class.layout_fields & fields}
    new_layer = attrs.evolve(layer, kind=rule.kind, options={**layout, **rule.spec})
    _check_type(layer, new_layer, registry, str(stack.key_of_option("kind", layer.name, layer.kind)))
    return new_layer


def _check_type(layer: LayerDescription, new_layer: LayerDescription, registry: Registry, key: str) -> None:
    """Raise ``StackError`` if a layer cannot have the type that it was given; ``key`` gave it."""
    if not layer.query:
        raise StackError(
            f"{key}: layer {layer.name!r} ({layer.kind}) keeps a state that the model computes, so it cannot have "
            f"the type {new_layer.kind!r}; give other layers the type"
        )
    try:
        own_spec, new_spec = _comparable_spec(registry, layer), _comparable_spec(registry, new_layer)
    except (TypeError, ValueError, SpecError):
        return  # the error about its options is raised where the layer's spec is made
    for fact, own_answer, new_answer in (
        # A type that defines its attention stores what it needs of the same keys and values.
        (
            "stores",
            *((_stored_shapes(own_spec), _stored_shapes(new_spec)) if not new_spec.defines_attention else ("", "")),
        ),
        ("attends to the sequence", own_spec.sequence, new_spec.sequence),
        ("keeps tokens of the past", own_spec.keeps_past, new_spec.keeps_past),
    ):
        if own_answer != new_answer:
            raise StackError(
                f"{key}: layer {layer.name!r} ({layer.kind}) cannot have the type {new_layer.kind!r}: its type {fact} "
                f"{own_answer}, and that one {new_answer}"
            )


def _comparable_spec(registry: Registry, layer: LayerDescription) -> KVCacheSpec:
    """Return a layer's spec with blocks of a usual size, only to compare it."""
    spec: KVCacheSpec = registry.specs.load(layer.kind)(**{"block_size": 16, **layer.options})
    return spec


def _stored_shapes(spec: KVCacheSpec) -> Mapping[str, tuple[int, ...]]:
    return {name: tensor.shape[1:] for name, tensor in ask_state_tensors(spec).items()}
