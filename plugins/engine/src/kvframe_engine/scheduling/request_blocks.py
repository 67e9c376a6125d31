"""Gives requests their blocks, and releases them; finds requests whose blocks a waiting request will share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, Protocol

import attrs

from kvframe import FoundPrefix, Hints, InputSequence
from kvframe.contract.order import IntArray
from kvframe_engine.requests.progress import NO_HINTS, NO_SEQUENCES, RequestProgress, RequestT
from kvframe_engine.scheduling.stats import SchedulerStats

if TYPE_CHECKING:
    from kvframe_engine.tiers.tiers import Tiers


class RequestCache(Protocol):
    """The verbs of ``KVCacheManager`` that scheduling needs."""

    def start(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        salt: str = "",
        use_prefix: bool = True,
        inputs: Mapping[str, InputSequence] = NO_SEQUENCES,
        num_prompt_tokens: int | None = None,
    ) -> int:
        """Add a request; return the number of tokens that a cached prefix covers, fewer than ``token_ids``."""

    def found_prefix(self, request_id: str) -> FoundPrefix:
        """Return what a started request's lookup found, and why it was not more."""

    def fork(self, request_id: str, new_id: str, token_ids: Sequence[int]) -> bool:
        """Add a request that continues from another's computed tokens; return False, unchanged, if blocks are too few.

        Raises:
            RuntimeError: A page could not be copied for it; nothing changed.
        """

    def missing_inputs(self, request_id: str) -> frozenset[str]:
        """Return the inputs whose state the next step has to compute."""

    def has_capacity(self, request_id: str, num_tokens: int) -> bool:
        """Return whether there are enough free blocks for a request's first ``num_tokens`` tokens; change nothing."""

    def extend(self, request_id: str, num_tokens: int) -> bool:
        """Allocate blocks for tokens ``[0, num_tokens)``; return False, and change nothing, if there are too few."""

    def extend_rows(self, rows: IntArray, num_tokens: IntArray) -> bool:
        """Allocate blocks for the first tokens of several requests, by row; return False, unchanged, if too few."""

    def commit_rows(self, rows: IntArray, num_computed: IntArray, *, keeps_extended: bool = False) -> None:
        """Record the numbers of computed tokens of several requests, by row."""

    def shrink(self, request_id: str) -> bool:
        """Let the layers choose what they keep of a computed prompt; return False, unchanged, if blocks are too few."""

    def free(self, request_id: str, *, hints: Hints = NO_HINTS, owner: str = "") -> None:
        """Free all blocks of a request; if it has ended, with its hints."""

    def row(self, request_id: str) -> int:
        """Return a started request's row."""


