"""Host arithmetic of the metadata: groups queries that are computed together, and finds the pages that they read.

The NumPy calls are for all requests of a step at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.contract import (
    RANGE_ENDS,
    SEQ_STARTS,
    AttentionMask,
    CommonAttentionMetadata,
    MaskFunction,
    TokenRange,
)

MAX_TILE_QUERIES = 1024
"""The most queries of a tile. A longer prompt has several tiles; each gathers the tokens that it sees."""

MAX_BATCH_TOKENS = 1 << 16
"""The most gathered tokens of a dense batch of more than one tile: bounds the gathered copy's memory."""

MAX_BATCH_PAIRS = 1 << 24
"""The most pairs of a query and a gathered token of a dense batch of several tiles: bounds the memory of its mask."""

HIDDEN = -1
"""The position of a gathered token that no query sees."""

SINK = -2
"""The position of a slot for the learned sink logit, which every query sees."""

IntArray = npt.NDArray[np.signedinteger[Any]]
BoolArray = npt.NDArray[np.bool_]


@attrs.frozen
class Visibility:
    """The visible tokens of a group's queries.

    Attributes:
        sees: The layers' mask function, without what a prompt's ranges add.
        mask: Their mask, from which the pages to read follow faster; None if there is only the function.
        has_sinks: Whether each query also sees a learned logit.
        live_ranges: Their live ranges by position, if they see only some of the live tokens; otherwise None.
    """

    sees: MaskFunction
    mask: AttentionMask | None
    has_sinks: bool
    live_ranges: Callable[[int], tuple[TokenRange, ...]] | None = None

    @property
    def lookahead(self) -> int | None:
        """How many later tokens queries see in a window in both directions; None for other masks."""
        return None if self.mask is None else self.mask.lookahead

    def seen_from(self, position: IntArray, key: IntArray) -> BoolArray:
        """Return which earlier tokens a query at ``position``, or a query after it, may see.

        By the law of forgetting, no later query sees a token of the past that is not live for the first one. If a query
        sees every live token, these are the ones that the first query sees.

        Args:
            position: Positions of the first queries, of a shape that broadcasts against ``key``.
            key: Positions of tokens.
        """
        if self.live_ranges is None:
            return np.asarray(self.sees(position, key))
        firsts, index = np.unique(position, return_inverse=True)
        ranges = [self.live_ranges(int(first)) for first in firsts]
        bounds = np.zeros((len(firsts), max(map(len, ranges), default=0), 2), dtype=np.int64)
        for row, parts in enumerate(ranges):
            bounds[row, : len(parts)] = parts or np.empty((0, 2))
        index = index.reshape(position.shape)
        found = np.zeros(np.broadcast_shapes(position.shape, key.shape), dtype=np.bool_)
        for part in range(bounds.shape[1]):
            found |= (key >= bounds[index, part, 0]) & (key < bounds[index, part, 1])
        return found


