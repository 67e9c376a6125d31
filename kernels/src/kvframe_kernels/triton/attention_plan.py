"""The host side of paged attention: a step cut into work items of about the same length, from host arrays only.

A tile is as many consecutive queries of one request as fill a program's rows. A tile that sees much more than a
program's fair share of the step is split over the tokens that it sees, and its parts are joined afterwards
(Flash-Decoding; the shares as in FlashInfer's planner, arXiv 2501.01005). Everything is NumPy over all requests at
once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

NUM_ITEM_FIELDS = 10
ROW, FIRST_QUERY, NUM_QUERIES, POSITION, STOP, START, FIRST, LAST, SLOT, IS_FIRST = range(NUM_ITEM_FIELDS)
"""Of a work item: its row in the block table, the queries, the first one's position, where what they see stops and what
is hidden ends, the tokens that are read, where the outcome is put if it is a part, and whether it is a tile's first."""
NUM_PART_FIELDS = 4
NO_PARTS = np.zeros((0, NUM_PART_FIELDS), dtype=np.int32)
EIGHTHS = np.arange(8, 17) / 8
MAX_SMALL_ROWS = 64
"""Rows of a request, its queries times the query heads of a program, up to which it is one tile of small programs."""
LONG = 1.25
"""A tile that sees this many times a program's fair share is split, where there are enough tiles for all programs."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What of a layer decides how its steps are cut.

    Attributes:
        num_kv_heads: Its KV heads.
        group: Query heads of each.
        causal: Whether queries see only their own and earlier positions, as far as the layer's mask goes.
        window: How many of these, counted from the query's own; 0 for all.
        chunk: Tokens of a chunk that its queries stay within; 0 for none.
    """

    num_kv_heads: int
    group: int
    causal: bool = True
    window: int = 0
    chunk: int = 0


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a kind of programs is shaped.

    Attributes:
        block_m: Rows: queries times query heads.
        block_n: Tokens of an iteration.
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


@dataclass(frozen=True, eq=False)
class Work:
    """Work items for programs of one shape.

    Attributes:
        tiling: The programs.
        heads: Query heads of a program.
        items: ``[num_items, 10]``: as the kernel reads them.
        parts: ``[num_parts, 4]``: queries of tiles that were split.
        num_slots: Parts of tiles.
    """

    tiling: Tiling
    heads: int
    items: IntArray
    parts: IntArray
    num_slots: int


def _heads_per_tile(group: int, tilings: Sequence[Tiling]) -> int:
    """Return how many query heads of a KV head one program computes, of whatever shape it is."""
    return min(group, MAX_SMALL_ROWS, tilings[-1].block_m)


def cut(batch: Batch, rules: Rules, tilings: Sequence[Tiling], num_cores: int) -> list[Work]:
    """Return the step's work, for at most one shape of small programs and one of large ones.

    Every packed token is in one tile: padding is a request that sees nothing, and gets zeros.

    Args:
        batch: The step.
        rules: The layer's side.
        tilings: Shapes of programs, by ascending rows; the last one takes what is too long for the others.
        num_cores: Multiprocessors of the device.
    """
    heads = _heads_per_tile(rules.group, tilings)
    requests = _requests(batch)
    query_lens = requests[NUM_QUERIES]
    # A request of so many queries at most is one tile, but for the padding.
    limit = min(MAX_SMALL_ROWS, tilings[-1].block_m) // heads
    if batch.max_query_len <= limit:
        tiling = _tiling_for(batch.max_query_len * heads, tilings)
        return [_cut_alike(requests, batch, rules, tiling, heads, num_cores)]
    is_small = query_lens <= limit
    is_large = ~is_small
    if not batch.static:
        is_small &= query_lens > 0
        limit = int(np.maximum.reduce(query_lens, initial=0, where=is_small))
    work = []
    if limit:
        tiling = _tiling_for(limit * heads, tilings)
        work.append(_cut_alike(requests.compress(is_small, axis=1), batch, rules, tiling, heads, num_cores))
    work.append(_cut_alike(requests.compress(is_large, axis=1), batch, rules, tilings[-1], heads, num_cores))
    return work


