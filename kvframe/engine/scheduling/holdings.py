"""Gives requests their blocks, swaps them out and in, and releases their blocks."""

from __future__ import annotations

from typing import Generic

from kvframe.engine.requests.progress import RequestProgress, RequestT
from kvframe.engine.scheduling.request_cache import RequestCache
from kvframe.engine.scheduling.stats import SchedulerStats


class Holdings(Generic[RequestT]):
    """Begins requests in the cache and takes them out of it, and keeps what each says of itself true.

    Invariant: a request has a row, or is swapped, exactly if the cache knows it so. Who runs, and when, others decide.
    """

    def __init__(
        self, cache: RequestCache, stats: SchedulerStats, *, max_num_batched_tokens: int, reserve_prompts: bool
    ) -> None:
        """Hold nothing.

        Args:
            cache: Where requests get their blocks.
            stats: Where it is counted what becomes of them.
            max_num_batched_tokens: As of ``Scheduler``.
            reserve_prompts: Likewise.
        """
        self._cache = cache
        self._stats = stats
        self._max_num_batched_tokens = max_num_batched_tokens
        self._reserve_prompts = reserve_prompts

    def let_run(self, request: RequestT, budget: int, input_tokens: int, *, others_run: bool) -> int:
        """Let a waiting request run: where it was swapped out, from another one that pauses, or from what is cached.

        Args:
            request: The request.
            budget: Tokens that the step has left.
            input_tokens: Tokens of inputs that the step computes for others.
            others_run: Whether any other request runs.

        Returns:
            The tokens that the step computes of it; 0, and nothing changed, if there is no room.
        """
        if request.is_swapped:
            try:
                return self._resume(request, budget, others_run)
            except (RuntimeError, MemoryError):
                self._stats.failed_swaps += 1
                self.give_back(request)
        other, request.forks_from = request.forks_from, None
        if other is not None and other.row >= 0 and other.num_computed == other.pause_at and not other.new_inputs:
            return self._fork(request, other)
        return self._start(request, budget, input_tokens, others_run)

    def swap_out(self, request: RequestT) -> bool:
        """Keep what a request holds in host memory; False, and nothing changed, if it cannot be."""
        try:
            if not self._cache.swap_out(request.request_id):
                return False
        except (RuntimeError, MemoryError):
            self._stats.failed_swaps += 1
            return False
        self._stats.swaps += 1
        request.is_swapped = True
        request.row = -1
        return True

    def give_back(self, request: RequestT) -> None:
        """Give back all that a request holds; nothing of it is computed then."""
        self._cache.free(request.request_id)
        request.row = -1
        request.is_swapped = False
        request.num_computed = 0
        request.new_inputs = frozenset()

    # --- the three ways to begin --------------------------------------------------------------------------------------

    def _fork(self, request: RequestT, other: RequestProgress) -> int:
        """Let a request go on from where another one pauses; what is known of its tokens is computed in one step."""
        self._cache.fork(other.request_id, request.request_id, request.token_ids)
        try:
            if not self._extend_first(request, len(request.token_ids)):
                self.give_back(request)
                return 0
        except (RuntimeError, MemoryError):
            return 0
        request.fork(other)
        request.row = self._cache.row(request.request_id)
        request.is_on_cache = request.was_started = True
        self._stats.prompt_tokens += request.num_prompt_tokens
        self._stats.cached_prompt_tokens += request.num_computed
        return len(request.token_ids) - request.num_computed

    def _resume(self, request: RequestT, budget: int, others_run: bool) -> int:
        """Let a request go on where it was swapped out."""
        num_scheduled = min(request.next_stop - request.num_computed, budget)
        num_tokens = request.num_computed + num_scheduled
        if not self._cache.swap_in(request.request_id, num_tokens, use_prefix=not request.runs_alone):
            # Blocks that it found may lie scattered over slabs; taken anew, all of them fit where nothing else runs.
            if others_run:
                return 0
            fits = self._cache.swap_in(request.request_id, num_tokens, use_prefix=False)
            assert fits, "the plan promised room for a lone request"
        request.is_swapped = False
        request.row = self._cache.row(request.request_id)
        return num_scheduled

    def _start(self, request: RequestT, budget: int, input_tokens: int, others_run: bool) -> int:
        """Let a request begin with what is cached of it."""
        while True:
            hit = self._cache.start(
                request.request_id,
                request.token_ids,
                salt=request.cache_salt,
                use_prefix=request.uses_prefix,
                inputs=request.input_sequences,
            )
            if request.inputs:
                request.new_inputs = self._cache.missing_inputs(request.request_id)
            # One input always goes, however long: it cannot be computed in parts.
            new_tokens = request.num_new_input_tokens
            fits = not input_tokens or input_tokens + new_tokens <= self._max_num_batched_tokens
            stop = request.pause_at if hit < request.pause_at else len(request.token_ids)
            num_scheduled = min(stop - hit, budget)
            if self._reserve_prompts and hit + num_scheduled < len(request.token_ids) and others_run:
                # With room for a part of it only, it would take from others until it is preempted itself.
                fits = fits and self._has_room_for_all(request)
            if fits and self._extend_first(request, hit + num_scheduled):
                break
            self.give_back(request)
            if others_run:
                return 0
            assert not request.runs_alone, "the plan promised room for a lone request"
            request.runs_alone = True
        request.row = self._cache.row(request.request_id)
        request.num_computed = hit
        request.is_on_cache = hit > 0 or len(request.new_inputs) < len(request.inputs)
        self._stats.computed_input_tokens += new_tokens
        if not request.was_started:
            request.was_started = True
            self._stats.prompt_tokens += request.num_prompt_tokens
            self._stats.cached_prompt_tokens += hit
        return num_scheduled

    def _has_room_for_all(self, request: RequestT) -> bool:
        """Return whether there is room for all tokens of one that the cache has just taken in; as ``_extend_first``."""
        try:
            return self._cache.has_room(request.request_id, len(request.token_ids))
        except BaseException:
            self.give_back(request)
            raise

    def _extend_first(self, request: RequestT, num_tokens: int) -> bool:
        """Get room for one that the cache has just taken in; if that raises, it is there no more."""
        try:
            return self._cache.extend(request.request_id, num_tokens)
        except BaseException:
            self.give_back(request)
            raise
