"""Host arithmetic of the practical torch backend: the steps of all groups as tiles, and the pages that each reads.

Everything is NumPy over the tiles of all groups at once: a step's cost must not grow with a Python loop over its
requests, nor its number of small operations with the groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.contract.metadata import SEQ_STARTS, CommonAttentionMetadata

NO_LIMIT = 1 << 30
"""Stands for a window, or a number of queries, without a limit."""

SINGLE, FRESH, ALIGNED, OTHER = range(4)
"""Kinds of tiles: single queries; whole requests that are a causal square; tiles of many queries of which the last one
ends a page, where a page is not longer; everything else."""

NUM_KINDS = 4

LEAST_ALIGNED = 16
"""Aligned tiles have this many queries, or about as many as pages have tokens, or a multiple of that."""

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


def column_of(rules: Sequence[Rules], name: str) -> IntArray:
    """Return a field of each group's rules: ``[num_groups], int32``."""
    return np.array([getattr(each, name) for each in rules], dtype=np.int32)


@attrs.frozen(eq=False)
class Tiles:
    """Consecutive queries of one request each.

    Attributes:
        columns: ``[num_columns, num_tiles], int32``: the other attributes, which are views of its rows.
        group: The group, counted from 0; ascending.
        kind: ``SINGLE``, ``FRESH``, ``ALIGNED`` or ``OTHER``; ascending in a group.
        request: The row of the batch.
        first_row: Where the tile's queries start in the packed batch.
        position: The first query's position in its request; means nothing where the keys are of another sequence.
        num_queries: The tile's queries, at least one.
        skip: How many of these, at the start, the step does not compute; none but in aligned tiles.
        num_new: How many of those behind it computes, at least one; all but in aligned tiles.
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
    skip: IntArray
    num_new: IntArray
    seq_len: IntArray
    seq_start: IntArray

    @classmethod
    def of(
        cls, steps: Sequence[CommonAttentionMetadata], rules: Sequence[Rules], causal: bool, block_size: int
    ) -> Tiles:
        """Return the tiles of all groups.

        Args:
            steps: Each group's metadata.
            rules: Each group's rules.
            causal: Whether queries see only their own and earlier positions.
            block_size: Tokens per block.
        """
        found: dict[tuple[int, ...], tuple[IntArray, IntArray]] = {}
        requests = []
        for step in steps:
            # Groups without a wrapper chain of their own see the very same requests.
            key = (id(step.query_start_loc_cpu), id(step.seq_lens_cpu), id(step.extensions.get(SEQ_STARTS)))
            if key not in found:
                found[key] = _requests(step, causal)
            requests.append(found[key])
        parts = [singles for singles, _ in requests]
        counts = [singles.shape[1] for singles in parts]
        if any(longer.shape[1] for _, longer in requests):
            columns = np.concatenate([longer for _, longer in requests], axis=1)
            whole = cls(columns, *columns)
            whole.group[:] = np.arange(len(steps)).repeat([longer.shape[1] for _, longer in requests])
            cut = whole._cut(rules, causal, block_size)
            ends = np.searchsorted(cut.group, np.arange(len(steps) + 1)).tolist()
            several = [cut.columns[:, start:end] for start, end in itertools.pairwise(ends)]
            counts = [count + each.shape[1] for count, each in zip(counts, several, strict=True)]
            parts = [part for pair in zip(parts, several, strict=True) for part in pair]
        columns = np.concatenate(parts, axis=1)
        tiles = cls(columns, *columns)
        tiles.group[:] = np.arange(len(steps)).repeat(counts)
        return tiles

    def __len__(self) -> int:
        return len(self.request)

    def take(self, index: IntArray) -> Tiles:
        """Return the tiles at ``index``."""
        columns = self.columns.take(index, axis=1)
        return Tiles(columns, *columns)

    def _cut(self, rules: Sequence[Rules], causal: bool, block_size: int) -> Tiles:
        """Return the tiles of requests with several queries each, by group and kind."""
        limit = column_of(rules, "max_queries")[self.group]
        self.kind[:] = OTHER
        if causal:
            shown = self.seq_start <= 0
            aligned = shown & (self.num_queries > limit // 2) & (limit > 1)
            aligned &= column_of(rules, "num_sink_tokens")[self.group] == 0
            self.kind[aligned] = ALIGNED
            # Nothing was computed before, and nothing is out of a window.
            fresh = shown & (self.position == 0) & (self.seq_len <= column_of(rules, "window")[self.group])
            self.kind[fresh & (column_of(rules, "takes_causal")[self.group] > 0)] = FRESH
        order = (NUM_KINDS * self.group + self.kind).argsort(kind="stable")
        requests, limit = self.take(order), limit[order]
        aligned = requests.kind == ALIGNED
        quantum = _quantum(limit, block_size)
        # Tiles of one request alone need not be like those of others, and its rows follow one another.
        quantum[np.bincount(requests.group[aligned], minlength=len(rules))[requests.group] == 1] = 1
        size = np.where(aligned, limit - limit % quantum, limit)
        size[requests.kind == FRESH] = NO_LIMIT
        end = np.minimum(_round_up(requests.seq_len, quantum), _round_up(requests.seq_len, np.int32(block_size)))
        length = np.where(aligned, end - requests.position, requests.num_queries)
        counts = -(-length // size)
        # Aligned tiles are counted from their end: the first one is short, and may begin before the first query.
        lead = np.where(aligned, length - (counts - 1) * size, size)
        spare = np.where(aligned, size - _round_up(lead, quantum), np.int32(0))
        index = np.arange(len(requests)).repeat(counts)
        tiles, aligned, size = requests.take(index), aligned[index], size[index]
        place = np.arange(len(index), dtype=np.int32) - (counts.cumsum(dtype=np.int32) - counts)[index]
        lacking = np.where(place == 0, spare[index], np.int32(0))
        start = lead[index] + (place - 1) * size + lacking
        np.maximum(-start, 0, out=tiles.skip)
        np.minimum(tiles.num_queries - start, size - lacking, out=tiles.num_new)
        tiles.num_queries[:] = np.where(aligned, size - lacking, tiles.num_new)
        tiles.num_new[:] -= tiles.skip
        tiles.first_row[:] += start
        tiles.position[:] += start
        return tiles


def _quantum(limit: IntArray, block_size: int) -> IntArray:
    """Return what the numbers of queries of aligned tiles are multiples of: whole pages where a tile holds them."""
    pages = np.int32(block_size * -(-LEAST_ALIGNED // block_size))
    return np.where(limit < pages, np.minimum(limit, np.int32(LEAST_ALIGNED)), pages)


def _round_up(numbers: IntArray, multiple: IntArray | np.int32) -> IntArray:
    return -(-numbers // multiple) * multiple


def _requests(step: CommonAttentionMetadata, causal: bool) -> tuple[IntArray, IntArray]:
    """Return the columns of requests with one query, as tiles of the first group, and of those with several."""
    starts, seq_len = step.query_start_loc_cpu.numpy(), step.seq_lens_cpu.numpy()
    columns = np.zeros((len(attrs.fields(Tiles)) - 1, len(seq_len)), dtype=np.int32)
    _, _, request, first_row, position, num_queries, _, num_new, seq_lens, seq_start = columns
    request[:] = np.arange(len(seq_len))
    first_row[:], seq_lens[:] = starts[:-1], seq_len
    np.subtract(starts[1:], starts[:-1], out=num_queries)
    np.subtract(seq_len, num_queries, out=position)
    num_new[:] = num_queries
    if SEQ_STARTS in step.extensions:
        values_cpu = step.extensions[SEQ_STARTS].values_cpu
        assert values_cpu is not None
        seq_start[:] = values_cpu.numpy()
    # A causal query sees itself at least; keys of another sequence may all be hidden, or there may be none.
    attends = num_queries > 0 if causal else (num_queries > 0) & (seq_lens > seq_start)
    is_single = num_queries == 1
    if is_single.all() and attends.all():
        return columns, columns[:, :0]
    return columns[:, is_single & attends], columns[:, ~is_single & attends]


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
            stop = np.minimum(tiles.position + tiles.num_queries, stop)
            low = np.maximum(tiles.position + tiles.skip + 1 - column_of(rules, "window")[tiles.group], low)
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
