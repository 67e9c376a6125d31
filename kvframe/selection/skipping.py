"""Prefill skipping: finds the last layers of a model that need to compute only the tokens that generate.

A layer that reads another layer's cache produces no state. If no layer after it produces any either, its output for a
token is used only for that token's own output, and the outputs of a prompt's inner tokens are never used
(YOCO, arXiv 2405.05254; SwiftKV, arXiv 2410.03960).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kvframe.config.proposer_choice import make_proposer
from kvframe.contract.specs import LayerSpec
from kvframe.planning.draft_model import split_layers

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.loading.registry import Registry


@attrs.frozen
class Skipping:
    """What a stack's prefill skipping does with a model.

    Attributes:
        layers: The layers that compute only the tokens that generate, in the order they run.
        note: One sentence that says why no layer does although the stack asks for it and the model alone has some;
            None if there is nothing to say.
        heads: The layers of the prediction heads that draft for the model; none if something else drafts.
    """

    layers: tuple[str, ...] = ()
    note: str | None = None
    heads: tuple[LayerSpec, ...] = ()


def find_skipping(layers: Sequence[LayerSpec], stack: Stack, registry: Registry) -> Skipping:
    """Return what a stack's prefill skipping does with a model.

    The layers of a draft model change nothing. Prediction heads continue the output of the model's last layer, and keep
    a cache of their own. So they are layers that run after it: the model then computes every token to its end.

    Args:
        layers: The layer specs of the model, and of what drafts for it.
        stack: Its ``[engine] prefill_skipping`` and ``drafts``.
        registry: Where the proposer is looked up.

    Raises:
        StackError: The proposer cannot be made.
    """
    own, drafted = split_layers(layers)
    proposer = make_proposer(stack, registry)
    heads = drafted if proposer is not None and proposer.uses_prediction_heads else ()
    if stack.engine.prefill_skipping is None:
        return Skipping(heads=heads)
    found, kept = find_skippable_layers(own), find_skippable_layers([*own, *heads])
    note = None
    if kept != found:
        note = (
            "prefill skipping leaves nothing out: the prediction heads keep a cache of their own, for which "
            f"{found[0]!r} and later layers compute every token of a prompt"
        )
    return Skipping(kept, note, heads)


def find_skippable_layers(layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Return the last layers that keep no state of their own, in the order they run.

    Args:
        layers: The model's layers, in the order they run, including those with other state than keys and values.
    """
    found: list[str] = []
    for layer in reversed(layers):
        if _needs_every_token(layer):
            break
        if layer.shares_with is not None:
            found.append(layer.name)
    return tuple(reversed(found))


def why_not_skipped(layers: Sequence[LayerSpec], name: str, heads: Sequence[LayerSpec] = ()) -> str:
    """Return in one sentence why a layer computes every token of a prompt.

    Args:
        layers: The model's layers, in the order they run, and those of what drafts for it.
        name: The layer.
        heads: The layers of the model's prediction heads, which run after them.
    """
    own, drafted = split_layers(layers)
    if name in {layer.name for layer in drafted}:
        return f"{name!r} drafts tokens, and prefill skipping is for the layers of the served model only"
    place = next(index for index, layer in enumerate(own) if layer.name == name)
    if _needs_every_token(own[place]):
        return f"{name!r} keeps a cache of its own, which must hold every token"
    later = [layer.name for layer in (*own[place:], *heads) if _needs_every_token(layer)]
    if later:
        return f"{later[0]!r} runs after {name!r} and keeps a cache of its own, for which it needs every token"
    return f"prefill skipping is off; {name!r} could be skipped: name the wrapper in prefill_skipping of [engine]"


def _needs_every_token(layer: LayerSpec) -> bool:
    """Return whether a layer keeps state of its own, or attends to tokens of the step itself."""
    return layer.shares_with is None and (layer.spec is not None or layer.query is not None)
