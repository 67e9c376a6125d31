"""A continuous batch over a trace, without a model: the same policy for every cache, a token of each request a step.

The policy is that of ``kvframe.engine.scheduling.scheduler``: running requests first, then waiting ones, first come,
first served, prompts in chunks within the step's budget, the first one when there is room for all of them. If there is
no room, the request admitted last gives its blocks back, is put at the head of the queue, and is computed again; in
such a step nothing is admitted.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import attrs

from benchmarks.memory.cache import Cache, MemoryUse
from benchmarks.memory.traces import Conversation, Tokens, Turn
from kvframe.cache.input_index import InputSequence

BLOCK = 16
"""Between multiples of so many tokens a request that generates needs nothing and gives nothing back."""

FULL = 0.95
"""Share of the pool in use from which on it counts where the rest is."""


@attrs.define(eq=False)
class _Request:
    order: int
    conversation: Conversation
    index: int
    user: int
    inputs: Mapping[str, InputSequence]
    num_known: int
    """Tokens to compute before the next one is generated."""
    num_computed: int = 0
    """While it generates, as of the step ``since``."""
    since: int = -1
    """The step from which on it generates; negative while it does not."""
    runs_alone: bool = False
    was_started: bool = False
    starts: int = 0

    @property
    def turn(self) -> Turn:
        return self.conversation.turns[self.index]

    @property
    def name(self) -> str:
        return f"{self.order}.{self.starts}"

    def computed_at(self, step: int) -> int:
        """Return its tokens that are computed before a step."""
        return self.num_computed if self.since < 0 else self.num_computed + step - self.since


@attrs.define
class Outcome:
    """What came of a trace.

    Attributes:
        steps: Steps until the last conversation began.
        requests: Requests that ended.
        peak: The most requests that ran at once.
        concurrency: Requests that ran, for each step from the first one without room on; for all steps where there
            was always room.
        was_full: Whether there was ever no room for a request.
        preemptions: Times that a running request gave its blocks back.
        prompt_tokens: Tokens of prompts.
        hit_tokens: Of these, those found when the prompt was first admitted.
        full_use: Where the memory was, in some of the steps in which it was used up.
    """

    steps: int = 0
    requests: int = 0
    peak: int = 0
    concurrency: list[int] = attrs.field(factory=list)
    was_full: bool = False
    preemptions: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    full_use: list[MemoryUse] = attrs.field(factory=list)

    @property
    def mean_concurrency(self) -> float:
        """Requests that ran at once, on average."""
        return sum(self.concurrency) / len(self.concurrency)

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were found."""
        return self.hit_tokens / self.prompt_tokens


