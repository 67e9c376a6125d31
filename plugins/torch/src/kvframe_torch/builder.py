"""Build the torch backend's metadata: the pages that a step gathers, and the requests that are computed together."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Self

import attrs
import numpy as np
import torch

from kvframe.contract.backend import AttentionMetadataBuilder
from kvframe.contract.metadata import NUM_PROMPT_TOKENS, RANGE_ENDS, SEQ_STARTS, CommonAttentionMetadata
from kvframe.contract.relative_bias import bias_columns
from kvframe.contract.specs import LayerSpec
from kvframe_torch.spans import NO_WINDOW, Rules, Spans, row_stride, sums_between

MAX_BATCH_KEYS = 1 << 16
"""The most gathered tokens of a batch with several requests; it bounds the memory of the copies."""

MAX_BATCH_BYTES = 1 << 23
"""The most bytes of keys, or of values, that a CPU gathers at once; they then stay in its cache until they are read."""

FREE_PADDING_ELEMENTS = 3 << 17
"""Elements of keys and values that a batch may gather as padding; a second batch would cost more."""


class Batch(NamedTuple):
    """Requests with one query each that one call computes. The same number of pages is gathered for each.

    Attributes:
        first_row: The index of the first request in the metadata's ``rows``.
        num_requests: The number of requests.
        first_page: The index of the first page in the metadata's ``pages``.
        num_pages: The number of pages of each request.
        first_hidden: The index of the first hidden token in the metadata's ``hidden``.
        num_hidden: The number of hidden tokens.
    """

    first_row: int
    num_requests: int
    first_page: int
    num_pages: int
    first_hidden: int
    num_hidden: int


class Chunk(NamedTuple):
    """One request with several queries.

    Attributes:
        first_page: The index of the first page in the metadata's ``pages``.
        num_pages: The number of pages.
        num_queries: The number of queries.
        first_row: The first query's row among the packed tokens. This field and the next ones are those of ``Spans``.
    """

    first_page: int
    num_pages: int
    num_queries: int
    first_row: int
    position: int
    start: int
    stop: int
    sink_stop: int
    shift: int
    sink_shift: int


@attrs.frozen(eq=False)
class TorchMetadata:
    """The metadata that the layers of an attention group read in a step.

    Attributes:
        causal: Whether queries see only their own and earlier positions.
        block_size: Tokens per page.
        batches: The requests with one query.
        chunks: The requests with several.
        pages: ``[num_pages], int32, device``: the block ids to gather, those of batches first.
        rows: ``[num_single_queries], int64, device``: the packed token of each single query, batch after batch.
        hidden: ``[num_hidden], int64, device``: the indices of gathered tokens in batches that the query does not see.
            Their values may be NaN.
        repeated: ``[num_repeated], int64, device``: the indices of gathered pages that are padding. Each repeats a page
            of the same request. Every token of that page is seen.
        mask: ``[num_gathered], device``: added to the scores of batches: -inf for hidden tokens and repeated pages,
            otherwise 0. None before ``finish``, and if every gathered token is seen.
        distances: ``[num_pages], int64, device``: the position of each page's first token minus that of its request's
            first query; None without a learned bias.
        bias_columns: ``[num_gathered], int64, device``: for batches, the columns of the table that
            ``bias_by_distance`` returns. None before ``finish``, and without a learned bias.
        range_ends_cpu: For each packed token, where the range of its prompt ends whose later tokens it sees, or 0; None
            if no prompt of the step has ranges.
        range_ends: The same, ``[num_tokens], int64, device``.
        places_cpu: ``[num_pages], int32, host``: the places of ``pages`` in the flattened block table.
        table_stride: The block table's ``row_stride``.
    """

    causal: bool
    block_size: int
    batches: tuple[Batch, ...]
    chunks: tuple[Chunk, ...]
    pages: torch.Tensor
    rows: torch.Tensor
    hidden: torch.Tensor
    repeated: torch.Tensor
    mask: torch.Tensor | None
    distances: torch.Tensor | None
    bias_columns: torch.Tensor | None
    places_cpu: torch.Tensor
    table_stride: int
    range_ends_cpu: tuple[int, ...] | None = None
    range_ends: torch.Tensor | None = None


class TorchMetadataBuilder(AttentionMetadataBuilder):
    """Divides the requests of a step into batches and chunks, on the host."""

    on_host = frozenset({"block_table"})
    table_fields = frozenset({"pages"})

    def __init__(self, layer: LayerSpec, device: torch.device) -> None:
        """Read the rules from one layer.

        Args:
            layer: Any layer of the group; all have the same rules.
            device: The layers' device.
        """
        assert layer.spec is not None
        assert layer.query is not None
        state, mask, bias = layer.spec.state_tensors(), layer.spec.mask, layer.query.relative_bias
        assert mask is not None
        max_keys = MAX_BATCH_KEYS
        if device.type == "cpu":
            token_bytes = max(tensor.num_bytes // tensor.shape[0] for tensor in state.values())
            max_keys = min(max_keys, MAX_BATCH_BYTES // token_bytes)
        self._rules = Rules(
            causal=mask.causal,
            window=NO_WINDOW if mask.window is None else mask.window,
            num_sink_tokens=0 if mask.window is None else mask.num_sink_tokens,
            max_keys=max_keys,
            free_padding=FREE_PADDING_ELEMENTS // sum(math.prod(tensor.shape[1:]) for tensor in state.values()),
            keeps_prompt=mask.keeps_prompt,
        )
        self._max_distance = None if bias is None else bias.max_distance
        self._dtype: torch.dtype = getattr(torch, state["k"].dtype)

    @property
    def reuse_key(self) -> Hashable:
        """The values that decide how a step is divided and masked."""
        return self._rules, self._max_distance, self._dtype

    def build(self, metadata: CommonAttentionMetadata) -> TorchMetadata:
        """Return the step's batches and chunks; ``finish`` adds the mask."""
        (built,) = self.build_together([(self, metadata)])
        return built

    @classmethod
    def build_together(cls, builds: Sequence[tuple[Self, CommonAttentionMetadata]]) -> list[TorchMetadata]:
        """Return the metadata of all groups. Groups that differ in their block tables alone share one division.

        A window that no request of the step has reached counts as no window.
        """
        rules = [builder._rules.reached(metadata.max_seq_len) for builder, metadata in builds]
        keys = [
            (rule, builder._max_distance, metadata.causal, metadata.block_size, *map(id, _host_values(metadata)))
            for rule, (builder, metadata) in zip(rules, builds, strict=True)
        ]
        first = {key: index for index, key in reversed([*enumerate(keys)])}
        chosen = sorted(first.values())
        made = cls._build_different([builds[index] for index in chosen], [rules[index] for index in chosen])
        of_group, found = dict(zip(chosen, made, strict=True)), []
        for index, (builder, metadata) in enumerate(builds):
            built = of_group[first[keys[index]]]
            is_own = index in of_group
            found.append(built if is_own else attrs.evolve(built, **builder.refreshed_fields(built, metadata)))
        return found

    @classmethod
    def _build_different(
        cls, builds: Sequence[tuple[Self, CommonAttentionMetadata]], rules: Sequence[Rules]
    ) -> list[TorchMetadata]:
        """Return the metadata of groups with different rules or lengths. Indices count from the start of each group."""
        spans = Spans.of([metadata for _, metadata in builds], rules)
        bounds = spans.batch_bounds(rules)
        first, counts = bounds[:-1], np.diff(bounds)
        widths = spans.num_pages[first].repeat(counts)
        edges = np.searchsorted(spans.group, np.arange(len(builds) + 1))
        first_of_group = edges[spans.group]
        hidden, num_hidden = spans.hidden(widths, first_of_group)
        places, repeated, num_repeated = spans.places(widths, first_of_group)
        has_bias = any(builder._max_distance is not None for builder, _ in builds)
        distances = spans.distances(places, widths) if has_bias else places

        columns = [counts, sums_between(bounds, num_hidden), spans.num_pages[first], spans.num_queries[first]]
        of_chunks = (spans.first_row, spans.position, spans.start, spans.stop, spans.sink_stop)
        columns += [column[first] for column in (*of_chunks, spans.shift, spans.sink_shift)]
        parts = zip(*(column.tolist() for column in columns), strict=True)
        num_parts = np.bincount(spans.group[first], minlength=len(builds)).tolist()
        flat = [(places, widths), (distances, widths), (spans.first_row, np.ones_like(widths))]
        flat += [(hidden, num_hidden), (repeated, num_repeated)]
        split = [torch.from_numpy(each).split(sums_between(edges, sizes).tolist()) for each, sizes in flat]
        return [
            builder._metadata(metadata, islice(parts, num), *tensors)
            for (builder, metadata), num, *tensors in zip(builds, num_parts, *split, strict=True)
        ]

    def _metadata(
        self,
        common: CommonAttentionMetadata,
        parts: Iterable[tuple[int, ...]],
        places: torch.Tensor,
        distances: torch.Tensor,
        rows: torch.Tensor,
        hidden: torch.Tensor,
        repeated: torch.Tensor,
    ) -> TorchMetadata:
        """Return one group's metadata from the numbers of its batches and chunks and from its part of each array."""
        batches, chunks, num_rows, num_pages, num_hidden = [], [], 0, 0, 0
        for num_requests, hidden_of_batch, width, num_queries, *chunk in parts:
            if num_queries > 1:
                chunks.append(Chunk(num_pages, width, num_queries, *chunk))
            else:
                batches.append(Batch(num_rows, num_requests, num_pages, width, num_hidden, hidden_of_batch))
                num_rows, num_hidden = num_rows + num_requests, num_hidden + hidden_of_batch
            num_pages += num_requests * width
        stride, range_ends = row_stride(common.block_table), _range_ends(common)
        return TorchMetadata(
            causal=common.causal and self._rules.causal,
            block_size=common.block_size,
            batches=tuple(batches),
            chunks=tuple(chunks),
            pages=_block_ids(places, common.block_table, stride),
            rows=rows[:num_rows],
            hidden=hidden,
            repeated=repeated,
            mask=None,
            distances=None if self._max_distance is None else distances,
            bias_columns=None,
            places_cpu=places,
            table_stride=stride,
            range_ends_cpu=None if range_ends is None else tuple(range_ends.tolist()),
            range_ends=range_ends,
        )

    def finish(self, built: Any) -> TorchMetadata:
        """Return the metadata with its mask, and with the columns of a learned bias."""
        assert isinstance(built, TorchMetadata)
        device = built.pages.device
        num_gathered = sum(batch.num_requests * batch.num_pages for batch in built.batches) * built.block_size
        mask = columns = None
        if built.hidden.shape[0] or built.repeated.shape[0]:
            mask = torch.zeros(num_gathered, dtype=self._dtype, device=device)
            mask.view(-1, built.block_size).index_fill_(0, built.repeated, -math.inf)
            mask.index_fill_(0, built.hidden, -math.inf)
        if built.distances is not None and self._max_distance is not None:
            distances = built.distances[:, None] + torch.arange(built.block_size, device=device)
            columns = bias_columns(distances.view(-1)[:num_gathered], self._max_distance)
        return attrs.evolve(built, mask=mask, bias_columns=columns)

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the block ids of another block table."""
        return {"pages": _block_ids(built.places_cpu, metadata.block_table, built.table_stride)}


def _host_values(metadata: CommonAttentionMetadata) -> tuple[Any, ...]:
    """Return the values that, with a group's rules, decide the places of its pages in the block table."""
    extensions = (metadata.extensions.get(name) for name in (SEQ_STARTS, NUM_PROMPT_TOKENS, RANGE_ENDS))
    return metadata.query_start_loc_cpu, metadata.seq_lens_cpu, *extensions


def _range_ends(metadata: CommonAttentionMetadata) -> torch.Tensor | None:
    if RANGE_ENDS not in metadata.extensions:
        return None
    values_cpu = metadata.extensions[RANGE_ENDS].values_cpu
    assert values_cpu is not None
    return values_cpu.long()


def _block_ids(places: torch.Tensor, table: torch.Tensor, stride: int) -> torch.Tensor:
    """Return the block ids at places of a flattened block table; the places assume the row stride ``stride``."""
    own_stride, (num_rows, num_columns) = row_stride(table), table.shape
    if stride != own_stride:
        places = places + torch.div(places, stride, rounding_mode="floor") * (own_stride - stride)
    if own_stride == num_columns:
        return table.reshape(-1).index_select(0, places)
    # The table is a part of a wider one; this view avoids a copy.
    return table.as_strided(((num_rows - 1) * own_stride + num_columns,), (1,)).index_select(0, places)
