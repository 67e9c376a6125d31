"""Simulate traffic on kvframe's scheduler and cache without a model: a request's next token is that of its trace."""

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
"""The memory counts as full if at least this share of the pool is in use."""

LOOK_EVERY = 16
"""The use of the memory is counted once in so many steps."""


@attrs.define
class Outcome:
    """The result of a trace.

    Attributes:
        steps: Steps until the last conversation began.
        requests: Requests that ended.
        peak: The most requests at once.
        concurrency: The number of running requests in each step, from the first step on in which a waiting request
            found too few free blocks; in all steps if there was none.
        was_full: Whether there was such a step.
        preemptions: The number of preemptions.
        hit_rate: The share of the prompts' tokens that were found when the prompt was first admitted.
        full_use: The use of the memory in some of the steps in which it was full.
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
    """Runs a trace on a plan. Each user has one conversation at a time, and begins the next one when it ends."""

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
            plan: The layout of the memory, and the most tokens of a step.
            trace: The conversations.
            num_users: The number of conversations at once.
            max_num_seqs: The most running requests.
            input_lens: The lengths of the inputs that each request has beside its tokens, by sequence.
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
        self._turn_of: dict[str, tuple[Conversation, int]] = {}
        self._coming: list[tuple[int, int, Request]] = []
        self._num_sent = 0
        self.outcome = Outcome()
        for _ in range(num_users):
            self._send(self._conversations.popleft(), 0)

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

    def _send(self, conversation: Conversation, index: int) -> None:
        """Let a user send the next turn of a conversation."""
        turn, name = conversation.turns[index], str(self._num_sent)
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
        self._turn_of[name] = conversation, index
        heapq.heappush(self._coming, (self.outcome.steps + turn.pause, self._num_sent, request))
        self._num_sent += 1

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
        """Give each request its next token; if one ends, its user sends the next one."""
        outcomes = []
        for place in step.generating.tolist():
            request = step.requests[place]
            conversation, _ = self._turn_of[request.request_id]
            outcomes.append(conversation.token_ids[len(request.token_ids)])
        for request in self._scheduler.complete(step, outcomes):
            if request.finish_reason is not None:
                self.outcome.requests += 1
                conversation, index = self._turn_of.pop(request.request_id)
                if index + 1 < len(conversation.turns):
                    self._send(conversation, index + 1)
                elif self._conversations:
                    self._send(self._conversations.popleft(), 0)
