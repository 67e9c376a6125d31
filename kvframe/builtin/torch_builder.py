"""The practical torch backend's metadata: a step as pieces, each a dense batch of tiles of about the same length.

All index arithmetic of a step is done on the host, once for all layers that can share it. A layer then gathers the
pieces' pages and calls one attention per piece, so a step with any number of decodes is a few gathers and attentions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.attention.backend import AttentionMetadataBuilder
from kvframe.attention.metadata import CommonAttentionMetadata
from kvframe.builtin.torch_tiles import Gathers, IntArray, Spans, Tiles, cut_batches
from kvframe.specs import AttentionMask, LayerSpec

MAX_FOLDED_QUERIES = 256
"""Rows of a masked tile, the queries of one KV head's group side by side: bounds the mask's memory."""

FREE_PADDING_ELEMENTS = 3 << 17
"""Key and value elements that decodes may gather in vain before a second piece, with its own calls, costs less."""

UNSEEN = 1 << 30
"""Stands for the position of a token that is gathered for padding: behind every query."""

Rows = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of a piece: ``query_rows``, ``output_rows`` and ``output_index``."""

NO_PAGES = np.empty(0, dtype=np.int32)

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen(eq=False)
class Piece:
    """Tiles that are computed as one dense batch of ``num_queries`` queries over ``num_keys`` gathered tokens.

    Attributes:
        num_tiles: Tiles in the batch.
        num_queries: Queries per tile; shorter tiles repeat their last one.
        num_keys: Gathered tokens per tile, whole pages.
        query_rows: ``[num_tiles * num_queries], int64, device``: rows of the packed batch; None for its first rows in
            order.
        output_rows: ``[num_outputs], int64, device``: rows to write, where tiles repeat queries; None for all.
        output_index: ``[num_outputs], int64, device``: the dense batch's rows that hold them.
        hidden_slots: ``[num_hidden], int64, device``: gathered tokens that no query of their tile sees and that may
            hold anything, NaN included; they are zeroed.
        bias: ``[num_tiles, 1, num_rows, num_keys], device``: 0 where a query sees a token, else -inf; one row for
            all or, for several queries, ``group_size * num_queries``. None where all is seen, or the batch is causal.
        is_causal: Whether query ``i`` of each tile sees gathered tokens ``[0, i]``.
    """

    num_tiles: int
    num_queries: int
    num_keys: int
    query_rows: torch.Tensor | None
    output_rows: torch.Tensor | None
    output_index: torch.Tensor | None
    hidden_slots: torch.Tensor
    bias: torch.Tensor | None
    is_causal: bool


@attrs.frozen(eq=False)
class TorchMetadata:
    """What the layers of an attention group read in a step.

    Attributes:
        pieces: The dense batches.
        pages: For each piece ``[num_tiles * num_pages], int32, device``: block ids to gather.
        page_index: ``[num_pages], int32, device``: where those of all pieces stand in the block table, row after row.
        row_stride: From one row of that block table to the next.
    """

    pieces: tuple[Piece, ...]
    pages: tuple[torch.Tensor, ...]
    page_index: torch.Tensor
    row_stride: int


