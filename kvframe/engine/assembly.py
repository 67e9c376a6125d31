"""Set-up: builds everything that serves a loaded model, and returns it as one value."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import torch

from kvframe.attention.layers import AttentionLayers
from kvframe.attention.local import LocalCaches
from kvframe.attention.state import StateLayers
from kvframe.attention.storage import HostStorage, KVCacheStorage
from kvframe.config.proposer_choice import make_proposer
from kvframe.config.stack import Stack
from kvframe.contract.backend import KVCache, PageCopier
from kvframe.contract.errors import KVFrameError, PluginError, StackError, shown
from kvframe.contract.foreign import call, safe_repr
from kvframe.contract.formats import PLAIN
from kvframe.contract.model import LoadedModel, PredictionHeads
from kvframe.contract.specs import LayerSpec
from kvframe.engine.ranks.agreement import agree
from kvframe.engine.ranks.fingerprint import Fingerprint
from kvframe.engine.ranks.follower import Follower
from kvframe.engine.ranks.leader import Leader, LeadingHostStorage, LeadingStorage
from kvframe.engine.running.device import check_device
from kvframe.loading.plugins import load_plugins
from kvframe.loading.registry import Registry
from kvframe.planning.draft_model import (
    PREFIX,
    as_draft_grouping,
    as_draft_name,
    as_draft_names,
    check_draft_model,
    draft_path,
    split_layers,
)
from kvframe.planning.groups import Grouping, group_layers, make_layer_specs
from kvframe.planning.machine import with_dtype
from kvframe.planning.memory import check_host_bytes
from kvframe.planning.plan import KVCachePlan, plan_cache
from kvframe.planning.recognise import adopt_model, find_adapter
from kvframe.planning.retyping import EditLayer, edited
from kvframe.planning.sizing import choose_max_model_len, copied_bytes, num_host_slabs, plan_for_stack
from kvframe.selection.choice import Choice, layers_on_copies
from kvframe.selection.select import select_backends
from kvframe.selection.skipping import Skipping, find_skipping

_log = logging.getLogger("kvframe")

NUM_COMPARED_TOKENS = 256
"""Tokens that the served model and the draft model must read alike."""
PLAIN_TOKENS = 1024
"""Tokens of the longest request in the set-up for the self-check."""


@attrs.frozen(kw_only=True, eq=False)
class Assembly:
    """The result of set-up for a model and a stack. While the engine runs, only the bytes of pages change.

    Attributes:
        model: The model.
        stack: The stack that was asked for.
        device: The device of the model and the cache.
        max_model_len: The most tokens of a request.
        grouping: The cache groups.
        plan: The cache plan.
        choices: For each layer, its wrapper chain, the chosen backend, and why the other backends were not chosen.
        storage: The pool.
        views: Each layer's state tensors in the pool.
        host: Host memory for the pages of preempted requests; None if these are recomputed.
        layers: The attention layers over the pool, to which the model is attached.
        draft: The draft model over the same pool and plan; None for none. In it, the layers of the draft model have the
            names that the draft model knows.
        kept: For prediction heads, the layer that keeps hidden states between steps; otherwise none.
    """

    model: LoadedModel
    stack: Stack
    device: torch.device
    max_model_len: int
    grouping: Grouping
    plan: KVCachePlan
    choices: tuple[Choice, ...]
    storage: KVCacheStorage
    views: Mapping[str, KVCache]
    host: HostStorage | None
    layers: AttentionLayers
    draft: Assembly | None = None
    kept: StateLayers | None = None


def assemble(
    model: LoadedModel,
    layers: Sequence[LayerSpec],
    stack: Stack,
    registry: Registry,
    ranks: Leader | Follower | None = None,
) -> Assembly:
    """Plan and allocate the cache, and choose a wrapper chain and a backend for every layer. The model is unchanged.

    If the stack's proposer has a draft model, or uses the model's prediction heads, these are loaded and set up over
    the same cache. Of several ranks, rank 0 alone runs them. The others keep their part of each page free: block ids
    are places in the pool, the same on all ranks.

    Args:
        model: A loaded model.
        layers: Its layer specs, as ``make_layer_specs`` returns them: those of the draft model too.
        stack: Memory, limits and rules.
        registry: Where backends and wrappers are looked up.
        ranks: The ranks that have the other shares of the layers; None for none.

    Raises:
        StackError: The stack asks for longer requests than the model takes, asks for prefill skipping of a model that
            cannot leave rows out, or gives a wrapper or a backend options that it does not have. Or the draft model
            cannot be used.
        PlanError: The memory is too small.
        WrapperError: A wrapper cannot serve a layer, or is at a wrong place in its chain.
        UnknownNameError: A cache spec's default chain names a wrapper that no plugin registers.
        PluginError: A wrapper cannot be imported.
        BackendError: No backend serves a layer, the named backend cannot serve it, or a backend could not be set up.
        EngineError: The ranks have different packages (``ranks_differ``).
        ModelError: The ranks have different models.
    """
    max_model_len = choose_max_model_len(model.description, stack)
    grouping = group_layers(layers, hybrid=stack.cache.hybrid)
    own, drafted = split_layers(layers)
    draft = load_draft_model(model, drafted, stack, registry, ranks) if drafted else None
    skipping, device = _find_skipping(model, layers, stack, registry), torch.device(stack.engine.device).type
    skipped = skipping.layers
    choices = select_backends(own, stack, registry, device, skipped, skipping.heads)
    draft_choices = select_backends(drafted, stack, registry, device)
    copied = layers_on_copies(layers, (*choices, *draft_choices))
    num_local_ranks = 1 if ranks is None else ranks.num_local_ranks
    plan = plan_for_stack(grouping, stack, max_model_len, model.description.max_input_lens, copied, num_local_ranks)
    if ranks is not None:
        plan = agree(ranks, layers, plan, choices, stack, Fingerprint.of(model, registry.versions))
    leader = ranks if isinstance(ranks, Leader) else None
    made = _assemble(model, own, stack, grouping, plan, choices, skipped, num_host_slabs(plan, stack), leader)
    return made if draft is None else attrs.evolve(made, draft=_assemble_draft(made, draft, drafted, draft_choices))


def load_draft_model(
    model: LoadedModel,
    layers: Sequence[LayerSpec],
    stack: Stack,
    registry: Registry,
    ranks: Leader | Follower | None = None,
) -> LoadedModel | None:
    """Return the draft model that a stack's proposer names, or the prediction heads of the model.

    Of several ranks, rank 0 alone runs it. Each rank may have a part of the weights that heads share with the model.

    Args:
        model: The model that is served.
        layers: The draft model's layers, as they were planned.
        stack: Its ``[engine] drafts``, device and dtype.
        registry: Where the proposer and model adapters are looked up.
        ranks: This process among those that serve the model; None if it is alone.

    Returns:
        The draft model, or the heads; None on another rank than 0.

    Raises:
        StackError: The draft model cannot be loaded, or cannot continue the model's requests.
        ModelError: The heads cannot be loaded.
    """
    where, proposer = f"{stack.source}: engine.drafts", make_proposer(stack, registry)
    if proposer is not None and proposer.uses_prediction_heads:
        heads = model.load_prediction_heads()
        return None if isinstance(ranks, Follower) else heads
    if isinstance(ranks, Follower):
        return None
    path = draft_path(proposer, stack)
    assert path is not None
    try:
        dtype = with_dtype(stack, path, registry).engine.dtype
        draft = find_adapter(path, registry).load(path, device=stack.engine.device, dtype=dtype, whole=True)
    except KVFrameError as error:
        raise StackError(f"{where}: the draft model: {error}") from error
    check_draft_model(draft.description, model.description, stack)
    if {layer.name for layer in layers} != {PREFIX + layer.name for layer in draft.description.layers}:
        raise StackError(
            f"{where}: the draft model {draft.description.name} has other layers than its config describes"
        )
    _check_same_tokens(draft, model, where)
    return draft


def _check_same_tokens(draft: LoadedModel, model: LoadedModel, where: str) -> None:
    """Raise ``StackError`` if both models have tokenizers, and these read some token ids differently."""
    size = model.description.vocab_size
    if size is None:
        return
    for token_id in range(0, size, max(1, size // NUM_COMPARED_TOKENS)):
        read, wanted = draft.decode([token_id]), model.decode([token_id])
        if read is None or wanted is None:
            return
        if read != wanted:
            raise StackError(
                f"{where}: the draft model {draft.description.name} reads the token {token_id} as {shown(read)}, and "
                f"{model.description.name} as {shown(wanted)}; name a draft model with the same tokens"
            )


def _assemble_draft(
    made: Assembly, draft: LoadedModel, layers: Sequence[LayerSpec], choices: Sequence[Choice]
) -> Assembly:
    """Return the set-up of a draft model over the cache of the served model, by the draft model's own names.

    Args:
        made: The set-up of the served model, planned for the layers of both.
        draft: The draft model.
        layers: Its layers, by their names in the plan.
        choices: Their wrapper chains and backends.
    """
    renamed, grouping = as_draft_names(layers), as_draft_grouping(made.grouping)
    chosen = tuple(
        attrs.evolve(
            choice,
            layer=as_draft_name(choice.layer),
            wrapped=attrs.evolve(choice.wrapped, name=as_draft_name(choice.wrapped.name)),
        )
        for choice in choices
    )
    views = {as_draft_name(name): view for name, view in made.storage.views.items()}
    kept = None
    if isinstance(draft, PredictionHeads):
        # What they keep between steps is read and written by their runner, and not in their forward.
        kept = StateLayers([layer for layer in renamed if layer.query is None], grouping, views)
        renamed = tuple(layer for layer in renamed if layer.query is not None)
    return attrs.evolve(
        made,
        model=draft,
        grouping=grouping,
        choices=chosen,
        views=views,
        kept=kept,
        layers=AttentionLayers(
            renamed,
            chosen,
            grouping,
            views,
            made.device,
            max_static_copies=copied_bytes(made.plan, grouping, layers_on_copies(renamed, chosen)),
            audited=made.stack.cache.audit,
        ),
    )


def assemble_plain(assembly: Assembly, layers: Sequence[LayerSpec], registry: Registry) -> Assembly:
    """Return a small set-up in the plain format, in which a model can be compared with its own forward.

    The comparison finds a model that does not attend as its masks say. The rounding of another cache format would hide
    such an error.

    Args:
        assembly: The set-up that is to serve.
        layers: The layer specs that it was made of.
        registry: Where backends and wrappers are looked up.

    Returns:
        A separate set-up for a few short requests; ``assembly`` itself if its layers are plain already.

    Raises:
        BackendError: No backend serves a layer in the plain format, or the named backend does not.
    """
    plain = plain_layers(layers)
    if plain == tuple(layers):
        return assembly
    model, stack = assembly.model, assembly.stack
    grouping = group_layers(plain, hybrid=stack.cache.hybrid)
    limits: dict[str, Any] = {
        "max_model_len": min(assembly.max_model_len, PLAIN_TOKENS),
        "max_num_batched_tokens": stack.engine.max_num_batched_tokens,
        "max_input_lens": model.description.max_input_lens,
        "pages_per_slab": [1] * len(grouping.groups),
    }
    # The first plan says how many slabs one request takes; the second plan has that many.
    slab_bytes = max((group.page_bytes for group in grouping.groups), default=0)
    enough = (len(grouping.groups) + 1) * slab_bytes
    peaks = plan_cache(grouping, memory_bytes=enough, **limits).peak_blocks(limits["max_model_len"])
    plan = plan_cache(grouping, memory_bytes=enough + sum(peaks) * slab_bytes, **limits)
    skipped = assembly.layers.skipped
    choices = select_backends(plain, stack, registry, assembly.device.type, skipped)
    return _assemble(model, plain, stack, grouping, plan, choices, skipped)


def plain_layers(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers in the plain format."""
    return tuple(
        layer if layer.spec is None else attrs.evolve(layer, spec=layer.spec.in_format(PLAIN)) for layer in layers
    )


