"""Draft tokens of a step: asks the proposer for them, and lets requests take those that the step accepted.

A step of few tokens computes further ones almost for free, and a step of many tokens does not. So a request begins with
many drafts if few requests generate, and with one if many do. If a step rejects a draft, the next step asks for as many
as were accepted. If it accepts all of them, the next step asks for twice as many. If it accepts fewer than half, drafts
cost more than they save: the request pauses for one step, or for more if many requests generate, and for twice as many
after each further step of that kind.

The more requests generate, the more a wrong draft costs, up to as much as a token. So if too many of the latest drafts
of all requests were wrong, only every eighth step has drafts, and a request gets them only after three that are tried
and right. A tried draft is not computed. It is compared with the token that the request generates. A request that the
proposer has no drafts for is then asked about more and more seldom.

With 32 requests of ``benchmarks.engine.drafts --text sampled``, whose text does not repeat itself, 71 of 135 drafts are
wrong, and the engine runs at 0.99 of its speed without drafts. Without tries (``NUM_TRIES = 0``) it runs at 0.97, with
340 wrong drafts; if each request is asked about in every step (``Pace.skip`` returns 0) as well, at 0.92, with 561. On
text that repeats itself, tries change nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic

import attrs
import numpy as np

from kvframe.contract.foreign import safe_text
from kvframe.contract.order import IntArray
from kvframe_engine.contract.proposer import DraftRequest, Proposer
from kvframe_engine.requests.progress import RequestT
from kvframe_engine.scheduling.pace import MAX_PAUSE, Pace
from kvframe_engine.scheduling.request_blocks import RequestCache
from kvframe_engine.scheduling.step import ScheduledStep

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvframe")
FIRST_DRAFTS = 32
"""The drafts that requests begin with, divided by the number of requests that generate."""

REQUESTS_PER_PAUSE = 8
"""The first pause after rejected drafts is the square of the number of requests that generate, divided by this, and at
least one step. A wrong draft makes the step longer for all of them."""

NUM_TRIES, STEPS_PER_DRAFT = 3, 8
"""If many of the latest drafts were wrong: the right drafts in a row that a request needs before it gets drafts, and of
how many steps one has drafts."""

MAX_SHARE_NEEDED, REQUESTS_OF_WRONG_DRAFTS, MEMORY = 0.75, 2, 16
"""If more than two requests generate, drafts of two may be wrong, and drafts of the others, or three quarters of all,
have to be right, or requests need tried drafts. That is about so many of the latest drafts."""

Continue = Callable[[Sequence[RequestT], IntArray, IntArray, Sequence[int]], Sequence[Sequence[int]]]
"""Lets a draft model continue requests, given their rows, their known tokens and how many tokens each is to get."""


class Drafting(Generic[RequestT]):
    """Adds drafts to steps.

    Invariant: every request that the proposer was asked about and that has not ended has a pace.
    ``_share_right`` is about the first draft of each request's latest steps with drafts, tried ones included, and
    ``_num_generating`` is the number of requests whose last known token the latest step computes, and no other one.
    ``_next_steps[row]`` is the first step in which the request that has the row may get drafts. So a step in which all
    requests wait costs one comparison of arrays. A request that was preempted need not wait when it is admitted again.

    Attributes:
        max_drafts: The most drafts of a request in a step.
        continue_requests: Lets the proposer's draft model continue requests; None if it has none.
        hidden_states: The rows of the last step that its tokens were sampled from, by request id: the runner fills it.
            None if the proposer does not need them.
    """

    def __init__(
        self, proposer: Proposer, vocab_size: int | None, max_drafts: int | None = None, *, max_num_seqs: int
    ) -> None:
        """Take the proposer.

        Args:
            proposer: The proposer, which nothing else uses.
            vocab_size: The model's token ids are smaller; None if that is unknown.
            max_drafts: The most draft tokens of a request in a step; the proposer's own unless given.
            max_num_seqs: The most requests that run at a time. Their rows are smaller.
        """
        self._proposer: Proposer | None = proposer
        self.max_drafts = proposer.max_drafts if max_drafts is None else max_drafts
        self._vocab_size = vocab_size
        self._paces: dict[str, Pace] = {}
        self._num_steps = 0
        self._share_right, self._num_generating = 1.0, 0
        self._next_steps: IntArray = np.zeros(max_num_seqs, dtype=np.int64)
        self.continue_requests: Continue[RequestT] | None = None
        self.hidden_states: dict[str, torch.Tensor] | None = {} if proposer.needs_hidden_states else None

    def add_drafts(self, step: ScheduledStep[RequestT], budget: int, cache: RequestCache) -> ScheduledStep[RequestT]:
        """Return a step with draft tokens, if the budget and the free blocks allow: no request gives way.

        Args:
            step: A step without drafts, whose tokens have blocks.
            budget: The most drafts of all requests together.
            cache: Where the drafts get their blocks.
        """
        self._num_steps += 1
        if step.admitted:
            self._next_steps[step.rows[len(step.rows) - len(step.admitted) :]] = 0
        is_due = self._next_steps[step.rows] <= self._num_steps
        if not budget or not is_due.any():
            return step
        # The first step of a request has no state to go back to.
        may_draft = (step.num_known - step.num_computed == 1) & (step.num_scheduled == 1) & (step.num_computed > 0)
        requests = step.requests
        indices = [
            index
            for index in np.flatnonzero(may_draft & is_due).tolist()
            if not requests[index].wants_prompt_rows and requests[index].num_computed >= requests[index].last_pause
        ]
        self._num_generating = int(np.count_nonzero(may_draft))
        counts = self._counts([requests[index] for index in indices], budget)
        indices, counts = (
            [index for index, count in zip(indices, counts, strict=True) if count],
            [*filter(None, counts)],
        )
        if not indices:
            return step
        if self.continue_requests is not None:
            # The draft model stores the state of what it generates, in the drafts' blocks.
            if not _extend(cache, step.rows[indices], step.num_known[indices] + counts):
                return step
            step = attrs.evolve(step, continued=self._continue(step, indices, counts))
        drafting_requests = [requests[index] for index in indices]
        proposed = self._propose(
            drafting_requests, counts, [step.continued[index] for index in indices] if step.continued else ()
        )
        are_tried = self._num_tries() > 0
        is_turn = not are_tried or self._num_steps % STEPS_PER_DRAFT == 0
        for request, tokens in zip(drafting_requests, proposed, strict=True):
            pace = self._paces[request.request_id]
            if not tokens:
                self._wait(request, pace.skip(STEPS_PER_DRAFT if are_tried else 0))
            elif pace.num_tries or not is_turn:
                pace.tried = len(request.token_ids), tokens[0]
                tokens.clear()
        if not any(proposed):
            return step
        drafts: list[list[int]] = [[] for _ in requests]
        for index, tokens in zip(indices, proposed, strict=True):
            drafts[index] = tokens
        num_drafts = np.array([len(tokens) for tokens in drafts])
        num_all = int(num_drafts.sum())
        has_drafts = num_drafts > 0
        if not _extend(cache, step.rows[has_drafts], (step.num_known + num_drafts)[has_drafts]):
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
        following = [run[-1] if run else -1 for run in runs]
        num_all = 0
        for index, run in zip(step.generating.tolist(), runs, strict=True):
            if not step.drafts[index]:
                continue
            request, num_known = step.requests[index], int(step.num_known[index])
            for token_id in run[:-1]:
                request.take(token_id)
                if request.finish_reason is not None:
                    break
            # The state of a request's last token is not needed, and that of a rejected draft is wrong.
            num_taken = len(request.token_ids) - num_known
            num_computed[index] = num_known + num_taken - (request.finish_reason is not None)
            num_all += num_taken
            self._learn(request, len(step.drafts[index]), max(0, len(run) - 1))
        return following, num_all

    def _counts(self, requests: Sequence[RequestT], budget: int) -> list[int]:
        """Return the most drafts of each request in this step.

        Args:
            requests: Requests that do not wait.
            budget: The most drafts of all requests together.
        """
        counts = []
        num_first = max(1, min(self.max_drafts, FIRST_DRAFTS // max(1, self._num_generating)))
        first_pause = max(1, min(MAX_PAUSE, (self._num_generating // REQUESTS_PER_PAUSE) ** 2))
        for request in requests:
            pace = self._paces.get(request.request_id)
            if pace is None:
                num_tries = self._num_tries()
                pace = Pace(1 if num_tries else num_first, first_pause, num_tries=num_tries)
                self._paces[request.request_id] = pace
            elif (is_right := pace.compare(request.token_ids)) is not None:
                self._note(is_right)
                pace.num_tries = max(0, pace.num_tries - 1)
                if not is_right:
                    self._wait(request, self._pause(pace, 1, 0))
                    counts.append(0)
                    continue
            # The step adds one token to the accepted drafts.
            max_drafts = max(0, min(pace.num_drafts, budget, request.num_final_tokens - len(request.token_ids) - 1))
            budget -= max_drafts
            counts.append(max_drafts)
        return counts

    def _continue(self, step: ScheduledStep[RequestT], indices: list[int], counts: list[int]) -> list[Sequence[int]]:
        """Return for each request of a step the tokens with which the draft model continues it."""
        assert self.continue_requests is not None
        token_runs: list[Sequence[int]] = [()] * len(step.requests)
        requests = [step.requests[index] for index in indices]
        continued = self.continue_requests(requests, step.rows[indices], step.num_known[indices], counts)
        for index, tokens in zip(indices, continued, strict=True):
            token_runs[index] = tokens
        return token_runs

    def _propose(
        self, requests: Sequence[RequestT], counts: Sequence[int], continued: Sequence[Sequence[int]] = ()
    ) -> list[list[int]]:
        """Return drafts for each request, none for most of them perhaps.

        Args:
            requests: The requests to ask about.
            counts: The most drafts of each, at least one.
            continued: For each, the tokens of the draft model; none unless given.
        """
        if not requests or self._proposer is None:
            return [[] for _ in requests]
        hidden_states = {} if self.hidden_states is None else self.hidden_states
        # By position, because seven named arguments take longer.
        draft_requests = [
            DraftRequest(
                request.request_id,
                request.token_ids,
                request.num_prompt_tokens,
                max_drafts,
                request.cache_salt,
                tuple(continued[index]) if continued else (),
                hidden_states.get(request.request_id),
            )
            for index, (request, max_drafts) in enumerate(zip(requests, counts, strict=True))
        ]
        try:
            proposed = self._proposer.propose(draft_requests)
            return [
                self._checked(tokens, draft_request.max_drafts)
                for draft_request, tokens in zip(draft_requests, proposed, strict=True)
            ]
        except BaseException as error:
            self._set_aside(error)
            return [[] for _ in requests]

    def _learn(self, request: RequestT, num_proposed: int, num_accepted: int) -> None:
        """Record how many drafts of a request were accepted."""
        pace = self._paces.get(request.request_id)
        if pace is not None:
            self._note(num_accepted > 0)
            self._wait(request, self._pause(pace, num_proposed, num_accepted))

    def _pause(self, pace: Pace, num_proposed: int, num_accepted: int) -> int:
        """Let a pace learn what became of drafts; return the steps to wait."""
        num_waiting = pace.learn(num_proposed, num_accepted, self.max_drafts)
        if num_waiting:
            pace.num_tries = self._num_tries()
        return num_waiting

    def _num_tries(self) -> int:
        """Return how many right drafts a request needs before it gets drafts."""
        share = min(MAX_SHARE_NEEDED, 1 - REQUESTS_OF_WRONG_DRAFTS / max(1, self._num_generating))
        # What a draft model generates is in its state, so it must be computed.
        return NUM_TRIES if self._share_right < share and self.continue_requests is None else 0

    def _note(self, is_right: bool) -> None:
        """Record whether the first draft of a request was right."""
        self._share_right += (is_right - self._share_right) / MEMORY

    def _wait(self, request: RequestT, num_steps: int) -> None:
        """Let a request of this step wait so many steps before it may get drafts again."""
        self._next_steps[request.row] = self._num_steps + 1 + num_steps

    def forget(self, request: RequestT) -> None:
        """Forget a request that has ended."""
        if self._paces.pop(request.request_id, None) is not None and self._proposer is not None:
            try:
                self._proposer.forget([request.request_id])
            except BaseException as error:
                self._set_aside(error)

    def _checked(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """Return the first proposed tokens, up to one that is no token of the model."""
        token_ids: list[int] = []
        for token in list(tokens)[:max_tokens]:
            number = int(token)
            if number < 0 or number >= (1 << 32 if self._vocab_size is None else self._vocab_size):
                break
            token_ids.append(number)
        return token_ids

    def _set_aside(self, error: BaseException) -> None:
        name = type(self._proposer).__name__
        _log.error("the proposer %s failed, and is set aside: no more drafts are computed: %s", name, safe_text(error))
        self._proposer = None


def _extend(cache: RequestCache, rows: IntArray, num_tokens: IntArray) -> bool:
    """Allocate blocks for drafts; return False, and change nothing, if there are too few."""
    try:
        return cache.extend_rows(rows, num_tokens)
    except AssertionError:
        raise
    except BaseException:  # a spec is wrong at these tokens; if the request gets there, it ends with that error
        return False
