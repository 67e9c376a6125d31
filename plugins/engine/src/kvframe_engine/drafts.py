"""What the stack's proposer lets draft for a model: a smaller model, or the model's own prediction heads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from kvframe import Drafts, Registry, Setup, Stack, load_model
from kvframe.contract.backend import KVCache
from kvframe.contract.description import ModelDescription
from kvframe.contract.errors import KVFrameError, StackError, shown
from kvframe.contract.foreign import call
from kvframe.contract.model import LoadedModel
from kvframe_engine.contract.proposer import Proposer

MAX_DRAFTS = 64
"""The most draft tokens of a request in a step."""
NUM_COMPARED_TOKENS = 256
"""Tokens that the served model and the draft model must read alike."""


def find_drafts(proposer: Proposer, description: ModelDescription, stack: Stack, registry: Registry) -> Drafts:
    """Return what the stack's proposer adds to a model. Called by the core when it sets a model up.

    Args:
        proposer: The proposer.
        description: The served model.
        stack: The proposer's name, and the length of its longest request.
        registry: Where model adapters and other proposers are looked up.

    Raises:
        StackError: The draft model cannot continue the requests of the served model, or that model has no prediction
            heads (``no_prediction_heads``), or the proposer makes too many drafts.
        ModelError: There is no such model, or no adapter describes it.
    """
    limit: Any = proposer.max_drafts
    if type(limit) is not int or not 1 <= limit <= MAX_DRAFTS:
        raise StackError(
            f"{stack.source}: model.drafts: proposer {proposer.name!r}: max_drafts must be a whole number from 1 to "
            f"{MAX_DRAFTS}, not {shown(limit)}"
        )
    if proposer.uses_prediction_heads:
        _check_has_heads(description, proposer, stack, registry)
        # Each head gives one draft.
        return Drafts(min(limit, description.num_prediction_heads), description.prediction_layers, are_heads=True)
    path: Any = call(f"proposer {proposer.name!r}: draft_model()", proposer.draft_model)
    if path is None:
        return Drafts(limit)
    if not isinstance(path, str) or not path:
        raise StackError(f"{stack.source}: model.drafts: the draft model must be a path, not {shown(path)}")
    path = Path(path).expanduser()
    try:
        draft = Setup.read(path, _stack_of_draft(stack), registry, runs_here=False).description
    except KVFrameError as error:
        raise StackError(f"{stack.source}: model.drafts: the draft model: {error}") from error
    _check_draft_model(draft, description, stack)
    return Drafts(limit, draft.layers, path=path)


def _stack_of_draft(stack: Stack) -> Stack:
    """Return a stack that knows only where and in which dtype the draft model runs."""
    model = stack.model
    return Stack.from_mapping({"model": {"device": model.device, "dtype": model.dtype}}, stack.source)


def _check_has_heads(description: ModelDescription, proposer: Proposer, stack: Stack, registry: Registry) -> None:
    if not description.prediction_layers:
        other_names = [name for name in registry.proposers.names() if name != proposer.name]
        raise StackError(
            f"{stack.source}: model.drafts: the proposer {proposer.name!r} drafts with prediction heads of the model "
            f"(multi-token prediction), and {description.name} has none that its model adapter can run; choose another "
            f"proposer ({', '.join(other_names) or 'none is installed'})",
            code="no_prediction_heads",
        )


def _check_draft_model(draft: ModelDescription, description: ModelDescription, stack: Stack) -> None:
    """Raise ``StackError`` if a draft model cannot continue the requests of the served model."""
    where, longest = f"{stack.source}: model.drafts", stack.limits.max_model_len or description.max_model_len
    if not draft.generates:
        raise StackError(f"{where}: the draft model {draft.name} does not generate text; name one that does")
    if draft.max_input_lens:
        sequences = ", ".join(draft.max_input_lens)
        raise StackError(
            f"{where}: the draft model {draft.name} takes inputs beside tokens ({sequences}), which only the served "
            "model gets; name a decoder"
        )
    if None not in (draft.vocab_size, description.vocab_size) and draft.vocab_size != description.vocab_size:
        raise StackError(
            f"{where}: the draft model {draft.name} has a vocabulary of {draft.vocab_size} tokens and "
            f"{description.name} one of {description.vocab_size}; name a draft model with the same tokens"
        )
    if draft.max_model_len < longest:
        raise StackError(
            f"{where}: the draft model {draft.name} takes {draft.max_model_len} tokens, and a request may have "
            f"{longest}; set max_model_len in [limits] to at most {draft.max_model_len}"
        )


def load_draft(model: LoadedModel, setup: Setup) -> LoadedModel | None:
    """Return the prediction heads of the model, or the draft model that the stack's proposer names.

    Each rank may have a part of the weights that heads share with the model, so every rank has to load them. A draft
    model is loaded whole.

    Args:
        model: The model that is served.
        setup: Its set-up, with layers that draft.

    Returns:
        The heads or the draft model; None if the model's adapter has no heads to run.

    Raises:
        StackError: The draft model cannot be loaded, or cannot continue the model's requests.
        ModelError: The heads cannot be loaded.
    """
    drafts, stack = setup.drafts, setup.stack
    if drafts.are_heads:
        return model.load_prediction_heads()
    where = f"{stack.source}: model.drafts"
    try:
        draft, _ = load_model(drafts.path, _stack_of_draft(stack), registry=setup.registry, whole=True)
    except KVFrameError as error:
        raise StackError(f"{where}: the draft model: {error}") from error
    _check_draft_model(draft.description, model.description, stack)
    if [layer.name for layer in drafts.layers] != [layer.name for layer in draft.description.layers]:
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
        draft_text, model_text = draft.decode([token_id]), model.decode([token_id])
        if draft_text is None or model_text is None:
            return
        if draft_text != model_text:
            raise StackError(
                f"{where}: the draft model {draft.description.name} reads the token {token_id} as {shown(draft_text)}, "
                f"and {model.description.name} as {shown(model_text)}; name a draft model with the same tokens"
            )


def setup_of_draft(setup: Setup, description: ModelDescription) -> Setup:
    """Return the set-up of the layers that draft, by the names that the draft model knows, in the same plan.

    Prefill skipping is for the layers of the served model only.

    Args:
        setup: The set-up of the served model.
        description: The draft model.
    """
    stack = attrs.evolve(setup.stack, model=attrs.evolve(setup.stack.model, prefill_skipping=None))
    layers = tuple(
        attrs.evolve(
            layer,
            name=_draft_name(layer.name),
            shares_with=None if layer.shares_with is None else _draft_name(layer.shares_with),
        )
        for layer in setup.draft_layers
    )
    grouping = setup.grouping
    draft = attrs.evolve(setup, description=description, layers=layers, draft_layers=(), drafts=Drafts(), stack=stack)
    # Both models share one plan, so these parts are not worked out again.
    draft.__dict__.update(
        plan=setup.plan,
        max_model_len=setup.max_model_len,
        grouping=attrs.evolve(
            grouping,
            groups=tuple(
                attrs.evolve(group, layers=tuple(map(_draft_name, group.layers))) for group in grouping.groups
            ),
            follows={_draft_name(name): _draft_name(owner) for name, owner in grouping.follows.items()},
            step_local=tuple(map(_draft_name, grouping.step_local)),
        ),
        choices=tuple(
            attrs.evolve(
                choice,
                layer=_draft_name(choice.layer),
                wrapped=attrs.evolve(choice.wrapped, name=_draft_name(choice.wrapped.name)),
            )
            for choice in setup.draft_choices
        ),
    )
    return draft


def draft_views(views: Mapping[str, KVCache]) -> dict[str, KVCache]:
    """Return the state tensors of a pool by the names that ``setup_of_draft`` gives the layers.

    Args:
        views: Each layer's state tensors, by its name in the plan.
    """
    return {_draft_name(name): view for name, view in views.items()}


def _draft_name(name: str) -> str:
    """Return the name by which the draft model knows a layer; layers of the served model get one that it has not."""
    return name.removeprefix(Drafts.PREFIX) if name.startswith(Drafts.PREFIX) else f"served:{name}"
