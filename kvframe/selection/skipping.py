"""Prefill skipping: which layers compute only the tokens that generate.

A layer that reads another layer's cache produces no state. If no layer after it produces any either, its output for a
token is used only for that token's own output, and the outputs of a prompt's inner tokens are never used
(YOCO, arXiv 2405.05254; SwiftKV, arXiv 2410.03960).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvframe.contract.specs import LayerSpec


@attrs.frozen
class Skipping:
    """What prefill skipping does with a model.

    Attributes:
        layers: The layers that compute only the tokens that generate, in the order they run.
        note: One sentence that says why no layer does although the stack asks for it and the model alone has some;
            None if there is nothing to say.
        heads: The layers of the prediction heads that draft for the model; none if something else drafts.
        are_drafting: Whether the layers that are asked about draft for another model; these are never skipped.
    """

    layers: tuple[str, ...] = ()
    note: str | None = None
    heads: tuple[LayerSpec, ...] = ()
    are_drafting: bool = False

    def why_not(self, layers: Sequence[LayerSpec], name: str) -> str:
        """Return in one sentence why a layer computes every token of a prompt."""
        if self.are_drafting:
            return f"{name!r} drafts tokens, and prefill skipping is for the layers of the served model only"
        index = next(index for index, layer in enumerate(layers) if layer.name == name)
        if _reads_choices(layers[index]):
            return f"{name!r} reads tokens that are chosen by content, and the choices are made for every token"
        if _needs_every_token(layers[index]):
            return f"{name!r} keeps a cache of its own, which must hold every token"
        later_names = [layer.name for layer in (*layers[index:], *self.heads) if _needs_every_token(layer)]
        if later_names:
            return (
                f"{later_names[0]!r} runs after {name!r} and keeps a cache of its own, for which it needs every token"
            )
        return f"prefill skipping is off; {name!r} could be skipped: name the wrapper in prefill_skipping of [model]"


NO_SKIPPING = Skipping()
"""Every layer computes every token."""

DRAFTING = Skipping(are_drafting=True)
"""What prefill skipping does with layers that draft: nothing."""


def find_skipping(layers: Sequence[LayerSpec], heads: Sequence[LayerSpec] = ()) -> Skipping:
    """Return what prefill skipping does with a model, whose layers are in the order they run.

    Prediction heads continue the output of the model's last layer, and keep a cache of their own. So they are layers
    that run after it: the model then computes every token to its end.
    """
    without_heads, with_heads = find_skippable_layers(layers), find_skippable_layers([*layers, *heads])
    note = None
    if with_heads != without_heads:
        note = (
            "prefill skipping leaves nothing out: the prediction heads keep a cache of their own, for which "
            f"{without_heads[0]!r} and later layers compute every token of a prompt"
        )
    return Skipping(with_heads, note, tuple(heads))


def find_skippable_layers(layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Return the last layers that keep no state of their own, in the order they run."""
    names: list[str] = []
    for layer in reversed(layers):
        if _needs_every_token(layer):
            break
        if layer.shares_with is not None:
            names.append(layer.name)
    return tuple(reversed(names))


def _needs_every_token(layer: LayerSpec) -> bool:
    """Return whether a layer keeps state of its own, attends to tokens of the step itself, or reads choices."""
    keeps = layer.shares_with is None and (layer.spec is not None or layer.query is not None)
    return keeps or _reads_choices(layer)


def _reads_choices(layer: LayerSpec) -> bool:
    return layer.query is not None and layer.query.choice is not None
