"""The host side of paged attention: divides a step into work items of about equal length, from host arrays only.

A tile that sees much more than a program's fair share of the step is split over the tokens that it sees. All requests
and layers are planned by the same NumPy calls. The result is one array for each mask, so that one tensor is copied to
the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch

from kvframe_kernels.triton import attention_native
from kvframe_kernels.triton.attention_parts import (
    NUM_SPLIT_FIELDS,
    Items,
    Mask,
    longest_parts,
    masks_in_effect,
    num_tokens_read,
    split,
)
from kvframe_kernels.triton.attention_tiles import (
    ALIGNMENT,
    MAX_SMALL_ROWS,
    NUM_ITEM_FIELDS,
    Batch,
    IntArray,
    Shape,
    Tiles,
    Tiling,
    tiles_of,
)

NO_PARTS = np.zeros((0, NUM_ITEM_FIELDS), dtype=np.int32)
NO_SPLITS = np.zeros((0, NUM_SPLIT_FIELDS), dtype=np.int32)
FEWEST_ITEMS_PER_CORE = 4
"""The fewest work items of a multiprocessor with which the largest shape for prompts is the fastest."""


@dataclass(frozen=True)
class Programs:
    """Programs of one shape, and the places of their work in the step's numbers.

    Attributes:
        tiling: Their shape.
        heads: Query heads of a program.
        first_item: The offset of their work items.
        num_items: The number of these. Parts of tiles come first: an item's index is the slot of its result.
        num_slots: The capacity for results of parts.
        first_split: The offset of the split tiles.
        num_splits: The number of these.
        split_queries: The most queries of one of these.
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
        programs: The programs, and the numbers that each of them reads.
    """

    numbers: IntArray
    programs: tuple[Programs, ...]

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The numbers as a tensor on the host; every call returns the same tensor."""
        return torch.from_numpy(self.numbers)

    def items(self, programs: Programs) -> IntArray:
        """Return work items: ``[num_items, 8]``."""
        return self._rows(programs.first_item, programs.num_items, NUM_ITEM_FIELDS)

    def splits(self, programs: Programs) -> IntArray:
        """Return the split tiles: ``[num_splits, 4]``."""
        return self._rows(programs.first_split, programs.num_splits, NUM_SPLIT_FIELDS)

    def _rows(self, first: int, num_rows: int, num_fields: int) -> IntArray:
        return self.numbers[first : first + num_rows * num_fields].reshape(num_rows, num_fields)


