"""Set-up: builds everything that serves a loaded model, and returns it as one value."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import attrs
import torch

from kvframe import (
    Choice,
    KVCachePlan,
    KVCacheStorage,
    Layers,
    Setup,
    Stack,
    allocating,
)
from kvframe.contract.backend import KVCache, PageCopier
from kvframe.contract.errors import PluginError, StackError
from kvframe.contract.foreign import call, safe_repr
from kvframe.contract.formats import PLAIN
from kvframe.contract.model import LoadedModel, PredictionHeads
from kvframe.contract.specs import LayerSpec
from kvframe_engine.drafts import draft_views, load_draft, setup_of_draft
from kvframe_engine.host_storage import HostStorage
from kvframe_engine.ranks.agreement import agree
from kvframe_engine.ranks.fingerprint import Fingerprint
from kvframe_engine.ranks.follower import Follower
from kvframe_engine.ranks.leader import Leader, LeadingHostStorage, LeadingStorage

_log = logging.getLogger("kvframe")

PLAIN_TOKENS = 1024
"""Tokens of the longest request in the set-up for the self-check."""
PLAIN_REQUESTS = 8
"""The most requests of a step in that set-up."""


@attrs.frozen(kw_only=True, eq=False)
class Assembly:
    """The result of set-up for a model and a stack. While the engine runs, only the bytes of pages change.

    Attributes:
        model: The model.
        setup: What the stack does with the model.
        device: The device of the model and the cache.
        plan: The cache plan.
        storage: The pool.
        views: Each layer's state tensors in the pool.
        host: Host memory for the pages of preempted requests; None if these are recomputed.
        layers: The attention layers over the pool, to which the model is attached.
        draft: The draft model over the same pool and plan; None for none. In it, the layers of the draft model have the
            names that the draft model knows.
        kept: For prediction heads, the layer that keeps hidden states between steps; otherwise none.
    """

    model: LoadedModel
    setup: Setup
    device: torch.device
    plan: KVCachePlan
    storage: KVCacheStorage
    views: Mapping[str, KVCache]
    host: HostStorage | None
    layers: Layers
    draft: Assembly | None = None
    kept: Layers | None = None

    @property
    def choices(self) -> tuple[Choice, ...]:
        """For each layer, its wrapper chain, the chosen backend, and why the other backends were not chosen."""
        return self.setup.choices

    @property
    def stack(self) -> Stack:
        """The stack that was asked for."""
        return self.setup.stack

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request."""
        return self.plan.max_model_len


