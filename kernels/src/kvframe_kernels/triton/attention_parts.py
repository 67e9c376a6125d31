"""The second half of planning: splits tiles that see much more than a program's fair share of the step into parts.

The parts of a tile are merged afterwards (Flash-Decoding; the shares are as in FlashInfer's planner, arXiv 2501.01005).
The tokens that tiles read are computed for all masks at once. The tiles of a mask are visited one by one only if some
of them are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvframe_kernels.triton.attention_tiles import (
    FIRST,
    FIRST_QUERY,
    NUM_QUERIES,
    PART,
    PART_BLOCKS,
    POSITION,
    ROW,
    START,
    STOP,
    ZERO,
    Batch,
    IntArray,
    Tiles,
    Tiling,
)

NUM_SPLIT_FIELDS = 4
"""Numbers of a split tile: its first query, its queries, the slot of its first part, its parts."""
SPLIT_FIELDS = np.array([FIRST_QUERY, NUM_QUERIES, PART, PART_BLOCKS])
"""The fields of a work item that hold these, before its parts are numbered."""
EIGHTHS = np.arange(8, 17) / 8
LONG = 1.25
"""If there are enough tiles for all programs, a tile is split when it sees this many times a program's fair share."""
UNBOUNDED = 1 << 30
"""More tokens than a sequence has: a window, a chunk or sink tokens of this number hide nothing. It fits 32 bits."""


class Mask(NamedTuple):
    """The past tokens that a layer hides.

    Attributes:
        window: The number of positions that a query sees, counted back from its own; 0 for all.
        chunk: Tokens of a chunk that its queries stay within; 0 for none.
        num_sink_tokens: With ``keeps_prompt``, tokens at the start that are seen in spite of the window. Without it,
            they are so few that they do not count.
        keeps_prompt: Whether the tokens of each request's prompt are seen in spite of the window.
    """

    window: int = 0
    chunk: int = 0
    num_sink_tokens: int = 0
    keeps_prompt: bool = False


class Items(NamedTuple):
    """The work items of programs of one shape; some items are parts of tiles.

    Attributes:
        parts: ``[num_parts, 8]``: the parts of split tiles.
        whole: ``[num_others, 8]``: the whole tiles.
        splits: ``[num_splits, 4]``: the split tiles.
    """

    parts: IntArray
    whole: IntArray
    splits: IntArray


ALL = Mask()


def masks_in_effect(batch: Batch, masks: Sequence[Mask]) -> Sequence[Mask]:
    """Return equivalent masks for a batch: one that is too wide to hide a token is replaced by one that hides none."""
    if not batch.causal:
        return [ALL] * len(masks)
    if batch.prompt_lens is None:
        masks = [Mask(mask.window, mask.chunk) if mask.keeps_prompt else mask for mask in masks]
    if batch.static or not any(mask.window or mask.chunk for mask in masks):
        return masks
    longest = int(np.maximum.reduceat(batch.seq_lens, FIRST)[0])
    return [mask if longest > (mask.window or mask.chunk) else ALL for mask in masks]


def num_tokens_read(tiles: Tiles, batch: Batch, masks: tuple[Mask, ...]) -> IntArray:
    """Return the tokens that tiles read, ``[num_masks, num_rows]``, in whole blocks from the first seen token on."""
    items = tiles.items
    stop: IntArray = items[:, STOP]
    if masks == (ALL,) and batch.seq_starts is None:
        return stop[None]
    position, hidden, chunks = items[:, POSITION], *_before_windows(masks)
    low: IntArray = position + hidden
    for row, chunk in chunks:
        low[row] = position - position % chunk
    np.maximum(low, ZERO if batch.seq_starts is None else items[:, START], out=low)
    kept = [
        _move_to_kept(low[row], tiles, batch, mask) if mask.keeps_prompt else None for row, mask in enumerate(masks)
    ]
    low &= _first_tokens(tiles)
    np.subtract(stop, low, out=low)
    for row, num_kept in enumerate(kept):
        if num_kept is not None:
            low[row] += num_kept
    return low


def _move_to_kept(low: IntArray, tiles: Tiles, batch: Batch, mask: Mask) -> IntArray:
    """Set the first seen token of tiles that hide no token between a prompt and a window; return tokens before others.

    Args:
        low: ``[num_rows]``: written: the first token in the first query's window.
        tiles: The tiles.
        batch: The step.
        mask: The mask, which keeps prompts.

    Returns:
        ``[num_rows]``: the tokens of kept blocks before the block of ``low``.
    """
    assert batch.prompt_lens is not None
    items, first_tokens = tiles.items, _first_tokens(tiles)
    start = items[:, START]
    kept = np.maximum(batch.prompt_lens.take(items[:, ROW]), mask.num_sink_tokens)
    last_low = np.maximum(items[:, POSITION] + items[:, NUM_QUERIES] - mask.window, start)
    np.copyto(low, start, where=kept >= last_low)
    found: IntArray = np.minimum(-(-kept & first_tokens), low & first_tokens) - (start & first_tokens)
    return np.maximum(found, ZERO, out=found)


