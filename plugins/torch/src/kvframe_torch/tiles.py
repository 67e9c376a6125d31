"""Find out, in flat NumPy arrays on the host, which tokens a step's queries see, and which requests form a batch.

A *span* is the queries of one request, and the tokens that they see: those of the window, and sink tokens. The pages of
both runs of tokens are gathered side by side, those of sink tokens first. From then on, a token is known by its *place*
among the gathered tokens of its span, so no layer needs its position.

One array operation takes longer to start than to compute one group, so each is called once for the spans of all groups
that read the same step. The spans of a group follow those of the group before it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from kvframe.contract.metadata import RANGE_ENDS, SEQ_STARTS, CommonAttentionMetadata
from kvframe.contract.specs import AttentionMask, LayerSpec

IntArray = npt.NDArray[np.signedinteger[Any]]

MAX_ROWS = 256
"""The most queries of a tile, times the query heads of a KV head."""

MAX_BIAS_ROWS = 2048
"""The most queries of a tile, times all query heads, if each head has a bias of its own."""

MAX_BATCH_BYTES = 1 << 23
"""The most bytes of keys, or of values, that a CPU gathers at once; they then stay in its cache until they are read."""

MAX_BATCH_PAIRS = 1 << 15
"""The most pairs of a query and a key in a batch with several tiles; it bounds the memory of copies and masks."""

FREE_PADDING_ELEMENTS = 3 << 17
"""Elements of keys and values that a batch may gather as padding; a second batch would cost more."""

_CAUSAL, _BIDIRECTIONAL = AttentionMask(), AttentionMask(causal=False)
_NO_WINDOW = 1 << 40


class Rules(NamedTuple):
    """The properties of a group's layers that decide what is gathered and seen.

    Attributes:
        mask: The layers' mask.
        max_queries: The most queries of a tile.
        max_keys: The most gathered tokens of a batch with several tiles.
        free_padding: The most gathered padding of a batch, in tokens, that costs less than a further batch.
        has_bias: Whether a bias depends on distances.
    """

    mask: AttentionMask
    max_queries: int
    max_keys: int
    free_padding: int
    has_bias: bool

    @classmethod
    def of(cls, layer: LayerSpec, device: torch.device) -> Self:
        """Return the rules of a layer whose cache lies on a device."""
        assert layer.spec is not None
        assert layer.query is not None
        assert layer.spec.mask is not None
        state, num_heads = layer.spec.state_tensors(), layer.query.num_heads
        has_bias = layer.query.relative_bias is not None or layer.query.alibi_slopes is not None
        max_keys, max_queries = MAX_BATCH_PAIRS, MAX_ROWS * state["k"].shape[1] // num_heads
        if device.type == "cpu":
            token_bytes = max(tensor.num_bytes // tensor.shape[0] for tensor in state.values())
            max_keys = min(max_keys, MAX_BATCH_BYTES // token_bytes)
        if has_bias:
            max_queries = min(max_queries, MAX_BIAS_ROWS // num_heads)
        free_padding = FREE_PADDING_ELEMENTS // sum(math.prod(tensor.shape[1:]) for tensor in state.values())
        return cls(layer.spec.mask, max(1, max_queries), max_keys, free_padding, has_bias)

    def reached(self, step: CommonAttentionMetadata) -> Self:
        """Return the rules of a step. A window that no request has reached hides nothing."""
        mask = self.mask
        if not step.causal or mask.sees_all:
            return self._replace(mask=_BIDIRECTIONAL)
        sizes = mask.window, None if mask.lookahead is None else mask.lookahead + 1
        is_reached = any(size is not None and step.max_seq_len > size for size in sizes)
        return self if is_reached else self._replace(mask=_CAUSAL if mask.causal else _BIDIRECTIONAL)

    @property
    def alike(self) -> Hashable:
        """The properties that groups must share so that their spans are found together."""
        return self.mask.causal, self.mask.sees_all, self.has_sinks, self.max_queries, self.has_bias

    @property
    def has_sinks(self) -> bool:
        """Whether there may be sink tokens."""
        return self.mask.num_sink_tokens > 0


class Spans(NamedTuple):
    """The spans of a step. In each group, those with fewer queries come first, of these those with more pages.

    Attributes:
        request: ``[num_spans]``: the request.
        first: ``[num_spans]``: its first query among the packed tokens.
        num_queries: ``[num_spans]``: its queries, at least one.
        position: ``[num_spans]``: the position of the first query; meaningless if the keys are of another sequence.
        num_pages: ``[num_spans]``: its pages.
        num_sinks: ``[num_spans]``: how many of these are sink tokens' alone.
        skipped: ``[1 or 2, num_spans]``: by how many blocks each run lies earlier among the gathered pages than in the
            request.
        low: ``[1 or 2, num_spans]``: the place of the first token of each run that some query sees.
        stop: ``[1 or 2, num_spans]``: likewise, the place after the last one.
    """

    request: IntArray
    first: IntArray
    num_queries: IntArray
    position: IntArray
    num_pages: IntArray
    num_sinks: IntArray
    skipped: IntArray
    low: IntArray
    stop: IntArray

    @classmethod
    def of(cls, step: CommonAttentionMetadata, rules: Sequence[Rules]) -> Self:
        """Return the spans of groups with these rules. A request without a query or a visible key has none."""
        bounds, seq_len, start = step.query_start_loc_cpu.numpy(), step.seq_lens_cpu.numpy(), _values(step, SEQ_STARTS)
        request = np.flatnonzero((bounds[:-1] < bounds[1:]) & (start < seq_len))
        first, start, end = bounds[request], start[request], seq_len[request]
        num_queries = bounds[1:][request] - first
        position = end - num_queries
        masks = [rule.mask for rule in rules]
        window = np.array([[_NO_WINDOW if mask.window is None else mask.window] for mask in masks])
        low = np.maximum(position + 1 - window, start)[None]
        stop = np.broadcast_to(end, low.shape)
        if rules[0].has_sinks:
            sink_stop = np.minimum([[mask.num_sink_tokens] for mask in masks], end)
            low = np.array([low[0], np.minimum(start, sink_stop)])
            stop = np.array([stop[0], sink_stop])
        skipped, stop_page = low // step.block_size, -(-stop // step.block_size)
        num_pages, num_sinks = stop_page[0] - skipped[0], np.zeros_like(skipped[0])
        if len(skipped) > 1:
            num_sinks = np.minimum(stop_page[1], skipped[0]) - skipped[1]
            num_pages, skipped[0] = num_pages + num_sinks, skipped[0] - num_sinks
        low, stop = low - skipped * step.block_size, stop - skipped * step.block_size
        # One sort of numbers that contain the request is faster than a stable one.
        keys = num_queries * (num_pages.max(initial=0) + 1) - num_pages
        order = np.sort(keys * len(request) + np.arange(len(request))) % max(1, len(request))
        place = (order + np.arange(len(rules))[:, None] * len(request)).ravel()
        of_requests = (each[order.ravel()] for each in (request, first, num_queries, position))
        of_spans = (num_pages, num_sinks, skipped, low, stop)
        return cls(*of_requests, *(each.reshape(*each.shape[:-2], -1)[..., place] for each in of_spans))

    def tiles(self, span: IntArray, number: IntArray, max_queries: int) -> Self:
        """Return parts of spans with at most ``max_queries`` queries, given each part's span and first query in it."""
        of_span = type(self)(*(each[..., span] for each in self))
        num_queries = np.minimum(of_span.num_queries - number, max_queries)
        return of_span._replace(
            first=of_span.first + number, position=of_span.position + number, num_queries=num_queries
        )

    def runs(self, rows: IntArray, step: CommonAttentionMetadata, rules: Sequence[Rules]) -> IntArray:
        """Return what each query sees, ``[2 or 4, num_queries]``, in places.

        The first row is the first token of its window, the second one the token after the last one that it sees; then
        the same of sink tokens, if there may be any.

        Args:
            rows: ``[num_queries]``: the packed token of each query, span after span.
            step: The step.
            rules: The rules of the groups.
        """
        runs: IntArray = np.stack((self.low, self.stop), axis=1).reshape(2 * len(self.low), -1)
        runs = runs.repeat(self.num_queries, axis=1)
        if not rules[0].mask.sees_all and step.max_query_len > 1:
            shifts = (self.skipped * step.block_size).repeat(self.num_queries, axis=1)
            sizes = [(rule.mask.window or _NO_WINDOW, rule.mask.lookahead or 0) for rule in rules]
            window, lookahead = np.array(sizes).T.repeat(len(rows) // len(rules), axis=1)
            stop = self.positions(rows) + 1
            runs[0] = np.maximum(runs[0], stop - shifts[0] - window)
            runs[1] = np.minimum(runs[1], stop - shifts[0] + lookahead)
            if len(shifts) > 1:
                runs[3] = np.minimum(runs[3], stop - shifts[1])
                runs[2] = np.minimum(runs[2], runs[3])
            if RANGE_ENDS in step.extensions and rules[0].mask.causal:
                runs[1] = np.maximum(runs[1], _values(step, RANGE_ENDS)[rows] - shifts[0])
        return runs

    def positions(self, rows: IntArray) -> IntArray:
        """Return the position of each query in its request, ``[num_queries]``."""
        return rows + (self.position - self.first).repeat(self.num_queries)

    def places(self, rows: IntArray, widths: IntArray) -> IntArray:
        """Return where the block ids of all pages are in the flattened block table, ``[num_pages], int32``.

        Args:
            rows: ``[num_spans]``: the place of the first block id of each span's request.
            widths: ``[num_spans]``: the number of pages to gather for each span; one with fewer pages repeats a page.
        """
        begins, first, num_repeated = widths.cumsum() - widths, rows + self.skipped[0], widths - self.num_pages
        places: IntArray = (first - begins).astype(np.int32).repeat(widths)
        places += np.arange(len(places), dtype=np.int32)
        if len(self.skipped) > 1:
            places[ranges(begins, self.num_sinks)] -= (self.skipped[0] - self.skipped[1]).repeat(self.num_sinks)
        if num_repeated.any():
            repeated = (first + self.num_sinks + self._has_inner_page).repeat(num_repeated)
            places[ranges(begins + self.num_pages, num_repeated)] = repeated
        return places

    @property
    def _has_inner_page(self) -> npt.NDArray[np.bool_]:
        """Whether there is a page between the window's first and last one; every token of such a page is seen."""
        return self.num_pages > self.num_sinks + 2

    def dead(self, widths: IntArray, offsets: IntArray, block_size: int) -> tuple[IntArray, IntArray]:
        """Return the gathered tokens that no query of their span sees, and how many each span has.

        They lie around both runs. If there is no better page to repeat, the tokens of repeated pages are dead too.

        Args:
            widths: As for ``places``.
            offsets: ``[num_spans]``: the index of each span's first page, from where on tokens are counted.
            block_size: Tokens per page.
        """
        ends_of_pages = np.where(self._has_inner_page, self.num_pages, widths) * block_size
        begins = np.array([np.zeros_like(self.first), *self.stop[::-1]])
        counts = np.maximum(np.array([*self.low[::-1], ends_of_pages]) - begins, 0)
        begins += offsets * block_size
        return ranges(begins.T.ravel(), counts.T.ravel()), counts.sum(axis=0)


def batch_edges(num_queries: IntArray, num_pages: IntArray, block_size: int, rules: Sequence[Rules]) -> IntArray:
    """Return the first span of each batch, and the number of spans at the end.

    A batch is spans of equally many queries. If the padding of a batch
    exceeds ``free_padding``, it ends before the first span with at most half of the pages of its first one. Padding
    costs more if spans have several queries; then the batch ends before the first span with fewer pages.

    Args:
        num_queries: ``[num_spans]``: the queries of each span, in the order of ``Spans``.
        num_pages: ``[num_spans]``: its pages.
        block_size: Tokens per page.
        rules: The rules of the groups. All groups have equally many spans.
    """
    sizes, sums, queries = (-num_pages).tolist(), [0, *num_pages.cumsum().tolist()], num_queries.tolist()
    edges = [0]
    for number, rule in enumerate(rules, start=1):
        end = number * (len(sizes) // len(rules))
        while (first := edges[-1]) < end:
            most, of_span = -sizes[first], queries[first]
            max_keys = min(rule.max_keys, MAX_BATCH_PAIRS // min(of_span, rule.max_queries))
            stop = min(first + max(1, max_keys // (most * block_size)), bisect_right(queries, of_span, first, end))
            padding = (stop - first) * most - (sums[stop] - sums[first])
            if padding * block_size * of_span > rule.free_padding:
                stop = bisect_left(sizes, -most / 2 if of_span == 1 else 1 - most, first, stop)
            edges.append(stop)
    return np.array(edges)


def _values(metadata: CommonAttentionMetadata, extension: str) -> IntArray:
    """Return the values of an extension on the host; 0 for each request if the step does not have it."""
    if extension not in metadata.extensions:
        return np.zeros(metadata.num_reqs, dtype=np.int64)
    values_cpu = metadata.extensions[extension].values_cpu
    assert values_cpu is not None
    return values_cpu.numpy().astype(np.int64)


def ranges(begins: IntArray, counts: IntArray) -> IntArray:
    """Return the members of many ranges, given their first members and their lengths."""
    ends = counts.cumsum()
    numbers: IntArray = (begins - ends + counts).repeat(counts)
    numbers += np.arange(len(numbers))
    return numbers
