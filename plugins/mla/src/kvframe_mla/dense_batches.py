"""Groups a step's queries into dense batches that read about the same number of tokens. Host arithmetic, in NumPy.

A request's queries are one *tile*, or several tiles if all their scores would take too much memory. Tiles of one form
are one *dense batch* if their numbers of queries and of pages are within the same powers of two; it is padded to the
largest tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[Any]

ABSORBED, SQUARE, EXPANDED = range(3)
"""The forms: absorbed; expanded, for a whole causal prompt; expanded, for all other requests."""

MAX_SCORES = 1 << 23
"""The most scores of an absorbed dense batch with more than one query: bounds their memory."""

MAX_BATCH_TOKENS = 1 << 16
"""The most gathered tokens of a dense batch of more than one tile: bounds the memory of the gathered copy."""

SMALL_PAGES_TOKENS = 256
"""Requests shorter than this share a dense batch for any lengths: padding costs less than another dense batch."""


@attrs.frozen(eq=False)
class Tiles:
    """Consecutive queries of one request each, ``[num_tiles], int64`` throughout.

    Attributes:
        form: ``ABSORBED``, ``SQUARE`` or ``EXPANDED``.
        request: The row of the batch.
        first_row: The start of the queries in the packed batch.
        position: The first query's position in its request.
        num_queries: The number of queries, at least one.
        low: The first token that they see.
        stop: The token after the last one that any of them sees.
        first_page: The block of ``low``.
        num_pages: Blocks from there to ``stop``.
    """

    form: IntArray
    request: IntArray
    first_row: IntArray
    position: IntArray
    num_queries: IntArray
    low: IntArray
    stop: IntArray
    first_page: IntArray
    num_pages: IntArray

    def take(self, index: IntArray) -> Tiles:
        """Return the tiles at ``index``."""
        return Tiles(*(getattr(self, field.name)[index] for field in attrs.fields(Tiles)))

    def split(self, num_heads: int, block_size: int) -> Tiles:
        """Return the tiles; absorbed ones are split so that the scores of each are bounded."""
        # At least one query per tile: its scores are fewer elements than the latents that it reads.
        limit = np.maximum(MAX_SCORES // (num_heads * self.num_pages * block_size), 1)
        limit = np.where(self.form == ABSORBED, limit, self.num_queries)
        counts = -(-self.num_queries // limit)
        index = np.arange(len(counts)).repeat(counts)
        skipped = (np.arange(len(index)) - (counts.cumsum() - counts)[index]) * limit[index]
        taken = self.take(index)
        return attrs.evolve(
            taken,
            first_row=taken.first_row + skipped,
            position=taken.position + skipped,
            num_queries=np.minimum(taken.num_queries - skipped, limit[index]),
        )


@attrs.frozen(eq=False)
class HostDenseBatch:
    """Tiles that are computed as one dense batch, on the host.

    Attributes:
        form: Their form.
        num_queries: Queries per tile; shorter tiles repeat their last one.
        num_pages: Pages per tile; shorter tiles repeat their last one.
        query_rows: ``[num_tiles * num_queries]``: rows of the packed batch.
        outputs: ``[num_outputs]``: the queries that are not repetitions.
        last_seen: ``[num_tiles, num_queries]``: the last token that a query sees, counted from the first token that the
            tile gathers.
        low: ``[num_tiles]``: the first token that its queries see, counted likewise.
        page_rows: ``[num_tiles * num_pages]``: the batch's rows whose block tables hold the pages.
        page_columns: ``[num_tiles * num_pages]``: the columns of these rows.
        hidden: ``[num_hidden]``: gathered tokens that no query of their tile sees; they may hold anything.
    """

    form: int
    num_queries: int
    num_pages: int
    query_rows: IntArray
    outputs: IntArray
    last_seen: IntArray
    low: IntArray
    page_rows: IntArray
    page_columns: IntArray
    hidden: IntArray


def group_tiles(tiles: Tiles, num_heads: int, block_size: int) -> Iterator[Tiles]:
    """Yield the tiles of each dense batch.

    Args:
        tiles: The step's tiles.
        num_heads: Query heads.
        block_size: Tokens per block.
    """
    small = max(1, SMALL_PAGES_TOKENS // block_size)
    kinds = tiles.form * 64 + np.frexp((tiles.num_pages - 1) // small)[1]
    kinds = kinds * 64 + np.frexp(tiles.num_queries - 1)[1]
    tiles = tiles.take(np.argsort(kinds, kind="stable"))
    kinds = np.sort(kinds)
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    for start, stop in itertools.pairwise(edges):
        part = slice(start, stop)
        num_tokens = int(tiles.num_pages[part].max()) * block_size
        most = most_tiles(int(tiles.form[start]), int(tiles.num_queries[part].max()), num_tokens, num_heads)
        for first in range(start, stop, most):
            yield tiles.take(np.arange(first, min(first + most, stop)))


def most_tiles(form: int, num_queries: int, num_tokens: int, num_heads: int) -> int:
    """Return how many tiles a dense batch may have, at least one.

    Args:
        form: Their form.
        num_queries: Queries of each.
        num_tokens: Tokens that each gathers.
        num_heads: Query heads.
    """
    most = MAX_BATCH_TOKENS // num_tokens
    if form == ABSORBED:
        most = min(most, MAX_SCORES // (num_queries * num_heads * num_tokens))
    return max(1, most)


def lay_out(tiles: Tiles, block_size: int, range_ends: IntArray | None = None) -> HostDenseBatch:
    """Return the dense batch of these tiles.

    Args:
        tiles: Tiles of one form.
        block_size: Tokens per block.
        range_ends: ``[num_tokens]``: where the range of each packed token ends, which it sees whole; 0 for none.
    """
    num_queries, num_pages = int(tiles.num_queries.max()), int(tiles.num_pages.max())
    places = np.arange(num_queries)
    own = np.minimum(places, tiles.num_queries[:, None] - 1)
    start = tiles.first_page * block_size
    columns = tiles.first_page[:, None] + np.minimum(np.arange(num_pages), tiles.num_pages[:, None] - 1)
    tokens = start[:, None] + np.arange(num_pages * block_size)
    query_rows, last_seen = tiles.first_row[:, None] + own, tiles.position[:, None] + own
    if range_ends is not None:
        last_seen = np.maximum(last_seen, range_ends[query_rows] - 1)
    return HostDenseBatch(
        form=int(tiles.form[0]),
        num_queries=num_queries,
        num_pages=num_pages,
        query_rows=query_rows.reshape(-1),
        outputs=np.flatnonzero(places < tiles.num_queries[:, None]),
        last_seen=last_seen - start[:, None],
        low=tiles.low - start,
        page_rows=tiles.request.repeat(num_pages),
        page_columns=columns.reshape(-1),
        hidden=np.flatnonzero((tokens < tiles.low[:, None]) | (tokens >= tiles.stop[:, None])),
    )
