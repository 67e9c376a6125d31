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
    """

    causal: bool
    window: int
    num_sink_tokens: int
    takes_causal: bool
    group_size: int
    max_queries: int
    free_padding: int


@attrs.frozen(eq=False)
class Tiles:
    """Consecutive queries of one request each, ``[num_tiles], int32`` throughout.

    Attributes:
        segment: ``NUM_KINDS * group + kind``, where groups count from 0.
        request: The row of the batch.
        first_row: Where the tile's queries start in the packed batch.
        position: The first query's position in its request.
        num_queries: The tile's queries, at least one.
        seq_len: Tokens of the request after the step.
        seq_start: The request's first token that is not hidden.
    """

    segment: IntArray
    request: IntArray
    first_row: IntArray
    position: IntArray
    num_queries: IntArray
    seq_len: IntArray
    seq_start: IntArray

    @classmethod
    def of(cls, steps: Sequence[CommonAttentionMetadata], rules: Sequence[Rules], causal: bool) -> Tiles:
        """Return the tiles of all groups, by segment.

        Args:
            steps: Each group's metadata.
            rules: Each group's rules.
            causal: Whether queries see only their own and earlier positions.
        """
        found: dict[tuple[int, ...], list[IntArray]] = {}
        parts = []
        for step in steps:
            # Groups without a wrapper chain of their own see the very same requests.
            starts = step.extensions.get(SEQ_STARTS)
            key = (id(step.query_start_loc_cpu), id(step.seq_lens_cpu), id(starts))
            if key not in found:
                found[key] = _requests(step)
            parts.append(found[key])
        group = np.arange(len(parts), dtype=np.int32).repeat([len(part[0]) for part in parts])
        tiles = cls(NUM_KINDS * group, *(np.concatenate(column) for column in zip(*parts, strict=True)))
        if not len(tiles) or np.maximum.reduce(tiles.num_queries) == 1:
            return tiles
        return tiles._by_kind(rules, causal)._split([each.max_queries for each in rules])

    def __len__(self) -> int:
        return len(self.request)

    @property
    def group(self) -> IntArray:
        """The number of the group: ``[num_tiles], int32``."""
        return self.segment // NUM_KINDS

    def take(self, index: IntArray) -> Tiles:
        """Return the tiles at ``index``."""
        return Tiles(*(getattr(self, field.name).take(index) for field in attrs.fields(Tiles)))

    def _by_kind(self, rules: Sequence[Rules], causal: bool) -> Tiles:
        window = np.array([each.window for each in rules])[self.group]
        takes_causal = np.array([causal and each.takes_causal for each in rules])[self.group]
        # Nothing was computed before, and nothing is hidden or out of a window.
        fresh = (self.position == 0) & (self.seq_len <= window) & (self.seq_start <= 0) & takes_causal
        kind = np.where(self.num_queries == 1, DECODE, np.where(fresh, FRESH, OTHER)).astype(np.int32)
        tiles = attrs.evolve(self, segment=self.segment + kind)
        return tiles.take(tiles.segment.argsort(kind="stable"))

    def _split(self, max_queries: Sequence[int]) -> Tiles:
        """Return the tiles, other than fresh ones, cut into such of at most so many queries as their group takes."""
        is_other = self.segment % NUM_KINDS == OTHER
        limit = np.where(is_other, np.array(max_queries)[self.group], NO_LIMIT).astype(np.int32)
        counts = -(-self.num_queries // limit)
        index = np.arange(len(self)).repeat(counts)
        first = counts.cumsum() - counts
        cut, limit = self.take(index), limit[index]
        skipped = (np.arange(len(index)) - first[index]).astype(np.int32) * limit
        return attrs.evolve(
            cut,
            first_row=cut.first_row + skipped,
            position=cut.position + skipped,
            num_queries=np.minimum(cut.num_queries - skipped, limit),
        )


def _requests(step: CommonAttentionMetadata) -> list[IntArray]:
    """Return the columns of ``Tiles``, from ``request`` on, for each request with a new token."""
    starts, seq_len = step.query_start_loc_cpu.numpy(), step.seq_lens_cpu.numpy()
    first_row = starts[:-1]
    num_new = starts[1:] - first_row
    seq_start = np.zeros(len(seq_len), dtype=np.int32)
    if SEQ_STARTS in step.extensions:
        values_cpu = step.extensions[SEQ_STARTS].values_cpu
        assert values_cpu is not None
        seq_start = values_cpu.numpy()
    columns = [np.arange(len(seq_len), dtype=np.int32), first_row, seq_len - num_new, num_new, seq_len, seq_start]
    if num_new.all():
        return columns
    index = num_new.nonzero()[0]
    return [column[index] for column in columns]


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
    """Return ``[start, start + length)`` of each pair, one after the other."""
    ends = lengths.cumsum()
    places: IntArray = (starts - ends + lengths).repeat(lengths)
    places += np.arange(len(places))
    return places
