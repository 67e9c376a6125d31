"""The proposer ``draft_model``: it proposes what a smaller model generates after a request's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
from kvframe_engine.contract import DraftRequest, Proposer


def _path(instance: object, attribute: attrs.Attribute[str], value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{attribute.name} must be the path of a model's folder, not {value!r}")


@attrs.define(kw_only=True, eq=False)
class DraftModelProposer(Proposer):
    """Proposes the tokens with which a smaller model continues a request. The host runs this model.

    Attributes:
        max_drafts: The most draft tokens of a request in a step.
        model: The folder of a model with the same tokens as the served one.
    """

    name: ClassVar[str] = "draft_model"

    model: str = attrs.field(validator=_path)

    def draft_model(self) -> str:
        """Return the model's folder."""
        return self.model

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return the tokens of the smaller model; none if the host ran none."""
        return [list(request.continuation) for request in requests]

    def forget(self, request_ids: Sequence[str]) -> None:
        """Do nothing: the host keeps the smaller model's state of requests."""
