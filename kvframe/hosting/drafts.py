"""What drafts for a model, as planning sees it: the most draft tokens of a step, and layers beside the model's own.

A draft model, or the model's own prediction heads, keep their state in the served model's cache. Their layers have
names that begin with ``draft:``. In every other respect they are layers like the served model's: rules of the stack
match them by kind and by that name, they share block tables with layers that keep the same tokens, and a prefix is
found for both models or for neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import attrs

from kvframe.contract.description import LayerDescription, ModelDescription
from kvframe.contract.errors import StackError
from kvframe.contract.specs import LayerSpec
from kvframe.planning.groups import is_step_local

if TYPE_CHECKING:
    from kvframe.config.stack import Stack


@attrs.frozen
class Drafts:
    """What a stack's proposer adds to a model; by default nothing.

    Attributes:
        max_tokens: The most draft tokens of a request in a step.
        layers: The layers that draft, by the names that the draft model knows.
        are_heads: Whether these are the model's own prediction heads, which run after its last layer.
        path: The draft model; None if there is none.
    """

    PREFIX: ClassVar[str] = "draft:"
    """Begins the names of the layers that draft. No module's path has a colon."""

    max_tokens: int = 0
    layers: tuple[LayerDescription, ...] = ()
    are_heads: bool = False
    path: Path | None = None

    def beside(self, description: ModelDescription) -> ModelDescription:
        """Return the description of a model with the layers that draft after its own.

        Args:
            description: The served model.
        """
        draft_layers = tuple(
            attrs.evolve(
                layer,
                name=self.PREFIX + layer.name,
                shares_with=None if layer.shares_with is None else self.PREFIX + layer.shares_with,
            )
            for layer in self.layers
        )
        return attrs.evolve(description, layers=(*description.layers, *draft_layers))


def check_draft_layers(layers: Sequence[LayerSpec], stack: Stack) -> None:
    """Raise ``StackError`` for a layer that drafts and cannot be computed a part at a time."""
    for layer in layers:
        if is_step_local(layer):
            raise StackError(
                f"{stack.source}: model.drafts: the draft model's layer {layer.name!r} keeps nothing of the tokens "
                "before, so it can continue no request; name a decoder"
            )
