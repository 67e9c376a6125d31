"""The running requests as arrays, the step that the scheduler chooses, and the packed batch that the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any, Generic, TypeVar, overload

import attrs
import numpy as np
import numpy.typing as npt

from kvframe import StepBatch
from kvframe.contract.order import IntArray
from kvframe_engine.requests.progress import RequestT

Outcomes = Sequence[int] | Sequence[Sequence[int]]
"""The next token of each request whose last known token a step computes; of a step with drafts, its next tokens."""
FindOrder = Callable[[IntArray], IntArray | None]
T = TypeVar("T")


class RunningRequests(Sequence[RequestT]):
    """The running requests, each with a column of numbers, so that a step can read whole arrays.

    Invariant: a request's column holds the request's row, computed tokens and known tokens.
    """

    def __init__(self, max_num_seqs: int) -> None:
        """Start with none.

        Args:
            max_num_seqs: The most requests at a time.
        """
        self._requests: list[RequestT] = []
        self._is_ranked = True
        self._columns: IntArray = np.zeros((3, max_num_seqs), dtype=np.int64)

    def columns(self, count: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return the rows, the computed tokens and the known tokens of the first ``count`` requests, as copies."""
        rows, num_computed, num_known = self._columns[:, :count].copy()
        return rows, num_computed, num_known

    def append(self, request: RequestT) -> None:
        """Add a request that has a row."""
        self._columns[:, len(self._requests)] = request.row, request.num_computed, len(request.token_ids)
        self._requests.append(request)
        self._is_ranked = False

    def advance(self, num_computed: IntArray, num_known: IntArray) -> None:
        """Set the computed and the known tokens of the first ``n`` requests.

        Args:
            num_computed: ``[n]``: their computed tokens.
            num_known: ``[n]``: their known tokens.
        """
        self._columns[1, : len(num_computed)] = num_computed
        self._columns[2, : len(num_known)] = num_known

    def remove(self, requests: Sequence[RequestT]) -> None:
        """Remove requests."""
        dropped = {id(request) for request in requests}
        going_on = [index for index, request in enumerate(self._requests) if id(request) not in dropped]
        self._requests = [self._requests[index] for index in going_on]
        self._columns[:, : len(going_on)] = self._columns[:, going_on]
        # Without the last requests, the order of the others is the same.
        self._is_ranked = self._is_ranked and going_on == [*range(len(going_on))]

    def rank(self, ranks_of: Callable[[list[RequestT]], Sequence[Any]]) -> bool:
        """Order the requests by their ranks, and keep the order of those of one rank; return whether it changed."""
        if self._is_ranked:
            return False
        ranks = ranks_of(self._requests)
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        self._requests = [self._requests[index] for index in order]
        self._columns[:, : len(order)] = self._columns[:, order]
        self._is_ranked = True
        return order != sorted(order)

    @overload
    def __getitem__(self, index: int) -> RequestT: ...

    @overload
    def __getitem__(self, index: slice) -> list[RequestT]: ...

    def __getitem__(self, index: int | slice) -> RequestT | list[RequestT]:
        return self._requests[index]

    def __iter__(self) -> Iterator[RequestT]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


@attrs.frozen(eq=False)
class ScheduledStep(Generic[RequestT]):
    """The work of one step. Each request's scheduled tokens follow its computed ones.

    Attributes:
        requests: The requests of the step, each once.
        admitted: The requests that were admitted in this step.
        rows: ``[num_reqs], int64, host``: the row of each request.
        num_computed: ``[num_reqs], int64, host``: its tokens that were computed before.
        num_known: ``[num_reqs], int64, host``: all its tokens that are known.
        num_scheduled: ``[num_reqs], int64, host``: its tokens that the step computes, at least one; drafts come last.
        num_tokens: Tokens that the step computes.
        drafts: For each request, the draft tokens that the step computes; empty if no request has any.
        continued: For each request, the tokens with which the draft model continued it; empty if it continued none.
    """

    requests: list[RequestT]
    admitted: list[RequestT]
    rows: IntArray
    num_computed: IntArray
    num_known: IntArray
    num_scheduled: IntArray
    num_tokens: int
    drafts: Sequence[Sequence[int]] = ()
    continued: Sequence[Sequence[int]] = ()

    @property
    def generating(self) -> IntArray:
        """``[num_generating], int64, host``: the indices of the requests whose last known token is computed."""
        return np.flatnonzero(self.num_computed + self.num_scheduled >= self.num_known)

    def with_admitted(self, admitted: list[RequestT], counts: Sequence[int]) -> ScheduledStep[RequestT]:
        """Return the step with requests that were admitted to it, and how many tokens it computes of each."""
        if not admitted:
            return self
        columns = np.array([(request.row, request.num_computed, len(request.token_ids)) for request in admitted]).T
        before = np.stack([self.rows, self.num_computed, self.num_known])
        rows, num_computed, num_known = np.concatenate([before, columns], axis=1)
        return ScheduledStep(
            [*self.requests, *admitted],
            admitted,
            rows,
            num_computed,
            num_known,
            np.concatenate([self.num_scheduled, counts]),
            self.num_tokens + sum(counts),
        )

    def following(self, max_num_tokens: int) -> ScheduledStep[RequestT] | None:
        """Return a step that continues the requests, as if each got a token; None if it would leave one out.

        Requests that surely end in this step are not continued.

        Args:
            max_num_tokens: The most tokens that it computes.
        """
        num_computed = self.num_computed + self.num_scheduled
        is_sampled = num_computed >= self.num_known
        num_known = self.num_known + is_sampled
        has_next = ~is_sampled | (num_known < [request.num_final_tokens for request in self.requests])
        (indices,) = (has_next & [request.finish_reason is None for request in self.requests]).nonzero()
        counts = (num_known - num_computed)[indices]
        counts = np.minimum(counts, max_num_tokens - (np.cumsum(counts) - counts))
        if not len(indices) or counts.min() <= 0:
            return None
        requests = self.requests if len(indices) == len(self.requests) else [self.requests[i] for i in indices.tolist()]
        return ScheduledStep(
            requests, [], self.rows[indices], num_computed[indices], num_known[indices], counts, int(counts.sum())
        )


