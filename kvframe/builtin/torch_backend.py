"""The practical backend: paged attention in plain torch, for any device that torch knows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvframe.builtin.torch_bias import key_bias
from kvframe.builtin.torch_builder import TorchMetadata, TorchMetadataBuilder
from kvframe.builtin.torch_pieces import Piece
from kvframe.contract.backend import AttentionBackend, Capabilities, KVCache
from kvframe.contract.metadata import SEQ_STARTS
from kvframe.contract.relative_bias import RELATIVE_BIAS, bias_by_distance
from kvframe.contract.specs import LayerSpec

LOW_PRECISION = (torch.float16, torch.bfloat16)

MAX_SCRATCH_ELEMENTS = 1 << 23
"""Elements of a scratch tensor at most: what is larger takes its time anyway, and is not kept."""


class Scratch:
    """Memory for gathered tokens that the calls of a backend reuse: the system takes a while to map fresh pages.

    Invariant: what ``take`` returned last is the only part in use.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor."""
        num_elements = math.prod(shape)
        if num_elements > MAX_SCRATCH_ELEMENTS:
            return torch.empty(shape, dtype=dtype, device=device)
        buffer = self._buffer
        if buffer is None or buffer.shape[0] < num_elements or buffer.dtype != dtype:
            # Made outside of inference mode, so that a later call may write to it in either mode.
            with torch.inference_mode(False):
                buffer = self._buffer = torch.empty(num_elements, dtype=dtype, device=device)
        return buffer[:num_elements].view(shape)


class TorchBackend(AttentionBackend):
    """Serves causal, bidirectional and windowed attention, with soft caps, sinks, learned sink logits and biases."""

    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float64", "float32", "float16", "bfloat16"}),
        masks=frozenset({"causal", "bidirectional", "window", "sink_tokens"}),
        extensions=frozenset({SEQ_STARTS}),
        soft_cap=True,
        sinks=True,
        relative_bias=True,
        separate_value_size=True,
        takes_copies=True,
    )

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device) -> None:
        super().__init__(layers, device)
        self._key_scratch = Scratch()
        self._value_scratch = Scratch()
        self._bias_scratch = Scratch()
        self._bias_by_distance: dict[str, torch.Tensor] = {}

    def bind(self, layer: LayerSpec, parameters: Mapping[str, torch.Tensor]) -> None:
        """Keep the layer's tensors, and its bias as forward looks it up."""
        super().bind(layer, parameters)
        assert layer.query is not None
        if layer.query.relative_bias is not None:
            table = parameters[RELATIVE_BIAS]
            self._bias_by_distance[layer.name] = bias_by_distance(layer.query.relative_bias, table)

    def make_builder(self) -> TorchMetadataBuilder:
        """Return the builder of the step's pieces."""
        return TorchMetadataBuilder(self.layers[0], self.device)

    def forward(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Gather each piece's pages and attend to them."""
        assert isinstance(metadata, TorchMetadata)
        values = kv_cache["v"]
        num_tokens, num_heads, head_size = query.shape
        by_distance = self._bias_by_distance.get(layer.name)
        output = None  # behind a row for what is repeated
        for piece, pages in zip(metadata.pieces, metadata.pages, strict=True):
            num_rows = piece.num_tiles * piece.num_queries
            rows = _rows_of(query, piece).view(piece.num_tiles, piece.num_queries, num_heads, head_size)
            if piece.parts:
                result = self._attend_in_parts(layer, rows, kv_cache, piece, pages, sinks, by_distance)
            else:
                key, value = self._gather(kv_cache, pages, piece.hidden_slots, piece.num_tiles, query.dtype)
                bias = self._bias(piece, by_distance, kv_cache["k"], query.dtype)
                result = _attend(layer, rows, key, value, bias, piece.is_causal, sinks)
            result = result.reshape(num_rows, num_heads, values.shape[-1])
            if piece.first_row == 0 and num_rows == num_tokens:
                return result
            if output is None:
                output = query.new_zeros(1 + num_tokens, num_heads, values.shape[-1])
            if piece.first_row is not None:
                output[1 + piece.first_row : 1 + piece.first_row + num_rows] = result
            elif piece.output_rows is not None:
                output.index_copy_(0, piece.output_rows, result)
            elif piece.query_rows is not None:
                output[1:].index_copy_(0, piece.query_rows, result)
        return query.new_zeros(num_tokens, num_heads, values.shape[-1]) if output is None else output[1:]

    def _gather(
        self, kv_cache: KVCache, pages: torch.Tensor, hidden_slots: torch.Tensor, num_tiles: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tiles' keys and values, ``[num_tiles, num_heads, num_keys, size]`` both, strided."""
        scratches = {"k": self._key_scratch, "v": self._value_scratch}
        key, value = (
            _gather(kv_cache[name], pages, hidden_slots, num_tiles, dtype, scratch)
            for name, scratch in scratches.items()
        )
        return key, value

    def _bias(
        self, piece: Piece, by_distance: torch.Tensor | None, keys: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return what is added to the scores of folded queries, or to all alike; None for nothing."""
        bias = None if piece.mask is None else piece.mask.to(dtype)
        if piece.hides_keys:
            memory = self._bias_scratch.take((piece.num_tiles * piece.num_keys,), dtype, keys.device)
            hiding = key_bias(memory, piece.hidden_slots, piece.padded_pages, keys.shape[1])
            bias = hiding.view(piece.num_tiles, 1, 1, -1)
        if by_distance is None:
            return bias
        learned = _learned_bias(by_distance, piece, keys.shape[2]).to(dtype)
        return learned if bias is None else learned + bias

    def _attend_in_parts(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        piece: Piece,
        pages: torch.Tensor,
        sinks: torch.Tensor | None,
        by_distance: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what ``_attend`` returns for one query, without its tile's tokens being gathered all at once."""
        assert layer.query is not None
        num_kv_heads = kv_cache["k"].shape[2]
        block_size = kv_cache["k"].shape[1]
        (folded,) = _fold(query, num_kv_heads)
        columns = (folded * layer.query.scale).transpose(1, 2)
        wide = torch.float32 if query.dtype in LOW_PRECISION else query.dtype
        scores = query.new_empty(1, num_kv_heads, folded.shape[1], piece.num_keys, dtype=wide)
        for part in piece.parts:
            tokens = slice(part.first_page * block_size, part.stop_page * block_size)
            part_pages = pages[part.first_page : part.stop_page]
            (key,) = _gather(kv_cache["k"], part_pages, part.hidden_slots, 1, query.dtype, self._key_scratch)
            # Keys first: the other way round, a few rows of bfloat16 by many columns take ten times as long.
            scores[0, :, :, tokens] = torch.bmm(key, columns).transpose(1, 2)
        bias = self._bias(piece, by_distance, kv_cache["k"], wide)
        weights = _weights(layer, scores, bias, sinks)[0].to(query.dtype)
        output = query.new_zeros(num_kv_heads, folded.shape[1], kv_cache["v"].shape[-1], dtype=wide)
        for part in piece.parts:
            tokens = slice(part.first_page * block_size, part.stop_page * block_size)
            part_pages = pages[part.first_page : part.stop_page]
            (value,) = _gather(kv_cache["v"], part_pages, part.hidden_slots, 1, query.dtype, self._value_scratch)
            output += torch.bmm(weights[:, :, tokens], value)
        return output.to(query.dtype).view(1, 1, query.shape[2], -1)


def _gather(
    state: torch.Tensor,
    pages: torch.Tensor,
    hidden_slots: torch.Tensor,
    num_tiles: int,
    dtype: torch.dtype,
    scratch: Scratch,
) -> torch.Tensor:
    """Return the tiles' tokens of one state tensor, ``[num_tiles, num_heads, num_keys, size]``, strided."""
    gathered = scratch.take((pages.shape[0], *state.shape[1:]), state.dtype, state.device)
    torch.index_select(state, 0, pages, out=gathered)
    tokens = gathered.view(-1, *state.shape[2:])
    tokens.index_fill_(0, hidden_slots, 0)
    return tokens.to(dtype).view(num_tiles, -1, *state.shape[2:]).transpose(1, 2)


def _rows_of(query: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the rows of the packed batch that a piece reads."""
    if piece.first_row is not None:
        return query[piece.first_row : piece.first_row + piece.num_tiles * piece.num_queries]
    assert piece.query_rows is not None
    return query.index_select(0, piece.query_rows)


def _fold(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return ``[num_tiles, num_kv_heads, group_size * num_queries, head_size]`` of queries of one tile after another.

    A KV head's query heads become more queries of that one head, so that keys are never repeated.
    """
    num_tiles, num_queries, num_heads, head_size = query.shape
    folded = query.view(num_tiles, num_queries, num_kv_heads, num_heads // num_kv_heads, head_size)
    return folded.permute(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, -1, head_size)


def _attend(
    layer: LayerSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``[num_tiles, num_queries, num_heads, head_size_v]`` for queries of the same shape but the last."""
    assert layer.query is not None
    num_tiles, num_queries, num_heads, _ = query.shape
    num_kv_heads = key.shape[1]
    group_size = num_heads // num_kv_heads
    if is_causal:
        return scaled_dot_product_attention(
            query.transpose(1, 2), key, value, is_causal=True, scale=layer.query.scale, enable_gqa=group_size > 1
        ).transpose(1, 2)
    folded = _fold(query, num_kv_heads)
    if layer.query.soft_cap is None and sinks is None:
        result = scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=layer.query.scale)
    else:
        result = _explicit_attention(layer, folded, key, value, bias, sinks)
    result = result.view(num_tiles, num_kv_heads, group_size, num_queries, value.shape[-1])
    return result.permute(0, 3, 1, 2, 4).reshape(num_tiles, num_queries, num_heads, value.shape[-1])


def _learned_bias(by_distance: torch.Tensor, piece: Piece, num_kv_heads: int) -> torch.Tensor:
    """Return ``[num_tiles, num_kv_heads, group_size * num_queries, num_keys]`` of a piece with ``bias_columns``."""
    assert piece.bias_columns is not None
    num_heads = by_distance.shape[0]
    values = by_distance.index_select(1, piece.bias_columns)
    values = values.view(num_heads, piece.num_tiles, piece.num_queries, piece.num_keys).transpose(0, 1)
    num_rows = num_heads // num_kv_heads * piece.num_queries
    return values.reshape(piece.num_tiles, num_kv_heads, num_rows, piece.num_keys)


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
    weights = _weights(layer, scores, bias, sinks).to(query.dtype)
    return torch.stack([torch.bmm(weights[:, head], value[:, head]) for head in heads], dim=1)


def _weights(
    layer: LayerSpec, scores: torch.Tensor, bias: torch.Tensor | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return the softmax of scaled scores, ``[num_tiles, num_kv_heads, num_rows, num_keys]``, in float32 at least."""
    assert layer.query is not None
    if scores.dtype in LOW_PRECISION:
        scores = scores.float()
    if layer.query.soft_cap is not None:
        scores = scores.div_(layer.query.soft_cap).tanh_().mul_(layer.query.soft_cap)
    if bias is not None:
        scores += bias
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        # One more logit in the denominator scales every weight by the softmax's share against it.
        num_kv_heads, num_rows = scores.shape[1:3]
        logits = sinks.to(scores.dtype).view(num_kv_heads, -1, 1)
        logits = logits.expand(-1, -1, num_rows * num_kv_heads // sinks.shape[0]).reshape(1, num_kv_heads, num_rows, 1)
        weights *= torch.sigmoid(torch.logsumexp(scores, dim=-1, keepdim=True) - logits)
    return weights
