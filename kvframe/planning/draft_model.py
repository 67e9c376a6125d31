"""The draft model of a stack's proposer: its layers are planned beside the served model's, in the same cache.

The prediction heads of the served model are planned like a draft model. The layers of the draft model have names that
begin with ``draft:``. In every other respect they are layers like the served model's: rules of the stack match them by
kind and by that name, they share block tables with layers that keep the same tokens, and a prefix is found for both
models or for neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvframe.config.proposer_choice import make_proposer
from kvframe.contract.description import ModelDescription
from kvframe.contract.errors import KVFrameError, StackError, shown
from kvframe.contract.foreign import call
from kvframe.contract.specs import LayerSpec
from kvframe.planning.recognise import describe_model

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.contract.proposer import Proposer
    from kvframe.loading.registry import Registry
    from kvframe.planning.groups import Grouping

PREFIX = "draft:"
"""Begins the names of the draft model's layers. No module's path has a colon."""


def draft_path(proposer: Proposer | None, stack: Stack) -> Path | None:
    """Return where a proposer's draft model lies; None if it has none.

    Args:
        proposer: The stack's proposer; None for none.
        stack: The stack, for errors.

    Raises:
        StackError: The proposer names no path.
    """
    if proposer is None:
        return None
    found: Any = call(f"proposer {proposer.name!r}: draft_model()", proposer.draft_model)
    if found is None:
        return None
    if not isinstance(found, str) or not found:
        raise StackError(f"{stack.source}: engine.drafts: the draft model must be a path, not {shown(found)}")
    return Path(found).expanduser()


def max_drafts_of(proposer: Proposer | None, description: ModelDescription) -> int:
    """Return the most draft tokens of a request in a step; 0 without a proposer.

    Args:
        proposer: The stack's proposer. If it uses prediction heads, each of them gives one draft.
        description: The served model.
    """
    if proposer is None:
        return 0
    most = proposer.max_drafts
    return min(most, description.num_prediction_heads) if proposer.uses_prediction_heads else most


def describe_draft_model(description: ModelDescription, stack: Stack, registry: Registry) -> ModelDescription | None:
    """Return the description of what drafts for a stack's proposer; None if the proposer drafts alone.

    Args:
        description: The served model.
        stack: Its ``[engine] drafts`` and ``max_model_len``.
        registry: Where the proposer and model adapters are looked up.

    Raises:
        StackError: The draft model cannot continue the requests of the served model, or that model has no prediction
            heads (``no_prediction_heads``).
        ModelError: There is no such model, or no adapter describes it.
    """
    proposer = make_proposer(stack, registry)
    if proposer is not None and proposer.uses_prediction_heads:
        return _describe_heads(description, proposer, stack, registry)
    path = draft_path(proposer, stack)
    if path is None:
        return None
    try:
        draft = describe_model(path, registry)
    except KVFrameError as error:
        raise StackError(f"{stack.source}: engine.drafts: the draft model: {error}") from error
    check_draft_model(draft, description, stack)
    return draft


def _describe_heads(
    description: ModelDescription, proposer: Proposer, stack: Stack, registry: Registry
) -> ModelDescription:
    if not description.prediction_layers:
        others = [name for name in registry.proposers.names() if name != proposer.name]
        raise StackError(
            f"{stack.source}: engine.drafts: the proposer {proposer.name!r} drafts with prediction heads of the model "
            f"(multi-token prediction), and {description.name} has none that its model adapter can run; choose another "
            f"proposer ({', '.join(others) or 'none is installed'})",
            code="no_prediction_heads",
        )
    return attrs.evolve(description, layers=description.prediction_layers, max_input_lens={})


def check_draft_model(draft: ModelDescription, description: ModelDescription, stack: Stack) -> None:
    """Raise ``StackError`` if a draft model cannot continue the requests of the served model."""
    where, longest = f"{stack.source}: engine.drafts", stack.engine.max_model_len or description.max_model_len
    if not draft.generates:
        raise StackError(f"{where}: the draft model {draft.name} does not generate text; name one that does")
    if draft.max_input_lens:
        given = ", ".join(draft.max_input_lens)
        raise StackError(
            f"{where}: the draft model {draft.name} takes inputs beside tokens ({given}), which only the served model "
            "gets; name a decoder"
        )
    if None not in (draft.vocab_size, description.vocab_size) and draft.vocab_size != description.vocab_size:
        raise StackError(
            f"{where}: the draft model {draft.name} has a vocabulary of {draft.vocab_size} tokens and "
            f"{description.name} one of {description.vocab_size}; name a draft model with the same tokens"
        )
    if draft.max_model_len < longest:
        raise StackError(
            f"{where}: the draft model {draft.name} takes {draft.max_model_len} tokens, and a request may have "
            f"{longest}; set max_model_len in [engine] to at most {draft.max_model_len}"
        )


def with_draft_layers(description: ModelDescription, draft: ModelDescription | None) -> ModelDescription:
    """Return the description of a model with the layers of its draft model after its own.

    Args:
        description: The served model.
        draft: Its draft model; None for none.
    """
    if draft is None:
        return description
    layers = tuple(
        attrs.evolve(
            layer,
            name=PREFIX + layer.name,
            shares_with=None if layer.shares_with is None else PREFIX + layer.shares_with,
        )
        for layer in draft.layers
    )
    return attrs.evolve(description, layers=(*description.layers, *layers))


def split_layers(layers: Iterable[LayerSpec]) -> tuple[tuple[LayerSpec, ...], tuple[LayerSpec, ...]]:
    """Return the served model's layers, and those of its draft model by their names in the plan."""
    own: list[LayerSpec] = []
    drafted: list[LayerSpec] = []
    for layer in layers:
        (drafted if layer.name.startswith(PREFIX) else own).append(layer)
    return tuple(own), tuple(drafted)


def as_draft_names(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return layers of a draft model by the names that they have in the draft model."""
    return tuple(
        attrs.evolve(
            layer,
            name=as_draft_name(layer.name),
            shares_with=None if layer.shares_with is None else as_draft_name(layer.shares_with),
        )
        for layer in layers
    )


def as_draft_name(name: str) -> str:
    """Return the name by which the draft model knows a layer; layers of the served model get one that it has not."""
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else f"served:{name}"


def as_draft_grouping(grouping: Grouping) -> Grouping:
    """Return the groups of both models, with the layers' names as the draft model knows them."""
    return attrs.evolve(
        grouping,
        groups=tuple(attrs.evolve(group, layers=tuple(map(as_draft_name, group.layers))) for group in grouping.groups),
        follows={as_draft_name(name): as_draft_name(target) for name, target in grouping.follows.items()},
        step_local=tuple(map(as_draft_name, grouping.step_local)),
    )
