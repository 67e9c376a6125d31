"""Layers that share caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvframe.contract import LayerSpec
from kvframe.planning.groups import group_layers


def share_caches(layers: Sequence[LayerSpec], targets: Mapping[str, str]) -> tuple[LayerSpec, ...]:
    """Return the layers, of which some read the caches of their targets; a wrong target raises as in a plan."""
    shared = tuple(attrs.evolve(layer, shares_with=targets.get(layer.name, layer.shares_with)) for layer in layers)
    group_layers(shared)
    return shared
