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
NUM_PART_FIELDS = 4
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
    # A request of so many queries at most is one tile, but for the padding.
    limit = min(MAX_SMALL_ROWS, tilings[-1].block_m) // heads
    limit = min(limit, batch.max_query_len)
    query_lens = requests[2]
    has_large = batch.max_query_len > limit
    if has_large and not batch.static:
        limit = int(query_lens.max(where=query_lens <= limit, initial=0))
    if not has_large:
        return [_cut_alike(requests, batch, rules, _tiling_for(limit * heads, tilings), heads, num_cores)]
    if limit == 0:
        return [_cut_alike(requests, batch, rules, tilings[-1], heads, num_cores)]
    is_small = query_lens <= limit
    return [
        _cut_alike(requests.compress(chosen, axis=1), batch, rules, tiling, heads, num_cores)
        for chosen, tiling in ((is_small, _tiling_for(limit * heads, tilings)), (~is_small, tilings[-1]))
    ]


def _tiling_for(rows: int, tilings: Sequence[Tiling]) -> Tiling:
    return next((tiling for tiling in tilings if tiling.block_m >= rows), tilings[-1])


def _requests(batch: Batch) -> IntArray:
    """Return each request's row, first packed query, queries, first position, tokens and first token that is seen."""
    starts, num_reqs = batch.query_start_loc, len(batch.seq_lens)
    num_padding = batch.num_tokens - int(starts[-1])
    requests = np.zeros((6, num_reqs + (num_padding > 0)), dtype=np.int32)
    requests[0] = np.arange(requests.shape[1])
    requests[1, : num_reqs + 1] = starts[: requests.shape[1]]
    np.subtract(starts[1:], starts[:-1], out=requests[2, :num_reqs])
    requests[4, :num_reqs] = batch.seq_lens
    np.subtract(requests[4], requests[2], out=requests[3])
    if batch.seq_starts is not None:
        requests[5, :num_reqs] = batch.seq_starts
    if num_padding:
        requests[:, num_reqs] = (0, starts[-1], num_padding, 0, 0, 0)
    return requests


