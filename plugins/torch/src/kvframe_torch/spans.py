"""Find the pages that the requests of a step read, for all attention groups at once, in flat NumPy arrays on the host.

The *span* of a request is the pages that its queries see: one run of pages, or two if the first ones hold sink tokens.
One array operation takes longer to start than to compute one group, so each is called once for the spans of all groups.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.contract.metadata import NUM_PROMPT_TOKENS, SEQ_STARTS, CommonAttentionMetadata

NO_WINDOW = 1 << 30
"""The window of layers without a window."""

IntArray = npt.NDArray[np.signedinteger[Any]]


class Rules(NamedTuple):
    """The properties of a group's layers that decide which pages are read and which requests form a batch.

    Attributes:
        causal: Whether the layers' mask is causal.
        window: The number of tokens that a query sees, its own included; ``NO_WINDOW`` for all earlier ones.
        num_sink_tokens: The number of tokens at the start of each request that the window does not hide.
        max_keys: The most gathered tokens of a batch with several requests.
        free_padding: The most gathered padding of a batch, in tokens; a further batch would cost more.
        keeps_prompt: Whether the tokens of each request's prompt are sink tokens too.
    """

    causal: bool
    window: int
    num_sink_tokens: int
    max_keys: int
    free_padding: int
    keeps_prompt: bool = False

    def reached(self, max_seq_len: int) -> Rules:
        """Return the rules for requests of at most ``max_seq_len`` tokens. A longer window hides nothing."""
        if max_seq_len > self.window:
            return self
        return self._replace(window=NO_WINDOW, num_sink_tokens=0, keeps_prompt=False)


@attrs.frozen(eq=False)
class Spans:
    """The spans of some groups; each field is ``[num_spans], int64``.

    Spans are sorted by group. In a group, requests with one query come first, those with the most pages before others.

    Attributes:
        group: The span's group.
        first_row: The first query's row among the packed tokens.
        num_queries: The request's queries, at least one.
        position: The first query's position in its request; meaningless if the keys are of another sequence.
        start: The first token that ``SEQ_STARTS`` does not hide.
        low: The first token that a query sees, apart from sink tokens.
        stop: The token after the last one that a query sees.
        sink_stop: The token after the last sink token; 0 without sink tokens.
        num_sinks: Pages with sink tokens that are read before the page of ``low``.
        num_pages: Pages that are read.
        place: Gathered page ``i`` is at ``place + i`` in the flattened block table, unless it is a page of sinks.
        shift: Gathered token ``i`` has the position ``shift + i``, unless it is in a page of sinks.
        sink_shift: Gathered token ``i`` of a page of sinks has the position ``sink_shift + i``.
        block_size: Tokens per page.
    """

    group: IntArray
    first_row: IntArray
    num_queries: IntArray
    position: IntArray
    start: IntArray
    low: IntArray
    stop: IntArray
    sink_stop: IntArray
    num_sinks: IntArray
    num_pages: IntArray
    place: IntArray
    shift: IntArray
    sink_shift: IntArray
    block_size: IntArray

    @classmethod
    def of(cls, steps: Sequence[CommonAttentionMetadata], rules: Sequence[Rules]) -> Self:
        """Return the spans of all requests that have a query and a visible key.

        Args:
            steps: The groups' metadata of one step.
            rules: The rules of these groups.
        """
        bounds = [step.query_start_loc_cpu.numpy() for step in steps]
        lengths = np.array([step.num_reqs for step in steps])
        group = np.arange(len(steps)).repeat(lengths)
        first_row = np.concatenate([each[:-1] for each in bounds]).astype(np.int64)
        num_queries = np.concatenate([each[1:] for each in bounds]) - first_row
        stop = np.concatenate([step.seq_lens_cpu.numpy() for step in steps]).astype(np.int64)
        start = np.concatenate([_starts(step) for step in steps]).astype(np.int64)
        of_groups = [
            (step.causal and rule.causal, *rule[1:3], step.block_size, row_stride(step.block_table))
            for step, rule in zip(steps, rules, strict=True)
        ]
        causal, window, num_sink_tokens, block_size, row = np.array(of_groups, dtype=np.int64).T[:, group]

        if any(rule.keeps_prompt for rule in rules):
            of_prompts = [_prompt_lens(step) * rule.keeps_prompt for step, rule in zip(steps, rules, strict=True)]
            num_sink_tokens = np.maximum(num_sink_tokens, np.concatenate(of_prompts))
        position, sink_stop = stop - num_queries, num_sink_tokens * causal
        low = np.where(causal, np.maximum(position + 1 - window, start), start)
        first_page = low // block_size
        last_sink = np.minimum(-(-sink_stop // block_size), first_page)
        first_sink = np.minimum(start // block_size, last_sink)
        num_sinks, page_shift = last_sink - first_sink, first_page - last_sink + first_sink
        num_pages = -(-stop // block_size) - page_shift
        request = np.arange(len(group))
        place = (request - (lengths.cumsum() - lengths)[group]) * row + page_shift
        shifts = (page_shift * block_size, first_sink * block_size)
        every = (group, first_row, num_queries, position, start, low, stop, sink_stop, num_sinks, num_pages, place)

        # One sort: by group, single queries first, most pages first, then by request.
        most = num_pages.max(initial=0)
        key = ((2 * group + (num_queries > 1)) * (most + 1) + most - num_pages) * len(group) + request
        # Without causality, all keys may be hidden, or there may be none.
        order = np.sort(key[(num_queries > 0) & ((causal > 0) | (start < stop))]) % max(1, len(group))
        return cls(*(each[order] for each in (*every, *shifts, block_size)))

    def batch_bounds(self, rules: Sequence[Rules]) -> IntArray:
        """Return the first span of each batch, and the number of spans at the end, ``[num_batches + 1]``.

        A batch is one request with several queries, or some requests with one query. It gathers as many pages for each
        request as for its first one. If this padding exceeds ``free_padding``, the batch ends before the first request
        with at most half of these pages.

        Args:
            rules: The rules of the groups.
        """
        sizes, sums = (-self.num_pages).tolist(), [0, *self.num_pages.cumsum().tolist()]
        edges = np.searchsorted(2 * self.group + (self.num_queries > 1), np.arange(2 * len(rules) + 1)).tolist()
        bounds: list[int] = []
        for index, rule in enumerate(rules):
            first, end, end_of_group = edges[2 * index : 2 * index + 3]
            block_size = int(self.block_size[first]) if first < end else 1
            while first < end:
                bounds.append(first)
                most = -sizes[first]
                stop = min(first + max(1, rule.max_keys // (most * block_size)), end)
                padding = (stop - first) * most - (sums[stop] - sums[first])
                if padding * block_size > rule.free_padding:
                    stop = bisect_left(sizes, -most / 2, first, stop)
                first = stop
            bounds.extend(range(end, end_of_group))
        return np.array([*bounds, len(sizes)])

    def places(self, widths: IntArray, counted_from: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return the places in the flattened block table of each span's pages, sink pages first.

        Args:
            widths: ``[num_spans]``: the number of pages to gather for each span; a span with fewer pages repeats one.
            counted_from: ``[num_spans]``: for each span, the span whose first gathered page has the index 0.

        Returns:
            The places, ``[num_pages], int32``; the indices of repeated pages; and how many of these each span has,
            ``[num_spans]``.
        """
        begins = widths.cumsum() - widths
        places: IntArray = (self.place - begins).astype(np.int32).repeat(widths)
        places += np.arange(len(places), dtype=np.int32)
        if self.num_sinks.any():
            skipped = (self.shift - self.sink_shift) // self.block_size
            places[_ranges(begins, self.num_sinks)] -= skipped.repeat(self.num_sinks)
        num_repeated = widths - self.num_pages
        repeated = _ranges(begins + self.num_pages, num_repeated)
        places[repeated] = (self.place + self.num_sinks + self._has_inner_page).repeat(num_repeated)
        return places, repeated - begins[counted_from].repeat(num_repeated), num_repeated

    @property
    def _has_inner_page(self) -> npt.NDArray[np.bool_]:
        """Whether there is a page between that of ``low`` and the last one; a single query sees all of its tokens."""
        return self.num_pages - self.num_sinks > 2

    def distances(self, places: IntArray, widths: IntArray) -> IntArray:
        """Return, for each page, the position of its first token minus that of its request's first query.

        Args:
            places: What ``places`` returned.
            widths: As for ``places``.
        """
        pages: IntArray = places - self.place.repeat(widths)
        return pages * self.block_size.repeat(widths) + (self.shift - self.position).repeat(widths)

    def hidden(self, widths: IntArray, counted_from: IntArray) -> tuple[IntArray, IntArray]:
        """Return the gathered tokens that a single query does not see, without those of repeated pages.

        A query sees one run of tokens, or two with sink tokens; the hidden tokens lie around these runs.

        Args:
            widths: As for ``places``. Padding repeats a page with no hidden token. If there is none, the tokens of the
                padding count as hidden.
            counted_from: ``[num_spans]``: for each span, the span whose first gathered token has the index 0.

        Returns:
            The indices of the tokens, and how many of them each span has, ``[num_spans]``; 0 for several queries.
        """
        low, stop, sink_stop = self.low - self.shift, self.stop - self.shift, np.minimum(self.sink_stop, self.stop)
        last = np.where(self._has_inner_page, self.num_pages, widths) * self.block_size
        begins, ends = [np.zeros_like(low), stop], [low, last]
        if (has_sinks := sink_stop > self.start).any():
            sees_from, sees_to = ((each - self.sink_shift) * has_sinks for each in (self.start, sink_stop))
            begins, ends = [begins[0], sees_to, stop], [sees_from, np.maximum(sees_to, low), last]
        starts = np.stack(begins, axis=1)
        lengths = (np.stack(ends, axis=1) - starts) * (self.num_queries == 1)[:, None]
        offsets = (widths.cumsum() - widths) * self.block_size
        starts += (offsets - offsets[counted_from])[:, None]
        return _ranges(starts.ravel(), lengths.ravel()), lengths.sum(axis=1)


