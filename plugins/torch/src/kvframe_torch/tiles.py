"""Divide a step into tiles, in flat NumPy arrays on the host, and find out which tokens each query sees.

A *tile* is some consecutive queries of one request. Together they see two runs of tokens: those of the window, and sink
tokens. The pages of both runs are gathered side by side, those of sink tokens first. From then on, a token is known by
its place among the gathered tokens of its tile, so no layer needs its position. A *batch* is tiles of equally many
queries, which one call computes; it gathers equally many pages for each tile.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from kvframe.contract.metadata import NUM_PROMPT_TOKENS, RANGE_ENDS, SEQ_STARTS, CommonAttentionMetadata
from kvframe.contract.specs import AttentionMask, LayerSpec

IntArray = npt.NDArray[np.signedinteger[Any]]

MAX_ROWS = 256
"""The most queries of a tile, times the query heads of a KV head."""

MAX_BIAS_ROWS = 2048
"""The most queries of a tile, times all query heads, if each head has a learned bias of its own."""

MAX_BATCH_BYTES = 1 << 23
"""The most bytes of keys, or of values, that a CPU gathers at once; they then stay in its cache until they are read."""

MAX_BATCH_PAIRS = 1 << 15
"""The most pairs of a query and a key in a batch with several tiles; it bounds the memory of copies and masks."""

FREE_PADDING_ELEMENTS = 3 << 17
"""Elements of keys and values that a batch may gather as padding; a second batch would cost more."""

_CAUSAL, _BIDIRECTIONAL = AttentionMask(), AttentionMask(causal=False)


class Rules(NamedTuple):
    """The properties of a group's layers that decide what is gathered and seen.

    Attributes:
        mask: The layers' mask.
        max_queries: The most queries of a tile.
        max_keys: The most gathered tokens of a batch with several tiles.
        free_padding: The most gathered padding of a batch, in tokens, that costs less than a further batch.
        max_distance: From which distance on a learned bias stays the same; None without a learned bias.
    """

    mask: AttentionMask
    max_queries: int
    max_keys: int
    free_padding: int
    max_distance: int | None

    @classmethod
    def of(cls, layer: LayerSpec, device: torch.device) -> Self:
        """Return the rules of a layer whose cache lies on a device."""
        assert layer.spec is not None
        assert layer.query is not None
        assert layer.spec.mask is not None
        state, num_heads, bias = layer.spec.state_tensors(), layer.query.num_heads, layer.query.relative_bias
        max_keys, max_queries = MAX_BATCH_PAIRS, MAX_ROWS * state["k"].shape[1] // num_heads
        if device.type == "cpu":
            token_bytes = max(tensor.num_bytes // tensor.shape[0] for tensor in state.values())
            max_keys = min(max_keys, MAX_BATCH_BYTES // token_bytes)
        if bias is not None:
            max_queries = min(max_queries, MAX_BIAS_ROWS // num_heads)
        free_padding = FREE_PADDING_ELEMENTS // sum(math.prod(tensor.shape[1:]) for tensor in state.values())
        max_distance = None if bias is None else bias.max_distance
        return cls(layer.spec.mask, max(1, max_queries), max_keys, free_padding, max_distance)

    def reached(self, step: CommonAttentionMetadata) -> Self:
        """Return the rules of a step. A window that no request has reached hides nothing."""
        if not (step.causal and self.mask.causal):
            return self._replace(mask=_BIDIRECTIONAL)
        is_reached = self.mask.window is not None and step.max_seq_len > self.mask.window
        return self if is_reached else self._replace(mask=_CAUSAL)


class Queries(NamedTuple):
    """The queries of a step, in the order of the packed tokens.

    Attributes:
        request: ``[num_queries]``: the request of each query.
        number: ``[num_queries]``: its number among the request's queries.
        num_left: ``[num_queries]``: the request's queries from this one on.
        position: ``[num_queries]``: its position in the request; meaningless if the keys are of another sequence.
        runs: ``[2 or 4, num_queries]``: the first token of its window and the token after the last one that it sees;
            then the same of sink tokens, if there may be any.
    """

    request: IntArray
    number: IntArray
    num_left: IntArray
    position: IntArray
    runs: IntArray

    @classmethod
    def of(cls, metadata: CommonAttentionMetadata, rules: Rules) -> Self:
        """Return the queries of a step for a group's rules."""
        bounds, seq_len = metadata.query_start_loc_cpu.numpy(), metadata.seq_lens_cpu.numpy()
        request = np.arange(metadata.num_reqs).repeat(bounds[1:] - bounds[:-1])
        token, ends = np.arange(len(request)), bounds[1:][request]
        position, start = token + seq_len[request] - ends, _values(metadata, SEQ_STARTS)[request]
        runs, mask = [start, seq_len[request]], rules.mask
        if mask.causal:
            runs[1] = position + 1
            if mask.window is not None:
                runs[0] = np.maximum(position + 1 - mask.window, start)
            if mask.num_sink_tokens or mask.keeps_prompt:
                num_kept = np.maximum(_values(metadata, NUM_PROMPT_TOKENS) * mask.keeps_prompt, mask.num_sink_tokens)
                sink_stop = np.minimum(num_kept[request], position + 1)
                runs += [np.minimum(start, sink_stop), sink_stop]
            if RANGE_ENDS in metadata.extensions:
                runs[1] = np.maximum(runs[1], _values(metadata, RANGE_ENDS)[: len(position)])
        return cls(request, token - bounds[request], ends - token, position, np.array(runs, dtype=np.int64))


