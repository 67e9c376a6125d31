"""Host arithmetic of the practical torch backend: the steps of all groups as tiles, and the pages that each reads.

Everything is NumPy over the tiles of all groups at once: a step's cost must not grow with a Python loop over its
requests, nor its number of small operations with the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.attention.metadata import SEQ_STARTS, CommonAttentionMetadata

NO_LIMIT = 1 << 30
"""Stands for a window, or a number of queries, without a limit."""

DECODE, FRESH, OTHER = range(3)
"""Kinds of tiles: single queries; whole requests that are a causal square; everything else."""

NUM_KINDS = 3

IntArray = npt.NDArray[np.signedinteger[Any]]


@attrs.frozen
class Rules:
    """What of a group's layers decides how its steps are cut.

    Attributes:
        causal: Whether queries see only their own and earlier positions, as far as the layers' mask goes.
        window: How many of these, counted from the query's own; ``NO_LIMIT`` for all.
        num_sink_tokens: Tokens at the start of each request that a window does not hide.
        takes_causal: Whether a causal square needs no mask.
        group_size: Query heads of each KV head.
        max_queries: Queries of a masked tile at most.
        free_padding: Tokens that a piece of single queries may gather in vain.
        biased_heads: Query heads with a learned bias of their own; 0 without such a bias.
        max_distance: The distances up to which it tells keys apart; 0 likewise.
        piece_keys: Gathered tokens of a piece of more than one tile at most, and of a part of a single query's.
    """

    causal: bool
    window: int
    num_sink_tokens: int
    takes_causal: bool
    group_size: int
    max_queries: int
    free_padding: int
    biased_heads: int
    max_distance: int
    piece_keys: int


@attrs.frozen(eq=False)
class Tiles:
    """Consecutive queries of one request each.

    Attributes:
        columns: ``[num_columns, num_tiles], int32``: the other attributes, which are views of its rows.
        group: The group, counted from 0; ascending.
        kind: ``DECODE``, ``FRESH`` or ``OTHER``; ascending in a group.
        request: The row of the batch.
        first_row: Where the tile's queries start in the packed batch.
        position: The first query's position in its request; means nothing where the keys are of another sequence.
        num_queries: The tile's queries, at least one.
        seq_len: Tokens of the request after the step.
        seq_start: The request's first token that is not hidden.
    """

    columns: IntArray
    group: IntArray
    kind: IntArray
    request: IntArray
    first_row: IntArray
    position: IntArray
    num_queries: IntArray
    seq_len: IntArray
    seq_start: IntArray

    @classmethod
    def of(cls, steps: Sequence[CommonAttentionMetadata], rules: Sequence[Rules], causal: bool) -> Tiles:
        """Return the tiles of all groups.

        Args:
            steps: Each group's metadata.
            rules: Each group's rules.
            causal: Whether queries see only their own and earlier positions.
        """
        found: dict[tuple[int, ...], IntArray] = {}
        parts = []
        for step in steps:
            # Groups without a wrapper chain of their own see the very same requests.
            key = (id(step.query_start_loc_cpu), id(step.seq_lens_cpu), id(step.extensions.get(SEQ_STARTS)))
            if key not in found:
                found[key] = _requests(step, causal)
            parts.append(found[key])
        columns = np.concatenate(parts, axis=1)
        tiles = cls(columns, *columns)
        tiles.group[:] = np.arange(len(parts)).repeat([part.shape[1] for part in parts])
        if not len(tiles) or np.maximum.reduce(tiles.num_queries) == 1:
            return tiles
        return tiles._by_kind(rules, causal)._split([each.max_queries for each in rules])

    def __len__(self) -> int:
        return len(self.request)

    def take(self, index: IntArray) -> Tiles:
        """Return the tiles at ``index``."""
        columns = self.columns.take(index, axis=1)
        return Tiles(columns, *columns)

    def _by_kind(self, rules: Sequence[Rules], causal: bool) -> Tiles:
        window = np.array([each.window for each in rules])[self.group]
        takes_causal = np.array([causal and each.takes_causal for each in rules])[self.group]
        # Nothing was computed before, and nothing is hidden or out of a window.
        fresh = (self.position == 0) & (self.seq_len <= window) & (self.seq_start <= 0) & takes_causal
        self.kind[:] = np.where(self.num_queries == 1, DECODE, np.where(fresh, FRESH, OTHER))
        return self.take((NUM_KINDS * self.group + self.kind).argsort(kind="stable"))

    def _split(self, max_queries: Sequence[int]) -> Tiles:
        """Return the tiles, other than fresh ones, cut into such of at most so many queries as their group takes."""
        limit = np.where(self.kind == OTHER, np.array(max_queries, dtype=np.int32)[self.group], np.int32(NO_LIMIT))
        counts = -(-self.num_queries // limit)
        index = np.arange(len(self)).repeat(counts)
        cut, limit = self.take(index), limit[index]
        skipped = (np.arange(len(index), dtype=np.int32) - (counts.cumsum(dtype=np.int32) - counts)[index]) * limit
        cut.first_row[:] += skipped
        cut.position[:] += skipped
        np.minimum(cut.num_queries - skipped, limit, out=cut.num_queries)
        return cut


def _requests(step: CommonAttentionMetadata, causal: bool) -> IntArray:
    """Return the columns of tiles, one for each request with queries and keys, all decodes of the first group."""
    starts, seq_len = step.query_start_loc_cpu.numpy(), step.seq_lens_cpu.numpy()
    columns = np.zeros((len(attrs.fields(Tiles)) - 1, len(seq_len)), dtype=np.int32)
    _, _, request, first_row, position, num_queries, seq_lens, seq_start = columns
    request[:] = np.arange(len(seq_len))
    first_row[:], seq_lens[:] = starts[:-1], seq_len
    np.subtract(starts[1:], starts[:-1], out=num_queries)
    np.subtract(seq_len, num_queries, out=position)
    if SEQ_STARTS in step.extensions:
        values_cpu = step.extensions[SEQ_STARTS].values_cpu
        assert values_cpu is not None
        seq_start[:] = values_cpu.numpy()
    # A causal query sees itself at least; keys of another sequence may all be hidden, or there may be none.
    attends = num_queries > 0 if causal else (num_queries > 0) & (seq_lens > seq_start)
    return columns if attends.all() else columns[:, attends]


@attrs.frozen(eq=False)
class Spans:
    """The blocks that tiles read, sinks first, and what they see of them: ``[num_tiles], int32`` throughout.

    Attributes:
        low: The first token that any query of the tile sees, but for sinks.
        stop: The token behind the last one that is seen.
        first: The block of ``low``.
        top: The block behind the last one that is read.
        first_sink: The first block of sinks that lie before ``first``; None where no layer has sinks.
        num_sinks: How many such blocks are read; likewise.
        num_pages: Blocks read, sinks included.
    """

    low: IntArray
    stop: IntArray
    first: IntArray
    top: IntArray
    first_sink: IntArray | None
    num_sinks: IntArray | None
    num_pages: IntArray

    @classmethod
    def of(cls, tiles: Tiles, rules: Sequence[Rules], causal: bool, block_size: int) -> Spans:
        """Return what tiles read.

        Args:
            tiles: The tiles.
            rules: Each group's rules.
            causal: Whether queries see only their own and earlier positions; if not, no mask matters.
            block_size: Tokens per block.
        """
        stop, low = tiles.seq_len, tiles.seq_start
        if causal:
            window = np.array([each.window for each in rules], dtype=np.int32)[tiles.group]
            stop = tiles.position + tiles.num_queries
            low = np.maximum(tiles.position + 1 - window, low)
        top, first = (stop + (block_size - 1)) // block_size, low // block_size
        if not causal or not any(each.num_sink_tokens for each in rules):
            return cls(low, stop, first, top, None, None, top - first)
        sink_blocks = np.array([-(-each.num_sink_tokens // block_size) for each in rules], dtype=np.int32)
        end = np.minimum(first, sink_blocks[tiles.group])
        first_sink = np.minimum(tiles.seq_start // block_size, end)
        return cls(low, stop, first, top, first_sink, end - first_sink, top - first + (end - first_sink))

    def take(self, index: IntArray) -> Spans:
        """Return the spans at ``index``."""
        return Spans(
            self.low.take(index),
            self.stop.take(index),
            self.first.take(index),
            self.top.take(index),
            None if self.first_sink is None else self.first_sink.take(index),
            None if self.num_sinks is None else self.num_sinks.take(index),
            self.num_pages.take(index),
        )


def ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Return ``[start, start + length)`` of each pair, one after the other, ``int64``."""
    ends = lengths.cumsum()
    places: IntArray = (starts - ends + lengths).repeat(lengths)
    places += np.arange(len(places))
    return places
