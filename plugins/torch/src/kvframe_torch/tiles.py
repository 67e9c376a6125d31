"""Divides a step into tiles, and the tiles into batches: NumPy on the host, for all attention groups at once.

A tile is some consecutive queries of one request, together with the pages that these queries see. A batch is tiles of
one group and of about the same size. They are padded to one number of queries and one number of pages, so that a layer
computes them by one call of torch's attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Self

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.contract.metadata import SEQ_STARTS, CommonAttentionMetadata

NO_LIMIT = 1 << 30
"""Stands for a window, or a number of tokens, without a limit."""

MAX_MASK_ELEMENTS = 1 << 24
"""Elements of the mask of a batch of more than one tile."""

IntArray = npt.NDArray[np.signedinteger[Any]]
BoolArray = npt.NDArray[np.bool_]


@attrs.frozen
class TileRules:
    """What of a group's layers decides how their steps are divided.

    Attributes:
        causal: Whether the layers' mask is causal.
        window: Tokens that a query sees, its own included; ``NO_LIMIT`` for all before it.
        num_sink_tokens: Tokens at the start of each request that the window does not hide.
        least_prompt: Whole prompts of this many tokens and more are tiles without a mask: torch's own causal attention
            computes them.
        max_queries: The most queries of a tile with a mask.
        max_keys: The most gathered tokens of a batch of more than one tile.
        free_padding: If padding takes no more tokens than this, all single queries are one batch.
        mask_rows: Rows of a mask for each query: query heads that differ in their mask or are computed side by side.
    """

    causal: bool
    window: int
    num_sink_tokens: int
    least_prompt: int
    max_queries: int
    max_keys: int
    free_padding: int
    mask_rows: int


@attrs.frozen(eq=False)
class GroupLimits:
    """The rules of several groups, with what a step says of each: ``[num_groups], int64``, one array for each field.

    Attributes:
        block_size: Tokens per page.
        table_width: Columns of the block table.
        num_tokens: Rows of the step's queries.
    """

    causal: IntArray
    window: IntArray
    num_sink_tokens: IntArray
    least_prompt: IntArray
    max_queries: IntArray
    max_keys: IntArray
    free_padding: IntArray
    mask_rows: IntArray
    block_size: IntArray
    table_width: IntArray
    num_tokens: IntArray

    @classmethod
    def of(cls, steps: Sequence[CommonAttentionMetadata], rules: Sequence[TileRules]) -> Self:
        """Return the limits of some groups' steps."""
        rows = [
            (
                step.causal and rule.causal,
                rule.window,
                rule.num_sink_tokens,
                rule.least_prompt,
                rule.max_queries,
                rule.max_keys,
                rule.free_padding,
                rule.mask_rows,
                step.block_size,
                step.block_table.shape[1],
                step.slot_mapping.shape[0],
            )
            for step, rule in zip(steps, rules, strict=True)
        ]
        return cls(*np.array(rows, dtype=np.int64).reshape(len(rows), -1).T)


