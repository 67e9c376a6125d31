"""Makes the attention layers of a set-up, over a pool of pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvframe.attention.layers import AttentionLayers
from kvframe.attention.local import LocalCaches
from kvframe.contract.backend import KVCache
from kvframe.hosting.setup import Setup
from kvframe.planning.plan import KVCachePlan
from kvframe.planning.sizing import copied_bytes
from kvframe.selection.choice import Choice, layers_on_copies


def make_layers(
    setup: Setup,
    plan: KVCachePlan,
    views: Mapping[str, KVCache],
    choices: Sequence[Choice] | None = None,
    *,
    with_states: bool = True,
) -> AttentionLayers:
    """Return the attention layers of a model, and its state layers, on the pages of a pool.

    Args:
        setup: What the stack does with the model.
        plan: The plan of the pool.
        views: Each layer's state tensors in the pool (``KVCacheStorage.views``).
        choices: Other wrapper chains and backends than those of the set-up, for the same layers; None for those.
        with_states: Whether the layers that keep a state and do not attend are among them.

    Raises:
        BackendError: A backend could not be set up.
        PlanError: The device has no memory for the scratch pages of layers that keep nothing of the past.
    """
    choices = setup.choices if choices is None else choices
    layers = [layer for layer in setup.layers if with_states or layer.query is not None]
    limits, device = setup.stack.limits, torch.device(setup.stack.model.device)
    local = LocalCaches(layers, device, max_tokens=limits.max_num_batched_tokens, max_reqs=limits.max_num_seqs)
    return AttentionLayers(
        layers,
        choices,
        setup.grouping,
        views,
        device,
        setup.skipping.layers,
        local,
        copied_bytes(plan, setup.grouping, layers_on_copies(layers, choices)),
        audited=setup.stack.cache.audit,
    )
