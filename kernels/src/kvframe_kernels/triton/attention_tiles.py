"""The first half of a cut: a step's requests as tiles, from host arrays only.

A tile is as many consecutive queries of one request as fill a program's rows. What a layer hides of the past changes
nothing here: layers with other masks share the tiles of a step. There are few calls: NumPy's work on a step is their
number, and each is of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

NUM_ITEM_FIELDS = 8
ROW, FIRST_QUERY, NUM_QUERIES, POSITION, STOP, START, PART, PART_BLOCKS = range(NUM_ITEM_FIELDS)
"""Of a work item: its row in the block table, the queries, the first one's position, where what they see stops and what
is hidden ends, which part of a tile it is, and blocks of tokens of a part; 0 and 0 for a tile in one piece."""
ALIGNMENT = 16
"""Numbers: where a kernel begins to read is a multiple of this, for which Triton compiles one variant of it alone."""
ROWS_ALIGNED = ALIGNMENT // NUM_ITEM_FIELDS
MAX_SMALL_ROWS = 64
"""Rows of a request, its queries times the query heads of a program, up to which it is one tile of small programs."""
ZERO, ONE = np.array(0, dtype=np.int32), np.array(1, dtype=np.int32)
FIRST = np.array([0])


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a kind of programs is shaped.

    Attributes:
        block_m: Rows: queries times query heads.
        block_n: Tokens of an iteration, a power of two.
        num_warps: Warps.
        num_stages: Iterations whose loads are in flight.
        programs_per_core: Programs that a multiprocessor runs at a time.
        min_split: Tokens of a part at least.
        mask_all: Whether every block is masked: of few rows that costs nothing, and one loop is shorter than three.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_core: int
    min_split: int
    mask_all: bool


class Shape(NamedTuple):
    """Programs of one shape, and which of a step's tiles are theirs.

    Attributes:
        tiling: The programs.
        max_queries: Queries of a tile at most.
        first: The row of their first tile.
        num_tiles: How many these are.
    """

    tiling: Tiling
    max_queries: int
    first: int
    num_tiles: int


class Tiles(NamedTuple):
    """The tiles of a step.

    Attributes:
        items: ``[num_rows, 8]``: each as a work item, in one piece; not written to. A row between those of two shapes
            may be of no tile, and then it is of zeros.
        shapes: At most one shape of small programs, and one of large ones.
    """

    items: IntArray
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """A step's requests, on the host.

    Attributes:
        query_start_loc: ``[num_reqs + 1]``: where each request's new tokens start.
        seq_lens: ``[num_reqs]``: tokens of the sequence that its queries attend to.
        seq_starts: ``[num_reqs]``: tokens before this one are hidden; None for none.
        num_tokens: Packed tokens, padding after the requests' included.
        causal: Whether queries see only their own and earlier positions.
        max_query_len: The most new tokens of one request; with ``static``, of any request in such a batch.
        static: Whether the work's shapes may follow from the other sizes and ``max_query_len`` only.
    """

    query_start_loc: IntArray
    seq_lens: IntArray
    seq_starts: IntArray | None
    num_tokens: int
    causal: bool
    max_query_len: int
    static: bool = False

    @property
    def num_padding(self) -> int:
        """Packed tokens of no request."""
        return self.num_tokens - int(self.query_start_loc[-1])


def tiles_of(batch: Batch, heads: int, tilings: tuple[Tiling, ...]) -> Tiles:
    """Return the step's tiles.

    Every packed token is in one tile: padding is a request that sees nothing, and gets zeros.

    Args:
        batch: The step.
        heads: Query heads of a program.
        tilings: Shapes of programs, by ascending rows; the last one takes what is too long for the others.
    """
    requests = _requests(batch)
    limit = min(MAX_SMALL_ROWS, tilings[-1].block_m) // heads
    if batch.max_query_len <= limit:
        tiling = _tiling_for(batch.max_query_len * heads, tilings)
        queries_per_tile = tiling.block_m // heads
        if batch.num_padding > queries_per_tile:
            requests = np.concatenate([requests[:-1], _cut(requests[-1:], queries_per_tile, batch)])
        return Tiles(requests, (Shape(tiling, batch.max_query_len, 0, len(requests)),))
    query_lens = requests[:, NUM_QUERIES]
    is_large = query_lens > limit
    small = (~is_large).nonzero()[0]
    queries_per_tile = tilings[-1].block_m // heads
    large = _cut(requests.take(is_large.nonzero()[0], axis=0), queries_per_tile, batch)
    num_small, num_large = len(small), len(large)
    if not batch.static:
        if not num_small:
            return Tiles(large, (Shape(tilings[-1], queries_per_tile, 0, num_large),))
        limit = int(np.maximum.reduceat(query_lens.take(small), FIRST)[0])
    # Some rows before the second shape's, which start at a place of the alignment, even where there are none.
    first = -(-max(num_small, 1) // ROWS_ALIGNED) * ROWS_ALIGNED
    items = np.zeros((first + max(num_large, 1), NUM_ITEM_FIELDS), dtype=np.int32)
    requests.take(small, axis=0, out=items[:num_small], mode="clip")
    items[first : first + num_large] = large
    tiling = _tiling_for(limit * heads, tilings)
    return Tiles(items, (Shape(tiling, limit, 0, num_small), Shape(tilings[-1], queries_per_tile, first, num_large)))


def _tiling_for(rows: int, tilings: Sequence[Tiling]) -> Tiling:
    return next((tiling for tiling in tilings if tiling.block_m >= rows), tilings[-1])


def _requests(batch: Batch) -> IntArray:
    """Return each request with queries as a work item, ``[num_reqs, 8]``; padding is one more, which sees nothing."""
    starts, num_reqs, num_padding = batch.query_start_loc, len(batch.seq_lens), batch.num_padding
    if not num_padding and batch.max_query_len == 1 and batch.num_tokens == num_reqs:
        requests = _decodes(num_reqs).copy()
        requests[:, POSITION] = batch.seq_lens - ONE
        requests[:, STOP] = batch.seq_lens
        if batch.seq_starts is not None:
            requests[:, START] = batch.seq_starts
        return requests
    requests = _rows(num_reqs + (num_padding > 0)).copy()
    real = requests[:num_reqs] if num_padding else requests
    real[:, FIRST_QUERY] = starts[:-1]
    real[:, NUM_QUERIES] = query_lens = starts[1:] - starts[:-1]
    real[:, POSITION] = batch.seq_lens - query_lens
    real[:, STOP] = batch.seq_lens
    if batch.seq_starts is not None:
        real[:, START] = batch.seq_starts
    if num_padding:
        requests[num_reqs, : STOP + 1] = (0, starts[-1], num_padding, -num_padding, 0)
    if np.count_nonzero(query_lens) < num_reqs:
        requests = requests.take(requests[:, NUM_QUERIES].nonzero()[0], axis=0)
    return requests


@lru_cache(maxsize=64)
def _rows(num_rows: int) -> IntArray:
    """Return work items of which nothing is said but their rows in the block table; not to be written to."""
    rows = np.zeros((num_rows, NUM_ITEM_FIELDS), dtype=np.int32)
    rows[:, ROW] = np.arange(num_rows)
    return rows


@lru_cache(maxsize=64)
def _decodes(num_reqs: int) -> IntArray:
    """Return work items of one query each, of which nothing is said but which these are; not to be written to."""
    rows = _rows(num_reqs).copy()
    rows[:, FIRST_QUERY] = rows[:, ROW]
    rows[:, NUM_QUERIES] = 1
    return rows


def _cut(requests: IntArray, queries_per_tile: int, batch: Batch) -> IntArray:
    """Return the tiles of some requests, ``[num_tiles, 8]``: the last ones of long sequences first."""
    most, less_one = _numbers(queries_per_tile)
    counts = (requests[:, NUM_QUERIES] + less_one) // most
    ends = np.add.accumulate(counts, dtype=np.int32)
    num_tiles = int(ends[-1]) if len(ends) else 0
    steps = _steps(queries_per_tile, num_tiles.bit_length())
    # Each tile is so many steps after its request's first one.
    requests -= steps.take(ends - counts, axis=0)
    tiles = requests.repeat(counts, axis=0)
    tiles += steps[:num_tiles]
    # The longest first, so that none is left over when the others are done.
    tiles = tiles.take((-tiles[:, POSITION]).argsort(kind="stable"), axis=0)
    num_queries = tiles[:, NUM_QUERIES]
    np.minimum(num_queries, most, out=num_queries)
    if batch.causal:
        stop = tiles[:, STOP]
        np.add(tiles[:, POSITION], num_queries, out=stop)
        if batch.num_padding:
            # Padding sees nothing, whatever its position.
            np.maximum(stop, ZERO, out=stop)
    return tiles


@lru_cache(maxsize=64)
def _numbers(queries_per_tile: int) -> tuple[IntArray, IntArray]:
    """Return a number and the one before it, as NumPy computes with them soonest."""
    return np.array(queries_per_tile, dtype=np.int32), np.array(queries_per_tile - 1, dtype=np.int32)


@lru_cache(maxsize=64)
def _steps(queries_per_tile: int, num_bits: int) -> IntArray:
    """Return how work items differ from another that is 0, 1, 2, … tiles before them, as many as the bits can say."""
    step = np.zeros(NUM_ITEM_FIELDS, dtype=np.int32)
    step[[FIRST_QUERY, NUM_QUERIES, POSITION]] = queries_per_tile, -queries_per_tile, queries_per_tile
    return np.arange(1 << num_bits, dtype=np.int32)[:, None] * step
