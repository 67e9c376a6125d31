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

from kvframe.builtin.torch_cut import cut_batches
from kvframe.builtin.torch_tiles import ALIGNED, FRESH, NUM_KINDS, IntArray, Rules, Spans, Tiles, column_of, ranges
from kvframe.contract.metadata import CommonAttentionMetadata


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
        groups: ``[num_pieces]``: the group of each piece.
        kinds: ``[num_pieces]``: the kind of its tiles.
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
    groups: IntArray
    kinds: IntArray
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
        tiles = Tiles.of(steps, rules, causal, block_size)
        if not len(tiles):
            return None
        spans = Spans.of(tiles, rules, causal, block_size)
        segment = NUM_KINDS * tiles.group + tiles.kind
        order, bounds = cut_batches(
            segment, _shapes(tiles, spans, block_size), tiles.num_queries, spans.num_pages * block_size, rules
        )
        if order is not None:
            tiles, spans = tiles.take(order), spans.take(order)
        starts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
        widths = np.maximum.reduceat(spans.num_pages, starts)
        width = widths.repeat(counts)
        kinds = tiles.kind[starts]
        is_fresh = kinds == FRESH
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
            groups=tiles.group[starts],
            kinds=kinds,
            first_page=width.cumsum(dtype=np.int32) - width,
            padding=padding,
            lead=np.where(is_fresh.repeat(counts), np.int32(0), padding) if is_fresh.any() else padding,
        )

    @property
    def num_pages(self) -> IntArray:
        """The pages that each piece gathers: ``[num_pieces]``."""
        return self.counts * self.widths

    def per_piece(self, numbers: IntArray) -> IntArray:
        """Return the sums of the tiles' numbers: ``[num_pieces]``."""
        found: IntArray = np.add.reduceat(numbers, self.starts)
        return found

    def padded_pages(self) -> IntArray:
        """Return the pages that repeat the one before them: ``[num_padded]``."""
        padded = self.padding.nonzero()[0]
        num_read = np.where(self.lead[padded] > 0, 1, self.spans.num_pages[padded])
        return ranges(self.first_page[padded] + num_read, self.padding[padded])

    def page_index(self, row_starts: IntArray, padded_pages: IntArray) -> IntArray:
        """Return where each page's id stands: ``[num_pages], int32``.

        Args:
            row_starts: ``[num_tiles], int32``: where the row of each tile's request starts in its block table.
            padded_pages: What ``padded_pages`` returned.
        """
        spans, first_page = self.spans, self.first_page
        first = spans.first
        # Pages stand one behind the other, so that the index follows from where this is not so.
        step = np.ones(int(first_page[-1]) + int(self.widths[-1]), dtype=np.int32)
        step[padded_pages] = 0
        if spans.num_sinks is not None and spans.first_sink is not None:
            tile = spans.num_sinks.nonzero()[0]
            num_sinks, first_sink = spans.num_sinks[tile], spans.first_sink[tile]
            step[(first_page + self.lead)[tile] + num_sinks] += first[tile] - first_sink - num_sinks
            first = np.where(spans.num_sinks > 0, spans.first_sink, first)
        jump = row_starts + first
        jump[1:] -= (row_starts + (spans.top - 1))[:-1]
        step[first_page] = jump
        return step.cumsum(dtype=np.int32)

    def key_positions(self, padded_pages: IntArray) -> IntArray:
        """Return the position of each gathered token in its request: ``[num_keys], int32``.

        Args:
            padded_pages: What ``padded_pages`` returned; their tokens are those of the page that they repeat.
        """
        blocks = self.page_index(np.zeros_like(self.first_page), padded_pages)
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
            ``[num_hidden]``, piece after piece, ascending in each and counted from its first; and how many of them lie
            in each piece: ``[num_pieces]``.
        """
        spans, size = self.spans, self.block_size
        start = (self.first_page - self.first_page[self.starts].repeat(self.counts)) * size
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
        lengths = lengths.ravel()
        return ranges(begins.ravel(), lengths), np.add.reduceat(lengths, num_ranges * self.starts)

    def aligned(self) -> IntArray:
        """Return what the masks of aligned tiles are made of: ``[num_aligned_pieces, 5]``.

        These are the piece, its group, the queries of each tile, the tokens behind the last one's own up to the end of
        the page, and the gathered tokens of each tile.
        """
        piece = (self.kinds == ALIGNED).nonzero()[0]
        tile, queries = self.starts[piece], self.queries[piece]
        behind = self.spans.top[tile] * self.block_size - self.tiles.position[tile] - queries
        return np.stack((piece, self.groups[piece], queries, behind, self.widths[piece] * self.block_size), axis=1)

    def sink_columns(self) -> IntArray | None:
        """Return the place in each tile's share behind its sinks: ``[num_tiles]``; None without any sinks."""
        if self.spans.first_sink is None:
            return None
        return self._behind_sinks(self.lead * self.block_size)

    def _behind_sinks(self, real: IntArray) -> IntArray:
        """Return the place behind each tile's sinks, for ``real``, where its own pages start."""
        assert self.spans.first_sink is not None
        num_tokens = column_of(self.rules, "num_sink_tokens")[self.tiles.group]
        behind: IntArray = real + num_tokens - self.spans.first_sink * self.block_size
        return behind

    def query_rows(self) -> QueryRows:
        """Return the rows of the packed batch that the pieces read and write."""
        tiles = self.tiles
        if np.maximum.reduce(self.queries) == 1:
            rows = tiles.first_row.astype(np.int64)
            return QueryRows(rows, None, self.counts, _first_rows(rows, self.counts))
        num_queries = self.queries.repeat(self.counts)
        rows, first = ranges(tiles.first_row, num_queries), tiles.first_row + tiles.skip
        last = first + tiles.num_new - 1
        clipped = np.minimum(np.maximum(rows, first.repeat(num_queries)), last.repeat(num_queries))
        sizes = self.counts * self.queries
        return QueryRows(clipped, np.where(rows == clipped, rows + 1, 0), sizes, _first_rows(clipped, sizes))

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