def _starts(step: CommonAttentionMetadata) -> IntArray:
    """Return the first token of each request that is not hidden."""
    return _of_requests(step, SEQ_STARTS)


def _prompt_lens(step: CommonAttentionMetadata) -> IntArray:
    """Return the tokens of each request's prompt, if a layer depends on them."""
    return _of_requests(step, NUM_PROMPT_TOKENS)


def _of_requests(step: CommonAttentionMetadata, extension: str) -> IntArray:
    """Return the values of an extension, one for each request; 0 for all if the step does not have it."""
    if extension not in step.extensions:
        return np.zeros(step.num_reqs, dtype=np.int32)
    values_cpu = step.extensions[extension].values_cpu
    assert values_cpu is not None
    found: IntArray = values_cpu.numpy()
    return found


def row_stride(table: torch.Tensor) -> int:
    """Return the distance between rows of a flattened block table; in memory, if the table is part of a wider one."""
    stride: int = table.stride(0)
    return stride if table.stride(1) == 1 and stride > table.shape[1] > 0 else table.shape[1]


def sums_between(bounds: IntArray, values: IntArray) -> IntArray:
    """Return the sum of the values from each bound up to the next one."""
    sums: IntArray = np.diff(np.concatenate(([0], values.cumsum()))[bounds])
    return sums


def _ranges(begins: IntArray, counts: IntArray) -> IntArray:
    """Return the members of many ranges, given their first members and their lengths."""
    ends = counts.cumsum()
    numbers: IntArray = (begins - ends + counts).repeat(counts)
    numbers += np.arange(len(numbers))
    return numbers
