"""How the practical torch backend cuts tiles into dense batches: little padding, few batches."""

from __future__ import annotations

import itertools

import numpy as np

from kvframe.builtin.torch_tiles import IntArray

MAX_BIAS_ELEMENTS = 1 << 24
"""Elements of a learned bias of a piece of more than one tile: as many as a mask has at most."""

MAX_KINDS = 1 << 6
"""More than there are powers of two that lengths, or numbers of queries, differ by."""


def cut_batches(
    segment: IntArray,
    num_queries: IntArray,
    num_keys: IntArray,
    free_padding: IntArray,
    biased_heads: IntArray,
    piece_keys: IntArray,
) -> tuple[IntArray | None, IntArray]:
    """Cut tiles into dense batches, in which padding is less than half of the keys and the queries, or little.

    Args:
        segment: ``[num_tiles]``: ascending; tiles of different ones are not mixed.
        num_queries: ``[num_tiles]``: queries of each tile.
        num_keys: ``[num_tiles]``: tokens that each reads.
        free_padding: ``[num_tiles]``: tokens that a batch of single queries may read in vain, alike in a segment.
        biased_heads: ``[num_tiles]``: heads with a learned bias of their own, 0 without; alike in a segment.
        piece_keys: ``[num_tiles]``: tokens that a batch of more than one tile reads at most; alike in a segment.

    Returns:
        The order of tiles, None where they stay as they are; where each batch starts in it, and the end.
    """
    edges = _edges(segment)
    starts, counts = edges[:-1], edges[1:] - edges[:-1]
    longest, widest = np.maximum.reduceat(num_keys, starts), np.maximum.reduceat(num_queries, starts)
    waste = counts * longest - np.add.reduceat(num_keys, starts)
    uniform = 2 * np.minimum.reduceat(num_keys, starts) > longest
    uniform &= 2 * np.minimum.reduceat(num_queries, starts) > widest
    uniform |= (widest == 1) & (waste <= free_padding[starts])
    limit = piece_keys[starts]
    if biased_heads.any():
        limit = np.minimum(limit, MAX_BIAS_ELEMENTS // np.maximum(1, widest * biased_heads[starts]))
    uniform &= counts * longest <= limit
    uniform |= counts == 1
    if uniform.all():
        return None, edges
    keeps = uniform.repeat(counts)
    rest = (~keeps).nonzero()[0]
    keys = num_keys[rest]
    # Lengths within (longest / 2, longest], (longest / 4, longest / 2], … are not mixed; nor such numbers of queries.
    kind = np.frexp(longest.repeat(counts)[rest] // keys)[1]
    if widest.max() > 1:
        kind += MAX_KINDS * np.frexp(widest.repeat(counts)[rest] // num_queries[rest])[1]
    run = segment.astype(np.int64) * MAX_KINDS**2
    run[rest] += kind
    most = int(longest.max())
    by_length = (run[rest] * (most + 1) + (most - keys)).argsort(kind="stable")
    order = np.arange(len(segment))
    order[rest] = rest[by_length]
    run[rest] = run[rest][by_length]
    limits = limit.repeat(counts)
    bounds = [0]
    for start, stop in itertools.pairwise(_edges(run).tolist()):
        if keeps[start]:
            bounds.append(stop)
        while bounds[-1] < stop:
            tile = order[bounds[-1]]
            count = max(1, int(limits[tile]) // int(num_keys[tile]))
            bounds.append(min(stop, bounds[-1] + count))
    return order, np.array(bounds)


def _edges(run: IntArray) -> IntArray:
    """Return where each run of equal values starts, and the end."""
    is_edge = np.ones(len(run) + 1, dtype=np.bool_)
    np.not_equal(run[1:], run[:-1], out=is_edge[1:-1])
    return is_edge.nonzero()[0]