@attrs.frozen(kw_only=True, eq=False, slots=False)
class PackedStep(StepBatch, Generic[RequestT]):
    """A step's batch, with its requests in the order in which their tokens are packed, and the use of each logits row.

    The model returns a row of logits for each token that generates (``generating_indices``). Three kinds of tokens do:
    the last known token of a request, from whose logits the next token is sampled; the drafts after it; and the prompt
    tokens of a request that wants log-probabilities of its prompt.

    Attributes:
        requests: The requests.
        num_wanted: ``[num_reqs]``: the number of logits rows of each request.
        is_sampled: ``[num_reqs], bool``: whether a request gets a token: the step computes its last known one.
        drafts: The drafts of each request; empty if no request has any.
        sampled: ``[num_sampled]``: the logits rows that tokens are sampled from, in the order of requests: one for each
            request that gets a token, and one for each draft.
        sampled_order: ``[num_requests_sampled]``: for each request that gets a token, in the scheduler's order, its
            index among those that get one here; None if both orders are the same.
    """

    requests: Sequence[RequestT]
    num_wanted: IntArray
    is_sampled: npt.NDArray[np.bool_]
    drafts: Sequence[Sequence[int]]
    sampled: IntArray
    sampled_order: IntArray | None

    @classmethod
    def of(cls, step: ScheduledStep[RequestT], order_for: FindOrder) -> PackedStep[RequestT]:
        """Pack a step's requests.

        Args:
            step: The step.
            order_for: Returns the order in which to pack requests, given their ``query_lens``; None for the
                order that they have.
        """
        requests, rows, drafts = step.requests, step.rows, step.drafts
        num_computed, query_lens, num_known = step.num_computed, step.num_scheduled, step.num_known
        order = order_for(query_lens)
        if order is not None:
            drafts = [drafts[i] for i in order] if drafts else drafts
            requests, rows = [requests[i] for i in order], rows[order]
            num_computed, query_lens, num_known = num_computed[order], query_lens[order], num_known[order]
        first_wanted = num_known - 1
        for index, request in enumerate(requests):
            if request.wants_prompt_rows:
                first_wanted[index] = request.first_prompt_row
        num_after = num_computed + query_lens
        num_wanted = np.maximum(num_after - np.maximum(num_computed, first_wanted), 0)
        ends, is_sampled = np.cumsum(num_wanted), num_after >= num_known
        sampled = (ends - 1)[is_sampled]
        if drafts:
            before = np.array([len(tokens) for tokens in drafts])[is_sampled]
            # The rows of a request's last known token and of its drafts are consecutive.
            stops = np.cumsum(before + 1)
            sampled = np.arange(stops[-1] if len(stops) else 0) + np.repeat(sampled + 1 - stops, before + 1)
        return cls(
            requests=requests,
            rows=rows,
            num_computed=num_computed,
            query_lens=query_lens,
            num_wanted=num_wanted,
            generating_indices=np.arange(ends[-1]) + np.repeat(np.cumsum(query_lens) - ends, num_wanted),
            is_sampled=is_sampled,
            drafts=drafts,
            sampled=sampled,
            sampled_order=None if order is None else np.argsort(order[is_sampled]),
        )

    def sampled_requests(self) -> tuple[Sequence[RequestT], IntArray, IntArray]:
        """Return the requests that get a token, their rows, and how many of their tokens are known before it."""
        requests, rows, num_known = self.requests, self.rows, self.num_computed + self.query_lens
        if self.is_sampled.all():
            return requests, rows, num_known
        return list(compress(requests, self.is_sampled)), rows[self.is_sampled], num_known[self.is_sampled]

    def in_step_order(self, outcomes: Sequence[T]) -> Sequence[T]:
        """Return outcomes of the requests that get a token in the scheduler's order."""
        return outcomes if self.sampled_order is None else [outcomes[index] for index in self.sampled_order]

    @property
    def has_prompt_rows(self) -> bool:
        """Whether there are logits rows that no token is sampled from."""
        return len(self.sampled) < len(self.generating_indices)

    def prompt_rows(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return the logits rows that no token is sampled from, the indices of their requests, and their positions."""
        rows = np.delete(np.arange(len(self.generating_indices)), self.sampled)
        requests = np.repeat(np.arange(len(self.requests)), self.num_wanted)[rows]
        starts = self.num_computed + self.query_lens - np.cumsum(self.num_wanted)
        return rows, requests, rows + starts[requests]
