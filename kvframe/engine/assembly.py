"""From a loaded model to everything that serves it: the flow of set-up, run once, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import attrs
import torch

from kvframe.attention.layer import AttentionLayers
from kvframe.attention.local import LocalCaches
from kvframe.attention.selection import Choice, select_backends
from kvframe.attention.skipping import find_skippable_layers
from kvframe.cache.storage import HostStorage, KVCacheStorage
from kvframe.errors import StackError
from kvframe.groups import Grouping, group_layers, make_layer_specs
from kvframe.model.adapter import LoadedModel
from kvframe.model.recognise import find_adapter
from kvframe.plan import KVCachePlan
from kvframe.plugins import load_plugins
from kvframe.registry import Registry
from kvframe.sizing import choose_max_model_len, num_host_slabs, plan_for_stack
from kvframe.specs import LayerSpec
from kvframe.stack import Stack


@attrs.frozen(kw_only=True, eq=False)
class Assembly:
    """What set-up made of a model and a stack. While requests come and go, nothing in it changes but bytes of pages.

    Attributes:
        model: The model.
        stack: What was asked for.
        device: Where it runs.
        max_model_len: The most tokens of a request.
        grouping: The cache groups.
        plan: What is allocated.
        choices: For each layer, its wrapper chain, the backend that was chosen, and why the others were not.
        storage: The pool.
        host: Host memory for the pages of preempted requests; None where they are computed again.
        layers: The attention layers over the pool, for the model to be attached to.
    """

    model: LoadedModel
    stack: Stack
    device: torch.device
    max_model_len: int
    grouping: Grouping
    plan: KVCachePlan
    choices: tuple[Choice, ...]
    storage: KVCacheStorage
    host: HostStorage | None
    layers: AttentionLayers


def assemble(model: LoadedModel, layers: Sequence[LayerSpec], stack: Stack, registry: Registry) -> Assembly:
    """Plan and allocate the cache, and choose a wrapper chain and a backend for every layer. The model is not touched.

    Args:
        model: A loaded model.
        layers: Its layer specs, as ``make_layer_specs`` returns them.
        stack: Memory, limits and rules.
        registry: Where backends and wrappers are looked up.

    Raises:
        StackError: The stack asks for longer requests than the model takes, for prefill skipping of a model that
            cannot leave rows out, or gives a wrapper or backend options that it does not have.
        PlanError: The memory is too small.
        WrapperError: A wrapper cannot serve a layer, or may not stand where it does in its chain.
        UnknownNameError: A cache spec's default chain names a wrapper that no plugin registers.
        PluginError: A wrapper cannot be imported.
        BackendError: No backend serves a layer, the one that was named cannot, or one could not be set up.
    """
    device = torch.device(stack.engine.device)
    max_model_len = choose_max_model_len(model.description, stack)
    grouping = group_layers(layers, hybrid=stack.cache.hybrid)
    plan = plan_for_stack(grouping, stack, max_model_len, model.description.max_input_lens)
    skipped = _skipped_layers(model, layers, stack)
    choices = select_backends(layers, stack, registry, device.type, skipped)
    host_slabs = num_host_slabs(plan, stack)
    storage = KVCacheStorage(plan, grouping, device)
    local = LocalCaches(
        layers, device, max_tokens=stack.engine.max_num_batched_tokens, max_reqs=stack.engine.max_num_seqs
    )
    return Assembly(
        model=model,
        stack=stack,
        device=device,
        max_model_len=max_model_len,
        grouping=grouping,
        plan=plan,
        choices=choices,
        storage=storage,
        host=HostStorage(plan, storage.pool, host_slabs) if host_slabs else None,
        layers=AttentionLayers(layers, choices, grouping, storage.views, device, skipped, local),
    )


def _skipped_layers(model: LoadedModel, layers: Sequence[LayerSpec], stack: Stack) -> tuple[str, ...]:
    skipped = () if stack.engine.prefill_skipping is None else find_skippable_layers(layers)
    if skipped and not model.can_skip(skipped):
        raise StackError(
            f"{stack.source}: engine.prefill_skipping is on, and {model.description.name} could skip the layers "
            f"{skipped[0]!r} to {skipped[-1]!r}, but its model adapter cannot leave rows out of its forward; leave "
            "the key out"
        )
    return skipped


def load_model(
    path: Path, stack: Stack, plugins: Sequence[ModuleType]
) -> tuple[LoadedModel, tuple[LayerSpec, ...], Registry]:
    """Return the model at ``path``, its layer specs, and the registry that they were looked up in.

    Args:
        path: A model's folder.
        stack: What to use.
        plugins: Manifest modules to use beside the installed plugins.

    Raises:
        KVFrameError: What is wrong with the stack, a plugin it names, or the model.
    """
    registry = load_plugins(stack.plugins, plugins).registry
    stack.check(registry)
    _check_device(stack)
    model = find_adapter(path, registry).load(path, device=stack.engine.device, dtype=stack.engine.dtype)
    return model, make_layer_specs(model.description, registry, stack, stack.engine.dtype), registry


def _check_device(stack: Stack) -> None:
    """Refuse a device that is not there before a model is loaded for it."""
    try:
        torch.empty(0, device=stack.engine.device)
    except (RuntimeError, AssertionError) as error:  # a build of torch without the device asserts
        reason = str(error).strip().splitlines()[0]
        raise StackError(f"{stack.source}: engine.device {stack.engine.device!r} cannot be used: {reason}") from error
