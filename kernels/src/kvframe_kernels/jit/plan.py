"""Divides a step into work items for threads: tiles of queries, or parts of the tokens of single long queries."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.signedinteger[Any]]

MAX_ROWS = 32
"""Rows of a tile of several queries (queries times query heads of a KV head): as many as a core's L1 cache holds."""

MIN_PART_TOKENS = 512
"""The fewest tokens of a part of a single query."""

PARTS_PER_THREAD = 4
"""The number of parts of one long query, for each thread."""


@attrs.frozen
class Mask:
    """The mask of a step.

    Attributes:
        causal: Whether queries see only their own and earlier positions.
        window: The number of positions that a query sees, counted back from its own; 0 for all.
        num_sink_tokens: Tokens at the start that are seen in spite of the window.
        chunk: Tokens of a chunk that queries stay within; 0 for none.
    """

    causal: bool
    window: int
    num_sink_tokens: int
    chunk: int


@attrs.frozen(eq=False)
class Work:
    """A step's work items.

    Attributes:
        items: ``[num_items, 12], int64``: the request; its first query's row in the packed batch, and the number of
            queries; the first token and the one after the last; likewise of sink tokens before these; the first
            query's position; the request's sink tokens; the first KV head and the one after the last; the first row
            that is written.
        first_part: ``[num_tokens + 1], int64``: the first part of each query; a query that is not split has no parts.
        num_threads: The number of threads to use.
    """

    items: IntArray
    first_part: IntArray
    num_threads: int


SMALL = 1 << 12
"""The least work for several threads, in tokens times KV heads times groups of four rows; less costs more to start."""


def plan(
    starts: IntArray,
    seq_lens: IntArray,
    seq_starts: IntArray | None,
    num_tokens: int,
    mask: Mask,
    num_heads: int,
    num_kv_heads: int,
    num_threads: int,
    range_ends: IntArray | None = None,
) -> Work:
    """Return a step's work items.

    Args:
        starts: ``[num_reqs + 1]``: the start of each request's queries.
        seq_lens: ``[num_reqs]``: tokens of each request, or of the sequence of its keys.
        seq_starts: ``[num_reqs]``: tokens before these are hidden; None for none.
        num_tokens: Rows of the query, including padding.
        mask: The mask of the step.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        num_threads: The number of threads in the pool.
        range_ends: ``[num_tokens]``: each query of a causal mask also sees the later tokens before this one, the end of
            its range; 0 for none. None if there are no ranges.
    """
    starts, seq_lens = starts.astype(np.int64), seq_lens.astype(np.int64)
    first_seen = np.zeros_like(seq_lens) if seq_starts is None else seq_starts.astype(np.int64)
    group, num_new = num_heads // num_kv_heads, np.diff(starts)
    tile = max(1, MAX_ROWS // group)
    counts = np.where(seq_lens > first_seen, -(-num_new // tile), 0)
    request = np.arange(len(seq_lens)).repeat(counts)
    skipped = _counted(counts) * tile
    queries = np.minimum(num_new[request] - skipped, tile)
    position = (seq_lens - num_new)[request] + skipped
    low, stop = first_seen[request], seq_lens[request]
    first_sink = stop_sink = low
    first_query = starts[:-1][request] + skipped
    num_sinks = np.full_like(low, mask.num_sink_tokens)
    if mask.causal:
        stop = position + queries
        if range_ends is not None:
            # Ranges are disjoint, so no query of a tile sees a later token than its last one.
            stop = np.maximum(stop, range_ends[first_query + queries - 1])
        if mask.window:
            low = np.maximum(low, position + 1 - mask.window)
            stop_sink = np.maximum(first_sink, np.minimum(low, num_sinks))
        if mask.chunk:
            low = np.maximum(low, position - position % mask.chunk)
    single = queries == 1
    columns = np.stack([request, first_query, queries, low, stop, first_sink, stop_sink, position, num_sinks])

    part_tokens = max(MIN_PART_TOKENS, int((stop - low)[single].sum()) // (PARTS_PER_THREAD * num_threads))
    num_parts = np.where(single, np.maximum(1, -(-(stop - low) // part_tokens)), num_kv_heads)
    index, part = np.arange(len(request)).repeat(num_parts), _counted(num_parts)
    columns, single = columns[:, index], single[index]
    split = single & (num_parts[index] > 1)
    begins = columns[3] + part * part_tokens
    columns[4] = np.where(split, np.minimum(begins + part_tokens, columns[4]), columns[4])
    columns[3] = np.where(split, begins, columns[3])
    columns[6] = np.where(split & (part > 0), columns[5], columns[6])
    first_head = np.where(single, 0, part)
    stop_head = np.where(single, num_kv_heads, part + 1)
    row = np.where(split, num_tokens + np.cumsum(split) - 1, columns[1])
    items = np.stack([*columns, first_head, stop_head, row], axis=1)

    per_token = np.zeros(num_tokens + 1, dtype=np.int64)
    np.add.at(per_token, columns[1][split] + 1, 1)
    cost = (columns[4] - columns[3] + columns[6] - columns[5]) * (stop_head - first_head) * -(-columns[2] * group // 4)
    threads = 1 if int(cost.sum()) <= SMALL else min(num_threads, len(items))
    return Work(items, np.cumsum(per_token), threads)


def _counted(counts: IntArray) -> IntArray:
    """Return ``0, 1, …`` up to each count, one after the other."""
    places: IntArray = np.arange(int(counts.sum())) - (counts.cumsum() - counts).repeat(counts)
    return places
