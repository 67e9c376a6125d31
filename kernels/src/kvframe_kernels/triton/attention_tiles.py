"""The first half of planning: divides a step's requests into tiles, from host arrays only.

A tile has as many consecutive queries of one request as fill a program's rows. It does not depend on the mask, so
layers with different masks share the tiles of a step. The time that NumPy takes depends on the number of its calls, so
there are few calls, each for all requests.
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
"""Fields of a work item: row in the block table, queries, position of the first query, end of the seen tokens, end of
the hidden tokens, index of the part of a tile, and blocks of tokens of a part; the last two are 0 for a whole tile."""
ALIGNMENT = 16
"""The alignment of the numbers that a kernel reads, so that Triton compiles a single variant of the kernel."""
ROWS_ALIGNED = ALIGNMENT // NUM_ITEM_FIELDS
MAX_SMALL_ROWS = 64
"""The most rows (queries times query heads of a program) for which a request is one tile of a small program."""
ZERO, ONE = np.array(0, dtype=np.int32), np.array(1, dtype=np.int32)
FIRST = np.array([0])


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The shape of a kind of programs.

    Attributes:
        block_m: Rows: queries times query heads.
        block_n: Tokens of an iteration, a power of two.
        num_warps: Warps.
        num_stages: Iterations whose loads are in flight.
        programs_per_core: Programs that a multiprocessor runs at the same time.
        min_split: The fewest tokens of a part.
        mask_all: Whether every block is masked. With few rows, masks cost nothing, and one loop is shorter than three.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_core: int
    min_split: int
    mask_all: bool


class Shape(NamedTuple):
    """Programs of one shape, and their tiles in a step.

    Attributes:
        tiling: The programs' shape.
        max_queries: The most queries of a tile.
        first: The row of their first tile.
        num_tiles: The number of their tiles.
    """

    tiling: Tiling
    max_queries: int
    first: int
    num_tiles: int


class Tiles(NamedTuple):
    """The tiles of a step.

    Attributes:
        items: ``[num_rows, 8]``: each tile as a work item, not split; read-only. Rows between the tiles of two shapes
            may be unused, and are then zeros.
        shapes: At most one shape of small programs, and one of large ones.
    """

    items: IntArray
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """A step's requests, on the host.

    Attributes:
        query_start_loc: ``[num_reqs + 1]``: the start of each request's new tokens.
        seq_lens: ``[num_reqs]``: tokens of the sequence that its queries attend to.
        seq_starts: ``[num_reqs]``: tokens before this one are hidden; None for none.
        num_tokens: Packed tokens, including padding after the requests' tokens.
        causal: Whether queries see only their own and earlier positions.
        max_query_len: The most new tokens of one request; with ``static``, the most in any batch of this graph.
        static: Whether the work's shapes must follow from the other sizes and ``max_query_len`` only.
        prompt_lens: ``[num_reqs]``: tokens of each request's prompt, for masks that keep them; None for none.
        range_ends: ``[num_tokens]``: if the batch is causal, each query also sees the later tokens before this one, the
            end of its range; 0 for none. None if there are no ranges.
    """

    query_start_loc: IntArray
    seq_lens: IntArray
    seq_starts: IntArray | None
    num_tokens: int
    causal: bool
    max_query_len: int
    static: bool = False
    prompt_lens: IntArray | None = None
    range_ends: IntArray | None = None

    @property
    def num_padding(self) -> int:
        """Packed tokens of padding."""
        return self.num_tokens - int(self.query_start_loc[-1])


def tiles_of(batch: Batch, heads: int, tilings: tuple[Tiling, ...]) -> Tiles:
    """Return the step's tiles.

    Every packed token is in one tile: padding is like a request that sees no token, and gets zeros.

    Args:
        batch: The step.
        heads: Query heads of a program.
        tilings: Shapes of programs, by ascending rows; the last one takes requests that are too long for the others.
    """
    requests = _requests(batch)
    limit = min(MAX_SMALL_ROWS, tilings[-1].block_m) // heads
    if batch.max_query_len <= limit:
        tiling = _tiling_for(batch.max_query_len * heads, tilings)
        queries_per_tile = tiling.block_m // heads
        if batch.num_padding > queries_per_tile:
            requests = np.concatenate([requests[:-1], _tile(requests[-1:], queries_per_tile, batch)])
        return Tiles(requests, (Shape(tiling, batch.max_query_len, 0, len(requests)),))
    query_lens = requests[:, NUM_QUERIES]
    is_large = query_lens > limit
    small = (~is_large).nonzero()[0]
    queries_per_tile = tilings[-1].block_m // heads
    large = _tile(requests.take(is_large.nonzero()[0], axis=0), queries_per_tile, batch)
    num_small, num_large = len(small), len(large)
    if not batch.static:
        if not num_small:
            return Tiles(large, (Shape(tilings[-1], queries_per_tile, 0, num_large),))
        limit = int(np.maximum.reduceat(query_lens.take(small), FIRST)[0])
    # The second shape's rows start at a multiple of the alignment, even if the first shape has no rows.
    first = -(-max(num_small, 1) // ROWS_ALIGNED) * ROWS_ALIGNED
    items = np.zeros((first + max(num_large, 1), NUM_ITEM_FIELDS), dtype=np.int32)
    requests.take(small, axis=0, out=items[:num_small], mode="clip")
    items[first : first + num_large] = large
    tiling = _tiling_for(limit * heads, tilings)
    return Tiles(items, (Shape(tiling, limit, 0, num_small), Shape(tilings[-1], queries_per_tile, first, num_large)))


def _tiling_for(rows: int, tilings: Sequence[Tiling]) -> Tiling:
    return next((tiling for tiling in tilings if tiling.block_m >= rows), tilings[-1])


def _requests(batch: Batch) -> IntArray:
    """Return each request with queries as a work item, ``[num_reqs, 8]``; padding is one more, which sees no token."""
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
    """Return read-only work items with only their rows in the block table set."""
    rows = np.zeros((num_rows, NUM_ITEM_FIELDS), dtype=np.int32)
    rows[:, ROW] = np.arange(num_rows)
    return rows


@lru_cache(maxsize=64)
def _decodes(num_reqs: int) -> IntArray:
    """Return read-only work items of one query each, with only their indices set."""
    rows = _rows(num_reqs).copy()
    rows[:, FIRST_QUERY] = rows[:, ROW]
    rows[:, NUM_QUERIES] = 1
    return rows


def _tile(requests: IntArray, queries_per_tile: int, batch: Batch) -> IntArray:
    """Return the tiles of some requests, ``[num_tiles, 8]``, those with the last queries of long sequences first."""
    most, less_one = _numbers(queries_per_tile)
    counts = (requests[:, NUM_QUERIES] + less_one) // most
    ends = np.add.accumulate(counts, dtype=np.int32)
    num_tiles = int(ends[-1]) if len(ends) else 0
    steps = _steps(queries_per_tile, num_tiles.bit_length())
    # Each tile is a number of steps after its request's first tile.
    requests -= steps.take(ends - counts, axis=0)
    tiles = requests.repeat(counts, axis=0)
    tiles += steps[:num_tiles]
    # The longest tiles start first, so that none is left when the others are done.
    tiles = tiles.take((-tiles[:, POSITION]).argsort(kind="stable"), axis=0)
    num_queries = tiles[:, NUM_QUERIES]
    np.minimum(num_queries, most, out=num_queries)
    if batch.causal:
        stop = tiles[:, STOP]
        np.add(tiles[:, POSITION], num_queries, out=stop)
        if batch.range_ends is not None:
            # Ranges are disjoint, so no query of a tile sees a later token than its last one.
            np.maximum(stop, batch.range_ends.take(tiles[:, FIRST_QUERY] + num_queries - ONE), out=stop)
        if batch.num_padding:
            # Padding sees no token, at any position.
            np.maximum(stop, ZERO, out=stop)
    return tiles


@lru_cache(maxsize=64)
def _numbers(queries_per_tile: int) -> tuple[IntArray, IntArray]:
    """Return ``queries_per_tile`` and ``queries_per_tile - 1`` in the form that is fastest for NumPy."""
    return np.array(queries_per_tile, dtype=np.int32), np.array(queries_per_tile - 1, dtype=np.int32)


@lru_cache(maxsize=64)
def _steps(queries_per_tile: int, num_bits: int) -> IntArray:
    """Return the differences between a work item and the ones 0, 1, 2, … tiles later, ``2 ** num_bits`` of them."""
    step = np.zeros(NUM_ITEM_FIELDS, dtype=np.int32)
    step[[FIRST_QUERY, NUM_QUERIES, POSITION]] = queries_per_tile, -queries_per_tile, queries_per_tile
    return np.arange(1 << num_bits, dtype=np.int32)[:, None] * step
