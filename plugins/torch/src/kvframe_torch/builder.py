"""The torch backend's metadata: what a step gathers, which queries see what of it, and which rows it writes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self

import attrs
import torch

from kvframe.contract.backend import AttentionMetadataBuilder
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.relative_bias import bias_columns
from kvframe.contract.specs import LayerSpec
from kvframe_torch.gathers import GatheredBatch, gather
from kvframe_torch.tiles import NO_LIMIT, GroupLimits, TileRules, Tiles

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
        key_positions: ``[num_tiles, num_keys], int32, device``: of each gathered token, or ``HIDDEN``; None unless the
            mask or a bias is made of positions.
        query_positions: ``[num_tiles, num_queries], int32, device``: of each query in its request; None likewise.
        hidden_keys: ``[num_hidden], int64, device``: the gathered tokens that no query of their tile sees, if each of
            its queries sees the others; None if there are none, or if the mask is made of positions.
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


@attrs.frozen(eq=False)
class Mask:
    """What is added to the scores of a batch.

    Attributes:
        values: ``[num_tiles, 1, num_rows, num_keys], device``: 0 where a query sees a token and -inf elsewhere, for
            ``group_size * num_queries`` rows or one for all.
        bias_columns: ``[num_tiles * num_queries * num_keys], int32, device``: for each query and gathered token, the
            column of what ``bias_by_distance`` returns; None without a learned bias.
    """

    values: torch.Tensor
    bias_columns: torch.Tensor | None


@attrs.frozen(eq=False)
class TorchMetadata:
    """What the layers of an attention group read in a step.

    Attributes:
        batches: The batches; none if no request has a query.
        masks: For each batch, its mask; None if all is seen, or for prompts. Empty before ``finish``.
        pages: For each batch ``[num_tiles * num_pages], int32, device``: the block ids to gather.
        causal: Whether queries see only their own and earlier positions.
        places_cpu: For each batch ``[num_tiles * num_pages], int64, host``: their places in the flattened block table.
        table_width: Its columns.
    """

    batches: tuple[Batch, ...]
    masks: tuple[Mask | None, ...]
    pages: tuple[torch.Tensor, ...]
    causal: bool
    places_cpu: tuple[torch.Tensor, ...]
    table_width: int


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
        self._dtype: torch.dtype = getattr(torch, state["k"].dtype)

    @property
    def reuse_key(self) -> Hashable:
        """What decides how a step is divided and masked."""
        return self._rules, self._group_size, self._max_distance, self._dtype

    def build(self, metadata: CommonAttentionMetadata) -> TorchMetadata:
        """Return the step's batches, without what ``finish`` makes of them."""
        (built,) = self.build_together([(self, metadata)])
        return built

    @classmethod
    def build_together(cls, builds: Sequence[tuple[Self, CommonAttentionMetadata]]) -> list[TorchMetadata]:
        """Divide the steps of all groups at once, because each operation costs more than what it computes for one."""
        steps = [metadata for _, metadata in builds]
        limits = GroupLimits.of(steps, [builder._rules for builder, _ in builds])
        tiles, bounds = Tiles.of(steps, limits).batched(limits)
        if not len(tiles):
            return [builder._metadata((), (), metadata) for builder, metadata in builds]
        found: list[list[Batch]] = [[] for _ in builds]
        places: list[list[torch.Tensor]] = [[] for _ in builds]
        for gathered in gather(tiles, bounds, limits):
            builder, metadata = builds[gathered.group]
            found[gathered.group].append(builder._batch(gathered, metadata))
            places[gathered.group].append(gathered.places)
        return [
            builder._metadata(found[group], places[group], metadata) for group, (builder, metadata) in enumerate(builds)
        ]

    def _metadata(
        self, batches: Sequence[Batch], places: Sequence[torch.Tensor], metadata: CommonAttentionMetadata
    ) -> TorchMetadata:
        """Return the metadata of a group's batches, given each batch's places in the block table."""
        width = metadata.block_table.shape[1]
        return TorchMetadata(
            batches=tuple(batches),
            masks=(),
            pages=_block_ids(places, metadata.block_table, width),
            causal=metadata.causal and self._rules.causal,
            places_cpu=tuple(places),
            table_width=width,
        )

    def _batch(self, gathered: GatheredBatch, metadata: CommonAttentionMetadata) -> Batch:
        """Return a batch, without its mask."""
        block_size, num_queries, hidden = metadata.block_size, gathered.num_queries, gathered.hidden
        query_positions = key_positions = hidden_keys = None
        if self._max_distance is not None or (num_queries > 1 and metadata.causal and self._rules.causal):
            if not gathered.is_prompt:
                query_positions = gathered.positions.int().view(gathered.num_tiles, num_queries)
                columns = (gathered.places % metadata.block_table.shape[1]).int()
                key_positions = torch.add(columns[:, None] * block_size, torch.arange(block_size, dtype=torch.int32))
                key_positions = key_positions.view(-1).index_fill_(0, hidden, HIDDEN).view(gathered.num_tiles, -1)
        elif hidden.shape[0]:
            hidden_keys = hidden
        return Batch(
            num_tiles=gathered.num_tiles,
            num_queries=num_queries,
            num_keys=gathered.num_pages * block_size,
            first_row=None if gathered.first_row < 0 else gathered.first_row,
            rows=gathered.rows,
            output_rows=gathered.output_rows,
            parts=self._parts(gathered, block_size),
            is_prompt=gathered.is_prompt,
            query_positions=query_positions,
            key_positions=key_positions,
            hidden_keys=hidden_keys,
        )

    def _parts(self, gathered: GatheredBatch, block_size: int) -> tuple[Part, ...]:
        """Return a batch's pages as one part; those of a single query in parts of no more keys than are gathered."""
        num_pages, dead = gathered.num_tiles * gathered.num_pages, gathered.dead
        pages_each = max(1, self._rules.max_keys // block_size)
        if gathered.num_tiles * gathered.num_queries > 1 or num_pages <= pages_each:
            return (Part(0, num_pages, dead),)
        found = []
        for first in range(0, num_pages, pages_each):
            stop = min(first + pages_each, num_pages)
            begin, end = first * block_size, stop * block_size
            found.append(Part(first, stop, dead[(dead >= begin) & (dead < end)] - begin))
        return tuple(found)

    def finish(self, built: Any) -> TorchMetadata:
        """Return the same with the masks, and with where each learned bias is looked up."""
        finished: TorchMetadata = attrs.evolve(
            built, masks=tuple(self._mask(batch, built.causal) for batch in built.batches)
        )
        return finished

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the block ids of another block table."""
        return {"pages": _block_ids(built.places_cpu, metadata.block_table, built.table_width)}

    def _mask(self, batch: Batch, causal: bool) -> Mask | None:
        """Return a batch's mask, made of positions on their device."""
        if batch.hidden_keys is not None:
            values = torch.zeros(batch.num_tiles * batch.num_keys, dtype=self._dtype, device=batch.hidden_keys.device)
            values.index_fill_(0, batch.hidden_keys, -math.inf)
            return Mask(values.view(batch.num_tiles, 1, 1, batch.num_keys), None)
        if batch.key_positions is None or batch.query_positions is None:
            return None
        key, query = batch.key_positions[:, None, :], batch.query_positions[:, :, None]
        if causal and batch.num_queries > 1:
            is_hidden, num_rows = key > query, batch.num_queries * self._group_size
            if self._rules.window != NO_LIMIT:
                is_before = key <= query - self._rules.window
                if self._rules.num_sink_tokens:
                    is_before &= key >= self._rules.num_sink_tokens
                is_hidden |= is_before
        else:
            is_hidden, num_rows = key == HIDDEN, 1
        hidden, seen = (torch.tensor(value, dtype=self._dtype, device=key.device) for value in (-math.inf, 0.0))
        values = torch.where(is_hidden, hidden, seen)
        if num_rows > values.shape[1]:
            values = values.repeat(1, self._group_size, 1)
        columns = None
        if self._max_distance is not None:
            columns = bias_columns(key - query, self._max_distance).view(-1)
        return Mask(values[:, None], columns)


def _block_ids(places: Sequence[torch.Tensor], table: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Return the block ids at places in a flattened block table that had ``width`` columns."""
    if width != table.shape[1]:
        more = table.shape[1] - width
        places = [each + torch.div(each, width, rounding_mode="floor") * more for each in places]
    ids = table.reshape(-1)
    return tuple(ids.index_select(0, each) for each in places)
