"""Counters of the engine and its scheduler, as values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from kvframe_stores import StoreCounts

from kvframe import GroupLookups, KVCacheStats


@attrs.define
class SchedulerStats:
    """The scheduler's counters.

    Attributes:
        prompt_tokens: Prompt tokens of the requests that were admitted, each request counted once.
        cached_prompt_tokens: Those of them that a cached prefix, or another sample of the same prompt, covered.
        computed_tokens: Tokens computed, including those recomputed after a preemption.
        computed_input_tokens: Tokens computed of the inputs that requests bring, such as an encoder's.
        generated_tokens: Tokens generated.
        preemptions: Times that a running request was preempted.
        retries: Times that the model's output for a request on a cached prefix was not numbers, so that the request is
            recomputed without the prefix.
        steps: Steps completed.
        draft_tokens: Draft tokens computed.
        accepted_draft_tokens: Those of them that requests took.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    computed_tokens: int = 0
    computed_input_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    retries: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@attrs.frozen(kw_only=True)
class EngineStats:
    """An engine's counters, and the content of its cache.

    Attributes:
        prompt_tokens: Prompt tokens of the requests that were admitted.
        cached_prompt_tokens: Those of them that a cached prefix, or another sample of the same prompt, covered.
        prefix_hit_rate: Their share; 0 before the first request.
        lookups: Per cache group, the results of prefix lookups, and how often the group could not continue where
            another group could. If the hit rate is low, this shows which group limits it.
        computed_tokens: Tokens computed, including those recomputed after a preemption.
        computed_input_tokens: Tokens computed of the inputs that requests bring, such as an encoder's.
        generated_tokens: Tokens generated.
        preemptions: Times that a running request was preempted.
        retries: Times that the model's output for a request on a cached prefix was not numbers, so that the request is
            recomputed without the prefix.
        steps: Steps completed.
        draft_tokens: Draft tokens computed.
        accepted_draft_tokens: Those of them that requests took.
        graph_replays: Steps of the model that were replayed from a captured graph.
        num_running: Requests in the batch now, each sample counted.
        num_waiting: Requests that wait for a place in it, preempted ones included.
        blocks_held: Per group, the blocks that requests and pins hold now.
        peak_blocks_held: Per group, the most blocks held at once.
        peak_bytes_held: The most bytes of blocks of all groups held at once.
        evictions: Cached blocks that were evicted.
        blocks_evicted: Per group, the cached blocks that were evicted.
        blocks_moved: Per group, the blocks that were filled with the tokens that requests kept of their prompts.
        cache_bytes: Bytes allocated for the cache.
        restored_tokens: Tokens of requests that were brought back to the device, so that they were not computed.
        restored_blocks: For each tier of the stack, ``"host_memory"`` or the name of a page store, the blocks that were
            brought back from it.
        waits_in_vain: Requests that waited for a page store, and were computed without it.
        host_blocks: Evicted blocks that later requests can find in host memory.
        host_blocks_stored: Evicted blocks that were copied to host memory so far.
        host_blocks_dropped: Evicted blocks for which it had no free page.
        stores: What is counted of each page store, by name.
    """

    prompt_tokens: int
    cached_prompt_tokens: int
    prefix_hit_rate: float
    lookups: tuple[GroupLookups, ...]
    computed_tokens: int
    computed_input_tokens: int
    generated_tokens: int
    preemptions: int
    retries: int
    steps: int
    draft_tokens: int
    accepted_draft_tokens: int
    graph_replays: int
    num_running: int
    num_waiting: int
    blocks_held: tuple[int, ...]
    peak_blocks_held: tuple[int, ...]
    peak_bytes_held: int
    evictions: int
    blocks_evicted: tuple[int, ...]
    blocks_moved: tuple[int, ...]
    cache_bytes: int
    restored_tokens: int = 0
    restored_blocks: Mapping[str, int] = attrs.field(factory=dict)
    waits_in_vain: int = 0
    host_blocks: int = 0
    host_blocks_stored: int = 0
    host_blocks_dropped: int = 0
    stores: Mapping[str, StoreCounts] = attrs.field(factory=dict)

    @classmethod
    def of(
        cls,
        scheduled: SchedulerStats,
        cached: KVCacheStats,
        cache_bytes: int,
        *,
        num_running: int,
        num_waiting: int,
        graph_replays: int,
        tiers: Mapping[str, Any],
    ) -> EngineStats:
        """Return an engine's numbers as they are now.

        Args:
            scheduled: The scheduler's counters.
            cached: The cache manager's counters.
            cache_bytes: Bytes allocated for the cache.
            num_running: Requests in the batch.
            num_waiting: Requests that wait for a place in it.
            graph_replays: Steps of the model that were replayed from a graph.
            tiers: The numbers of the tiers beside the device, by the names of attributes.
        """
        return cls(
            prompt_tokens=scheduled.prompt_tokens,
            cached_prompt_tokens=scheduled.cached_prompt_tokens,
            prefix_hit_rate=scheduled.cached_prompt_tokens / max(1, scheduled.prompt_tokens),
            lookups=tuple(cached.lookups),
            computed_tokens=scheduled.computed_tokens,
            computed_input_tokens=scheduled.computed_input_tokens,
            generated_tokens=scheduled.generated_tokens,
            preemptions=scheduled.preemptions,
            retries=scheduled.retries,
            steps=scheduled.steps,
            draft_tokens=scheduled.draft_tokens,
            accepted_draft_tokens=scheduled.accepted_draft_tokens,
            graph_replays=graph_replays,
            num_running=num_running,
            num_waiting=num_waiting,
            blocks_held=tuple(cached.blocks_held),
            peak_blocks_held=tuple(cached.peak_blocks_held),
            peak_bytes_held=cached.peak_bytes_held,
            evictions=cached.num_evictions,
            blocks_evicted=tuple(cached.blocks_evicted),
            blocks_moved=tuple(cached.blocks_moved),
            cache_bytes=cache_bytes,
            **tiers,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain values, ready for JSON."""
        return attrs.asdict(self)
