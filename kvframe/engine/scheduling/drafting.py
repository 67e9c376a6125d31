"""Drafts of a step: asks the proposer for them, for each request as many as its last steps accepted.

A request begins with two drafts. If a step accepts all of them, the next step asks for twice as many. If it rejects
one, the next step asks for as many as were accepted. If it accepts none, the request pauses: for one step, and for
twice as many after each further step that accepts none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Generic

import attrs

from kvframe.contract.foreign import safe_text
from kvframe.contract.proposer import DraftRequest, Proposer
from kvframe.engine.requests.progress import RequestT

_log = logging.getLogger("kvframe")
FIRST_DRAFTS = 2
"""Drafts that a request begins with, if the proposer gives so many."""
MAX_PAUSE = 32
"""The most steps without drafts between two attempts of a request."""


@attrs.define
class Pace:
    """How many drafts a request gets.

    Attributes:
        num_drafts: Drafts of its next step with drafts, at least one.
        pause: Steps that it pauses after the next step that accepts no draft; doubled each time.
        num_waiting: Steps without drafts that come first.
    """

    num_drafts: int = FIRST_DRAFTS
    pause: int = 1
    num_waiting: int = 0

    def learn(self, num_proposed: int, num_accepted: int, most: int) -> None:
        """Choose the number of the next drafts from what became of the last ones."""
        if not num_accepted:
            self.num_drafts, self.num_waiting, self.pause = 1, self.pause, min(2 * self.pause, MAX_PAUSE)
            return
        self.pause = 1
        self.num_drafts = min(2 * num_proposed, most) if num_accepted == num_proposed else num_accepted


class Drafting(Generic[RequestT]):
    """Gets drafts for a step's requests.

    Invariant: every request that the proposer was asked about and that has not ended has a pace.
    """

    def __init__(self, proposer: Proposer, vocab_size: int | None) -> None:
        """Take the proposer.

        Args:
            proposer: The proposer, which nothing else uses.
            vocab_size: The model's token ids are smaller; None if that is unknown.
        """
        self._proposer: Proposer | None = proposer
        self._max_drafts, self._vocab_size = proposer.max_drafts, vocab_size
        self._paces: dict[str, Pace] = {}

    def propose(self, requests: Sequence[RequestT], budget: int) -> list[list[int]]:
        """Return drafts for each request, none for most of them perhaps.

        Args:
            requests: Requests whose last known token the step computes, and no other one.
            budget: The most drafts of all requests together.
        """
        drafts: list[list[int]] = [[] for _ in requests]
        asked: list[DraftRequest] = []
        places: list[int] = []
        for place, request in enumerate(requests):
            pace = self._paces.get(request.request_id)
            if pace is None:
                pace = self._paces[request.request_id] = Pace(min(FIRST_DRAFTS, self._max_drafts))
            if pace.num_waiting:
                pace.num_waiting -= 1
                continue
            # The step adds one token to the accepted drafts.
            most = min(pace.num_drafts, budget, request.num_final_tokens - len(request.token_ids) - 1)
            if most > 0:
                budget -= most
                asked.append(
                    DraftRequest(
                        request.request_id, request.token_ids, request.num_prompt_tokens, most, request.cache_salt
                    )
                )
                places.append(place)
        if asked and self._proposer is not None:
            try:
                proposed = self._proposer.propose(asked)
                for place, each, tokens in zip(places, asked, proposed, strict=True):
                    drafts[place] = self._checked(tokens, each.max_drafts)
            except Exception as error:
                self._set_aside(error)
                return [[] for _ in requests]
        return drafts

    def learn(self, request: RequestT, num_proposed: int, num_accepted: int) -> None:
        """Record how many drafts of a request were accepted."""
        pace = self._paces.get(request.request_id)
        if pace is not None:
            pace.learn(num_proposed, num_accepted, self._max_drafts)

    def forget(self, request: RequestT) -> None:
        """Forget a request that has ended."""
        if self._paces.pop(request.request_id, None) is not None and self._proposer is not None:
            try:
                self._proposer.forget([request.request_id])
            except Exception as error:
                self._set_aside(error)

    def _checked(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the first proposed tokens, up to one that is no token of the model."""
        found: list[int] = []
        for token in list(tokens)[:most]:
            number = int(token)
            if number < 0 or number >= (1 << 32 if self._vocab_size is None else self._vocab_size):
                break
            found.append(number)
        return found

    def _set_aside(self, error: Exception) -> None:
        name = type(self._proposer).__name__
        _log.error("the proposer %s failed, and is set aside: no more drafts are computed: %s", name, safe_text(error))
        self._proposer = None
