"""Draft tokens of a step: asks the proposer for them, and lets requests take those that the step accepted.

A request begins with as many drafts as the proposer gives. If a step rejects one, the next step asks for as many as
were accepted. If it accepts all of them, the next step asks for twice as many. If it accepts fewer than half, drafts
cost more than they save: the request pauses for one step, and for twice as many after each further step of that kind.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Generic

import attrs
import numpy as np

from kvframe.contract.foreign import safe_text
from kvframe.contract.order import IntArray
from kvframe.contract.proposer import DraftRequest, Proposer
from kvframe.engine.requests.progress import RequestT
from kvframe.engine.scheduling.request_cache import RequestCache
from kvframe.engine.scheduling.step import ScheduledStep

_log = logging.getLogger("kvframe")
MAX_PAUSE = 32
"""The most steps without drafts between two attempts of a request."""


@attrs.define
class Pace:
    """How many drafts a request gets.

    Attributes:
        num_drafts: Drafts of its next step with drafts, at least one.
        pause: Steps that it pauses after the next step that accepts fewer than half; doubled each time.
        num_waiting: Steps without drafts that come first.
    """

    num_drafts: int
    pause: int = 1
    num_waiting: int = 0

    def learn(self, num_proposed: int, num_accepted: int, most: int) -> None:
        """Choose the number of the next drafts from what became of the last ones."""
        self.num_drafts = min(2 * num_proposed, most) if num_accepted == num_proposed else max(1, num_accepted)
        if 2 * num_accepted < num_proposed:
            self.num_waiting, self.pause = self.pause, min(2 * self.pause, MAX_PAUSE)
        else:
            self.pause = 1


class Drafting(Generic[RequestT]):
    """Adds drafts to steps.

    Invariant: every request that the proposer was asked about and that has not ended has a pace.

    Attributes:
        max_drafts: The most drafts of a request in a step.
    """

    def __init__(self, proposer: Proposer, vocab_size: int | None) -> None:
        """Take the proposer.

        Args:
            proposer: The proposer, which nothing else uses.
            vocab_size: The model's token ids are smaller; None if that is unknown.
        """
        self._proposer: Proposer | None = proposer
        self.max_drafts, self._vocab_size = proposer.max_drafts, vocab_size
        self._paces: dict[str, Pace] = {}

    def add_drafts(self, step: ScheduledStep[RequestT], budget: int, cache: RequestCache) -> ScheduledStep[RequestT]:
        """Return a step with draft tokens, if the budget and the free blocks allow: no request gives way.

        Args:
            step: A step without drafts, whose tokens have blocks.
            budget: The most drafts of all requests together.
            cache: Where the drafts get their blocks.
        """
        # The first step of a request has no state to go back to.
        may_draft = (step.num_known - step.num_computed == 1) & (step.num_scheduled == 1) & (step.num_computed > 0)
        places = [place for place in np.flatnonzero(may_draft).tolist() if not step.requests[place].wants_prompt_rows]
        proposed = self.propose([step.requests[place] for place in places], budget) if places else []
        drafts: list[list[int]] = [[] for _ in step.requests]
        for place, each in zip(places, proposed, strict=True):
            drafts[place] = each
        num_drafts = np.array([len(each) for each in drafts])
        num_all = int(num_drafts.sum())
        if not num_all:
            return step
        has_drafts = num_drafts > 0
        try:
            is_extended = cache.extend_rows(step.rows[has_drafts], (step.num_known + num_drafts)[has_drafts])
        except AssertionError:
            raise
        except Exception:  # a spec is wrong at these tokens; if the request gets there, it ends with that error
            is_extended = False
        if not is_extended:
            return step
        return attrs.evolve(
            step,
            num_scheduled=step.num_scheduled + num_drafts,
            num_tokens=step.num_tokens + num_all,
            drafts=drafts,
        )

    def take_accepted(
        self, step: ScheduledStep[RequestT], runs: Sequence[Sequence[int]], num_computed: IntArray
    ) -> tuple[list[int], int]:
        """Let requests take their accepted drafts, whose state the step computed.

        Args:
            step: A step with drafts.
            runs: For each request whose last known token was computed, its accepted drafts and the token after them.
            num_computed: ``[num_reqs], int64, host``: changed to each request's tokens whose state stays.

        Returns:
            For each of these requests the token after its drafts, a negative number if there is none; and how many
            drafts were taken.
        """
        following: list[int] = []
        num_all = 0
        for place, run in zip(step.generating.tolist(), runs, strict=True):
            request, num_known = step.requests[place], int(step.num_known[place])
            for token_id in run[:-1]:
                request.take(token_id)
                if request.finish_reason is not None:
                    break
            # The state of a request's last token is not needed, and that of a rejected draft is wrong.
            num_taken = len(request.token_ids) - num_known
            num_computed[place] = num_known + num_taken - (request.finish_reason is not None)
            num_all += num_taken
            if step.drafts[place]:
                self.learn(request, len(step.drafts[place]), max(0, len(run) - 1))
            following.append(run[-1] if run else -1)
        return following, num_all

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
                pace = self._paces[request.request_id] = Pace(self.max_drafts)
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
            pace.learn(num_proposed, num_accepted, self.max_drafts)

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
