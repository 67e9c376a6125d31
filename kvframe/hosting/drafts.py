"""What drafts for a model, as planning sees it: the most draft tokens of a step, and layers beside the model's own.

A draft model, or the model's own prediction heads, keep their state in the served model's cache. Their layers have
names that begin with ``draft:``. In every other respect they are layers like the served model's: rules of the stack
match them by kind and by that name, they share block tables with layers that keep the same tokens, and a prefix is
found for both models or for neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvframe.config.choices import make_proposer
from kvframe.contract.description import LayerDescription, ModelDescription
from kvframe.contract.errors import KVFrameError, StackError, shown
from kvframe.contract.foreign import call
from kvframe.contract.specs import LayerSpec
from kvframe.planning.groups import is_step_local
from kvframe.planning.recognise import describe_model, find_adapter, with_dtype

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.contract.model import LoadedModel
    from kvframe.contract.proposer import Proposer
    from kvframe.loading.registry import Registry

PREFIX = "draft:"
"""Begins the names of the layers that draft. No module's path has a colon."""
NUM_COMPARED_TOKENS = 256
"""Tokens that the served model and the draft model must read alike."""


@attrs.frozen
class Drafts:
    """What a stack's proposer adds to a model.

    Attributes:
        max_tokens: The most draft tokens of a request in a step; 0 without a proposer.
        layers: The layers that draft, by the names that the draft model knows.
        are_heads: Whether these are the model's own prediction heads, which run after its last layer.
    """

    max_tokens: int = 0
    layers: tuple[LayerDescription, ...] = ()
    are_heads: bool = False

    def beside(self, description: ModelDescription) -> ModelDescription:
        """Return the description of a model with the layers that draft after its own.

        Args:
            description: The served model.
        """
        draft_layers = tuple(
            attrs.evolve(
                layer,
                name=PREFIX + layer.name,
                shares_with=None if layer.shares_with is None else PREFIX + layer.shares_with,
            )
            for layer in self.layers
        )
        return attrs.evolve(description, layers=(*description.layers, *draft_layers))


def find_drafts(description: ModelDescription, stack: Stack, registry: Registry) -> Drafts:
    """Return what the proposer of a stack that names one adds to a model.

    Args:
        description: The served model.
        stack: Its proposer, and the length of its longest request.
        registry: Where the proposer and model adapters are looked up.

    Raises:
        StackError: The draft model cannot continue the requests of the served model, or that model has no prediction
            heads (``no_prediction_heads``).
        ModelError: There is no such model, or no adapter describes it.
    """
    proposer = make_proposer(stack.model.drafts, registry)
    assert proposer is not None
    max_tokens = max_drafts_of(proposer, description)
    if proposer.uses_prediction_heads:
        _check_has_heads(description, proposer, stack, registry)
        return Drafts(max_tokens, description.prediction_layers, are_heads=True)
    path = draft_path(proposer, stack)
    if path is None:
        return Drafts(max_tokens)
    try:
        draft = describe_model(path, registry)
    except KVFrameError as error:
        raise StackError(f"{stack.source}: model.drafts: the draft model: {error}") from error
    check_draft_model(draft, description, stack)
    return Drafts(max_tokens, draft.layers)


def draft_path(proposer: Proposer, stack: Stack) -> Path | None:
    """Return where a proposer's draft model lies; None if it has none.

    Args:
        proposer: The stack's proposer.
        stack: The stack, for errors.

    Raises:
        StackError: The proposer names no path.
    """
    path: Any = call(f"proposer {proposer.name!r}: draft_model()", proposer.draft_model)
    if path is None:
        return None
    if not isinstance(path, str) or not path:
        raise StackError(f"{stack.source}: model.drafts: the draft model must be a path, not {shown(path)}")
    return Path(path).expanduser()


def max_drafts_of(proposer: Proposer, description: ModelDescription) -> int:
    """Return the most draft tokens of a request in a step.

    Args:
        proposer: The stack's proposer. If it uses prediction heads, each of them gives one draft.
        description: The served model.
    """
    limit = proposer.max_drafts
    return min(limit, description.num_prediction_heads) if proposer.uses_prediction_heads else limit


def _check_has_heads(description: ModelDescription, proposer: Proposer, stack: Stack, registry: Registry) -> None:
    if not description.prediction_layers:
        other_names = [name for name in registry.proposers.names() if name != proposer.name]
        raise StackError(
            f"{stack.source}: model.drafts: the proposer {proposer.name!r} drafts with prediction heads of the model "
            f"(multi-token prediction), and {description.name} has none that its model adapter can run; choose another "
            f"proposer ({', '.join(other_names) or 'none is installed'})",
            code="no_prediction_heads",
        )


def check_draft_model(draft: ModelDescription, description: ModelDescription, stack: Stack) -> None:
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


def check_draft_layers(layers: Sequence[LayerSpec], stack: Stack) -> None:
    """Raise ``StackError`` for a layer that drafts and cannot be computed a part at a time."""
    for layer in layers:
        if is_step_local(layer):
            raise StackError(
                f"{stack.source}: model.drafts: the draft model's layer {layer.name!r} keeps nothing of the tokens "
                "before, so it can continue no request; name a decoder"
            )


def load_draft_model(model: LoadedModel, layers: Sequence[LayerSpec], stack: Stack, registry: Registry) -> LoadedModel:
    """Return the draft model that the stack's proposer names. It is loaded whole, on each rank.

    Args:
        model: The model that is served.
        layers: The layers of the draft model, by their names in the plan.
        stack: Its proposer, device and dtype.
        registry: Where the proposer and model adapters are looked up.

    Raises:
        StackError: The draft model cannot be loaded, or cannot continue the model's requests.
    """
    where, proposer = f"{stack.source}: model.drafts", make_proposer(stack.model.drafts, registry)
    path = None if proposer is None else draft_path(proposer, stack)
    assert path is not None
    try:
        adapter = find_adapter(path, registry)
        dtype = with_dtype(stack, path, adapter).model.dtype
        draft = adapter.load(path, device=stack.model.device, dtype=dtype, whole=True)
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
        draft_text, model_text = draft.decode([token_id]), model.decode([token_id])
        if draft_text is None or model_text is None:
            return
        if draft_text != model_text:
            raise StackError(
                f"{where}: the draft model {draft.description.name} reads the token {token_id} as {shown(draft_text)}, "
                f"and {model.description.name} as {shown(model_text)}; name a draft model with the same tokens"
            )