@attrs.frozen(eq=False)
class Tiles:
    """Consecutive queries of one request each; every attribute is ``[num_tiles]``.

    Attributes:
        request: The row of the batch.
        first_row: The start of the tile's queries in the packed batch.
        position: The first query's position; not used if the keys are of another sequence.
        num_queries: The tile's queries, at least one.
        start: The first token that is not hidden.
        stop: The token after the last visible one.
    """

    request: IntArray
    first_row: IntArray
    position: IntArray
    num_queries: IntArray
    start: IntArray
    stop: IntArray

    @classmethod
    def of(cls, metadata: CommonAttentionMetadata, causal: bool, lookahead: int | None = None) -> Tiles:
        """Return the tiles of a step: none for a request without a new token or without a visible one."""
        first_row = metadata.query_start_loc_cpu.numpy().astype(np.int64)
        num_queries, seq_len = np.diff(first_row), metadata.seq_lens_cpu.numpy().astype(np.int64)
        start = host_values(metadata, SEQ_STARTS)
        start = np.zeros_like(seq_len) if start is None else start
        ends = host_values(metadata, RANGE_ENDS)
        request = np.flatnonzero((num_queries > 0) & (seq_len > start))
        counts = -(-num_queries[request] // MAX_TILE_QUERIES)
        request = request.repeat(counts)
        skipped = (np.arange(len(request)) - (counts.cumsum() - counts).repeat(counts)) * MAX_TILE_QUERIES
        taken = np.minimum(num_queries[request] - skipped, MAX_TILE_QUERIES)
        position = (seq_len - num_queries)[request] + skipped
        rows = first_row[:-1][request] + skipped
        stop = np.minimum(position + taken + (lookahead or 0), seq_len[request]) if causal else seq_len[request]
        if causal and ends is not None and lookahead is None:
            # Ranges are disjoint, so no query of a tile sees a later token than its last one.
            stop = np.maximum(stop, ends[rows + taken - 1])
        return cls(
            request=request,
            first_row=rows,
            position=position,
            num_queries=taken,
            start=start[request],
            stop=stop,
        )

    def take(self, index: IntArray | slice) -> Tiles:
        """Return the tiles at ``index``."""
        return Tiles(*(getattr(self, field.name)[index] for field in attrs.fields(Tiles)))


@attrs.frozen(eq=False)
class Reads:
    """The blocks that tiles read.

    Attributes:
        block: ``[num_reads]``: block indices, tile after tile, ascending.
        counts: ``[num_tiles]``: the number of blocks of each tile.
    """

    block: IntArray
    counts: IntArray

    @classmethod
    def of(cls, tiles: Tiles, visibility: Visibility, causal: bool, block_size: int) -> Reads:
        """Return the blocks that tiles read: those that their first query sees, and those of their own tokens.

        By the law of forgetting, no later query of a tile sees more of the past than the first.
        """
        top = -(-tiles.stop // block_size)
        if causal and visibility.mask is None:
            return cls._by_function(tiles, visibility, block_size, top)
        low, sink_top = tiles.start, np.zeros_like(top)
        if causal and visibility.mask is not None:
            mask = visibility.mask
            if mask.chunk is not None:
                low = np.maximum(low, tiles.position - tiles.position % mask.chunk)
            if mask.window is not None:
                low = np.maximum(low, tiles.position + 1 - mask.window)
                sink_top = np.full_like(top, -(-mask.num_sink_tokens // block_size))
        first = low // block_size
        first_sink = np.minimum(tiles.start // block_size, first)
        sinks = np.maximum(np.minimum(sink_top, first) - first_sink, 0)
        counts = sinks + top - first
        place = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        of_sinks = place < sinks.repeat(counts)
        return cls(place + np.where(of_sinks, first_sink.repeat(counts), (first - sinks).repeat(counts)), counts)

    @classmethod
    def _by_function(cls, tiles: Tiles, visibility: Visibility, block_size: int, top: IntArray) -> Reads:
        """Return the blocks with a token that the first query sees, or one after it; all tokens are tried."""
        tile = np.arange(len(top)).repeat(top * block_size)
        block_start = (top.cumsum() - top).repeat(top)
        key = (np.arange(len(block_start)) - block_start).repeat(block_size) * block_size
        key += np.tile(np.arange(block_size), len(block_start))
        position = tiles.position[tile]
        seen = (key >= position) | visibility.seen_from(position, key)
        seen &= (key >= tiles.start[tile]) & (key < tiles.stop[tile])
        is_read = seen.reshape(-1, block_size).any(axis=1)
        return cls(
            (np.arange(len(block_start)) - block_start)[is_read],
            np.bincount(np.arange(len(top)).repeat(top)[is_read], minlength=len(top)),
        )


@attrs.frozen(eq=False)
class HostDenseBatch:
    """Tiles that are computed as one dense batch, on the host.

    Attributes:
        num_queries: Queries per tile; shorter tiles repeat their last one.
        num_keys: Gathered tokens per tile, whole pages.
        page_rows: ``[num_tiles * num_pages]``: the row in the block table of each page to gather.
        page_columns: ``[num_tiles * num_pages]``: its column.
        query_rows: ``[num_tiles * num_queries]``: rows of the packed batch.
        query_positions: ``[num_tiles * num_queries]``: the positions of the queries.
        outputs: ``[num_outputs]``: the queries that are not repetitions.
        key_positions: ``[num_tiles * num_keys]``: the positions of the gathered tokens, or ``HIDDEN``, or ``SINK``.
        hidden: ``[num_hidden]``: the gathered tokens that no query sees.
        query_ends: ``[num_tiles * num_queries]``: each query also sees the later tokens before this one; None if the
            mask function shows all.
    """

    num_queries: int
    num_keys: int
    page_rows: IntArray
    page_columns: IntArray
    query_rows: IntArray
    query_positions: IntArray
    outputs: IntArray
    key_positions: IntArray
    hidden: IntArray
    query_ends: IntArray | None

    @property
    def num_tiles(self) -> int:
        """Tiles in the batch."""
        return len(self.key_positions) // self.num_keys


def make_dense_batches(
    metadata: CommonAttentionMetadata, visibility: Visibility, causal: bool, num_heads_at_once: int
) -> Iterator[HostDenseBatch]:
    """Yield the dense batches of a step, each of tiles with similar lengths.

    Args:
        metadata: The step.
        visibility: The visible tokens of queries.
        causal: Whether they see only their own and earlier positions.
        num_heads_at_once: The number of heads whose scores are in memory at once; a factor in the bound on memory.
    """
    tiles = Tiles.of(metadata, causal, visibility.lookahead)
    if not len(tiles.request):
        return
    reads = Reads.of(tiles, visibility, causal, metadata.block_size)
    # Tiles within a power of two of queries, and of four of pages, share a batch: a further batch would cost more.
    kind = np.frexp(tiles.num_queries - 1)[1] * 64 + np.frexp(reads.counts)[1] // 2
    order = np.lexsort([-reads.counts, kind])
    starts = reads.counts.cumsum() - reads.counts
    bounds = [0]
    for stop in [*(np.flatnonzero(np.diff(kind[order])) + 1).tolist(), len(order)]:
        while bounds[-1] < stop:
            group = order[bounds[-1] : stop]
            num_keys = int(reads.counts[group[0]]) * metadata.block_size
            pairs = num_keys * int(tiles.num_queries[group].max()) * num_heads_at_once
            bounds.append(min(stop, bounds[-1] + max(1, min(MAX_BATCH_TOKENS // num_keys, MAX_BATCH_PAIRS // pairs))))
    for begin, end in itertools.pairwise(bounds):
        index = order[begin:end]
        yield _lay_out(tiles.take(index), reads.block, starts[index], reads.counts[index], metadata, visibility, causal)


def _lay_out(
    tiles: Tiles,
    blocks: IntArray,
    starts: IntArray,
    counts: IntArray,
    metadata: CommonAttentionMetadata,
    visibility: Visibility,
    causal: bool,
) -> HostDenseBatch:
    size, num_tiles = metadata.block_size, len(counts)
    # The slot for the sink logit is the last one of a page that repeats another page, and that no query sees.
    num_pages = int(counts.max()) + visibility.has_sinks
    place = np.arange(num_pages)
    is_read = place < counts[:, None]
    columns = blocks[starts[:, None] + np.where(is_read, place, 0)]
    key = (columns[:, :, None] * size + np.arange(size)).reshape(num_tiles, -1)
    seen = is_read.repeat(size, axis=1) & (key >= tiles.start[:, None]) & (key < tiles.stop[:, None])
    if causal:
        first = tiles.position[:, None]
        seen &= (key >= first) | visibility.seen_from(first, key)
    key_positions = np.where(seen, key, HIDDEN)
    if visibility.has_sinks:
        key_positions[:, -1] = SINK
    num_queries = int(tiles.num_queries.max())
    query = np.arange(num_queries)
    within = np.minimum(query, tiles.num_queries[:, None] - 1)
    query_rows = (tiles.first_row[:, None] + within).reshape(-1)
    has_ends = causal and visibility.lookahead is None
    range_ends = host_values(metadata, RANGE_ENDS) if has_ends else None
    return HostDenseBatch(
        num_queries=num_queries,
        num_keys=num_pages * size,
        page_rows=tiles.request.repeat(num_pages),
        page_columns=columns.reshape(-1),
        query_rows=query_rows,
        query_positions=(tiles.position[:, None] + within).reshape(-1),
        outputs=np.flatnonzero(query < tiles.num_queries[:, None]),
        key_positions=key_positions.reshape(-1),
        hidden=np.flatnonzero(~seen),
        query_ends=None if range_ends is None else range_ends[query_rows],
    )


def host_values(metadata: CommonAttentionMetadata, name: str) -> IntArray | None:
    """Return a copy of the values of an extension, ``int64``; None if the step does not have it."""
    if name not in metadata.extensions:
        return None
    values_cpu = metadata.extensions[name].values_cpu
    assert values_cpu is not None
    return np.asarray(values_cpu.numpy()).astype(np.int64)