def _shapes(tiles: Tiles, spans: Spans, block_size: int) -> IntArray | None:
    """Return equal numbers for aligned tiles that one mask may serve: ``[num_tiles]``; None where there are none.

    They have equally many queries, equally far from the last page's end. And what lies before the first token that they
    see is hidden by a window, so that it may be padding, or there is none.
    """
    aligned = tiles.kind == ALIGNED
    if not aligned.any():
        return None
    behind = spans.top * block_size - tiles.position - tiles.num_queries
    pages = np.where(spans.low > 0, 0, spans.num_pages.astype(np.int64))
    shape = (tiles.num_queries * (pages.max() + 1) + pages) * block_size + behind
    found: IntArray = np.where(aligned, shape, 0)
    return found


def _first_rows(rows: IntArray, sizes: IntArray) -> IntArray:
    """Return the first row of each piece whose rows follow one another, -1 for others: ``[num_pieces]``."""
    starts = sizes.cumsum() - sizes
    leaps = np.empty(len(rows), dtype=np.bool_)
    np.not_equal(rows[1:], rows[:-1] + 1, out=leaps[1:])
    leaps[starts] = False
    return np.where(np.logical_or.reduceat(leaps, starts), -1, rows[starts])


@attrs.frozen(eq=False)
class QueryRows:
    """What the pieces read and write.

    Attributes:
        read: ``[num_rows], int64``: rows of the packed batch, for each query of each tile.
        written: ``[num_rows], int64``: those behind them, 0 for a query that is repeated; None where none is.
        sizes: ``[num_pieces]``: how many belong to each piece.
        first: ``[num_pieces]``: the first row of a piece whose rows follow one another; -1 for another.
    """

    read: IntArray
    written: IntArray | None
    sizes: IntArray
    first: IntArray