def _tiling_for(rows: int, tilings: Sequence[Tiling]) -> Tiling:
    return next((tiling for tiling in tilings if tiling.block_m >= rows), tilings[-1])


def _requests(batch: Batch) -> IntArray:
    """Return each request as a work item, ``[10, num_reqs]``: its row, queries, tokens and first token that is seen.

    Padding is one more request, which sees nothing. The last four fields are undefined.
    """
    starts, num_reqs = batch.query_start_loc, len(batch.seq_lens)
    num_padding = batch.num_tokens - int(starts[-1])
    requests = np.empty((NUM_ITEM_FIELDS, num_reqs + (num_padding > 0)), dtype=np.int32)
    real = requests[:, :num_reqs] if num_padding else requests
    real[ROW] = np.arange(num_reqs, dtype=np.int32)
    real[FIRST_QUERY] = starts[:-1]
    np.subtract(starts[1:], starts[:-1], out=real[NUM_QUERIES])
    real[STOP] = batch.seq_lens
    np.subtract(real[STOP], real[NUM_QUERIES], out=real[POSITION])
    real[START] = 0 if batch.seq_starts is None else batch.seq_starts
    if num_padding:
        requests[: START + 1, num_reqs] = (0, starts[-1], num_padding, 0, 0, 0)
    return requests


