"""The host side of paged attention: divides a step into work items of about equal length, from host arrays only.

A tile is as many consecutive queries of one request as fill a program's rows. A tile that sees much more than a
program's fair share of the step is split into parts over the tokens that it sees, and the parts are merged afterwards
(Flash-Decoding; the shares are as in FlashInfer's planner, arXiv 2501.01005). C code plans a step for the masks of all
layers. The result is one array for each mask, so that one tensor is copied to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvframe_kernels.triton import attention_native

IntArray = npt.NDArray[np.int32]

NUM_ITEM_FIELDS = 8
"""Numbers of a work item: row in the block table, first query, queries, position of the first query, end of the seen
tokens, end of the hidden tokens, index of the part of a tile, and blocks of tokens of a part; the last two are 0 for a
whole tile."""
NUM_SPLIT_FIELDS = 4
"""Numbers of a split tile: its first query, its queries, the slot of its first part, its parts."""
MAX_SMALL_ROWS = 64
"""The most rows (queries times query heads of a program) for which a request is one tile of a small program."""
UNBOUNDED = 1 << 30
"""More tokens than a sequence has: a window, a chunk or sink tokens of this number hide nothing. It fits 32 bits."""
FEWEST_ITEMS_PER_CORE = 4
"""The fewest work items of a multiprocessor with which the largest shape for prompts is the fastest."""


class Mask(NamedTuple):
    """The past tokens that a layer hides, sink tokens aside: they are so few that they do not count.

    Attributes:
        window: The number of positions that a query sees, counted back from its own; 0 for all.
        chunk: Tokens of a chunk that its queries stay within; 0 for none.
    """

    window: int = 0
    chunk: int = 0


ALL = Mask()


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
    range_ends: IntArray | None = None


def batch_of_chosen(num_tokens: int, num_chosen: int) -> Batch:
    """Return the batch of queries that read chosen tokens: each query is a request of its own.

    Args:
        num_tokens: Packed tokens.
        num_chosen: The most tokens that are chosen for a query.
    """
    return Batch(
        query_start_loc=np.arange(num_tokens + 1, dtype=np.int32),
        seq_lens=np.full(num_tokens, num_chosen, dtype=np.int32),
        seq_starts=None,
        num_tokens=num_tokens,
        causal=False,
        max_query_len=1,
    )


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
        works, places = attention_native.load().plan(
            batch.query_start_loc,
            batch.seq_lens,
            batch.seq_starts,
            batch.range_ends,
            batch.num_tokens,
            batch.causal,
            batch.static,
            batch.max_query_len,
            masks,
            self.heads,
            self._shapes,
        )
        works_of_plan = [
            Work(
                np.frombuffer(numbers, dtype=np.int32),
                tuple([Programs(self.tilings[tiling], self.heads, *place) for tiling, *place in programs]),
            )
            for numbers, programs in works
        ]
        return [works_of_plan[place] for place in places]

    @cached_property
    def _shapes(self) -> bytes:
        """For each tiling, its rows, the tokens of an iteration, the work items at a time, and tokens of a part."""
        numbers = [(tiling.block_m, tiling.block_n, self._wave(tiling), tiling.min_split) for tiling in self.tilings]
        return np.array(numbers, dtype=np.int32).tobytes()

    def _wave(self, tiling: Tiling) -> int:
        """Return the number of work items that run at the same time."""
        return max(1, self.num_cores * tiling.programs_per_core // self._programs)


@cache
def planner_for(num_kv_heads: int, group: int, tilings: tuple[Tiling, ...], num_cores: int) -> StepPlanner:
    """Return the planner for these arguments; equal arguments give the same object."""
    attention_native.load()  # at set-up, and not in the first step
    return StepPlanner(num_kv_heads, group, tilings, num_cores)