@dataclass(frozen=True, eq=False)
class StepPlanner:
    """Divides steps for layers that differ only in their masks.

    Attributes:
        num_kv_heads: Their KV heads.
        group: Query heads of each.
        tilings: Shapes of programs, by ascending rows; the last one takes requests that are too long for the others.
            If the last two are for prompts (not ``mask_all``), the last one is for steps of many tokens, and the one
            before it for other steps.
        num_cores: Multiprocessors of the device.
    """

    num_kv_heads: int
    group: int
    tilings: tuple[Tiling, ...]
    num_cores: int

    @cached_property
    def heads(self) -> int:
        """Query heads of a program."""
        return min(self.group, MAX_SMALL_ROWS, self.tilings[-1].block_m)

    @cached_property
    def _programs(self) -> int:
        """Programs that compute a work item: one for every KV head, or more."""
        return self.num_kv_heads * -(-self.group // self.heads)

    @cached_property
    def _for_few_tokens(self) -> StepPlanner | None:
        """The planner of steps whose tokens are too few for the last shape; None if it is for every step."""
        if len(self.tilings) < 2 or self.tilings[-2].mask_all or self.tilings[-1].mask_all:
            return None
        return planner_for(self.num_kv_heads, self.group, self.tilings[:-1], self.num_cores)

    def _planner(self, batch: Batch) -> StepPlanner:
        """Return the planner of this step: the work of few tokens would not fill the device with the largest tiles."""
        if self._for_few_tokens is None:
            return self
        num_programs = batch.num_tokens * self.heads // self.tilings[-1].block_m * self._programs
        return self if num_programs >= FEWEST_ITEMS_PER_CORE * self.num_cores else self._for_few_tokens

    def plan(self, batch: Batch, masks: Sequence[Mask]) -> list[Work]:
        """Return the step's work for each mask.

        Masks that hide equally many tokens of this step share one value. This does not hold in a graph's step, whose
        values must not depend on its content.
        """
        return self._planner(batch)._plan(batch, masks)

    def _plan(self, batch: Batch, masks: Sequence[Mask]) -> list[Work]:
        native = attention_native.load()
        if native is None:
            return self._plan_with_numpy(batch, masks)
        found, places = native.plan(
            batch.query_start_loc,
            batch.seq_lens,
            batch.seq_starts,
            batch.prompt_lens,
            batch.range_ends,
            batch.num_tokens,
            batch.causal,
            batch.static,
            batch.max_query_len,
            masks,
            self.heads,
            self._shapes,
        )
        works = [
            Work(
                np.frombuffer(numbers, dtype=np.int32),
                tuple([Programs(self.tilings[tiling], self.heads, *place) for tiling, *place in programs]),
            )
            for numbers, programs in found
        ]
        return [works[place] for place in places]

    @cached_property
    def _shapes(self) -> bytes:
        """For each tiling, its rows, the tokens of an iteration, the work items at a time, and tokens of a part."""
        numbers = [(each.block_m, each.block_n, self._wave(each), each.min_split) for each in self.tilings]
        return np.array(numbers, dtype=np.int32).tobytes()

    def _wave(self, tiling: Tiling) -> int:
        """Return the number of work items that run at the same time."""
        return max(1, self.num_cores * tiling.programs_per_core // self._programs)

    def plan_with_numpy(self, batch: Batch, masks: Sequence[Mask]) -> list[Work]:
        """Return the same as ``plan``, without compiled code."""
        return self._planner(batch)._plan_with_numpy(batch, masks)

    def _plan_with_numpy(self, batch: Batch, masks: Sequence[Mask]) -> list[Work]:
        tiles = tiles_of(batch, self.heads, self.tilings)
        waves = [self._wave(shape.tiling) for shape in tiles.shapes]
        in_effect = masks_in_effect(batch, masks)
        every = tuple(dict.fromkeys(in_effect))
        num_tokens = num_tokens_read(tiles, batch, every)
        lengths = longest_parts(tiles, num_tokens, waves)
        if batch.static:
            found = [every.index(mask) for mask in in_effect]
            return [self._with_capacity(tiles, num_tokens[row], lengths[row], batch, waves) for row in found]
        whole: Work | None = None
        works: dict[Mask, Work] = {}
        for mask, reads, most in zip(every, num_tokens, lengths, strict=True):
            if any(most):
                works[mask] = self._in_parts(tiles, reads, most)
            else:
                whole = works[mask] = self._in_parts(tiles, reads, most) if whole is None else whole
        return [works[mask] for mask in in_effect]

    def _in_parts(self, tiles: Tiles, num_tokens: IntArray, lengths: Sequence[int | None]) -> Work:
        items = _items_of(tiles, num_tokens, lengths)
        capacities = [
            Capacity(len(each.parts) + len(each.whole), len(each.parts), len(each.splits), shape.max_queries)
            for each, shape in zip(items, tiles.shapes, strict=True)
        ]
        return _packed(tiles.shapes, items, capacities, self.heads)

    def _with_capacity(
        self, tiles: Tiles, num_tokens: IntArray, lengths: Sequence[int | None], batch: Batch, waves: Sequence[int]
    ) -> Work:
        capacities = []
        for shape, wave in zip(tiles.shapes, waves, strict=True):
            queries_per_tile = shape.tiling.block_m // self.heads
            num_tiles = min(batch.num_tokens, len(batch.seq_lens) + 1 + batch.num_tokens // queries_per_tile)
            # The parts of all split tiles fill at most two waves.
            max_queries = min(queries_per_tile, batch.max_query_len)
            capacities.append(Capacity(num_tiles + wave, 2 * wave, min(wave, num_tiles), max_queries))
        return _packed(tiles.shapes, _items_of(tiles, num_tokens, lengths), capacities, self.heads)


@cache
def planner_for(num_kv_heads: int, group: int, tilings: tuple[Tiling, ...], num_cores: int) -> StepPlanner:
    """Return the planner for these arguments; equal arguments give the same object."""
    attention_native.load()  # at set-up, and not in the first step
    return StepPlanner(num_kv_heads, group, tilings, num_cores)


class Capacity(NamedTuple):
    """The sizes for which an array has capacity; the fields are those of ``Programs``."""

    num_items: int
    num_slots: int
    num_splits: int
    split_queries: int


def _items_of(tiles: Tiles, num_tokens: IntArray, lengths: Sequence[int | None]) -> list[Items]:
    """Return the work items of programs of each shape, with no parts longer than ``lengths``."""
    found = []
    for shape, length in zip(tiles.shapes, lengths, strict=True):
        rows = slice(shape.first, shape.first + shape.num_tiles)
        whole = tiles.items[rows]
        if length is None:
            found.append(Items(NO_PARTS, whole, NO_SPLITS))
        else:
            found.append(split(whole, num_tokens[rows], length, shape.tiling.block_n))
    return found


def _packed(shapes: Sequence[Shape], items: Sequence[Items], capacities: Sequence[Capacity], heads: int) -> Work:
    """Return the work of all programs as one array, with zeros in unused capacity."""
    programs: list[Programs] = []
    end = 0
    for shape, capacity in zip(shapes, capacities, strict=True):
        first_split = end + _aligned(capacity.num_items * NUM_ITEM_FIELDS)
        programs.append(
            Programs(
                shape.tiling,
                heads,
                end,
                capacity.num_items,
                capacity.num_slots,
                first_split,
                capacity.num_splits,
                capacity.split_queries if capacity.num_splits else 0,
            )
        )
        end = first_split + _aligned(capacity.num_splits * NUM_SPLIT_FIELDS)
    numbers = np.zeros(end, dtype=np.int32)
    for each, place in zip(items, programs, strict=True):
        first_whole = place.first_item + each.parts.size
        numbers[first_whole : first_whole + each.whole.size] = each.whole.reshape(-1)
        if each.parts.size:
            numbers[place.first_item : first_whole] = each.parts.reshape(-1)
            numbers[place.first_split : place.first_split + each.splits.size] = each.splits.reshape(-1)
    return Work(numbers, tuple(programs))


def _aligned(num_numbers: int) -> int:
    return -(-num_numbers // ALIGNMENT) * ALIGNMENT
