"""The practical backend: paged attention in plain torch, for any device that torch knows.

The builder cuts a step into *pieces*, each a dense batch of tiles (one request's next queries) of about the same
length, and works out once which pages each tile reads and what its queries see. A layer then gathers those pages and
calls one attention per piece, so a step with any number of decodes is one gather and one attention per layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvframe.attention.backend import AttentionBackend, AttentionMetadataBuilder, Capabilities, KVCache
from kvframe.attention.metadata import CommonAttentionMetadata
from kvframe.specs import AttentionMask, LayerSpec

MAX_FOLDED_QUERIES = 256
"""Rows of a masked tile, the queries of one KV head's group side by side: bounds the mask's memory."""

MAX_PIECE_KEYS = 1 << 16
"""Gathered tokens of a piece of more than one tile: bounds the gathered copy's memory."""

MAX_SCRATCH_ELEMENTS = 1 << 23
"""Elements of a scratch tensor at most: what is larger takes its time anyway, and is not kept."""

FREE_PADDING_ELEMENTS = 3 << 17
"""Key and value elements that decodes may gather in vain before a second piece, with its own calls, costs less."""


@attrs.frozen(eq=False)
class Tiles:
    """Consecutive queries of one request each, as parallel host tensors ``[num_tiles], int64``.

    Attributes:
        request: The row of the batch.
        first_row: Where the tile's queries start in the packed batch.
        position: The first query's position in its request.
        num_queries: The tile's queries.
        seq_len: Tokens of the request after the step.
    """

    request: torch.Tensor
    first_row: torch.Tensor
    position: torch.Tensor
    num_queries: torch.Tensor
    seq_len: torch.Tensor

    def take(self, index: torch.Tensor) -> Tiles:
        """Return the tiles at ``index``."""
        return Tiles(*(column[index] for column in attrs.astuple(self, recurse=False)))


