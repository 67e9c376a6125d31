"""The torch backend: pages are gathered, and torch's own attention computes them, on any device that torch knows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvframe.contract.backend import AttentionBackend, KVCache
from kvframe.contract.capabilities import Capabilities
from kvframe.contract.merging import lse_dtype
from kvframe.contract.metadata import SEQ_STARTS
from kvframe.contract.relative_bias import RELATIVE_BIAS, bias_by_distance
from kvframe.contract.specs import LayerSpec
from kvframe_torch.builder import Batch, Mask, Part, TorchMetadata, TorchMetadataBuilder

MAX_SCRATCH_ELEMENTS = 1 << 23
"""Elements of gathered tokens whose memory is kept for the next call."""


MAX_PROMPT_QUERIES = 128
"""Queries of a whole prompt whose scores are in memory at once, if the log-sum-exp is wanted."""


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


class Reads(NamedTuple):
    """What a layer reads of a batch.

    Attributes:
        batch: The batch.
        pages: The block ids to gather.
        mask: Its mask; None if all is seen, or for prompts.
    """

    batch: Batch
    pages: torch.Tensor
    mask: Mask | None


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
        self._scratch = {"k": Scratch(), "v": Scratch()}
        self._bias_by_distance: dict[str, torch.Tensor] = {}

    def bind(self, layer: LayerSpec, parameters: Mapping[str, torch.Tensor]) -> None:
        """Keep the layer's tensors, and its bias by distance."""
        super().bind(layer, parameters)
        assert layer.query is not None
        if layer.query.relative_bias is not None:
            table = parameters[RELATIVE_BIAS]
            self._bias_by_distance[layer.name] = bias_by_distance(layer.query.relative_bias, table)

    def make_builder(self) -> TorchMetadataBuilder:
        """Return the builder of the step's batches."""
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
        """Compute one batch after the other."""
        return self._forward(layer, query, kv_cache, metadata, sinks, None)

    def forward_with_lse(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one batch after the other by its scores, because torch's own attention returns no log-sum-exp."""
        # A row more than the packed tokens, for queries that are repeated.
        lse = query.new_full((1 + query.shape[0], query.shape[1]), -math.inf, dtype=lse_dtype(query.dtype))
        if sinks is not None:
            # Requests without keys are in no batch.
            lse.copy_(sinks.expand_as(lse))
        return self._forward(layer, query, kv_cache, metadata, sinks, lse), lse[:-1]

    def _forward(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        sinks: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output, and write the log-sum-exp to ``lse: [1 + num_tokens, num_heads]`` if it is given."""
        assert isinstance(metadata, TorchMetadata)
        num_tokens, num_heads, head_size = query.shape
        output = query.new_zeros(1 + num_tokens, num_heads, kv_cache["v"].shape[-1])
        for reads in map(Reads, metadata.batches, metadata.pages, metadata.masks):
            batch = reads.batch
            first, num_rows = batch.first_row, batch.num_tiles * batch.num_queries
            rows = query.index_select(0, batch.rows) if first is None else query[first : first + num_rows]
            rows = rows.view(batch.num_tiles, batch.num_queries, num_heads, head_size)
            if lse is None:
                result = self._attend(layer, rows, kv_cache, reads, sinks)
            else:
                result, of_rows = self._attend_with_lse(layer, rows, kv_cache, reads, sinks)
                lse.index_copy_(0, batch.output_rows, of_rows.reshape(num_rows, num_heads))
            result = result.reshape(num_rows, num_heads, -1)
            if first is None:
                output.index_copy_(0, batch.output_rows, result)
            elif num_rows == num_tokens:
                return result
            else:
                output[first : first + num_rows] = result
        return output[:-1]

    def _attend(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        reads: Reads,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return ``[num_tiles, num_queries, num_heads, head_size_v]`` for queries of the same shape but the last."""
        assert layer.query is not None
        batch, (num_queries, num_heads) = reads.batch, query.shape[1:3]
        num_kv_heads, scale = kv_cache["k"].shape[2], layer.query.scale
        if batch.is_prompt:
            key, value = (self._gather(name, kv_cache, reads, batch.parts[0], query.dtype) for name in "kv")
            return scaled_dot_product_attention(
                query.transpose(1, 2), key, value, is_causal=True, scale=scale, enable_gqa=num_heads > num_kv_heads
            ).transpose(1, 2)
        folded = _folded(query, num_kv_heads)
        if layer.query.soft_cap is None and sinks is None and len(batch.parts) == 1:
            key, value = (self._gather(name, kv_cache, reads, batch.parts[0], query.dtype) for name in "kv")
            bias = self._bias(layer, reads, num_kv_heads, query.dtype)
            result = scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scale)
        else:
            result, _ = self._attend_by_scores(layer, folded, kv_cache, reads, sinks)
        return _unfolded(result, num_queries)

    def _attend_with_lse(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        reads: Reads,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what ``_attend`` returns, and ``[num_tiles, num_queries, num_heads]``, also in five dimensions."""
        num_queries, num_kv_heads = query.shape[1], kv_cache["k"].shape[2]
        # A whole prompt has no mask, and may be long: some of its queries are computed at a time.
        is_prompt = reads.batch.is_prompt
        size = MAX_PROMPT_QUERIES if is_prompt else num_queries
        outputs, lses = [], []
        for start in range(0, num_queries, size):
            some = query[:, start : start + size]
            folded, first = _folded(some, num_kv_heads), start if is_prompt else None
            output, lse = self._attend_by_scores(layer, folded, kv_cache, reads, sinks, first)
            outputs.append(_unfolded(output, some.shape[1]))
            lses.append(_unfolded(lse, some.shape[1]))
        return torch.cat(outputs, dim=1), torch.cat(lses, dim=1)

    def _attend_by_scores(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        reads: Reads,
        sinks: torch.Tensor | None,
        first: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention over keys and values that are gathered part by part, with a soft cap and learned sinks.

        Args:
            layer: The layer.
            query: ``[num_tiles, num_kv_heads, num_rows, head_size]``.
            kv_cache: The layer's state tensors.
            reads: The batch.
            sinks: ``[num_heads]`` or None.
            first: Of a batch of whole prompts, the position of the first of these queries; None for other batches.

        Returns:
            ``[num_tiles, num_kv_heads, num_rows, head_size_v]``, and its log-sum-exp, with 1 in place of the size.
        """
        assert layer.query is not None
        batch, dtype, num_kv_heads, num_rows = reads.batch, query.dtype, *query.shape[1:3]
        group_size = layer.query.num_heads // num_kv_heads
        # Also for low precision: some CPUs multiply its matrices twenty times as slowly.
        query = query.to(torch.promote_types(dtype, torch.float32)) * layer.query.scale
        scores = query.new_zeros(*query.shape[:3], batch.num_keys)
        for part, tokens in _parts(batch, kv_cache["k"].shape[1]):
            key = self._gather("k", kv_cache, reads, part, query.dtype)
            _add_products(scores[..., tokens], query, key.transpose(2, 3))
        if layer.query.soft_cap is not None:
            scores.div_(layer.query.soft_cap).tanh_().mul_(layer.query.soft_cap)
        bias = self._bias(layer, reads, num_kv_heads, query.dtype)
        if bias is not None:
            scores += bias
        if first is not None:
            positions = torch.arange(first, first + num_rows // group_size, device=scores.device).repeat(group_size)
            keys = torch.arange(batch.num_keys, device=scores.device)
            scores.masked_fill_(keys > positions[:, None], -math.inf)
        weights = torch.softmax(scores, dim=-1)
        lse = torch.logsumexp(scores, dim=-1, keepdim=True)
        if sinks is not None:
            # One more logit in the denominator scales every weight by the softmax's share against it.
            logits = sinks.to(query.dtype).view(num_kv_heads, -1, 1)
            logits = logits.expand(-1, -1, num_rows // logits.shape[1]).reshape(num_kv_heads, num_rows, 1)
            weights *= torch.sigmoid(lse - logits)
            lse = torch.logaddexp(lse, logits)
        output = query.new_zeros(*query.shape[:3], kv_cache["v"].shape[-1])
        for part, tokens in _parts(batch, kv_cache["v"].shape[1]):
            value = self._gather("v", kv_cache, reads, part, query.dtype)
            _add_products(output, weights[..., tokens], value)
        return output.to(dtype), lse

    def _gather(self, name: str, kv_cache: KVCache, reads: Reads, part: Part, dtype: torch.dtype) -> torch.Tensor:
        """Return a part of the tiles' keys or values, ``[num_tiles, num_kv_heads, num_keys, size]``, strided."""
        state, pages = kv_cache[name], reads.pages[part.first_page : part.stop_page]
        gathered = self._scratch[name].take((pages.shape[0], *state.shape[1:]), state.dtype, state.device)
        torch.index_select(state, 0, pages, out=gathered)
        tokens = gathered.view(-1, *state.shape[2:]).index_fill_(0, part.dead_slots, 0)
        return tokens.to(dtype).view(reads.batch.num_tiles, -1, *state.shape[2:]).transpose(1, 2)

    def _bias(self, layer: LayerSpec, reads: Reads, num_kv_heads: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what is added to the scores of folded queries, or to all alike; None for nothing."""
        batch, mask = reads.batch, reads.mask
        if mask is None:
            return None
        if mask.bias_columns is None:
            return mask.values.to(dtype)
        by_distance = self._bias_by_distance[layer.name]
        values = by_distance.index_select(1, mask.bias_columns).to(dtype)
        values = values.view(-1, batch.num_tiles, batch.num_queries, batch.num_keys).transpose(0, 1)
        return values.reshape(batch.num_tiles, num_kv_heads, -1, batch.num_keys) + mask.values.to(dtype)


def _parts(batch: Batch, block_size: int) -> list[tuple[Part, slice]]:
    """Return each part of a batch, and the gathered tokens of each tile that it holds."""
    pages = batch.num_tiles
    return [
        (part, slice(part.first_page * block_size // pages, part.stop_page * block_size // pages))
        for part in batch.parts
    ]


def _add_products(output: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add matrix products to ``output``, ``[num_tiles, num_kv_heads, …]`` all three.

    One product over tiles and heads at once would copy the keys or values, whose heads lie apart.
    """
    axis = 0 if output.shape[0] < output.shape[1] else 1
    for total, one, other in zip(output.unbind(axis), left.unbind(axis), right.unbind(axis), strict=True):
        total += torch.bmm(one, other)


def _folded(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return ``[num_tiles, num_kv_heads, group_size * num_queries, head_size]`` of queries by tile.

    The query heads of a KV head become more queries of that one head, so that keys are never repeated.
    """
    num_tiles, num_queries, _, head_size = query.shape
    folded = query.view(num_tiles, num_queries, num_kv_heads, -1, head_size).permute(0, 2, 3, 1, 4)
    return folded.reshape(num_tiles, num_kv_heads, -1, head_size)


def _unfolded(result: torch.Tensor, num_queries: int) -> torch.Tensor:
    """Return ``[num_tiles, num_queries, num_kv_heads, group_size, size]`` of what was computed for folded queries."""
    num_tiles, num_kv_heads, _, size = result.shape
    return result.view(num_tiles, num_kv_heads, -1, num_queries, size).permute(0, 3, 1, 2, 4)