@lru_cache(maxsize=256)
def _before_windows(masks: tuple[Mask, ...]) -> tuple[IntArray, tuple[tuple[int, int], ...]]:
    """Return how far before a position windows start, ``[num_masks, 1]``, and the sizes of chunks by mask."""
    hidden = [[1 - (mask.window or UNBOUNDED)] for mask in masks]
    chunks = tuple((row, mask.chunk) for row, mask in enumerate(masks) if mask.chunk)
    return np.array(hidden, dtype=np.int32), chunks


def _first_tokens(tiles: Tiles) -> IntArray:
    """Return for each tile a bit mask that turns a token's number into that of the first token of its block."""
    sizes = [-shape.tiling.block_n for shape in tiles.shapes]
    if sizes[0] == sizes[-1]:
        return np.array(sizes[0], dtype=np.int32)
    first = tiles.shapes[-1].first
    return np.array(sizes, dtype=np.int32).repeat([first, len(tiles.items) - first])


def longest_parts(tiles: Tiles, num_tokens: IntArray, waves: Sequence[int]) -> list[list[int | None]]:
    """Return the most blocks of a part, for each mask and shape; None if no tile is split.

    Args:
        tiles: The tiles.
        num_tokens: ``[num_masks, num_rows]``: the tokens that each reads.
        waves: For each shape, the work items that run at the same time.
    """
    firsts = FIRST if len(tiles.shapes) == 1 else [shape.first for shape in tiles.shapes]
    longest = np.maximum.reduceat(num_tokens, firsts, axis=1).tolist()
    totals = np.add.reduceat(num_tokens, firsts, axis=1, dtype=np.int64).tolist()
    found = []
    for row, mosts, sums in zip(num_tokens, longest, totals, strict=True):
        lengths = [
            _longest_part(row[shape.first : shape.first + shape.num_tiles], most, total, wave, shape.tiling)
            for most, total, shape, wave in zip(mosts, sums, tiles.shapes, waves, strict=True)
        ]
        found.append(lengths)
    return found


def _longest_part(num_tokens: IntArray, longest: int, total: int, wave: int, tiling: Tiling) -> int | None:
    if longest <= tiling.min_split:
        return None
    block_n = tiling.block_n
    if 2 * len(num_tokens) <= wave:
        # All parts run in one wave: the shortest parts that fit into it. Parts of twice the fair share always fit.
        num_blocks = -(-num_tokens // block_n)
        candidates = np.ceil(int(np.add.reduce(num_blocks)) / wave * EIGHTHS)
        sums = np.ceil(num_blocks / candidates[:, None]).sum(1)
        length = int(candidates[min(int((sums > wave).sum()), len(EIGHTHS) - 1)])
    elif longest * wave <= LONG * total:
        return None
    else:
        length = -(-total // (wave * block_n))
    length = max(length, -(-tiling.min_split // block_n))
    return length if longest > length * block_n else None


def split(items: IntArray, num_tokens: IntArray, length: int, block_n: int) -> Items:
    """Return work items that read at most ``length`` blocks each.

    Args:
        items: ``[num_tiles, 8]``: tiles of programs of one shape as work items; some read more.
        num_tokens: ``[num_tiles]``: the tokens that each reads.
        length: The most blocks of a part.
        block_n: Tokens of a block.
    """
    is_split = num_tokens > length * block_n
    index = is_split.nonzero()[0]
    tiles = items.take(index, axis=0)
    num_blocks = -(-num_tokens.take(index) // block_n)
    counts = -(-num_blocks // length)
    # Parts of a tile have about equal lengths, and none is empty.
    part_blocks = -(-num_blocks // counts)
    counts = -(-num_blocks // part_blocks)
    ends = np.add.accumulate(counts, dtype=np.int32)
    tiles[:, PART] = ends - counts
    tiles[:, PART_BLOCKS] = part_blocks
    parts = tiles.repeat(counts, axis=0)
    part = parts[:, PART]
    np.subtract(np.arange(len(parts), dtype=np.int32), part, out=part)
    tiles[:, PART_BLOCKS] = counts
    whole = items.take((~is_split).nonzero()[0], axis=0)
    return Items(parts, whole, tiles.take(SPLIT_FIELDS, axis=1))