class Scratch:
    """Memory for gathered tokens that the calls of a backend reuse: the system takes a while to map fresh pages.

    Invariant: what ``take`` returned last is the only part in use.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def take(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor of this shape, of the dtype and on the device of ``like``."""
        num_elements = math.prod(shape)
        if num_elements > MAX_SCRATCH_ELEMENTS:
            return like.new_empty(shape)
        buffer = self._buffer
        if buffer is None or buffer.shape[0] < num_elements:
            # Made outside of inference mode, so that a later call may write to it in either mode.
            with torch.inference_mode(False):
                buffer = self._buffer = torch.empty(num_elements, dtype=like.dtype, device=like.device)
        return buffer[:num_elements].view(shape)


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
        pages: ``[num_tiles * num_pages], int64, device``: block ids to gather.
        hidden_slots: ``[num_hidden], int64, device``: gathered tokens that no query of their tile sees. They may hold
            anything, NaN included, and are zeroed.
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
    pages: torch.Tensor
    hidden_slots: torch.Tensor
    bias: torch.Tensor | None
    is_causal: bool

    def gather(self, state: torch.Tensor, dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
        """Return the tiles' tokens of one state tensor, ``[num_tiles, num_heads, num_keys, size]``, strided."""
        pages = scratch.take((self.pages.shape[0], *state.shape[1:]), state)
        torch.index_select(state, 0, self.pages, out=pages)
        tokens = pages.view(-1, *state.shape[2:])
        tokens.index_fill_(0, self.hidden_slots, 0)
        return tokens.to(dtype).view(self.num_tiles, self.num_keys, *state.shape[2:]).transpose(1, 2)


class TorchMetadataBuilder(AttentionMetadataBuilder):
    """Makes the pieces of a step: all index and mask arithmetic, on the host, once for all layers of the group."""

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
        self.mask: AttentionMask = layer.spec.mask
        self.dtype: torch.dtype = getattr(torch, state.dtype)
        self.device = device
        self.group_size = layer.query.num_heads // state.shape[1]
        self.takes_causal = layer.query.soft_cap is None and not layer.query.has_sinks
        self.tile_queries = max(1, MAX_FOLDED_QUERIES // self.group_size)
        token_elements = sum(math.prod(tensor.shape[1:]) for tensor in layer.spec.state_tensors().values())
        self.free_padding = FREE_PADDING_ELEMENTS // token_elements

    def build(self, metadata: CommonAttentionMetadata) -> list[Piece]:
        """Return the step's pieces: the decodes, then fresh prefills, then everything else."""
        starts = metadata.query_start_loc_cpu.long()
        num_new = starts.diff()
        seq_lens = metadata.seq_lens_cpu.long()
        causal = metadata.causal and self.mask.causal
        request = torch.arange(metadata.num_reqs)
        whole = Tiles(request, starts[:-1], seq_lens - num_new, num_new, seq_lens)
        if metadata.max_query_len == 1:
            decodes = whole if bool(num_new.all()) else whole.take(num_new.nonzero().flatten())
            return [self._piece(metadata, part, causal) for part in self._parts(metadata, decodes)]
        fresh = (num_new > 1) & (seq_lens == num_new)
        if not causal or not self.takes_causal:
            fresh[:] = False
        elif self.mask.window is not None:
            fresh &= seq_lens <= self.mask.window
        decodes = whole.take((num_new == 1).nonzero().flatten())
        rest = self._split(whole.take(((num_new > 1) & ~fresh).nonzero().flatten()))
        pieces = [self._piece(metadata, part, causal) for part in self._parts(metadata, decodes)]
        for part in self._parts(metadata, whole.take(fresh.nonzero().flatten())):
            pieces.append(self._piece(metadata, part, causal, is_causal=True))
        pieces.extend(self._piece(metadata, part, causal) for part in self._parts(metadata, rest))
        return pieces

    def _split(self, tiles: Tiles) -> Tiles:
        """Cut tiles of more than ``tile_queries`` queries."""
        pieces_of = -(-tiles.num_queries // self.tile_queries)
        index = torch.arange(tiles.request.shape[0]).repeat_interleave(pieces_of)
        first_piece = pieces_of.cumsum(0) - pieces_of
        skipped = (torch.arange(index.shape[0]) - first_piece[index]) * self.tile_queries
        cut = tiles.take(index)
        return Tiles(
            cut.request,
            cut.first_row + skipped,
            cut.position + skipped,
            (cut.num_queries - skipped).clamp(max=self.tile_queries),
            cut.seq_len,
        )

    def _parts(self, metadata: CommonAttentionMetadata, tiles: Tiles) -> Sequence[Tiles]:
        """Split tiles into batches of about equal length, so that padding is less than half of each, or little."""
        num_tiles = tiles.request.shape[0]
        if num_tiles == 0:
            return []
        keys = self._page_columns(metadata, tiles)[2] * metadata.block_size
        longest, widest = int(keys.max()), int(tiles.num_queries.max())
        uniform = 2 * int(keys.min()) > longest and 2 * int(tiles.num_queries.min()) > widest
        if widest == 1:
            uniform |= num_tiles * longest - int(keys.sum()) <= self.free_padding
        if num_tiles == 1 or (uniform and num_tiles * longest <= MAX_PIECE_KEYS):
            return [tiles]
        parts: list[list[int]] = []
        order = sorted(zip(tiles.num_queries.tolist(), keys.tolist(), range(num_tiles), strict=True), reverse=True)
        lengths = (0, 0)
        for num_queries, num_keys, index in order:
            padded_keys = max(lengths[1], num_keys)
            alike = 2 * num_queries >= lengths[0] and 2 * min(lengths[1], num_keys) >= padded_keys
            if parts and alike and (len(parts[-1]) + 1) * padded_keys <= MAX_PIECE_KEYS:
                parts[-1].append(index)
                lengths = (lengths[0], padded_keys)
            else:
                parts.append([index])
                lengths = (num_queries, num_keys)
        return [tiles.take(torch.tensor(sorted(part))) for part in parts]

    def _page_columns(
        self, metadata: CommonAttentionMetadata, tiles: Tiles
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return each tile's sink blocks, first block of its window, and number of blocks, ``[num_tiles]`` each."""
        block_size = metadata.block_size
        if not (metadata.causal and self.mask.causal):
            none = torch.zeros_like(tiles.seq_len)
            return none, none, -(-tiles.seq_len // block_size)
        end = -(-(tiles.position + tiles.num_queries) // block_size)
        if self.mask.window is None:
            none = torch.zeros_like(end)
            return none, none, end
        first = (tiles.position - self.mask.window + 1).clamp(min=0) // block_size
        sinks = first.clamp(max=-(-self.mask.num_sink_tokens // block_size))
        return sinks, first, sinks + end - first

    def _piece(self, metadata: CommonAttentionMetadata, tiles: Tiles, causal: bool, is_causal: bool = False) -> Piece:
        """Return one piece.

        Columns behind a tile's last block stand for tokens behind its queries, so nobody sees them.
        """
        block_size = metadata.block_size
        num_tiles, num_queries = tiles.request.shape[0], int(tiles.num_queries.max())
        sinks, first, count = self._page_columns(metadata, tiles)
        column = torch.arange(int(count.max()))
        block = torch.where(column < sinks[:, None], column, column + (first - sinks)[:, None])
        owned = block.minimum((first - sinks + count - 1)[:, None])
        token = (block[:, :, None] * block_size + torch.arange(block_size)).view(num_tiles, 1, -1)
        query = torch.arange(num_queries).minimum((tiles.num_queries - 1)[:, None])
        position = (tiles.position[:, None] + query)[:, :, None]
        if causal:
            visible = self._visible(token, position, is_causal)
        else:
            visible = (token < tiles.seq_len[:, None, None]).expand(-1, num_queries, -1)
        seen = visible[:, 0] if num_queries == 1 or is_causal else visible.any(1)
        hidden = (~seen).flatten().nonzero().flatten()
        query_rows, output_rows, output_index = self._rows(tiles, query, metadata.num_actual_tokens)
        bias = None
        if not is_causal and (num_queries > 1 or hidden.shape[0]):
            bias = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, float("-inf"))[:, None]
            if num_queries > 1 and self.group_size > 1:
                bias = bias.repeat(1, 1, self.group_size, 1)
        table = metadata.block_table
        pages = table[tiles.request.to(table.device)[:, None], owned.to(table.device)]
        return Piece(
            num_tiles=num_tiles,
            num_queries=num_queries,
            num_keys=token.shape[-1],
            query_rows=self._to_device(query_rows),
            output_rows=self._to_device(output_rows),
            output_index=self._to_device(output_index),
            pages=pages.flatten().long(),
            hidden_slots=hidden.to(self.device, non_blocking=True),
            bias=self._to_device(bias),
            is_causal=is_causal,
        )

    def _visible(self, token: torch.Tensor, position: torch.Tensor, is_causal: bool) -> torch.Tensor:
        """Return which gathered tokens each query sees; of a causal batch, which any sees."""
        if is_causal:
            return token <= position[:, -1:]
        visible = token <= position
        if self.mask.window is not None:
            within = token > position - self.mask.window
            if self.mask.num_sink_tokens:
                within |= token < self.mask.num_sink_tokens
            visible &= within
        return visible

    def _rows(
        self, tiles: Tiles, query: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the packed rows that a piece reads and writes; None where they are simply all in order."""
        rows = (tiles.first_row[:, None] + query).flatten()
        if bool((tiles.num_queries == query.shape[1]).all()):
            in_order = rows.shape[0] == num_tokens and bool((rows.diff() == 1).all())
            return (None if in_order else rows), None, None
        index = (torch.arange(query.shape[1]) < tiles.num_queries[:, None]).flatten().nonzero().flatten()
        return rows, rows[index], index

    def _to_device(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(self.device, non_blocking=True)


class TorchBackend(AttentionBackend):
    """Serves causal, bidirectional and windowed attention, with sinks, soft caps and learned sink logits."""

    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float64", "float32", "float16", "bfloat16"}),
        masks=frozenset({"causal", "bidirectional", "window", "sink_tokens"}),
        soft_cap=True,
        sinks=True,
        separate_value_size=True,
    )

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device) -> None:
        super().__init__(layers, device)
        self._key_scratch = Scratch()
        self._value_scratch = Scratch()

    def make_builder(self) -> TorchMetadataBuilder:
        """Return the builder of the step's pieces."""
        return TorchMetadataBuilder(self.layers[0], self.device)

    def forward(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Gather each piece's pages and attend to them."""
        pieces: list[Piece] = metadata
        keys, values = kv_cache["k"], kv_cache["v"]
        num_tokens, num_heads, head_size = query.shape
        output = None
        for piece in pieces:
            num_rows = piece.num_tiles * piece.num_queries
            in_order = piece.query_rows is None
            rows = query[:num_rows] if piece.query_rows is None else query.index_select(0, piece.query_rows)
            result = _attend(
                layer,
                rows.view(piece.num_tiles, piece.num_queries, num_heads, head_size),
                piece.gather(keys, query.dtype, self._key_scratch),
                piece.gather(values, query.dtype, self._value_scratch),
                piece,
                sinks,
            ).reshape(num_rows, num_heads, values.shape[-1])
            if in_order and num_rows == num_tokens:
                return result
            if output is None:
                output = query.new_zeros(num_tokens, num_heads, values.shape[-1])
            if piece.output_rows is not None and piece.output_index is not None:
                output.index_copy_(0, piece.output_rows, result.index_select(0, piece.output_index))
            elif piece.query_rows is not None:
                output.index_copy_(0, piece.query_rows, result)
            else:
                output[:num_rows] = result
        return query.new_zeros(num_tokens, num_heads, values.shape[-1]) if output is None else output


def _attend(
    layer: LayerSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    piece: Piece,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``[num_tiles, num_queries, num_heads, head_size_v]`` for queries of the same shape but the last."""
    assert layer.query is not None
    num_tiles, num_queries, num_heads, head_size = query.shape
    num_kv_heads = key.shape[1]
    group_size = num_heads // num_kv_heads
    if piece.is_causal:
        return scaled_dot_product_attention(
            query.transpose(1, 2), key, value, is_causal=True, scale=layer.query.scale, enable_gqa=group_size > 1
        ).transpose(1, 2)
    # A KV head's query heads become more queries of that one head, so that keys are never repeated.
    folded = query.view(num_tiles, num_queries, num_kv_heads, group_size, head_size).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(num_tiles, num_kv_heads, group_size * num_queries, head_size)
    bias = None if piece.bias is None else piece.bias.to(query.dtype)
    if layer.query.soft_cap is None and sinks is None:
        result = scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=layer.query.scale)
    else:
        result = _explicit_attention(layer, folded, key, value, bias, sinks)
    result = result.view(num_tiles, num_kv_heads, group_size, num_queries, value.shape[-1])
    return result.permute(0, 3, 1, 2, 4).reshape(num_tiles, num_queries, num_heads, value.shape[-1])


def _explicit_attention(
    layer: LayerSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention with a soft cap and sink logits, ``[num_tiles, num_kv_heads, num_rows, head_size_v]``."""
    assert layer.query is not None
    # One product per KV head: over all of them at once, matmul copies the keys and values, whose heads lie apart.
    heads = range(key.shape[1])
    query = query * layer.query.scale
    scores = torch.stack([torch.bmm(query[:, head], key[:, head].transpose(1, 2)) for head in heads], dim=1)
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    if layer.query.soft_cap is not None:
        scores = scores.div_(layer.query.soft_cap).tanh_().mul_(layer.query.soft_cap)
    if bias is not None:
        scores += bias
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        # One more logit in the denominator scales every weight by the softmax's share against it.
        num_rows = query.shape[2]
        logits = sinks.to(scores.dtype).view(key.shape[1], -1, 1)
        logits = logits.expand(-1, -1, num_rows * key.shape[1] // sinks.shape[0]).reshape(1, key.shape[1], num_rows, 1)
        weights *= torch.sigmoid(torch.logsumexp(scores, dim=-1, keepdim=True) - logits)
    weights = weights.to(query.dtype)
    return torch.stack([torch.bmm(weights[:, head], value[:, head]) for head in heads], dim=1)
