"""Runs the draft model of a proposer over the engine's steps, and continues requests with it.

The draft model computes the same tokens as the served model, into its own layers' part of the same pages. So its state
follows a request through prefix hits, forks and preemption as the served model's does. In a step:

1. ``continue_requests`` lets the draft model generate a few tokens of each request that generates, one at a time.
2. The served model computes the step, in which these tokens may be drafts.
3. ``follow`` lets the draft model compute what it has not computed of the tokens that the step keeps: prompts, the
   tokens of requests without drafts, and the last draft of a request whose drafts were all accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import ClassVar, cast

import numpy as np
import torch

from kvframe import Layers, StepBatch
from kvframe.contract.foreign import safe_text
from kvframe.contract.order import IntArray
from kvframe_engine.graphs.sizes import Generating, UsualStep
from kvframe_engine.requests.request import Request
from kvframe_engine.running.model_runner import ModelRunner
from kvframe_engine.running.next_tokens import FAILED, sample
from kvframe_engine.scheduling.step import Outcomes, ScheduledStep

_log = logging.getLogger("kvframe")


class DraftRunner:
    """Runs a draft model.

    Invariant: between steps, the pages of each running request hold the draft model's state of the same tokens as the
    served model's, until the draft model is set aside.

    Attributes:
        is_set_aside: Whether the draft model failed: it then computes nothing more.
    """

    _failure: ClassVar[str] = "the draft model failed, and is set aside: it continues no more requests"

    def __init__(self, runner: ModelRunner, layers: Layers) -> None:
        """Take the draft model.

        Args:
            runner: Runs the draft model. Its ``tokens`` are those of the served model's runner.
            layers: The attention layers of the draft model.
        """
        self.runner = runner
        self._layers = layers
        self.is_set_aside = False

    @staticmethod
    def usual_steps(query_lens: Collection[int]) -> list[UsualStep]:
        """Return the kinds of steps that a draft model usually computes.

        Args:
            query_lens: The numbers of tokens of a request that the stack captures.
        """
        return [(1, Generating.LAST), *((query_len, Generating.STORED) for query_len in query_lens)]

    def warm_up(self) -> None:
        """Capture the usual graphs. No row may be set yet."""
        self.runner.warm_up()

    def drop_graphs(self) -> None:
        """Forget the captured graphs; each is captured again when a step needs it."""
        self.runner.drop_graphs()

    def continue_requests(
        self, requests: Sequence[Request], rows: IntArray, num_known: IntArray, counts: Sequence[int]
    ) -> list[list[int]]:
        """Return tokens with which the draft model continues requests, sampled as the requests ask for.

        Each token is sampled with the uniform number that the request will use for this token. So two models that agree
        on the probabilities of a token agree on the token.

        Args:
            requests: Requests whose tokens are computed except for the last known one.
            rows: ``[num_reqs], int64, host``: their rows, with slots for their known tokens and those that follow.
            num_known: ``[num_reqs], int64, host``: their known tokens.
            counts: How many tokens each is continued with, at least one.

        Returns:
            For each request as many tokens, or fewer: if logits are not numbers, and at most one for each head.
        """
        token_runs: list[list[int]] = [[] for _ in requests]
        if self.is_set_aside:
            return token_runs
        try:
            with torch.inference_mode():
                self._continue(requests, rows, num_known, np.array(counts), token_runs)
        except BaseException as error:  # Ctrl-C waits while a step is scheduled
            self._set_aside(error)
            return [[] for _ in requests]
        return token_runs

    def _continue(
        self,
        requests: Sequence[Request],
        rows: IntArray,
        num_known: IntArray,
        counts: IntArray,
        token_runs: list[list[int]],
    ) -> None:
        # A request that was admitted in this step has not been given to the runner yet.
        self.runner.tokens[rows, num_known - 1] = [request.token_ids[-1] for request in requests]
        going_on = np.arange(len(requests))
        for num_drawn in range(int(counts.max())):
            going_on = going_on[counts[going_on] > num_drawn]
            if not len(going_on):
                break
            # Requests with equally many tokens need no order.
            logits = self.runner.forward(
                StepBatch(
                    rows=rows[going_on],
                    num_computed=num_known[going_on] - 1 + num_drawn,
                    query_lens=np.ones_like(going_on),
                    generating_indices=np.arange(len(going_on)),
                )
            )
            token_ids = sample(logits, [requests[index] for index in going_on.tolist()], [num_drawn] * len(going_on))
            is_sound = np.array(token_ids) != FAILED
            for index, token_id in zip(going_on.tolist(), token_ids, strict=True):
                if token_id != FAILED:
                    token_runs[index].append(token_id)
            going_on = going_on[is_sound]
            self.runner.tokens[rows[going_on], num_known[going_on] + num_drawn] = np.array(token_ids)[is_sound]

    def follow(self, step: ScheduledStep[Request], outcomes: Outcomes) -> None:
        """Compute the state of what a step keeps, as far as it is not computed.

        Args:
            step: A step that the served model has computed.
            outcomes: What the served model's runner returned for it.
        """
        if self.is_set_aside:
            return
        num_done, num_kept = num_done_of(step), num_kept_of(step, outcomes)
        indices = np.flatnonzero(num_kept > num_done)
        if not len(indices):
            return
        num_computed, query_lens = (step.num_computed + num_done)[indices], (num_kept - num_done)[indices]
        order = self._layers.order_for(query_lens)
        if order is not None:
            indices, num_computed, query_lens = indices[order], num_computed[order], query_lens[order]
        try:
            self.runner.forward(
                StepBatch(
                    rows=step.rows[indices],
                    num_computed=num_computed,
                    query_lens=query_lens,
                    generating_indices=np.cumsum(query_lens) - 1,
                ),
                wants_logits=False,
            )
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._set_aside(error)

    def _set_aside(self, error: BaseException) -> None:
        self.is_set_aside = True
        _log.error("%s: %s", self._failure, safe_text(error))


def num_kept_of(step: ScheduledStep[Request], outcomes: Outcomes) -> IntArray:
    """Return how many of the tokens that a step computed of each request stay: all but rejected drafts.

    Args:
        step: The step.
        outcomes: What the served model's runner returned for it.
    """
    num_kept = step.num_scheduled.copy()
    if step.drafts:
        runs = cast(Sequence[Sequence[int]], outcomes)
        for index, run in zip(step.generating.tolist(), runs, strict=True):
            if step.drafts[index]:
                num_kept[index] = len(run)
    return num_kept


def num_done_of(step: ScheduledStep[Request]) -> IntArray:
    """Return how many of each request's tokens were computed when it was continued, those of other drafts left out.

    Args:
        step: A step.
    """
    num_done = np.zeros_like(step.num_scheduled)
    for index, tokens in enumerate(step.continued):
        drafts = step.drafts[index] if step.drafts else ()
        # The last known token was computed, and each token from which another one was sampled.
        num_done[index] = min(1 + _num_equal(tokens, drafts), len(tokens))
    return num_done


def _num_equal(tokens: Sequence[int], other_tokens: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with that are equal."""
    count = 0
    for token, other_token in zip(tokens, other_tokens, strict=False):
        if token != other_token:
            break
        count += 1
    return count
