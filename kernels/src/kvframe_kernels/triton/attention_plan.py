"""The host side of paged attention: a step cut into work items of about the same length, from host arrays only.

A tile that sees much more than a program's fair share of the step is split over the tokens that it sees, and its parts
are joined afterwards (Flash-Decoding; the shares as in FlashInfer's planner, arXiv 2501.01005). Everything is NumPy
over all requests at once, and what comes of it is one array, so that one tensor goes to the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kvframe_kernels.triton.attention_tiles import (
    FIRST_QUERY,
    MAX_SMALL_ROWS,
    NUM_ITEM_FIELDS,
    NUM_QUERIES,
    PART,
    PART_BLOCKS,
    POSITION,
    START,
    STOP,
    Batch,
    IntArray,
    Tiles,
    Tiling,
)

NUM_SPLIT_FIELDS = 4
"""Of a tile that is split: its first query, its queries, the slot of its first part, its parts."""
SPLIT_FIELDS = np.array([FIRST_QUERY, NUM_QUERIES, PART, PART_BLOCKS])
"""Where a work item has these, before its parts are numbered."""
ALIGNMENT = 16
"""Numbers: where a kernel begins to read is a multiple of this, for which Triton compiles one variant of it alone."""
EIGHTHS = np.arange(8, 17) / 8
LONG = 1.25
"""A tile that sees this many times a program's fair share is split, where there are enough tiles for all programs."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What of a layer decides how its steps are cut.

    Attributes:
        num_kv_heads: Its KV heads.
        group: Query heads of each.
        window: How many positions a query sees, counted from its own; 0 for all.
        chunk: Tokens of a chunk that its queries stay within; 0 for none.
    """

    num_kv_heads: int
    group: int
    window: int = 0
    chunk: int = 0


@dataclass(frozen=True)
class Programs:
    """Programs of one shape, and where their work stands among a step's numbers.

    Attributes:
        tiling: Their shape.
        heads: Query heads of a program.
        first_item: Where their work items begin.
        num_items: How many these are. Parts of tiles stand in front: an item's place is the slot of its outcome.
        num_slots: For how many parts there is to be room.
        first_split: Where it begins which tiles were split.
        num_splits: How many these are.
        split_queries: Queries of each of these at most.
    """

    tiling: Tiling
    heads: int
    first_item: int
    num_items: int
    num_slots: int
    first_split: int
    num_splits: int
    split_queries: int


@dataclass(frozen=True, eq=False)
class Work:
    """A step's work.

    Attributes:
        numbers: ``[num_numbers], int32``: as the kernels read them.
        programs: Who reads which of them.
    """

    numbers: IntArray
    programs: tuple[Programs, ...]

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The numbers as a tensor on the host, always the same."""
        return torch.from_numpy(self.numbers)

    def items(self, programs: Programs) -> IntArray:
        """Return work items: ``[num_items, 8]``."""
        return self._rows(programs.first_item, programs.num_items, NUM_ITEM_FIELDS)

    def splits(self, programs: Programs) -> IntArray:
        """Return tiles that were split: ``[num_splits, 4]``."""
        return self._rows(programs.first_split, programs.num_splits, NUM_SPLIT_FIELDS)

    def _rows(self, first: int, num_rows: int, num_fields: int) -> IntArray:
        return self.numbers[first : first + num_rows * num_fields].reshape(num_rows, num_fields)


@dataclass
class _Cut:
    """Work for programs of one shape: what there is of it, and for how much there is to be room."""

    tiling: Tiling
    items: IntArray
    splits: IntArray
    num_items: int
    num_slots: int
    num_splits: int
    split_queries: int


NO_SPLITS = np.zeros((0, NUM_SPLIT_FIELDS), dtype=np.int32)


