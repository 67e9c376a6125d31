"""The backend ``torch``: it gathers pages and calls torch's own attention, on any device of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder, KVCache, MoreInputs
from kvframe.contract.capabilities import Capabilities
from kvframe.contract.choice import find_chosen
from kvframe.contract.merging import lse_dtype
from kvframe.contract.metadata import RANGE_ENDS, SEQ_STARTS
from kvframe.contract.specs import LayerSpec, QuerySpec
from kvframe_torch.builder import Batch, TorchMetadata, TorchMetadataBuilder
from kvframe_torch.chosen import attend_chosen

MAX_SCRATCH_ELEMENTS = 1 << 24
"""Up to so many elements, the memory of gathered tokens is kept for the next call."""

MAX_FOLDED_QUERIES = 16
"""From more queries on, torch's attention on a CPU reads float32 keys for several query heads as fast as for one."""


class TorchBackend(AttentionBackend):
    """Serves causal, bidirectional and windowed attention, soft caps, sink tokens, learned sinks and learned biases."""

    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float64", "float32", "float16", "bfloat16"}),
        masks=frozenset({"causal", "bidirectional", "bidirectional_window", "window", "sink_tokens", "ranges"}),
        extensions=frozenset({SEQ_STARTS, RANGE_ENDS}),
        soft_cap=True,
        sinks=True,
        relative_bias=True,
        alibi=True,
        separate_value_size=True,
        takes_copies=True,
        returns_lse=True,
        choices=frozenset({"tokens", "blocks"}),
    )

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device) -> None:
        super().__init__(layers, device)
        # Calls reuse memory, because the system takes long to map new memory.
        self._scratch: dict[str, torch.Tensor] = {}
        query = layers[0].query
        slopes = None if query is None else query.alibi_slopes
        self._slopes = None if slopes is None else torch.tensor(slopes, dtype=torch.float64, device=device)

    def make_builder(self) -> AttentionMetadataBuilder:
        """Return the builder that divides a step into batches; for chosen tokens, one that keeps the step."""
        if self.layers[0].query is not None and self.layers[0].query.choice is not None:
            return super().make_builder()
        return TorchMetadataBuilder(self.layers[0], self.device)

    def attend(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        *,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        more: MoreInputs | None = None,
    ) -> torch.Tensor:
        """Compute the batches one after the other, or attention over the chosen tokens.

        Torch's own attention returns no log-sum-exp, so results with one are computed by scores.
        """
        if more is not None:
            assert more.chosen is not None
            assert layer.query is not None
            assert layer.spec is not None
            assert layer.spec.mask_function is not None
            places = find_chosen(more.chosen, metadata, layer.spec.mask_function)
            return attend_chosen(query, kv_cache, places, layer.query, sinks, out, lse)
        assert isinstance(metadata, TorchMetadata)
        assert layer.query is not None
        by_scores = lse is not None or sinks is not None or layer.query.soft_cap is not None
        # Some CPUs multiply low precision twenty times as slowly as float32.
        dtype = torch.promote_types(query.dtype, torch.float32) if by_scores else query.dtype
        output = query.new_zeros(*query.shape[:2], kv_cache["v"].shape[-1]) if out is None else out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
            if sinks is not None:
                # No batch contains a request without keys; only its sink counts.
                lse.copy_(sinks.expand_as(lse))
        num_pages = [num_tiles * of_tile for num_tiles, _, of_tile, *_ in metadata.sizes]
        for batch, pages in zip(metadata.batches(), metadata.pages.split(num_pages), strict=True):
            if batch.num_pages:
                gathered = [self._gather(kv_cache, name, pages, batch).to(dtype) for name in "kv"]
            key, value = map(batch.read, gathered)
            bias = batch.mask(dtype)
            if layer.query.relative_bias is not None:
                bias = bias + batch.learned_bias(self.bias_tables[layer.name]).to(dtype)
            if self._slopes is not None:
                bias = bias + batch.alibi_bias(self._slopes.to(lse_dtype(dtype))).to(dtype)
            queries = query.index_select(0, batch.rows).to(dtype)
            queries = queries.view(batch.num_tiles, batch.num_queries, *query.shape[1:]).transpose(1, 2)
            if by_scores:
                result, of_rows = attend_by_scores(queries, key, value, bias, layer.query, sinks)
                if lse is not None:
                    lse.index_copy_(0, batch.rows, of_rows.transpose(1, 2).flatten(0, 1))
            else:
                result = attend(queries, key, value, bias, layer.query.scale)
            output.index_copy_(0, batch.rows, result.transpose(1, 2).flatten(0, 1).to(query.dtype))
        return output

    def _gather(self, kv_cache: KVCache, name: str, pages: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the keys or values of pages, a strided view ``[num_tiles, num_kv_heads, num_keys, size]``."""
        state, scratch = kv_cache[name], self._scratch.get(name)
        shape = pages.shape[0], *state.shape[1:]
        num_elements = math.prod(shape)
        if scratch is None or scratch.shape[0] < num_elements or scratch.dtype != state.dtype:
            # A tensor made outside of inference mode can be written to in both modes.
            with torch.inference_mode(False):
                scratch = torch.empty(num_elements, dtype=state.dtype, device=state.device)
            if num_elements <= MAX_SCRATCH_ELEMENTS:
                self._scratch[name] = scratch
        gathered = torch.index_select(state, 0, pages, out=scratch[:num_elements].view(shape))
        gathered.view(-1, *state.shape[2:]).index_fill_(0, batch.dead, 0)
        return gathered.view(batch.num_tiles, -1, *state.shape[2:]).transpose(1, 2)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return attention by torch's own function, ``[num_tiles, num_heads, num_queries, head_size_v]``.

    Args:
        query: ``[num_tiles, num_heads, num_queries, head_size]``.
        key: ``[num_tiles, num_kv_heads, num_keys, head_size]``.
        value: ``[num_tiles, num_kv_heads, num_keys, head_size_v]``.
        bias: ``[num_tiles, num_heads or 1, num_queries, num_keys]``, added to the scores.
        scale: The layer's scale.
    """
    (num_tiles, num_heads, num_queries, _), num_kv_heads = query.shape, key.shape[1]
    if num_queries > MAX_FOLDED_QUERIES and query.device.type == "cpu" and query.dtype is torch.float32:
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=True)
    # The query heads of a KV head become further queries of a single head, so that keys need not be repeated.
    query = query.reshape(num_tiles, num_kv_heads, -1, query.shape[3])
    if bias.shape[1] > 1:
        bias = bias.reshape(num_tiles, num_kv_heads, -1, bias.shape[3])
    elif num_queries > 1:
        bias = bias.repeat(1, 1, num_heads // num_kv_heads, 1)
    result = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    return result.view(num_tiles, num_heads, num_queries, -1)


def attend_by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    layer: QuerySpec,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``attend`` returns, and the log-sum-exp. It serves soft caps and learned sinks, unlike torch's."""
    num_kv_heads = key.shape[1]
    folded = (query * layer.scale).reshape(query.shape[0], num_kv_heads, -1, query.shape[3])
    scores = _products(folded, key.transpose(2, 3)).view(*query.shape[:3], -1)
    if layer.soft_cap is not None:
        scores.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
    scores += bias
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        # A sink is one more logit in the denominator, so it scales every weight by the same factor.
        logits = sinks.to(scores.dtype)[:, None, None]
        weights *= torch.sigmoid(lse - logits)
        lse = torch.logaddexp(lse, logits)
    output = _products(weights.view(*folded.shape[:3], -1), value)
    return output.view(*query.shape[:3], -1), lse[..., 0]


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the matrix products of ``[num_tiles, num_kv_heads, …]`` and ``[num_tiles, num_kv_heads, …]``.

    A single product over tiles and heads would copy the keys or values, because their heads lie apart.
    """
    products = left.new_empty(*left.shape[:3], right.shape[3])
    axis = 0 if left.shape[0] < left.shape[1] else 1
    for product, *factors in zip(products.unbind(axis), left.unbind(axis), right.unbind(axis), strict=True):
        torch.bmm(*factors, out=product)
    return products
