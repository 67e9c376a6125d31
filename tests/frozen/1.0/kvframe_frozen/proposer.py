"""A proposer of draft tokens: each request repeats its last token. Replace ``propose`` by your own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
from kvframe_engine.contract import DraftRequest, Proposer


@attrs.define(kw_only=True, eq=False)
class FrozenProposer(Proposer):
    """Proposes the last token of each request, as often as wanted."""

    name: ClassVar[str] = "frozen_proposer"

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return at most ``max_drafts`` tokens for each request; the engine keeps those that it would compute."""
        return [[request.token_ids[-1]] * request.max_drafts for request in requests]

    def forget(self, request_ids: Sequence[str]) -> None:
        """Do nothing: nothing is kept of a request."""