def _cut_alike(requests: IntArray, batch: Batch, rules: Rules, tiling: Tiling, heads: int, num_cores: int) -> Work:
    """Return the work of some requests, for programs of one shape."""
    queries_per_tile = tiling.block_m // heads
    # Field by field: NumPy's work on a step this small is the number of its calls.
    tiles = _tiles(requests, queries_per_tile, batch.causal)
    low: IntArray | None = None if batch.seq_starts is None else tiles[START]
    if batch.causal and (rules.window or rules.chunk):
        position = tiles[POSITION]
        low = position + (1 - rules.window) if rules.window else position - position % rules.chunk
        np.maximum(low, tiles[START], out=low)
    first, stop = tiles[FIRST], tiles[STOP]
    if low is None:
        first[:] = 0
        num_tokens = stop
    else:
        np.multiply(low // tiling.block_n, tiling.block_n, out=first)
        num_tokens = np.maximum(stop - first, 0)
    # Work items that run at a time: each is computed by a program for every KV head.
    wave = max(1, num_cores * tiling.programs_per_core // (rules.num_kv_heads * -(-rules.group // heads)))
    length = _longest_part(num_tokens, wave, tiling)
    tiles[LAST] = stop
    tiles[SLOT] = -1
    tiles[IS_FIRST] = 1
    parts, num_slots = NO_PARTS, 0
    if length is not None:
        tiles, parts, num_slots = _split(tiles, num_tokens, length, tiling.block_n)
    items = np.ascontiguousarray(tiles.T)
    if batch.static:
        num_tiles = min(batch.num_tokens, len(batch.seq_lens) + 1 + batch.num_tokens // queries_per_tile)
        items, num_slots = _padded(items, num_tiles + wave), 2 * wave
        parts = _padded(parts, min(batch.num_tokens, wave * queries_per_tile))
    return Work(tiling, heads, items, parts, num_slots)


def _tiles(requests: IntArray, queries_per_tile: int, causal: bool) -> IntArray:
    """Return the same columns for tiles: requests cut into so many queries at most."""
    query_lens = requests[NUM_QUERIES]
    if np.maximum.reduce(query_lens, initial=0) <= queries_per_tile:
        are_all = bool(np.minimum.reduce(query_lens, initial=1))
        return requests if are_all else requests.compress(query_lens > 0, axis=1)
    counts = (query_lens + (queries_per_tile - 1)) // queries_per_tile
    ends = counts.cumsum(dtype=np.int32)
    index = np.arange(len(counts)).repeat(counts)
    skipped = (np.arange(len(index), dtype=np.int32) - (ends - counts).take(index)) * queries_per_tile
    # The longest first, so that none is left over when the others are done.
    order = (requests[POSITION].take(index) + skipped).argsort()[::-1]
    skipped = skipped.take(order)
    tiles: IntArray = requests.take(index.take(order), axis=1)
    tiles[FIRST_QUERY] += skipped
    tiles[POSITION] += skipped
    num_queries = tiles[NUM_QUERIES]
    num_queries -= skipped
    np.minimum(num_queries, queries_per_tile, out=num_queries)
    if causal:
        # Padding sees nothing, whatever its position.
        stop = tiles[STOP]
        np.minimum(stop, tiles[POSITION] + num_queries, out=stop)
    return tiles


def _longest_part(num_tokens: IntArray, wave: int, tiling: Tiling) -> int | None:
    """Return how many blocks of tokens a part of a tile has at most; None if no tile is split.

    Args:
        num_tokens: ``[num_tiles]``: what each reads.
        wave: Work items that run at a time.
        tiling: The programs.
    """
    longest = int(np.maximum.reduce(num_tokens, initial=0))
    if longest <= tiling.min_split:
        return None
    block_n = tiling.block_n
    num_blocks = (num_tokens + (block_n - 1)) // block_n
    share = int(np.add.reduce(num_blocks)) / wave
    if 2 * len(num_blocks) <= wave:
        # One wave holds all parts: the shortest parts that fit into it. Those of twice the fair share always do.
        candidates = np.ceil(share * EIGHTHS)
        sums = np.ceil(num_blocks / candidates[:, None]).sum(1)
        length = int(candidates[min(int((sums > wave).sum()), len(EIGHTHS) - 1)])
    else:
        if -(-longest // block_n) <= LONG * share:
            return None
        length = math.ceil(share)
    length = max(length, -(-tiling.min_split // block_n))
    return length if longest > length * block_n else None


def _split(tiles: IntArray, num_tokens: IntArray, length: int, block_n: int) -> tuple[IntArray, IntArray, int]:
    """Return the work items of tiles, where queries of split ones find their parts, and the number of these parts.

    Args:
        tiles: ``[10, num_tiles]``: the tiles as work items.
        num_tokens: ``[num_tiles]``: what each reads.
        length: The most blocks of a part.
        block_n: Tokens of a block.
    """
    is_split = num_tokens > length * block_n
    split = tiles.compress(is_split, axis=1)
    num_blocks = (num_tokens.compress(is_split) + (block_n - 1)) // block_n
    # Parts of a tile are of even length, and none is empty.
    even = -(-num_blocks // -(-num_blocks // length))
    counts = -(-num_blocks // even)
    ends = counts.cumsum(dtype=np.int32)
    starts = ends - counts
    num_slots = int(ends[-1])
    slots = np.arange(num_slots, dtype=np.int32)
    tile = np.arange(len(counts)).repeat(counts)
    rank = slots - starts.take(tile)
    size = even.take(tile) * block_n
    items = split.take(tile, axis=1)
    first, last = items[FIRST], items[LAST]
    first += rank * size
    np.minimum(last, first + size, out=last)
    items[SLOT] = slots
    items[IS_FIRST] = rank == 0
    # Those that are split are the longest: they begin first.
    items = np.concatenate([items, tiles.compress(~is_split, axis=1)], axis=1)
    query_lens = split[NUM_QUERIES]
    joined = np.empty((len(counts), NUM_PART_FIELDS), dtype=np.int32)
    joined[:, 0] = split[FIRST_QUERY]
    joined[:, 1] = starts
    joined[:, 2] = counts
    joined[:, 3] = 0
    parts = joined.repeat(query_lens, axis=0)
    if len(parts) > len(counts):
        query = np.arange(len(parts)) - (query_lens.cumsum() - query_lens).repeat(query_lens)
        parts[:, 0] += query
        parts[:, 3] = query
    return items, parts, num_slots


def _padded(rows: IntArray, size: int) -> IntArray:
    padded = np.zeros((size, rows.shape[1]), dtype=np.int32)
    padded[: len(rows)] = rows
    return padded
