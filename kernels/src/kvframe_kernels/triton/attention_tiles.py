"""The first half of a cut: a step's requests as tiles, from host arrays only.

A tile is as many consecutive queries of one request as fill a program's rows. What a layer hides of the past changes
nothing here: layers with other masks share the tiles of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
IntArray = npt.NDArray[np.int32]

NUM_ITEM_FIELDS = 8
ROW, FIRST_QUERY, NUM_QUERIES, POSITION, STOP, START, PART, PART_BLOCKS = range(NUM_ITEM_FIELDS)
"""Of a work item: its row in the block table, the queries, the first one's position, where what they see stops and what
is hidden ends, which part of a tile it is, and blocks of tokens of a part; 0 and 0 for a tile in one piece."""
MAX_SMALL_ROWS = 64
"""Rows of a request, its queries times the query heads of a program, up to which it is one tile of small programs."""


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


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of a step for programs of one shape.

    Attributes:
        tiling: The programs.
        queries_per_tile: Queries of a tile at most.
        items: ``[num_tiles, 8]``: each as a work item, in one piece; not written to.
    """

    tiling: Tiling
    queries_per_tile: int
    items: IntArray


@dataclass(frozen=True, eq=False)
class Batch:
    """A step's requests, on the host.

    Attributes:
        query_start_loc: ``[num_reqs + 1]``: where each request's new tokens start.
        seq_lens: ``[num_reqs]``: tokens of the sequence that its queries attend to.
        seq_starts: ``[num_reqs]``: tokens before this one are hidden; None for none.
        num_tokens: Packed tokens, padding behind the requests' included.
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
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_padding(self) -> int:
        """Packed tokens of no request."""
        return self.num_tokens - int(self.query_start_loc[-1])

    def tiles(self, heads: int, tilings: tuple[Tiling, ...]) -> Sequence[Tiles]:
        """Return the step's tiles, for at most one shape of small programs and one of large ones; made once.

        Every packed token is in one tile: padding is a request that sees nothing, and gets zeros.

        Args:
            heads: Query heads of a program.
            tilings: Shapes of programs, by ascending rows; the last one takes what is too long for the others.
        """
        return self.once(("tiles", heads, tilings), lambda: _tiles_of(self, heads, tilings))

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made of the batch under this key; made at the first call."""
        if key not in self._kept:
            self._kept[key] = make()
        found: T = self._kept[key]
        return found


def _tiles_of(batch: Batch, heads: int, tilings: tuple[Tiling, ...]) -> list[Tiles]:
    requests = _requests(batch)
    query_lens = requests[:, NUM_QUERIES]
    # A request of so many queries at most is one tile, but for the padding.
    limit = min(MAX_SMALL_ROWS, tilings[-1].block_m) // heads
    if batch.max_query_len <= limit:
        tiling = _tiling_for(batch.max_query_len * heads, tilings)
        most = max(batch.max_query_len, batch.num_padding)
        return [_cut(requests, most, heads, tiling, batch.causal)]
    is_small = query_lens <= limit
    small = requests.take(is_small.nonzero()[0], axis=0)
    large = requests.take((~is_small).nonzero()[0], axis=0)
    if not batch.static:
        limit = int(np.maximum.reduce(small[:, NUM_QUERIES], initial=0))
    found = []
    if limit:
        found.append(_cut(small, limit, heads, _tiling_for(limit * heads, tilings), batch.causal))
    found.append(_cut(large, batch.num_tokens, heads, tilings[-1], batch.causal))
    return found


def _tiling_for(rows: int, tilings: Sequence[Tiling]) -> Tiling:
    return next((tiling for tiling in tilings if tiling.block_m >= rows), tilings[-1])


def _requests(batch: Batch) -> IntArray:
    """Return each request with queries as a work item, ``[num_reqs, 8]``; padding is one more, which sees nothing."""
    starts, num_reqs, num_padding = batch.query_start_loc, len(batch.seq_lens), batch.num_padding
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


def _cut(requests: IntArray, most: int, heads: int, tiling: Tiling, causal: bool) -> Tiles:
    """Return some requests, of so many queries at most, as tiles of programs of one shape."""
    queries_per_tile = tiling.block_m // heads
    if most <= queries_per_tile:
        return Tiles(tiling, queries_per_tile, requests)
    counts = (requests[:, NUM_QUERIES] + (queries_per_tile - 1)) // queries_per_tile
    index = np.arange(len(counts)).repeat(counts)
    first_tile = np.add.accumulate(counts, dtype=np.int32) - counts
    skipped = (np.arange(len(index), dtype=np.int32) - first_tile.take(index)) * queries_per_tile
    position = requests[:, POSITION].take(index) + skipped
    # The longest first, so that none is left over when the others are done.
    order = position.argsort()[::-1]
    skipped, position = skipped.take(order), position.take(order)
    tiles: IntArray = requests.take(index.take(order), axis=0)
    num_queries = np.minimum(tiles[:, NUM_QUERIES] - skipped, queries_per_tile)
    first_query, stop = tiles[:, FIRST_QUERY], tiles[:, STOP]
    first_query += skipped
    tiles[:, NUM_QUERIES] = num_queries
    tiles[:, POSITION] = position
    if causal:
        # Padding sees nothing, whatever its position.
        tiles[:, STOP] = np.maximum(np.minimum(stop, position + num_queries), 0)
    return Tiles(tiling, queries_per_tile, tiles)
