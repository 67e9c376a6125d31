"""Loads what drafts for a model: its prediction heads, or another model with the same tokens."""

from __future__ import annotations

from kvframe.contract.errors import KVFrameError, StackError, shown
from kvframe.contract.model import LoadedModel
from kvframe.hosting.drafts import PREFIX, check_draft_model, draft_path
from kvframe.hosting.setup import Setup
from kvframe.planning.machine import with_dtype
from kvframe.planning.recognise import find_adapter

NUM_COMPARED_TOKENS = 256
"""Tokens that the served model and the draft model must read alike."""


def load_draft_model(model: LoadedModel, setup: Setup) -> LoadedModel | None:
    """Return the prediction heads of a model, or the draft model that the stack's proposer names.

    Each rank may have a part of the weights that heads share with the model, so every rank has to load them. A draft
    model is loaded whole.

    Args:
        model: The model that is served.
        setup: What the stack does with the model; it has layers that draft.

    Returns:
        The draft model or the heads; None if the model's adapter has no heads to run.

    Raises:
        StackError: The draft model cannot be loaded, or cannot continue the model's requests.
        ModelError: The heads cannot be loaded.
    """
    if setup.drafts.are_heads:
        return model.load_prediction_heads()
    stack, registry = setup.stack, setup.registry
    where, proposer = f"{stack.source}: model.drafts", setup.make_proposer()
    path = None if proposer is None else draft_path(proposer, stack)
    assert path is not None
    try:
        dtype = with_dtype(stack, path, registry).model.dtype
        draft = find_adapter(path, registry).load(path, device=stack.model.device, dtype=dtype, whole=True)
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