def _assemble(
    model: LoadedModel,
    layers: Sequence[LayerSpec],
    stack: Stack,
    grouping: Grouping,
    plan: KVCachePlan,
    choices: tuple[Choice, ...],
    skipped: tuple[str, ...],
    host_slabs: int = 0,
    leader: Leader | None = None,
) -> Assembly:
    device = torch.device(stack.engine.device)
    _check_memory(plan, stack, device, host_slabs)
    make_storage: Callable[..., KVCacheStorage] = KVCacheStorage
    make_host: Callable[..., HostStorage] = HostStorage
    if leader is not None:
        make_storage, make_host = partial(LeadingStorage, leader), partial(LeadingHostStorage, leader)
    storage = make_storage(plan, grouping, device)
    local = LocalCaches(
        layers, device, max_tokens=stack.engine.max_num_batched_tokens, max_reqs=stack.engine.max_num_seqs
    )
    return Assembly(
        model=model,
        stack=stack,
        device=device,
        max_model_len=plan.max_model_len,
        grouping=grouping,
        plan=plan,
        choices=choices,
        storage=storage,
        views=storage.views,
        host=make_host(plan, storage.pool, host_slabs, copy_pages=find_page_copier(choices)) if host_slabs else None,
        layers=AttentionLayers(
            layers,
            choices,
            grouping,
            storage.views,
            device,
            skipped,
            local,
            copied_bytes(plan, grouping, layers_on_copies(layers, choices)),
            audited=stack.cache.audit,
        ),
    )


