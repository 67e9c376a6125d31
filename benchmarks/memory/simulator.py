"""Simulate traffic on kvframe's scheduler and cache without a model: a request's next token is that of its trace."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from kvframe_engine.requests.request import Request, SamplingParams
from kvframe_engine.scheduling.scheduler import Scheduler
from kvframe_engine.scheduling.step import ScheduledStep
from kvframe_engine.tiers.tiers import Tiers
from kvframe_testing.audit import findable_pages

from benchmarks.memory.traces import Conversation
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.model import ModelInput
from kvframe.contract.specs import TOKENS, KVCacheSpec
from kvframe.planning.plan import KVCachePlan

FULL = 0.95
"""The memory counts as full if at least this share of the pool is in use."""

LOOK_EVERY = 16
"""The use of the memory is counted once in so many steps."""


@attrs.frozen(kw_only=True)
class MemoryUse:
    """The bytes of a pool at one moment by their use. Together they are the whole pool.

    Attributes:
        needed: The part of held pages that coming tokens read.
        unfinished: The part of held pages for tokens that do not exist yet, or that a window has passed.
        partly_used: Free pages in slabs with held pages; only the slab's group can take them.
        cached: Cached pages in such slabs: prefixes that can be found, in memory that only the slab's group can take.
        padding: Bytes that no page can use: ends of slabs, space for layers that do not exist or that makes states as
            large as blocks, and the rest of the memory.
        idle: Bytes that any group can take.
    """

    needed: int
    unfinished: int
    partly_used: int
    cached: int
    padding: int
    idle: int

    @property
    def used(self) -> float:
        """The share of the pool that no other request could get."""
        taken_bytes = self.needed + self.unfinished + self.padding
        return taken_bytes / (taken_bytes + self.partly_used + self.cached + self.idle)


def memory_use(manager: KVCacheManager, computed: Mapping[str, int]) -> MemoryUse:
    """Return the use of a manager's pool; ``computed`` are the computed tokens of each running request."""
    plan = manager.plan
    tables = {request: manager.block_ids(request) for request in computed}
    findable: list[list[int]] = [[] for _ in plan.groups]
    for index, block_id in findable_pages(manager):
        findable[index].append(block_id)

    def slab_of(block_ids: Any) -> Any:
        return (block_ids * plan.block_id_bytes - plan.null_bytes) // plan.slab_bytes

    needed = unfinished = cached = free = tails = held_slabs = 0
    for group, findable_ids in zip(plan.groups, findable, strict=True):
        rows = {request: np.asarray(ids[group.index], dtype=np.int64) for request, ids in tables.items()}
        held_ids = np.unique(np.concatenate([np.zeros(1, np.int64), *rows.values()]))[1:]
        slabs = np.unique(slab_of(held_ids))
        num_pages = len(slabs) * group.pages_per_slab
        unheld = np.setdiff1d(np.array(findable_ids, dtype=np.int64), held_ids)
        num_cached = int(np.count_nonzero(np.isin(slab_of(unheld), slabs)))
        empty = sum(
            empty_tokens(group.spec, int(np.count_nonzero(row)), computed[request]) for request, row in rows.items()
        )
        num_bytes = len(held_ids) * group.page_bytes
        empty_bytes = min(num_bytes, empty * group.page_bytes // group.block_size)
        needed += num_bytes - empty_bytes
        unfinished += empty_bytes
        cached += num_cached * group.page_bytes
        free += (num_pages - len(held_ids) - num_cached) * group.page_bytes
        tails += len(slabs) * (plan.slab_bytes - group.pages_per_slab * group.page_bytes)
        held_slabs += len(slabs)
    return MemoryUse(
        needed=needed,
        unfinished=unfinished,
        partly_used=free,
        cached=cached,
        padding=tails + plan.memory_bytes - plan.num_slabs * plan.slab_bytes,
        idle=(plan.num_slabs - held_slabs) * plan.slab_bytes,
    )


def empty_tokens(spec: KVCacheSpec, num_held: int, num_computed: int) -> int:
    """Return the tokens' places in a request's blocks of a group that no coming token reads."""
    if spec.is_per_block or spec.sequence != TOKENS:
        return 0
    live = sum(stop - start for start, stop in spec.live_ranges(num_computed))
    return max(0, num_held * spec.block_size - live)


@attrs.define
class Outcome:
    """The result of a trace.

    Attributes:
        steps: Steps until the last conversation began.
        requests: Requests that ended; ``peak`` are the most at once.
        concurrency: The number of running requests in each step, from the first step on in which a waiting request
            found too few free blocks; in all steps if there was none.
        was_full: Whether there was such a step.
        prompt_tokens: Tokens of the prompts.
        hit_tokens: Of these, the ones that were found when the prompt was first admitted.
        hit_rate: Their share.
        full_use: The use of the memory in some of the steps in which it was full.
    """

    steps: int = 0
    requests: int = 0
    peak: int = 0
    concurrency: list[int] = attrs.field(factory=list)
    was_full: bool = False
    preemptions: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
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
        make_tiers: Callable[[KVCacheManager], Tiers] | None = None,
        ends_all: bool = False,
    ) -> None:
        """Set up a run of at most ``max_num_seqs`` requests at once.

        Args:
            plan: The pool.
            trace: The conversations.
            num_users: The number of users.
            max_num_seqs: The most requests at once.
            input_lens: The lengths of the inputs that each request has beside its tokens, by sequence.
            make_tiers: Makes what brings pages back to the pool; None if nothing does.
            ends_all: Whether the run ends when all conversations have ended, and not when the last one has begun.
        """
        self._manager = KVCacheManager(plan, max_num_seqs=max_num_seqs)
        self._tiers = None if make_tiers is None else make_tiers(self._manager)
        self._scheduler: Scheduler[Request] = Scheduler(
            self._manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            shared_block_size=plan.alignment,
            tiers=self._tiers,
        )
        self._ends_all = ends_all
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
        while self._conversations or (self._ends_all and self._turn_of):
            while self._coming and self._coming[0][0] <= outcome.steps:
                self._scheduler.add(heapq.heappop(self._coming)[2])
            step = self._scheduler.schedule()
            if step is None:
                if self._tiers is not None and self._scheduler.waiting:
                    self._tiers.wait()
                else:
                    outcome.steps = self._coming[0][0]
                continue
            self._count(step)
            self._complete(step)
            if self._tiers is not None:
                self._tiers.after_step(0, 0.0, is_last=not self._scheduler.has_work)
            if outcome.steps % LOOK_EVERY == 0 and self._manager.usage >= FULL:
                computed = {request.request_id: request.num_computed for request in self._scheduler.running}
                use = memory_use(self._manager, computed)
                if use.used >= FULL:
                    outcome.full_use.append(use)
            outcome.steps += 1
        stats = self._scheduler.stats
        outcome.preemptions = stats.preemptions
        outcome.hit_rate = stats.cached_prompt_tokens / stats.prompt_tokens
        outcome.prompt_tokens, outcome.hit_tokens = stats.prompt_tokens, stats.cached_prompt_tokens
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
                name: ModelInput(num_tokens=length, key=key, data=None) for name, length in self._input_lens.items()
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
