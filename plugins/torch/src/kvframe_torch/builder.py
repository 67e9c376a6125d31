"""The torch backend's metadata: what a step gathers, which queries see what of it, and which rows it writes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from kvframe.contract.backend import AttentionMetadataBuilder
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.relative_bias import bias_columns
from kvframe.contract.specs import LayerSpec
from kvframe_torch.tiles import NO_LIMIT, BoolArray, IntArray, TileRules, Tiles

MAX_MASK_ROWS = 256
"""Rows of the mask of a tile: its queries, once for each query head of a KV head."""

MAX_BIAS_ROWS = 2048
"""Rows of a tile with a learned bias, which differs from head to head: its queries, once for each query head."""

MAX_BATCH_KEYS = 1 << 16
"""Gathered tokens of a batch of more than one tile: bounds the memory of the copies."""

MAX_BATCH_BYTES = 1 << 23
"""Bytes of keys, or of values, that a CPU gathers at once: they are read again while they are in its cache."""

FREE_PADDING_ELEMENTS = 3 << 17
"""Elements of keys and values that single queries may gather for padding: a second batch would cost more."""

LEAST_PROMPT = 1024
"""New tokens of a whole prompt for which a CPU takes longer with masks than to compute what a causal mask hides."""

HIDDEN = 1 << 30
"""The position of a gathered token that no query of its tile sees: after every query."""


@attrs.frozen(eq=False)
class Part:
    """Some gathered pages of a batch: all of them, or some of a single query over many tokens.

    Attributes:
        first_page: The first of the batch's pages.
        stop_page: The page after the last one.
        dead_slots: ``[num_dead], int64, device``: the gathered tokens, counted from the part's first one, that may hold
            anything, NaN included. They are set to zero.
    """

    first_page: int
    stop_page: int
    dead_slots: torch.Tensor


@attrs.frozen(eq=False)
class Batch:
    """Tiles that are computed together: ``num_queries`` queries over ``num_keys`` gathered tokens each.

    Attributes:
        num_tiles: How many tiles.
        num_queries: Queries of each tile; a tile with fewer repeats its last one.
        num_keys: Gathered tokens of each tile: whole pages.
        first_row: The first of the packed tokens that are the queries; None if these do not follow one another.
        rows: ``[num_tiles * num_queries], int64, device``: the packed token of each query.
        output_rows: ``[num_tiles * num_queries], int64, device``: the row that its result is written to: one after all
            packed tokens for a query that is repeated.
        parts: The gathered pages.
        is_prompt: Whether the tiles are whole prompts: query ``i`` sees the gathered tokens ``[0, i]``.
        key_positions: ``[num_tiles, num_keys], int32, device``: of each gathered token, or ``HIDDEN``; None if the
            batch needs no mask and no bias, or has ``hidden_keys``.
        query_positions: ``[num_tiles, num_queries], int32, device``: of each query in its request; None likewise.
        hidden_keys: ``[num_hidden], int64, device``: of single queries without a bias, the gathered tokens that they do
            not see; None if the mask is made of positions.
        mask: ``[num_tiles, 1, num_rows, num_keys], device``: 0 where a query sees a token and -inf elsewhere, for
            ``group_size * num_queries`` rows or one for all; None if all is seen, or for prompts.
        bias_columns: ``[num_tiles * num_queries * num_keys], int32, device``: for each query and gathered token, the
            column of what ``bias_by_distance`` returns; None without a learned bias.
        page_rows_cpu: ``[num_pages], int64, host``: the row of the block table that each gathered page is in.
        page_columns_cpu: ``[num_pages], int64, host``: its column.
    """

    num_tiles: int
    num_queries: int
    num_keys: int
    first_row: int | None
    rows: torch.Tensor
    output_rows: torch.Tensor
    parts: tuple[Part, ...]
    is_prompt: bool
    query_positions: torch.Tensor | None
    key_positions: torch.Tensor | None
    hidden_keys: torch.Tensor | None
    mask: torch.Tensor | None
    bias_columns: torch.Tensor | None
    page_rows_cpu: torch.Tensor
    page_columns_cpu: torch.Tensor


@attrs.frozen(eq=False)
class TorchMetadata:
    """What the layers of an attention group read in a step.

    Attributes:
        batches: The batches; none if no request has a query.
        pages: For each batch ``[num_tiles * num_pages], int32, device``: the block ids to gather.
        causal: Whether queries see only their own and earlier positions.
    """

    batches: tuple[Batch, ...]
    pages: tuple[torch.Tensor, ...]
    causal: bool


class TorchMetadataBuilder(AttentionMetadataBuilder):
    """Divides a step into batches: on the host what is small, and on the device the masks, which are large."""

    on_host = frozenset({"block_table"})
    table_fields = frozenset({"pages"})

    def __init__(self, layer: LayerSpec, device: torch.device) -> None:
        """Take what the layers of the group have in common.

        Args:
            layer: Any layer of the group.
            device: Where the layers run.
        """
        assert layer.spec is not None
        assert layer.query is not None
        state, mask, query = layer.spec.state_tensors(), layer.spec.mask, layer.query
        assert mask is not None
        bias, self._group_size = query.relative_bias, query.num_heads // state["k"].shape[1]
        max_queries, max_keys = MAX_MASK_ROWS // self._group_size, MAX_BATCH_KEYS
        if bias is not None:
            max_queries = min(max_queries, MAX_BIAS_ROWS // query.num_heads)
        if device.type == "cpu":
            token_bytes = max(tensor.num_bytes // tensor.shape[0] for tensor in state.values())
            max_keys = max(1, min(max_keys, MAX_BATCH_BYTES // token_bytes))
        least_prompt = LEAST_PROMPT if device.type == "cpu" else 2
        if query.soft_cap is not None or query.has_sinks or bias is not None:
            least_prompt = NO_LIMIT
        self._rules = TileRules(
            causal=mask.causal,
            window=NO_LIMIT if mask.window is None else mask.window,
            num_sink_tokens=0 if mask.window is None else mask.num_sink_tokens,
            least_prompt=least_prompt,
            max_queries=max(1, max_queries),
            max_keys=max_keys,
            free_padding=FREE_PADDING_ELEMENTS // sum(math.prod(tensor.shape[1:]) for tensor in state.values()),
            mask_rows=self._group_size if bias is None else query.num_heads,
        )
        self._max_distance = None if bias is None else bias.max_distance
        # A single query sees one run of tokens.
        self._sees_runs = bias is None and not self._rules.num_sink_tokens
        self._dtype: torch.dtype = getattr(torch, state["k"].dtype)

    @property
    def reuse_key(self) -> Hashable:
        """What decides how a step is divided and masked."""
        return self._rules, self._group_size, self._max_distance, self._dtype

    def build(self, metadata: CommonAttentionMetadata) -> TorchMetadata:
        """Return the step's batches, without what ``finish`` makes of them."""
        causal = metadata.causal and self._rules.causal
        tiles = Tiles.of(metadata, self._rules)
        batches = tuple(
            self._batch(batch, metadata.block_size, metadata.slot_mapping.shape[0], causal)
            for batch in tiles.batches(self._rules, metadata.block_size)
        )
        return TorchMetadata(batches, _block_ids(batches, metadata.block_table), causal)

    def finish(self, built: Any) -> TorchMetadata:
        """Return the same with the masks, and with where each learned bias is looked up."""
        return TorchMetadata(
            tuple(self._masked(batch, built.causal) for batch in built.batches), built.pages, built.causal
        )

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the block ids of another block table."""
        return {"pages": _block_ids(built.batches, metadata.block_table)}

    def _batch(self, tiles: Tiles, block_size: int, num_tokens: int, causal: bool) -> Batch:
        """Return tiles as one batch.

        Args:
            tiles: The tiles.
            block_size: Tokens per page.
            num_tokens: Rows of the step's queries.
            causal: Whether queries see only their own and earlier positions.
        """
        num_tiles, num_queries = len(tiles), int(tiles.num_queries.max())
        pages, is_padding = _pages(tiles)
        is_prompt = bool(tiles.is_prompt[0])
        output_rows = rows = tiles.first_row
        positions = tiles.position[:, None]
        if num_queries > 1:
            query = np.arange(num_queries)
            is_repeated = query >= tiles.num_queries[:, None]
            query = np.minimum(query, tiles.num_queries[:, None] - 1)
            rows, positions = (rows[:, None] + query).ravel(), positions + query
            output_rows = np.where(is_repeated.ravel(), num_tokens, rows)
        hidden = key_positions = None
        if num_queries == 1 < num_tiles and not is_prompt and self._sees_runs:
            parts, hidden = _around_runs(tiles, pages.shape[1], is_padding, block_size)
        else:
            parts, key_positions = self._compared(tiles, pages, is_padding, block_size, causal, num_queries)
        key_positions = None if is_prompt else key_positions
        return Batch(
            num_tiles=num_tiles,
            num_queries=num_queries,
            num_keys=pages.shape[1] * block_size,
            first_row=int(rows[0]) if (rows[1:] == rows[:-1] + 1).all() else None,
            rows=torch.from_numpy(rows.astype(np.int64)),
            output_rows=torch.from_numpy(output_rows.astype(np.int64)),
            parts=parts,
            is_prompt=is_prompt,
            query_positions=None if key_positions is None else torch.from_numpy(positions.astype(np.int32)),
            key_positions=key_positions,
            hidden_keys=hidden,
            mask=None,
            bias_columns=None,
            page_rows_cpu=torch.from_numpy(tiles.request.repeat(pages.shape[1])),
            page_columns_cpu=torch.from_numpy(pages.ravel()),
        )

    def _compared(
        self,
        tiles: Tiles,
        pages: IntArray,
        is_padding: BoolArray | None,
        block_size: int,
        causal: bool,
        num_queries: int,
    ) -> tuple[tuple[Part, ...], torch.Tensor | None]:
        """Return the pages of any tiles, and the position of each gathered token if masks or a bias need them."""
        num_tiles = len(tiles)
        positions = (pages[:, :, None] * block_size + np.arange(block_size)).reshape(num_tiles, -1)
        is_live = (positions >= tiles.low[:, None]) & (positions < tiles.stop[:, None])
        if causal and self._rules.num_sink_tokens:
            ends = np.minimum(self._rules.num_sink_tokens, tiles.stop)
            is_live |= (positions >= tiles.start[:, None]) & (positions < ends[:, None])
        is_seen = is_live if is_padding is None else is_live & ~is_padding.repeat(block_size, axis=1)
        key_positions = None
        if self._max_distance is not None or (causal and num_queries > 1) or not is_seen.all():
            key_positions = torch.from_numpy(np.where(is_seen, positions, HIDDEN).astype(np.int32))
        return self._parts(is_live, block_size, num_tiles * num_queries == 1), key_positions

    def _parts(self, is_live: BoolArray, block_size: int, is_single: bool) -> tuple[Part, ...]:
        """Return a batch's pages as one part; those of a single query in parts of no more keys than are gathered."""
        num_pages = is_live.size // block_size
        pages_each = max(1, self._rules.max_keys // block_size) if is_single else num_pages
        live, found = is_live.ravel(), []
        for first in range(0, num_pages, pages_each):
            stop = min(first + pages_each, num_pages)
            dead = np.flatnonzero(~live[first * block_size : stop * block_size])
            found.append(Part(first, stop, torch.from_numpy(dead)))
        return tuple(found)

    def _masked(self, batch: Batch, causal: bool) -> Batch:
        """Return a batch with what is made of positions, on their device."""
        if batch.hidden_keys is not None:
            mask = torch.zeros(batch.num_tiles * batch.num_keys, dtype=self._dtype, device=batch.hidden_keys.device)
            mask.index_fill_(0, batch.hidden_keys, -math.inf)
            return attrs.evolve(batch, mask=mask.view(batch.num_tiles, 1, 1, batch.num_keys))
        if batch.key_positions is None or batch.query_positions is None:
            return batch
        key, query = batch.key_positions[:, None, :], batch.query_positions[:, :, None]
        if causal and batch.num_queries > 1:
            is_hidden = key > query
            if self._rules.window != NO_LIMIT:
                is_hidden |= (key <= query - self._rules.window) & (key >= self._rules.num_sink_tokens)
        else:
            is_hidden = key == HIDDEN
        mask = torch.zeros(is_hidden.shape, dtype=self._dtype, device=key.device).masked_fill_(is_hidden, -math.inf)
        if mask.shape[1] > 1:
            mask = mask.repeat(1, self._group_size, 1)
        columns = None
        if self._max_distance is not None:
            columns = bias_columns(key - query, self._max_distance).view(-1)
        return attrs.evolve(batch, mask=mask[:, None], bias_columns=columns)


def _around_runs(
    tiles: Tiles, num_pages: int, is_padding: BoolArray | None, block_size: int
) -> tuple[tuple[Part, ...], torch.Tensor | None]:
    """Return the pages of tiles of one query each, and the gathered tokens around what the query sees.

    What it sees is one run of tokens, so that few numbers say which others are gathered with it.
    """
    width, first = num_pages * block_size, tiles.first_page * block_size
    starts = np.arange(len(tiles)) * width
    before, stop = tiles.low - first, tiles.stop - first
    hidden = dead = _ranges((starts, before), (starts + stop, width - stop))
    if is_padding is not None:
        own = _ranges((starts, before), (starts + stop, tiles.num_pages * block_size - stop))
        # Padding repeats a tile's first page, with its dead tokens.
        where = np.flatnonzero(is_padding)
        tile, begins, in_first = where // num_pages, where * block_size, np.minimum(stop, block_size)
        repeated = _ranges((begins, before[tile]), (begins + in_first[tile], block_size - in_first[tile]))
        dead = np.concatenate((own, repeated))
    of_hidden = torch.from_numpy(hidden)
    of_dead = of_hidden if dead is hidden else torch.from_numpy(dead)
    return (Part(0, len(tiles) * num_pages, of_dead),), of_hidden if len(hidden) else None


def _ranges(*given: tuple[IntArray, IntArray]) -> IntArray:
    """Return the numbers of many ranges, given as arrays of their first numbers and of their lengths."""
    begins, counts = (np.concatenate(each) for each in zip(*given, strict=True))
    ends = counts.cumsum()
    numbers: IntArray = np.arange(ends[-1]) + (begins - ends + counts).repeat(counts)
    return numbers


def _pages(tiles: Tiles) -> tuple[IntArray, BoolArray | None]:
    """Return the pages that tiles gather, by their place in the request, and which of them are padding.

    Sink pages come first. Padding repeats the first page of its tile, which holds tokens of the same request.

    Returns:
        ``[num_tiles, num_pages]`` both; None for no padding.
    """
    most, is_padding = int(tiles.num_pages.max()), None
    place = np.arange(most)[None]
    if int(tiles.num_pages.min()) < most:
        is_padding = place >= tiles.num_pages[:, None]
        place = np.where(is_padding, 0, place)
    pages = place + (tiles.first_page - tiles.num_sinks)[:, None]
    if tiles.num_sinks.any():
        pages = np.where(place < tiles.num_sinks[:, None], place + tiles.first_sink[:, None], pages)
    return pages, is_padding


def _block_ids(batches: tuple[Batch, ...], table: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the block ids of each batch's pages."""
    ids, width = table.reshape(-1), table.shape[1]
    return tuple(ids.index_select(0, batch.page_rows_cpu * width + batch.page_columns_cpu) for batch in batches)
