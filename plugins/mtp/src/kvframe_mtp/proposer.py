"""The proposer ``mtp``: it proposes what the prediction heads of the served model generate after a request's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
from kvframe_engine.contract import DraftRequest, Proposer


@attrs.define(kw_only=True, eq=False)
class MTPProposer(Proposer):
    """Proposes the tokens of the model's prediction heads (multi-token prediction). The host runs the heads.

    Attributes:
        max_drafts: The most draft tokens of a request in a step; each head gives one.
    """

    name: ClassVar[str] = "mtp"
    uses_prediction_heads: ClassVar[bool] = True

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return the tokens of the heads; none if the host ran none."""
        return [list(request.continuation) for request in requests]

    def forget(self, request_ids: Sequence[str]) -> None:
        """Do nothing: the host keeps the heads' state of requests."""
