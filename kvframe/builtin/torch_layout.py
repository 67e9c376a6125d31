"""Host arithmetic of the practical torch backend: what the dense batches of all groups gather, hide and write.

Tokens that are gathered are counted through all pieces: piece after piece, tile after tile, page after page. A tile's
pages are read upwards and stand at the end of its share; what lies before them is padding, which repeats the first
one. So its last token stands at the same place as those of its piece's other tiles, and pages at the far end of its
past are repeated: as a rule such that its queries see all of. A causal square stands at the start of its share.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from kvframe.attention.metadata import CommonAttentionMetadata
from kvframe.builtin.torch_cut import cut_batches
from kvframe.builtin.torch_tiles import FRESH, NUM_KINDS, IntArray, Rules, Spans, Tiles, ranges


@attrs.frozen(eq=False)
class Layout:
    """The pieces of all groups of one block size.

    Attributes:
        tiles: The tiles of all pieces, in order.
        spans: What they read.
        rules: Each group's rules.
        block_size: Tokens per block.
        starts: ``[num_pieces]``: each piece's first tile.
        counts: ``[num_pieces]``: its tiles.
        widths: ``[num_pieces]``: pages of each of them.
        queries: ``[num_pieces]``: queries of each of them, repeated ones included.
        groups: The group of each piece.
        is_fresh: Whether a piece's tiles are causal squares.
        first_page: ``[num_tiles]``: where each tile's share starts among all pages.
        padding: ``[num_tiles]``: pages of it that are repeated.
        lead: ``[num_tiles]``: how many of these stand at its start.
    """

    tiles: Tiles
    spans: Spans
    rules: Sequence[Rules]
    block_size: int
    starts: IntArray
    counts: IntArray
    widths: IntArray
    queries: IntArray
    groups: list[int]
    is_fresh: list[bool]
    first_page: IntArray
    padding: IntArray
    lead: IntArray

    @classmethod
    def of(
        cls, steps: Sequence[CommonAttentionMetadata], rules: Sequence[Rules], causal: bool, block_size: int
    ) -> Layout | None:
        """Return the layout of groups of one block size; None where no request has a new token.

        Args:
            steps: Each group's metadata.
            rules: Each group's rules.
            causal: Whether queries see only their own and earlier positions.
            block_size: Tokens per block.
        """
        tiles = Tiles.of(steps, rules, causal)
        if not len(tiles):
            return None
        spans = Spans.of(tiles, rules, causal, block_size)
        segment = NUM_KINDS * tiles.group + tiles.kind
        free_padding = np.array([each.free_padding for each in rules])[tiles.group]
        biased_heads = np.array([each.biased_heads for each in rules])[tiles.group]
        piece_keys = np.array([each.piece_keys for each in rules])[tiles.group]
        num_keys = spans.num_pages * block_size
        order, bounds = cut_batches(segment, tiles.num_queries, num_keys, free_padding, biased_heads, piece_keys)
        if order is not None:
            tiles, spans = tiles.take(order), spans.take(order)
        starts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
        widths = np.maximum.reduceat(spans.num_pages, starts)
        width = widths.repeat(counts)
        is_fresh = tiles.kind[starts] == FRESH
        padding = width - spans.num_pages
        return cls(
            tiles=tiles,
            spans=spans,
            rules=rules,
            block_size=block_size,
            starts=starts,
            counts=counts,
            widths=widths,
            queries=np.maximum.reduceat(tiles.num_queries, starts),
            groups=tiles.group[starts].tolist(),
            is_fresh=is_fresh.tolist(),
            first_page=width.cumsum(dtype=np.int32) - width,
            padding=padding,
            lead=np.where(is_fresh.repeat(counts), np.int32(0), padding) if is_fresh.any() else padding,
        )

    def group_pages(self) -> list[int]:
        """Return the number of pages that each group reads."""
        found = [0] * len(self.rules)
        for group, num_pages in zip(self.groups, (self.counts * self.widths).tolist(), strict=True):
            found[group] += num_pages
        return found

    def padded_pages(self) -> IntArray:
        """Return the pages that repeat the one before them: ``[num_padded]``."""
        padded = self.padding.nonzero()[0]
        num_read = np.where(self.lead[padded] > 0, 1, self.spans.num_pages[padded])
        return ranges(self.first_page[padded] + num_read, self.padding[padded])

    def page_index(self, row_strides: Sequence[int], padded_pages: IntArray) -> IntArray:
        """Return where in its group's block table each page's id stands: ``[num_pages], int32``.

        Args:
            row_strides: From one row of each group's block table to the next.
            padded_pages: What ``padded_pages`` returned.
        """
        spans, first_page = self.spans, self.first_page
        row = self.tiles.request * np.array(row_strides, dtype=np.int32)[self.tiles.group]
        first = spans.first
        # Pages stand one behind the other, so that the index follows from where this is not so.
        step = np.ones(int(first_page[-1]) + int(self.widths[-1]), dtype=np.int32)
        step[padded_pages] = 0
        if spans.num_sinks is not None and spans.first_sink is not None:
            tile = spans.num_sinks.nonzero()[0]
            num_sinks, first_sink = spans.num_sinks[tile], spans.first_sink[tile]
            step[(first_page + self.lead)[tile] + num_sinks] += first[tile] - first_sink - num_sinks
            first = np.where(spans.num_sinks > 0, spans.first_sink, first)
        jump = row + first
        jump[1:] -= (row + (spans.top - 1))[:-1]
        step[first_page] = jump
        return step.cumsum(dtype=np.int32)

    def key_positions(self, padded_pages: IntArray) -> IntArray:
        """Return the position of each gathered token in its request: ``[num_keys], int32``.

        Args:
            padded_pages: What ``padded_pages`` returned; their tokens are those of the page that they repeat.
        """
        blocks = self.page_index([0] * len(self.rules), padded_pages)
        tokens = np.arange(self.block_size, dtype=np.int32)
        positions: IntArray = (blocks[:, None] * np.int32(self.block_size) + tokens).ravel()
        return positions

    def query_positions(self, rows: IntArray) -> IntArray:
        """Return the position of each query in its request: ``[num_rows], int32``.

        Args:
            rows: The rows of ``query_rows``.
        """
        shift = self.tiles.position - self.tiles.first_row
        positions: IntArray = (rows + shift.repeat(self.queries.repeat(self.counts))).astype(np.int32)
        return positions

    def hidden_tokens(self) -> tuple[IntArray, IntArray]:
        """Return the gathered tokens that no query of their tile sees and that may hold anything.

        Returns:
            ``[num_hidden]``, ascending; and how many of them lie in each piece: ``[num_pieces]``.
        """
        spans, size = self.spans, self.block_size
        start = self.first_page * size
        real = start + self.lead * size
        end = real + spans.num_pages * size
        before = end - spans.top * size  # Where the request's first token would stand, were all its blocks read.
        stop, low = before + spans.stop, before + spans.low
        num_ranges = 2 if spans.first_sink is None else 3
        begins, ends = np.empty((2, len(start), num_ranges), dtype=np.int32)
        begins[:, -1], ends[:, -1] = stop, end + (self.padding - self.lead) * size
        ends[:, -2] = low
        sees_first_page = (low <= real) & (stop >= real + size)
        if spans.first_sink is not None:
            first_sink = np.maximum(real + self.tiles.seq_start - spans.first_sink * size, real)
            behind_sinks = np.maximum(self._behind_sinks(real), first_sink)
            ends[:, 0], begins[:, 1] = np.minimum(first_sink, low), behind_sinks
            sees_first_page = (ends[:, 0] <= real) & (stop >= real + size)
            sees_first_page &= (behind_sinks >= low) | (behind_sinks >= real + size)
        # What repeats a page for padding is hidden in whole where any token of that page is.
        begins[:, 0] = np.where(sees_first_page, real, start)
        lengths = np.maximum(ends - begins, 0)
        return ranges(begins.ravel(), lengths.ravel()), np.add.reduceat(lengths.sum(1), self.starts)

    def sink_columns(self) -> IntArray | None:
        """Return the place in each tile's share behind its sinks: ``[num_tiles]``; None without any sinks."""
        if self.spans.first_sink is None:
            return None
        return self._behind_sinks(self.lead * self.block_size)

    def _behind_sinks(self, real: IntArray) -> IntArray:
        """Return the place behind each tile's sinks, for ``real``, where its own pages start."""
        assert self.spans.first_sink is not None
        num_tokens = np.array([each.num_sink_tokens for each in self.rules], dtype=np.int32)[self.tiles.group]
        behind: IntArray = real + num_tokens - self.spans.first_sink * self.block_size
        return behind

    def query_rows(self) -> QueryRows:
        """Return the rows of the packed batch that the pieces read."""
        tiles, first = self.tiles, self.tiles.first_row
        if np.maximum.reduce(self.queries) == 1:
            return QueryRows(first.astype(np.int64), self.counts, None)
        num_queries = self.queries.repeat(self.counts)
        rows, last = ranges(first, num_queries), (first + tiles.num_queries - 1).repeat(num_queries)
        is_new = rows <= last
        sizes, num_new = self.counts * self.queries, np.add.reduceat(tiles.num_queries, self.starts)
        index = is_new.nonzero()[0]
        clipped = np.minimum(rows, last)
        return QueryRows(
            rows=clipped,
            sizes=sizes,
            uneven=UnevenRows(clipped[index], index - (sizes.cumsum() - sizes).repeat(num_new), num_new),
        )

    def query_columns(self, rows: IntArray) -> IntArray:
        """Return where each query's own token stands in its tile's share: ``[num_rows]``.

        Args:
            rows: The rows of ``query_rows``.
        """
        tiles, spans, size = self.tiles, self.spans, self.block_size
        stop = (self.lead + spans.num_pages - spans.top) * size + spans.stop
        shift = stop - tiles.num_queries - tiles.first_row
        columns: IntArray = rows + shift.repeat(self.queries.repeat(self.counts))
        return columns


@attrs.frozen(eq=False)
class UnevenRows:
    """What the pieces write where tiles repeat their last query.

    Attributes:
        rows: ``[num_outputs], int64``: rows of the packed batch.
        index: ``[num_outputs], int64``: the row of its piece that holds each.
        sizes: ``[num_pieces]``: how many belong to each piece.
    """

    rows: IntArray
    index: IntArray
    sizes: IntArray


@attrs.frozen(eq=False)
class QueryRows:
    """What the pieces read and write.

    Attributes:
        rows: ``[num_rows], int64``: rows of the packed batch, for each query of each tile.
        sizes: ``[num_pieces]``: how many belong to each piece.
        uneven: What they write, where tiles may repeat queries; None where all have one.
    """

    rows: IntArray
    sizes: IntArray
    uneven: UnevenRows | None