def cut(batch: Batch, rules: Rules, tilings: tuple[Tiling, ...], num_cores: int) -> Work:
    """Return the step's work.

    Args:
        batch: The step.
        rules: The layer's side.
        tilings: Shapes of programs, by ascending rows; the last one takes what is too long for the others.
        num_cores: Multiprocessors of the device.
    """
    heads = min(rules.group, MAX_SMALL_ROWS, tilings[-1].block_m)
    # Work items that run at a time: each is computed by a program for every KV head.
    programs_per_item = rules.num_kv_heads * -(-rules.group // heads)
    tiles = batch.tiles(heads, tilings)
    waves = [max(1, num_cores * each.tiling.programs_per_core // programs_per_item) for each in tiles]
    reads = [_num_tokens(each, batch, rules) for each in tiles]
    lengths = [_longest_part(*each) for each in zip(reads, waves, tiles, strict=True)]
    cuts = zip(tiles, reads, lengths, waves, strict=True)

    def pack() -> Work:
        return _packed([_cut(*each, batch) for each in cuts], heads)

    # Where no tile is split, the work is the same for all masks. In a graph's step each group has its own, always.
    return pack() if batch.static or any(lengths) else batch.once(("whole", heads, tilings), pack)


def _cut(tiles: Tiles, num_tokens: IntArray, length: int | None, wave: int, batch: Batch) -> _Cut:
    """Return the work of a step's tiles for programs of one shape.

    Args:
        tiles: The tiles.
        num_tokens: ``[num_tiles]``: what each reads.
        length: Blocks of a part at most; None if no tile is split.
        wave: Work items that run at a time.
        batch: The step.
    """
    items, splits, num_slots, split_queries = tiles.items, NO_SPLITS, 0, 0
    if length is not None:
        items, splits, num_slots = _split(items, num_tokens, length, tiles.tiling.block_n)
        split_queries = int(np.maximum.reduce(splits[:, 1]))
    if not batch.static:
        return _Cut(tiles.tiling, items, splits, len(items), num_slots, len(splits), split_queries)
    num_tiles = min(batch.num_tokens, len(batch.seq_lens) + 1 + batch.num_tokens // tiles.queries_per_tile)
    # A wave holds so many parts that those of all tiles are no more than two.
    split_queries = min(tiles.queries_per_tile, batch.max_query_len)
    return _Cut(tiles.tiling, items, splits, num_tiles + wave, 2 * wave, min(wave, num_tiles), split_queries)


def _num_tokens(tiles: Tiles, batch: Batch, rules: Rules) -> IntArray:
    """Return what each tile reads, ``[num_tiles]``: from the first token that it sees on, in whole blocks.

    Few calls: NumPy's work on a step this small is their number.
    """
    items = tiles.items
    stop: IntArray = items[:, STOP]
    low: IntArray | None = None if batch.seq_starts is None else items[:, START]
    if batch.causal and (rules.window or rules.chunk):
        position = items[:, POSITION]
        seen = position + (1 - rules.window) if rules.window else position - position % rules.chunk
        low = np.maximum(seen, 0 if low is None else low, out=seen)
    return stop if low is None else stop - (low & -tiles.tiling.block_n)


def _longest_part(num_tokens: IntArray, wave: int, tiles: Tiles) -> int | None:
    """Return how many blocks of tokens a part of a tile has at most; None if no tile is split.

    Args:
        num_tokens: ``[num_tiles]``: what each reads.
        wave: Work items that run at a time.
        tiles: The tiles.
    """
    tiling = tiles.tiling
    longest = int(np.maximum.reduce(num_tokens, initial=0))
    if longest <= tiling.min_split:
        return None
    block_n = tiling.block_n
    share = int(np.add.reduce(num_tokens)) / wave
    if 2 * len(num_tokens) <= wave:
        # One wave holds all parts: the shortest parts that fit into it. Those of twice the fair share always do.
        num_blocks = -(-num_tokens // block_n)
        candidates = np.ceil(int(np.add.reduce(num_blocks)) / wave * EIGHTHS)
        sums = np.ceil(num_blocks / candidates[:, None]).sum(1)
        length = int(candidates[min(int((sums > wave).sum()), len(EIGHTHS) - 1)])
    else:
        if longest <= LONG * share:
            return None
        length = math.ceil(share / block_n)
    length = max(length, -(-tiling.min_split // block_n))
    return length if longest > length * block_n else None


def _split(items: IntArray, num_tokens: IntArray, length: int, block_n: int) -> tuple[IntArray, IntArray, int]:
    """Return the work items of tiles, those that are split, and the number of their parts.

    Args:
        items: ``[num_tiles, 8]``: the tiles as work items.
        num_tokens: ``[num_tiles]``: what each reads.
        length: The most blocks of a part.
        block_n: Tokens of a block.
    """
    is_split = num_tokens > length * block_n
    index = is_split.nonzero()[0]
    tiles = items.take(index, axis=0)
    num_blocks = -(-num_tokens.take(index) // block_n)
    counts = -(-num_blocks // length)
    # Parts of a tile are of even length, and none is empty.
    part_blocks = -(-num_blocks // counts)
    counts = -(-num_blocks // part_blocks)
    ends = np.add.accumulate(counts, dtype=np.int32)
    num_slots = int(ends[-1])
    tiles[:, PART] = ends - counts
    tiles[:, PART_BLOCKS] = part_blocks
    parts = tiles.repeat(counts, axis=0)
    parts[:, PART] = np.arange(num_slots, dtype=np.int32) - parts[:, PART]
    tiles[:, PART_BLOCKS] = counts
    splits = tiles.take(SPLIT_FIELDS, axis=1)
    # Those that are split are the longest: they begin first.
    return np.concatenate([parts, items.take((~is_split).nonzero()[0], axis=0)]), splits, num_slots


def _packed(cuts: Sequence[_Cut], heads: int) -> Work:
    """Return the work of all programs as one array, with zeros where there is room for more."""
    programs: list[Programs] = []
    end = 0
    for each in cuts:
        first_split = end + _aligned(each.num_items * NUM_ITEM_FIELDS)
        programs.append(
            Programs(
                each.tiling,
                heads,
                end,
                each.num_items,
                each.num_slots,
                first_split,
                each.num_splits,
                each.split_queries,
            )
        )
        end = first_split + _aligned(each.num_splits * NUM_SPLIT_FIELDS)
    numbers = np.zeros(end, dtype=np.int32)
    for each, place in zip(cuts, programs, strict=True):
        numbers[place.first_item : place.first_item + each.items.size] = each.items.reshape(-1)
        if len(each.splits):
            numbers[place.first_split : place.first_split + each.splits.size] = each.splits.reshape(-1)
    return Work(numbers, tuple(programs))


def _aligned(num_numbers: int) -> int:
    return -(-num_numbers // ALIGNMENT) * ALIGNMENT