class RequestBlocks(Generic[RequestT]):
    """Starts and ends requests in the cache, and updates the requests' own fields.

    Invariant: a request's ``row`` agrees with the cache. The scheduler decides which requests run.
    """

    def __init__(
        self,
        cache: RequestCache,
        stats: SchedulerStats,
        *,
        max_num_batched_tokens: int,
        reserve_prompts: bool,
        tiers: Tiers | None = None,
    ) -> None:
        """Begin without requests.

        Args:
            cache: Where requests get their blocks.
            stats: The counters to update.
            max_num_batched_tokens: As for ``Scheduler``.
            reserve_prompts: As for ``Scheduler``.
            tiers: As for ``Scheduler``.
        """
        self._cache = cache
        self._stats = stats
        self._max_num_batched_tokens = max_num_batched_tokens
        self._reserve_prompts = reserve_prompts
        self._tiers = tiers

    def let_run(self, request: RequestT, budget: int, input_tokens: int, *, others_run: bool) -> int:
        """Let a waiting request run: fork one, or start one on its cached prefix.

        Args:
            request: The request.
            budget: Tokens that the step has left.
            input_tokens: Tokens of inputs that the step computes for other requests.
            others_run: Whether any other request runs.

        Returns:
            The number of its tokens that the step computes; 0, and nothing changed, if there are too few free blocks.
        """
        other, request.forks_from = request.forks_from, None
        if other is not None and other.row >= 0 and other.num_computed == other.pause_at and not other.new_inputs:
            return self._fork(request, other)
        return (self._start if request.fetch is None else self._restore)(request, budget, input_tokens, others_run)

    def release(self, request: RequestT) -> None:
        """Free all blocks of a request; none of its tokens are computed then."""
        hints = NO_HINTS if request.finish_reason is None else request.hints
        self._cache.free(request.request_id, hints=hints, owner=request.owner)
        request.row = -1
        request.num_computed, request.has_chosen = 0, False
        request.new_inputs = frozenset()

    # --- the two ways to start --------------------------------------------------------------------------------------

    def _fork(self, request: RequestT, other: RequestProgress) -> int:
        """Start a request from the computed tokens of another one that pauses; one step computes the known rest."""
        try:
            if not self._cache.fork(other.request_id, request.request_id, request.token_ids):
                return 0
        except (RuntimeError, MemoryError):
            return 0
        if not self._ask(self._cache.extend, request, len(request.token_ids)):
            self.release(request)
            return 0
        request.fork(other)
        request.row = self._cache.row(request.request_id)
        request.is_on_cache = request.was_started = True
        request.cached = FoundPrefix(num_tokens=request.num_computed, known_tokens=request.num_computed)
        self._stats.prompt_tokens += request.num_prompt_tokens
        self._stats.cached_prompt_tokens += request.num_computed
        return len(request.token_ids) - request.num_computed

    def _start(self, request: RequestT, budget: int, input_tokens: int, others_run: bool) -> int:
        """Start a request on its cached prefix."""
        while True:
            hit = self._cache.start(
                request.request_id,
                request.token_ids,
                salt=request.cache_salt,
                use_prefix=request.uses_prefix,
                inputs=request.input_sequences,
                num_prompt_tokens=request.num_prompt_tokens if request.keeps_part else None,
            )
            fits = not request.inputs or self._find_new_inputs(request, input_tokens)
            num_scheduled = request.end_of_step(hit, budget) - hit
            if self._reserve_prompts and hit + num_scheduled < len(request.token_ids) and others_run:
                # Without blocks for the rest, it would take blocks from others until it is preempted itself.
                fits = fits and self._ask(self._cache.has_capacity, request, len(request.token_ids))
            waits = self._tiers is not None and self._waits_again(request, hit, num_scheduled, fits=fits)
            if waits or not num_scheduled:  # its next range needs more of a step
                self.release(request)
                return 0
            if fits and self._ask(self._cache.extend, request, hit + num_scheduled):
                break
            self.release(request)
            if others_run:
                return 0
            assert not request.runs_alone, "the plan guarantees enough blocks for a lone request"
            request.runs_alone = True
        request.row, request.num_computed = self._cache.row(request.request_id), hit
        request.is_on_cache = hit > 0 or len(request.new_inputs) < len(request.inputs)
        self._stats.computed_input_tokens += request.num_new_input_tokens
        if not request.was_started:
            request.was_started = True
            request.cached = self._cache.found_prefix(request.request_id)
            if request.wants_prompt_rows:
                why = "every token of the prompt is computed for its log-probabilities"
                request.cached = attrs.evolve(request.cached, why=why)
            self._stats.prompt_tokens += request.num_prompt_tokens
            self._stats.cached_prompt_tokens += hit
        return num_scheduled

    def _find_new_inputs(self, request: RequestT, input_tokens: int) -> bool:
        """Find which inputs of a request the step computes; return whether they fit beside those of other requests.

        A single input fits at any length, because it cannot be computed in parts.
        """
        request.new_inputs = self._cache.missing_inputs(request.request_id)
        return not input_tokens or input_tokens + request.num_new_input_tokens <= self._max_num_batched_tokens

    def _restore(self, request: RequestT, budget: int, input_tokens: int, others_run: bool) -> int:
        """Bring what was fetched of a request's prefix to the device, and start the request on it."""
        assert self._tiers is not None
        restored, is_first = self._tiers.restore(request), not request.was_started
        if restored is None and others_run:
            return 0
        num_scheduled = self._start(request, budget, input_tokens, others_run)
        if restored is not None and request.cached is not None and is_first:
            request.cached = attrs.evolve(
                request.cached, restored_tokens=restored.num_tokens, restored_from=restored.sources
            )
        return num_scheduled

    def _waits_again(self, request: RequestT, hit: int, num_scheduled: int, *, fits: bool) -> bool:
        """Drop what was fetched; return whether a request that finds less than it waited for waits once more.

        It does so only when its first tokens fit: before, other requests would evict what is brought to the device.
        """
        assert self._tiers is not None
        self._tiers.drop(request)
        if not fits or not num_scheduled or hit >= request.promised_tokens:
            return False
        return self._ask(self._cache.has_capacity, request, hit + num_scheduled) and self._tiers.begins_again(request)

    def _ask(self, find_blocks: Callable[[str, int], bool], request: RequestT, num_tokens: int) -> bool:
        """Ask the cache for blocks for a new request's first tokens; free the request on an error."""
        try:
            return find_blocks(request.request_id, num_tokens)
        except BaseException:
            self.release(request)
            raise


def is_being_computed(request: RequestT, admitted: Sequence[RequestT], counts: Sequence[int], block_size: int) -> bool:
    """Return whether a request admitted in this step computes state that ``request`` can share in the next step.

    That is the state of an equal input, or of a block of equal tokens after equal inputs. Only requests with the
    same salt count: the timing of others must not reveal them.

    Args:
        request: A request that waits.
        admitted: The requests that are admitted in this step so far.
        counts: The number of tokens that each of them computes.
        block_size: Tokens per block that requests with a common prefix can share; 0 if they cannot.
    """
    if not block_size or not request.uses_prefix:
        return False
    max_shared = len(request.token_ids) - 1
    for admitted_request, count in zip(admitted, counts, strict=True):
        if admitted_request.cache_salt != request.cache_salt:
            continue
        if any(
            admitted_request.input_sequences[name] == request.input_sequences.get(name)
            for name in admitted_request.new_inputs
        ):
            return True
        if admitted_request.input_sequences != request.input_sequences:
            continue
        first = admitted_request.num_computed // block_size * block_size
        last = min(admitted_request.num_computed + count, max_shared) // block_size * block_size
        # One comparison is enough: of the tokens up to the end of the first block that the other request computes.
        stop = first + block_size
        if stop <= last and admitted_request.token_ids[:stop] == request.token_ids[:stop]:
            return True
    return False