def _cut_alike(requests: IntArray, batch: Batch, rules: Rules, tiling: Tiling, heads: int, num_cores: int) -> Work:
    """Return the work of some requests, for programs of one shape."""
    queries_per_tile = tiling.block_m // heads
    tiles = _tiles(requests, queries_per_tile)
    # Field by field: NumPy's work on a step this small is the number of its calls.
    fields = np.empty((NUM_ITEM_FIELDS, tiles.shape[1]), dtype=np.int32)
    fields[:6] = tiles
    _, _, num_queries, position, stop, low, first, last = fields[:8]
    if batch.causal:
        # Padding sees nothing, whatever its position.
        np.minimum(position + num_queries, stop, out=stop)
        if rules.window:
            low = np.maximum(low, position + (1 - rules.window))
        elif rules.chunk:
            low = np.maximum(low, position - position % rules.chunk)
    np.floor_divide(low, tiling.block_n, out=first)
    num_blocks = (stop + (tiling.block_n - 1)) // tiling.block_n - first
    # Work items that run at a time: each is computed by a program for every KV head.
    wave = max(1, num_cores * tiling.programs_per_core // (rules.num_kv_heads * -(-rules.group // heads)))
    length = _longest_part(num_blocks, wave, -(-tiling.min_split // tiling.block_n))
    num_slots = 0
    if length is None:
        parts = np.zeros((0, NUM_PART_FIELDS), dtype=np.int32)
        first *= tiling.block_n
        last[:] = stop
        fields[8], fields[9] = -1, 1
    else:
        fields, parts, num_slots = _split(fields, num_blocks, length, tiling.block_n)
    num_items = num_used = fields.shape[1]
    if batch.static:
        num_tiles = min(batch.num_tokens, len(batch.seq_lens) + 1 + batch.num_tokens // queries_per_tile)
        num_items, num_slots = num_tiles + wave, 2 * wave
        parts = _padded(parts, min(batch.num_tokens, wave * queries_per_tile))
    items = np.zeros((num_items, NUM_ITEM_FIELDS), dtype=np.int32)
    items[:num_used] = fields.T
    return Work(tiling, heads, items, parts, num_slots)


def _tiles(requests: IntArray, queries_per_tile: int) -> IntArray:
    """Return the same columns for tiles: requests cut into so many queries at most."""
    query_lens = requests[2]
    if np.maximum.reduce(query_lens, initial=0) <= queries_per_tile:
        return requests if np.minimum.reduce(query_lens, initial=1) else requests.compress(query_lens > 0, axis=1)
    counts = (query_lens + (queries_per_tile - 1)) // queries_per_tile
    ends = counts.cumsum(dtype=np.int32)
    index = np.arange(len(counts)).repeat(counts)
    skipped = (np.arange(len(index), dtype=np.int32) - (ends - counts).take(index)) * queries_per_tile
    tiles = requests.take(index, axis=1)
    tiles[1] += skipped
    tiles[3] += skipped
    np.minimum(tiles[2] - skipped, queries_per_tile, out=tiles[2])
    # The longest first, so that none is left over when the others are done.
    return tiles[:, (tiles[3] + tiles[2]).argsort(kind="stable")[::-1]]


def _longest_part(num_blocks: IntArray, wave: int, min_blocks: int) -> int | None:
    """Return how many blocks a part of a tile has at most; None if no tile is split.

    Args:
        num_blocks: ``[num_tiles]``: what each reads; nothing where it is negative.
        wave: Work items that run at a time.
        min_blocks: Blocks of a part at least.
    """
    longest = int(np.maximum.reduce(num_blocks, initial=0))
    if longest <= min_blocks:
        return None
    num_blocks = np.maximum(num_blocks, 0)
    share = int(np.add.reduce(num_blocks)) / wave
    if 2 * len(num_blocks) <= wave:
        # One wave holds all parts: the shortest parts that fit into it. Those of twice the fair share always do.
        candidates = np.ceil(share * np.arange(8, 17) / 8)[:, None]
        sums = np.ceil(num_blocks / candidates).sum(1)
        length = int(candidates[min(int((sums > wave).sum()), 8)][0])
    else:
        if longest <= LONG * share:
            return None
        length = math.ceil(share)
    length = max(length, min_blocks)
    return length if longest > length else None


def _split(fields: IntArray, num_blocks: IntArray, length: int, block_n: int) -> tuple[IntArray, IntArray, int]:
    """Return the work items of tiles, where queries of split ones find their parts, and the number of these parts.

    Args:
        fields: ``[10, num_tiles]``: the tiles as work items; the last four fields are the first block and undefined.
        num_blocks: ``[num_tiles]``: what each reads; nothing where it is negative.
        length: The most blocks of a part.
        block_n: Tokens of a block.
    """
    # Parts of a tile are of even length; none is empty, and a tile that sees nothing is one part.
    num_blocks = np.maximum(num_blocks, 1)
    num_parts = (num_blocks + (length - 1)) // length
    even = (num_blocks + (num_parts - 1)) // num_parts
    num_parts = (num_blocks + (even - 1)) // even
    fields[7] = even
    ends = num_parts.cumsum(dtype=np.int32)
    starts = ends - num_parts
    index = np.arange(len(num_parts)).repeat(num_parts)
    items = fields.take(index, axis=1)
    _, _, _, _, stop, _, first, last, slot, is_first = items
    first += (np.arange(len(index), dtype=np.int32) - starts.take(index)) * last
    last += first
    items[6:8] *= block_n
    np.minimum(last, stop, out=last)
    split = np.flatnonzero(num_parts > 1)
    counts = num_parts[split]
    slots = counts.cumsum(dtype=np.int32)
    num_slots = int(slots[-1])
    slot[:] = -1
    slot[(num_parts > 1).take(index)] = np.arange(num_slots)
    is_first[:] = 0
    is_first[starts] = 1
    query_lens = fields[2, split]
    tile = np.arange(len(split)).repeat(query_lens)
    parts = np.empty((len(tile), NUM_PART_FIELDS), dtype=np.int32)
    query = np.arange(len(tile)) - (query_lens.cumsum() - query_lens)[tile]
    parts[:, 0] = fields[1, split][tile] + query
    parts[:, 1] = (slots - counts)[tile]
    parts[:, 2] = counts[tile]
    parts[:, 3] = query
    return items, parts, num_slots


def _padded(rows: IntArray, size: int) -> IntArray:
    padded = np.zeros((size, rows.shape[1]), dtype=np.int32)
    padded[: len(rows)] = rows
    return padded