class TorchMetadataBuilder(AttentionMetadataBuilder):
    """Makes the pieces of a step."""

    table_fields = frozenset({"pages"})

    def __init__(self, layer: LayerSpec, device: torch.device) -> None:
        """Take what the layers of the group have in common.

        Args:
            layer: Any layer of the group.
            device: Where the pieces are used.
        """
        assert layer.spec is not None
        assert layer.query is not None
        state = layer.spec.state_tensors()["k"]
        assert layer.spec.mask is not None
        self._mask: AttentionMask = layer.spec.mask
        self._dtype: torch.dtype = getattr(torch, state.dtype)
        self._device = device
        self._group_size = layer.query.num_heads // state.shape[1]
        self._takes_causal = layer.query.soft_cap is None and not layer.query.has_sinks
        self._tile_queries = max(1, MAX_FOLDED_QUERIES // self._group_size)
        token_elements = sum(math.prod(tensor.shape[1:]) for tensor in layer.spec.state_tensors().values())
        self._free_padding = FREE_PADDING_ELEMENTS // token_elements
        bits = torch.tensor(-math.inf, dtype=self._dtype).view(_BITS[self._dtype.itemsize]).numpy()
        self._minus_infinity, self._bits_dtype = bits[()], bits.dtype

    @property
    def reuse_key(self) -> Hashable:
        """The mask, and what of the layers' sizes decides how a step is cut."""
        return self._mask, self._dtype, self._group_size, self._takes_causal, self._tile_queries, self._free_padding

    def build(self, metadata: CommonAttentionMetadata) -> TorchMetadata:
        """Return the step's pieces: the decodes, then fresh prefills, then everything else."""
        causal = metadata.causal and self._mask.causal
        tiles = Tiles.of(metadata)
        parts = []
        if len(tiles) and metadata.max_query_len <= 1:
            parts.append(self._lay_out(metadata, tiles, causal))
        elif len(tiles):
            is_decode, is_fresh = tiles.num_queries == 1, self._is_fresh(tiles, causal)
            for chosen, fresh in ((is_decode, False), (is_fresh, True), (~(is_decode | is_fresh), False)):
                if chosen.any():
                    part = tiles.take(chosen.nonzero()[0])
                    if not fresh:
                        part = part.split(self._tile_queries)
                    parts.append(self._lay_out(metadata, part, causal, fresh))
        index = (
            parts[0][1] if len(parts) == 1 else np.concatenate([np.empty(0, np.int32), *(each[1] for each in parts)])
        )
        pieces = tuple(piece for part in parts for piece in part[0])
        page_index = self._upload(index)
        pages = self._take_pages(pieces, page_index, metadata)
        return TorchMetadata(pieces, pages, page_index, _row_stride(metadata.block_table))

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the pages of all pieces."""
        row_stride, index = _row_stride(metadata.block_table), built.page_index
        if row_stride != built.row_stride:
            row = torch.div(index, built.row_stride, rounding_mode="floor")
            index = index + row * (row_stride - built.row_stride)
        return {"pages": self._take_pages(built.pieces, index, metadata)}

    def _take_pages(
        self, pieces: tuple[Piece, ...], page_index: torch.Tensor, metadata: CommonAttentionMetadata
    ) -> tuple[torch.Tensor, ...]:
        table = metadata.block_table
        if not table.is_contiguous():
            # The tables of all groups are read together, so that one group's rows do not lie side by side.
            table = table if _lies_in_rows(table) else table.contiguous()
            table = table.as_strided(((table.shape[0] - 1) * table.stride(0) + table.shape[1],), (1,))
        pages = table.view(-1).index_select(0, page_index)
        if len(pieces) == 1:
            return (pages,)
        counts = [piece.num_tiles * piece.num_keys // metadata.block_size for piece in pieces]
        return tuple(torch.split(pages, counts))

    def _is_fresh(self, tiles: Tiles, causal: bool) -> Any:
        """Return which whole requests are a causal square: nothing computed before, hidden, or out of a window."""
        fresh = (tiles.num_queries > 1) & (tiles.position == 0)
        if not causal or not self._takes_causal:
            fresh[:] = False
        if self._mask.window is not None:
            fresh &= tiles.seq_len <= self._mask.window
        if tiles.seq_start is not None:
            fresh &= tiles.seq_start <= 0
        return fresh

    def _lay_out(
        self, metadata: CommonAttentionMetadata, tiles: Tiles, causal: bool, is_causal: bool = False
    ) -> tuple[list[Piece], IntArray]:
        """Return the pieces of tiles of one kind, and where their pages stand in the block table."""
        block_size, row_stride = metadata.block_size, _row_stride(metadata.block_table)
        spans = Spans.of(tiles, AttentionMask() if is_causal else self._mask, causal, block_size)
        if is_causal:
            spans = spans.upwards()
        order, bounds = cut_batches(tiles.num_queries, spans.num_pages * block_size, self._free_padding)
        if order is not None:
            tiles, spans = tiles.take(order), spans.take(order)
        gathers = Gathers.of(spans, bounds, block_size)
        hidden = self._upload(gathers.batch_hidden(block_size))
        is_single = not is_causal and np.maximum.reduce(tiles.num_queries) == 1
        row_bias = self._row_bias(gathers, block_size) if is_single else None
        single_rows = self._single_rows(tiles, order is None, metadata) if is_single else None
        page_index = np.empty(gathers.cuts[-1], dtype=np.int32)
        first_index = tiles.request * row_stride
        pieces = []
        for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
            width, cut, next_cut = gathers.widths[index], gathers.cuts[index], gathers.cuts[index + 1]
            table_places = page_index[cut:next_cut].reshape(stop - start, width)
            spans.write_blocks(slice(start, stop), first_index[start:stop], table_places, upwards=is_causal)
            num_queries, bias = 1, None
            rows: Rows = (None if single_rows is None else single_rows[start:stop], None, None)
            if row_bias is not None and gathers.has_unseen[index]:
                bias = row_bias[cut * block_size : next_cut * block_size].view(stop - start, 1, 1, width * block_size)
            if not is_single:
                part = tiles.take(slice(start, stop))
                num_queries = int(np.maximum.reduce(part.num_queries))
                rows = self._rows(part, num_queries, metadata.num_actual_tokens)
                if not is_causal:
                    blocks = table_places - first_index[start:stop, None]
                    bias = self._query_bias(part, blocks, spans.num_pages[start:stop], causal, block_size)
            slots = hidden[gathers.hidden_cuts[index] : gathers.hidden_cuts[index + 1]]
            pieces.append(Piece(stop - start, num_queries, width * block_size, *rows, slots, bias, is_causal))
        return pieces, page_index

    def _single_rows(self, tiles: Tiles, in_order: bool, metadata: CommonAttentionMetadata) -> torch.Tensor | None:
        """Return the packed rows of single queries; None where they are all there are, in order."""
        if in_order and len(tiles) == metadata.num_actual_tokens:
            return None
        return self._upload(tiles.first_row.astype(np.int64))

    def _row_bias(self, gathers: Gathers, block_size: int) -> torch.Tensor | None:
        """Return the bias of single queries, all that are gathered in one row."""
        if not any(gathers.has_unseen):
            return None
        # As bits: NumPy has no bfloat16.
        bias = np.zeros(gathers.cuts[-1] * block_size, dtype=self._bits_dtype)
        bias[gathers.hidden] = self._minus_infinity
        if len(gathers.padding):
            bias.reshape(-1, block_size)[gathers.padding] = self._minus_infinity
        return self._upload(bias).view(self._dtype)

    def _query_bias(
        self, tiles: Tiles, blocks: IntArray, num_pages: IntArray, causal: bool, block_size: int
    ) -> torch.Tensor:
        """Return the bias of several queries a tile, ``[num_tiles, 1, group_size * num_queries, num_keys]``.

        Args:
            tiles: The tiles.
            blocks: ``[num_tiles, num_pages]``: the blocks that are gathered.
            num_pages: ``[num_tiles]``: how many of these are no padding.
            causal: Whether queries see only their own and earlier positions.
            block_size: Tokens per block.
        """
        first_tokens = np.where(np.arange(blocks.shape[1]) < num_pages[:, None], blocks * block_size, UNSEEN)
        tokens_cpu = (first_tokens[:, :, None] + np.arange(block_size, dtype=np.int32)).reshape(len(tiles), 1, -1)
        token = self._upload(tokens_cpu)
        if causal:
            position = self._upload((tiles.position[:, None] + _queries(tiles))[:, :, None])
            visible = token <= position
            if self._mask.window is not None:
                within = token > position - self._mask.window
                if self._mask.num_sink_tokens:
                    within |= token < self._mask.num_sink_tokens
                visible &= within
        else:
            num_queries = int(tiles.num_queries.max())
            visible = (token < self._upload(tiles.seq_len)[:, None, None]).repeat(1, num_queries, 1)
        if tiles.seq_start is not None:
            visible &= token >= self._upload(tiles.seq_start)[:, None, None]
        bias = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        bias = bias.masked_fill_(visible.logical_not_(), -math.inf)[:, None]
        return bias.repeat(1, 1, self._group_size, 1) if self._group_size > 1 else bias

    def _rows(self, tiles: Tiles, num_queries: int, num_tokens: int) -> Rows:
        """Return the packed rows that a piece reads and writes; None where they are simply all in order."""
        rows = (tiles.first_row[:, None] + _queries(tiles)).ravel().astype(np.int64)
        if (tiles.num_queries == num_queries).all():
            in_order = len(rows) == num_tokens and bool((rows == np.arange(num_tokens)).all())
            return None if in_order else self._upload(rows), None, None
        index = np.flatnonzero(np.arange(num_queries) < tiles.num_queries[:, None])
        return self._upload(rows), self._upload(rows[index]), self._upload(index)

    def _upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def _lies_in_rows(table: torch.Tensor) -> bool:
    """Return whether a block table can be read where it lies, row after row."""
    return table.stride(1) == 1 and table.stride(0) >= table.shape[1]


def _row_stride(table: torch.Tensor) -> int:
    return table.stride(0) if _lies_in_rows(table) else table.shape[1]


def _queries(tiles: Tiles) -> IntArray:
    """Return each tile's queries, its last one repeated: ``[num_tiles, num_queries]``."""
    return np.minimum(np.arange(tiles.num_queries.max(), dtype=np.int32), (tiles.num_queries - 1)[:, None])
