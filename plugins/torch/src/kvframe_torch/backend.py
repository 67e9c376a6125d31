"""The torch backend: pages are gathered, and torch's own attention computes them, on any device that torch knows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvframe.contract.backend import AttentionBackend, KVCache
from kvframe.contract.capabilities import Capabilities
from kvframe.contract.merging import lse_dtype
from kvframe.contract.metadata import SEQ_STARTS
from kvframe.contract.relative_bias import bias_columns
from kvframe.contract.specs import LayerSpec, QuerySpec
from kvframe_torch.builder import TorchMetadata, TorchMetadataBuilder
from kvframe_torch.chunks import ChunkMasks

MAX_SCRATCH_ELEMENTS = 1 << 24
"""Elements of gathered tokens whose memory is kept for the next call."""


class Scratch:
    """Memory that each call of a layer gathers into: the system takes long to map new pages.

    Invariant: only the tensor that ``take`` returned last is in use.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor."""
        num_elements = math.prod(shape)
        if num_elements > MAX_SCRATCH_ELEMENTS:
            return torch.empty(shape, dtype=dtype, device=device)
        buffer = self._buffer
        if buffer.shape[0] < num_elements or buffer.dtype != dtype:
            # Outside of inference mode, so that a later call may write to it in either mode.
            with torch.inference_mode(False):
                buffer = self._buffer = torch.empty(num_elements, dtype=dtype, device=device)
        return buffer[:num_elements].view(shape)


class Part(NamedTuple):
    """What one call computes: a batch, or a tile of a chunk.

    Attributes:
        rows: The packed tokens that are its queries: a slice, or ``[num_requests * num_queries], int64, device``.
        query: ``[num_requests, num_queries, num_heads, head_size]``.
        key: ``[num_requests, num_kv_heads, num_keys, head_size]``. It stays as it is until the next part is made.
        value: ``[num_requests, num_kv_heads, num_keys, head_size_v]``. Likewise.
        bias: What is added to the scores of folded queries, of a shape that expands to theirs; None for nothing.
        is_prompt: Whether query ``i`` sees the keys ``[0, i]``, and there is no bias that says so.
    """

    rows: slice | torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    is_prompt: bool = False


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
        returns_lse=True,
    )

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device) -> None:
        super().__init__(layers, device)
        assert layers[0].query is not None
        bias = layers[0].query.relative_bias
        self._max_distance = None if bias is None else bias.max_distance
        self._masks = ChunkMasks(layers[0], device)
        self._scratch = {"k": Scratch(), "v": Scratch()}

    def make_builder(self) -> TorchMetadataBuilder:
        """Return the builder of the step's batches and chunks."""
        return TorchMetadataBuilder(self.layers[0], self.device)

    def forward(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute one batch after the other, then one chunk after the other."""
        return self._forward(layer, query, kv_cache, metadata, sinks, out=out)

    def forward_with_lse(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the same by scores, because torch's own attention returns no log-sum-exp."""
        lse = query.new_full(query.shape[:2], -math.inf, dtype=lse_dtype(query.dtype))
        if sinks is not None:
            # Requests without keys are in no batch.
            lse.copy_(sinks.expand_as(lse))
        return self._forward(layer, query, kv_cache, metadata, sinks, lse=lse), lse

    def _forward(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        sinks: torch.Tensor | None,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output, and write the log-sum-exp to ``lse: [num_tokens, num_heads]`` if it is given."""
        assert isinstance(metadata, TorchMetadata)
        assert layer.query is not None
        by_scores = lse is not None or sinks is not None or layer.query.soft_cap is not None
        output = query.new_zeros(*query.shape[:2], kv_cache["v"].shape[-1]) if out is None else out.zero_()
        for part in self._parts(layer, query, kv_cache, metadata, by_scores):
            if by_scores:
                result, of_rows = _attend_by_scores(part, layer.query, sinks)
                if lse is not None:
                    lse[part.rows] = of_rows
            else:
                result = _attend(part, layer.query.scale)
            output[part.rows] = result
        return output

    def _parts(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: TorchMetadata, by_scores: bool
    ) -> Iterator[Part]:
        """Yield what is to be computed, batch after batch and tile after tile."""
        num_kv_heads, block_size = kv_cache["k"].shape[2], metadata.block_size
        for batch in metadata.batches:
            num_pages = batch.num_requests * batch.num_pages
            pages = metadata.pages[batch.first_page : batch.first_page + num_pages]
            dead = metadata.dead[batch.first_dead : batch.first_dead + batch.num_dead]
            key, value = (self._gather(kv_cache, name, pages, dead, batch.num_requests) for name in "kv")
            tokens, bias = slice(batch.first_page * block_size, (batch.first_page + num_pages) * block_size), None
            if metadata.mask is not None:
                bias = metadata.mask[tokens].view(batch.num_requests, 1, 1, -1).to(query.dtype)
            if metadata.bias_columns is not None:
                columns = metadata.bias_columns[tokens].view(batch.num_requests, 1, -1)
                bias = self._learned_bias(layer, columns, num_kv_heads, query.dtype, bias)
            rows = metadata.rows[batch.first_row : batch.first_row + batch.num_requests]
            of_rows = query.index_select(0, rows).unsqueeze(1)
            yield Part(rows, of_rows, key.to(query.dtype), value.to(query.dtype), bias)
        dtype = _score_dtype(query.dtype) if by_scores else query.dtype
        for chunk in metadata.chunks:
            pages = metadata.pages[chunk.first_page : chunk.first_page + chunk.num_pages]
            keys, values = (self._gather(kv_cache, name, pages, None, 1).to(dtype) for name in "kv")
            is_prompt = metadata.causal and not by_scores and self._masks.is_prompt(chunk)
            for tile in self._masks.tiles(chunk, metadata.causal, is_prompt):
                bias = self._masks.mask(tile, dtype) if metadata.causal and not is_prompt else None
                if self._max_distance is not None:
                    columns = bias_columns(tile.distances(query.device), self._max_distance)
                    bias = self._learned_bias(layer, columns.unsqueeze(0), num_kv_heads, dtype, bias)
                some = slice(chunk.first_row + tile.first, chunk.first_row + tile.stop)
                key, value = tile.cut(keys, chunk), tile.cut(values, chunk)
                yield Part(some, query[some].unsqueeze(0), key, value, bias, is_prompt)

    def _gather(
        self, kv_cache: KVCache, name: str, pages: torch.Tensor, dead: torch.Tensor | None, num_requests: int
    ) -> torch.Tensor:
        """Return the keys or values of pages, ``[num_requests, num_kv_heads, num_keys, size]``, strided."""
        state = kv_cache[name]
        gathered = self._scratch[name].take((pages.shape[0], *state.shape[1:]), state.dtype, state.device)
        torch.index_select(state, 0, pages, out=gathered)
        if dead is not None:
            gathered.view(-1, *state.shape[2:]).index_fill_(0, dead, 0)
        return gathered.view(num_requests, -1, *state.shape[2:]).transpose(1, 2)

    def _learned_bias(
        self,
        layer: LayerSpec,
        columns: torch.Tensor,
        num_kv_heads: int,
        dtype: torch.dtype,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return a layer's bias for ``columns: [num_requests, num_queries, num_keys]``, with a mask added to it."""
        values = self.bias_tables[layer.name].index_select(1, columns.view(-1)).to(dtype)
        bias = _folded(values.view(-1, *columns.shape).permute(1, 2, 0, 3), num_kv_heads)
        return bias if mask is None else bias + mask


def _attend(part: Part, scale: float) -> torch.Tensor:
    """Return a part's attention, ``[num_requests * num_queries, num_heads, head_size_v]``."""
    num_kv_heads = part.key.shape[1]
    if part.is_prompt:
        is_grouped = part.query.shape[2] > num_kv_heads
        query = part.query.transpose(1, 2)
        result = scaled_dot_product_attention(
            query, part.key, part.value, is_causal=True, scale=scale, enable_gqa=is_grouped
        )
        return result[0].transpose(0, 1)
    query = _folded(part.query, num_kv_heads)
    result = scaled_dot_product_attention(query, part.key, part.value, attn_mask=part.bias, scale=scale)
    return _unfolded(result, part.query.shape[1])


def _attend_by_scores(part: Part, layer: QuerySpec, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same and its log-sum-exp, with a soft cap and learned sinks: what torch's own attention has not."""
    dtype, num_kv_heads, num_queries = _score_dtype(part.query.dtype), part.key.shape[1], part.query.shape[1]
    query = _folded(part.query.to(dtype) * layer.scale, num_kv_heads)
    scores = _products(query, part.key.to(dtype).transpose(2, 3))
    if layer.soft_cap is not None:
        scores.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
    if part.bias is not None:
        scores += part.bias
    weights = torch.softmax(scores, dim=-1)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    if sinks is not None:
        # One more logit in the denominator scales every weight by the softmax's share against it.
        logits = sinks.to(dtype).view(num_kv_heads, 1, -1).expand(-1, num_queries, -1).reshape(num_kv_heads, -1, 1)
        weights *= torch.sigmoid(lse - logits)
        lse = torch.logaddexp(lse, logits)
    output = _products(weights, part.value.to(dtype))
    return _unfolded(output, num_queries).to(part.query.dtype), _unfolded(lse, num_queries)[..., 0]


def _score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, not a low precision: some CPUs multiply its matrices twenty times as slowly."""
    return torch.promote_types(dtype, torch.float32)


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return matrix products, ``[num_requests, num_kv_heads, …]`` all three.

    One product over requests and heads at once would copy the keys or values, whose heads lie apart.
    """
    products = left.new_empty(*left.shape[:3], right.shape[3])
    axis = 0 if left.shape[0] < left.shape[1] else 1
    for product, *factors in zip(products.unbind(axis), left.unbind(axis), right.unbind(axis), strict=True):
        torch.bmm(*factors, out=product)
    return products


def _folded(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return ``[num_requests, num_kv_heads, num_queries * group_size, head_size]`` of queries by request.

    The query heads of a KV head become more queries of that one head, so that keys are never repeated.
    """
    num_requests, num_queries, _, head_size = query.shape
    folded = query.reshape(num_requests, num_queries, num_kv_heads, -1, head_size).transpose(1, 2)
    return folded.reshape(num_requests, num_kv_heads, -1, head_size)


def _unfolded(result: torch.Tensor, num_queries: int) -> torch.Tensor:
    """Return ``[num_requests * num_queries, num_heads, size]`` of what was computed for folded queries."""
    num_requests, num_kv_heads, _, size = result.shape
    unfolded = result.view(num_requests, num_kv_heads, num_queries, -1, size).transpose(1, 2)
    return unfolded.reshape(num_requests * num_queries, -1, size)
