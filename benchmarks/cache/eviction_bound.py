"""Count the tokens that a cache finds at best: it evicts the block with the farthest next use (Belady, 1966)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from benchmarks.cache.eviction_traces import TracedRequest

BLOCK = 16
_NEVER = 1 << 60


def block_ids(requests: Sequence[TracedRequest]) -> list[list[int]]:
    """Return, for each request, the ids of its full blocks, prompt and reply; equal prefixes have equal ids."""
    known: dict[tuple[int, bytes], int] = {}
    found = []
    for each in requests:
        data, parent, ids = each.token_ids.tobytes(), -1, []
        for start in range(0, len(data) - 4 * BLOCK + 1, 4 * BLOCK):
            parent = known.setdefault((parent, data[start : start + 4 * BLOCK]), len(known))
            ids.append(parent)
        found.append(ids)
    return found


def most_found(
    requests: Sequence[TracedRequest], blocks: Sequence[Sequence[int]], num_tokens: int, first: int = 0
) -> int:
    """Return the prompt tokens that are found if evictions know the future.

    As in any cache, a running request occupies its blocks. Blocks that no later request needs are not kept.

    Args:
        requests: The requests, one after the other.
        blocks: Their block ids.
        num_tokens: The cache's capacity in tokens.
        first: The first request that is counted.
    """
    capacity, found = num_tokens // BLOCK, 0
    following = _next_uses(requests, blocks)
    cached: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    for index, (request, ids, uses) in enumerate(zip(requests, blocks, following, strict=True)):
        most = (request.prompt_end - 1) // BLOCK
        hit = next((place for place, block in enumerate(ids[:most]) if block not in cached), most)
        found += BLOCK * hit if index >= first else 0
        for block in ids:
            cached.pop(block, None)
        left = capacity - -(-len(request.token_ids) // BLOCK)
        _evict(cached, farthest, left)
        for depth, (block, use) in enumerate(zip(ids, uses, strict=True)):
            if use < _NEVER:
                cached[block] = use
                # Of several blocks with the same next use, the last one of a prefix is evicted first.
                heappush(farthest, (-use, -depth, block))
        _evict(cached, farthest, capacity)
    return found


def _evict(cached: dict[int, int], farthest: list[tuple[int, int, int]], capacity: int) -> None:
    while len(cached) > max(0, capacity):
        use, _, block = heappop(farthest)
        if cached.get(block) == -use:
            del cached[block]


def _next_uses(requests: Sequence[TracedRequest], blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for each block of each request, the index of the next request whose prompt contains it."""
    upcoming: dict[int, int] = {}
    found: list[list[int]] = []
    for index in range(len(requests) - 1, -1, -1):
        found.append([upcoming.get(block, _NEVER) for block in blocks[index]])
        most = (requests[index].prompt_end - 1) // BLOCK
        upcoming.update(dict.fromkeys(blocks[index][:most], index))
    return found[::-1]