class Simulation:
    """Runs a trace on a cache.

    Each of a number of users has one conversation at a time and begins another one at once when it is over.
    """

    def __init__(
        self,
        cache: Cache,
        trace: Sequence[Conversation],
        *,
        num_users: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        input_lens: Mapping[str, int],
        sample_every: int = 16,
    ) -> None:
        """Set up a run.

        Args:
            cache: Empty.
            trace: The conversations.
            num_users: How many go on at once.
            max_num_seqs: The most requests that run at once.
            max_num_batched_tokens: The most tokens of a step.
            input_lens: What each request brings beside its tokens: one input of its own of each of these lengths.
            sample_every: Steps from one look at the memory to the next.
        """
        self._cache = cache
        self._conversations = deque(trace)
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._input_lens = input_lens
        self._sample_every = sample_every
        self._orders = itertools.count()
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._due: dict[int, list[_Request]] = {}
        self._coming: list[tuple[int, int, _Request]] = []
        self._step = 0
        self._num_generating = 0
        self._first_full = -1
        self.outcome = Outcome()
        for user in range(num_users):
            self._begin(user)

    def run(self) -> Outcome:
        """Run the trace until its last conversation has begun."""
        while self._conversations:
            if not self._running and not self._waiting:
                self._step = max(self._step, self._coming[0][0])
            self._one_step()
        outcome = self.outcome
        outcome.steps = self._step
        if outcome.was_full:
            outcome.concurrency = outcome.concurrency[self._first_full :]
        return outcome

    # --- arrivals -----------------------------------------------------------------------------------------------------

    def _begin(self, user: int) -> None:
        self._ask(self._conversations.popleft(), 0, user)

    def _ask(self, conversation: Conversation, index: int, user: int) -> None:
        order = next(self._orders)
        inputs = {
            name: InputSequence(length, order.to_bytes(16, "little")) for name, length in self._input_lens.items()
        }
        turn = conversation.turns[index]
        request = _Request(order, conversation, index, user, inputs, turn.prompt_end)
        self.outcome.prompt_tokens += turn.prompt_end
        if turn.pause:
            heapq.heappush(self._coming, (self._step + turn.pause, order, request))
        else:
            self._waiting.append(request)

    # --- one step -----------------------------------------------------------------------------------------------------

    def _one_step(self) -> None:
        while self._coming and self._coming[0][0] <= self._step:
            self._waiting.append(heapq.heappop(self._coming)[2])
        preempted = self.outcome.preemptions
        computed: list[tuple[_Request, int]] = []
        for request in sorted(self._due.pop(self._step, ()), key=lambda each: each.order):
            if request.since >= 0:
                self._generate(request, computed)
        budget = self._budget - self._num_generating
        for request in [each for each in self._running if each.since < 0]:
            if budget > 0 and request.starts and request in self._running:
                budget -= self._compute_prompt(request, budget, computed)
        if preempted == self.outcome.preemptions or not self._running:
            while self._waiting and budget > 0 and len(self._running) < self._max_num_seqs:
                taken = self._admit(budget, computed)
                if not taken:
                    break
                budget -= taken
        self.outcome.peak = max(self.outcome.peak, len(self._running))
        self.outcome.concurrency.append(len(self._running))
        self._commit(computed)
        if self._step % self._sample_every == 0 and self._cache.use >= FULL:
            computed_tokens = {each.name: each.computed_at(self._step + 1) for each in self._running}
            memory_use = self._cache.memory_use(computed_tokens)
            if memory_use.used >= FULL:
                self.outcome.full_use.append(memory_use)
        self._step += 1

    def _generate(self, request: _Request, computed: list[tuple[_Request, int]]) -> None:
        """Make room for the token that a request computes in this step, if it is one that may need some."""
        num_tokens = request.computed_at(self._step) + 1
        if num_tokens % BLOCK != 1 or self._make_room(request, num_tokens):
            computed.append((request, num_tokens))

    def _compute_prompt(self, request: _Request, budget: int, computed: list[tuple[_Request, int]]) -> int:
        """Let a running request compute more of its prompt; returns how many tokens."""
        stop = min(request.num_known, request.num_computed + budget)
        if not self._make_room(request, stop):
            return 0
        computed.append((request, stop))
        return stop - request.num_computed

    def _admit(self, budget: int, computed: list[tuple[_Request, int]]) -> int:
        """Let the first waiting request run; returns how many tokens it computes, 0 where it must wait."""
        request = self._waiting[0]
        if self._running and (request.runs_alone or self._running[0].runs_alone):
            return 0
        token_ids: Tokens[int] = request.conversation.token_ids[: request.num_known]
        while True:
            request.starts += 1
            hit = self._cache.start(request.name, token_ids, use_prefix=not request.runs_alone, inputs=request.inputs)
            stop = min(request.num_known, hit + budget)
            fits = stop == request.num_known or not self._running
            fits = fits or self._cache.has_room(request.name, request.num_known)
            if fits and self._cache.extend(request.name, stop):
                break
            self._cache.free(request.name)
            self._note_full()
            if self._running:
                return 0
            assert not request.runs_alone, "a lone request must fit"
            request.runs_alone = True
        self._waiting.popleft()
        self._running.append(request)
        request.num_computed = hit
        if not request.was_started:
            request.was_started = True
            self.outcome.hit_tokens += hit
        computed.append((request, stop))
        return stop - hit

    def _commit(self, computed: Sequence[tuple[_Request, int]]) -> None:
        for request, num_tokens in computed:
            if request.order < 0 or request not in self._running:
                continue
            self._cache.commit(request.name, request.conversation.token_ids, num_tokens)
            if num_tokens >= request.turn.end - 1:
                self._end(request)
            elif request.since >= 0:
                self._plan_next(request, self._step + 1)
            else:
                request.num_computed = num_tokens
                if num_tokens == request.num_known:
                    request.since = self._step + 1
                    self._num_generating += 1
                    self._plan_next(request, self._step + 1)

    def _plan_next(self, request: _Request, step: int) -> None:
        """Note the next step in which a request that generates fills a block, begins one, or ends."""
        num_tokens = request.computed_at(step) + 1
        wait = min(-num_tokens % BLOCK, (1 - num_tokens) % BLOCK, request.turn.end - 1 - num_tokens)
        self._due.setdefault(step + wait, []).append(request)

    def _end(self, request: _Request) -> None:
        self._cache.free(request.name)
        self._running.remove(request)
        self._num_generating -= request.since >= 0
        request.since = -1
        self.outcome.requests += 1
        if request.index + 1 < len(request.conversation.turns):
            self._ask(request.conversation, request.index + 1, request.user)
        elif self._conversations:
            self._begin(request.user)

    # --- room ---------------------------------------------------------------------------------------------------------

    def _make_room(self, request: _Request, num_tokens: int) -> bool:
        """Get room for a running request's tokens; False if it had to be preempted itself."""
        while not self._cache.extend(request.name, num_tokens):
            self._note_full()
            victim = self._running[-1]
            if len(self._running) == 1:
                assert not victim.runs_alone, "a lone request must fit"
                victim.runs_alone = True
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: _Request) -> None:
        num_computed = request.computed_at(self._step)
        self._cache.free(request.name)
        self._running.remove(request)
        self._num_generating -= request.since >= 0
        request.num_known = max(request.num_known, num_computed + 1)
        request.num_computed, request.since = 0, -1
        self._waiting.appendleft(request)
        self.outcome.preemptions += 1

    def _note_full(self) -> None:
        if not self.outcome.was_full:
            self.outcome.was_full = True
            self._first_full = len(self.outcome.concurrency)
