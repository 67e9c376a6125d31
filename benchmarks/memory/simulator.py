"""Traffic on kvframe's own scheduler and cache, without a model: a request's next token is that of its trace."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence

import attrs

from benchmarks.memory.traces import Conversation
from benchmarks.memory.use import MemoryUse, memory_use
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.model import ModelInput
from kvframe.engine.requests.request import Request, SamplingParams
from kvframe.engine.scheduling.scheduler import Scheduler
from kvframe.engine.scheduling.step import ScheduledStep
from kvframe.planning.plan import KVCachePlan

FULL = 0.95
"""Share of the pool in use from which on it counts where the rest is."""

LOOK_EVERY = 16
"""Steps from one look at the memory to the next."""


@attrs.define
class Outcome:
    """What came of a trace.

    Attributes:
        steps: Steps until the last conversation began.
        requests: Requests that ended.
        peak: The most requests that ran at once.
        concurrency: Requests that ran, for each step from the first one without room on; for all steps if there was
            always room.
        was_full: Whether there was ever no room for a request.
        preemptions: Times that a running request gave its blocks back.
        hit_rate: Share of the prompts' tokens that were found when the prompt was first admitted.
        full_use: Where the memory was, in some of the steps in which it was used up.
    """

    steps: int = 0
    requests: int = 0
    peak: int = 0
    concurrency: list[int] = attrs.field(factory=list)
    was_full: bool = False
    preemptions: int = 0
    hit_rate: float = 0.0
    full_use: list[MemoryUse] = attrs.field(factory=list)


class Simulation:
    """Runs a trace on a plan.

    Each of a number of users has one conversation at a time and begins another one at once when it is over.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        trace: Sequence[Conversation],
        *,
        num_users: int,
        max_num_seqs: int,
        input_lens: Mapping[str, int],
    ) -> None:
        """Set up a run.

        Args:
            plan: The layout of the memory; its steps have as many tokens as it was planned for.
            trace: The conversations.
            num_users: How many go on at once.
            max_num_seqs: The most requests that run at once.
            input_lens: What each request brings beside its tokens: one input of its own of each of these lengths.
        """
        self._manager = KVCacheManager(plan, max_num_seqs=max_num_seqs)
        self._scheduler: Scheduler[Request] = Scheduler(
            self._manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            shared_block_size=plan.alignment,
        )
        self._plan, self._max_num_seqs, self._input_lens = plan, max_num_seqs, input_lens
        self._conversations = deque(trace)
        self._asked: dict[str, tuple[Conversation, int]] = {}
        self._coming: list[tuple[int, int, Request]] = []
        self._num_asked = 0
        self.outcome = Outcome()
        for _ in range(num_users):
            self._ask(self._conversations.popleft(), 0)

    def run(self) -> Outcome:
        """Run the trace until its last conversation has begun."""
        outcome = self.outcome
        while self._conversations:
            while self._coming and self._coming[0][0] <= outcome.steps:
                self._scheduler.add(heapq.heappop(self._coming)[2])
            step = self._scheduler.schedule()
            if step is None:
                outcome.steps = self._coming[0][0]
                continue
            self._count(step)
            self._complete(step)
            if outcome.steps % LOOK_EVERY == 0 and self._manager.usage >= FULL:
                computed = {request.request_id: request.num_computed for request in self._scheduler.running}
                use = memory_use(self._manager, computed)
                if use.used >= FULL:
                    outcome.full_use.append(use)
            outcome.steps += 1
        stats = self._scheduler.stats
        outcome.preemptions = stats.preemptions
        outcome.hit_rate = stats.cached_prompt_tokens / stats.prompt_tokens
        return outcome

    def _ask(self, conversation: Conversation, index: int) -> None:
        """Let a user ask the next turn of a conversation."""
        turn, name = conversation.turns[index], str(self._num_asked)
        key = name.encode()
        request = Request.create(
            name,
            conversation.token_ids[: turn.prompt_end],
            SamplingParams(max_new_tokens=turn.end - turn.prompt_end, ignore_eos=True),
            eos_token_ids=frozenset(),
            max_model_len=self._plan.max_model_len,
            inputs={
                each: ModelInput(num_tokens=length, key=key, data=None) for each, length in self._input_lens.items()
            },
        )
        self._asked[name] = conversation, index
        heapq.heappush(self._coming, (self.outcome.steps + turn.pause, self._num_asked, request))
        self._num_asked += 1

    def _count(self, step: ScheduledStep[Request]) -> None:
        num_running = len(self._scheduler.running)
        has_budget = step.num_tokens < self._plan.max_num_batched_tokens and num_running < self._max_num_seqs
        outcome = self.outcome
        if self._scheduler.waiting and not step.admitted and has_budget and not outcome.was_full:
            outcome.was_full = True
            outcome.concurrency.clear()
        outcome.peak = max(outcome.peak, num_running)
        outcome.concurrency.append(num_running)

    def _complete(self, step: ScheduledStep[Request]) -> None:
        """Give each request its next token; when one ends, its user asks again."""
        outcomes = []
        for place in step.generating.tolist():
            request = step.requests[place]
            conversation, _ = self._asked[request.request_id]
            outcomes.append(conversation.token_ids[len(request.token_ids)])
        for request in self._scheduler.complete(step, outcomes):
            if request.finish_reason is not None:
                self.outcome.requests += 1
                conversation, index = self._asked.pop(request.request_id)
                if index + 1 < len(conversation.turns):
                    self._ask(conversation, index + 1)
                elif self._conversations:
                    self._ask(self._conversations.popleft(), 0)