def assemble(model: LoadedModel, setup: Setup, ranks: Leader | Follower | None = None) -> Assembly:
    """Allocate the cache, and set up the wrapper chain and the backend of every layer. The model is unchanged.

    If the stack's proposer has a draft model, or uses the model's prediction heads, these are loaded and set up over
    the same cache. Of several ranks, rank 0 alone runs them. The others keep their part of each page free: block ids
    are indices in the pool, the same on all ranks.

    Args:
        model: A loaded model.
        setup: What the stack does with it.
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
    if ranks is not None:
        setup = attrs.evolve(setup, num_local_ranks=ranks.num_local_ranks)
        check_ranks_keep_prompts(setup)
    draft = _load_draft(model, setup, ranks) if setup.draft_layers else None
    _check_skipping(model, setup)
    plan = setup.plan
    if ranks is not None:
        plan = agree(ranks, setup, Fingerprint.of(model, setup.registry.versions))
    leader = ranks if isinstance(ranks, Leader) else None
    assembly = _assemble(model, setup, plan, setup.num_host_slabs(plan), leader)
    return assembly if draft is None else attrs.evolve(assembly, draft=_assemble_draft(assembly, draft))


def check_ranks_keep_prompts(setup: Setup) -> None:
    """Raise ``StackError`` for a layer that keeps a part of its prompts: only rank 0 knows when it chooses."""
    for layer in setup.all_layers:
        if layer.spec is not None and layer.spec.prompt_budget is not None:
            raise StackError(
                f"{setup.stack.source}: layer {layer.name!r} of the kind {layer.spec.kind!r} keeps a part of each "
                "prompt, and several ranks share the model; serve it on one rank, or give the layer another type"
            )


def _load_draft(model: LoadedModel, setup: Setup, ranks: Leader | Follower | None) -> LoadedModel | None:
    """Return what drafts for the model; None on another rank than 0, which loads only its share of the heads."""
    is_follower = isinstance(ranks, Follower)
    draft = None if is_follower and not setup.drafts.are_heads else load_draft(model, setup)
    return None if is_follower else draft


def _assemble_draft(assembly: Assembly, draft: LoadedModel) -> Assembly:
    """Return the set-up of a draft model over the cache of the served model, by the draft model's own names.

    Args:
        assembly: The set-up of the served model, planned for the layers of both.
        draft: The draft model.
    """
    setup = setup_of_draft(assembly.setup, draft.description)
    views = draft_views(assembly.storage.views)
    # What heads keep between steps is read and written by their runner, and not in their forward.
    has_heads = isinstance(draft, PredictionHeads)
    stored_layers = [layer for layer in setup.layers if layer.query is None] if has_heads else []
    layers = [layer for layer in setup.layers if layer not in stored_layers]
    return attrs.evolve(
        assembly,
        model=draft,
        setup=setup,
        views=views,
        kept=setup.make_layers(views, assembly.plan, (), stored_layers) if has_heads else None,
        layers=setup.make_layers(views, assembly.plan, layers=layers),
    )


def assemble_plain(assembly: Assembly) -> Assembly:
    """Return a small set-up in the plain format, in which a model can be compared with its own forward.

    The comparison finds a model that does not attend as its masks say. The rounding of another cache format would hide
    such an error.

    Args:
        assembly: The set-up that is to serve.

    Returns:
        A separate set-up for a few short requests; ``assembly`` itself if its layers are plain already.

    Raises:
        BackendError: No backend serves a layer in the plain format, or the named backend does not.
    """
    setup = assembly.setup
    layers = plain_layers(setup.layers)
    if layers == setup.layers:
        return assembly
    stack = attrs.evolve(
        setup.stack,
        cache=attrs.evolve(setup.stack.cache, memory="auto"),
        limits=attrs.evolve(
            setup.stack.limits, max_model_len=min(assembly.max_model_len, PLAIN_TOKENS), max_num_seqs=PLAIN_REQUESTS
        ),
    )
    plain = attrs.evolve(setup, layers=layers, draft_layers=(), stack=stack)
    return _assemble(assembly.model, plain, plain.plan)


def plain_layers(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers in the plain format."""
    return tuple(
        layer if layer.spec is None else attrs.evolve(layer, spec=layer.spec.in_format(PLAIN)) for layer in layers
    )


def _assemble(
    model: LoadedModel, setup: Setup, plan: KVCachePlan, host_slabs: int = 0, leader: Leader | None = None
) -> Assembly:
    stack = setup.stack
    device = torch.device(stack.model.device)
    make_storage: Callable[..., KVCacheStorage] = KVCacheStorage
    make_host: Callable[..., HostStorage] = HostStorage
    if leader is not None:
        make_storage, make_host = partial(LeadingStorage, leader), partial(LeadingHostStorage, leader)
    copier = find_page_copier(setup.choices)
    with _allocating_all(plan, stack, device, host_slabs):
        storage = make_storage(plan, setup.grouping, device)
        host = make_host(plan, storage.pool, host_slabs, copy_pages=copier) if host_slabs else None
    return Assembly(
        model=model,
        setup=setup,
        device=device,
        plan=plan,
        storage=storage,
        views=storage.views,
        host=host,
        layers=setup.make_layers(storage.views, plan),
    )


def _allocating_all(
    plan: KVCachePlan, stack: Stack, device: torch.device, host_slabs: int
) -> AbstractContextManager[None]:
    """Raise if the host's memory is too small for the sum of the cache, the host memory and the tokens."""
    pool = plan.total_bytes if device.type == "cpu" else 0
    host, tokens = host_slabs * plan.slab_bytes, 8 * stack.limits.max_num_seqs * plan.max_model_len
    return allocating(
        pool + host + tokens,
        f"in all: {pool} for the cache, {host} for evicted blocks and {tokens} for the tokens of "
        f"{stack.limits.max_num_seqs} requests of {plan.max_model_len}",
        "less memory, host_memory, max_num_seqs or max_model_len",
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


def _check_skipping(model: LoadedModel, setup: Setup) -> None:
    """Raise ``StackError`` if layers are to leave rows out, and the model's adapter cannot do that."""
    skipping = setup.skipping
    if skipping.note is not None:
        _log.info("%s: %s", model.description.name, skipping.note)
    if skipping.layers and not model.can_skip(skipping.layers):
        raise StackError(
            f"{setup.stack.source}: model.prefill_skipping is on, and {model.description.name} could skip the layers "
            f"{skipping.layers[0]!r} to {skipping.layers[-1]!r}, but its model adapter cannot leave rows out of its "
            "forward; leave the key out"
        )
