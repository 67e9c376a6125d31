"""Sorts a model's layers into groups that share one block table each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import attrs

from kvframe.contract.errors import SpecError, UnknownNameError
from kvframe.contract.specs import STATE_ALIGNMENT_BYTES, TOKENS, KVCacheSpec, LayerSpec
from kvframe.planning.answers import ask, ask_count, ask_live_ranges, lacks
from kvframe.planning.rollback import RollbackSpec

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
        state = stored_state(layer, hybrid=hybrid)
        if state is not None:
            members.setdefault(placement_of(state), []).append((layer.name, state))
    groups: list[KVCacheGroup] = []
    for (_, num_states), members_of_group in members.items():
        group = KVCacheGroup(
            index=len(groups),
            spec=members_of_group[0][1],
            layers=tuple(name for name, _ in members_of_group),
            stored=tuple(spec for _, spec in members_of_group),
        )
        groups.append(group)
        if num_states:
            spec = RollbackSpec(block_size=group.spec.block_size, num_states=num_states)
            groups.append(attrs.evolve(group, index=len(groups), spec=spec, num_parts=num_states))
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


def placement_of(state: KVCacheSpec) -> tuple[object, int]:
    """Return what decides the group of a layer's ``stored_state``: layers with equal values share a group."""
    return ask(state, "group_key", partial(_hashable_key, state)), num_rollback_states(state)


def _retained(spec: KVCacheSpec) -> KVCacheSpec:
    """Return a spec that keeps every past token, in the layout of ``spec``."""
    return spec.retain_all().in_format(spec.kv_format)


def num_rollback_states(spec: KVCacheSpec) -> int:
    """Return ``KVCacheSpec.num_rollback_states``; raise ``SpecError`` if the answer is not a possible number."""
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
    indices = {layer.name: index for index, layer in enumerate(layers)}
    owners: dict[str, str] = {}
    for layer in layers:
        if layer.shares_with is None:
            continue
        owner = _cache_owner(layer, by_name)
        if indices[owner.name] > indices[layer.name]:
            raise SpecError(f"layer {layer.name!r} shares the cache of {owner.name!r}, which runs after it")
        _check_readable(layer, owner)
        owners[layer.name] = owner.name
    return owners


def _cache_owner(layer: LayerSpec, by_name: Mapping[str, LayerSpec]) -> LayerSpec:
    """Return the layer that keeps the cache, at the end of a chain of sharing layers."""
    chain = [layer.name]
    while layer.shares_with is not None:
        target = by_name.get(layer.shares_with)
        if target is None:
            raise UnknownNameError("layer", layer.shares_with, by_name, f"{layer.name!r} shares its cache")
        if target.name in chain:
            raise SpecError(f"layers share each other's caches in a circle: {' → '.join([*chain, target.name])}")
        chain.append(target.name)
        layer = target
    if layer.spec is None or not layer.spec.keeps_past:
        raise SpecError(f"layer {chain[0]!r} shares the cache of {layer.name!r}, which keeps none")
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
        lost_tokens = lacks(*(ask_live_ranges(spec, n) for spec in specs))
        if lost_tokens is not None:
            raise SpecError(
                f"layer {layer.name!r} shares the cache of {owner.name!r}, which no longer keeps all of the tokens "
                f"{lost_tokens[0]} to {lost_tokens[1] - 1} that {layer.name!r} needs at position {n}"
            )


_FARTHEST_PROBE = 1 << 20


def _probed_positions(*specs: KVCacheSpec) -> list[int]:
    """Return the positions at which live ranges are compared: near the types' own sizes, and far out."""
    sizes = {1 << power for power in range(_FARTHEST_PROBE.bit_length())}
    sizes |= {size for spec in specs for size in attrs.astuple(spec, recurse=False) if type(size) is int}
    positions = {size + offset for size in sizes if size <= _FARTHEST_PROBE for offset in (-1, 0, 1)}
    return sorted(position for position in positions if position > 0)