class Tiles(NamedTuple):
    """The tiles of a step: those with fewer queries first, of these those with more pages.

    Attributes:
        first: ``[num_tiles]``: the first query of each tile.
        num_queries: ``[num_tiles]``: its queries.
        num_pages: ``[num_tiles]``: its pages.
        num_sinks: ``[num_tiles]``: how many of these are sink tokens' alone.
        skipped: ``[1 or 2, num_tiles]``: by how many blocks each run lies earlier among the gathered pages than in the
            request.
        low: ``[1 or 2, num_tiles]``: the first token of each run, counted among the gathered tokens.
        stop: ``[1 or 2, num_tiles]``: likewise, the token after the last one.
    """

    first: IntArray
    num_queries: IntArray
    num_pages: IntArray
    num_sinks: IntArray
    skipped: IntArray
    low: IntArray
    stop: IntArray

    @classmethod
    def of(cls, queries: Queries, block_size: int, max_queries: int) -> Self:
        """Return tiles of at most ``max_queries`` queries; a query that sees no token is in none."""
        runs = queries.runs
        first = np.flatnonzero((queries.number % max_queries == 0) & (runs[0] < runs[1]))
        num_queries = np.minimum(queries.num_left[first], max_queries)
        low, stop = runs[0::2, first], runs[1::2, first + num_queries - 1]
        skipped, stop_page = low // block_size, -(-stop // block_size)
        num_pages, num_sinks = stop_page[0] - skipped[0], np.zeros_like(first)
        if len(skipped) > 1:
            num_sinks = np.minimum(stop_page[1], skipped[0]) - skipped[1]
            num_pages, skipped[0] = num_pages + num_sinks, skipped[0] - num_sinks
        low, stop = low - skipped * block_size, stop - skipped * block_size
        order = np.argsort(num_queries * (num_pages.max(initial=0) + 1) - num_pages, kind="stable")
        arrays = first, num_queries, num_pages, num_sinks, skipped, low, stop
        return cls(*(each[..., order] for each in arrays))

    def places(self, rows: IntArray, widths: IntArray) -> IntArray:
        """Return where the block ids of all pages are in the flattened block table, ``[num_pages], int32``.

        Args:
            rows: ``[num_tiles]``: the place of the first block id of each tile's request.
            widths: ``[num_tiles]``: the number of pages to gather for each tile; one with fewer pages repeats a page.
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
        """Return the gathered tokens that no query of their tile sees, and how many each tile has.

        They lie around both runs. If there is no better page to repeat, the tokens of repeated pages are dead too.

        Args:
            widths: As for ``places``.
            offsets: ``[num_tiles]``: the index of each tile's first page, from where on tokens are counted.
            block_size: Tokens per page.
        """
        ends_of_pages = np.where(self._has_inner_page, self.num_pages, widths) * block_size
        begins = np.array([np.zeros_like(self.first), *self.stop[::-1]])
        counts = np.maximum(np.array([*self.low[::-1], ends_of_pages]) - begins, 0)
        begins += offsets * block_size
        return ranges(begins.T.ravel(), counts.T.ravel()), counts.sum(axis=0)


def batch_edges(num_queries: IntArray, num_pages: IntArray, block_size: int, rules: Rules) -> IntArray:
    """Return the first tile of each batch, and the number of tiles at the end.

    Tiles are sorted: those with fewer queries first, of these those with more pages. If the padding of a batch exceeds
    ``free_padding``, it ends before the first tile with at most half of the pages of its first one. Padding costs more
    if tiles have several queries; then the batch ends before the first tile with fewer pages.
    """
    sizes, sums, queries = (-num_pages).tolist(), [0, *num_pages.cumsum().tolist()], num_queries.tolist()
    edges = [0]
    while (first := edges[-1]) < len(sizes):
        most, of_tile = -sizes[first], queries[first]
        max_keys = min(rules.max_keys, MAX_BATCH_PAIRS // of_tile)
        stop = min(first + max(1, max_keys // (most * block_size)), bisect_right(queries, of_tile))
        padding = (stop - first) * most - (sums[stop] - sums[first])
        if padding * block_size * of_tile > rules.free_padding:
            stop = bisect_left(sizes, -most / 2 if of_tile == 1 else 1 - most, first, stop)
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
