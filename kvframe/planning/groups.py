"""Grouping: sorts a model's layers into groups that share one block table each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import attrs

from kvframe.config.format_choice import default_format, follow_owners, make_format, store_in
from kvframe.contract.errors import (
    ContestedNameError,
    KVFrameError,
    PluginError,
    SpecError,
    StackError,
    UnknownNameError,
)
from kvframe.contract.foreign import call
from kvframe.contract.formats import KVFormat
from kvframe.contract.specs import STATE_ALIGNMENT_BYTES, TOKENS, KVCacheSpec, LayerSpec, QuerySpec
from kvframe.planning.answers import ask, ask_count, ask_live_ranges, lacks
from kvframe.planning.prompt_budget import check_prompt_budget
from kvframe.planning.retyping import retyped
from kvframe.planning.rollback import RollbackSpec

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.contract.description import LayerDescription, ModelDescription
    from kvframe.loading.registry import Registry

_MOST_ROLLBACK_STATES = 1 << 16


@attrs.frozen(kw_only=True)
class KVCacheGroup:
    """Layers that share one block table.

    Attributes:
        index: The group's number; block tables and metadata are listed by it.
        spec: The stored state, and the past tokens for which it is kept; layers may differ from it in their layout
            only.
        layers: Names of the layers that keep state in this group, in the model's order.
        stored: The state that each of these layers stores, in the same order.
        num_parts: How many times a page holds the layers' state: more than once in a group of rollback states.
    """

    index: int
    spec: KVCacheSpec
    layers: tuple[str, ...]
    stored: tuple[KVCacheSpec, ...]
    num_parts: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: one block of tokens for every layer of the group.

        It is at least ``STATE_ALIGNMENT_BYTES``, even if all layers of the group store their state elsewhere.
        """
        return self.num_parts * max(STATE_ALIGNMENT_BYTES, sum(spec.block_bytes for spec in self.stored))