def _check_memory(plan: KVCachePlan, stack: Stack, device: torch.device, host_slabs: int) -> None:
    """Raise if the host's memory is too small for the sum of the cache, the swap memory and the tokens."""
    pool = plan.total_bytes if device.type == "cpu" else 0
    swapped, tokens = host_slabs * plan.slab_bytes, 8 * stack.engine.max_num_seqs * plan.max_model_len
    check_host_bytes(
        pool + swapped + tokens,
        f"the host has no {pool + swapped + tokens} bytes: {pool} for the cache, {swapped} to swap to and {tokens} for "
        f"the tokens of {stack.engine.max_num_seqs} requests of {plan.max_model_len}; ask for less memory, "
        "swap_memory, max_num_seqs or max_model_len",
    )


def find_page_copier(choices: Sequence[Choice]) -> PageCopier | None:
    """Return the copy kernel of the first chosen backend that provides one; None if none does.

    Raises:
        PluginError: A backend's ``page_copier`` raises, or returns a value that is not callable.
    """
    for choice in choices:
        whose = f"backend {choice.backend!r}, of layer {choice.layer!r}: page_copier()"
        copier = call(whose, choice.backend_class.page_copier)
        if copier is not None:
            if not callable(copier):
                raise PluginError(f"{whose} must return a function or None, not {safe_repr(copier)}")
            return copier
    return None


