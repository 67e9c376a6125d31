"""What the tiles of all batches gather: flat arrays, batch after batch, on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvframe_torch.tiles import BoolArray, GroupLimits, IntArray, Tiles


class Ragged(NamedTuple):
    """The rows of a ragged array.

    Attributes:
        values: All rows, one after the other.
        lengths: ``[num_rows]``: the length of each.
    """

    values: IntArray
    lengths: IntArray

    def split(self) -> Sequence[torch.Tensor]:
        """Return the rows as tensors, views of one."""
        rows: Sequence[torch.Tensor] = torch.from_numpy(self.values).split(self.lengths.tolist())
        return rows


class GatheredBatch(NamedTuple):
    """One batch.

    Attributes:
        group: Its group.
        num_tiles: Its tiles.
        num_queries: Queries of each tile; a tile with fewer repeats its last one.
        num_pages: Pages of each tile; a tile with fewer repeats one of them.
        is_prompt: Whether its tiles are whole prompts without a mask.
        first_row: The first of the packed tokens that are its queries, or -1 if these do not follow one another.
        rows: ``[num_tiles * num_queries], int64, host``: for each query, its packed token.
        output_rows: Likewise, the row of its result: one after all packed tokens for a query that is repeated.
        positions: Likewise, its position in its request.
        places: ``[num_tiles * num_pages], int64, host``: for each page, its place in the flattened block table.
        hidden: ``[num_hidden], int64, host``: the gathered tokens that no query of their tile sees, counted from the
            batch's first one.
        dead: ``[num_dead], int64, host``: those of them that may hold anything, NaN included.
    """

    group: int
    num_tiles: int
    num_queries: int
    num_pages: int
    is_prompt: bool
    first_row: int
    rows: torch.Tensor
    output_rows: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    hidden: torch.Tensor
    dead: torch.Tensor


def gather(tiles: Tiles, bounds: IntArray, limits: GroupLimits) -> Iterator[GatheredBatch]:
    """Yield what each batch gathers.

    Args:
        tiles: At least one tile, batch after batch.
        bounds: ``[num_batches + 1]``: where each batch begins, and the end.
        limits: Of the tiles' groups.
    """
    first, num_tiles = bounds[:-1], bounds[1:] - bounds[:-1]
    num_queries = np.maximum.reduceat(tiles.num_queries, first)
    num_pages = np.maximum.reduceat(tiles.num_pages, first)
    widths = num_pages.repeat(num_tiles)
    hidden, dead = _unseen(tiles, widths, bounds, limits)
    first_rows, *of_rows = _rows(tiles, num_queries, num_tiles, limits)
    ints = (tiles.group[first], num_tiles, num_queries, num_pages, tiles.is_prompt[first], first_rows)
    tensors = (*of_rows, Ragged(_places(tiles, widths, limits), num_tiles * num_pages), hidden, dead)
    yield from map(GatheredBatch, *(each.tolist() for each in ints), *(each.split() for each in tensors))


def _rows(
    tiles: Tiles, num_queries: IntArray, num_tiles: IntArray, limits: GroupLimits
) -> tuple[IntArray, Ragged, Ragged, Ragged]:
    """Return each batch's first row or -1, and of each query its packed token, the row of its result, its position."""
    rows = output_rows = tiles.first_row
    positions, lengths = tiles.position, num_tiles * num_queries
    if num_queries.max() > 1:
        widths = num_queries.repeat(num_tiles)
        tile = np.arange(len(tiles)).repeat(widths)
        query, last = np.arange(len(tile)) - (widths.cumsum() - widths)[tile], (tiles.num_queries - 1)[tile]
        own = np.minimum(query, last)
        rows, positions = tiles.first_row[tile] + own, tiles.position[tile] + own
        output_rows = np.where(query > last, limits.num_tokens[tiles.group][tile], rows)
    num_gaps = np.concatenate(([0], (rows[1:] != rows[:-1] + 1).cumsum()))
    ends = lengths.cumsum()
    first_rows = np.where(num_gaps[ends - 1] == num_gaps[ends - lengths], rows[ends - lengths], -1)
    return first_rows, Ragged(rows, lengths), Ragged(output_rows, lengths), Ragged(positions, lengths)