@attrs.frozen(kw_only=True)
class Grouping:
    """The groups of a model, and the layers that read another layer's cache.

    Attributes:
        groups: The groups, in the order of their first layers. A group of rollback states follows the group of its
            layers. Empty for a model that keeps no state.
        follows: For each layer that shares a cache, the layer whose cache it reads.
        step_local: The layers that attend to a request's own tokens and keep none of them: a step has to compute all
            tokens of such a request.
    """

    groups: tuple[KVCacheGroup, ...]
    follows: Mapping[str, str]
    step_local: tuple[str, ...] = ()

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt must be computed in one step, because no state is kept for a later step."""
        return bool(self.step_local) or not self.groups

    @property
    def note(self) -> str | None:
        """One sentence that says why prompts are computed in one step; None if every layer keeps state."""
        if not self.groups:
            why = "no layer keeps anything of the past"
        elif self.step_local:
            why = f"layers such as {self.step_local[0]!r} attend to whole requests and keep nothing"
        else:
            return None
        return f"{why}: each prompt is computed in one step, and no prefix is cached"

    def group_of(self, layer: str) -> KVCacheGroup:
        """Return the group whose block table ``layer`` reads; the layer must keep or read state."""
        return self.groups_of(layer)[0]

    def groups_of(self, layer: str) -> tuple[KVCacheGroup, ...]:
        """Return ``group_of`` and, if the layer has rollback states, their group."""
        target = self.follows.get(layer, layer)
        return tuple(group for group in self.groups if target in group.layers)


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
    description = retyped(description, registry, stack)
    cache_dtype = dtype if stack.cache.dtype == "auto" else stack.cache.dtype
    dtypes = {"dtype": cache_dtype, "model_dtype": dtype}
    kv_format = default_format(stack, registry)
    chosen = {
        layer.name
        for layer in description.layers
        if "format" in {**layer.options, **stack.rule_for(layer.name, layer.kind).spec}
    }
    layers = [
        spec
        for layer in description.layers
        for spec in with_entries(_layer_spec(layer, registry, stack, dtypes, kv_format), layer.inputs)
    ]
    return follow_owners([_with_drafts(layer, num_drafts, stack) if num_drafts else layer for layer in layers], chosen)


def with_entries(layer: LayerSpec, given_inputs: frozenset[str]) -> Iterator[LayerSpec]:
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
        missing = sorted(ask(spec, "inputs(query)", lambda: set(spec.inputs(query))) - given_inputs)
        if missing:
            raise SpecError(
                f"layer {layer.name!r}: its type {spec.kind!r} needs the input {missing[0]!r} with each call, and the "
                f"model gives {', '.join(sorted(given_inputs)) or 'none'}; only a model adapter that gives it "
                "can serve the type"
            )
    entries = ask(
        spec, "entries", lambda: {name: (each, each.sequence, {**each.entries}) for name, each in spec.entries.items()}
    )
    for name, (entry, sequence, more) in entries.items():
        if layer.shares_with is not None:
            raise SpecError(f"layer {layer.name!r} shares a cache, and its type {spec.kind!r} keeps entries of its own")
        if sequence != spec.sequence or more:
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
    num_kept = max(_num_rollback_states(spec), spec.states_per_block - 1)
    if layer.query is None and layer.entry_of is None and num_kept < num_drafts:
        raise StackError(
            f"{stack.source}: model.drafts computes up to {num_drafts} draft tokens of a request, but the layer "
            f"{layer.name!r} of the kind {spec.kind!r} keeps {num_kept} states to go back to; leave the key out, or "
            "use a type whose with_drafts() keeps them"
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
    unknown = sorted(set(options) - fields)
    if unknown:
        wrong = UnknownNameError("option", unknown[0], fields)
        place = stack.place_of_option(unknown[0], layer.name, layer.kind)
        if place is not None:
            raise StackError(f"{place}: the cache spec {layer.kind!r} of layer {layer.name!r}: {wrong}")
        raise SpecError(f"layer {layer.name!r}: the cache spec {layer.kind!r}: {wrong}")
    required = {field.name for field in attrs.fields(spec_class) if field.init and field.default is attrs.NOTHING}
    if missing := sorted(required - set(options)):
        raise SpecError(f"layer {layer.name!r}: the cache spec {layer.kind!r} needs {', '.join(missing)}")
    # A type that stores other state than keys and values may use the field name ``format`` for something else.
    field = attrs.fields_dict(spec_class).get("format")
    takes_format = field is not None and isinstance(field.default, KVFormat)
    given = options.pop("format", None) if takes_format else None
    try:
        query = QuerySpec(**layer.query) if layer.query else None
        made = call("making its cache spec", partial(spec_class, **options), passes=(KVFrameError,))
        spec = store_in(made, None if given is None else make_format(given, registry), default=kv_format)
        return LayerSpec(
            name=layer.name, spec=spec, query=query, shares_with=layer.shares_with, entry_of=layer.entry_of
        )
    except (SpecError, UnknownNameError, ContestedNameError, PluginError, TypeError, ValueError) as error:
        raise SpecError(f"layer {layer.name!r} ({layer.kind}): {error}") from error


def group_layers(layers: Sequence[LayerSpec], *, hybrid: bool = True) -> Grouping:
    """Put layers into one group if their specs differ at most in their layout.

    Args:
        layers: The model's layers, in the order they run.
        hybrid: Whether each layer keeps only its live range; if False, every layer that can keeps every past token.

    Raises:
        SpecError: Two layers have one name, or a layer shares a cache that it cannot read.
    """
    follows = _find_owners(layers)
    members: dict[tuple[object, int], list[tuple[str, KVCacheSpec]]] = {}
    for layer in layers:
        stored = stored_state(layer, hybrid=hybrid)
        if stored is not None:
            members.setdefault(placement_of(stored), []).append((layer.name, stored))
    groups: list[KVCacheGroup] = []
    for (_, num_rollback_states), alike in members.items():
        group = KVCacheGroup(
            index=len(groups),
            spec=alike[0][1],
            layers=tuple(name for name, _ in alike),
            stored=tuple(stored for _, stored in alike),
        )
        groups.append(group)
        if num_rollback_states:
            spec = RollbackSpec(block_size=group.spec.block_size, num_states=num_rollback_states)
            groups.append(attrs.evolve(group, index=len(groups), spec=spec, num_parts=num_rollback_states))
    return Grouping(
        groups=tuple(groups),
        follows=follows,
        step_local=tuple(layer.name for layer in layers if is_step_local(layer)),
    )


def stored_state(layer: LayerSpec, *, hybrid: bool = True) -> KVCacheSpec | None:
    """Return the state that a layer stores; None if it stores none, or reads another layer's."""
    if layer.shares_with is not None or layer.spec is None or not layer.spec.keeps_past:
        return None
    return layer.spec if hybrid else ask(layer.spec, "retain_all()", partial(_retained, layer.spec))


def placement_of(stored: KVCacheSpec) -> tuple[object, int]:
    """Return what decides the group of a layer's ``stored_state``: layers with equal values share a group."""
    return ask(stored, "group_key", partial(_hashable_key, stored)), _num_rollback_states(stored)