@attrs.frozen(eq=False)
class Tiles:
    """Tiles of some groups, ``[num_tiles]`` each.

    Attributes:
        group: The tile's group.
        request: The tile's request: its row of the block table.
        first_row: The first query's row among the packed tokens.
        num_queries: Its queries.
        position: The first query's position in its request; without meaning if the keys are of another sequence.
        start: The first token of the request that is not hidden.
        low: The first token that one of the queries sees, sink tokens aside.
        stop: The token after the last one that one of the queries sees.
        first_page: The page of ``low``.
        first_sink: The first page with sink tokens.
        num_sinks: Pages with sink tokens that are read, all before ``first_page``.
        num_pages: Pages that are read.
        is_prompt: Whether it is a whole prompt that needs no mask.
    """

    group: IntArray
    request: IntArray
    first_row: IntArray
    num_queries: IntArray
    position: IntArray
    start: IntArray
    low: IntArray
    stop: IntArray
    first_page: IntArray
    first_sink: IntArray
    num_sinks: IntArray
    num_pages: IntArray
    is_prompt: BoolArray

    @classmethod
    def of(cls, steps: Sequence[CommonAttentionMetadata], limits: GroupLimits) -> Self:
        """Return the tiles of each group's step, in the order of its tokens.

        Args:
            steps: The groups' metadata of one step.
            limits: Of these groups.
        """
        bounds = [step.query_start_loc_cpu.numpy() for step in steps]
        lengths = np.array([len(each) - 1 for each in bounds])
        bound = np.concatenate([each[:-1] for each in bounds]).astype(np.int64)
        num_new = np.concatenate([each[1:] for each in bounds]) - bound
        seq_lens = np.concatenate([step.seq_lens_cpu.numpy() for step in steps]).astype(np.int64)
        starts = np.concatenate([_starts(step) for step in steps]).astype(np.int64)
        group = np.arange(len(steps)).repeat(lengths)

        causal = limits.causal[group] > 0
        is_prompt = causal & (num_new >= limits.least_prompt[group]) & (num_new == seq_lens) & (starts <= 0)
        is_prompt &= seq_lens <= limits.window[group]
        size = np.where(is_prompt, num_new, limits.max_queries[group])
        # The keys of another sequence may all be hidden, or there may be none.
        counts = np.where(causal | (starts < seq_lens), -(-num_new // size.clip(1)), 0)

        index = np.arange(len(counts)).repeat(counts)
        offset = (np.arange(len(index)) - (counts.cumsum() - counts)[index]) * size[index]
        group, num_new, causal, start, stop = (
            group[index],
            num_new[index],
            causal[index],
            starts[index],
            seq_lens[index],
        )
        num_queries = np.minimum(size[index], num_new - offset)
        position = stop - num_new + offset
        stop = np.where(causal, position + num_queries, stop)
        low = np.where(causal, np.maximum(position + 1 - limits.window[group], start), start)
        block_size = limits.block_size[group]
        first_page = low // block_size
        last_sink = np.minimum(first_page, causal * -(-limits.num_sink_tokens[group] // block_size))
        first_sink = np.minimum(start // block_size, last_sink)
        num_sinks = last_sink - first_sink
        return cls(
            group=group,
            request=index - (lengths.cumsum() - lengths)[group],
            first_row=bound[index] + offset,
            num_queries=num_queries,
            position=position,
            start=start,
            low=low,
            stop=stop,
            first_page=first_page,
            first_sink=first_sink,
            num_sinks=num_sinks,
            num_pages=-(-stop // block_size) - first_page + num_sinks,
            is_prompt=is_prompt[index],
        )

    def __len__(self) -> int:
        return len(self.group)

    def batched(self, limits: GroupLimits) -> tuple[Self, IntArray]:
        """Return the tiles in batches, in which padding is less than half of the queries and of the keys, or little.

        Args:
            limits: Of the groups.

        Returns:
            The tiles, those of a batch in the order of the step, so that their rows follow one another; and
            ``[num_batches + 1]``: where each batch begins, and the end.
        """
        if not len(self):
            return self, np.zeros(1, dtype=np.int64)
        group, pages, num_queries = self.group, self.num_pages, self.num_queries
        first = np.flatnonzero(group[1:] != group[:-1]) + 1
        first = np.concatenate(([0], first))
        present = group[first]
        most_pages, most_queries, sum_pages = np.zeros((3, len(limits.causal)), dtype=np.int64)
        most_pages[present] = np.maximum.reduceat(pages, first)
        most_queries[present] = np.maximum.reduceat(num_queries, first)
        sum_pages[present] = np.add.reduceat(pages, first)
        padding = (np.bincount(group, minlength=len(most_pages)) * most_pages - sum_pages) * limits.block_size
        is_free = (padding <= limits.free_padding) & (most_queries == 1)
        # Sizes in (most / 2, most], (most / 4, most / 2], … are not mixed.
        kinds = (self.is_prompt * 64 + _halvings(most_queries[group] // num_queries)) * 64
        kinds += _halvings(most_pages[group] // pages)
        kinds = group * (1 << 14) + np.where(is_free[group], 0, kinds)
        # One sort by the kind, by pages from the most down, and by the order of the step.
        num_tiles, most = len(self), int(most_pages.max())
        order = np.sort((kinds * (most + 1) + (most - pages)) * num_tiles + np.arange(num_tiles)) % num_tiles
        kinds, pages = kinds[order], pages[order]

        edges = np.concatenate(([0], np.flatnonzero(kinds[1:] != kinds[:-1]) + 1))
        of_edge, queries = group[order[edges]], np.maximum.reduceat(num_queries[order], edges)
        max_keys = np.minimum(limits.max_keys[of_edge], MAX_MASK_ELEMENTS // (queries * limits.mask_rows[of_edge]))
        max_pages = max_keys // limits.block_size[of_edge]
        cuts = [0]
        for (first_tile, stop), most in zip(
            itertools.pairwise([*edges.tolist(), num_tiles]), max_pages.tolist(), strict=True
        ):
            while first_tile < stop:
                first_tile = min(first_tile + max(1, most // int(pages[first_tile])), stop)
                cuts.append(first_tile)
        bounds = np.array(cuts)
        of_batch = np.arange(len(cuts) - 1).repeat(bounds[1:] - bounds[:-1])
        order = np.sort(of_batch * num_tiles + order) % num_tiles
        return type(self)(*(getattr(self, name)[order] for name in _COLUMNS)), bounds


_COLUMNS = tuple(field.name for field in attrs.fields(Tiles))


def _starts(step: CommonAttentionMetadata) -> IntArray:
    """Return the first token of each request that is not hidden."""
    if SEQ_STARTS not in step.extensions:
        return np.zeros(step.seq_lens_cpu.shape[0], dtype=np.int32)
    values_cpu = step.extensions[SEQ_STARTS].values_cpu
    assert values_cpu is not None
    found: IntArray = values_cpu.numpy()
    return found


def _halvings(ratios: IntArray) -> IntArray:
    """Return how often the largest of some numbers is halved until it is less than twice each number.

    Args:
        ratios: The largest number, divided by each.
    """
    found: IntArray = np.frexp(ratios)[1]
    return found
