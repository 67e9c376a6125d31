"""Divides a step into tiles, and the tiles into batches: NumPy on the host.

A tile is some consecutive queries of one request, together with the pages that these queries see. A batch is tiles of
about the same size. They are padded to one number of queries and one number of pages, so that a layer computes them by
one call of torch's attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

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
class Tiles:
    """Some tiles of a step, ``[num_tiles]`` each.

    Attributes:
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
    def of(cls, step: CommonAttentionMetadata, rules: TileRules) -> Tiles:
        """Return the tiles of a step, in the order of its tokens."""
        causal, block_size = step.causal and rules.causal, step.block_size
        bounds, seq_lens = step.query_start_loc_cpu.numpy(), step.seq_lens_cpu.numpy()
        num_new, starts = bounds[1:] - bounds[:-1], np.zeros_like(seq_lens)
        if SEQ_STARTS in step.extensions:
            values_cpu = step.extensions[SEQ_STARTS].values_cpu
            assert values_cpu is not None
            starts = values_cpu.numpy()
        is_prompt = np.full(len(num_new), causal)
        is_prompt &= (
            (num_new >= rules.least_prompt) & (num_new == seq_lens) & (starts <= 0) & (seq_lens <= rules.window)
        )
        size = np.where(is_prompt, num_new, np.int32(rules.max_queries))
        counts = -(-num_new // size.clip(1))
        if not causal:  # The keys of another sequence may all be hidden, or there may be none.
            counts = np.where(starts < seq_lens, counts, 0)
        request = np.arange(len(counts)).repeat(counts)
        offset = (np.arange(len(request)) - (counts.cumsum() - counts)[request]) * size[request]
        num_queries = np.minimum(size[request], num_new[request] - offset)
        position = (seq_lens - num_new)[request] + offset
        start = low = starts[request]
        stop = seq_lens[request]
        sink_pages = 0
        if causal:
            stop = position + num_queries
            low = np.maximum(position + (1 - rules.window), start)
            sink_pages = -(-rules.num_sink_tokens // block_size)
        first_page = low // block_size
        last_sink = np.minimum(first_page, sink_pages)
        first_sink = np.minimum(start // block_size, last_sink)
        num_sinks = last_sink - first_sink
        return cls(
            request=request,
            first_row=bounds[request] + offset,
            num_queries=num_queries,
            position=position,
            start=start,
            low=low,
            stop=stop,
            first_page=first_page,
            first_sink=first_sink,
            num_sinks=num_sinks,
            num_pages=-(-stop // block_size) - first_page + num_sinks,
            is_prompt=is_prompt[request],
        )

    def __len__(self) -> int:
        return len(self.request)

    def batches(self, rules: TileRules, block_size: int) -> Iterator[Tiles]:
        """Yield the tiles in batches, in which padding is less than half of the queries and of the keys, or little.

        Args:
            rules: Of the group's layers.
            block_size: Tokens per page.
        """
        if not len(self):
            return
        pages, most = self.num_pages, int(self.num_pages.max())
        # Sizes in (most / 2, most], (most / 4, most / 2], … are not mixed.
        kinds = np.stack((self.is_prompt, _halvings(self.num_queries), _halvings(pages)))
        padding = (len(self) * most - int(pages.sum())) * block_size
        if padding <= rules.free_padding and self.num_queries.max() == 1:
            kinds[:] = 0
        order = np.lexsort((-pages, *kinds))
        pages, kinds = pages[order], kinds[:, order]
        edges = (kinds[:, 1:] != kinds[:, :-1]).any(axis=0).nonzero()[0] + 1
        cuts = [0]
        for first, stop in itertools.pairwise([0, *edges.tolist(), len(self)]):
            num_queries = int(self.num_queries[order[first:stop]].max())
            max_keys = min(rules.max_keys, MAX_MASK_ELEMENTS // (num_queries * rules.mask_rows))
            while first < stop:
                first = min(first + max(1, max_keys // (int(pages[first]) * block_size)), stop)
                cuts.append(first)
        for first, stop in itertools.pairwise(cuts):
            order[first:stop].sort()  # tiles stay in the order of the step, so that their rows follow one another
        columns = [getattr(self, name)[order] for name in _COLUMNS]
        for first, stop in itertools.pairwise(cuts):
            yield Tiles(*(column[first:stop] for column in columns))


_COLUMNS = tuple(field.name for field in attrs.fields(Tiles))


def _halvings(numbers: IntArray) -> IntArray:
    """Return how often the largest number is halved until it is less than twice each number."""
    found: IntArray = np.frexp(numbers.max() // numbers)[1]
    return found
