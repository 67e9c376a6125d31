"""What a cache of a size could find at best: it gives up the block with the farthest next use (Belady, 1966)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from benchmarks.cache.eviction_traces import Asked

BLOCK = 16
_NEVER = 1 << 60


def block_ids(asked: Sequence[Asked]) -> list[list[int]]:
    """Return for each request its full blocks, prompt and reply: equal numbers for equal prefixes."""
    known: dict[tuple[int, bytes], int] = {}
    found = []
    for each in asked:
        data, parent, ids = each.token_ids.tobytes(), -1, []
        for start in range(0, len(data) - 4 * BLOCK + 1, 4 * BLOCK):
            parent = known.setdefault((parent, data[start : start + 4 * BLOCK]), len(known))
            ids.append(parent)
        found.append(ids)
    return found


def most_found(asked: Sequence[Asked], blocks: Sequence[Sequence[int]], num_tokens: int, first: int = 0) -> int:
    """Return the tokens of prompts that are found when what is given up is known from the future.

    A request's blocks need room while it runs, as in any cache; blocks that no later request needs are not kept.

    Args:
        asked: The requests, one after the other.
        blocks: Their blocks.
        num_tokens: The size of the cache.
        first: The request from which on it is counted.
    """
    room, found = num_tokens // BLOCK, 0
    following = _next_uses(asked, blocks)
    cached: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    for index, (request, ids, uses) in enumerate(zip(asked, blocks, following, strict=True)):
        most = (request.prompt_end - 1) // BLOCK
        hit = next((place for place, block in enumerate(ids[:most]) if block not in cached), most)
        found += BLOCK * hit if index >= first else 0
        for block in ids:
            cached.pop(block, None)
        left = room - -(-len(request.token_ids) // BLOCK)
        _give_up(cached, farthest, left)
        for depth, (block, use) in enumerate(zip(ids, uses, strict=True)):
            if use < _NEVER:
                cached[block] = use
                # Of blocks that are used next at once, the end of a prefix goes first.
                heappush(farthest, (-use, -depth, block))
        _give_up(cached, farthest, room)
    return found


def _give_up(cached: dict[int, int], farthest: list[tuple[int, int, int]], room: int) -> None:
    while len(cached) > max(0, room):
        use, _, block = heappop(farthest)
        if cached.get(block) == -use:
            del cached[block]


def _next_uses(asked: Sequence[Asked], blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return for each block of each request the next request of whose prompt it can be found."""
    upcoming: dict[int, int] = {}
    found: list[list[int]] = []
    for index in range(len(asked) - 1, -1, -1):
        found.append([upcoming.get(block, _NEVER) for block in blocks[index]])
        most = (asked[index].prompt_end - 1) // BLOCK
        upcoming.update(dict.fromkeys(blocks[index][:most], index))
    return found[::-1]
