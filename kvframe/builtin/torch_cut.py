"""How the practical torch backend cuts tiles into dense batches: little padding, few batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvframe.builtin.torch_tiles import NUM_KINDS, IntArray, Rules, column_of

MAX_BIAS_ELEMENTS = 1 << 24
"""Elements of a learned bias of a piece of more than one tile: as many as a mask has at most."""

MAX_POWERS = 1 << 6
"""More than there are powers of two that lengths differ by."""

UNSORTED_PADDING = 16
"""Tiles stay in order where padding is at most one in so many of the tokens that they read."""


def cut_batches(
    segment: IntArray, shape: IntArray | None, num_queries: IntArray, num_keys: IntArray, rules: Sequence[Rules]
) -> tuple[IntArray | None, IntArray]:
    """Cut tiles into dense batches, in which padding is less than half of the keys and the queries, or little.

    Args:
        segment: ``[num_tiles]``: ``NUM_KINDS`` times the group, and the kind; ascending. Tiles of different ones are
            not mixed.
        shape: ``[num_tiles]``: nor are tiles of different ones of these; None where all are alike.
        num_queries: ``[num_tiles]``: queries of each tile.
        num_keys: ``[num_tiles]``: tokens that each reads.
        rules: Each group's rules.

    Returns:
        The order of tiles, None where they stay as they are; where each batch starts in it, and the end.
    """
    edges = _edges(segment)
    starts, counts = edges[:-1], edges[1:] - edges[:-1]
    longest, widest = np.maximum.reduceat(num_keys, starts), np.maximum.reduceat(num_queries, starts)
    group = segment[starts] // NUM_KINDS
    num_read = np.add.reduceat(num_keys, starts)
    waste = counts * longest - num_read
    little = UNSORTED_PADDING * waste <= num_read
    uniform = 2 * np.minimum.reduceat(num_keys, starts) > longest
    uniform &= 2 * np.minimum.reduceat(num_queries, starts) > widest
    uniform |= (widest == 1) & (little | (waste <= column_of(rules, "free_padding")[group]))
    if shape is not None:
        uniform &= np.minimum.reduceat(shape, starts) == np.maximum.reduceat(shape, starts)
    limit = column_of(rules, "piece_keys")[group]
    if any(each.biased_heads for each in rules):
        heads = column_of(rules, "biased_heads")[group]
        limit = np.minimum(limit, MAX_BIAS_ELEMENTS // np.maximum(1, widest * heads))
    uniform &= little | (counts * longest <= limit)
    uniform |= counts == 1
    bounds: list[int] = []
    in_order = np.stack((starts, edges[1:], limit, longest))[:, uniform]
    for start, stop, most, size in in_order.T.tolist():
        bounds.extend(range(start, stop, max(1, most // size)))
    if uniform.all():
        return None, np.array([*bounds, len(segment)])
    tiles = (~uniform).repeat(counts).nonzero()[0]
    each, keys = np.arange(len(counts)).repeat(counts)[tiles], num_keys[tiles]
    # Lengths in (longest / 2, longest], (longest / 4, longest / 2], … are not mixed; nor such numbers of queries.
    run = MAX_POWERS**2 * segment[tiles].astype(np.int64)
    run += np.frexp(longest[each] // keys)[1]
    if widest.max() > 1:
        run += MAX_POWERS * np.frexp(widest[each] // num_queries[tiles])[1]
    runs: Sequence[IntArray] = (run,) if shape is None else (shape[tiles], run)
    by_length = np.lexsort((-keys, *runs))
    order = np.arange(len(segment))
    order[tiles] = tiles[by_length]
    firsts = _longest_first(keys[by_length], limit[each], [column[by_length] for column in runs])
    return order, np.array([*sorted([*bounds, *tiles[firsts].tolist()]), len(segment)])


def _longest_first(num_keys: IntArray, limit: IntArray, runs: Sequence[IntArray]) -> list[int]:
    """Return where each batch starts among tiles of which the longest of each run come first.

    Args:
        num_keys: ``[num_tiles]``: tokens that each reads.
        limit: ``[num_tiles]``: tokens that a batch of more than one tile reads at most, alike in a run.
        runs: ``[num_tiles]`` each: tiles are in one run where they are equal in all of these.
    """
    found, keys, edges = [], num_keys.tolist(), _edges(*runs)
    starts, stops = edges[:-1], edges[1:]
    for tile, stop, most in zip(starts.tolist(), stops.tolist(), limit[starts].tolist(), strict=True):
        while tile < stop:
            found.append(tile)
            tile += max(1, most // keys[tile])
    return found


def _edges(*columns: IntArray) -> IntArray:
    """Return where each run of equal values in all columns starts, and the end."""
    is_edge = np.ones(len(columns[0]) + 1, dtype=np.bool_)
    np.not_equal(columns[0][1:], columns[0][:-1], out=is_edge[1:-1])
    for column in columns[1:]:
        is_edge[1:-1] |= column[1:] != column[:-1]
    return is_edge.nonzero()[0]