def _find_skipping(model: LoadedModel, layers: Sequence[LayerSpec], stack: Stack, registry: Registry) -> Skipping:
    skipping = find_skipping(layers, stack, registry)
    if skipping.note is not None:
        _log.info("%s: %s", model.description.name, skipping.note)
    skipped = skipping.layers
    if skipped and not model.can_skip(skipped):
        raise StackError(
            f"{stack.source}: engine.prefill_skipping is on, and {model.description.name} could skip the layers "
            f"{skipped[0]!r} to {skipped[-1]!r}, but its model adapter cannot leave rows out of its forward; leave "
            "the key out"
        )
    return skipping


def load_model(
    path: Path, stack: Stack, plugins: Sequence[ModuleType], edit: EditLayer | None = None
) -> tuple[LoadedModel, tuple[LayerSpec, ...], Registry, Stack]:
    """Return the model at ``path``, its layer specs, the registry of the plugins, and the stack with its dtype.

    Args:
        path: A model's folder.
        stack: What to use, with a device.
        plugins: Manifest modules to use beside the installed plugins.
        edit: Changes the types of layers; None for the model's own.

    Raises:
        KVFrameError: The stack, a plugin that it names, or the model is wrong.
    """
    registry = load_plugins(stack.plugins, plugins).registry
    stack.check(registry)
    check_device(stack)
    stack = with_dtype(stack, path, registry)
    model = find_adapter(path, registry).load(path, device=stack.engine.device, dtype=stack.engine.dtype)
    description = edited(model.description, edit, registry)
    return model, make_layer_specs(description, registry, stack, stack.engine.dtype), registry, stack


def adopt(
    model: Any, tokenizer: Any, stack: Stack, plugins: Sequence[ModuleType]
) -> tuple[LoadedModel, tuple[LayerSpec, ...], Registry, Stack]:
    """Return a model that is in memory, its layer specs, the registry, and the stack with its device and dtype.

    Args:
        model: The object that the user gave.
        tokenizer: Its tokenizer, or None.
        stack: What to use, besides device and dtype.
        plugins: Manifest modules to use beside the installed plugins.

    Raises:
        KVFrameError: The stack, a plugin that it names, or the model is wrong.
    """
    registry = load_plugins(stack.plugins, plugins).registry
    stack.check(registry)
    found = adopt_model(model, tokenizer, registry)
    stack = attrs.evolve(stack, engine=attrs.evolve(stack.engine, device=found.device, dtype=found.dtype))
    return found.model, make_layer_specs(found.model.description, registry, stack, found.dtype), registry, stack
