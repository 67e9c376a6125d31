"""Loads the draft model of a stack's proposer, and knows its layers by the names that the draft model has for them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvframe.config.proposer_choice import make_proposer
from kvframe.contract.errors import KVFrameError, StackError, shown
from kvframe.contract.model import LoadedModel
from kvframe.contract.specs import LayerSpec
from kvframe.engine.ranks.follower import Follower
from kvframe.engine.ranks.leader import Leader
from kvframe.hosting.drafts import PREFIX, check_draft_model, draft_path
from kvframe.hosting.setup import Setup
from kvframe.planning.groups import Grouping
from kvframe.planning.machine import with_dtype
from kvframe.planning.recognise import find_adapter

NUM_COMPARED_TOKENS = 256
"""Tokens that the served model and the draft model must read alike."""


def load_draft_model(model: LoadedModel, setup: Setup, ranks: Leader | Follower | None = None) -> LoadedModel | None:
    """Return the draft model that a stack's proposer names, or the prediction heads of the model.

    Of several ranks, rank 0 alone runs it. Each rank may have a part of the weights that heads share with the model.

    Args:
        model: The model that is served.
        setup: What the stack does with the model.
        ranks: This process among those that serve the model; None if it is alone.

    Returns:
        The draft model, or the heads; None on another rank than 0.

    Raises:
        StackError: The draft model cannot be loaded, or cannot continue the model's requests.
        ModelError: The heads cannot be loaded.
    """
    stack, registry = setup.stack, setup.registry
    where, proposer = f"{stack.source}: engine.drafts", make_proposer(stack, registry)
    assert proposer is not None
    if proposer.uses_prediction_heads:
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
    if {layer.name for layer in setup.draft_layers} != {PREFIX + layer.name for layer in draft.description.layers}:
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
