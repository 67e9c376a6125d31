"""Finds the pages that a step's queries can see, so that only these are copied."""

from __future__ import annotations

import numpy as np

from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.order import IntArray
from kvframe.contract.specs import AttentionMask


def live_places(metadata: CommonAttentionMetadata, mask: AttentionMask) -> IntArray:
    """Return the blocks that a query may see: those of the sinks, and all from the first query's window on.

    Args:
        metadata: The step.
        mask: The mask. If it has no window and no chunk, every block up to the request's end may be seen.

    Returns:
        ``[num_pages], int64, host``: indices in the flattened block table.
    """
    size, num_columns = metadata.block_size, metadata.block_table.shape[1]
    seq_lens = metadata.seq_lens_cpu.numpy().astype(np.int64)
    query_lens = np.diff(metadata.query_start_loc_cpu.numpy())
    first_query = seq_lens - query_lens
    low = np.zeros_like(seq_lens)
    if mask.window is not None:
        low = np.maximum(first_query + 1 - mask.window, 0)
    elif mask.chunk is not None:
        low = first_query - first_query % mask.chunk
    first, stop = low // size, np.where(query_lens > 0, -(-seq_lens // size), 0)
    num_sinks = np.minimum(first, -(-mask.num_sink_tokens // size))
    counts = np.maximum(stop - first, 0) + np.where(query_lens > 0, num_sinks, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    columns = np.where(place < num_sinks[rows], place, place - num_sinks[rows] + first[rows])
    index: IntArray = rows * num_columns + columns
    return index


def static_places(metadata: CommonAttentionMetadata, mask: AttentionMask) -> IntArray:
    """Return as many blocks as any batch of a graph needs: all blocks, or the most that a window reaches.

    Args:
        metadata: The step, at a graph's sizes.
        mask: As for ``live_places``.

    Returns:
        ``[num_pages], int64, host``.
    """
    (num_rows, num_columns), size = metadata.block_table.shape, metadata.block_size
    starts = np.arange(num_rows, dtype=np.int64)[:, None] * num_columns
    num_sinks = -(-mask.num_sink_tokens // size)
    reach = metadata.max_query_len + (mask.window or mask.chunk or 0)
    num_reached = reach // size + 2
    if (mask.window is None and mask.chunk is None) or num_sinks + num_reached >= num_columns:
        every: IntArray = (starts + np.arange(num_columns)).ravel()
        return every
    first_query = metadata.seq_lens_cpu.numpy() - np.diff(metadata.query_start_loc_cpu.numpy())
    if mask.window is not None:
        low = np.maximum(first_query + 1 - mask.window, 0)
    else:
        low = first_query - first_query % (mask.chunk or 1)
    first = np.clip(low // size, 0, num_columns - num_reached)
    reached = first[:, None] + np.arange(num_reached)
    sinks = np.broadcast_to(np.arange(num_sinks), (num_rows, num_sinks))
    index: IntArray = (starts + np.concatenate([sinks, reached], axis=1)).ravel()
    return index