def _places(tiles: Tiles, widths: IntArray, limits: GroupLimits) -> IntArray:
    """Return the places in the block table of each tile's pages, padded to ``widths``.

    Sink pages come first. Padding repeats a page of its tile, which holds tokens of the same request: one of which each
    token is seen, if there is one.
    """
    first_place = tiles.request * limits.table_width[tiles.group]
    begins = widths.cumsum() - widths
    places: IntArray = (first_place + tiles.first_page - tiles.num_sinks - begins).repeat(widths)
    places += np.arange(len(places))
    if tiles.num_sinks.any():
        places[_ranges(begins, tiles.num_sinks)] += (tiles.first_sink + tiles.num_sinks - tiles.first_page).repeat(
            tiles.num_sinks
        )
    num_padding = widths - tiles.num_pages
    if num_padding.any():
        first_page = np.where(tiles.num_sinks > 0, tiles.first_sink, tiles.first_page)
        repeated = first_place + np.where(_has_inner_page(tiles), tiles.first_page + 1, first_page)
        places[_ranges(begins + tiles.num_pages, num_padding)] = repeated.repeat(num_padding)
    return places


def _unseen(tiles: Tiles, widths: IntArray, bounds: IntArray, limits: GroupLimits) -> tuple[Ragged, Ragged]:
    """Return the gathered tokens that no query of their tile sees, and those of them that may hold anything.

    What a tile sees is one run of tokens, or two with sink tokens: few numbers say what is around them.
    """
    first, block_size = bounds[:-1], limits.block_size[tiles.group]
    stops = widths * block_size
    offsets = stops.cumsum() - stops
    offsets = offsets - offsets[first].repeat(bounds[1:] - first)
    shift = (tiles.num_sinks - tiles.first_page) * block_size
    low, stop = tiles.low + shift, tiles.stop + shift
    begins, ends = [offsets, offsets + stop], [offsets + low, offsets + stops]
    if limits.num_sink_tokens.any():
        sink_stop = np.minimum(tiles.stop, (limits.num_sink_tokens * limits.causal)[tiles.group])
        is_read, first_sink = sink_stop > tiles.start, tiles.first_sink * block_size
        sees_from = np.where(is_read, tiles.start - first_sink, 0)
        sees_to = np.where(is_read, sink_stop - first_sink, 0)
        begins = [offsets, offsets + sees_to, offsets + stop]
        ends = [offsets + sees_from, offsets + np.maximum(sees_to, low), offsets + stops]
    hidden = _merged(begins, ends, first)
    # Padding is a page of which each token is seen, or is taken for dead.
    last = np.where(_has_inner_page(tiles), tiles.num_pages * block_size, stops)
    if (last == stops).all():
        return hidden, hidden
    return hidden, _merged(begins, [*ends[:-1], offsets + last], first)


def _has_inner_page(tiles: Tiles) -> BoolArray:
    """Return of each tile whether a page lies between the first and the last one that it sees without a gap."""
    has: BoolArray = tiles.num_pages - tiles.num_sinks > 2
    return has


def _merged(begins: Sequence[IntArray], ends: Sequence[IntArray], first: IntArray) -> Ragged:
    """Return the numbers in some ranges of each tile, tile after tile.

    Args:
        begins: ``[num_tiles]`` for each range of a tile: its first number.
        ends: Likewise, the number after its last one.
        first: Each batch's first tile.
    """
    starts = np.stack(begins, axis=1)
    lengths = np.stack(ends, axis=1) - starts
    return Ragged(_ranges(starts.ravel(), lengths.ravel()), np.add.reduceat(lengths.sum(axis=1), first))


def _ranges(begins: IntArray, counts: IntArray) -> IntArray:
    """Return the numbers of many ranges, given their first numbers and their lengths."""
    ends = counts.cumsum()
    numbers: IntArray = (begins - ends + counts).repeat(counts)
    numbers += np.arange(len(numbers))
    return numbers
