"""Continuous batching: chooses which tokens of which requests the next step computes.

Each step has a token budget. Running requests come first, in the order of their admission, then waiting ones, first
come, first served; a prompt that exceeds the budget is computed in chunks over several steps, the first one when the
cache has room for all of them. When it has no room for a running request, the request admitted last gives its blocks
back and waits at the head of the queue (preemption). Its state is kept in host memory until it runs again, if the cache
has room for it there; else its tokens are computed again. Where nothing of a request outlives a step, its prompt is
computed in one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Generic

import numpy as np

from kvframe.contract.errors import KVFrameError
from kvframe.contract.foreign import safe_text
from kvframe.engine.requests.progress import FinishReason, RequestT
from kvframe.engine.scheduling.holdings import Holdings
from kvframe.engine.scheduling.request_cache import RequestCache
from kvframe.engine.scheduling.running_requests import IntArray, RunningRequests
from kvframe.engine.scheduling.stats import SchedulerStats
from kvframe.engine.scheduling.step import ScheduledStep

_log = logging.getLogger("kvframe")
NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


class Scheduler(Generic[RequestT]):
    """Owns the queue of waiting requests and the list of running ones.

    Invariant: a request is either waiting (no row, no blocks but perhaps swapped ones), running (a row, blocks), or not
    here.
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
    ) -> None:
        """Start with nothing to do.

        Args:
            cache: Where requests get their blocks.
            max_num_seqs: The most requests that run at a time.
            max_num_batched_tokens: The most tokens that one step computes. Of inputs it computes as many besides, or a
                single longer one.
            shared_block_size: Tokens per block that requests with a common prefix can share; 0 if they cannot.
            reserve_prompts: Whether a prompt that is computed in parts begins when the cache has room for all of it;
                else when it has room for its first part.
            whole_prompts: Whether a request starts only where one step has room for all of its tokens; it must have no
                more than ``max_num_batched_tokens``.
        """
        self.waiting: deque[RequestT] = deque()
        self.running: RunningRequests[RequestT] = RunningRequests(max_num_seqs)
        self.stats = SchedulerStats()
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._shared_block_size = shared_block_size
        self._whole_prompts = whole_prompts
        self._holdings: Holdings[RequestT] = Holdings(
            cache, self.stats, max_num_batched_tokens=max_num_batched_tokens, reserve_prompts=reserve_prompts
        )
        self._pausing: list[RequestT] = []
        self._failed: list[RequestT] = []

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self.running or self.waiting)

    def add(self, request: RequestT) -> None:
        """Put a request at the end of the queue. The cache must be able to hold it alone, at its full length."""
        self.waiting.append(request)

    def schedule(self) -> ScheduledStep[RequestT] | None:
        """Choose the next step and get room for its tokens; None if there is nothing to do.

        Either ``complete`` or ``fail`` must follow before the next call. A request that the cache cannot serve, because
        a plugin's cache spec raises or breaks its laws at the request's tokens, ends with an error, and the others go
        on; ``take_failed`` returns it.

        Raises:
            Exception: The step could not be scheduled, and no single request is the cause. Every running request ended
                with an error, or the first one that waits if none ran.
        """
        try:
            return self._schedule()
        except Exception:
            self._end_all(list(self.running) or list(self.waiting)[:1])
            raise

    def take_failed(self) -> list[RequestT]:
        """Return the requests that ended with an error in ``schedule`` or in ``complete`` when that raised, once."""
        failed, self._failed = self._failed, []
        return failed

    def _schedule(self) -> ScheduledStep[RequestT] | None:
        preempted = self.stats.preemptions
        going_on = self._continue_running() if self.running else NO_ROWS
        budget = self._max_num_batched_tokens - int(going_on.sum())
        admitted: list[RequestT] = []
        counts: list[int] = []
        # What was just preempted would only be preempted again; but with nothing running, something must start.
        if self.waiting and budget and (preempted == self.stats.preemptions or not self.running):
            try:
                budget = self._admit_waiting(budget, admitted, counts)
            except BaseException:
                # There is no step that would compute what they bring: they wait as before.
                for request in reversed(admitted):
                    self._holdings.give_back(request)
                    self.running.remove(request)
                    self.waiting.appendleft(request)
                raise
        num_reqs = len(going_on) + len(admitted)
        if not num_reqs:
            return None
        return ScheduledStep(
            self.running[:num_reqs],
            admitted,
            *self.running.columns(num_reqs),
            np.concatenate([going_on, np.array(counts)]) if counts else going_on,
            self._max_num_batched_tokens - budget,
        )

    def complete(self, step: ScheduledStep[RequestT], outcomes: Sequence[int]) -> list[RequestT]:
        """Take the outcome of a step: what was computed, and what came of it.

        Args:
            step: What ``schedule`` returned.
            outcomes: For each request whose last known token was computed, in the step's order, what it takes: its
                next token; negative where what the model gave is not numbers.

        Returns:
            The requests with a new token or an end, in the step's order.

        Raises:
            Exception: The cache could not take note of it. The requests of the step ended with an error;
                ``take_failed`` returns them.
        """
        try:
            return self._complete(step, outcomes)
        except Exception:
            self._end_all(step.requests)
            raise

    def _complete(self, step: ScheduledStep[RequestT], outcomes: Sequence[int]) -> list[RequestT]:
        for request in step.admitted:
            request.new_inputs = frozenset()
        num_computed = step.num_computed + step.num_scheduled
        generating = step.generating
        if outcomes and min(outcomes) < 0:
            # The state of a request without an outcome is not published: a request that found it would fail too.
            is_sound = np.ones(len(step.requests), dtype=np.bool_)
            is_sound[generating] = np.array(outcomes) >= 0
            self._cache.commit_rows(step.rows[is_sound], num_computed[is_sound])
        else:
            self._cache.commit_rows(step.rows, num_computed)
        for request, count in zip(step.requests, num_computed.tolist(), strict=True):
            request.num_computed = count
        generated = step.requests
        if len(generating) < len(generated):
            generated = [generated[place] for place in generating.tolist()]
        ended: list[RequestT] = []
        again: list[RequestT] = []
        for request, outcome in zip(generated, outcomes, strict=True):
            if outcome >= 0:
                request.take(outcome)
            elif request.is_on_cache:
                again.append(request)
            else:
                request.finish_reason = "error"
                request.error = (
                    f"the model's output after token {request.num_computed} is not numbers; "
                    "try another dtype, and check the weights"
                )
            if request.finish_reason is not None:
                ended.append(request)
        num_known = step.num_known.copy()
        num_known[generating] = [len(request.token_ids) for request in generated]
        self.running.advance(num_computed, num_known)
        for request in ended:
            self._holdings.give_back(request)
        if ended:
            self.running.drop_ended()
        for request in reversed(again):
            self._compute_anew(request)
        self.stats.steps += 1
        self.stats.computed_tokens += step.num_tokens
        self.stats.generated_tokens += int((num_known - step.num_known).sum())
        return [request for request in generated if request not in again] if again else generated

    def fail(self, step: ScheduledStep[RequestT], error: str) -> list[RequestT]:
        """End every request of a step that could not be computed, and return them."""
        for request in step.requests:
            request.error = error
            self.end(request, "error")
        return step.requests

    def end(self, request: RequestT, reason: FinishReason) -> None:
        """End a waiting or running request at once; nothing if it has ended."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        if request.row >= 0:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        if request.row >= 0 or request.is_swapped:
            self._holdings.give_back(request)

    def _end_at_fault(self, request: RequestT, error: Exception) -> None:
        """End one request that the cache cannot serve."""
        why = str(error) if isinstance(error, KVFrameError) else safe_text(error)
        request.error = f"no further token of it can be computed: {why}"
        self.end(request, "error")
        self._failed.append(request)

    def _end_all(self, requests: Sequence[RequestT]) -> None:
        """End all requests of a failed step, because the faulty one is unknown; the caller gets the exception."""
        for request in requests:
            if request.finish_reason is None:
                request.error = "the step that was to compute it failed"
                try:
                    self.end(request, "error")
                except Exception as error:
                    _log.error("what request %r held is lost: %s", request.request_id, safe_text(error))
                self._failed.append(request)

    def note_pin(self) -> None:
        """Take note that the cache keeps more than before.

        A request that runs alone had room by the plan wherever its blocks lay; now it may have to start anew for it.
        """
        for request in self.running:
            request.runs_alone = False

    def preempt_last(self) -> None:
        """Take its blocks from the request that was admitted last, between steps; it goes on when there is room."""
        self._preempt(self.running[-1])

    # --- room ---------------------------------------------------------------------------------------------------------

    def _continue_running(self) -> IntArray:
        """Get room for the next tokens of running requests, preempting some if need be.

        Returns:
            ``[n], int64, host``: of the first running requests, how many tokens each computes.
        """
        budget = self._max_num_batched_tokens
        rows, num_computed, num_known = self.running.columns(len(self.running))
        counts: IntArray = num_known - num_computed
        if self._pausing:
            self._pausing = [each for each in self._pausing if each.row >= 0 and each.num_computed < each.pause_at]
            for request in self._pausing:
                counts[self.running.index(request)] = request.next_stop - request.num_computed
        if int(counts.sum()) > budget:
            counts = np.minimum(counts, budget - (np.cumsum(counts) - counts))
            counts = counts[counts > 0]
        try:
            if self._cache.extend_rows(rows[: len(counts)], num_computed[: len(counts)] + counts):
                return counts
        except AssertionError:
            raise
        except Exception:
            pass  # a copy failed, or a spec answered wrongly; one by one shows whose
        # There is no room for all. Those that came first get theirs at the cost of those that came last.
        granted: list[int] = []
        while len(granted) < len(self.running) and budget:
            request = self.running[len(granted)]
            count = min(request.next_stop - request.num_computed, budget)
            if self._make_room(request, request.num_computed + count):
                granted.append(count)
                budget -= count
        return np.array(granted, dtype=np.int64)

    def _make_room(self, request: RequestT, num_tokens: int) -> bool:
        """Get room for a running request's first tokens; False if it had to be preempted itself, or ended."""
        while True:
            try:
                if self._cache.extend(request.request_id, num_tokens):
                    return True
            except (RuntimeError, MemoryError):
                # What it shares with others could not be copied for it: it is computed again.
                self._holdings.give_back(request)
                self._let_wait(request)
                return False
            except AssertionError:  # the cache itself is broken
                raise
            except Exception as error:
                self._end_at_fault(request, error)
                return False
            victim = self.running[-1]
            if len(self.running) == 1:
                # It fits by the plan, unless its blocks lie scattered over slabs among those of others.
                assert not victim.runs_alone, "the plan promised room for a lone request"
                victim.runs_alone = True
            self._preempt(victim)
            if victim is request:
                return False

    def _compute_anew(self, request: RequestT) -> None:
        """Let a request wait for its turn to be computed from nothing: what others cached may be why it failed."""
        request.trusts_cache = False
        self._holdings.give_back(request)
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.stats.retries += 1

    def _preempt(self, request: RequestT) -> None:
        if not self._holdings.swap_out(request):
            self._holdings.give_back(request)
        self._let_wait(request)

    def _let_wait(self, request: RequestT) -> None:
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.stats.preemptions += 1

    def _admit_waiting(self, budget: int, admitted: list[RequestT], counts: list[int]) -> int:
        """Let waiting requests run, in their order, as long as there is room.

        Args:
            budget: Tokens that the step has left.
            admitted: Those that run now are put here.
            counts: Of each, how many tokens the step computes.

        Returns:
            The tokens that are left.
        """
        while self.waiting and budget and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            if self.running and (request.runs_alone or self.running[0].runs_alone):
                break
            if self._whole_prompts and len(request.token_ids) > budget:
                break
            if self._is_being_computed(request, admitted, counts):
                break
            other = request.forks_from
            if other is not None and other.row >= 0 and other.num_computed < other.pause_at:
                break
            input_tokens = sum(each.num_new_input_tokens for each in admitted)
            try:
                count = self._holdings.let_run(request, budget, input_tokens, others_run=bool(self.running))
            except AssertionError:
                raise
            except Exception as error:
                self._end_at_fault(request, error)
                continue
            if not count:
                break
            if request.num_computed < request.pause_at:
                self._pausing.append(request)
            self.waiting.popleft()
            self.running.append(request)
            admitted.append(request)
            counts.append(count)
            budget -= count
        return budget

    def _is_being_computed(self, request: RequestT, admitted: Sequence[RequestT], counts: Sequence[int]) -> bool:
        """Return whether a request admitted in this step computes what ``request`` can take in the next one.

        That is an input of equal content, or a block of equal tokens after equal inputs, of the same salt: to others it
        must not even show.

        Args:
            request: A request that waits.
            admitted: The requests that are admitted in this step so far.
            counts: How many tokens each of them computes.
        """
        size = self._shared_block_size
        if not size or not request.uses_prefix or request.is_swapped:
            return False
        most = len(request.token_ids) - 1
        for other, count in zip(admitted, counts, strict=True):
            if other.cache_salt != request.cache_salt:
                continue
            if any(other.input_sequences[name] == request.input_sequences.get(name) for name in other.new_inputs):
                return True
            if other.input_sequences != request.input_sequences:
                continue
            first = other.num_computed // size * size
            last = min(other.num_computed + count, most) // size * size
            # One slice comparison decides: the first block that the other adds, with all before it.
            stop = first + size
            if stop <= last and other.token_ids[:stop] == request.token_ids[:stop]:
                return True
        return False