def _retained(spec: KVCacheSpec) -> KVCacheSpec:
    """Return a spec that keeps every past token, in the layout of ``spec``."""
    return spec.retain_all().in_format(spec.kv_format)


def _num_rollback_states(spec: KVCacheSpec) -> int:
    num = ask_count(spec, "num_rollback_states", lambda: spec.num_rollback_states, least=0, most=_MOST_ROLLBACK_STATES)
    if num:  # states before the last one are in a separate group
        ask_count(spec, "states_per_block", lambda: spec.states_per_block, least=1, most=1)
    return num


def _hashable_key(spec: KVCacheSpec) -> tuple[object, ...]:
    key = spec.group_key
    hash(key)
    return key


def is_step_local(layer: LayerSpec) -> bool:
    """Return whether a layer attends to a request's own tokens and keeps none of them."""
    return (
        layer.query is not None
        and layer.spec is not None
        and not layer.spec.keeps_past
        and layer.spec.sequence == TOKENS
    )


def _find_owners(layers: Sequence[LayerSpec]) -> dict[str, str]:
    """Return the owner of the cache of each layer that shares one; raise if the layer cannot read that cache."""
    by_name = {layer.name: layer for layer in layers}
    if len(by_name) != len(layers):
        names = [layer.name for layer in layers]
        raise SpecError(f"two layers are named {next(name for name in names if names.count(name) > 1)!r}")
    places = {layer.name: index for index, layer in enumerate(layers)}
    owners: dict[str, str] = {}
    for layer in layers:
        if layer.shares_with is None:
            continue
        owner = _cache_owner(layer, by_name)
        if places[owner.name] > places[layer.name]:
            raise SpecError(f"layer {layer.name!r} shares the cache of {owner.name!r}, which runs after it")
        _check_readable(layer, owner)
        owners[layer.name] = owner.name
    return owners


def _cache_owner(layer: LayerSpec, by_name: Mapping[str, LayerSpec]) -> LayerSpec:
    """Return the layer that keeps the cache, at the end of a chain of sharing layers."""
    seen = [layer.name]
    while layer.shares_with is not None:
        target = by_name.get(layer.shares_with)
        if target is None:
            raise UnknownNameError("layer", layer.shares_with, by_name, f"{layer.name!r} shares its cache")
        if target.name in seen:
            raise SpecError(f"layers share each other's caches in a circle: {' → '.join([*seen, target.name])}")
        seen.append(target.name)
        layer = target
    if layer.spec is None or not layer.spec.keeps_past:
        raise SpecError(f"layer {seen[0]!r} shares the cache of {layer.name!r}, which keeps none")
    return layer


def _check_readable(layer: LayerSpec, owner: LayerSpec) -> None:
    """Raise for a layer that needs state that the owner of the cache does not store, or no longer keeps."""
    assert layer.spec is not None
    assert owner.spec is not None
    if layer.spec == owner.spec:
        return
    if layer.spec.block_size != owner.spec.block_size:
        raise SpecError(
            f"layer {layer.name!r} has blocks of {layer.spec.block_size} tokens and shares the cache of "
            f"{owner.name!r}, whose blocks have {owner.spec.block_size}"
        )
    if dict(layer.spec.state_tensors()) != dict(owner.spec.state_tensors()):
        raise SpecError(f"layer {layer.name!r} shares the cache of {owner.name!r}, which stores other tensors")
    if layer.spec.kv_format != owner.spec.kv_format:
        raise SpecError(
            f"layer {layer.name!r} reads the format {layer.spec.kv_format} and shares the cache of {owner.name!r}, "
            f"which is stored as {owner.spec.kv_format}"
        )
    for n in _probed_positions(layer.spec, owner.spec):
        specs = (layer.spec, owner.spec)
        lost = lacks(*(ask_live_ranges(spec, n) for spec in specs))
        if lost is not None:
            raise SpecError(
                f"layer {layer.name!r} shares the cache of {owner.name!r}, which no longer keeps all of the tokens "
                f"{lost[0]} to {lost[1] - 1} that {layer.name!r} needs at position {n}"
            )


_FARTHEST_PROBE = 1 << 20


def _probed_positions(*specs: KVCacheSpec) -> list[int]:
    """Return the positions at which live ranges are compared: near the types' own sizes, and far out."""
    sizes = {1 << power for power in range(_FARTHEST_PROBE.bit_length())}
    sizes |= {size for spec in specs for size in attrs.astuple(spec, recurse=False) if type(size) is int}
    positions = {size + offset for size in sizes if size <= _FARTHEST_PROBE for offset in (-1, 0, 1)}
    return sorted(position for position in positions if position > 0)
