"""Continuous batching: chooses which tokens of which requests the next step computes.

Each step has a token budget. Running requests come first, in the order of their admission, then waiting requests, those
of the owner with the fewest running requests first. A sample that will fork from another one, whose prompt is in
progress, lets other requests go first. A prompt that exceeds the budget is computed in chunks over several steps; its
first chunk is scheduled when the cache has enough free blocks for all chunks. If there are too few blocks for a running
request, the request that was admitted last is preempted: it frees its blocks and waits at the head of its owner's
queue. Its tokens are recomputed, apart from a prefix that is still found. If the cache keeps no state between steps, a
prompt is computed in one step. Draft tokens come last: they take what the step's budget and
the free blocks have left.

Owners share what runs. An owner's share is the number of running requests, divided by the number of owners with waiting
or running requests. Three rules give an owner below its share what another one has above its own:

- If the first waiting request finds no row or too few blocks, the last request of the owner with the most running
  requests is preempted for it, if that owner has at least two more than the owner of the waiting request.
- If running requests need more blocks than are free, they take them from the last request of that owner too.
- If prompts in progress exceed a step, their owners get equal parts of its tokens.

A preemption by the first rule makes the numbers of running requests more equal: the owner that loses one still has more
than the other one had, so it is above its share, and its preempted request waits until the other one is admitted and
does not preempt back. An owner's only running request is never preempted by this rule. The first running request is
preempted by no rule while others run. So it ends, and every other one becomes the first some time. The worst case is an
owner with a new short request whenever the last one has ended. Each of them can preempt the last request of the owner
with the most, which then computes again what it does not find in the cache or in host memory; its other requests
continue.

A scheduling policy replaces these rules by one order: the waiting request with the smallest number is admitted first,
the running one with the largest is preempted first, and a waiting request that finds no row or too few blocks preempts
running ones whose numbers are larger by the policy's gap. The running request with the smallest number is preempted for
no other running one, and for no waiting one within the gap. As numbers never change, and each request gets a larger
number than all that came long before it, every request has the smallest number some time, and ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Generic, cast

import numpy as np

from kvframe.contract.errors import KVFrameError
from kvframe.contract.foreign import safe_text
from kvframe.contract.order import IntArray
from kvframe_engine.contract.scheduling import FCFS, SchedulingPolicy
from kvframe_engine.requests.progress import FinishReason, RequestProgress, RequestT
from kvframe_engine.scheduling.drafting import Continue, Drafting
from kvframe_engine.scheduling.fair_queue import FairQueue
from kvframe_engine.scheduling.ordered_queue import OrderedQueue
from kvframe_engine.scheduling.request_blocks import RequestBlocks, RequestCache, is_being_computed
from kvframe_engine.scheduling.stats import SchedulerStats
from kvframe_engine.scheduling.step import Outcomes, RunningRequests, ScheduledStep

if TYPE_CHECKING:
    import torch

    from kvframe_engine.tiers.tiers import Tiers

_log = logging.getLogger("kvframe")
NEEDS_OUTCOMES = "a request names logits processors, which read its tokens on the host"
"""Why a step waits for the outcomes of the one before it, if a request of it ``needs_outcomes``."""

NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


class Scheduler(Generic[RequestT]):
    """Owns the queue of waiting requests and the list of running ones.

    Ctrl-C waits while the scheduler runs. So every exception here is a plugin's or a fault, ``KeyboardInterrupt`` too.

    Invariant: a request of the scheduler either waits (no row, and no blocks), or runs (with a row and blocks).

    Attributes:
        waiting: The queue.
        running: The running requests, in the order of their admission. If they have several owners, they may be ordered
            by rank.
        stats: The counters.
        failed: The requests that ended with an error in ``schedule``, or in a ``complete`` that raised, each once.
        waits_for: Why ``schedule_ahead`` chose no step the last time; empty if it chose one.
    """

    def __init__(
        self,
        cache: RequestCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        shared_block_size: int = 0,
        whole_prompts: bool = False,
        reserve_prompts: bool = True,
        drafting: Drafting[RequestT] | None = None,
        tiers: Tiers | None = None,
        policy: SchedulingPolicy = FCFS,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """Start with nothing to do.

        Args:
            cache: Where requests get their blocks.
            max_num_seqs: The most requests that run at a time.
            max_num_batched_tokens: The most tokens that one step computes. It also limits the input tokens that a step
                computes, except that a single longer input is computed alone.
            shared_block_size: Tokens per block that requests with a common prefix can share; 0 if they cannot.
            reserve_prompts: Whether a prompt that is computed in chunks begins only when the cache has enough free
                blocks for all of it. If False, it begins when they are enough for its first chunk.
            whole_prompts: Whether a request starts only if one step can compute all of its tokens; it must have no
                more than ``max_num_batched_tokens``.
            drafting: Gets draft tokens for requests that generate; None for none.
            tiers: Brings prefixes from host memory and page stores; None for none.
            policy: Orders requests; with ``FCFS``, owners share what runs.
            now: Returns the seconds of a clock that never goes back.

        Raises:
            PluginError: The policy gives a wrong answer.
        """
        self.waiting: FairQueue[RequestT] | OrderedQueue[RequestT]
        self.waiting = FairQueue() if policy == FCFS else OrderedQueue(policy, now)
        self.running: RunningRequests[RequestT] = RunningRequests(max_num_seqs)
        self.stats = SchedulerStats()
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._shared_block_size = shared_block_size
        self._whole_prompts = whole_prompts
        self._blocks: RequestBlocks[RequestT] = RequestBlocks(
            cache,
            self.stats,
            max_num_batched_tokens=max_num_batched_tokens,
            reserve_prompts=reserve_prompts,
            tiers=tiers,
        )
        self._drafting = drafting
        self._tiers = tiers
        self._pausing: list[RequestT] = []
        self._choosing: list[RequestT] = []
        # The first waiting request, if it found too few free blocks when it was to be admitted last.
        self._without_blocks: RequestT | None = None
        # The step that was chosen before the outcomes of the one before it were known; None for none.
        self._ahead: ScheduledStep[RequestT] | None = None
        self.waits_for = ""
        self.failed: list[RequestT] = []

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self.running or self.waiting.queues)

    @property
    def max_drafts(self) -> int:
        """The most draft tokens of a request in a step; 0 without a proposer."""
        return 0 if self._drafting is None else self._drafting.max_drafts

    @property
    def hidden_states(self) -> dict[str, torch.Tensor] | None:
        """Where the runner leaves hidden states by request id; None if no proposer needs them."""
        return None if self._drafting is None else self._drafting.hidden_states

    def use_draft_model(self, continue_requests: Continue[RequestT]) -> None:
        """Let the proposer's draft model continue requests before the proposer is asked for drafts."""
        assert self._drafting is not None
        self._drafting.continue_requests = continue_requests

    def add(self, request: RequestT) -> None:
        """Append a request to the queue. The cache must be able to hold it alone, at its full length."""
        self.waiting.append(request)
        if self._tiers is not None:
            self._tiers.begin(request)

    def schedule(self) -> ScheduledStep[RequestT] | None:
        """Choose the next step and allocate blocks for its tokens; return None if there is nothing to do.

        Either ``complete`` or ``fail`` must follow before the next call. If a plugin's cache spec raises or breaks its
        laws at a request's tokens, that request ends with an error, and the others continue; ``take_failed`` returns
        it.

        Raises:
            BaseException: The step could not be scheduled, and no single request is the cause. Every running request
                ended with an error, or the first waiting one if none ran.
        """
        try:
            return self._schedule()
        except BaseException:
            self._end_all(list(self.running) or ([self.waiting.first] if self.waiting else []))
            raise

    def take_failed(self) -> list[RequestT]:
        """Return ``failed``, and empty it."""
        failed, self.failed = self.failed, []
        return failed

    def _schedule(self) -> ScheduledStep[RequestT] | None:
        if self.waiting.queues and self.running and self.waiting.ranks_running:
            self._preempt_for_waiting()
        preempted = self.stats.preemptions
        if self._choosing:
            self._choose_kept()
        continuing = self._continue_running() if self.running else NO_ROWS
        budget = self._max_num_batched_tokens - int(continuing.sum())
        admitted: list[RequestT] = []
        counts: list[int] = []
        # A request that was just preempted would be preempted again. But if none runs, one has to start.
        may_admit = self.waiting.queues and budget and len(continuing) == len(self.running)
        if may_admit and (preempted == self.stats.preemptions or not self.running):
            budget = self._admit_waiting(budget, admitted, counts)
        num_reqs = len(continuing) + len(admitted)
        if not num_reqs:
            return None
        step = ScheduledStep(
            self.running[:num_reqs],
            admitted,
            *self.running.columns(num_reqs),
            np.concatenate([continuing, np.array(counts)]) if counts else continuing,
            self._max_num_batched_tokens - budget,
        )
        if self._drafting is None:
            return step
        with_drafts = self._drafting.add_drafts(step, budget, self._cache)
        self.stats.draft_tokens += with_drafts.num_tokens - step.num_tokens
        return with_drafts

    def schedule_ahead(self, step: ScheduledStep[RequestT]) -> ScheduledStep[RequestT] | None:
        """Choose the next step while ``step`` is computed, as if every request of it went on, and allocate its blocks.

        A request that ends in ``step`` keeps its row and its blocks until the next step is complete.

        Args:
            step: The last step that was chosen; none of its outcomes is known.

        Returns:
            None if the next step depends on the outcomes, or on blocks that are not free; ``waits_for`` says on what.
        """
        self._ahead = None
        self.waits_for = self._reason_to_wait(step)
        if self.waits_for:
            return None
        following = step.following(self._max_num_batched_tokens)
        if following is None:
            self.waits_for = "no request goes on for certain, or the requests exceed a step"
            return None
        try:
            if not self._cache.extend_rows(following.rows, following.num_computed + following.num_scheduled):
                self.waits_for = "too few blocks are free"
                return None
        except AssertionError:
            raise
        except BaseException:
            self.waits_for = "the cache failed"
            return None  # the next call of ``schedule`` finds the request
        admitted: list[RequestT] = []
        counts: list[int] = []
        if budget := self._max_num_batched_tokens - following.num_tokens:
            self._admit_waiting(budget, admitted, counts, running=step)
        self._ahead = following.with_admitted(admitted, counts)
        return self._ahead

    def _reason_to_wait(self, step: ScheduledStep[RequestT]) -> str:
        """Return why the step after ``step`` depends on its outcomes; empty if it does not."""
        if self._pausing or self._choosing:
            return "a prompt stops before its end"
        if self.waiting.queues and self.waiting.ranks_running:
            return "waiting requests may preempt running ones"
        if len(step.requests) < len(self.running):
            return "the running requests exceed a step"
        has_row = len(self.running) < self._max_num_seqs
        if has_row and (waiting := self._next_waiting()) is not None and waiting.needs_outcomes:
            return NEEDS_OUTCOMES
        return ""

    def forget_ahead(self) -> None:
        """Forget that a step was chosen ahead: it was not computed, or it is complete."""
        self._ahead = None

    def complete(self, step: ScheduledStep[RequestT], outcomes: Outcomes) -> list[RequestT]:
        """Record the outcome of a step.

        Args:
            step: What ``schedule`` returned.
            outcomes: One number for each request whose last known token was computed, in the step's order: its next
                token, or a negative number if the model's output is not numbers. Of a step with drafts, a list for
                each: its next tokens, none if the model's output is not numbers.

        Returns:
            The requests with a new token or an end, in the step's order.

        Raises:
            BaseException: The cache could not record the step. The requests of the step ended with an error;
                ``take_failed`` returns them.
        """
        try:
            return self._complete(step, outcomes)
        except BaseException:
            self._end_all(step.requests)
            raise

    def _complete(self, step: ScheduledStep[RequestT], all_outcomes: Outcomes) -> list[RequestT]:
        for request in step.admitted:
            request.new_inputs = frozenset()
        num_computed = step.num_computed + step.num_scheduled
        generating = step.generating
        outcomes: Sequence[int]
        if step.drafts:
            assert self._drafting is not None
            runs = cast(Sequence[Sequence[int]], all_outcomes)
            outcomes, num_accepted = self._drafting.take_accepted(step, runs, num_computed)
            self.stats.accepted_draft_tokens += num_accepted
        else:
            outcomes = cast(Sequence[int], all_outcomes)
        if outcomes and min(outcomes) < 0:
            # The state of a request without an outcome is not published: a request that hits it would fail too.
            is_sound = np.ones(len(step.requests), dtype=np.bool_)
            is_sound[generating] = np.array(outcomes) >= 0
            rows, counts = step.rows[is_sound], num_computed[is_sound]
            self._cache.commit_rows(rows, counts, keeps_extended=self._ahead is not None)
        else:
            self._cache.commit_rows(step.rows, num_computed, keeps_extended=self._ahead is not None)
        for request, count in zip(step.requests, num_computed.tolist(), strict=True):
            request.num_computed = count
        generated = step.requests
        if len(generating) < len(generated):
            generated = [generated[index] for index in generating.tolist()]
        again: list[RequestT] = []
        for request, outcome in zip(generated, outcomes, strict=True):
            if request.finish_reason is not None:
                pass  # a draft was its last token
            elif outcome >= 0:
                request.take(outcome)
            elif request.is_on_cache:
                again.append(request)
            else:
                request.finish_reason = "error"
                request.error = request.no_outcome
        num_known = step.num_known.copy()
        num_known[generating] = [len(request.token_ids) for request in generated]
        self.running.advance(num_computed, num_known)
        if ended_requests := [request for request in step.requests if request.finish_reason is not None]:
            self._release_ended(self._not_ahead(ended_requests))
        for request in reversed(self._not_ahead(again) if again else ()):
            self._compute_anew(request)
        self.stats.steps += 1
        self.stats.computed_tokens += step.num_tokens
        self.stats.generated_tokens += int(np.maximum(num_known - step.num_known, 0).sum())
        return [request for request in generated if request not in again] if again else generated

    def fail(self, step: ScheduledStep[RequestT], error: str) -> list[RequestT]:
        """End the requests of a step that could not be computed, and return those that had not ended."""
        going_on = [request for request in step.requests if request.finish_reason is None]
        for request in going_on:
            request.error = error
            self.end(request, "error")
        if self._ahead is None:
            self._release_ended([request for request in step.requests if request.row >= 0])
        return going_on

    def _release_ended(self, requests: Sequence[RequestT]) -> None:
        """Free the rows and blocks of running requests that have ended."""
        for request in requests:
            self._blocks.release(request)
            self.waiting.note_stop(request)
            if self._drafting is not None:
                self._drafting.forget(request)
        self.running.remove(requests)

    def end(self, request: RequestT, reason: FinishReason) -> None:
        """End a waiting or running request at once; nothing if it has ended."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        if self._tiers is not None:
            self._tiers.drop(request)
        if self._ahead is not None and request in self._ahead.requests:
            return  # ``complete`` releases it
        if request.row >= 0:
            self.running.remove([request])
            self.waiting.note_stop(request)
            self._blocks.release(request)
        else:
            self.waiting.remove(request)
        if self._drafting is not None:
            self._drafting.forget(request)

    def _not_ahead(self, requests: Sequence[RequestT]) -> list[RequestT]:
        """Return those of requests that the step which was chosen ahead, if any, does not compute."""
        if self._ahead is None:
            return list(requests)
        ahead = {id(request) for request in self._ahead.requests}
        return [request for request in requests if id(request) not in ahead]

    def _end_at_fault(self, request: RequestT, error: BaseException) -> None:
        """End one request that the cache cannot serve."""
        why = str(error) if isinstance(error, KVFrameError) else safe_text(error)
        request.error = f"no further token of it can be computed: {why}"
        self.end(request, "error")
        self.failed.append(request)

    def _end_all(self, requests: Sequence[RequestT]) -> None:
        """End all requests of a failed step, because the faulty one is unknown. The caller raises the exception."""
        for request in requests:
            if request.finish_reason is None:
                request.error = "the step that was to compute it failed"
                try:
                    self.end(request, "error")
                except BaseException as error:
                    _log.error("the blocks of request %r could not be freed: %s", request.request_id, safe_text(error))
                self.failed.append(request)

    def note_pin(self) -> None:
        """Record that a prefix was pinned.

        The plan guarantees enough blocks for a lone request only if nothing is pinned, so such a request may have to be
        recomputed.
        """
        for request in self.running:
            request.runs_alone = False

    def preempt_last(self) -> None:
        """Preempt the last running request, between steps; it continues when there are enough free blocks."""
        if self.waiting.ranks_running:
            self._rank()
        self._preempt(self.running[-1])

    def restart_all(self) -> list[RequestT]:
        """Queue all started requests, between steps, so that their tokens are computed again, and return them.

        Running requests come before those that wait already, in the order of their admission.
        """
        for request in reversed(list(self.running)):
            self._blocks.release(request)
            self._queue_again(request)
        started_requests = [request for request in self.waiting if request.was_started]
        for request in started_requests:
            request.forget_partial()
        return started_requests

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _continue_running(self) -> IntArray:
        """Allocate blocks for the next tokens of running requests; preempt some requests if necessary.

        Returns:
            ``[n], int64, host``: how many tokens each of the first ``n`` running requests computes.
        """
        budget = self._max_num_batched_tokens
        rows, num_computed, num_known = self.running.columns(len(self.running))
        counts: IntArray = num_known - num_computed
        if self._pausing:
            self._pausing = [
                request for request in self._pausing if request.row >= 0 and request.num_computed < request.last_pause
            ]
            for request in self._pausing:
                counts[self.running.index(request)] = request.next_stop - request.num_computed
        if int(counts.sum()) > budget:
            if self.waiting.ranks_running and not self.waiting.has_several_owners and self._rank():
                return self._continue_running()
            if self.waiting.has_several_owners:
                counts = self._divide(counts)
            else:
                counts = np.minimum(counts, budget - (np.cumsum(counts) - counts))
                counts = counts[counts > 0]
        try:
            if self._cache.extend_rows(rows[: len(counts)], num_computed[: len(counts)] + counts):
                return counts
        except AssertionError:
            raise
        except BaseException:
            pass  # a spec is wrong; allocating one by one finds the request
        # There are too few blocks for all: requests that were admitted early take blocks from those admitted late.
        if self.waiting.ranks_running:
            self._rank()
        granted: list[int] = []
        while len(granted) < len(self.running) and budget:
            request = self.running[len(granted)]
            count = request.end_of_step(request.num_computed, budget) - request.num_computed
            if not count:
                break
            if self._extend_or_preempt(request, request.num_computed + count):
                granted.append(count)
                budget -= count
        return np.array(granted, dtype=np.int64)

    def _choose_kept(self) -> None:
        """Let layers choose what they keep of the prompts that the last step completed; preempt some if necessary."""
        if self.waiting.ranks_running:
            self._rank()
        for request in self._choosing:
            if request.row >= 0 and request.has_to_choose:
                request.has_chosen = self._get_or_preempt(request, partial(self._cache.shrink, request.request_id))
        self._choosing = [request for request in self._choosing if request.row >= 0 and not request.has_chosen]

    def _extend_or_preempt(self, request: RequestT, num_tokens: int) -> bool:
        """Allocate blocks for a running request's first tokens; return False if it was preempted itself, or ended."""
        return self._get_or_preempt(request, partial(self._cache.extend, request.request_id, num_tokens))

    def _get_or_preempt(self, request: RequestT, get: Callable[[], bool]) -> bool:
        """Get blocks for a running request, from others if need be; False if it was preempted itself, or ended."""
        while True:
            try:
                if get():
                    return True
            except (RuntimeError, MemoryError):
                # What it keeps of its prompt could not be copied, so the request is recomputed.
                self._blocks.release(request)
                self._let_wait(request)
                return False
            except AssertionError:  # the cache itself is broken
                raise
            except BaseException as error:
                self._end_at_fault(request, error)
                return False
            victim = self.running[-1]
            if len(self.running) == 1:
                # The plan has enough blocks for a lone request, unless they are scattered over slabs of other groups.
                assert not victim.runs_alone, "the plan guarantees enough blocks for a lone request"
                victim.runs_alone = True
            self._preempt(victim)
            if victim is request:
                return False

    def _compute_anew(self, request: RequestT) -> None:
        """Queue a request to be recomputed without cached state, because that state may be why it failed."""
        request.trusts_cache = False
        self._blocks.release(request)
        self._queue_again(request)
        self.stats.retries += 1

    def _preempt(self, request: RequestT) -> None:
        self._blocks.release(request)
        self._let_wait(request)

    def _let_wait(self, request: RequestT) -> None:
        self._queue_again(request)
        self.stats.preemptions += 1

    def _queue_again(self, request: RequestT) -> None:
        """Let a running request, which has given its blocks back, wait at the head of its owner's queue."""
        self.running.remove([request])
        self.waiting.note_stop(request)
        self.waiting.appendleft(request)
        if self._tiers is not None:
            self._tiers.begin(request)

    # --- owners -------------------------------------------------------------------------------------------------------

    def _preempt_for_waiting(self) -> None:
        """Preempt running requests for the first waiting one, if it finds no row or no blocks and its owner has fewer.

        For a row, that is one request. For blocks, it is as many as have the tokens of the waiting request.
        """
        request, waiting = self._next_waiting(), self.waiting
        without_blocks, self._without_blocks = self._without_blocks, None
        if request is None:
            return
        is_full = len(self.running) >= min(self._max_num_seqs, self._max_num_batched_tokens)
        num_needed = len(request.token_ids) if request is without_blocks else 0
        if not (is_full or num_needed):
            return
        self._rank()
        while self.running and waiting.may_preempt(request, self.running[-1]):
            victim = self.running[-1]
            num_needed -= len(victim.token_ids)
            self._preempt(victim)
            if num_needed <= 0:
                break

    def _rank(self) -> bool:
        """Order the running requests by their ranks; return whether their order changed."""
        return self.running.rank(self.waiting.ranks)

    def _next_waiting(self) -> RequestT | None:
        """Return the waiting request to admit next; None if none can be admitted, however many blocks are free."""
        if self.running and self.running[0].runs_alone:
            return None
        request = self.waiting.first_of(_is_ready)
        return None if request is None or (self.running and request.runs_alone) else request

    def _divide(self, counts: IntArray) -> IntArray:
        """Return how many tokens running requests of several owners compute if they exceed a step.

        Each request gets a token, and each owner with prompts in progress an equal part of the others. What an owner
        does not need goes to the other owners. If the first waiting request has another owner, one token is left for
        it: it starts with this token, and is a prompt in progress then.

        Args:
            counts: ``[num_running]``: how many tokens each could compute. A step has a token for each at least, because
                a request is admitted only if the running ones leave a token.
        """
        needed_tokens: dict[str, int] = {}
        prompts = np.flatnonzero(counts > 1).tolist()
        for index in prompts:
            owner = self.running[index].owner
            needed_tokens[owner] = needed_tokens.get(owner, 0) + int(counts[index]) - 1
        num_left = self._max_num_batched_tokens - len(counts)
        has_row = len(counts) < self._max_num_seqs
        if (
            num_left
            and has_row
            and (request := self._next_waiting()) is not None
            and request.owner not in needed_tokens
        ):
            num_left -= 1
        parts: dict[str, int] = {}
        for owner in sorted(needed_tokens, key=needed_tokens.__getitem__):
            parts[owner] = min(needed_tokens[owner], num_left // (len(needed_tokens) - len(parts)))
            num_left -= parts[owner]
        divided: IntArray = np.minimum(counts, 1)
        for index in prompts:
            owner = self.running[index].owner
            count = min(parts[owner], int(counts[index]) - 1)
            divided[index] += count
            parts[owner] -= count
        return divided

    def _admit_waiting(
        self,
        budget: int,
        admitted: list[RequestT],
        counts: list[int],
        running: ScheduledStep[RequestT] | None = None,
    ) -> int:
        """Admit waiting requests, in their order, as long as there are enough free blocks.

        Args:
            budget: Tokens that the step has left.
            admitted: The admitted requests are appended to it.
            counts: For each of them, the number of tokens that the step computes is appended.
            running: The step before, if its outcomes are not known.

        Returns:
            The tokens that the step still has left.
        """
        input_tokens = 0
        while budget and len(self.running) < self._max_num_seqs and (request := self._next_waiting()) is not None:
            if self._whole_prompts and len(request.token_ids) > budget:
                break
            if admitted and is_being_computed(request, admitted, counts, self._shared_block_size):
                break
            if running is not None and (request.needs_outcomes or self._is_computed_in(running, request)):
                break
            try:
                count = self._blocks.let_run(request, budget, input_tokens, others_run=bool(self.running))
            except AssertionError:
                raise
            except BaseException as error:
                self._end_at_fault(request, error)
                continue
            if not count:
                # If others were admitted before it, they may be why.
                if not admitted and request.end_of_step(request.num_computed, budget) > request.num_computed:
                    self._without_blocks = request
                break
            if request.boundaries:
                self._pausing.append(request)
                if request.keeps_part and not request.has_chosen:
                    self._choosing.append(request)
            self.waiting.take(request)
            self.running.append(request)
            admitted.append(request)
            counts.append(count)
            budget -= count
            input_tokens += request.num_new_input_tokens
        return budget

    def _is_computed_in(self, step: ScheduledStep[RequestT], request: RequestT) -> bool:
        """Return whether a step that is not complete computes state that a request can share in the next one."""
        num_admitted = len(step.admitted)
        counts = step.num_scheduled[len(step.requests) - num_admitted :].tolist()
        return is_being_computed(request, step.admitted, counts, self._shared_block_size)


def _is_ready(request: RequestProgress) -> bool:
    """Return whether a waiting request waits neither for its pages nor for tokens before its fork from another one."""
    fetch, forked_request = request.fetch, request.forks_from
    return (fetch is None or fetch.is_over) and (forked_request is None or not _is_before_pause(forked_request))


def _is_before_pause(request: RequestProgress) -> bool:
    return request.row >= 0 and request.num_computed < request.pause_at
