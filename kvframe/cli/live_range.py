"""Describes in words which part of the past a cache spec needs, by asking the spec for its live ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvframe.contract.specs import TOKENS

if TYPE_CHECKING:
    from kvframe.contract.specs import KVCacheSpec


def describe_live_range(spec: KVCacheSpec, max_model_len: int) -> str:
    """Return in words which past tokens a spec needs, from its live ranges near the end of the longest request only."""
    if spec.sequence != TOKENS:
        return f"every {spec.sequence} token"
    n = max_model_len - 1
    if n and not spec.live_ranges(n):
        n -= 1  # the first token of a chunk has no past; the last token of the chunk before has the longest past
    now, before = spec.live_ranges(n), spec.live_ranges(n - 1) if n else ()
    if now == ((n - 1, n),) and spec.is_per_block:
        block_end = n - n % spec.block_size
        until = ", until its block ends" if block_end and not spec.live_ranges(block_end) else ""
        return f"the state after the last token{until}"
    chunk = _chunk_len(spec, n)
    if chunk is not None:
        return f"its own chunk of {chunk}"
    words = [_range_in_words(index, n, now, before) for index in range(len(now))]
    if None in words:
        return f"at token {n}: " + " and ".join(f"{start} to {stop - 1}" for start, stop in now)
    return " and ".join(word for word in words if word is not None) or "nothing"


def _chunk_len(spec: KVCacheSpec, n: int) -> int | None:
    """Return the length of the chunk of ``n`` if its past starts with that chunk; otherwise None."""
    starts = [ranges[0][0] for ranges in (spec.live_ranges(n),) if ranges]
    before = spec.live_ranges(starts[0] - 1) if starts and starts[0] else ()
    if len(before) != 1 or spec.live_ranges(starts[0]):
        return None
    chunk = starts[0] - before[0][0]
    chunk_ranges = [((at - at % chunk, at),) if at % chunk else () for at in (n, n - 1, starts[0], chunk, 1)]
    return chunk if chunk_ranges == [spec.live_ranges(at) for at in (n, n - 1, starts[0], chunk, 1)] else None


def _range_in_words(
    index: int, n: int, now: Sequence[tuple[int, int]], before: Sequence[tuple[int, int]]
) -> str | None:
    """Return a range in words, seen at two positions; None if its ends and its length all change."""
    start, stop = now[index]
    if (start, stop) == (0, n):
        return "every past token"
    if len(before) != len(now):
        return None
    if before[index] == (start, stop):
        return f"the first {stop}" if start == 0 else None
    return f"the last {stop - start}" if stop == n and before[index] == (start - 1, stop - 1) else None
